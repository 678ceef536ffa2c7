"""Deleted objects are freed at once: without Python's cycle collector, which may run much later.

On a GPU weights, captured graphs and their memory hang on it.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from case_choice import covering
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import cut, data, dense, mse, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.link_speed import measure_transfers
from pipesim.errors import ExecutionError, PipeError


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Switch the cycle collector off."""
    sgd([nn.Parameter(torch.ones(1))])  # torch's first one leaves frames of its caller in a cycle
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["cpu", "cuda"])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return two CPU workers, or two GPUs of the stand-in."""
    if request.param == "cpu":
        return ["cpu", "cpu"]
    FakeCuda().install(monkeypatch)
    return [FakeGpu(), FakeGpu()]


def _graph(schedule: str = "1f1b", **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, n_devices=2, n_microbatches=4), **options)


def _new(devices: list[Any], stages: list[Any] | None = None) -> px.Pipeline:
    stages = stages or cut(dense(2), [1, 1])
    return px.Pipeline(stages, _graph(), devices, mse, sgd, pin_threads=False)


def _nothing(subject: px.Pipeline) -> object:
    return None


def _step(subject: px.Pipeline) -> object:
    return subject.step(*data(8))  # which the caller keeps


def _other_graph(subject: px.Pipeline) -> object:
    other = subject.with_graph(_graph("gpipe", recompute="always"))
    other.step(*data(8))
    return other.step(*data(8)).timeline


def _counted(subject: px.Pipeline) -> object:
    return subject.device_bytes(*data(8))


def _calibrated(subject: px.Pipeline) -> object:
    calibration = Calibration(subject, *data(8))
    calibration.warm_up(1)
    calibration.step()
    return calibration.result()


def _closed(subject: px.Pipeline) -> object:
    subject.step(*data(8))
    subject.close()
    return None


def _evaluated(subject: px.Pipeline) -> object:
    kept: list[Any] = []
    for seed in range(2):
        inputs, targets = data(8, seed=seed)
        kept += [subject.step(inputs, targets), subject.evaluate(inputs, targets)]
        kept.append(subject.predict(inputs))
    return kept


def _accumulated(subject: px.Pipeline) -> object:
    return [subject.step(*data(8), accumulate=k < 2) for k in range(3)]


def _trained(subject: px.Pipeline) -> object:
    return px.train(subject, [data(8), data(8)], evaluation=[data(8)], progress=False)


USES = [
    _nothing, _step, _other_graph, _counted, _calibrated, _closed, _evaluated, _accumulated,
    _trained,
]  # fmt: skip


def _held(subject: px.Pipeline) -> dict[str, weakref.ref[Any]]:
    """Return weak references to a pipeline and all that hangs on it."""
    objects: dict[str, Any] = {"pipeline": subject}
    for number, stage in enumerate(subject.stages):
        objects |= {f"stage {number}": stage, f"module {number}": stage.module}
        for name, parameter in stage.module.named_parameters():
            objects[f"{number}.{name}"] = parameter
    for device in subject.devices:
        objects |= {f"{device.name} {number}": x for number, x in enumerate([device])}
        for key, stream in device._streams.items():  # type: ignore[attr-defined]
            objects[f"{device.name} {key}"] = stream
    return {name: weakref.ref(x) for name, x in objects.items()}


def _alive(held: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in held.items() if reference() is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "use"), covering(product(["cuda", "cpu"], USES)), indirect=["devices"]
)
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
def test_a_pipeline_is_freed(
    devices: list[Any], use: Callable[[px.Pipeline], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its stages, weights, devices, streams; whatever was done, and its result kept."""
    timed = partial(measure_transfers, sizes=[64], repeat=1)
    monkeypatch.setattr(sys.modules["pipeexec.profiling.calibration"], "measure_transfers", timed)
    subject = _new(devices)
    kept = use(subject)
    held = _held(subject)
    devices.clear()
    del subject
    assert _alive(held) == []
    del kept


def _used(
    devices: list[Any],
    graph: ps.TaskGraph,
    stages: Any = None,
    loss_fn: Any = mse,
    batch: Any = None,
    **options: Any,
) -> tuple[px.Pipeline, object]:
    """Return a pipeline after steps, an evaluation and a prediction; and the results."""
    inputs, targets = batch or data(8)
    stages = stages or cut(dense(2), [1, 1])
    subject = px.Pipeline(stages, graph, devices, loss_fn, sgd, pin_threads=False, **options)
    results = [subject.step(inputs, targets) for _ in range(2)]
    evaluated, outputs = subject.evaluate(inputs, targets), subject.predict(inputs)
    return subject, (results, evaluated, outputs, subject.step(inputs, targets))


def _loss_of_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squared errors, and how many they are."""
    return (output - target).square().sum(), torch.tensor(float(output.numel()))


def _experts() -> list[nn.Module]:
    """Return the stage of a device, which has a layer with experts."""
    layer = px.Experts(lambda: nn.Linear(16, 16), 16, 4, 2, residual=True)
    return [nn.Sequential(nn.Linear(16, 16), layer)]


def _of_slices(devices: list[Any], **options: Any) -> tuple[px.Pipeline, object]:
    """Return a pipeline of a transformer, whose sequences are cut in two slices."""
    layers = gpt(n_layers=2, d_model=16, n_heads=2, sequence=8)
    graph = ps.lower(ps.schedule("seq1f1b", 2, 4, n_slices=2), **options)
    tokens = torch.ones(8, 8, dtype=torch.long)
    return _used(devices, graph, [layers[:2], layers[2:]], cross_entropy, (tokens, tokens))


def _tied(devices: list[Any]) -> tuple[px.Pipeline, object]:
    """Return a pipeline whose stages have one matrix in common."""
    stages = [nn.Linear(16, 16), nn.Linear(16, 16)]
    stages[1].weight.data.copy_(stages[0].weight)
    names = [(0, "weight"), (1, "weight")]
    return _used(devices, _graph(tied=[(0, 1)]), stages, tied=[names])


FEATURES: dict[str, Callable[[list[Any]], tuple[px.Pipeline, object]]] = {
    "clipped": lambda devices: _used(devices, _graph(grad_norm=True), max_grad_norm=0.1),
    "scaled": lambda devices: _used(
        devices, _graph(grad_norm=True), grad_scaler=torch.amp.GradScaler("cpu")
    ),
    "counted": lambda devices: _used(devices, _graph(), loss_fn=_loss_of_sum),
    "tied": _tied,
    "replicas, clipped": lambda devices: _used(
        devices,
        ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync="every", grad_norm=True),
        [dense(2)],
        max_grad_norm=0.1,
    ),
    "experts": lambda devices: _used(
        devices, ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, expert_layers=1), _experts()
    ),
    "experts, zb_h1, clipped": lambda devices: _used(
        devices,
        ps.lower(ps.schedule("zb_h1", 1, 4), n_replicas=2, expert_layers=1, grad_norm=True),
        _experts(),
        max_grad_norm=0.1,
    ),
    "offload": lambda devices: _used(devices, _graph("gpipe", offload="all")),
    "offload, zb_h1": lambda devices: _used(devices, _graph("zb_h1", offload=0.5)),
    "offload, recompute": lambda devices: _used(
        devices, _graph("gpipe", offload="all", recompute="always")
    ),
    "slices": _of_slices,
    "slices, recompute": partial(_of_slices, recompute="always"),
    "slices, offload": partial(_of_slices, offload="all"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "feature"), covering(product(["cuda", "cpu"], FEATURES)), indirect=["devices"]
)
@pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning")
@pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")
def test_a_pipeline_of_a_feature_is_freed(devices: list[Any], feature: str) -> None:
    """With its stages, weights, devices and streams; and without its results, all tensors are."""
    gc.collect(0)  # what there is leaves the youngest generation
    witness = torch.ones(7)
    subject, kept = FEATURES[feature](devices)
    held = _held(subject)
    devices.clear()
    del subject
    assert _alive(held) == []
    del kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn of being looked at
        new = gc.get_objects(generation=0)
        left = [tuple(x.shape) for x in new if issubclass(type(x), Tensor)]
    assert left == [witness.shape]


def test_a_pipeline_of_split_stages_is_freed(devices: list[Any]) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    stages = px.split(model, 2, sample=torch.zeros(4, 16))
    subject, _ = _used(devices, _graph(), stages)
    held = _held(subject)
    devices.clear()
    del subject, stages, model
    assert _alive(held) == []


class Raises(nn.Linear):
    """Raises a new error in one forward, which nothing but its traceback holds."""

    def __init__(self, kind: type[BaseException], position: int) -> None:
        super().__init__(16, 16)
        self.kind, self.left = kind, position

    def forward(self, x: Tensor) -> Tensor:
        """Raise, or compute."""
        self.left -= 1
        if self.left == -1:
            raise self.kind("no")
        return super().forward(x)


@pytest.mark.parametrize("forward", [2, 5])
def test_a_pipeline_is_freed_after_an_error(devices: list[Any], forward: int) -> None:
    """In the first step, or the second; the exception was dropped."""
    subject = _new(devices, [nn.Linear(16, 16), Raises(ValueError, forward)])
    held = _held(subject)
    for _ in range(2):
        with suppress(PipeError):
            subject.step(*data(8))
    held |= _held(subject)
    devices.clear()
    del subject
    assert _alive(held) == []


def test_a_pipeline_is_freed_after_an_interrupt(devices: list[Any]) -> None:
    subject = _new(devices, [nn.Linear(16, 16), Raises(KeyboardInterrupt, 2)])
    held = _held(subject)
    with suppress(PipeError, KeyboardInterrupt):
        subject.step(*data(8))
    devices.clear()
    del subject
    assert _alive(held) == []


def test_a_module_is_freed(devices: list[Any]) -> None:
    """A GPipe, after a forward and its backward, and after a forward alone."""
    model = px.GPipe(nn.Sequential(*dense(2)), [1, 1], devices=devices, chunks=2)
    for goes_back in (True, False):
        loss = mse(model(data(8)[0]), data(8)[1])
        if goes_back:
            loss.backward()
        del loss
    held = {name: weakref.ref(x) for name, x in model.named_parameters()}
    runtime = model._runtime
    assert runtime is not None
    held |= {f"device {i}": weakref.ref(x) for i, x in enumerate(runtime.devices)}
    devices.clear()
    del model, runtime
    assert _alive(held) == []


def test_a_closed_pipeline_is_closed(devices: list[Any]) -> None:
    """Nothing is left of a step; another one is refused as before."""
    subject = _new(devices)
    subject.step(*data(8))
    subject.close()
    with pytest.raises(ExecutionError, match="the pipeline is closed"):
        subject.step(*data(8))


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in capture steps."""
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr("pipeexec.executor.step_capture.check_can_capture", lambda *_: None)
    monkeypatch.setattr("pipeexec.executor.step_capture.check_state", lambda *_: None)


@pytest.mark.usefixtures("_captures")
def test_a_closed_pipeline_lets_go_of_its_graphs() -> None:
    """The captured steps, with their memory, of it and of those that share its devices."""
    devices = [FakeGpu(), FakeGpu()]
    subject = px.Pipeline(
        cut(dense(2), [1, 1]), _graph(), devices, mse, sgd, cuda_graph=True, pin_threads=False
    )
    other = subject.with_graph(_graph("gpipe"))
    graphs = []
    for trained in (subject, other):
        for _ in range(3):
            trained.step(*data(8))
        assert trained._runner.capture is not None
        assert trained._runner.capture._captured is not None
        captured = trained._runner.capture._captured
        graphs += [weakref.ref(captured.graph), weakref.ref(captured.step)]
        del captured
    subject.close()
    assert [reference for reference in graphs if reference() is not None] == []
    with pytest.raises(ExecutionError, match="the pipeline is closed"):
        other.step(*data(8))


@pytest.mark.usefixtures("_captures")
def test_a_pipeline_of_graphs_is_freed() -> None:
    stages = cut(dense(2), [1, 1])
    subject = px.Pipeline(stages, _graph(), [FakeGpu(), FakeGpu()], mse, sgd, cuda_graph=True)
    for _ in range(4):
        subject.step(*data(8))
    held = _held(subject)
    assert subject._runner.capture is not None
    assert subject._runner.capture._captured is not None
    held |= {
        "captured": weakref.ref(subject._runner.capture),
        "graph": weakref.ref(subject._runner.capture._captured.graph),
        "run": weakref.ref(subject._runner.capture._captured.step),
    }
    del subject, stages
    assert _alive(held) == []

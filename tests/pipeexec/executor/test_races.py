"""No two streams of a GPU race, and no memory is freed that another stream may use.

On the stand-in for CUDA: torch's sanitizer, fed with its events and waits, says what is ordered.
Where each replica of a stage is on a separate GPU, parameters do not show it on the stand-in, for
which all memory is the host's; so graphs with replicas run on slices of one GPU alone.
`test_feature_races.py` has experts, offloaded activations, evaluations and others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_choice import covering
from fake_cuda import FakeEvent, FakeGpu, FakeStream
from gpipe_models import Pop, Stash
from sanitizing import check, pipeline_on_slices, sanitized
from small_pipelines import Faulty, cut, data, dense, mse, sgd
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.cuda import CudaDevice, CudaEvent, CudaStream
from pipeexec.executor.step_capture import Recorder
from pipeexec.gpipe.skip import Namespace
from pipeexec.profiling.calibration import Calibration
from pipesim.errors import StageError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

#: Schedules that need more than 2 devices or 4 micro-batches: devices, micro-batches.
SIZES = {"dualpipe": (4, 8), "chimera": (4, 4)}
#: One of each kind: of placement, of backward, of updates within a step.
SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "hanayo", "zb_h1", "zbv", "chimera",
    "dualpipe", "dualpipev", "pipedream", "pipedream_2bw",
)  # fmt: skip
switched = pytest.mark.parametrize("overlap", [True, False])


def scheduled(schedule: str) -> ps.Schedule:
    """Return a small schedule."""
    return ps.schedule(schedule, *SIZES.get(schedule, (2, 4)))


def run_steps(subject: px.Pipeline, n: int = 2) -> None:
    """Run one step after another: the second writes memory that the first released."""
    for seed in range(n):
        assert subject.step(*data(16, seed=seed)).timeline.complete


# Pipelines


@pytest.mark.parametrize(
    ("schedule", "overlap"),
    [(name, True) for name in SCHEDULES]
    + [(name, False) for name in ("1f1b", "zb_h1", "zbv", "chimera")],
)
def test_schedules_on_slices(monkeypatch: pytest.MonkeyPatch, schedule: str, overlap: bool) -> None:
    with sanitized(monkeypatch) as watch:
        run_steps(pipeline_on_slices(ps.lower(scheduled(schedule), overlap=overlap)))
    check(watch)


@switched
@pytest.mark.parametrize("schedule", ["gpipe", "zbv", "pipedream"])
def test_schedules_on_two_gpus(
    monkeypatch: pytest.MonkeyPatch, schedule: str, overlap: bool
) -> None:
    """Messages are copies, and each GPU has a stream of the caller."""
    with sanitized(monkeypatch) as watch:
        run_steps(pipeline_on_slices(ps.lower(scheduled(schedule), overlap=overlap), gpus=True))
    check(watch)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "always"},
        {"recompute": "except_last", "recompute_waits": True, "overlap": False},
        {"recompute": "always", "recompute_first": True},
        {"streams": "single"},
        {"streams": "per_microbatch"},
        {"rendezvous": True},
        {"step": "none"},
    ],
    ids=str,
)
def test_lowered_otherwise(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    optimizer = None if "step" in options else sgd
    with sanitized(monkeypatch) as watch:
        run_steps(pipeline_on_slices(ps.lower(scheduled("gpipe"), **options), optimizer=optimizer))
    check(watch)


@pytest.mark.parametrize(
    ("mode", "n_devices", "overlap"),
    covering(itertools.product(("last", "every", 2, "bucketed"), (1, 2), (True, False))),
)
def test_replicas(
    monkeypatch: pytest.MonkeyPatch, mode: Any, n_devices: int, overlap: bool
) -> None:
    """Gradients are reduced on streams of their own; parameters are made anew by each step."""
    schedule = ps.schedule("1f1b", n_devices, 4 if mode == 2 else 2)
    graph = ps.lower(schedule, n_replicas=2, grad_sync=mode, n_buckets=2, overlap=overlap)
    stages = cut(dense(2 * n_devices), [2] * n_devices)
    with sanitized(monkeypatch) as watch:
        run_steps(px.Pipeline(stages, graph, [FakeGpu() for _ in range(2 * n_devices)], mse, sgd))
    check(watch)


class _Summed(nn.Module):
    """A layer behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.linear(dense + vectors.flatten(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exchange_work": "compute", "prefetch_keys": True},
        {"sparse_grad_sync": "last"},
        {"exchange_work": "compute", "sparse_grad_sync": "last"},
    ],
)
def test_a_sharded_embedding_of_one_process(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exchanges have one member, but still run on a separate stream."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), sharded=[0], **options)
    torch.manual_seed(0)
    embedding = px.ShardedEmbedding.from_full([torch.rand(8, 4)])
    dense_part, keys = torch.rand(16, 4), torch.randint(8, (16, 1))
    with sanitized(monkeypatch) as watch:
        stages = [px.EmbeddingStage(embedding), _Summed()]
        subject = px.Pipeline(stages, graph, [FakeGpu(), FakeGpu()], mse, sgd)
        for _ in range(2):
            subject.step((dense_part, keys), torch.rand(16, 4))
    check(watch)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "pipedream"])
def test_a_calibration(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Pipelines of other graphs share its stages, streams and memory, and give weights back."""
    with sanitized(monkeypatch) as watch:
        subject = pipeline_on_slices(ps.lower(scheduled(schedule)))
        subject.step(*data(16))
        calibration = Calibration(subject, *data(16))
        calibration.warm_up(1)
        calibration.step()
        run_steps(subject, 1)
    check(watch)


def test_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its remaining tensors are freed while streams may still use them."""
    layers = [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), Faulty(ValueError(), forward=2))]
    with sanitized(monkeypatch) as watch:
        subject = px.Pipeline(layers, ps.lower(scheduled("1f1b")), [FakeGpu(), FakeGpu()], mse, sgd)
        with pytest.raises(StageError):
            subject.step(*data(16))
        run_steps(subject)
    check(watch)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv", "chimera"])
def test_a_capture(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """The streams of a graph fork from the first one, and join it."""
    recorder = Recorder(torch.device("cpu"))

    def walk(run: Any, tasks: Any) -> None:
        recorder.launch(recorder.record(run, tasks))

    with sanitized(monkeypatch) as watch:
        subject = pipeline_on_slices(ps.lower(scheduled(schedule)), optimizer=None)
        run_steps(subject, 1)
        subject._runner.run(*data(16), walk)
    check(watch)


# The GPipe module


def gpipe(gpus: bool = False, **options: Any) -> px.GPipe:
    """Return a module on three devices, with a skip over the second."""
    torch.manual_seed(0)
    name = Namespace()
    layers = [
        nn.Linear(16, 16), Stash().isolate(name), nn.Linear(16, 16), nn.Tanh(),
        Pop().isolate(name), nn.Linear(16, 16),
    ]  # fmt: skip
    devices = [FakeGpu(index, index if gpus else None) for index in range(3)]
    return px.GPipe(nn.Sequential(*layers), [2, 2, 2], devices=devices, chunks=4, **options)


def train(model: px.GPipe, *, input_grad: bool = True, n: int = 2) -> None:
    """Run steps as a user does: what goes in and comes out is of the caller's stream."""
    optimizer = sgd(model.parameters())
    for seed in range(n):
        x, y = data(8, seed=seed)
        inputs = (x * 1.0).requires_grad_(input_grad)
        mse(model(inputs), y.to(model.devices[-1])).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("checkpoint", "portals", "dependencies", "copy_streams"),
    covering(itertools.product(("always", "except_last", "never"), *[(True, False)] * 3)),
)
def test_gpipe(
    monkeypatch: pytest.MonkeyPatch,
    copy_streams: bool,
    dependencies: bool,
    portals: bool,
    checkpoint: Any,
) -> None:
    with sanitized(monkeypatch) as watch:
        train(gpipe(copy_streams=copy_streams, dependencies=dependencies, portals=portals,
                    checkpoint=checkpoint))  # fmt: skip
    check(watch)


@pytest.mark.parametrize("gpus", [True, False])
def test_gpipe_without_a_gradient_of_its_input(monkeypatch: pytest.MonkeyPatch, gpus: bool) -> None:
    with sanitized(monkeypatch) as watch:
        train(gpipe(gpus), input_grad=False)
    check(watch)


def test_gpipe_whose_outputs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors for a backward are freed while streams still compute them."""
    with sanitized(monkeypatch) as watch:
        model = gpipe()
        for seed in range(3):
            model(data(8, seed=seed)[0])
        with torch.no_grad():
            model(data(8)[0]).sum()
        train(model, n=1)
    check(watch)


def test_two_forwards_of_gpipe_before_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    with sanitized(monkeypatch) as watch:
        model = gpipe()
        for seed in range(2):
            (first, y), (second, _) = (data(8, seed=2 * seed + k) for k in range(2))
            (mse(model(first), y) + mse(model(second * 2), y)).backward()
    check(watch)


# The checks themselves see mistakes


def _every_third_wait(patch: pytest.MonkeyPatch) -> None:
    """Forget every third wait, of any stream."""
    waits, inner = itertools.count(1), FakeStream.wait_event

    def wait_event(stream: FakeStream, event: FakeEvent) -> None:
        if next(waits) % 3:
            inner(stream, event)

    patch.setattr(FakeStream, "wait_event", wait_event)


def _no_wait_between_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaStream, "wait_event", lambda stream, event: None)


def _nothing_is_adopted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "adopt", lambda device, tensor, stream: None)


def _the_caller_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "rejoin", lambda device, event, values=(): None)


def _nothing_waits_for_the_caller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "mark", lambda device: device.stream("compute").record())


def _events_come_too_early(patch: pytest.MonkeyPatch) -> None:
    """Return, of each stream, the event that was recorded before, not the one recorded now."""
    inner, last = CudaStream.record, dict[int, CudaEvent]()

    def record(stream: CudaStream) -> CudaEvent:
        event = inner(stream)
        before, last[id(stream)] = last.get(id(stream), event), event
        return before

    patch.setattr(CudaStream, "record", record)


def _of_gpipe() -> None:
    train(gpipe())


def _of_a_pipeline() -> None:
    run_steps(pipeline_on_slices(ps.lower(scheduled("1f1b"))))


def _of_replicas() -> None:
    # Of three micro-batches the second reduction frees what the third backward may take.
    graph = ps.lower(ps.schedule("gpipe", 1, 3), n_replicas=2, grad_sync="every")
    run_steps(px.Pipeline([dense(2)], graph, [FakeGpu(), FakeGpu()], mse, sgd))


@pytest.mark.parametrize(
    ("mistake", "subject", "kind"),
    covering([
        (_every_third_wait, _of_a_pipeline, "races"),
        (_every_third_wait, _of_gpipe, "races"),
        (_every_third_wait, _of_replicas, "races"),
        (_no_wait_between_streams, _of_a_pipeline, "races"),
        (_no_wait_between_streams, _of_gpipe, "races"),
        (_events_come_too_early, _of_a_pipeline, "races"),
        (_events_come_too_early, _of_gpipe, "races"),
        (_the_caller_does_not_wait, _of_gpipe, "races"),
        (_nothing_waits_for_the_caller, _of_gpipe, "races"),
        (_nothing_waits_for_the_caller, _of_a_pipeline, "races"),
        (_nothing_is_adopted, _of_a_pipeline, "freed"),
        (_nothing_is_adopted, _of_gpipe, "freed"),
        (_nothing_is_adopted, _of_replicas, "freed"),
    ]),
)  # fmt: skip
def test_the_checks_see(
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    subject: Callable[[], None],
    kind: str,
) -> None:
    """Each mistake is found; a call of torch's that orders or keeps nothing is one of them."""
    with sanitized(monkeypatch) as watch:
        mistake(monkeypatch)
        subject()
    assert getattr(watch, kind)

"""On a real GPU: slices, links, copies beside compute, CUDA graphs, memory, clocks."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_pipelines import assert_order_respected, data, gradients, mse, sgd, unsplit
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.image_models import unet
from pipeexec.devices.gpu_kernels import load_kernels
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipesim.ops import COMPUTE, SENDS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.measures_time,  # in microseconds; and another worker would use the same GPU
]


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let convolutions and products be float32 as it is, without TF32."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, "allow_tf32", False)


WIDTH = 256
#: Timing events are good to half a microsecond; a graph's notes of the time come in between.
SLACK = 10e-6
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"n_chunks": 2},
    "zb_h1": {},
    "zbv": {},
}
scheduled = pytest.mark.parametrize("schedule", SCHEDULES)
sliced = pytest.mark.parametrize("n", [2, 4, 8])


def _graph(schedule: str, n: int, n_microbatches: int | None = None, **options: Any) -> Any:
    built = ps.schedule(
        schedule, n_devices=n, n_microbatches=n_microbatches or 2 * n, **SCHEDULES[schedule]
    )
    return ps.lower(built, **options)


def _stages(n: int, width: int = WIDTH) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(n)
    ]


def _batch(graph: ps.TaskGraph, seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    return data(size * graph.n_microbatches, width=WIDTH, seed=seed)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, capturable=True)


def _close(actual: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> None:
    """Compare gradients: other streams may have other kernels, so not to the last bit."""
    for a, b in zip(gradients(actual), gradients(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Slices


@sliced
def test_slices_run_on_multiprocessors_of_their_own(n: int) -> None:
    """Blocks say which one they run on; no two slices name the same."""
    kernels = load_kernels(torch.device("cuda:0"))
    devices = px.slices("cuda:0", n)
    sm_sets: list[set[int]] = []
    for device in devices:
        sm_ids = torch.full((4096,), -1, dtype=torch.int32, device="cuda:0")
        torch.cuda.synchronize()
        device.stream("compute").submit(partial(kernels.locate, sm_ids, 20_000))
        device.synchronize()
        sm_sets.append(set(sm_ids.tolist()))
    assert all(len(sms) == device.n_sms for sms, device in zip(sm_sets, devices, strict=True))
    assert sum(map(len, sm_sets)) == len(set.union(*sm_sets))
    if not devices[0].note:  # of smaller slices, where the driver has too few of the largest
        assert sum(device.n_sms for device in devices) > 100


@sliced
@scheduled
def test_parity_on_slices(schedule: str, n: int) -> None:
    """Loss and gradients are those of the unsplit model; each task follows its dependencies."""
    graph = _graph(schedule, n)
    stages = _stages(graph.n_stages)
    whole = copy.deepcopy(stages)
    inputs, targets = _batch(graph)
    for module in whole:
        module.to("cuda:0")
    loss = unsplit(whole, graph, inputs.to("cuda:0"), targets.to("cuda:0"))
    with px.Pipeline(stages, graph, px.slices("cuda:0", n), mse) as subject:
        for _ in range(2):
            for stage in stages:
                stage.zero_grad()
            result = subject.step(inputs, targets)
            torch.testing.assert_close(result.loss, loss)
            _close(stages, whole)
    assert_order_respected(result.timeline, SLACK)
    assert result.clock_error == 0.0


@sliced
@pytest.mark.parametrize("mode", ["last", "every", "bucketed"])
def test_replicas_on_slices(mode: Any, n: int) -> None:
    """Replicas of one stage on slices of a GPU, gradients reduced on streams of their own."""
    schedule = ps.schedule("gpipe", 1, 4)
    graph = ps.lower(schedule, n_replicas=n, grad_sync=mode, n_buckets=2, step="none")
    stages = _stages(1)
    whole = copy.deepcopy(stages[0]).to("cuda:0")
    inputs, targets = data(16 * n * graph.n_microbatches, width=WIDTH)
    mse(whole(inputs.to("cuda:0")), targets.to("cuda:0")).backward()
    with px.Pipeline(stages, graph, px.slices("cuda:0", n), mse) as subject:
        subject.step(inputs, targets)
    _close(stages, [whole])


def test_dropout_on_slices_is_the_same_in_every_schedule() -> None:
    losses = []
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)]
        graph = _graph(schedule, 2)
        torch.manual_seed(3)
        with px.Pipeline(stages, graph, px.slices("cuda:0", 2), mse) as subject:
            losses.append(subject.step(*_batch(graph)).loss)
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradient, None


class Spin(nn.Module):
    """Passes its input on, after some 2 ms of one thread of the GPU."""

    def __init__(self, cycles: int = 4_000_000) -> None:
        super().__init__()
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        return _Spin.apply(x, self.cycles)


def _spinning(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), Spin()) for _ in range(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_stages_on_slices_run_at_the_same_time(n: int) -> None:
    """The makespan is the pipeline's, not the sum of all tasks."""
    graph = _graph("1f1b", n, 4 * n)
    with px.Pipeline(_spinning(n), graph, px.slices("cuda:0", n), mse) as subject:
        for _ in range(3):
            timeline = subject.step(*_batch(graph)).timeline
    busy = (timeline.end - timeline.start)[graph.is_op(COMPUTE)]
    ideal = (4 * n + n - 1) / (4 * n)  # of a device's work: the bubble of 1F1B
    assert timeline.makespan < 1.1 * ideal * busy.sum() / n


# Copies and links


def _overlap(timeline: ps.Timeline, device: int) -> float:
    """Return for how long a device sent while it computed (s)."""
    graph = timeline.graph
    local = graph.device == device

    def spans(ops: Any) -> NDArray[np.float64]:
        chosen = local & graph.is_op(ops)
        return np.stack([timeline.start[chosen], timeline.end[chosen]], axis=1)

    return sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
        for a in spans(SENDS) for b in spans(COMPUTE)
    )  # fmt: skip


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_copies_overlap_compute_or_do_not(overlap: bool, cuda_graph: bool) -> None:
    """Messages of 1 ms beside tasks of 2 ms."""
    graph = _graph("gpipe", 2, 8, overlap=overlap)
    link = ps.Network(latency=50e-6, bandwidth=16 * WIDTH * 4 / 1e-3)
    devices = px.slices("cuda:0", 2, link=link)
    with px.Pipeline(_spinning(2), graph, devices, mse, cuda_graph=cuda_graph) as subject:
        for _ in range(4):
            timeline = subject.step(*_batch(graph)).timeline
    if overlap:
        assert _overlap(timeline, 0) > 4e-3  # of eight messages, all but the last
    else:
        assert _overlap(timeline, 0) < SLACK


def test_messages_take_the_time_of_their_link() -> None:
    """The bandwidth from the start of the SEND, the latency from its end."""
    latency, seconds = 200e-6, 500e-6
    graph = _graph("gpipe", 2, 8)
    link = ps.Network(latency=latency, bandwidth=16 * WIDTH * 4 / seconds)
    stages = _stages(2)
    whole = copy.deepcopy(stages)
    inputs, targets = _batch(graph)
    for module in whole:
        module.to("cuda:0")
    unsplit(whole, graph, inputs.to("cuda:0"), targets.to("cuda:0"))
    with px.Pipeline(stages, graph, px.slices("cuda:0", 2, link=link), mse) as subject:
        assert "link times are imposed" in repr(subject)
        for _ in range(3):
            for stage in stages:
                stage.zero_grad()
            timeline = subject.step(inputs, targets).timeline
    _close(stages, whole)
    sends = np.flatnonzero(graph.is_op(SENDS))
    took = timeline.end[sends] - timeline.start[sends]
    assert (took > seconds - 5e-6).all()
    assert np.median(took) < seconds + 30e-6
    late = timeline.end[graph.pair[sends]] - timeline.end[sends]
    assert (late > latency - 5e-6).all()
    assert np.median(late) < latency + 30e-6


# No waiting


@pytest.fixture
def _no_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch refuse whatever makes the host wait while tasks are issued."""
    issue = Step.issue

    def strict(run: Step, tasks: Sequence[PlannedTask]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            issue(run, tasks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Step, "issue", strict)


@pytest.mark.usefixtures("_no_synchronization")
@scheduled
def test_the_host_does_not_wait_while_it_issues(schedule: str) -> None:
    graph = _graph(schedule, 2)
    devices = px.slices("cuda:0", 2, link=ps.Network(1e-5, 1e10))
    with px.Pipeline(_stages(graph.n_stages), graph, devices, mse, sgd) as subject:
        for _ in range(3):
            assert subject.step(*_batch(graph)).timeline.complete


# CUDA graphs


@sliced
@scheduled
def test_replays_are_the_same_as_eager_steps(schedule: str, n: int) -> None:
    """Two eager steps, one captured, three more; weights of an eager twin after each."""
    graph = _graph(schedule, n)
    stages = _stages(graph.n_stages)
    others = copy.deepcopy(stages)
    with (
        px.Pipeline(stages, graph, px.slices("cuda:0", n), mse, sgd, cuda_graph=True) as subject,
        px.Pipeline(others, graph, px.slices("cuda:0", n), mse, sgd) as eager,
    ):
        for seed in range(6):
            actual, wanted = (runner.step(*_batch(graph, seed)) for runner in (subject, eager))
            torch.testing.assert_close(actual.loss, wanted.loss, rtol=1e-4, atol=1e-6)
            _close(stages, others)
            assert_order_respected(actual.timeline, SLACK)
        assert subject._runner.capture is not None
        assert subject._runner.capture.n_captures == 1
    for a, b in zip(stages, others, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [_adam, None])
def test_replays_with_other_optimizers(make: Any) -> None:
    """A capturable Adam; and none, where gradients add up."""
    graph = _graph("1f1b", 2)
    stages = _stages(2)
    others = copy.deepcopy(stages)
    with (
        px.Pipeline(stages, graph, ["cuda:0"] * 2, mse, make, cuda_graph=True) as subject,
        px.Pipeline(others, graph, ["cuda:0"] * 2, mse, make) as eager,
    ):
        for seed in range(6):
            subject.step(*_batch(graph, seed))
            eager.step(*_batch(graph, seed))
            _close(stages, others)


def test_a_replay_takes_the_host_no_time() -> None:
    """One call, where an eager step takes the host one a kernel."""
    graph = _graph("1f1b", 4)
    with px.Pipeline(
        _stages(4), graph, px.slices("cuda:0", 4), mse, sgd, cuda_graph=True
    ) as subject:
        seconds = [subject.step(*_batch(graph)).host_seconds for _ in range(8)]
    assert np.median(seconds[3:]) < 0.2 * min(seconds[:2])


def test_a_profile_of_replays_has_no_launch() -> None:
    graph = _graph("1f1b", 2)
    with px.Pipeline(
        _stages(2), graph, px.slices("cuda:0", 2), mse, sgd, cuda_graph=True
    ) as subject:
        assert px.profile(subject, *_batch(graph), n_steps=2).launch == 0.0


def test_a_stage_that_waits_for_the_gpu_cannot_be_captured() -> None:
    """In a separate process, since a capture that failed may leave CUDA unusable."""
    script = """
import torch, pipesim as ps, pipeexec as px
from pipesim.errors import ExecutionError
class Waits(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)
graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
stages = [torch.nn.Linear(8, 8), Waits(8, 8)]
pipeline = px.Pipeline(stages, graph, ["cuda:0"] * 2, torch.nn.functional.mse_loss, cuda_graph=True)
batch = torch.ones(4, 8), torch.ones(4, 8)
for _ in range(2):
    pipeline.step(*batch)
try:
    pipeline.step(*batch)
except ExecutionError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert "1F0 cannot be captured as a CUDA graph" in done.stdout, done.stderr


# Memory and clocks


def test_memory_goes_up_and_down(tmp_path: Any) -> None:
    """By the activations that GPipe holds; all is given back, but for gradients."""
    graph = _graph("gpipe", 2, 8)
    with px.Pipeline(_stages(2), graph, px.slices("cuda:0", 2), mse, sgd) as subject:
        subject.step(*_batch(graph))
        costs = px.profile(subject, *_batch(graph), n_steps=2)
        allocated = subject.allocated(*_batch(graph))
        predicted = ps.simulate(graph, costs)
    frame = allocated.frame
    assert set(frame["gpu"]) == {"cuda:0"}
    assert allocated.most_active["cuda:0"] >= frame["nbytes"].max()
    rise = frame["nbytes"].max() - frame["nbytes"].iloc[0]
    assert rise >= 8 * 16 * WIDTH * 4
    gradients_of = 2 * 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert abs(frame["nbytes"].iloc[-1] - frame["nbytes"].iloc[0]) < 2 * gradients_of + (1 << 20)
    allocated.plot(predicted).figure.savefig(tmp_path / "memory.png")  # type: ignore[union-attr]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_clocks_of_two_gpus_are_joined() -> None:
    """To within what a message between them takes."""
    graph = _graph("1f1b", 2)
    with px.Pipeline(_stages(2), graph, ["cuda:0", "cuda:1"], mse) as subject:
        for _ in range(3):
            result = subject.step(*_batch(graph))
    assert 0 < result.clock_error < 50e-6
    assert_order_respected(result.timeline, result.clock_error + SLACK)


# The GPipe module


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("copy_streams", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_gpipe_on_slices_is_the_module(
    checkpoint: Any, copy_streams: bool, portals: bool
) -> None:
    """Outputs and gradients are equal, the input's too; each task follows its dependencies."""
    torch.manual_seed(0)
    layers = unet(2, 1, 8, dropout=0.0)
    whole = copy.deepcopy(layers).to("cuda:0")
    third = len(layers) // 3
    model = px.GPipe(
        layers, [third, third, len(layers) - 2 * third], devices=px.slices("cuda:0", 3), chunks=4,
        checkpoint=checkpoint, copy_streams=copy_streams, portals=portals,
    )  # fmt: skip
    inputs = torch.rand(8, 3, 32, 32, device="cuda:0")
    x, y = (inputs.clone().requires_grad_() for _ in range(2))
    for _ in range(3):
        whole.zero_grad()
        model.zero_grad()
        x.grad = y.grad = None
        output, wanted = model(x), torch.cat([whole(part) for part in y.chunk(4)])
        output.square().mean().backward()
        wanted.square().mean().backward()
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6)
    _close([model], [whole])
    assert_order_respected(model.timeline(), SLACK)


@pytest.mark.parametrize("kept", [True, False])
def test_a_gpipe_lets_its_host_go_on(kept: bool) -> None:
    """A forward of layers that spin for milliseconds returns before they are through.

    Also where its output is dropped at once, with all that a backward would need.
    """
    model = px.GPipe(nn.Sequential(*_spinning(2)), [1, 1], devices=px.slices("cuda:0", 2), chunks=4)
    model(torch.rand(16, WIDTH))
    torch.cuda.synchronize()
    start = perf_counter()
    output = model(torch.rand(16, WIDTH))
    if not kept:
        del output
    issued = perf_counter() - start
    torch.cuda.synchronize()
    assert issued < 0.7 * (perf_counter() - start)

"""Steps whose activations wait on the host or on a peer: gradients, bytes, memory, bad input."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_allocator import CountedGpu, FakeAllocator
from fake_cuda import FakeCuda, FakeGpu
from ranks import Ranks
from small_pipelines import assert_same, cut, data, dense, unsplit
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.device import RemoteDevice
from pipeexec.distributed import Processes
from pipeexec.executor.offload import Offload, OffloadWaits
from pipeexec.stages import stage as stage_module
from pipeexec.stages.activations import SavedActivations, module_storages
from pipesim.errors import ArgumentError, ExecutionError, StageError
from pipesim.ops import COPIES, Op
from pipesim.timeline.task_bytes import static

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.AccuracyWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]

WIDTH, SAMPLES, M = 16, 16, 4
mse = nn.functional.mse_loss


class Block(nn.Module):
    """Saves inputs, outputs, views, a buffer, a mask of dropout, and a strided transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.tanh(self.first(x)))
        y = self.second(y.t().contiguous().t()) * self.scale
        return self.norm(x + y)


def modules(n: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(n)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator)
    return x, y


def run(schedule: str = "gpipe", devices: Sequence[Any] = ("cpu",) * 3, **options: Any) -> Any:
    """Return the parameters and losses of two steps of SGD, and the timeline of the second."""
    stages = modules(options.pop("n_stages", 3))
    graph = ps.lower(ps.schedule(schedule, 3, M, **options.pop("schedule_options", {})), **options)
    torch.manual_seed(2)
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    with px.Pipeline(stages, graph, list(devices), mse, sgd) as pipeline:
        results = [pipeline.step(*batch()) for _ in range(2)]
        values = [p.detach().clone() for stage in stages for p in stage.parameters()]
    return values, [result.loss.item() for result in results], results[-1].timeline


def assert_equal(one: Any, other: Any) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize(
    ("schedule", "recompute", "overlap", "share"),
    [
        ("gpipe", "never", True, 0.5),
        ("gpipe", "always", False, "longest:0.5"),
        ("gpipe", "except_last", True, "all"),
        ("1f1b", "never", False, "all"),
        ("1f1b", "always", True, 0.5),
        ("1f1b", "except_last", False, "longest:0.5"),
        ("zb_h1", "never", True, "longest:0.5"),
        ("zb_h1", "always", True, "all"),
        ("zb_h1", "except_last", False, 0.5),
    ],
)  # every pair of values
def test_training_is_equal(schedule: str, recompute: str, overlap: bool, share: Any) -> None:
    """To the last bit, dropout included, for all, for a share, and for what lives longest."""
    options = {"recompute": recompute, "overlap": overlap}
    assert_equal(run(schedule, **options), run(schedule, offload=share, **options))


def test_several_stages_a_device() -> None:
    """A storage that two stages of a device share is copied for each."""
    options = {"n_stages": 6, "schedule_options": {"n_chunks": 2}}
    plain = run("interleaved_1f1b", **options)
    assert_equal(plain, run("interleaved_1f1b", **options, offload="all", prefetch=0))


def test_hosts_that_are_threads() -> None:
    options = {"hosts": "per_device", "host_threads": True}
    assert_equal(run(**options), run(**options, offload="all"))


def test_two_replicas_and_prefetch() -> None:
    stages, (x, y) = modules(2), batch()
    grads = []
    for offload in ("none", "all"):
        graph = ps.lower(
            ps.schedule("gpipe", 2, 4), n_replicas=2, offload=offload, prefetch=2, step="none"
        )
        torch.manual_seed(3)
        with px.Pipeline(stages, graph, ["cpu"] * 4, mse) as pipeline:
            pipeline.step(x, y)
        grads.append([p.grad.clone() for stage in stages for p in stage.parameters()])
        for stage in stages:
            stage.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_bytes_are_whole_tensors_up_to_the_share() -> None:
    """Those of parameters, buffers and the batch stay; tasks record what moved."""
    _, _, whole = run(offload="all")
    _, _, half = run(offload=0.5)
    for op in (Op.OFFLOAD, Op.RELOAD):
        tasks = whole.graph.op == op
        assert (whole.nbytes[tasks] > 0).all()
        assert (half.nbytes[tasks] <= 0.5 * whole.nbytes[tasks]).all()
        assert (half.nbytes[tasks] > 0).all()
    samples = SAMPLES // M
    # tanh, the mask of dropout, its product, the product's copy, x + y and the result of second;
    # mean and 1 / deviation of the norm; the input of stage 0 is the caller's.
    tasks = (whole.graph.op == Op.OFFLOAD) & (whole.graph.stage == 1)
    assert (whole.nbytes[tasks] % (4 * samples) == 0).all()
    stage_0 = (whole.graph.op == Op.OFFLOAD) & (whole.graph.stage == 0)
    assert whole.nbytes[tasks][0] - whole.nbytes[stage_0][0] == 4 * samples * WIDTH


@pytest.mark.parametrize(
    ("schedule", "offload"),
    [("gpipe", "all"), ("gpipe", {0: 0.3, 2: "longest:0.5"}), ("zb_h1", 0.5)],
)
def test_memory_is_as_predicted(schedule: str, offload: Any) -> None:
    """To the byte, at the times of the prediction."""
    graph = ps.lower(ps.schedule(schedule, 3, M), offload=offload)
    with px.Pipeline(modules(), graph, ["cpu"] * 3, mse) as pipeline:
        costs = px.profile(pipeline, *batch(), n_steps=1, warm_up=1)
        measured = pipeline.memory(*batch())
    predicted = ps.simulate(graph, costs)
    peak = predicted.memory.peak - static(graph, costs)
    assert measured.at(predicted).peak_activations.tolist() == peak.tolist()
    assert costs.network.host is not None
    assert predicted.memory.peak_host.sum() > 0
    plain = ps.lower(ps.schedule(schedule, 3, M))
    assert (predicted.memory.peak <= ps.simulate(plain, costs).memory.peak).all()


def test_a_peer_holds_activations() -> None:
    """BPipe: device 0 holds 3 micro-batches in place of 4; device 3 the others, two at most.

    Loss and gradients are those of the unsplit model, and bytes those of the simulation.
    """
    schedule, (x, y) = ps.schedule("1f1b", 4, 8), data(32)
    costs = ps.Costs(1, 2, network=ps.Network(bandwidth=1e30))
    peaks = []
    for offload in ("none", "above:3"):
        graph = ps.lower(schedule, offload=offload, offload_to="peer", step="none")
        stages, whole = cut(dense(4), [1] * 4), cut(dense(4), [1] * 4)
        loss = unsplit(whole, graph, x, y)
        with px.Pipeline(stages, graph, ["cpu"] * 4, mse) as pipeline:
            result = pipeline.step(x, y)
            memory = pipeline.memory(x, y)
        assert torch.equal(result.loss, loss)
        assert_same(stages, whole)
        if offload == "none":
            costs = replace(costs, activation_bytes=tuple(memory.peak_activations / [4, 3, 2, 1]))
        else:
            assert result.timeline.complete
            moved = np.unique(result.timeline.nbytes[graph.is_op(COPIES)])
            costs = replace(costs, offload_bytes=(*moved, 0, 0, 0))
        predicted = ps.simulate(graph, costs)
        assert memory.at(predicted).peak_activations.tolist() == predicted.memory.peak.tolist()
        peaks.append(predicted.memory.peak)
    assert ((peaks[1] - peaks[0]) / moved).tolist() == [-1, 0, 0, 2]


def test_profiles_of_several_shares_are_refused() -> None:
    graphs = [ps.lower(ps.schedule("gpipe", 3, M), offload=x) for x in (0.5, "all")]
    with (
        px.Pipeline(modules(), graphs[0], ["cpu"] * 3, mse) as pipeline,
        pytest.raises(ArgumentError, match=r"offloads the share 1 of stage 0, graph 'gpipe' 0\.5"),
    ):
        px.measure(pipeline, *batch(), n_steps=1, warm_up=0, graphs=graphs)


def test_peers_of_other_processes_are_refused() -> None:
    """By every process, whichever has the devices."""
    graph = ps.lower(ps.schedule("gpipe", 4, 4), offload={1: "all"}, offload_to="peer")
    local, other, third = FakeGpu(), RemoteDevice("rank 1: cpu:0", 1), RemoteDevice("", 2)
    for devices in (
        [local] * 2 + [other] * 2,
        [other, local, other, other],
        [other] * 2 + [third] * 2,
    ):
        model: Any = SimpleNamespace(devices=devices)
        with pytest.raises(ArgumentError, match="device 1 to device 2 of another process"):
            Offload().check(graph, model)
    model = SimpleNamespace(devices=[other, local, local, other])
    Offload().check(graph, model)


def clones(data: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in data]


@pytest.mark.parametrize(
    ("share", "sizes"),
    [(0.0, []), (0.5, [5, 1]), (0.6, [5, 2]), (0.75, [5, 4]), (1.0, [5, 4, 2, 1])],
)
def test_the_largest_storages_that_fit_move_first(share: float, sizes: list[int]) -> None:
    """Of 12 values, at most the share of them; all come back with their bytes counted."""
    leaves = [torch.full((n,), float(n)) for n in (1, 4, 2, 5)]
    saved = SavedActivations(leaves, None, set())
    moved = saved.offload(share, clones)
    assert [len(x) for x in moved] == sizes
    assert [len(x) for x in leaves] == [0 if n in sizes else n for n in (1, 4, 2, 5)]
    assert saved.reload(clones) == 4 * sum(sizes)
    assert [x.tolist() for x in leaves] == [[float(n)] * n for n in (1, 4, 2, 5)]


def test_storages_are_freed_while_they_are_away() -> None:
    """Slots and leaves hold no tensor between OFFLOAD and RELOAD, and the old bits afterwards."""
    x = torch.randn(4, 3)[:, :2]  # a view with an offset between rows
    (leaf,) = (x.detach().requires_grad_(),)
    saved = SavedActivations([leaf], None, set())
    with saved.hooks():
        z = (leaf * leaf).exp().sum()
    before, address = leaf.detach().clone(), weakref.ref(leaf.untyped_storage())
    moved = sum(data.nbytes for data in saved.offload(1.0, clones))
    assert moved == 4 * 3 * 4 + 4 * 2 * 4  # the storage of x, and the exponentials
    del x, address
    assert leaf.numel() == 0
    with pytest.raises(Exception, match="no RELOAD ran"):
        z.backward(retain_graph=True)
    assert saved.reload(clones) == moved
    assert torch.equal(leaf, before)
    assert leaf.stride() == (3, 1)
    z.backward()
    assert torch.equal(leaf.grad, 2 * before * (before * before).exp())


def test_tensors_changed_in_place_are_refused() -> None:
    """As autograd refuses them without saved-tensor hooks."""
    leaf = torch.randn(4, requires_grad=True)
    saved = SavedActivations([leaf], None, set())
    with saved.hooks():
        y = leaf.exp()
        z = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(ExecutionError, match="changed in place after its forward"):
        z.backward()


def test_a_failed_step_leaves_nothing_behind() -> None:
    class Fails(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("no")
            return super().forward(x)

    stages = modules(2)
    stages.append(Fails())
    graph = ps.lower(ps.schedule("gpipe", 3, M), offload="all")
    with px.Pipeline(stages, graph, ["cpu"] * 3, mse) as pipeline:
        stages[2].fails = True
        with pytest.raises(StageError):
            pipeline.step(*batch())
        stages[2].fails = False
        assert pipeline.step(*batch()).loss.isfinite()
        assert not any(stage._activations or stage._saved_inputs for stage in pipeline.stages)


@pytest.mark.parametrize(
    ("recompute", "counts"),
    [("never", [1, 1, 1]), ("always", [0, 1, 1])],  # the first stage's inputs are the caller's
)
def test_storages_of_a_module_are_found_once_a_step(
    monkeypatch: pytest.MonkeyPatch, recompute: Any, counts: list[int]
) -> None:
    """Not once a micro-batch. Weights that moved between two steps stay on the device."""
    calls: list[nn.Module] = []

    def counted(module: nn.Module) -> set[int]:
        calls.append(module)
        return module_storages(module)

    monkeypatch.setattr(stage_module, "module_storages", counted)
    stages = modules()
    graph = ps.lower(ps.schedule("gpipe", 3, M), offload="all", recompute=recompute)
    moved = []
    with px.Pipeline(stages, graph, ["cpu"] * 3, mse) as pipeline:
        pipeline.step(*batch())  # in which the first forwards get copies of their inputs
        for _ in range(2):
            calls.clear()
            timeline = pipeline.step(*batch()).timeline
            moved.append(timeline.nbytes[timeline.graph.op == Op.OFFLOAD].tolist())
            assert [calls.count(stage) for stage in stages] == counts
            for parameter in (x for stage in stages for x in stage.parameters()):
                parameter.data = parameter.data.clone()
    assert moved[0] == moved[1]


def test_accumulated_and_evaluated() -> None:
    """Steps that accumulate offload as well; evaluations do not."""
    graph = ps.lower(ps.schedule("gpipe", 3, M), offload="all")
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    with px.Pipeline(modules(), graph, ["cpu"] * 3, mse, sgd) as pipeline:
        result = pipeline.step(*batch(), accumulate=True)
        assert (result.timeline.graph.op == Op.OFFLOAD).any()
        pipeline.step(*batch())
        assert torch.isfinite(torch.as_tensor(pipeline.evaluate(*batch()).loss))


class WatchedAllocator(FakeAllocator):
    """Notes the most bytes that are taken."""

    peak = 0

    def __torch_dispatch__(self, *args: Any) -> Any:
        output = super().__torch_dispatch__(*args)
        self.peak = max(self.peak, self.active())
        return output


def taken_bytes(offload: str) -> int:
    """Return the most bytes that the third step of one device takes."""
    graph = ps.lower(ps.schedule("gpipe", 1, 12), offload=offload)
    stage = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        cuda.install(patch)
        x = torch.zeros(12 * 256, 64)
        with px.Pipeline([stage], graph, [CountedGpu()], mse) as pipeline:
            for _ in range(2):
                pipeline.step(x, x)
            with WatchedAllocator(cuda) as allocator:
                pipeline.step(x, x)
    return allocator.peak


def test_memory_of_a_gpu_is_used_again() -> None:
    """Though its host has issued everything before the first copy ends."""
    assert taken_bytes("all") < 0.5 * taken_bytes("none")


@pytest.mark.parametrize("offload_to", ["host", "peer"])
@pytest.mark.parametrize("gpus", [[None] * 3, range(3)], ids=["slices", "gpus"])
def test_on_streams_of_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[int | None], offload_to: str
) -> None:
    """With a stand-in for CUDA: values are equal, and copies keep no memory by themselves."""
    cuda = FakeCuda()
    plain = run()
    cuda.install(monkeypatch)
    devices = [FakeGpu(k, gpu) for k, gpu in enumerate(gpus)]
    run(devices=devices)
    kept = len(cuda.calls("keep"))
    devices = [FakeGpu(k, gpu) for k, gpu in enumerate(gpus)]
    assert_equal(plain, run(devices=devices, offload="all", offload_to=offload_to))
    assert len(cuda.calls("keep")) == 2 * kept


def copies_of(m: int = 12) -> tuple[Any, OffloadWaits]:
    """Return a graph of one device, and the waits of its OFFLOADs."""
    graph = ps.lower(ps.schedule("gpipe", 1, m), offload="all")
    with px.Pipeline([nn.Linear(4, 4)], graph, [FakeGpu()], mse) as pipeline:
        return graph, pipeline._model.part(Offload).waits[graph]


@pytest.mark.parametrize(("copy", "places"), [(0.5, 2), (1.5, 3), (0.999, 2)])
def test_waits_for_copies_delay_nothing(
    monkeypatch: pytest.MonkeyPatch, copy: float, places: int
) -> None:
    """The first compute task that starts after the end of a copy waits for it.

    F takes 1 s, so that ``copy`` seconds end within the next compute task, or the one after it.
    """
    FakeCuda().install(monkeypatch)
    graph, waits = copies_of()
    order = [graph.task(t) for t in np.flatnonzero(graph.is_op(frozenset({Op.F, Op.B})))]

    def place(task: int) -> int:
        return order.index(graph.task(task))

    def lags() -> list[int]:
        return [
            place(waiter) - place(int(graph.dependencies[offload][0]))
            for waiter, offloads in waits.by_task.items()
            for offload in offloads
        ]

    n_copies = int((graph.op == Op.OFFLOAD).sum())
    assert lags() == [2] * n_copies
    link = ps.Network(host=ps.HostLink(latency=copy, bandwidth=1e30))
    costs = ps.Costs(forward=1.0, backward=2.0, activation_bytes=1.0, network=link)
    timeline = ps.simulate(graph, costs)
    step = SimpleNamespace(graph=graph, readings=lambda: SimpleNamespace(timeline=timeline))
    for _ in range(3):
        waits.note_step(step)
    assert len(lags()) == n_copies
    assert lags()[0] == places
    simulated = ps.simulate(graph, costs)
    for waiter, offloads in waits.by_task.items():
        assert all(simulated.start[waiter] >= simulated.end[offload] for offload in offloads)


def test_cuda_graphs_are_refused() -> None:
    from pipeexec.executor.step_capture import check_can_capture

    graph = ps.lower(ps.schedule("gpipe", 1, 4), offload="all")
    device = FakeGpu(0)
    device.torch_device = torch.device("cuda", 0)
    with pytest.raises(ArgumentError, match="memory of offloaded"):
        check_can_capture(graph, [device], [None])


def _ranks_case(processes: Processes) -> list[Tensor]:
    values = []
    for offload in ("none", "all"):
        stages = modules(2)
        graph = ps.lower(ps.schedule("gpipe", 2, 4), hosts="per_device", offload=offload)
        torch.manual_seed(4)
        with px.Pipeline(stages, graph, ["cpu"], mse, processes=processes) as pipeline:
            pipeline.step(*batch())
            result = pipeline.gather(pipeline.step(*batch()))
        copies = result.timeline.graph.is_op(COPIES)
        assert (result.timeline.nbytes[copies] > 0).all()
        own = stages[processes.rank]
        values.append([p.grad.clone() for p in own.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    return values[0]


def test_two_processes(two_ranks: Ranks) -> None:
    two_ranks.run(_ranks_case)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Equal gradients, and memory on the host that is pinned."""
    slices = px.slices(torch.device("cuda", 0), 3)
    assert_equal(run(devices=slices), run(devices=slices, offload="all"))

"""Forward-only graphs: the F of a schedule, their messages, and the bytes that they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_output import succeed
from hypothesis import given
from strategies import Lowering, cases, lowerings

import pipesim as ps
from pipesim.costs import Workload
from pipesim.errors import GraphError, MemoryLimitWarning, ScheduleError, TimelineError
from pipesim.graph.tasks import Tasks
from pipesim.ops import EXCHANGES, Op
from pipesim.scheduling.schedule import fewer_microbatches
from pipesim.timeline.task_bytes import static


def queue(graph: ps.TaskGraph, device: int, stream: str = "compute") -> str:
    """Return a stream's tasks as text."""
    number = graph.streams.index((device, stream))
    return " ".join(str(graph.task(int(task))) for task in graph.queues[number])


def test_forwards_and_their_messages() -> None:
    """A device runs its F in the schedule's order, and sends each output on."""
    graph = ps.lower(ps.schedule("1f1b", 2, 3), forward_only=True)
    assert queue(graph, 0) == "0F0 0F1 0F2"
    assert queue(graph, 0, "send:1") == "0SEND_F0 0SEND_F1 0SEND_F2"
    assert queue(graph, 1, "recv:0") == "1RECV_F0 1RECV_F1 1RECV_F2"
    assert queue(graph, 1) == "1F0 1F1 1F2"
    assert len(graph.streams) == 4
    assert graph.forward_only
    ps.verify(replace(graph))  # a copy is not verified


def test_v_placement() -> None:
    """The last device passes its output on without a message."""
    graph = ps.lower(ps.schedule("zbv", 2, 2), forward_only=True)
    assert queue(graph, 0) == "0F0 0F1 3F0 3F1"
    assert queue(graph, 1) == "1F0 2F0 1F1 2F1"
    assert queue(graph, 1, "send:0") == "2SEND_F0 2SEND_F1"


def test_paths_and_replicas() -> None:
    """The paths of a bidirectional placement meet, and nothing is reduced."""
    graph = ps.lower(ps.schedule("chimera", 2, 2), n_replicas=2, forward_only=True)
    assert queue(graph, 0) == "0F0 1F1"
    assert queue(graph, 1) == "0F1 1F0"
    assert queue(graph, 3) == "0F1 1F0"
    assert set(graph.op.tolist()) == {Op.F, Op.SEND_F, Op.RECV_F}


def test_sharded_stages_exchange_no_gradients() -> None:
    """Counts, keys and vectors around F, and sorting on the compute stream."""
    graph = ps.lower(
        ps.schedule("1f1b", 2, 1), n_replicas=2, sharded=0, exchange_work="compute",
        sparse_grad_sync="last", forward_only=True,
    )  # fmt: skip
    assert queue(graph, 0) == "0DISPATCH0 0F0 0REORDER0.vectors"
    names = [f"0ALL_TO_ALL0.{name}" for name in EXCHANGES[:3]]
    assert queue(graph, 0, "collective") == " ".join(names)


@given(lowerings())
def test_forwards_are_those_of_the_schedule(lowering: Lowering) -> None:
    """Each device runs its F in its own order, and no other action of the schedule."""
    schedule, options = lowering
    graph = ps.lower(schedule, **options | {"forward_only": True, "expert_layers": ()})
    n_paths = schedule.placement.n_paths
    for copy in range(options["n_replicas"]):
        for device in range(schedule.n_devices):
            own = np.flatnonzero((schedule.op == Op.F) & (schedule.device == device))
            replica = copy * n_paths + schedule.path[own]
            (place,) = set(graph.homes[replica, schedule.stage[own]].tolist())
            tasks = np.flatnonzero((graph.op == Op.F) & (graph.device == place))
            assert graph.stage[tasks].tolist() == schedule.stage[own].tolist()
            assert graph.microbatch[tasks].tolist() == schedule.microbatch[own].tolist()
    assert not graph.is_op(frozenset({Op.B, Op.I, Op.W, Op.R, Op.REDUCE_GRAD, Op.STEP})).any()
    ps.verify(replace(graph))


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "always"},
        {"grad_sync": "bucketed", "n_replicas": 2},
        {"shard_optimizer": True, "n_replicas": 2},
        {"shard_optimizer": True, "gather_parameters": "before_forward", "n_replicas": 2},
        {"step": "none"},
        {"overlap": False, "recompute": "always", "recompute_waits": True},
    ],
)
def test_options_of_backwards_have_no_effect(options: dict[str, Any]) -> None:
    """Options of one training graph give its forwards."""
    schedule = ps.schedule("1f1b", 2, 4)
    plain = {name: options[name] for name in ("overlap", "n_replicas") if name in options}
    graph = ps.lower(schedule, **options, forward_only=True)
    other = ps.lower(schedule, **plain, forward_only=True)
    assert np.array_equal(graph.kind, other.kind)
    assert graph.options == other.options


def test_pipedream_has_one_version_of_the_weights() -> None:
    """An evaluation changes no weights, so that it needs no copies of them."""
    graph = ps.lower(ps.schedule("pipedream", 2, 4), forward_only=True)
    assert (graph.n_batches, graph.weight_versions) == (1, "one")


def test_memory_of_two_stages() -> None:
    """Outputs live from their F to the end of their message, inputs until the next F ends.

    ::

        device 0 | F0 F0 F1 F1 .  .  .  .        an output has 8 bytes, and takes 4 s
          send   | .  .  M0 M0 M0 M0 M1 M1 M1 M1
        device 1 |                   F0 F0 ...
    """
    graph = ps.lower(ps.schedule("gpipe", 2, 2), forward_only=True)
    costs = ps.Costs(
        forward=2, backward=2, output_bytes=8, activation_bytes=100, parameter_bytes=50,
        gradient_bytes=70, optimizer_bytes=60, forward_workspace_bytes=3,
        network=ps.Network(bandwidth=2),
    )  # fmt: skip
    timeline = ps.simulate(graph, costs)
    held = timeline.memory()
    rows = {d: list(zip(x.time, x.nbytes, strict=True)) for d, x in held.groupby("device")}
    assert rows[0] == [(0, 50), (0, 61), (2, 58), (2, 69), (4, 66), (6, 58), (10, 50)]
    assert rows[1] == [(0, 50), (2, 58), (6, 69 - 8), (6, 69), (8, 58), (10, 61), (12, 50)]
    assert timeline.memory.peak.tolist() == [69, 69]
    breakdown = timeline.memory.breakdown()
    assert breakdown.activations.tolist() == [16, 16]
    assert breakdown.optimizer.tolist() == [0, 0]
    assert ps.simulate(graph, costs, memory_limit=69).memory.fits
    with pytest.warns(MemoryLimitWarning, match="needs 69"):
        assert not ps.simulate(graph, costs, memory_limit=68).memory.fits


#: Evaluations of outputs alone: nothing that gathers parameters or exchanges tokens.
PLAIN = {"forward_only": True, "expert_layers": (), "shard_parameters": "none"}


@given(cases())
def test_memory_is_that_of_the_tensors_alive(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """At any moment: the outputs from F to their message, the inputs from it to F, on their device.

    Keys and values of a slice live until the last slice of its sequence. A second implementation,
    tensor by tensor. Stages on one device share the tensor.
    """
    graph, costs = case
    assert graph.options.source is not None
    source = graph.options.source
    graph = ps.lower(source.schedule, **{**source.arguments, **PLAIN})
    timeline = ps.simulate(graph, costs)
    number = {
        (t.op, t.replica, t.stage, t.microbatch, t.peer_stage): t.id
        for t in map(graph.task, range(len(graph)))
    }
    edges = graph.edges or [(s, s + 1) for s in range(graph.n_stages - 1)]
    output = costs.per_stage("output_bytes", graph.n_stages)
    workspace = costs.per_stage("forward_workspace_bytes", graph.n_stages)
    keys = costs.per_stage("kv_cache_bytes", graph.n_stages) * (graph.n_slices > 1)
    alive: list[tuple[int, float, float, float]] = []  # device, start, end, bytes
    for task in map(graph.task, np.flatnonzero(graph.op == Op.F).tolist()):
        start, end = timeline.start, timeline.end
        cell = task.replica, task.stage, task.microbatch
        alive.append((task.device, start[task.id], end[task.id], workspace[task.stage]))
        sequence = task.microbatch // graph.n_slices
        last = number[Op.F, *cell[:2], (sequence + 1) * graph.n_slices - 1, -1]
        alive.append((task.device, start[task.id], end[last], keys[task.stage]))
        for target in (b for a, b in edges if a == task.stage):
            after = number[Op.F, task.replica, target, task.microbatch, -1]
            size = float(output[task.stage])
            if graph.device[after] == task.device:
                alive.append((task.device, start[task.id], end[after], size))
                continue
            send = number[(Op.SEND_F, *cell, target if target > task.stage + 1 else -1)]
            recv = graph.pair[send]
            alive.append((task.device, start[task.id], end[send], size))
            alive.append((int(graph.device[recv]), start[recv], end[after], size))
    held = static(graph, costs)
    for device, rows in timeline.memory().groupby("device"):
        times = rows.groupby("time").nbytes.last()
        expected = [
            sum(x[3] for x in alive if x[0] == device and x[1] <= t < x[2]) for t in times.index
        ]
        assert times.to_numpy() - held[device] == pytest.approx(expected)


def test_memory_of_skips_and_stages_on_one_device() -> None:
    """Tensors of a skip wait on the device of its target; stages on one device share an output."""
    schedule = ps.schedule("zbv", 2, 2)
    costs = ps.Costs(forward=1, backward=1, input_grad=1, weight_grad=1, skip_bytes=10,
                     output_bytes=1)  # fmt: skip
    with_skip = ps.simulate(ps.lower(schedule, skips=[(0, 3)], forward_only=True), costs)
    assert with_skip.memory.peak.tolist() == [21, 3]
    without = ps.simulate(ps.lower(schedule, forward_only=True), replace(costs, skip_bytes=None))
    assert without.memory.peak.tolist() == [1, 3]
    for timeline in (with_skip, without):
        assert (timeline.memory().groupby("device").nbytes.last() == 0).all()


def test_idle_time_before_the_first_and_after_the_last_forward() -> None:
    """A device fills until its first F, and drains after its last."""
    graph = ps.lower(ps.schedule("1f1b", 3, 4), forward_only=True)
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    causes = timeline.why.idle_by_cause()
    assert causes["warm_up"].tolist() == [0, 1, 2]
    assert causes["cool_down"].tolist() == [2, 1, 0]
    assert timeline.makespan == timeline.why.lower_bound == 6
    assert timeline.why.gap == 0


def test_lowered_again_and_from_a_file(tmp_path: Path) -> None:
    """The graph knows its options, and its timelines keep them."""
    graph = ps.lower(ps.schedule("chimera", 2, 2), overlap=False, forward_only=True)
    source = graph.options.source
    assert source is not None
    again = ps.lower(source.schedule, **source.arguments)
    assert np.array_equal(again.kind, graph.kind)
    assert again.options == graph.options
    costs = ps.Costs(forward=1, backward=2, output_bytes=4, activation_bytes=100)
    timeline = ps.simulate(graph, costs)
    path = tmp_path / "timeline.csv"
    timeline.save(path)
    loaded = ps.Timeline.load(path, costs=costs)
    assert loaded.graph.forward_only
    assert loaded.memory.peak.tolist() == timeline.memory.peak.tolist()
    text = path.read_text().splitlines()
    path.write_text("\n".join(text[:-1]) + "\n")
    with pytest.raises(TimelineError, match="is missing"):
        ps.Timeline.load(path)


def test_flops_of_a_training_step_are_refused() -> None:
    """The workload of costs has the FLOPs of forward and backward."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), forward_only=True)
    costs = ps.Costs(forward=1, backward=2, workload=Workload(tokens=4, flops=6, peak_flops=9))
    timeline = ps.simulate(graph, costs)
    with pytest.raises(TimelineError, match="no backwards"):
        timeline.mfu()
    assert timeline.mfu(Workload(tokens=4, flops=3), peak_flops=1) == pytest.approx(1)


def test_backwards_are_refused() -> None:
    """A graph with B keeps activations, whatever its builder says."""
    tasks = Tasks(op=[Op.F, Op.B], device=[0, 0], stage=[0, 0], microbatch=[0, 0], stream=[0, 0])
    with pytest.raises(GraphError, match="forward_only=True, but the graph has tasks of a back"):
        ps.TaskGraph.build(tasks, forward_only=True)


def test_fewer_microbatches() -> None:
    """Each path keeps its first micro-batches, under the numbers that it has among fewer."""
    schedule = fewer_microbatches(ps.schedule("chimera", 2, 4), 2)
    ps.verify(schedule)
    assert queue(ps.lower(schedule, forward_only=True), 0) == "0F0 1F1"
    overlapped = fewer_microbatches(ps.schedule("dualpipe", 4, 10), 3)
    ps.verify(overlapped)
    for n in (1, 5):
        with pytest.raises(ScheduleError, match="give 2 to 4"):
            fewer_microbatches(ps.schedule("chimera", 2, 4), n)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`pipesim simulate --forward-only`."""
    counts = ["--devices", "2", "--microbatches", "3", "--forward", "1", "--backward", "2"]
    assert "makespan     4000.0 ms" in succeed(capsys, "simulate", "1f1b", *counts,
                                               "--forward-only")  # fmt: skip

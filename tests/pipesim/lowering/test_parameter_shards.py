"""Sharded parameters: when they are gathered, reduced and freed, and the bytes that they take.

Against grids drawn by hand; replica 1 does what replica 0 does, so that one of them is drawn.
``U0`` gathers the parameters for micro-batch 0; frees take no time and do not show.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import named_schedules

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.ops import LISTED, Op, Overlapped
from pipesim.simulation.simulate import ENGINES
from pipesim.timeline.memory import over_time

COSTS = ps.Costs(
    forward=1, backward=2, input_grad=1, weight_grad=1, optimizer_step=2, unshard=1, reduce_grad=2,
    parameter_bytes=8, gradient_bytes=20, optimizer_bytes=16,
)  # fmt: skip
#: A second a byte; a gather over two replicas lasts half as many seconds as the stage has bytes.
BYTES = replace(
    COSTS, unshard=None, reduce_grad=None, optimizer_step=0, parameter_bytes=2, gradient_bytes=4,
    network=ps.Network(bandwidth=1),
)  # fmt: skip
POLICIES = ("every", 1, 2, "step")


def simulate(
    schedule: ps.Schedule, shard_parameters: str | int, costs: ps.Costs = COSTS, **options: Any
) -> ps.Timeline:
    """Simulate two replicas by both engines, which agree."""
    options = {"n_replicas": 2, "shard_parameters": shard_parameters, **options}
    graph = ps.lower(schedule, **options)
    ps.verify(graph)
    one, other = (ps.simulate(graph, costs, engine=engine) for engine in ENGINES)
    assert (one.start == other.start).all()
    assert (one.end == other.end).all()
    assert (one.why.idle_by_cause().sum(axis=1) == one.idle).all()
    return one


def drawn(timeline: ps.Timeline, streams: str = "unshard|collective") -> str:
    """Draw the compute stream and some others of device 0."""
    return draw(timeline, rows=f"^0( ({streams}))?$")


def order(graph: ps.TaskGraph, device: int = 0) -> str:
    """Return the compute tasks and gathers of a device in order of ids, gathers with their part."""
    ops = LISTED | {Op.UNSHARD, Op.RESHARD}
    tasks = np.flatnonzero(graph.is_op(frozenset(ops)) & (graph.device == device))
    text = " ".join(str(graph.task(int(task)).action) for task in tasks)
    names = {"UNSHARD": "u", "RESHARD": "r", ".forward": "f", ".backward": "b"}
    for name, short in names.items():
        text = text.replace(name, short)
    return text


# When


def test_a_stage_is_gathered_for_each_use() -> None:
    """It is freed before it is gathered again, so that consecutive uses do not overlap gathers."""
    assert drawn(simulate(ps.schedule("gpipe", 1, 2), "every")) == grid("""
        0            | .. F0 .. F1 .. B1 B1 .. B0 B0 .. .. ST
        0 unshard    | U0 .. U1 .. U1 .. .. U0 .. .. .. .. ..
        0 collective | .. .. .. .. .. .. .. .. .. .. RG RG ..
    """)


@pytest.mark.parametrize("policy", [1, 2, "step"])
def test_consecutive_uses_share_a_gather(policy: str | int) -> None:
    assert drawn(simulate(ps.schedule("gpipe", 1, 2), policy)) == grid("""
        0            | .. F0 F1 B1 B1 B0 B0 .. .. ST
        0 unshard    | U0 .. .. .. .. .. .. .. .. ..
        0 collective | .. .. .. .. .. .. .. RG RG ..
    """)


def test_two_stages_on_a_device() -> None:
    """Stage 1 is gathered beside the last F of stage 0, stage 0 beside the last B of stage 1."""
    looped = ps.schedule("looped_bfs", 1, 2, n_chunks=2)
    assert drawn(simulate(looped, 1), "unshard") == grid(
        """
        0         | ... 0F0 0F1 1F0 1F1 1B1 1B1 1B0 1B0 0B1 0B1 0B0 0B0 ... ... ST ST
        0 unshard | 0U0 ... 1U0 ... ... ... ... 0U1 ... ... ... ... ... ... ... ... ...
    """.replace("...", "..")
    )
    # without prefetch, each gather starts when the task before its use has ended
    assert drawn(simulate(looped, 1, prefetch=0), "unshard") == grid(
        """
        0         | ... 0F0 0F1 ... 1F0 1F1 1B1 1B1 1B0 1B0 ... 0B1 0B1 0B0 0B0 ... ... ST ST
        0 unshard | 0U0 ... ... 1U0 ... ... ... ... ... ... 0U1 ... ... ... ... ... ... ... ...
    """.replace("...", "..")
    )


def test_layer_by_layer() -> None:
    """FSDP: a layer is gathered and reduced beside the compute of its neighbours.

    At most two layers are gathered. Shares of three are 66 bytes, gathered layers 8 and gradients
    20 each: the fullest moment is 1B, beside the reduction of stage 2.
    """
    layers = ps.schedule("naive", 1, 1, n_chunks=3)
    timeline = simulate(layers, "every", grad_sync="every")
    assert drawn(timeline) == grid(
        """
        0            | ... 0F0 1F0 2F0 ... 2B0 2B0 1B0 1B0 0B0 0B0 ... ... ST ST ST
        0 unshard    | 0U0 1U0 2U0 ... 2U0 1U0 ... 0U0 ... ... ... ... ... ... ... ...
        0 collective | ... ... ... ... ... ... ... RG RG RG RG RG RG ... ... ...
    """.replace("...", "..")
    )
    frame = over_time(timeline)
    gathered = frame[(frame["device"] == 0) & (frame["time"] < 4)]["nbytes"].max()
    assert gathered == 66 + 2 * 8
    assert timeline.memory.peak.tolist() == [66 + 2 * 8 + 2 * 20] * 2


def test_on_the_compute_stream() -> None:
    """Without overlap, gathers and reductions are on the compute stream, right before the uses."""
    timeline = simulate(ps.schedule("gpipe", 1, 2), "every", overlap=False)
    assert drawn(timeline) == grid("""
        0 | U0 F0 U1 F1 U1 B1 B1 U0 B0 B0 RG RG ST
    """)


def test_every_reduction_frees_its_gradients() -> None:
    """With ``grad_sync="every"`` there is a reduce-scatter after each backward."""
    assert drawn(simulate(ps.schedule("gpipe", 1, 2), "step", grad_sync="every")) == grid("""
        0            | .. F0 F1 B1 B1 B0 B0 .. .. ST
        0 unshard    | U0 .. .. .. .. .. .. .. .. ..
        0 collective | .. .. .. .. .. RG RG RG RG ..
    """)


def test_orders_by_policy() -> None:
    """Two micro-batches through stages 0 and 2 on device 0, interleaved."""
    schedule = ps.schedule("interleaved_1f1b", 2, 2, n_chunks=2)
    wanted = {
        1: "0u0f 0F0 2u0f 0F1 0r1f 2F0 2F1 2B0 0u0b 2B1 2r1b 0B0 0B1 0r1b",
        2: "0u0f 0F0 2u0f 0F1 2F0 2F1 2B0 2B1 2r1b 0B0 0B1 0r1b",
    }
    for policy, text in wanted.items():
        assert order(ps.lower(schedule, n_replicas=2, shard_parameters=policy)) == text
    graphs = [ps.lower(schedule, n_replicas=2, shard_parameters=p) for p in (2, 7, "2", "step")]  # type: ignore[arg-type]
    assert len({order(graph) for graph in graphs}) == 1


def test_a_backward_from_recompute_on_is_one_use() -> None:
    """R and B share a gather, also where another micro-batch runs between them."""
    schedule = ps.schedule("gpipe", 1, 2)
    graph = ps.lower(schedule, n_replicas=2, shard_parameters="every", recompute="always")
    assert order(graph) == ("0u0f 0F0 0r0f 0u1f 0F1 0r1f 0u1b 0R1 0B1 0r1b 0u0b 0R0 0B0 0r0b")
    early = ps.lower(
        schedule, n_replicas=2, shard_parameters="every", recompute="always", recompute_first=True
    )
    assert order(early) == "0u0f 0F0 0r0f 0u1f 0F1 0r1f 0u1b 0R1 0R0 0B1 0B0 0r0b"


def test_w_is_no_use() -> None:
    """A split backward frees the parameters after I; W runs without them."""
    schedule = ps.Schedule.from_orders([[ps.Action.parse(a) for a in ["0F0", "0I0", "0W0"]]])
    graph = ps.lower(schedule, n_replicas=2, shard_parameters="every")
    assert order(graph) == "0u0f 0F0 0r0f 0u0b 0I0 0r0b 0W0"


def test_halves_of_an_overlapped_action_are_one_place() -> None:
    """Both stages are gathered before the F, and freed after the B."""
    orders = [["0F0", "1F0", ("0F1", "1B0"), "1F1", "1B1", "0B0", "0B1"]]
    parsed: Any = [
        [
            Overlapped(*map(ps.Action.parse, a)) if isinstance(a, tuple) else ps.Action.parse(a)
            for a in device
        ]
        for device in orders
    ]
    schedule = ps.Schedule.from_orders(parsed, placement=ps.Placement.looped(1, 2))
    graph = ps.lower(schedule, n_replicas=2, shard_parameters="every", prefetch=0)
    assert order(graph) == (
        "0u0f 0F0 0r0f 1u0f 1F0 1r0f 0u1f 1u0b 0F1 1B0 0r1f 1r0b "
        "1u1f 1F1 1r1f 1u1b 1B1 1r1b 0u0b 0B0 0r0b 0u1b 0B1 0r1b"
    )


# Gathered once a step, as replicas share the optimizer alone
LATE: dict[str, Any] = {"shard_optimizer": True, "gather_parameters": "before_forward"}


def test_a_sharded_optimizer_gathers_before_the_first_forwards() -> None:
    """Two gathers of 3 s delay device 0 by 3 s and by 1 s: the second hides behind 2 s of forwards.

    Without overlap, they come first on the compute stream.
    """
    costs = replace(COSTS, unshard=3, reduce_grad=1)
    schedule = ps.schedule("interleaved_1f1b", 2, 2, n_chunks=2)
    timeline = simulate(schedule, "none", costs, **LATE)
    assert draw(timeline, rows="^[01]( (unshard|collective))?$") == grid("""
        0            | .. .. .. 0F0 0F1 .. 2F0 2F1 .. .. 2B0 2B0 .. 2B1 2B1 0B0 0B0 0B1 0B1 .. ST ST
        0 unshard    | 0U0 0U0 0U0 2U0 2U0 2U0 .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. ..
        0 collective | .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. RG .. .. .. RG .. ..
        1            | .. .. .. .. 1F0 1F1 .. 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 .. ST ST .. ..
        1 unshard    | 1U0 1U0 1U0 3U0 3U0 3U0 .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. ..
        1 collective | .. .. .. .. .. .. .. .. .. .. .. .. .. RG .. .. .. RG .. .. .. ..
    """)
    blocking = simulate(schedule, "none", costs, **LATE, overlap=False)
    assert draw(blocking, rows="^0$").startswith("0 | 0U0 0U0 0U0 2U0 2U0 2U0 0F0 0F1 2F0 2F1")


@pytest.mark.parametrize("seconds", [1, 2, 3, 7])
@pytest.mark.parametrize("n_chunks", [2, 3])
def test_seconds_of_gathers_that_are_not_hidden(seconds: int, n_chunks: int) -> None:
    """A gather hides behind the first forwards of the chunk before it: d micro-batches of 1 s.

    Of v gathers of g seconds, max(g, v g - (v - 1) d) are left; after the step all v g are.
    """
    schedule = ps.schedule("interleaved_1f1b", 2, 4, n_chunks=n_chunks)
    costs = replace(COSTS, unshard=seconds, optimizer_step=0)
    free = simulate(schedule, "none", replace(costs, unshard=0), shard_optimizer=True).makespan
    late, after = (
        simulate(schedule, "none", costs, **options)
        for options in (LATE, {**LATE, "gather_parameters": "after_step"})
    )
    assert late.makespan - free == max(seconds, n_chunks * seconds - (n_chunks - 1) * 2)
    assert after.makespan - free == n_chunks * seconds
    assert late.memory.peak.tolist() == after.memory.peak.tolist()


# Seconds and bytes


def test_gathers_and_reductions_are_halves_of_a_ring() -> None:
    """2 bytes of parameters take 1 s over two replicas, 4 bytes of gradients 2 s."""
    assert drawn(simulate(ps.schedule("gpipe", 1, 2), "step", BYTES)) == grid("""
        0            | .. F0 F1 B1 B1 B0 B0 .. ..
        0 unshard    | U0 .. .. .. .. .. .. .. ..
        0 collective | .. .. .. .. .. .. .. RG RG
    """)
    timeline = simulate(ps.schedule("gpipe", 1, 2), "every", BYTES, n_replicas=4)
    gathers = np.flatnonzero(timeline.graph.is_op(frozenset({Op.UNSHARD})))
    assert (timeline.duration[gathers] == 2 * 3 / 4).all()
    assert (timeline.nbytes[gathers] == 2).all()
    assert timeline.graph.optimizer_shares.tolist() == [4]


def test_memory_by_hand() -> None:
    """Shares of 4, 10 and 8 bytes are always held, gathered 8 bytes and gradients of 20 not."""
    timeline = simulate(ps.schedule("gpipe", 1, 2), "every")
    frame = over_time(timeline)
    held = frame[frame["device"] == 0][["time", "nbytes"]].drop_duplicates().to_numpy()
    wanted = [
        (0, 22), (0, 30), (1, 30), (2, 30), (2, 22), (3, 30), (4, 30), (4, 22),
        (5, 50), (7, 50), (7, 42), (8, 50), (10, 50), (10, 42), (12, 22), (13, 22),
    ]  # fmt: skip
    assert [tuple(row) for row in held.tolist()] == wanted
    table = timeline.memory.breakdown()
    assert table.loc[0, ["parameters", "gradients", "optimizer", "buffers"]].tolist() == [
        12, 10, 8, 20
    ]  # fmt: skip
    assert timeline.memory.peak.tolist() == [50, 50]
    assert simulate(ps.schedule("gpipe", 1, 2), "none", shard_optimizer=True).memory.peak[0] == 36


@pytest.mark.parametrize(
    ("policy", "reduce_grad", "peak"), [("every", 1, 50), ("step", 1, 70), ("step", 3, 90)]
)
def test_gradients_of_several_micro_batches_wait(policy: str, reduce_grad: int, peak: int) -> None:
    """Each gradient that waits for its reduction when the next backward starts is 20 bytes more."""
    costs = replace(COSTS, reduce_grad=reduce_grad)
    timeline = simulate(ps.schedule("gpipe", 1, 3), policy, costs, grad_sync="every")
    assert timeline.memory.peak.tolist() == [peak, peak]


def test_an_evaluation_gathers_for_forwards_alone() -> None:
    timeline = simulate(ps.schedule("gpipe", 1, 2), "every", forward_only=True)
    assert order(timeline.graph) == "0u0f 0F0 0r0f 0u1f 0F1 0r1f"
    assert timeline.memory.peak.tolist() == [12, 12]


# Properties


@given(named_schedules(4), st.sampled_from(POLICIES), st.integers(0, 2), st.booleans())
def test_each_use_lies_between_a_gather_and_a_free(
    schedule: ps.Schedule, policy: str | int, prefetch: int, overlap: bool
) -> None:
    """In the order of each device; and never are more stages gathered than the policy says."""
    if schedule.placement.n_paths > 1 or schedule.n_batches > 1:
        return
    graph = ps.lower(
        schedule, n_replicas=2, shard_parameters=policy, prefetch=prefetch, overlap=overlap  # type: ignore[arg-type]
    )  # fmt: skip
    timeline = ps.simulate(graph, COSTS)
    for device in range(schedule.n_devices):
        own = graph.device == device
        tasks = np.flatnonzero(own & graph.is_op(LISTED | {Op.UNSHARD, Op.RESHARD}))
        gathered: dict[int, int] = {}
        for task in tasks.tolist():
            stage, op = int(graph.stage[task]), graph.op[task]
            if op == Op.UNSHARD:
                assert stage not in gathered
                gathered[stage] = task
            elif op == Op.RESHARD:
                del gathered[stage]
            elif op != Op.W:
                assert timeline.end[gathered[stage]] <= timeline.start[task]
        assert not gathered


@pytest.mark.parametrize("layout", ["replica_major", "stage_major"])
def test_devices_may_prefetch_differently(layout: Any) -> None:
    """Gathers of each device wait for the tasks that its own number says, in all replicas."""
    schedule = ps.schedule("interleaved_1f1b", 2, 4)
    options: dict[str, Any] = {"n_replicas": 2, "shard_parameters": "every", "layout": layout}

    def waits(prefetch: Any) -> dict[tuple[int, int], set[tuple[str, set[str]]]]:
        """Return the gathers of each device, and the tasks that they need."""
        graph = ps.lower(schedule, prefetch=prefetch, **options)
        texts = [str(graph.task(k)) for k in range(len(graph))]
        place = {int(d): (int(graph.replica[k]), int(graph.stage[k]) % 2)
                 for k, d in enumerate(graph.device)}  # fmt: skip
        gathers: dict[tuple[int, int], Any] = {x: set() for x in place.values()}
        for k in np.flatnonzero(graph.op == Op.UNSHARD).tolist():
            needed = frozenset(texts[int(n)] for n in graph.dependencies[k])
            gathers[place[int(graph.device[k])]].add((texts[k], needed))
        return gathers

    mixed, equal = waits([0, 2]), (waits(0), waits(2))
    assert equal[0] != equal[1]
    for (replica, device), own in mixed.items():
        assert own == equal[device][replica, device]
    assert waits("0/2") == waits({0: 0, 1: 2}) == mixed
    assert waits([2, 2]) == equal[1]


def test_longer_residency_moves_fewer_bytes() -> None:
    """The traffic falls from policy to policy; "step" gathers each stage once."""
    schedule = ps.schedule("interleaved_1f1b", 2, 4, n_chunks=3)
    counts = [
        int((ps.lower(schedule, n_replicas=2, shard_parameters=policy).op == Op.UNSHARD).sum())
        for policy in ("every", 1, 2, 3, "step")  # type: ignore[arg-type]
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 2 * 6 * 4 * 2  # replicas, stages, micro-batches, passes
    assert counts[-1] == 2 * 6


def test_files(tmp_path: Path) -> None:
    """Timelines keep streams, parts and prefetch; Chrome traces show the stream of gathers."""
    timeline = simulate(ps.schedule("gpipe", 2, 2), "every", prefetch=2)
    timeline.save(tmp_path / "t.csv")
    again = ps.Timeline.load(tmp_path / "t.csv", costs=COSTS)
    assert again.graph.prefetch == 2
    assert (again.start == timeline.start).all()
    assert (again.memory.peak == timeline.memory.peak).all()
    timeline.to_chrome(tmp_path / "t.json")
    assert '"unshard"' in (tmp_path / "t.json").read_text()


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_replicas": 1}, "there is one replica, .*add n_replicas=2"),
        ({"shard_optimizer": True}, "leave shard_optimizer out"),
        ({"grad_sync": "bucketed"}, 'grad_sync="bucketed".*take "last"'),
        ({"tied": [(0, 1)]}, "leave tied or shard_parameters out"),
        ({"shard_parameters": "sometimes"}, "unknown shard_parameters 'sometimes'"),
        ({"shard_parameters": True}, r"'none', 'every', 'step', or the number .* got True"),
        ({"shard_parameters": 0}, "shard_parameters must be .*at least 1, got 0"),
        ({"shard_parameters": 1.0}, r"got 1.0 \(float\)"),
        ({"prefetch": -1}, "prefetch must be .*at least 0, got -1"),
        ({"prefetch": [1]}, "prefetch has 1 values, and there are 2 devices"),
        ({"prefetch": {2: 1}}, "prefetch names device 2; there are 2 devices"),
        ({"prefetch": "1/x"}, "prefetch of device 1 must be a whole number"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    given_options: dict[str, Any] = {"n_replicas": 2, "shard_parameters": "every", **options}
    with pytest.raises(ArgumentError, match=message):
        ps.lower(ps.schedule("gpipe", 2, 2), **given_options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "add shard_optimizer=True"),
        ({"shard_parameters": "step"}, "add shard_optimizer=True"),
        ({"shard_parameters": "step", "shard_optimizer": True}, "leave shard_optimizer out"),
    ],
)
def test_gathers_before_the_first_forwards_need_a_sharded_optimizer(
    options: dict[str, Any], message: str
) -> None:
    late: dict[str, Any] = {"gather_parameters": "before_forward", "n_replicas": 2, **options}
    with pytest.raises(ArgumentError, match=message):
        ps.lower(ps.schedule("gpipe", 2, 2), **late)


@pytest.mark.parametrize(
    ("name", "message"), [("chimera", "2 paths"), ("pipedream", "steps 4 times")]
)
def test_wrong_schedules(name: str, message: str) -> None:
    for options in ({"shard_parameters": "every"}, LATE):
        with pytest.raises(ArgumentError, match=message):
            ps.lower(ps.schedule(name, 2, 4), n_replicas=2, **options)

"""Lowering: recompute, optimizer steps, transfers, and the issue order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import Lowering, graphs, lowerings, schedules

import pipesim as ps
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.graph.compute_tasks import compute_graph
from pipesim.ops import (
    COLLECTIVES,
    COMPUTE,
    COPIES,
    EXCHANGES,
    LISTED,
    OF_DEVICES,
    RECVS,
    SCHEDULED,
    SENDS,
    TRANSFERS,
    Op,
    Overlapped,
)


def queue(graph: ps.TaskGraph, device: int, stream: str = "compute") -> str:
    """Return a stream's tasks as text."""
    number = graph.streams.index((device, stream))
    return " ".join(str(graph.task(int(task))) for task in graph.queues[number])


def test_recompute_comes_right_before_the_backward() -> None:
    """Every backward has its R, before it on the stream."""
    graph = ps.lower(ps.schedule("gpipe", 1, 3), recompute="always")
    assert queue(graph, 0) == "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0 0STEP"


def test_except_last_leaves_out_the_last_microbatch() -> None:
    """Its activations are needed at once (GPipe, 1811.06965, section 2.3)."""
    gpipe = ps.lower(ps.schedule("gpipe", 1, 3), recompute="except_last")
    assert queue(gpipe, 0) == "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0 0STEP"
    one_f_one_b = ps.lower(ps.schedule("1f1b", 2, 3), recompute="except_last")
    assert queue(one_f_one_b, 0) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0B2 0STEP"
    assert queue(one_f_one_b, 1) == "1F0 1R0 1B0 1F1 1R1 1B1 1F2 1B2 1STEP"


def test_recompute_of_a_split_backward() -> None:
    """R comes before I, which needs the activations first."""
    schedule = ps.Schedule.from_orders([["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"]])
    graph = ps.lower(schedule, recompute="always", step="none")
    assert queue(graph, 0) == "0F0 0F1 0R0 0I0 0R1 0I1 0W1 0W0"


def test_one_step_a_stage() -> None:
    """A device that holds two stages ends with the steps of both."""
    schedule = ps.Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
    assert queue(ps.lower(schedule), 0) == "0F0 1F0 1B0 0B0 0STEP 1STEP"
    assert queue(ps.lower(schedule, step="none"), 0) == "0F0 1F0 1B0 0B0"


def test_streams_per_peer() -> None:
    """A copy stream a peer and direction (rule 1)."""
    graph = ps.lower(ps.schedule("1f1b", 3, 2))
    of_middle = [name for device, name in graph.streams if device == 1]
    assert sorted(of_middle) == ["compute", "recv:0", "recv:2", "send:0", "send:2"]
    assert queue(graph, 1, "recv:0") == "1RECV_F0 1RECV_F1"
    assert queue(graph, 1, "send:2") == "1SEND_F0 1SEND_F1"
    assert queue(graph, 1, "recv:2") == "1RECV_B0 1RECV_B1"
    assert queue(graph, 1, "send:0") == "1SEND_B0 1SEND_B1"


def test_single_copy_stream() -> None:
    """All of a device's messages on one stream, in one order for all devices (rule 1)."""
    graph = ps.lower(ps.schedule("gpipe", 3, 2), streams="single")
    assert {name for _, name in graph.streams} == {"compute", "copy"}
    assert queue(graph, 1, "copy") == (
        "1RECV_F0 1RECV_F1 1SEND_F0 1SEND_F1 1RECV_B1 1SEND_B1 1RECV_B0 1SEND_B0"
    )


def test_without_overlap() -> None:
    """Both ends on ``compute``: sent right after, received right before (rule 5)."""
    graph = ps.lower(ps.schedule("1f1b", 2, 2), overlap=False)
    assert {name for _, name in graph.streams} == {"compute"}
    assert queue(graph, 0) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0STEP"
    assert queue(graph, 1) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1STEP"


def test_without_overlap_recompute_precedes_the_receive() -> None:
    """R does not wait for the gradient, so it must not queue behind it either (rule 3)."""
    graph = ps.lower(ps.schedule("1f1b", 2, 1), overlap=False, recompute="always")
    assert queue(graph, 0) == "0F0 0SEND_F0 0R0 0RECV_B0 0B0 0STEP"


def test_without_overlap_messages_keep_their_senders_order() -> None:
    """A message that is used late is received before one that was sent after it (rule 1)."""
    orders = [["0F0", "0F1", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"]]
    graph = ps.lower(ps.Schedule.from_orders(orders), overlap=False, step="none")
    assert queue(graph, 1) == "1RECV_F0 1RECV_F1 1F1 1F0 1B1 1SEND_B1 1B0 1SEND_B0"


def test_hosts() -> None:
    """One for all, or one a device (rule 7)."""
    schedule = ps.schedule("gpipe", 3, 1)
    assert ps.lower(schedule).host.tolist() == [0, 0, 0]
    assert ps.lower(schedule, hosts="per_device").host.tolist() == [0, 1, 2]


@given(lowerings())
def test_compute_order_is_the_schedules(case: Lowering) -> None:
    """Lowering adds; it never reorders, drops or moves an action, but for R by a mode."""
    schedule, options = case
    kept = SCHEDULED if options.get("sharded") or options["recompute"] != "listed" else LISTED
    before = [str(action) for order in schedule.orders for action in order]
    graph = ps.lower(schedule, **options | {"forward_only": False, "expert_layers": ()})
    for device, order in enumerate(schedule.orders):
        flat = [a for x in order for a in (x if isinstance(x, Overlapped) else (x,))]
        flat = [action for action in flat if action.op in kept]
        for replica in range(options["n_replicas"]):
            home = device + replica * schedule.n_devices
            if options.get("layout") == "stage_major":
                home = replica + device * options["n_replicas"]
            own = [t for t in np.flatnonzero(graph.device == home) if graph.op[t] in kept]
            assert [graph.task(int(t)).action for t in own] == flat
            assert (graph.replica[own] // schedule.placement.n_paths == replica).all()
            halves = {a for x in order if isinstance(x, Overlapped) for a in x}
            marks = graph.kinds.overlapped[graph.kind[own]]
            assert marks.tolist() == [action in halves for action in flat]
    assert before == [str(action) for order in schedule.orders for action in order]
    assert (graph.n_devices, graph.n_stages, graph.n_microbatches) == (
        schedule.n_devices * options["n_replicas"],
        schedule.n_stages,
        schedule.n_microbatches,
    )


@given(lowerings())
def test_counts(case: Lowering) -> None:
    """As many R, messages and steps as the options say, and where they say."""
    schedule, options = case
    plain = {"forward_only": False, "prompt_slices": 0, "expert_layers": ()}
    graph = ps.lower(schedule, **options | plain)
    paths, m = schedule.placement.paths, schedule.n_microbatches
    replicas = options["n_replicas"]
    copies = [replicas * len(set(devices)) for devices in zip(*paths, strict=True)]
    edges = schedule.placement.edges or list(itertools.pairwise(range(schedule.n_stages)))
    crossings = replicas * sum(
        sum(paths[path][a] != paths[path][b] for a, b in edges)
        for path in schedule.placement.path_of(m)
    )
    listed = schedule.stage[(schedule.op == Op.R)]
    n_listed = int((~np.isin(listed, options.get("sharded", ()))).sum())
    recomputed = {"never": 0, "always": m, "except_last": m - 1}.get(options["recompute"])
    counted = {op: int((graph.op == op).sum()) for op in Op}
    sharded = len(options.get("sharded", ()))
    whole = schedule.n_stages - sharded
    n_recomputes = n_listed if recomputed is None else recomputed * whole
    assert counted[Op.R] == replicas * n_recomputes
    n_steps = sum(copies) * schedule.n_batches
    assert counted[Op.STEP] == (n_steps if options["step"] == "flush" else 0)
    syncs, n_batches = options["grad_sync"], schedule.n_batches
    if isinstance(syncs, dict):
        syncs = [syncs.get(stage, "last") for stage in range(schedule.n_stages)]
    syncs = syncs if isinstance(syncs, list) else [syncs] * schedule.n_stages
    a_stage = {"last": n_batches, "every": m, "bucketed": n_batches * options.get("n_buckets", 0)}
    reductions = sum(
        n * (a_stage[sync] if sync in a_stage else m // sync)
        for stage, (sync, n) in enumerate(zip(syncs, copies, strict=True))
        if n > 1 and stage not in options.get("sharded", ())
    )
    assert counted[Op.REDUCE_GRAD] == reductions
    once = options.get("sparse_grad_sync") == "last"
    exchanges = 3 * m + 1 if once else 4 * m
    assert counted[Op.ALL_TO_ALL] == exchanges * replicas * sharded
    own = m * replicas * sharded * (options.get("exchange_work") == "compute")
    assert (counted[Op.DISPATCH], counted[Op.REORDER]) == (own, 2 * own)
    early = options.get("gather_parameters") == "before_forward"
    gathers = options.get("shard_optimizer") and (early or options["step"] == "flush")
    least = sum(copies) - sharded * replicas
    if options.get("shard_parameters", "none") == "none":
        assert (counted[Op.UNSHARD], counted[Op.RESHARD]) == (least if gathers else 0, 0)
    else:  # at least once, at most for each F and each backward
        assert counted[Op.UNSHARD] == counted[Op.RESHARD]
        assert least <= counted[Op.UNSHARD] <= 2 * m * least
    assert [counted[op] for op in sorted(TRANSFERS)] == [crossings] * 4
    n_collective = sum(counted[op] for op in (*COLLECTIVES, *COPIES))
    assert counted[Op.OFFLOAD] == counted[Op.RELOAD]
    assert graph.is_op(COMPUTE).sum() + 4 * crossings + n_collective == len(graph)
    on_compute = graph.on_compute[graph.is_op(TRANSFERS)]
    assert not on_compute.any() if options["overlap"] else on_compute.all()
    assert graph.on_compute[graph.is_op(COMPUTE)].all()


@pytest.mark.slow
@given(graphs())
def test_messages_keep_their_senders_order(graph: ps.TaskGraph) -> None:
    """On every channel (rule 1)."""
    sends, recvs = np.flatnonzero(graph.is_op(SENDS)), np.flatnonzero(graph.is_op(RECVS))
    channel = {s: (graph.device[s], graph.device[graph.pair[s]]) for s in sends}
    for key in set(channel.values()):
        sent = [s for s in sends if channel[s] == key]
        received = [r for r in recvs if channel[graph.pair[r]] == key]
        assert [graph.pair[r] for r in received] == sent


def test_issue_order_by_hand() -> None:
    """Cycle by cycle: what is computed, then what of it is sent, each SEND and RECV together."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), step="none")
    assert " ".join(str(graph.task(task)) for task in range(len(graph))) == (
        "0F0 0SEND_F0 1RECV_F0 0F1 1F0 0SEND_F1 1RECV_F1 1F1 "
        "1B1 1SEND_B1 0RECV_B1 0B1 1B0 1SEND_B0 0RECV_B0 0B0"
    )
    graph = ps.lower(ps.schedule("gpipe", 2, 1), step="none", overlap=False)
    assert " ".join(str(graph.task(task)) for task in range(len(graph))) == (
        "0F0 0SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B0 0B0"
    )


@pytest.mark.parametrize(
    ("overlap", "issued"),
    [
        (
            True,
            "0:0F0 1:0F0 0:0SEND_F0 0:1RECV_F0 1:0SEND_F0 1:1RECV_F0 0:1F0 1:1F0 0:1B0 1:1B0 "
            "0:1SEND_B0 0:0RECV_B0 1:1SEND_B0 1:0RECV_B0 0:1REDUCE_GRAD 1:1REDUCE_GRAD "
            "0:0B0 0:1STEP 1:0B0 1:1STEP 0:0REDUCE_GRAD 1:0REDUCE_GRAD 0:0STEP 1:0STEP",
        ),
        (
            False,
            "0:0F0 1:0F0 0:0SEND_F0 1:0SEND_F0 0:1RECV_F0 1:1RECV_F0 0:1F0 1:1F0 0:1B0 1:1B0 "
            "0:1SEND_B0 1:1SEND_B0 0:1REDUCE_GRAD 1:1REDUCE_GRAD 0:0RECV_B0 1:0RECV_B0 "
            "0:0B0 0:1STEP 1:0B0 1:1STEP 0:0REDUCE_GRAD 1:0REDUCE_GRAD 0:0STEP 1:0STEP",
        ),
    ],
)
def test_issue_order_of_replicas_by_hand(overlap: bool, issued: str) -> None:
    """Each phase of each cycle for one replica after the other (``replica:action``)."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2, overlap=overlap)
    tasks = list(graph)
    assert " ".join(f"{task.replica}:{task}" for task in tasks) == issued
    assert graph.collectives.values.tolist() == [  # stage 0's, then stage 1's
        *(t.id for t in tasks if str(t) == "0REDUCE_GRAD"),
        *(t.id for t in tasks if str(t) == "1REDUCE_GRAD"),
    ]
    assert graph.collectives.ptr.tolist() == [0, 2, 4]


def test_steps_are_issued_after_the_gradients_of_both_directions() -> None:
    """Micro-batch 1 is back before 0 goes: device 3 is done three cycles before stage 0 is."""
    orders = [[f"{3 - d}F1", f"{3 - d}B1", f"{d}F0", f"{d}B0"] for d in range(4)]
    graph = ps.lower(ps.Schedule.from_orders(orders, placement=ps.Placement.bidirectional(4)))
    ps.verify(replace(graph))  # which has passed nothing yet


def test_replicas_have_devices_and_streams_of_their_own() -> None:
    """Replica 1 of two devices is on devices 2 and 3, and sends to its own."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, hosts="per_device")
    assert (graph.n_devices, graph.n_stages, graph.n_replicas) == (4, 2, 2)
    assert graph.host.tolist() == [0, 1, 2, 3]
    assert queue(graph, 2, "send:3") == "0SEND_F0 0SEND_F1"
    assert queue(graph, 3, "recv:2") == "1RECV_F0 1RECV_F1"
    assert queue(graph, 3, "collective") == "1REDUCE_GRAD"
    assert queue(graph, 3) == "1F0 1F1 1B1 1B0 1STEP"
    assert repr(graph).startswith("<TaskGraph gpipe: 40 tasks, 2 replicas, 4 devices, 2 stages")


@pytest.mark.slow
@given(lowerings())
def test_replicas_are_alike(case: Lowering) -> None:
    """Each is the graph of one pipeline, but for what only several do together."""
    schedule, options = case
    options["hosts"] = "one"  # a list has a number for each device of each replica
    options["issue_order"] = "clock_cycle"  # in others, replicas take turns by what they wait for
    if options.get("expert_replicas") != 1:
        options["expert_replicas"] = None  # of another number of replicas
    if schedule.n_batches > 1:
        options["step"] = "flush"  # without steps, several mini-batches are refused for replicas
    many = ps.lower(schedule, **{**options, "n_replicas": 3})
    alone = ps.lower(schedule, **{**options, "n_replicas": 1, "shard_parameters": "none"})
    n_paths = schedule.placement.n_paths
    wanted = list(alone)
    together = {Op.REDUCE_GRAD, Op.UNSHARD, Op.RESHARD, Op.REDUCE_TIED}  # or after REDUCE_GRADs
    wanted = [str(task) for task in wanted if task.op not in together]
    for replica in range(3):
        of_copy = np.flatnonzero(many.replica // n_paths == replica)
        own = [many.task(int(t)) for t in of_copy]
        left = [str(task) for task in own if task.op not in together]
        assert sorted(left) == sorted(wanted)
        # A REDUCE_GRAD, which a pipeline alone lacks, may delay the turn of a RELOAD, and of an
        # exchange behind it on one copy stream.
        delayed = Op.RELOAD in alone.op or Op.ALL_TO_ALL in alone.op
        if not (options["rendezvous"] and not options["overlap"]) and not delayed:
            assert left == wanted
    for number in range(len(many.collectives)):
        members = [many.task(int(t)) for t in many.collectives[number]]
        if members[0].op in OF_DEVICES:
            assert len({task.device for task in members}) == len(members)
            assert len({task.part for task in members}) == 1
            continue
        devices = [path[members[0].stage] for path in schedule.placement.paths]
        firsts = [devices.index(device) for device in dict.fromkeys(devices)]
        expected = [n_paths * copy + path for copy in range(3) for path in firsts]
        members_of = sorted(task.replica for task in members)
        if members[0].op == Op.ALL_TO_ALL and members[0].part >= len(EXCHANGES):  # of experts
            n_members = options["expert_replicas"] or 3
            expected = [members_of[0] + n_paths * place for place in range(n_members)]
        assert members_of == expected
        assert len({task.action for task in members}) == 1


@given(schedules())
def test_issue_order_is_the_clock_cycle(schedule: ps.Schedule) -> None:
    """By distance from the first, counted in compute tasks, then by device (rule 7)."""
    compute = compute_graph(schedule)
    level = {compute.task(t).action: int(compute.levels[t]) for t in range(len(compute))}
    graph = ps.lower(schedule, step="none")
    issued = [task for task in graph if task.op in COMPUTE]
    keys = [(level[task.action], task.device) for task in issued]
    assert keys == sorted(keys)


@pytest.mark.slow
@given(lowerings())
def test_lowering_is_repeatable(case: Lowering) -> None:
    """Two graphs of one schedule are equal in every column."""
    schedule, options = case
    one, two = ps.lower(schedule, **options), ps.lower(schedule, **options)
    for column in (
        "op",
        "device",
        "stage",
        "microbatch",
        "stream",
        "pair",
        "group",
        "host",
        "part",
        "during",
    ):
        assert (getattr(one, column) == getattr(two, column)).all()
    assert one.streams == two.streams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "sometimes"}, r"unknown recompute 'sometimes' \(known: always, exc"),
        ({"recompute": "alway"}, "unknown recompute 'alway'; did you mean 'always'"),
        ({"recompute": True}, "unknown recompute True"),
        ({"recompute": None}, "unknown recompute None"),
        ({"streams": "per-peer"}, "unknown streams 'per-peer'; did you mean 'per_peer'"),
        ({"hosts": "two"}, r"unknown hosts 'two'.*\(known: one, per_device\)"),
        ({"hosts": 1}, "unknown hosts 1"),
        ({"step": "flsh"}, "unknown step 'flsh'; did you mean 'flush'"),
    ],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    """Each with its nearest known value."""
    with pytest.raises(UnknownNameError, match=message):
        ps.lower(ps.schedule("gpipe", 2, 2), **options)


@pytest.mark.parametrize("name", ["overlap", "rendezvous"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags_are_booleans(name: str, value: Any) -> None:
    """A string would be true whatever it says."""
    with pytest.raises(ArgumentError, match=f"{name} must be True or False, got {value!r}"):
        ps.lower(ps.schedule("gpipe", 2, 2), **{name: value})


@pytest.mark.parametrize("thing", [None, "1f1b", [["0F0", "0B0"]]])
def test_only_schedules_are_lowered(thing: Any) -> None:
    """A name is no schedule yet, and neither are bare orders."""
    with pytest.raises(ArgumentError, match=r"schedule must be a pipesim\.Schedule, got"):
        ps.lower(thing)


def test_graphs_are_not_lowered_twice() -> None:
    """A graph has its transfers already."""
    with pytest.raises(ArgumentError, match=r"schedule must be .*, got .*TaskGraph"):
        ps.lower(ps.lower(ps.schedule("gpipe", 2, 2)))  # type: ignore[arg-type]

"""What `verify` finds, and how it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules import all_reduced
from strategies import graphs, schedules

import pipesim as ps
from pipesim.errors import DeadlockError, GraphError, PipeError, ScheduleError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind, Tasks
from pipesim.ops import SCHEDULED, Action, Op, Overlapped
from pipesim.utils.csr import CSR


def refusal(what: Any) -> str:
    """Return the message of a schedule that is refused."""
    schedule = what if isinstance(what, ps.Schedule) else ps.Schedule.from_orders(what)
    with pytest.raises(ScheduleError) as caught:
        ps.verify(schedule)
    assert str(caught.value).startswith(f"schedule '{schedule.name}'")
    return str(caught.value)


@given(schedules())
def test_schedules_pass(schedule: ps.Schedule) -> None:
    """Every named schedule, and every order that breaks no rule."""
    ps.verify(schedule)


@given(graphs())
def test_graphs_pass(graph: ps.TaskGraph) -> None:
    """Whatever lowering makes; it says so without looking, and a copy is looked at."""
    assert graph.verified
    copy = replace(graph)
    assert not copy.verified
    ps.verify(copy)
    assert copy.verified


def test_missing_action() -> None:
    """The device, the action and how many more; the cell is marked where it could stand."""
    message = refusal([["0F0", "0F1", "0B0"], ["1F0", "1F1", "1B0", "1B1"]])
    assert "device 0 lacks 0B1 (1 B missing in all); add it to the order" in message
    assert "device 0 | 0F0 0F1 0B0 ><\ndevice 1 | 1F0 1F1 1B0 1B1" in message


def test_missing_forward() -> None:
    """If the graph has a backward."""
    assert "device 0 lacks 0F0 (1 F missing" in refusal([["0B0", "0F1", "0B1"]])


@pytest.mark.parametrize(("half", "other"), [("I", "W"), ("W", "I")])
def test_half_a_backward(half: str, other: str) -> None:
    """I without W and W without I."""
    assert f"lacks 0{other}0 (1 {other} missing" in refusal([["0F0", f"0{half}0"]])


def test_device_without_actions() -> None:
    """A stage that nothing runs: its first forward is missing."""
    schedule = ps.Schedule.from_orders([["0F0", "0B0"], []], placement=ps.Placement.linear(2))
    assert "device 1 lacks 1F0" in refusal(schedule)


def test_duplicate_action() -> None:
    """The second one is marked."""
    message = refusal([["0F0", "0F1", "0B0", "0F0", "0B1"]])
    assert "device 0, position 3: 0F0 is a duplicate; it is listed before" in message
    assert "device 0 | 0F0   0F1   0B0   >0F0< 0B1" in message


def test_misplaced_action() -> None:
    """An action on a device that does not hold its stage."""
    message = refusal([["0F0", "0B0"], ["1F0", "1B0", "0F1", "0B1"]])
    assert "device 1, position 2: 0F1 is misplaced: stage 0 lies on device 0" in message
    assert "device 1 | 1F0   1B0   >0F1< 0B1" in message


@pytest.mark.parametrize(("half", "marked"), [("I", ">0I0<"), ("W", ">0W0<")])
def test_whole_and_half_a_backward(half: str, marked: str) -> None:
    """B stands for I and W, so neither can stand beside it."""
    message = refusal([["0F0", "0B0", f"0{half}0"]])
    assert f"device 0, position 2: 0{half}0 is listed with 0B0, which is the whole back" in message
    assert marked in message


def test_out_of_range() -> None:
    """Stages beyond the placement, micro-batches beyond their number."""
    orders = [["0F0", "0B0", "1F0"]]
    schedule = ps.Schedule.from_orders(orders, placement=ps.Placement.linear(1))
    assert "position 2: 1F0 names a stage outside 0..0" in refusal(schedule)
    schedule = ps.Schedule.from_orders([["0F0", "0B0", "0F7"]], n_microbatches=2)
    assert "position 2: 0F7 names a micro-batch outside 0..1" in refusal(schedule)


def test_unlisted_operation() -> None:
    """A transfer that came in as a column."""
    columns = ([Op.F, Op.B, Op.SEND_F], [0, 0, 0], [0, 0, 0])
    schedule = ps.Schedule.from_columns("mine", ps.Placement.linear(1), 1, [columns])
    message = refusal(schedule)
    assert "position 2: 0SEND_F0 is no operation that a schedule lists (F, B, I, W, R)" in message


def edited(action: Action, edit: str, schedule: ps.Schedule, data: st.DataObject) -> Action:
    """Return an action with another op, stage or micro-batch."""
    if edit == "op":
        return action._replace(op=data.draw(st.sampled_from(sorted(SCHEDULED - {action.op}))))
    limit = schedule.n_stages if edit == "stage" else schedule.n_microbatches
    value = (getattr(action, edit) + data.draw(st.integers(1, limit))) % (limit + 1)
    return action._replace(**{edit: value})


@given(schedule=schedules(), data=st.data())
def test_any_single_edit_is_found(schedule: ps.Schedule, data: st.DataObject) -> None:
    """Take an action out, list one twice, or change one or a half of two: no such order passes."""
    orders = [list(order) for order in schedule.orders]
    device = data.draw(st.integers(0, len(orders) - 1))
    position = data.draw(st.integers(0, len(orders[device]) - 1))
    action = orders[device][position]
    edit = data.draw(st.sampled_from(["drop", "double", "op", "stage", "microbatch"]))
    if edit == "drop":
        del orders[device][position]
    elif edit == "double":
        orders[device].insert(data.draw(st.integers(0, len(orders[device]))), action)
    elif isinstance(action, Overlapped):
        half = data.draw(st.sampled_from(["forward", "backward"]))
        changed = edited(getattr(action, half), edit, schedule, data)
        orders[device][position] = action._replace(**{half: changed})
    else:
        orders[device][position] = edited(action, edit, schedule, data)
    with pytest.raises(ScheduleError):
        ps.verify(
            ps.Schedule.from_orders(
                orders,
                placement=schedule.placement,
                n_microbatches=schedule.n_microbatches,
            )
        )


def test_deadlock_names_each_blocked_head() -> None:
    """Device 0 wants its backward before device 1 may do the forward that it needs."""
    orders = [["0F0", "0B1", "0F1", "0B0"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(DeadlockError) as caught:
        ps.verify(ps.Schedule.from_orders(orders, name="mine"))
    assert str(caught.value) == (
        "schedule 'mine' deadlocks: 2 streams wait for each other; their blocked heads are\n"
        "  device 0, compute: 0B1 (position 1) waits for 0F1 on device 0, 1B1 on device 1\n"
        "  device 1, compute: 1F1 (position 1) waits for 0F1 on device 0\n"
        "list each task before the tasks that wait for it\n"
        "device 0 | 0F0   >0B1< 0F1   0B0\n"
        "device 1 | 1F0   1F1   1B0   1B1"
    )
    assert isinstance(caught.value, ScheduleError)


def test_backward_before_its_forward_deadlocks() -> None:
    """On one device already."""
    with pytest.raises(DeadlockError, match=r"0B0 \(position 0\) waits for 0F0 on device 0"):
        ps.verify(ps.Schedule.from_orders([["0B0", "0F0"]]))
    with pytest.raises(DeadlockError, match=r"0W0 \(position 1\) waits for 0I0 on device 0"):
        ps.verify(ps.Schedule.from_orders([["0F0", "0W0", "0I0"]]))


def test_long_deadlock_reports_are_cut() -> None:
    """At most 16 devices are named."""
    orders = [[f"{d}B0", f"{d}F0"] for d in range(20)]
    with pytest.raises(DeadlockError, match=r"20 streams(.|\n)*\.\.\. and 4 more streams"):
        ps.verify(ps.Schedule.from_orders(orders))


def test_schedules_are_verified_before_they_are_lowered() -> None:
    """The schedule's own message, not one about tasks that the user never wrote."""
    with pytest.raises(ScheduleError, match="schedule 'custom': device 0 lacks 0B0"):
        ps.lower(ps.Schedule.from_orders([["0F0"]]))


def test_neither_schedule_nor_graph() -> None:
    """Anything else is refused with its type."""
    with pytest.raises(PipeError, match="Schedule or a TaskGraph, got list"):
        ps.verify([["0F0"]])  # type: ignore[arg-type]


def hand_built(*actions: str, device: tuple[int, ...], stream: tuple[int, ...]) -> Tasks:
    """Make tasks of actions in text form."""
    parsed = [Action.parse(action) for action in actions]
    columns = (
        [int(a.op) for a in parsed],
        device,
        [a.stage for a in parsed],
        [-1 if a.microbatch is None else a.microbatch for a in parsed],
        stream,
    )
    return Tasks(*(np.array(column, dtype=np.int64) for column in columns))


def two_stages() -> ps.TaskGraph:
    """Return a graph that passes."""
    return ps.lower(ps.schedule("gpipe", 2, 2))


def test_dependency_on_nothing() -> None:
    """A dependency names a task of the graph."""
    graph = two_stages()
    for wrong in (len(graph), -1):
        values = graph.dependencies.values.copy()
        values[0] = wrong
        broken = replace(graph, dependencies=CSR(graph.dependencies.ptr, values))
        with pytest.raises(GraphError, match=rf"names a task outside 0..{len(graph) - 1}"):
            ps.verify(broken)


def test_send_without_its_recv() -> None:
    """Neither end of a message can do without the other."""
    send = int(StreamKind.send(1))  # type: ignore[arg-type]
    tasks = hand_built("0F0", "0SEND_F0", "1F0", device=(0, 0, 1), stream=(0, send, 0))
    with pytest.raises(GraphError, match=r"task 1 \(0SEND_F0\) has no counterpart"):
        ps.verify(TaskGraph.build(tasks))


def test_task_twice() -> None:
    """One task for each operation, stage and micro-batch."""
    tasks = hand_built("0F0", "0F0", device=(0, 0), stream=(0, 0))
    with pytest.raises(GraphError, match="0F0 is in the graph twice"):
        ps.verify(TaskGraph.build(tasks))


def test_ids_are_topological() -> None:
    """`wire` keeps any order, `build` mends it, `verify` tells."""
    tasks = hand_built("1F0", "0F0", device=(1, 0), stream=(0, 0))
    with pytest.raises(GraphError, match=r"task 0 \(1F0\) waits for task 1 \(0F0\), which is iss"):
        ps.verify(TaskGraph.wire(tasks))
    ps.verify(TaskGraph.build(tasks))


def test_messages_of_a_channel_keep_their_order() -> None:
    """Two messages sent in one order and received in the other (rule 1)."""
    graph = two_stages()
    first, second = (
        next(t for t in range(len(graph)) if str(graph.task(t)) == name)
        for name in ("1RECV_F0", "1RECV_F1")
    )
    kind, microbatch = graph.kind.copy(), graph.microbatch.copy()
    microbatch[[first, second]] = microbatch[[second, first]]
    broken = TaskGraph.of_kinds(graph.kinds, kind, microbatch)
    with pytest.raises(
        GraphError,
        match=r"device 1 receives 1RECV_F1 before 1RECV_F0, but device 0 sends 0SEND_F0 first",
    ):
        ps.verify(broken)


def test_transfers_that_deadlock() -> None:
    """1F1B's messages on one default stream, with a rendezvous: known not to work."""
    schedule = ps.schedule("1f1b", 3, 4)
    ps.lower(schedule, overlap=False)
    with pytest.raises(DeadlockError) as caught:
        ps.lower(schedule, overlap=False, rendezvous=True)
    for device, head in enumerate(("0SEND_F2", "1SEND_F1", "2SEND_B0")):
        assert f"device {device}, compute: {head} (position" in str(caught.value)


def test_changed_graphs_are_verified_again() -> None:
    """A copy with other columns has passed nothing yet; one under another name has."""
    graph = two_stages()
    assert graph.with_name("other").verified
    assert not graph.with_name("other").rendezvous
    waits = replace(graph, host=np.arange(graph.n_devices))
    assert not waits.verified
    ps.simulate(waits, ps.Costs(1, 2))
    assert waits.verified
    values = graph.dependencies.values.copy()
    values[0] = len(graph)
    broken = replace(graph, dependencies=CSR(graph.dependencies.ptr, values))
    for look in (ps.verify, lambda g: ps.simulate(g, ps.Costs(1, 2))):
        with pytest.raises(GraphError, match="a dependency names a task outside"):
            look(broken)
    assert not broken.verified
    assert not broken.with_name("other").verified


def test_collectives_that_deadlock() -> None:
    """Two devices that reduce two stages in opposite orders."""
    op = np.full(4, Op.REDUCE_GRAD)
    device, stage = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 0])
    tasks = Tasks(op, device, stage, np.full(4, -1), np.zeros(4, dtype=np.int64), device)
    graph = TaskGraph.build(tasks)
    assert graph.collectives.values.tolist() == [0, 3, 1, 2]
    assert graph.levels.tolist() == [-1] * 4
    with pytest.raises(DeadlockError, match="deadlocks: 2 streams wait for each other") as caught:
        ps.verify(graph)
    for number, head in enumerate(("0REDUCE_GRAD", "1REDUCE_GRAD")):
        assert f"device {number}, compute: {head} (position 0) waits for" in str(caught.value)
    again = Tasks(op, device, stage[[0, 1, 0, 1]], tasks.microbatch, tasks.stream, device)
    ps.verify(TaskGraph.build(again))


def test_levels_of_a_collective() -> None:
    """Its members have one: that of the last to come."""
    graph = all_reduced()
    names = [str(graph.task(task)) for task in range(len(graph))]
    assert names == ["0F0", "1F0", "1B0", "0B0", "0REDUCE_GRAD", "1REDUCE_GRAD"]
    assert graph.levels.tolist() == [0, 1, 2, 3, 4, 4]

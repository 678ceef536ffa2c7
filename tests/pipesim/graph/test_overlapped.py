"""An F and a B that run as one action: text, order, time, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import times

import pipesim as ps
from pipesim.errors import ArgumentError, DeadlockError, GraphError, ScheduleError
from pipesim.graph import Tasks
from pipesim.ops import Overlapped, parse_action

ORDERS = [
    ["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"],
    ["1F0", "1B0", "1F1", "(1F2;1B1)OVERLAP_F_B", "1B2"],
]


@pytest.fixture(name="schedule")
def _schedule() -> ps.Schedule:
    return ps.Schedule.from_orders(ORDERS)


def test_text_and_back(schedule: ps.Schedule) -> None:
    """Orders print as torch prints them, and are read again."""
    assert [[str(action) for action in order] for order in schedule.orders] == ORDERS
    assert ps.Schedule.from_orders(schedule.orders) == schedule
    pair = parse_action(" (0F2;7B0)OVERLAP_F_B ")
    assert pair == Overlapped(ps.Action(0, ps.Op.F, 2), ps.Action(7, ps.Op.B, 0))
    assert len(schedule) == 12
    alone = [[a.replace("(0F2;0B0)OVERLAP_F_B", "0F2") for a in o] for o in ORDERS]
    assert ps.Schedule.from_orders(alone) != schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(0B2;0F0)OVERLAP_F_B", "overlaps B with F; write the F first"),
        ("(0F2;0W0)OVERLAP_F_B", "overlaps F with W; write the F first and the B or I second"),
        ("(0F2;0X0)OVERLAP_F_B", "names no operation: 'X'"),
        ("(0F2)OVERLAP_F_B", "is not an action"),
        ("(0F2;0B0)", "is not an action"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    """The error names the mistake."""
    with pytest.raises(ArgumentError, match=message):
        parse_action(text)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.usefixtures("each_engine")
def test_time(schedule: ps.Schedule, overlap: bool) -> None:
    """It starts when both can, takes its own time, and sends both results at its end.

    With F = 1, B = 2, both overlapped 2.4::

        device 0 | F0 F1 .. .. F2B0 F2B0 ....
        device 1 | .. F0 B0 B0 F1   .... F2B1
    """
    graph = ps.lower(schedule, overlap=overlap)
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2, overlapped=2.4))
    begin, middle = times(timeline, "0F2")
    assert (begin, times(timeline, "0B0")) == (4.0, (middle, pytest.approx(6.4)))
    assert middle - begin == pytest.approx(0.8)  # F has its share
    assert times(timeline, "1F2")[0] == times(timeline, "0B0")[1]  # not when the F half ends
    assert times(timeline, "1B2")[0] == pytest.approx(8.8)
    assert timeline.busy == pytest.approx([8.4, 8.4])


@pytest.mark.usefixtures("each_engine")
def test_forward_and_input_gradient() -> None:
    """F and I of 1 s take the share of their sum that F and B of 3 s take: 2.4 s; W stays alone."""
    orders = [["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0I1", "0W1"]]
    schedule = ps.Schedule.from_orders(orders)
    assert [[str(action) for action in order] for order in schedule.orders] == orders
    costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, overlapped=2.4)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    assert times(timeline, "0F1") == (1, pytest.approx(1.8))
    assert times(timeline, "0I0")[1] == pytest.approx(2.6)
    assert timeline.makespan == pytest.approx(5.6)
    free = ps.Costs(0, 0, input_grad=0, weight_grad=0, overlapped=2.4)
    assert ps.simulate(ps.lower(schedule, step="none"), free).makespan == 2.4


def test_default_is_the_sum(schedule: ps.Schedule) -> None:
    """By default, an overlapped action takes as long as its two halves together."""
    graph = ps.lower(schedule)
    timeline = ps.simulate(graph, ps.Costs(forward=(1, 4), backward=(2, 3)))
    for action, seconds in (("0F2", 1), ("0B0", 2), ("1F2", 4), ("1B1", 3)):
        start, end = times(timeline, action)
        assert end - start == seconds
    per_stage = ps.simulate(graph, ps.Costs(forward=(1, 4), backward=(2, 3), overlapped=(2, 5)))
    start, end = times(per_stage, "1F2")
    assert end - start == pytest.approx(5 * 4 / 7)


def test_memory(schedule: ps.Schedule) -> None:
    """It takes the forward's activations at its start, and gives the backward's back at its end."""
    costs = ps.Costs(forward=1, backward=2, activation_bytes=1)
    assert ps.simulate(ps.lower(schedule), costs).memory.peak.tolist() == [3, 2]


def test_recompute_comes_before_both_halves(schedule: ps.Schedule) -> None:
    """R runs before the action, and not between its halves."""
    graph = ps.lower(schedule, recompute="always")
    compute = [graph.task(t) for t in range(len(graph)) if graph.on_compute[t]]
    order = [str(task) for task in compute if task.device == 0]
    assert order == ["0F0", "0F1", "0R0", "0F2", "0B0", "0R1", "0B1", "0R2", "0B2", "0STEP"]


def test_saved_and_loaded(schedule: ps.Schedule, tmp_path: object) -> None:
    """A timeline's file keeps which tasks overlap."""
    timeline = ps.simulate(ps.lower(schedule), ps.Costs(forward=1, backward=2))
    path = f"{tmp_path}/timeline.csv"
    timeline.save(path)
    loaded = ps.Timeline.load(path)
    assert loaded.frame["overlapped"].tolist() == timeline.frame["overlapped"].tolist()
    wanted = timeline.graph.dependencies
    assert np.array_equal(loaded.graph.dependencies.values, wanted.values)
    replayed = ps.replay(loaded)
    assert replayed.end.tolist() == timeline.end.tolist()


def test_overlap_that_cannot_be() -> None:
    """A backward cannot overlap the forward that it needs."""
    orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B1)OVERLAP_F_B", "1B0"]]
    with pytest.raises(DeadlockError, match=r"1F1 \(position 1\) waits for"):
        ps.verify(ps.Schedule.from_orders(orders))


def test_overlapped_with_nothing() -> None:
    """Columns that mark an F before something else than a B."""
    schedule = ps.Schedule.from_columns(
        "odd",
        ps.Placement.linear(1),
        2,
        [([0, 0, 1, 1], [0] * 4, [0, 1, 0, 1], [True, False, False, False])],
    )
    with pytest.raises(ScheduleError, match=r"position 0: .*is overlapped with nothing"):
        ps.verify(schedule)


def test_odd_halves_in_a_graph() -> None:
    """A graph of one's own, whose marks do not pair up."""
    columns = ([0, 0, 1, 1], [0] * 4, [0] * 4, [0, 1, 0, 1], [0] * 4)
    tasks = Tasks(*columns, overlapped=[1, 0, 1, 0])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="is overlapped with nothing"):
        ps.verify(ps.TaskGraph.build(tasks))
    with pytest.raises(GraphError, match="overlapped must be 0 to 1, got 2"):
        ps.TaskGraph.build(Tasks(*columns, overlapped=[2, 0, 1, 0]))  # type: ignore[arg-type]

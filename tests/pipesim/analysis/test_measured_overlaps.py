"""Costs from timelines that have overlapped actions, simulated and imported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import without_costs

import pipesim as ps
from pipesim.analysis.measured_costs import stage_seconds
from pipesim.ops import Op

#: The F of stage 0 overlaps its own B; stage 1 has no F half, and no plain B.
ORDERS = [
    ["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"],
    ["1F0", "1F1", "1B0", "1F2", "1B1", "1B2"],
]
seconds = st.tuples(*[st.floats(0.5, 4)] * 4)


def run(orders: list[list[str]], costs: ps.Costs, **options: object) -> ps.Timeline:
    """Simulate orders; the timeline does not say from which costs."""
    schedule = ps.Schedule.from_orders(orders, **options)  # type: ignore[arg-type]
    timeline = ps.simulate(ps.lower(schedule), costs)
    return without_costs(timeline)


def test_by_hand() -> None:
    """Halves count for ``overlapped`` alone; a stage without them has the sum of its F and B."""
    timeline = run(ORDERS, ps.Costs((1, 2), (2, 4), overlapped=(2.4, 9)))
    costs = ps.Costs.from_timeline(timeline)
    assert costs.forward == pytest.approx((1, 2))
    assert costs.backward == pytest.approx((2, 4))
    assert costs.overlapped == pytest.approx((2.4, 6))
    assert stage_seconds(timeline, Op.F) == pytest.approx([1, 2])
    halves = stage_seconds(timeline, Op.B, overlapped=True)
    assert halves == pytest.approx([1.6, np.nan], nan_ok=True)


def test_mean_and_median() -> None:
    """Of three overlapped actions, one takes longer."""
    orders = [["0F0", *(f"(0F{j + 1};0B{j})OVERLAP_F_B" for j in range(3)), "0B3"]]
    timeline = run(orders, ps.Costs(1, 2, overlapped=2.4))
    end = timeline.end.copy()
    end[np.flatnonzero((timeline.graph.op == Op.B) & (timeline.graph.microbatch == 2))] += 3
    slow = replace(timeline, end=end)
    assert ps.Costs.from_timeline(slow).overlapped == pytest.approx((3.4,))
    assert ps.Costs.from_timeline(slow, average="median").overlapped == pytest.approx((2.4,))


def test_split_backwards_beside_overlapped_ones() -> None:
    """A stage whose every B is overlapped has I and W for B; its halves keep their sum."""
    orders = [["0F0", "1F0", "0F1", "(1F1;1B0)OVERLAP_F_B", "0B0", "1I1", "1W1", "0B1"]]
    costs = ps.Costs((1, 1), (2, 2), 1.25, 1.5, overlapped=2.4)
    back = ps.Costs.from_timeline(run(orders, costs, placement=ps.Placement.looped(1, 2)))
    assert back.backward == pytest.approx((2, 2.75))
    assert back.overlapped == pytest.approx((3, 2.4))


def test_one_half_of_each_stage() -> None:
    """Where only the F or only the B of a stage overlaps, it gets its share back."""
    orders = [["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "1F1", "0B0", "1B1", "0B1"]]
    costs = ps.Costs((1, 0), (3, 2), overlapped=(8, 5))
    timeline = run(orders, costs, placement=ps.Placement.looped(1, 2))
    back = ps.Costs.from_timeline(timeline)
    assert back.overlapped == pytest.approx((8, 5))
    assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("dualpipe", {}), ("dualpipev", {}), ("interleaved_1f1b", {"merged": "delayed_w"})],
)
@given(forward=seconds, backward=seconds, overlapped=seconds, p=st.sampled_from([2, 4]))
def test_costs_of_a_run_predict_it(
    name: str,
    options: dict[str, str],
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    overlapped: tuple[float, ...],
    p: int,
) -> None:
    """Taken from a run and simulated again: the same makespan, whatever each stage takes."""
    schedule = ps.schedule(name, p, 4 * p, **options)
    columns = [tuple(x[s % 4] for s in range(schedule.n_stages)) for x in
            (forward, backward, overlapped)]  # fmt: skip
    halves = tuple(x / 2 for x in columns[1])
    costs = ps.Costs(columns[0], columns[1], halves, halves, overlapped=columns[2])
    timeline = ps.simulate(ps.lower(schedule), costs)
    back = ps.Costs.from_timeline(
        replace(timeline, costs=None), input_grad=halves, weight_grad=halves
    )
    assert back.forward == pytest.approx(columns[0])
    assert back.overlapped == pytest.approx(columns[2])
    assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)


def test_nothing_overlaps() -> None:
    """The costs then say nothing of it."""
    assert ps.Costs.from_timeline(run([["0F0", "0B0"]], ps.Costs(1, 2))).overlapped is None

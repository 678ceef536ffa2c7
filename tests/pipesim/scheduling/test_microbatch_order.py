"""`Schedule.with_microbatch_order`: the same schedule with its micro-batches in another order."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import schedules

import pipesim as ps
from pipesim.errors import ArgumentError, PipeError, ScheduleError


def test_1f1b_with_sorted_lengths() -> None:
    """Drawn by hand: lengths 3, 1, 2 take 20 s in their order, and 16 s from short to long."""
    costs = ps.Costs([[3, 1, 2]], [[3, 1, 2]])
    schedule = ps.schedule("1f1b", 2, 3)
    assert ps.simulate(ps.lower(schedule, step="none"), costs).makespan == 20
    timeline = ps.simulate(ps.lower(schedule.with_microbatch_order([1, 2, 0]), step="none"), costs)
    assert draw(timeline, transfers=False) == grid("""
        0 | F1 F2 F2 B1 F0 F0 F0 B2 B2 .. .. .. .. B0 B0 B0
        1 | .. F1 B1 F2 F2 B2 B2 F0 F0 F0 B0 B0 B0 .. .. ..
    """)


@given(st.data())
def test_it_takes_as_long_as_with_permuted_costs(data: st.DataObject) -> None:
    """The makespan with costs C is that of the schedule itself with the columns of C permuted."""
    schedule = data.draw(schedules(recomputes=True))
    m, n_batches = schedule.n_microbatches, schedule.n_batches
    path, batch = schedule.placement.path_of(m), np.arange(m) * n_batches // m
    numbers = data.draw(st.permutations(range(m)))
    order = np.lexsort((np.argsort(numbers), batch, path))
    try:
        other = schedule.with_microbatch_order(order)
    except ScheduleError:  # a mini-batch has micro-batches of several paths
        return
    seconds = np.array(data.draw(st.permutations(range(1, m + 1))), dtype=float)[None]
    kwargs: dict[str, Any] = {"network": ps.Network(1, 4)}

    def simulated(chosen: ps.Schedule, row: np.ndarray) -> ps.Timeline:
        costs = ps.Costs(row, input_grad=row, weight_grad=row, activation_bytes=row,
                         output_bytes=row, recompute=row, **kwargs)  # fmt: skip
        return ps.simulate(ps.lower(chosen), costs)

    timeline, expected = simulated(other, seconds), simulated(schedule, seconds[:, order])
    assert timeline.makespan == expected.makespan
    assert (timeline.memory.peak == expected.memory.peak).all()
    assert other.with_microbatch_order(np.argsort(order)) == schedule


def test_its_own_order_is_the_same_schedule() -> None:
    schedule = ps.schedule("zb_h1", 3, 4)
    assert schedule.with_microbatch_order(range(4)) is schedule
    assert schedule.with_microbatch_order([3, 2, 1, 0]).recipe is None


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2], "order has 3 entries, but the schedule has 4 micro-batches; give each micro-"),
        ([0, 1, 2, 4], "order has 4 at position 3; give each micro-batch from 0 to 3 once"),
        ([0, 1, 2, 1.5], "order has 1.5 at position 3; give each"),
        ([0, 1, 2, "x"], "order has 'x' at position 3; give each"),
        ([0, 1, 2, 1], "order has micro-batch 1 twice; give each micro-batch from 0 to 3 once"),
        ("longest", "order must be a sequence of micro-batches, got 'longest'"),
        (None, "order must be a sequence of micro-batches, got None"),
    ],
)
def test_bad_orders(order: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ps.schedule("1f1b", 2, 4).with_microbatch_order(order)


def test_paths_and_mini_batches_keep_their_micro_batches() -> None:
    both = ps.schedule("chimera", 2, 4)
    assert both.with_microbatch_order([1, 0, 3, 2]).microbatch[0] == 1
    message = r"micro-batch 2 of path 1 at position 0 of path 0; .* so give one of 0 to 1 there"
    with pytest.raises(ScheduleError, match=message):
        both.with_microbatch_order([2, 1, 0, 3])
    steps = ps.schedule("1f1b", 2, 4).with_updates(2, "stashed")
    with pytest.raises(PipeError, match=r"micro-batch 3 of mini-batch 1 at position 0 of mini-"):
        steps.with_microbatch_order([3, 1, 2, 0])

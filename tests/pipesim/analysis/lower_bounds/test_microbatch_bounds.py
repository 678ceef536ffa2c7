"""Lower bounds for micro-batches that differ: below every order, and exact in simple cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import CostsError
from pipesim.timeline.rates import longest_span

PLACEMENTS = {
    "linear": ps.Placement.linear(3),
    "v_shaped": ps.Placement.v_shaped(2),
    "looped": ps.Placement.looped(2, 2),
    "bidirectional": ps.Placement.bidirectional(2),
}
LENGTHS = ps.Costs([[1, 2, 3]], [[1, 2, 3]])
PRIORITIES = ("backward_first", "forward_first", "critical_path", "longest_first", "shortest_first")


def test_one_device_works_without_a_pause() -> None:
    """The bound is the sum of the seconds of all micro-batches, not of the least ones."""
    costs = ps.Costs([[1, 2, 6]], [[2, 3, 7]])
    assert ps.lower_bound(ps.Placement.linear(1), 3, costs) == 21


def test_the_last_device_begins_after_the_shortest_head() -> None:
    """Device 1 works 12 s; the least F of stage 0 comes before, and the least B after that."""
    assert ps.lower_bound(ps.Placement.linear(2), 3, LENGTHS) == 1 + 12 + 1
    schedule = ps.schedule("1f1b", 2, 3)
    makespans = [
        ps.simulate(ps.lower(schedule.with_microbatch_order(order)), LENGTHS).makespan
        for order in itertools.permutations(range(3))
    ]
    assert min(makespans) >= 14


def test_a_long_micro_batch_is_a_longest_path() -> None:
    costs = ps.Costs([[1, 1, 50]], [[1, 1, 50]])
    assert ps.lower_bound(ps.Placement.linear(4), 3, costs) == 400


def test_memory_counts_with_the_least_bytes() -> None:
    """One micro-batch at a time if even the least two exceed the limit."""
    costs = ps.Costs([[1, 1, 1]], [[1, 1, 1]], activation_bytes=[[3, 4, 5]])
    assert ps.lower_bound(ps.Placement.linear(3), 3, costs, 5) == 3 * 6
    assert ps.lower_bound(ps.Placement.linear(3), 3, costs, 5) > ps.lower_bound(
        ps.Placement.linear(3), 3, costs, 9
    )


@pytest.mark.slow
@given(st.data())
def test_no_order_goes_below(data: st.DataObject) -> None:
    """Makespans and spans of list schedules in several orders of micro-batches."""
    placement = PLACEMENTS[data.draw(st.sampled_from(sorted(PLACEMENTS)))]
    n_stages, m = placement.n_stages, data.draw(st.integers(2, 5))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = draws.integers(1, 6, (6, n_stages, m)).astype(float)
    if data.draw(st.booleans()):
        values = draws.uniform(0, 5, values.shape)
    split = data.draw(st.sampled_from([None, False, True]))
    costs = ps.Costs(
        values[0], input_grad=values[1], weight_grad=values[2], backward=values[3],
        activation_bytes=values[4], weight_grad_bytes=values[4] / 2, output_bytes=values[5],
        network=ps.Network(0.5, 4), optimizer_step=1,
    )  # fmt: skip
    limit = None
    if data.draw(st.booleans()):
        limit = float(values[4].max() * placement.n_chunks * 2 * placement.n_paths)
    bounds = {
        objective: ps.lower_bound(
            placement, m, costs, limit, split_backward=split, objective=objective, search=False
        )
        for objective in ("makespan", "span")
    }
    for priority, is_split in itertools.product(PRIORITIES, (False, True)):
        if split not in (None, is_split):
            continue
        schedule = ps.order_by(placement, m, costs, priority=priority, memory_limit=limit,
                               split_backward=is_split)  # fmt: skip
        timeline = ps.simulate(ps.lower(schedule), costs, memory_limit=limit or math.inf)
        if timeline.memory.fits:
            assert bounds["makespan"] <= timeline.makespan
            assert bounds["span"] <= longest_span(timeline) * (1 + 1e-12)
    assert timeline.why.lower_bound <= timeline.makespan


def test_timelines_have_a_gap() -> None:
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 3)), LENGTHS)
    assert timeline.why.lower_bound == 14
    assert timeline.why.gap == pytest.approx(timeline.makespan / 14 - 1)


def test_another_number_of_micro_batches() -> None:
    with pytest.raises(CostsError, match=r"for 3 micro-batches, but the graph has 2; give 2"):
        ps.lower_bound(ps.Placement.linear(2), 2, ps.Costs([[1, 2, 3]], 1))

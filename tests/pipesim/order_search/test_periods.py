"""Periods: stretches with each lane equally often, which can be left out and repeated."""

from __future__ import annotations

import numpy as np

import pipesim as ps
from pipesim.order_search import LaneOrder, evaluate, keeps_limit, lane_order, order_problem
from pipesim.order_search.improve import period_copy, periods_of

COSTS = ps.Costs(forward=1, backward=2, activation_bytes=1)


def test_periods_of_1f1b():
    """An F and a B follow each other everywhere, but for device 0's first two F and last two B."""
    problem = order_problem(ps.Placement.linear(2), 3, COSTS)
    order = lane_order(problem, ps.schedule("1f1b", 2, 3))
    begins = periods_of(problem, order, 1)
    assert begins.tolist() == [[1, 6], [2, 7], [2, 8], [3, 9], [3, 10]]
    for first, second in begins.tolist():
        for begin in (first, second):
            assert len(set(order.lanes[begin : begin + 2].tolist())) == 2
    assert len(periods_of(problem, order, 4)) == 0


def test_copy_of_a_good_period_replaces_a_bad_one():
    """In the middle, device 1 runs a B late; a copy of another period makes that good."""
    problem = order_problem(ps.Placement.linear(3), 12, COSTS, memory_limit=3)
    good = lane_order(problem, ps.schedule("1f1b", 3, 12))
    lanes = good.lanes.copy()
    place = int(good.ptr[1]) + 12
    lanes[[place, place + 1]] = lanes[[place + 1, place]]
    bad = LaneOrder(lanes, good.ptr)
    best = evaluate(problem, good).makespan
    assert best < evaluate(problem, bad).makespan < np.inf
    values = []
    for seed in range(8):  # lengths of periods are random
        copies = [
            period_copy(problem, bad, "makespan", 50, np.random.default_rng(seed)) for _ in range(2)
        ]
        if copies[0] is None or copies[1] is None:
            continue
        assert np.array_equal(copies[0].lanes, copies[1].lanes)
        assert keeps_limit(problem, copies[0])
        values.append(evaluate(problem, copies[0]).makespan)
    assert min(values) == best

"""`optimize` against every order of tiny placements, simulated: none is better than its bound."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from case_choice import covering
from every_order import all_orders

import pipesim as ps
from pipesim.ops import SCHEDULED
from pipesim.order_search import checked_bound, order_problem, schedule_of
from pipesim.planning.optimize_search import Effort, OrderSearch

CASES = {
    "linear": (ps.Placement.linear(2), 3, False),
    "linear split": (ps.Placement.linear(2), 2, True),
    "three devices": (ps.Placement.linear(3), 2, False),
    "v-shaped": (ps.Placement.v_shaped(2), 2, False),
    "both directions": (ps.Placement.bidirectional(2), 2, False),
}


def step_costs(seed, n_stages, split, *, whole, step):
    """Return uneven costs with STEPs of each device that differ."""
    rng = np.random.default_rng(seed)

    def some():
        return rng.integers(1, 9, n_stages) if whole else rng.uniform(0.1, 1.0, n_stages)

    halves = {"input_grad": some(), "weight_grad": some()} if split else {"backward": some()}
    return ps.Costs(forward=some(), **halves, activation_bytes=1.0, optimizer_step=step * some())


@cache
def graphs(placement, m, split):
    """Return the graph of each order of a placement, in order of micro-batches."""
    costs = step_costs(0, placement.n_stages, split, whole=True, step=0.0)
    problem = order_problem(placement, m, costs)
    return [ps.lower(schedule_of(problem, x, placement, "order")) for x in all_orders(problem)]


def values(placement, m, split, costs):
    """Return the least makespan and the least span of all orders (s), as they are simulated."""
    rows = []
    for graph in graphs(placement, m, split):
        timeline = ps.simulate(graph, costs)
        own = graph.is_op(SCHEDULED)
        tasks = [own & (graph.device == d) for d in range(graph.n_devices)]
        spans = [timeline.end[x].max() - timeline.start[x].min() for x in tasks]
        rows.append((timeline.makespan, max(spans)))
    makespan, span = np.min(rows, axis=0).tolist()
    return {"makespan": makespan, "span": span}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "whole", "number"), covering(product(CASES, [True, False], range(3)))
)
def test_bound_and_order_are_those_of_brute_force(case, whole, number):
    """With STEPs that are longer than all else, the search's own bound is below each order."""
    placement, m, split = CASES[case]
    step = (0.0, 0.5, 100.0)[number]
    costs = step_costs(number, placement.n_stages, split, whole=whole, step=step)
    problem = order_problem(placement, m, costs)
    for objective, best in values(placement, m, split, costs).items():
        effort = Effort(30.0, 2000, 0)
        search = OrderSearch(placement, costs, None, objective, effort, lambda _: None, problem)
        search.run()
        assert search.lower_bound <= best * (1.0 + 1e-12)
        assert search.best.value == pytest.approx(best, rel=1e-9)
        if whole or objective == "makespan":  # spans are rounded coarsely
            assert search.is_done


def test_bound_above_an_order_is_an_error():
    """Only rounding is taken off a bound that is above an order's time."""
    assert checked_bound(3.0, 4.0, "a test") == 3.0
    assert checked_bound(4.0 + 1e-12, 4.0, "a test") == 4.0
    with pytest.raises(AssertionError, match=r"bound of a test is 4.1 s, but an order takes 4.0 s"):
        checked_bound(4.1, 4.0, "a test")

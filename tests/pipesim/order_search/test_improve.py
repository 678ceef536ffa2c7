"""The local search: the best of all orders on tiny cases, limits, and the same answer each time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.ops import SCHEDULED
from pipesim.order_search import (
    LaneOrder,
    LocalSearch,
    evaluate,
    improve,
    keeps_limit,
    lane_order,
    order_problem,
    schedule_of,
)
from pipesim.order_search.annealing import CURRENT, anneal, begin, order_of_state

UNEVEN = ps.Costs(
    forward=(3, 5, 4),
    backward=(7, 6, 9),
    input_grad=(5, 3, 4),
    weight_grad=(2, 4, 3),
    activation_bytes=1,
    weight_grad_bytes=1,
    network=ps.Network(latency=1),
)


def sequential(problem):
    """Return the order that runs one micro-batch after the other."""
    devices = []
    for device in range(problem.n_devices):
        lanes = np.flatnonzero(problem.device == device)
        forward = [k for k in lanes if problem.op[k] == 0]
        backward = [k for k in lanes if problem.op[k] != 0]
        backward.sort(key=lambda k: (-problem.stage[k], problem.op[k]))
        count = int(problem.count[lanes].max())
        devices.append(
            [k for m in range(count) for k in forward + backward if m < problem.count[k]]
        )
    ptr = np.cumsum([0, *map(len, devices)])
    return LaneOrder(np.concatenate(devices).astype(np.int64), ptr)


def best_of_all(problem, objective):
    """Return the least value of all orders that keep the limits, by trying all of them."""
    choices = []
    for device in range(problem.n_devices):
        lanes = np.flatnonzero(problem.device == device)
        entries = [int(k) for k in lanes for _ in range(problem.count[k])]
        choices.append(sorted(set(itertools.permutations(entries))))
    least = math.inf
    ptr = np.cumsum([0, *(len(rows[0]) for rows in choices)])
    for rows in itertools.product(*choices):
        order = LaneOrder(np.array([k for row in rows for k in row]), ptr)
        times = evaluate(problem, order)
        if times.makespan < least and keeps_limit(problem, order):
            least = min(least, getattr(times, objective))
        elif getattr(times, objective) < least and keeps_limit(problem, order):
            least = getattr(times, objective)
    return least


@pytest.mark.parametrize(
    ("placement", "m", "split", "limit"),
    [
        (ps.Placement.linear(2), 3, False, None),
        (ps.Placement.linear(2), 3, False, 2),
        (ps.Placement.linear(2), 2, True, 1),
        (ps.Placement.v_shaped(1), 2, False, None),
        (ps.Placement.bidirectional(2), 2, False, None),
    ],
)
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_optimum_of_tiny_cases(placement, m, split, limit, objective):
    """The search finds the least value of all orders, and the limit is kept."""
    n = placement.n_stages
    values = {
        k: getattr(UNEVEN, k)[:n] for k in ("forward", "backward", "input_grad", "weight_grad")
    }
    costs = ps.Costs(**values, activation_bytes=1, weight_grad_bytes=1, network=UNEVEN.network)
    problem = order_problem(placement, m, costs, split_backward=split, memory_limit=limit)
    order = improve(problem, sequential(problem), evaluations=1500, seed=0, objective=objective)
    assert keeps_limit(problem, order)
    assert getattr(evaluate(problem, order), objective) == best_of_all(problem, objective)


@pytest.mark.parametrize(
    "placement",
    [
        ps.Placement.linear(3),
        ps.Placement.looped(3, 2),
        ps.Placement.v_shaped(3),
        ps.Placement.waves(2, 2),
        ps.Placement.bidirectional(4),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_orders_run_in_both_engines(placement, split):
    """The order passes `verify`, and both engines take the seconds that the search says.

    Reductions between the paths of a bidirectional placement come after that.
    """
    rng = np.random.default_rng(placement.n_stages)
    n = placement.n_stages
    seconds = {
        name: tuple(rng.uniform(1, 3, n))
        for name in ("forward", "backward", "input_grad", "weight_grad")
    }
    costs = ps.Costs(
        **seconds, activation_bytes=0.1, weight_grad_bytes=0.07, output_bytes=1.5,
        output_seconds=0.1, network=ps.Network(latency=0.2, bandwidth=10),
        forward_workspace_bytes=0.01, memory_reserve=0.05,
    )  # fmt: skip
    problem = order_problem(placement, 4, costs, split_backward=split, memory_limit=0.8)
    first = sequential(problem)
    order = improve(problem, first, evaluations=300, seed=0)
    schedule = schedule_of(problem, order, placement, "found")
    graph = ps.lower(schedule)
    ps.verify(schedule)
    for engine in ("compiled", "simpy"):
        timeline = ps.simulate(graph, costs, engine=engine, memory_limit=0.8)
        last = timeline.end[graph.is_op(SCHEDULED)].max()
        assert last == evaluate(problem, order).makespan
        assert timeline.memory.fits
    assert evaluate(problem, order).makespan < evaluate(problem, first).makespan


def test_answer_depends_on_seed_and_evaluations_alone():
    """Neither compiling nor the parts in which moves are made change the answer."""
    problem = order_problem(ps.Placement.linear(3), 6, UNEVEN, memory_limit=3)
    first = sequential(problem)
    plain = improve(problem, first, evaluations=3000, seed=5)
    begin.compile()
    anneal.compile()
    compiled = improve(problem, first, evaluations=3000, seed=5)
    assert np.array_equal(plain.lanes, compiled.lanes)
    other = improve(problem, first, evaluations=3000, seed=6)
    assert not np.array_equal(plain.lanes, other.lanes)


def test_each_step_keeps_the_limit():
    """All orders that the search passes through fit, and are valid, not only the best one."""
    costs = replace(UNEVEN, forward_workspace_bytes=0.5)
    problem = order_problem(ps.Placement.linear(3), 6, costs, memory_limit=2.25)
    search = LocalSearch(problem, sequential(problem), seed=0, objective="makespan")
    for _ in range(50):
        search.advance(5)
        state = search._state
        order = order_of_state(problem, state.task, search.order.ptr)
        assert keeps_limit(problem, order)
        assert np.array_equal(state.task[state.position], np.arange(len(state.task)))
        assert evaluate(problem, order).makespan == state.values[CURRENT]


def test_stops_at_the_target_and_never_gets_worse():
    """At the target no move is made; no move at all returns the first order."""
    problem = order_problem(ps.Placement.linear(3), 6, UNEVEN)
    first = lane_order(problem, ps.schedule("zb_h1", 3, 6))
    value = evaluate(problem, first).makespan
    for options in ({"evaluations": 0}, {"evaluations": 10**9, "target": value}):
        same = improve(problem, first, seed=0, **options)
        assert np.array_equal(same.lanes, first.lanes)


def test_bad_arguments():
    problem = order_problem(ps.Placement.linear(3), 6, UNEVEN, memory_limit=2)
    first = lane_order(problem, ps.schedule("zb_h1", 3, 6))
    with pytest.raises(ArgumentError, match="more bytes"):
        improve(problem, first, evaluations=1, seed=0)
    good = sequential(problem)
    with pytest.raises(ArgumentError, match="evaluations"):
        improve(problem, good, evaluations=-1, seed=0)
    with pytest.raises(UnknownNameError, match="objective"):
        improve(problem, good, evaluations=1, seed=0, objective="length")
    pair = order_problem(ps.Placement.linear(2), 1, ps.Costs(forward=1, backward=2))
    deadlock = LaneOrder(np.array([1, 0, 2, 3]), np.array([0, 2, 4]))
    with pytest.raises(ArgumentError, match="wait for each other"):
        improve(pair, deadlock, evaluations=1, seed=0)

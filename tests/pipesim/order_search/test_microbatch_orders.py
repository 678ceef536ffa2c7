"""Orders of micro-batches that differ: their times and bytes, and the search for a better one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.order_search import (
    LocalSearch,
    OrderProblem,
    anneal_microbatches,
    evaluate,
    first_microbatch_orders,
    keeps_limit,
    lane_order,
    order_problem,
    peak_bytes,
    schedule_of,
)
from pipesim.order_search.annealing import sum_bytes
from pipesim.planning.cp_sat_proof import prove

THREE = ps.Costs([[3, 1, 2]], [[3, 1, 2]])


def random_costs(n_stages: int, m: int, seed: int) -> ps.Costs:
    values = np.random.default_rng(seed).integers(1, 6, (4, n_stages, m)).astype(float)
    return ps.Costs(
        values[0], input_grad=values[1], weight_grad=values[2], activation_bytes=values[3],
        output_bytes=values[3], forward_workspace_bytes=values[0], network=ps.Network(0.5, 4),
    )  # fmt: skip


@given(
    st.sampled_from(["interleaved_1f1b", "1f1b", "zb_h1", "zbv", "chimera"]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_times_and_bytes_are_those_of_a_simulation(name: str, seed: int, search: bool) -> None:
    """Also after moves of tasks and of micro-batches."""
    schedule = ps.schedule(name, 2, 4)
    numbers = [[1, 0, 3, 2], [2, 0, 3, 1]][schedule.placement.n_paths == 1]
    schedule = schedule.with_microbatch_order(numbers)
    split = bool((schedule.op == ps.Op.W).any())
    costs = random_costs(schedule.n_stages, 4, seed)
    problem = order_problem(schedule.placement, 4, costs, split_backward=split)
    order = lane_order(problem, schedule)
    assert schedule_of(problem, order, schedule.placement, name) == schedule
    if search:
        random = np.random.default_rng(seed)
        order = anneal_microbatches(
            problem, order, n_moves=10, random=random, objective="makespan", temperature=1.0
        )
        local = LocalSearch(problem, order, seed=seed % 97, objective="makespan", budget=50)
        local.advance(50)
        assert local.value == evaluate(problem, local.order).makespan
        held = local._state.held.copy()
        for device in range(problem.n_devices):
            sum_bytes(local._lanes, local._state, device)
        assert (held == local._state.held).all(), "bytes follow each move"
        order = local.order
    graph = ps.lower(schedule_of(problem, order, schedule.placement, name), step="none")
    timeline = ps.simulate(graph, costs)
    if not schedule.placement.n_paths > 1:
        assert timeline.makespan == evaluate(problem, order).makespan
    assert timeline.memory.peak.tolist() == peak_bytes(problem, order).tolist()


def test_the_best_order_of_1f1b() -> None:
    """All six orders of three micro-batches; `with_microbatch_order` has a drawing of one."""
    problem = order_problem(ps.Placement.linear(2), 3, THREE)
    first = lane_order(problem, ps.schedule("1f1b", 2, 3))
    values = [
        evaluate(problem, first._replace(microbatches=np.array(order))).makespan
        for order in itertools.permutations(range(3))
    ]
    assert values == [20, 16, 16, 16, 16, 20]
    best = anneal_microbatches(
        problem, first, n_moves=20, random=np.random.default_rng(0), objective="makespan",
        temperature=0.1,
    )  # fmt: skip
    assert evaluate(problem, best).makespan == 16


def test_first_orders_are_by_length() -> None:
    problem = order_problem(ps.Placement.linear(2), 5, ps.Costs([[3, 1, 5, 2, 4]], 1))
    orders = [order.tolist() for order in first_microbatch_orders(problem)]
    assert orders == [[0, 1, 2, 3, 4], [2, 4, 0, 3, 1], [1, 3, 0, 4, 2], [1, 0, 2, 4, 3]]
    two = order_problem(ps.Placement.bidirectional(2), 4, ps.Costs([[1, 2, 4, 3]], 1))
    assert first_microbatch_orders(two)[1].tolist() == [1, 0, 2, 3], "paths keep their own"


def test_moves_keep_the_limit() -> None:
    """With 4 bytes, micro-batches 0 and 2 may not be on device 0 at once."""
    costs = ps.Costs([[4, 1, 3]], [[4, 1, 3]], activation_bytes=[[3, 1, 2]])
    problem = order_problem(ps.Placement.linear(2), 3, costs, memory_limit=4)
    first = lane_order(problem, ps.schedule("1f1b", 2, 3))
    assert keeps_limit(problem, first)
    assert not keeps_limit(problem, first._replace(microbatches=np.array([0, 2, 1])))
    for seed in range(5):
        best = anneal_microbatches(
            problem, first, n_moves=30, random=np.random.default_rng(seed), objective="makespan",
            temperature=10.0,
        )  # fmt: skip
        assert keeps_limit(problem, best)
        assert evaluate(problem, best).makespan <= evaluate(problem, first).makespan


def test_nothing_is_proved_of_micro_batches_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT takes micro-batches to be identical, so that its bounds would be false."""

    def unexpected(*_: object) -> OrderProblem:
        raise AssertionError("a model was built")

    monkeypatch.setattr("pipesim.planning.cp_sat_proof._model", unexpected)
    problem = order_problem(ps.Placement.linear(2), 3, THREE)
    order = lane_order(problem, ps.schedule("1f1b", 2, 3))
    proof = prove(problem, order, 1.0, seconds=5.0)
    assert (proof.order, proof.lower_bound) == (None, 1.0)
    assert math.isfinite(evaluate(problem, order).span)

"""`optimize` with micro-batches that differ: their order is searched, and nothing false proved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from every_order import all_orders

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError
from pipesim.order_search import evaluate, keeps_limit, order_problem
from pipesim.planning import optimize_search

LENGTHS = np.array([[3.0, 1.0, 2.0]])
THREE = ps.Costs(LENGTHS, LENGTHS, activation_bytes=LENGTHS)


def best_of_all(costs: ps.Costs, m: int, limit: float | None = None) -> float:
    """Return the least makespan of all orders of devices and of micro-batches."""
    problem = order_problem(ps.Placement.linear(2), m, costs, memory_limit=limit)
    alike = order_problem(ps.Placement.linear(2), m, ps.Costs(1.0, 1.0))
    least = np.inf
    for order, numbers in itertools.product(all_orders(alike), itertools.permutations(range(m))):
        both = order._replace(microbatches=np.array(numbers))
        makespan = evaluate(problem, both).makespan
        if keeps_limit(problem, both):
            least = min(least, makespan)
    return least


@pytest.mark.parametrize("limit", [None, 3.0, 4.0])
def test_it_finds_the_best_of_all_orders(limit: float | None) -> None:
    order = ps.optimize(ps.Placement.linear(2), 3, THREE, limit, evaluations=3000, progress=False)
    timeline = ps.simulate(ps.lower(order), THREE, memory_limit=limit or np.inf)
    assert order.makespan == timeline.makespan == best_of_all(THREE, 3, limit)
    assert limit is None or timeline.memory.fits
    assert order.lower_bound <= order.makespan
    assert order.proved == (order.makespan == order.lower_bound)


@pytest.mark.slow
def test_it_beats_named_schedules_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CP-SAT and without periods, which take micro-batches to be identical."""

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("micro-batches differ")

    monkeypatch.setattr(optimize_search, "prove", unexpected)
    monkeypatch.setattr(optimize_search, "unrolled", unexpected)
    lengths = np.array([[5.0, 1.0, 4.0, 2.0, 6.0, 3.0]])
    costs = ps.Costs(lengths, 2 * lengths, activation_bytes=lengths)
    order = ps.optimize(ps.Placement.linear(3), 6, costs, 15, evaluations=2000, progress=False)
    again = ps.optimize(ps.Placement.linear(3), 6, costs, 15, evaluations=2000, progress=False)
    assert order == again, "equal arguments, equal results"
    graphs = [ps.lower(ps.schedule(name, 3, 6)) for name in ("gpipe", "1f1b")]
    assert order.makespan < min(ps.simulate(graph, costs).makespan for graph in graphs)
    assert 0 < order.lower_bound < order.makespan
    assert not order.proved
    assert order.evaluations <= 2000


def test_spans_and_paths() -> None:
    rows = np.random.default_rng(0).integers(1, 6, (4, 4)).astype(float)
    costs = ps.Costs(rows, input_grad=rows, weight_grad=rows)
    for placement in (
        ps.Placement.linear(4),
        ps.Placement.bidirectional(4),
        ps.Placement.v_shaped(2),
    ):
        order = ps.optimize(placement, 4, costs, objective="span", evaluations=300, progress=False)
        assert ps.verify(ps.lower(order)) is None
        assert order.lower_bound <= order.span <= order.first_value


def test_equal_values_are_one_value() -> None:
    one = ps.Costs([1, 2, 1], [2, 4, 2], activation_bytes=[1, 2, 1])
    rows = np.array([[1.0] * 4, [2.0] * 4, [1.0] * 4])
    same = ps.Costs(rows, 2 * rows, activation_bytes=rows)
    expected = ps.optimize(ps.Placement.linear(3), 4, one, 3, evaluations=500, progress=False)
    assert (
        ps.optimize(ps.Placement.linear(3), 4, same, 3, evaluations=500, progress=False) == expected
    )


def test_errors() -> None:
    with pytest.raises(CostsError, match=r"for 3 micro-batches, but 4 are to be ordered; give 4"):
        ps.optimize(ps.Placement.linear(2), 4, THREE, evaluations=10, progress=False)
    with pytest.raises(ArgumentError, match=r"one micro-batch needs 3\.00 B there"):
        ps.optimize(ps.Placement.linear(2), 3, THREE, 2, evaluations=10, progress=False)

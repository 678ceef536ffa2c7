"""CP-SAT's proofs: equal to brute force on tiny problems, and never above an order's makespan."""

import _thread
import sys
import threading

import numpy as np
import pytest
from case_choice import covering
from every_order import all_orders

import pipesim as ps
from pipesim.errors import ArgumentError, EngineWarning
from pipesim.order_search import (
    LaneOrder,
    OrderProblem,
    evaluate,
    keeps_limit,
    lane_order,
    order_problem,
    peak_bytes,
)
from pipesim.planning import cp_sat_proof
from pipesim.planning.cp_sat_proof import SolverLimits, _warn_of_missing_ortools, prove, solve
from pipesim.planning.first_orders import sequential_order

PLACEMENTS = {
    "linear": ps.Placement.linear(2),
    "looped": ps.Placement.looped(2, 2),
    "v": ps.Placement.v_shaped(2),
    "bidirectional": ps.Placement.bidirectional(2),
}


def random_costs(seed, n_stages, *, split, whole, hold=0.0):
    """Return uneven costs; activations of 4 bytes, of which I keeps some for W."""
    rng = np.random.default_rng(seed)
    forward, input_grad, weight_grad = (
        rng.integers(1, 9, n_stages).astype(float) if whole else rng.uniform(0.1, 2.0, n_stages)
        for _ in range(3)
    )
    halves = {"input_grad": input_grad, "weight_grad": weight_grad} if split else {}
    return ps.Costs(
        forward=forward,
        backward=input_grad + weight_grad,
        **halves,
        activation_bytes=4.0,
        weight_grad_bytes=float(rng.integers(1, 4)) if split else 0.0,
        backward_workspace_bytes=float(rng.integers(0, 3)),
        output_bytes=hold,
        optimizer_step=float(rng.integers(0, 3)),
        network=ps.Network(latency=1.0 if whole else 0.37, bandwidth=1.0 if hold else np.inf),
    )


def small_problem(placement, m, *, split, limit, hold, whole) -> OrderProblem:
    """Return a problem of two devices; ``limit`` is without static bytes."""
    costs = random_costs(m, PLACEMENTS[placement].n_stages, split=split, whole=whole, hold=hold)
    problem = order_problem(PLACEMENTS[placement], m, costs)
    return problem._replace(limit=np.full(2, limit))


def zero_bubble(p, m) -> tuple[OrderProblem, LaneOrder]:
    """Return F 10, I 12, W 8, latency 1, and ZB-H1."""
    costs = ps.Costs(
        forward=10.0,
        backward=20.0,
        input_grad=12.0,
        weight_grad=8.0,
        activation_bytes=1.0,
        network=ps.Network(latency=1.0),
    )
    problem = order_problem(ps.Placement.linear(p), m, costs)
    return problem, lane_order(problem, ps.schedule("zb_h1", p, m))


def hard_problem() -> tuple[OrderProblem, LaneOrder]:
    """Return a problem that takes seconds: uneven stages in V shape with a limit, and V-Half."""
    costs = random_costs(1, 8, split=True, whole=True)
    problem = order_problem(ps.Placement.v_shaped(4), 8, costs)
    order = lane_order(problem, ps.schedule("v_half", 4, 8))
    return problem._replace(limit=peak_bytes(problem, order)), order


CASES = [
    # placement, micro-batches, split, limit, message seconds
    ("linear", 3, False, np.inf, 0.0),
    ("linear", 3, True, np.inf, 0.0),
    ("linear", 3, True, 9.0, 0.0),
    ("linear", 3, True, 11.0, 0.0),
    ("linear", 3, False, 9.0, 5.0),
    ("looped", 2, False, np.inf, 0.0),
    ("looped", 2, False, 13.0, 3.0),
    ("v", 2, False, 10.0, 0.0),
    ("v", 1, True, 10.0, 0.0),
    ("v", 1, True, np.inf, 4.0),
    ("bidirectional", 2, False, np.inf, 0.0),
    ("bidirectional", 2, True, 7.0, 2.0),
]


@pytest.mark.parametrize(
    ("whole", "placement", "m", "split", "limit", "hold"),
    covering(
        ((whole, *case) for case in CASES for whole in (True, False)),
        parts=lambda case: [("case", str(case[1:])), ("whole", f"{case[0]}, {case[1]}")],
    ),
)
def test_optimum_is_that_of_brute_force(placement, m, split, limit, hold, whole):
    """From the worst order, for both objectives, with whole seconds and with any."""
    problem = small_problem(placement, m, split=split, limit=limit, hold=hold, whole=whole)
    orders = all_orders(problem)
    times = [evaluate(problem, order) for order in orders]
    result = prove(problem, orders[0], seconds=30.0)
    best = min(x.makespan for x in times)
    assert best * (1.0 - 1e-9) <= result.lower_bound <= best
    assert result.proved
    assert evaluate(problem, result.order or orders[0]).makespan == pytest.approx(best, rel=1e-9)
    assert keeps_limit(problem, result.order or orders[0])
    result = prove(problem, orders[0], seconds=30.0, objective="span")
    best = min(x.span for x in times)
    assert result.lower_bound <= best
    if placement != "bidirectional":  # there, times are rounded coarsely
        assert result.proved
        assert evaluate(problem, result.order or orders[0]).span == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seconds", [1.0, 0.731])
def test_steps_do_not_change_a_span(seconds):
    """They come after the last F, B, I and W: the bound is that without, and the optimum is 35."""
    results = []
    for step in (0.0, 40.0 * seconds):
        times = {
            "forward": np.array([1, 3, 2]) * seconds,
            "backward": np.array([2, 5, 3]) * seconds,
        }
        problem = order_problem(ps.Placement.linear(3), 4, ps.Costs(**times, optimizer_step=step))
        order = sequential_order(problem)
        results.append(prove(problem, order, seconds=30.0, objective="span"))
        assert evaluate(problem, results[-1].order).span == pytest.approx(35.0 * seconds)
    assert results[0].lower_bound == results[1].lower_bound == pytest.approx(35.0 * seconds)
    assert all(x.proved for x in results)


def test_contradiction_is_an_error_and_no_proof():
    """The hint is an order. If CP-SAT finds none, the model is wrong."""
    problem, order = zero_bubble(2, 2)
    model = cp_sat_proof._model(problem, order, evaluate(problem, order).makespan, 0.0, "makespan")
    model.model.add(model.start[0][0] < 0)
    with pytest.raises(AssertionError, match="error in pipesim"):
        solve(model, SolverLimits(30.0, None, 2, 0))


def test_room_for_one_microbatch_runs_them_in_turn():
    """A round trip of 10 + 1 + 10 + 20 + 1 + 20 seconds for each of three micro-batches."""
    network = ps.Network(latency=1.0)
    costs = ps.Costs(forward=10.0, backward=20.0, activation_bytes=1.0, network=network)
    problem = order_problem(ps.Placement.linear(2), 3, costs)._replace(limit=np.ones(2))
    order = LaneOrder(np.array([0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]), np.array([0, 6, 12]))
    assert prove(problem, order, seconds=30.0) == (None, 186.0, True, False)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("placement", ["linear", "bidirectional"])
def test_bound_of_coarse_ticks_holds(placement, objective, monkeypatch):
    """Seconds that are rounded to 64 ticks of the objective: the search's own bound holds."""
    monkeypatch.setattr(cp_sat_proof, "FINE_TICKS", 64)
    monkeypatch.setattr(cp_sat_proof, "COARSE_TICKS", 64)
    for m in (2, 3) if placement == "linear" else (2,):
        problem = small_problem(placement, m, split=False, limit=np.inf, hold=0.0, whole=False)
        orders = all_orders(problem)
        values = [getattr(evaluate(problem, order), objective) for order in orders]
        model = cp_sat_proof._model(problem, orders[0], values[0], 0.0, objective)
        outcome = solve(model, SolverLimits(30.0, None, 2, 0))
        bound = cp_sat_proof._certified(outcome, model.ticks, objective)
        assert 0.6 * min(values) < bound <= min(values)


def test_bound_is_never_above_a_named_schedule():
    """With seconds that have no common unit, which are rounded to ticks."""
    costs = random_costs(5, 3, split=True, whole=False)
    problem = order_problem(ps.Placement.linear(3), 5, costs)
    schedules = [ps.schedule(name, 3, 5) for name in ("zb_h1", "zb_h2", "zb_1p")]
    orders = [lane_order(problem, x) for x in schedules]
    makespans = [evaluate(problem, order).makespan for order in orders]
    result = prove(problem, orders[0], seconds=30.0)
    assert result.order is not None
    assert result.lower_bound <= evaluate(problem, result.order).makespan <= min(makespans)


def test_known_optimum_needs_no_search(monkeypatch):
    """A bound that meets the order proves it, even without ortools."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    problem, order = zero_bubble(4, 8)
    assert prove(problem, order, 294.0, seconds=1.0) == (None, 294.0, True, False)


def test_missing_ortools_widens_the_gap(monkeypatch):
    """The bound stays as it was. One warning says what ortools would bring."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    _warn_of_missing_ortools.cache_clear()
    problem, order = zero_bubble(4, 8)
    with pytest.warns(EngineWarning, match=r"pip install 'pipesim\[optimal\]'") as caught:
        proofs = [prove(problem, order, 200.0, seconds=1.0) for _ in range(2)]
    assert proofs == [(None, 200.0, False, False)] * 2
    assert len(caught) == 1


@pytest.mark.slow
def test_equal_work_has_equal_results():
    """On a problem that takes longer."""
    problem = order_problem(ps.Placement.linear(5), 8, random_costs(1, 5, split=True, whole=True))
    order = lane_order(problem, ps.schedule("zb_h1", 5, 8))
    problem = problem._replace(limit=peak_bytes(problem, order))
    first, second = (prove(problem, order, work=0.1, seed=3) for _ in range(2))
    assert not first.proved
    assert first.lower_bound == second.lower_bound
    assert first.order is not None
    assert second.order is not None
    assert np.array_equal(first.order.lanes, second.order.lanes)


def test_stop_ends_the_search():
    """It is asked while CP-SAT runs."""
    problem, order = hard_problem()
    calls = iter([False, False])
    result = prove(problem, order, stop=lambda: next(calls, True))
    assert not result.proved
    assert next(calls, None) is None


def test_ctrl_c_returns_the_best():
    """It ends the search, and the result says so."""
    problem, order = hard_problem()
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    result = prove(problem, order, 1.0, seconds=30.0)
    timer.join()
    assert result.interrupted
    assert not result.proved
    assert result.lower_bound >= 1.0


def test_bad_input_is_refused():
    problem, order = zero_bubble(4, 8)
    with pytest.raises(ArgumentError, match="needs a limit"):
        prove(problem, order)
    with pytest.raises(ArgumentError, match="exceeds one"):
        prove(problem._replace(limit=np.zeros(4)), order, seconds=1.0)
    backwards = LaneOrder(order.lanes[::-1].copy(), order.ptr)
    with pytest.raises(ArgumentError, match="must run"):
        prove(problem, backwards, seconds=1.0)

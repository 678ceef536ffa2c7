"""`prove`: certify an order of tasks, or find a better one, with CP-SAT of ortools (optional)."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipesim.errors import ArgumentError, EngineWarning
from pipesim.order_search import (
    LaneOrder,
    Objective,
    OrderProblem,
    Times,
    checked_bound,
    evaluate,
    has_equal_microbatches,
    keeps_limit,
    meets,
)
from pipesim.order_search.evaluate import ROUNDING
from pipesim.order_search.lane_order import (
    lanes_in_turn,
    occurrences,
    sorted_order,
    task_lanes,
)
from pipesim.planning.cp_sat_model import (
    COARSE_TICKS,
    FINE_TICKS,
    OrderModel,
    TickProblem,
    lane_reach,
    order_model,
    tick_problem,
)
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.csr import Ints
from pipesim.utils.packages import install_command

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


#: Most tasks of a problem that is given to CP-SAT as a whole.
MOST_TASKS = 6000


class Proof(NamedTuple):
    """A better order or None, a bound, and whether the better one, or else the given, is optimal.

    ``lower_bound`` is in seconds. An order is proved if it meets the bound up to a relative 1e-9.
    ``interrupted``: whether Ctrl-C ended the search.
    """

    order: LaneOrder | None
    lower_bound: float
    proved: bool
    interrupted: bool = False


def available() -> bool:
    """Return whether ortools is installed; if not, warn once."""
    if importlib.util.find_spec("ortools") is None:
        _warn_of_missing_ortools()
        return False
    return True


@cache
def _warn_of_missing_ortools() -> None:
    warn_caller(
        "ortools is not installed: orders are searched for, but none is proved optimal, and lower "
        f"bounds stay as far from them as quick bounds are; {install_command('optimal')}",
        EngineWarning,
    )


def prove(
    problem: OrderProblem,
    order: LaneOrder,
    lower_bound: float = 0.0,
    *,
    objective: Objective = "makespan",
    seconds: float | None = None,
    work: float | None = None,
    seed: int = 0,
    n_workers: int = 2,
    stop: Callable[[], bool] | None = None,
) -> Proof:
    """Raise a lower bound on an objective and look for a better order, with CP-SAT.

    The bound holds for float costs too. Seconds without a common unit are rounded down to ticks
    of 2**-42 of the makespan, and the objective of a new order is `evaluate`'s.

    Nothing is searched, and the arguments are returned, in four cases: ortools is not installed,
    the problem has over `MOST_TASKS` tasks, ``lower_bound`` already meets the order, or
    micro-batches differ, which the model takes to be identical.

    Parameters
    ----------
    problem, order
        The tasks, and an order of them that keeps the memory limits.
    lower_bound
        Seconds that are known to be a lower bound.
    objective
        "makespan" or "span", the longest time of a device from its first start to its last end.
    seconds
        Time limit, for the model and the search.
    work
        Limit in CP-SAT's deterministic time, of which one unit takes some 6 seconds of a core.
        One thread searches. Equal arguments then have equal results, if neither ``seconds`` nor
        ``stop`` ends the search.
    seed, n_workers
        Seed and threads of the search; one thread if there is a limit of ``work``.
    stop
        Called some 20 times a second in this thread. The search ends when it returns true. Ctrl-C
        ends the search too; what was reached is returned.
    """
    if seconds is None and work is None and stop is None:
        raise ArgumentError("prove needs a limit: seconds, work, or stop")
    value = getattr(evaluate(problem, order), objective)
    if not np.isfinite(value) or not keeps_limit(problem, order):
        raise ArgumentError(
            "the order to improve must run and keep the memory limits, but "
            + ("it deadlocks" if not np.isfinite(value) else "it exceeds one")
        )
    if meets(value, lower_bound):
        return Proof(None, lower_bound, True)
    is_too_large = problem.count.sum() > MOST_TASKS
    if not available() or is_too_large or not has_equal_microbatches(problem):
        return Proof(None, lower_bound, False)
    began = time.perf_counter()
    try:
        built = _model(problem, order, value, lower_bound, objective)
    except KeyboardInterrupt:
        return Proof(None, lower_bound, False, interrupted=True)
    left = None if seconds is None else seconds - (time.perf_counter() - began)
    if left is not None and left <= 0.0:
        return Proof(None, lower_bound, False)
    outcome = solve(built, SolverLimits(left, work, n_workers, seed), stop)
    bound = _certified(outcome, built.ticks, objective)
    better = _better_order(problem, outcome, value, objective)
    if better is not None:
        value = getattr(evaluate(problem, better), objective)
    bound = max(lower_bound, checked_bound(bound, value, "CP-SAT"))
    return Proof(better, bound, meets(value, bound), outcome.interrupted)


def _model(
    problem: OrderProblem,
    order: LaneOrder,
    value: float,
    lower_bound: float,
    objective: Objective,
) -> OrderModel:
    """Return the model of orders no worse than the given one, which is its hint."""
    if objective == "span":  # it leaves out STEPs
        problem = problem._replace(tail=np.zeros_like(problem.tail))
    first_starts = _first_starts(problem) if objective == "span" else None
    shifts = first_starts is not None and None in first_starts
    ticks = tick_problem(problem, value, COARSE_TICKS if shifts else FINE_TICKS)
    in_ticks = problem._replace(
        seconds=ticks.seconds.astype(np.float64),
        latency=ticks.latency.astype(np.float64),
        hold=ticks.hold.astype(np.float64),
        tail=ticks.tail.astype(np.float64),
    )
    times = evaluate(in_ticks, order)  # sums of whole numbers below 2**53: exact
    most = int(getattr(times, objective))
    least = min(int(lower_bound / ticks.tick * (1.0 - ROUNDING)), most)
    if first_starts is None:
        built = order_model(problem, ticks, least, most)
    else:
        starts = [None if x is None else ticks.whole(x) for x in first_starts]
        built = order_model(problem, ticks, least, most + 1, starts)
    _add_hint(built, order, times)
    return built


def _first_starts(problem: OrderProblem) -> list[float | None]:
    """Return when each device starts its first task (s), None if that depends on the order.

    A device's first task is the F of one lane if all its other tasks need that. It starts as early
    as it can, which is the same in all orders if its data comes from such a task too.
    """
    reach = lane_reach(problem)
    lane = np.arange(len(reach))
    starts: list[float | None] = [None] * problem.n_devices
    always_first = [
        bool(reach[x, (problem.device == problem.device[x]) & (lane != x)].all()) for x in lane
    ]
    for x in lanes_in_turn(problem).tolist():
        source = int(problem.needs[x, 0])
        if not always_first[x]:
            continue
        if source < 0:
            starts[problem.device[x]] = 0.0
            continue
        sent = starts[problem.device[source]]
        if sent is not None and always_first[source]:
            message = float(problem.hold[x, 0] + problem.latency[x, 0])
            starts[problem.device[x]] = sent + float(problem.seconds[source]) + message
    return starts


def _add_hint(built: OrderModel, order: LaneOrder, times: Times) -> None:
    """Hint the order and its earliest times (ticks)."""
    numbers = occurrences(order.lanes).tolist()
    tasks = list(zip(order.lanes.tolist(), numbers, strict=True))
    for (lane, number), start in zip(tasks, times.start.tolist(), strict=True):
        built.model.add_hint(built.start[lane][number], int(start))
    built.model.add_hint(built.objective, built.most)
    rank = {task: k for k, task in enumerate(tasks)}
    for (a, b), literal in built.before.items():
        built.model.add_hint(literal, rank[a] < rank[b])


def _certified(outcome: Outcome, ticks: TickProblem, objective: Objective) -> float:
    """Return the bound of a search in seconds.

    Of rounded times, a tick is taken off for the rounding of the float sums. Rounding both ends of
    a span down takes another one.
    """
    if ticks.exact:
        return outcome.bound * ticks.tick * (1.0 - ticks.noise)
    return (outcome.bound - 1 - (objective == "span")) * ticks.tick


def _better_order(
    problem: OrderProblem, outcome: Outcome, value: float, objective: Objective
) -> LaneOrder | None:
    """Return the order of a solution if it is better than ``value`` in seconds."""
    if outcome.start is None:
        return None
    order = order_by_start(problem, outcome.start)
    better = getattr(evaluate(problem, order), objective) < value
    return order if better and keeps_limit(problem, order) else None


def order_by_start(problem: OrderProblem, start: Ints) -> LaneOrder:
    """Return the order of tasks that start at ``start``, one number a task, lane after lane.

    Tasks of no length may start with others. Those come after the tasks that they need.
    """
    lanes = task_lanes(problem)
    return sorted_order(problem, occurrences(lanes), problem.seconds[lanes] > 0.0, start)


# CP-SAT in a thread, so that Ctrl-C and deadlines end it.

#: Seconds between two calls of ``stop``.
_POLL_SECONDS = 0.05


class SolverLimits(NamedTuple):
    """How long CP-SAT searches, as in `prove`."""

    seconds: float | None
    work: float | None
    n_workers: int
    seed: int


class Outcome(NamedTuple):
    """Result of a search, in ticks.

    Starts are those of each task, lane after lane; None without a solution. No objective is below
    the bound.
    """

    start: Ints | None
    bound: int
    interrupted: bool


def solve(
    built: OrderModel, limits: SolverLimits, stop: Callable[[], bool] | None = None
) -> Outcome:
    """Search until the optimum is proved, a limit is reached, ``stop()`` is true, or Ctrl-C."""
    from pipesim.utils.packages import cp_model

    solver = cp_model.CpSolver()
    _set_parameters(solver, limits)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(solver.solve, built.model)
        interrupted = _watch(future, solver.stop_search, stop)
    status = future.result()
    if status == cp_model.INFEASIBLE:  # its hint is an order: this proves nothing
        raise AssertionError(
            "CP-SAT finds no order, but its hint is one. This is an error in pipesim; please "
            "report it with the placement, costs and arguments"
        )
    bound = max(built.least, int(solver.best_objective_bound))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(None, bound, interrupted)
    start = np.array([solver.value(x) for row in built.start for x in row], dtype=np.int64)
    return Outcome(start, bound, interrupted)


def _watch(
    future: Future[cp_model.CpSolverStatus],
    stop_search: Callable[[], None],
    stop: Callable[[], bool] | None,
) -> bool:
    """Wait for a search, and stop it if ``stop()`` is true or at Ctrl-C; return whether at that."""
    interrupted = False
    while True:
        try:
            wait([future], _POLL_SECONDS)
            if future.done():
                return interrupted
            if interrupted or (stop is not None and stop()):
                stop_search()
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:  # raised by ``stop``
            stop_search()
            raise


def _set_parameters(solver: cp_model.CpSolver, limits: SolverLimits) -> None:
    parameters = solver.parameters
    parameters.num_workers = limits.n_workers
    parameters.random_seed = limits.seed
    # Probing takes up to minutes before the search, and linear relaxations see little of orders.
    # One thread raises the bound; the other ones improve the order in large neighbourhoods.
    parameters.subsolvers.append("objective_lb_search_no_lp")
    parameters.cp_model_probing_level = 0
    parameters.linearization_level = 0
    parameters.catch_sigint_signal = False  # Python's handler raises KeyboardInterrupt
    if limits.seconds is not None:
        parameters.max_time_in_seconds = limits.seconds
    if limits.work is not None:
        parameters.max_deterministic_time = limits.work
        parameters.num_workers = 1  # deterministic; threads that take turns prove far less

"""`solve`: run CP-SAT in a thread, so that Ctrl-C and deadlines end it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipesim.planning.orders.cp_sat.model import OrderModel
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


#: Seconds between two calls of ``stop``.
_POLL_SECONDS = 0.05


class Effort(NamedTuple):
    """How long CP-SAT searches.

    Attributes
    ----------
    seconds
        Time limit, or None.
    work
        Limit in CP-SAT's deterministic time, or None. With it, one thread searches, and equal
        calls have equal results.
    n_workers, seed
        Threads of the search, and the seed of its random choices.
    """

    seconds: float | None
    work: float | None
    n_workers: int
    seed: int


class Outcome(NamedTuple):
    """Result of a search.

    Attributes
    ----------
    start
        Start of each task of each lane in ticks, lane after lane; None without a solution.
    bound
        No order has a smaller objective (ticks).
    interrupted
        Whether Ctrl-C ended the search.
    """

    start: Ints | None
    bound: int
    interrupted: bool


def solve(built: OrderModel, effort: Effort, stop: Callable[[], bool] | None = None) -> Outcome:
    """Search until the optimum is proved, a limit is reached, ``stop()`` is true, or Ctrl-C.

    Raises
    ------
    AssertionError
        If CP-SAT says that there is no order: the hint of the model is one, so that proves nothing.
    """
    from pipesim.utils.packages import cp_model

    solver = cp_model.CpSolver()
    _set_parameters(solver, effort)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(solver.solve, built.model)
        interrupted = _watch(future, solver.stop_search, stop)
    status = future.result()
    if status == cp_model.INFEASIBLE:
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


def _set_parameters(solver: cp_model.CpSolver, effort: Effort) -> None:
    """Set limits, threads and seed."""
    parameters = solver.parameters
    parameters.num_workers = effort.n_workers
    parameters.random_seed = effort.seed
    # Probing takes up to minutes before the search, and linear relaxations see little of orders.
    # One thread raises the bound; the other ones improve the order in large neighbourhoods.
    parameters.subsolvers.append("objective_lb_search_no_lp")
    parameters.cp_model_probing_level = 0
    parameters.linearization_level = 0
    parameters.catch_sigint_signal = False  # Python's handler raises KeyboardInterrupt
    if effort.seconds is not None:
        parameters.max_time_in_seconds = effort.seconds
    if effort.work is not None:
        parameters.max_deterministic_time = effort.work
        parameters.num_workers = 1  # deterministic; threads that take turns prove far less

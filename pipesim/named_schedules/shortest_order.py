"""`shortest_order`: the shortest of many orders within the memory of a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from pipesim.list_scheduling.changed_problems import first_values
from pipesim.list_scheduling.priorities import PRIORITIES
from pipesim.list_scheduling.problem import Problem
from pipesim.list_scheduling.queues import Ranks
from pipesim.named_schedules.costed_orders import CostedOrders, list_lanes
from pipesim.ops import Op
from pipesim.order_search import LaneOrder, OrderProblem, improve, meets

#: Priorities that are tried besides a schedule's own ones.
_PRIORITIES = ("forward_first", "backward_first")
#: Least gap before the next F or I that a W may start in, as a share of the seconds of W.
_PATIENCE = (0.0, 0.3, 0.5, 0.75, 1.0)
#: Most listed orders that are simulated, if the compiled evaluator does not count all costs.
_FINALISTS = 3
#: Moves of the local search for each task, and at most: moves times tasks, about 40 ms.
_MOVES, _MOST_WORK = 3, 8_000_000
#: Temperature of the local search, in mean seconds of a task: it accepts hardly any worse order.
_TEMPERATURE = 0.02


def shortest_order(
    times: CostedOrders,
    problem: Problem,
    own_ranks: Iterable[Ranks],
    in_flight: ArrayLike,
    first: LaneOrder,
) -> LaneOrder:
    """Return an order of less makespan than ``first``, or ``first`` if none is found.

    The list scheduler makes orders with several priorities, numbers of micro-batches in flight and
    patience of W. A local search improves the shortest one. The search is short, and always makes
    the same moves.

    Parameters
    ----------
    times
        Times by which orders are compared.
    problem
        Actions to order, with seconds, bytes and limits.
    own_ranks
        Priorities of the schedule itself.
    in_flight
        Most micro-batches between F and I, one number a stage. One more is tried too.
    first
        An order that keeps the limits.
    """
    orders = {first.lanes.tobytes(): first}
    ranks = [*own_ranks, *(PRIORITIES[name](problem) for name in _PRIORITIES)]
    places = [np.asarray(in_flight, float) + more for more in (0, 1)]
    for variant in itertools.product(ranks, places, _PATIENCE):
        order = list_lanes(problem, *variant)
        orders.setdefault(order.lanes.tobytes(), order)
    ranked = sorted(orders.values(), key=lambda order: times.quick_score(order).makespan)
    n_tasks = len(first.lanes)
    improved = improve(
        _with_limits(times.problem, problem),
        ranked[0],
        evaluations=min(_MOVES * n_tasks, _MOST_WORK // n_tasks),
        seed=0,
        temperature=_TEMPERATURE,
    )
    if times.simulated_costs is None:
        return improved
    longest = times.score(first).makespan
    finalists = [improved, *ranked[:_FINALISTS]]
    return next((x for x in finalists if meets(times.score(x).makespan, longest)), first)


def _with_limits(problem: OrderProblem, listed: Problem) -> OrderProblem:
    """Return the lanes with the bytes and limits of the list scheduler's problem."""
    f_bytes, w_bytes = (
        first_values(listed, x)[problem.stage] for x in (listed.f_bytes, listed.w_bytes)
    )
    return problem._replace(
        allocated=np.where(problem.op == Op.F, f_bytes, 0.0),
        released=np.select([problem.op == Op.I, problem.op == Op.W], [f_bytes - w_bytes, w_bytes]),
        workspace=np.zeros_like(problem.seconds),
        limit=listed.limits,
    )

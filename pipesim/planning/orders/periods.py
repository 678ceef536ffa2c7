"""Orders of many micro-batches: a period of an order of fewer ones, repeated.

In the middle of a good order, devices repeat themselves. So a period
(`pipesim.order_search.periods`) of it can be repeated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipesim.order_search import LaneOrder, Objective, OrderProblem, evaluate
from pipesim.order_search.periods import periods_of

#: Micro-batches of a path in the longest period; shorter ones divide it.
LONGEST_PERIOD = 12
_PERIODS = (1, 2, 3, 4, 6, 12)
#: Periods that are tried, for each length.
_MOST_STARTS = 40


def fewer_microbatches(n_microbatches: int, n_stages: int, n_paths: int) -> int:
    """Return a number of micro-batches with room for warm-up, cool-down and a period between.

    The rest of the micro-batches is a multiple of each period.
    """
    step = LONGEST_PERIOD * n_paths
    least = 3 * n_stages
    return least + (n_microbatches - least) % step


def unrolled(
    small: OrderProblem,
    order: LaneOrder,
    problem: OrderProblem,
    objective: Objective,
    is_late: Callable[[], bool] = lambda: False,
) -> LaneOrder | None:
    """Return the best order of a problem that repeats a period of an order of a smaller one.

    Parameters
    ----------
    small, order
        The lanes with fewer micro-batches, and an order of them.
    problem
        The same lanes with more micro-batches: by a multiple of `LONGEST_PERIOD` on each path.
    objective
        ``"makespan"`` or ``"span"``.
    is_late
        Called after each order that is tried; if it returns true, no more are tried.

    Returns
    -------
    LaneOrder or None
        None if the devices have no period in common.
    """
    more = int((problem.count - small.count)[0])
    least, best = np.inf, None
    for period in _PERIODS:
        begins = periods_of(small, order, period)
        chosen = np.linspace(0, len(begins) - 1, min(len(begins), _MOST_STARTS)).astype(int)
        for first in begins[chosen].tolist():
            longer = _repeated(small, order, first, period, more // period)
            value = getattr(evaluate(problem, longer), objective)
            if value < least:
                least, best = value, longer
            if best is not None and is_late():
                return best
    return best


def _repeated(
    problem: OrderProblem, order: LaneOrder, first: list[int], period: int, n_times: int
) -> LaneOrder:
    """Return an order in which each device repeats its period so many times more."""
    rows = []
    n_lanes = np.bincount(problem.device, minlength=problem.n_devices)
    for device, begin in enumerate(first):
        row = order.lanes[order.ptr[device] : order.ptr[device + 1]]
        begin -= int(order.ptr[device])
        end = begin + period * int(n_lanes[device])
        rows.append(np.concatenate([row[:end], np.tile(row[begin:end], n_times), row[end:]]))
    ptr = np.cumsum([0, *map(len, rows)])
    return LaneOrder(np.concatenate(rows), ptr.astype(np.int64))

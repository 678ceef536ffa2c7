"""`moves_a_second`: how fast the local search of a problem is on this machine."""

from __future__ import annotations

import time

from pipesim.order_search import LaneOrder, LocalSearch, Objective, OrderProblem
from pipesim.planning.orders.effort import Effort

#: Share of the effort in which it is measured, and the most seconds.
_SHARE, _SECONDS = 0.02, 0.1


def moves_a_second(
    problem: OrderProblem, order: LaneOrder, objective: Objective, effort: Effort
) -> float:
    """Return the moves a second of a short local search from an order.

    Loops are compiled before that, which does not count as effort.
    """
    began = time.perf_counter()
    LocalSearch.compile()
    effort.began += time.perf_counter() - began
    trial = LocalSearch(problem, order, seed=effort.seed, objective=objective)
    seconds = min(_SECONDS, _SHARE * effort.seconds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        trial.advance_for(seconds / 4, 2**31)
    return trial.rate

"""Search the order of micro-batches that differ, and the order of each device, in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.order_search import (
    LaneOrder,
    LocalSearch,
    anneal_microbatches,
    evaluate,
)
from pipesim.order_search.objective import ROUNDING
from pipesim.planning.orders.first_orders import Candidate
from pipesim.planning.orders.move_rate import moves_a_second

if TYPE_CHECKING:
    from pipesim.planning.orders.order_search_run import Search


#: Moves of a round for each task, and as a share of all that will be made, at most.
_MOVES, _SHARE = 100, 0.1
#: Moves of the orders of devices for each move of micro-batches, which takes as long as these.
_RATIO = 10
#: Temperatures of micro-batches, in mean seconds of a task, in turn.
_HOT, _COLD = (1.0, 0.1, 3.0, 0.3), 0.02
#: Orders from which rounds start.
_MOST_ORDERS = 8
#: Moves of tasks, and tasks of orders of moved micro-batches, after which the time is checked.
_CALL_MOVES, _CALL_TASKS = 2000, 200_000
_MANY = 2**62


def improve_both(search: Search) -> None:
    """Improve the orders of micro-batches that differ until the effort is spent.

    A round starts from one of the best orders. It moves micro-batches first, with the order of
    each device as it is, and then tasks, with the order of micro-batches as it is. Every second
    round starts from the best order, the others from the next best ones.
    """
    assert search.best is not None
    effort, target = search.effort, search.target * (1.0 + ROUNDING)
    total, n_tasks = effort.evaluations, int(search.problem.count.sum())
    if total is None:
        rate = moves_a_second(search.problem, search.best.order, search.objective, effort)
        total = max(1, int(rate * effort.seconds * max(0.0, 1.0 - effort.share)))
    length = max(1, min(_MOVES * n_tasks, int(_SHARE * total)))
    pool, number = search.firsts[:_MOST_ORDERS], 0
    while search.best.value > target and not _is_spent(search):
        number += 1
        rank = (number & -number).bit_length() - 1  # 0 1 0 2 0 1 0 3 ...
        result = _round(search, pool[rank % len(pool)], number, length, target)
        pool = sorted([*pool, result], key=lambda x: x.value)[:_MOST_ORDERS]


def _is_spent(search: Search) -> bool:
    """Return whether the effort is spent."""
    return search.effort.is_spent() or _moves_left(search) <= 0


def _moves_left(search: Search) -> int:
    """Return the number of moves that are left; very many if seconds are counted."""
    total = search.effort.evaluations
    return _MANY if total is None else total - search.evaluations


def _anneal(
    search: Search, order: LaneOrder, number: int, n_moves: int, target: float
) -> LaneOrder:
    """Return an order after moves of micro-batches; the temperature falls from call to call."""
    random = np.random.default_rng((search.effort.seed, number))
    hot, done = _HOT[number % len(_HOT)], 0
    size = max(1, _CALL_TASKS // len(order.lanes))
    while done < n_moves and not _is_spent(search):
        n = min(size, n_moves - done, _moves_left(search))
        order = anneal_microbatches(
            search.problem,
            order,
            n_moves=n,
            random=random,
            objective=search.objective,
            temperature=hot * (_COLD / hot) ** (done / n_moves),
            target=target,
        )
        done += n
        search.evaluations += n
    return order


def _round(search: Search, start: Candidate, number: int, length: int, target: float) -> Candidate:
    """Return the result of a round from an order; it is noted in the search."""
    seed = search.effort.seed
    order = _anneal(search, start.order, number, max(1, length // _RATIO), target)
    value = float(getattr(evaluate(search.problem, order), search.objective))
    result = Candidate(order, value, "local search")
    search.note(result)
    search.report(search)
    local = LocalSearch(
        search.problem, order, seed=seed + number, objective=search.objective, budget=length
    )
    while local.moves < length and local.value > target and not _is_spent(search):
        before = local.moves
        local.advance(min(_CALL_MOVES, length - local.moves, _moves_left(search)), target)
        search.evaluations += local.moves - before
        result = Candidate(local.order, local.value, "local search")
        search.note(result)
        search.report(search)
    return result

"""Search the order of micro-batches that differ, which all lanes of an order run in turn."""

from __future__ import annotations

import math

import numpy as np

from pipesim.order_search.evaluate import evaluate, keeps_limit
from pipesim.order_search.lane_order import LaneOrder, path_counts
from pipesim.order_search.objective import Objective
from pipesim.order_search.problem import OrderProblem
from pipesim.utils.csr import Ints

#: Temperature at which annealing ends, in mean seconds of a task, and share of swaps among moves.
_COLD, _SWAPS = 0.02, 0.5


def first_microbatch_orders(problem: OrderProblem) -> list[Ints]:
    """Return orders of micro-batches to begin with: their own one, and three by length.

    These are the longest first, the shortest first, and the short ones at both ends, which fill
    and drain the pipeline. The length is the seconds over all stages. Paths keep their own ones.
    """
    n_lanes, counts = len(problem.count), path_counts(problem)
    path = np.repeat(np.arange(len(counts)), counts)
    seconds = problem.seconds.reshape(-1, n_lanes)[problem.class_of[: len(path)]]
    length = (seconds * (problem.path == path[:, None])).sum(axis=1)
    shortest = np.lexsort((length, path))
    longest = np.lexsort((-length, path))
    ends = [
        np.concatenate([own[::2], own[1::2][::-1]])
        for own in np.split(shortest, np.cumsum(counts)[:-1])
    ]
    return [np.arange(len(path)), longest, shortest, np.concatenate(ends)]


def anneal_microbatches(
    problem: OrderProblem,
    order: LaneOrder,
    *,
    n_moves: int,
    random: np.random.Generator,
    objective: Objective,
    temperature: float,
    target: float = -math.inf,
) -> LaneOrder:
    """Return an order with other micro-batches in turn that takes no longer.

    Simulated annealing, as `pipesim.order_search.annealing`, with two moves: two micro-batches of a
    path change places, or one moves to another place. The lanes of each device stay as they are.

    Parameters
    ----------
    problem, order
        Lanes of micro-batches that differ, and an order that keeps the limits.
    n_moves
        Number of moves to try.
    random
        Generator of the moves.
    objective
        ``"makespan"`` or ``"span"``.
    temperature
        Temperature at which it begins, in mean seconds of a task.
    target
        Value of the objective (s) at which to stop.
    """
    counts = path_counts(problem)
    first_of_path = np.cumsum(counts) - counts
    path = np.repeat(np.arange(len(counts)), counts)
    microbatches = np.arange(len(path)) if order.microbatches is None else order.microbatches
    best = current = order._replace(microbatches=microbatches)
    least = value = float(getattr(evaluate(problem, order), objective))
    mean = float(problem.seconds.mean()) or 1.0
    for move, (x, y, kind, threshold) in enumerate(random.random((n_moves, 4)).tolist()):
        if least <= target:
            break
        place = int(x * len(path))
        other = int(first_of_path[path[place]] + int(y * counts[path[place]]))
        changed = current._replace(
            microbatches=_moved(current.microbatches, place, other, kind < _SWAPS)
        )
        most = value - mean * _cooled(temperature, move / n_moves) * math.log(1.0 - threshold)
        result = float(getattr(evaluate(problem, changed), objective))
        if place == other or result > most or not keeps_limit(problem, changed):
            continue
        current, value = changed, result
        if value < least:
            best, least = current, value
    return best


def _cooled(hot: float, share: float) -> float:
    """Return the temperature after a share of the moves."""
    return hot * (min(_COLD, hot) / hot) ** share if hot > 0.0 else 0.0


def _moved(microbatches: Ints | None, place: int, other: int, swap: bool) -> Ints:
    """Return micro-batches of which two change places, or one moves to the place of another."""
    assert microbatches is not None
    if swap:
        changed = microbatches.copy()
        changed[[place, other]] = microbatches[[other, place]]
        return changed
    rest = np.delete(microbatches, place)
    inserted: Ints = np.insert(rest, other, microbatches[place])
    return inserted

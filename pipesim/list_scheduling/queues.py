"""Queues of the actions that a list scheduler has yet to start, one for each lane of `Problem`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.problem import Problem
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]


class Ranks(NamedTuple):
    """Ranks of actions: the lowest ``score`` goes first, then the lowest ``tie``.

    Attributes
    ----------
    score, tie
        One number an action. The scores of a user's priority are tuples of numbers.
    by_arrival
        Whether the score of an action depends on the time at which it is ready (s). The scheduler
        then assigns this time to ``score[action]`` as soon as it is known.
    """

    score: Floats
    tie: Ints
    by_arrival: bool


class Queues(NamedTuple):
    """Actions of each lane, from ``lane_ptr[lane]`` on in ``action``, in three parts.

    - Up to ``ready[lane]``: started, in the order of their starts.
    - Up to ``future[lane]``: ready, the lowest rank first.
    - Up to ``unknown[lane]``: ready at a known time, the earliest first, then the lowest rank.

    Attributes
    ----------
    action
        Actions, lane by lane.
    arrival
        Time at which each action is ready (s).
    ready, future, unknown
        Ends of the parts, as positions in ``action``; one a lane.
    """

    action: Ints
    arrival: Floats
    ready: Ints
    future: Ints
    unknown: Ints


def new_queues(problem: Problem) -> Queues:
    """Return empty queues."""
    first, n_actions = problem.lane_ptr[:-1], int(problem.lane_ptr[-1])
    return Queues(
        np.full(n_actions, -1), np.zeros(n_actions), first.copy(), first.copy(), first.copy()
    )


def ranks_below(ranks: Ranks, action: int, other: int) -> bool:
    """Return whether an action ranks lower than another."""
    if ranks.score[action] == ranks.score[other]:
        return bool(ranks.tie[action] < ranks.tie[other])
    return bool(ranks.score[action] < ranks.score[other])


def goes_before(ranks: Ranks, action: int, other: int) -> bool:
    """Return whether an action ranks lower than another or, at the same rank, has less number."""
    if ranks.score[action] == ranks.score[other] and ranks.tie[action] == ranks.tie[other]:
        return action < other
    return ranks_below(ranks, action, other)


def add(queues: Queues, ranks: Ranks, lane: int, action: int, time: float) -> None:
    """Add an action that is ready at ``time`` (s), no earlier than those added before."""
    queues.arrival[action] = time
    if ranks.by_arrival:
        ranks.score[action] = time
    position = queues.unknown[lane]
    queues.unknown[lane] = position + 1
    while position > queues.future[lane]:
        other = queues.action[position - 1]
        if queues.arrival[other] < time or goes_before(ranks, other, action):
            break
        queues.action[position] = other
        position -= 1
    queues.action[position] = action


def make_ready(queues: Queues, ranks: Ranks, lane: int, now: float) -> None:
    """Move the actions whose time has come to those that are ready."""
    while queues.future[lane] < queues.unknown[lane]:
        position = queues.future[lane]
        action = queues.action[position]
        if queues.arrival[action] > now:
            break
        queues.future[lane] = position + 1
        while position > queues.ready[lane]:
            other = queues.action[position - 1]
            if goes_before(ranks, other, action):
                break
            queues.action[position] = other
            position -= 1
        queues.action[position] = action


def start_ready(queues: Queues, lane: int, action: int) -> None:
    """Move a ready action to those that have started."""
    position = first = queues.ready[lane]
    while queues.action[position] != action:
        position += 1
    for k in range(position, first, -1):
        queues.action[k] = queues.action[k - 1]
    queues.action[first] = action
    queues.ready[lane] = first + 1

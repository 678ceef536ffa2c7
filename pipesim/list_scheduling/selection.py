"""The action that a free device starts: the first of those that are ready and fit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.memory_admission import (
    HeldBytes,
    could_have_room,
    has_room,
    is_safe,
)
from pipesim.list_scheduling.problem import BACKWARD, WEIGHT, Problem
from pipesim.list_scheduling.queues import Queues, Ranks, goes_before, ranks_below
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: No action.
NONE = -1


class Progress(NamedTuple):
    """Progress of devices and copies.

    Attributes
    ----------
    free, wake
        Time at which each device is free, and at which it next looks for an action (s).
    n_in_flight
        Micro-batches between F and their backward, of each copy.
    started, next_in_order
        Whether each F has started, and the first micro-batch of each copy whose F has not.
    end
        End of the filled part of each device's order, in ``order``.
    order
        Actions, those of device 0 first.
    """

    free: Floats
    wake: Floats
    n_in_flight: Ints
    started: NDArray[np.bool_]
    next_in_order: Ints
    end: Ints
    order: Ints


def _first_ready(problem: Problem, ranks: Ranks, queues: Queues, device: int, phase: int) -> int:
    """Return the first of a device's ready actions of a phase, or `NONE`."""
    first = NONE
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        lane = phase * len(problem.home) + problem.copies[k]
        if queues.ready[lane] < queues.future[lane]:
            action = queues.action[queues.ready[lane]]
            if first == NONE or goes_before(ranks, action, first):
                first = action
    return first


def _in_flight_allows(problem: Problem, progress: Progress, copy: int, microbatch: int) -> bool:
    """Reserve the last place in flight for the micro-batch that is next in order."""
    places = problem.in_flight[copy // problem.n_paths] - progress.n_in_flight[copy]
    return bool(places >= 2 or microbatch == progress.next_in_order[copy])


def _allows(problem: Problem, progress: Progress, memory: HeldBytes, action: int) -> bool:
    """Return whether an F may start."""
    copy = problem.lane[action]  # as lanes of F come first
    device, nbytes = problem.home[copy], problem.f_bytes[action]
    microbatch = action - problem.lane_ptr[copy]
    if not has_room(memory, device, nbytes):
        return False
    if not _in_flight_allows(problem, progress, copy, microbatch):
        return False
    return is_safe(problem, memory, device, copy % problem.n_paths, microbatch, nbytes)


def _first_allowed(
    problem: Problem, progress: Progress, queues: Queues, memory: HeldBytes, copy: int
) -> int:
    """Return the F of lowest rank that has room and may start, or `NONE`."""
    ready, future = queues.ready[copy], queues.future[copy]
    first = queues.action[ready]
    if _allows(problem, progress, memory, first):
        return int(first)
    if problem.has_equal_bytes:
        if not has_room(memory, problem.home[copy], problem.f_bytes[first]):
            return NONE
        oldest = first
        if first - problem.lane_ptr[copy] != progress.next_in_order[copy]:
            for k in range(ready + 1, future):
                oldest = min(oldest, queues.action[k])
        if oldest == first or not _allows(problem, progress, memory, oldest):
            return NONE  # no other F is allowed either
    for k in range(ready + 1, future):
        if _allows(problem, progress, memory, queues.action[k]):
            return int(queues.action[k])
    return NONE


def _first_blocked(problem: Problem, queues: Queues, memory: HeldBytes, copy: int) -> int:
    """Return the ready F of lowest rank that waits for the room of a W, or `NONE`."""
    ready, future = queues.ready[copy], queues.future[copy]
    device = problem.home[copy]
    if problem.has_equal_bytes:  # then all of them wait, or none
        future = min(future, ready + 1)
    for k in range(ready, future):
        nbytes = problem.f_bytes[queues.action[k]]
        if not has_room(memory, device, nbytes) and could_have_room(memory, device, nbytes):
            return int(queues.action[k])
    return NONE


def _weight_may_start(
    problem: Problem,
    ranks: Ranks,
    patience: float,
    progress: Progress,
    queues: Queues,
    memory: HeldBytes,
    device: int,
    weight: int,
    now: float,
) -> bool:
    """Return whether W would not delay the next F or backward too much."""
    soonest, forward = math.inf, NONE
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        copy = problem.copies[k]
        lane = BACKWARD * len(problem.home) + copy
        if queues.future[lane] < queues.unknown[lane]:
            soonest = min(soonest, queues.arrival[queues.action[queues.future[lane]]])
        if queues.future[copy] < queues.unknown[copy]:
            action = queues.action[queues.future[copy]]
            if forward == NONE or queues.arrival[action] < queues.arrival[forward] or (
                queues.arrival[action] == queues.arrival[forward]
                and goes_before(ranks, action, forward)
            ):  # fmt: skip
                forward = action
    if forward != NONE:
        copy = problem.lane[forward]
        if (
            has_room(memory, device, problem.f_bytes[forward])
            and progress.n_in_flight[copy] < problem.in_flight[copy // problem.n_paths]
        ):
            soonest = min(soonest, queues.arrival[forward])
    return bool(soonest - now >= patience * problem.seconds[weight])


def choose(
    problem: Problem,
    ranks: Ranks,
    patience: float,
    progress: Progress,
    queues: Queues,
    memory: HeldBytes,
    device: int,
    now: float,
) -> int:
    """Return the action that a device starts now; `NONE`: wait for the next event."""
    best = _first_ready(problem, ranks, queues, device, BACKWARD)
    blocked = NONE  # the first F that waits for the room of a W
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        copy = problem.copies[k]
        if (
            queues.ready[copy] == queues.future[copy]
            or progress.n_in_flight[copy] >= problem.in_flight[copy // problem.n_paths]
        ):
            continue
        action = _first_allowed(problem, progress, queues, memory, copy)
        if action != NONE and (best == NONE or ranks_below(ranks, action, best)):
            best = action
        action = _first_blocked(problem, queues, memory, copy)
        if action != NONE and (blocked == NONE or goes_before(ranks, action, blocked)):
            blocked = action
    weight = NONE
    if problem.n_phases > WEIGHT:
        weight = _first_ready(problem, ranks, queues, device, WEIGHT)
    if weight == NONE:
        return best
    if blocked != NONE and (best == NONE or ranks_below(ranks, blocked, best)):
        return weight
    if best != NONE:
        return weight if ranks_below(ranks, weight, best) else best
    may_start = _weight_may_start(
        problem, ranks, patience, progress, queues, memory, device, weight, now
    )
    return weight if may_start else NONE


#: Functions that `choose` calls, for kernels that call it.
HELPERS = (
    ranks_below, goes_before, has_room, could_have_room, is_safe, _first_ready, _in_flight_allows,
    _allows, _first_allowed, _first_blocked, _weight_may_start,
)  # fmt: skip

"""Simulated annealing over moves of tasks on a longest path (compiled).

A makespan can only fall if its longest path changes. So most moves take a task of that path along
the order of its device: earlier or later, over one or several tasks. Others take any task, since a
task that is off the path may hold memory that one on the path needs. A move is accepted if the
objective falls, or rises by no more than a random threshold (Van Laarhoven, Aarts and Lenstra, "Job
shop scheduling by simulated annealing", Operations Research 40, 1992).
"""

from __future__ import annotations

import math

from pipesim.order_search.moves import (
    _fits,
    move_earlier,
    move_later,
    sum_bytes,
    sum_seconds,
)
from pipesim.order_search.propagation import (
    _resume,
    device_value,
    objective_value,
    propagate,
    undo_times,
)
from pipesim.order_search.state import Lanes, State
from pipesim.utils.jit import kernel

#: Places of the numbers in `State.counts` and `State.values`.
N_CRITICAL, RANDOM, EVALUATIONS, ACCEPTED = range(4)
CURRENT, BEST, FIRST_TEMPERATURE, LAST_TEMPERATURE = range(4)
#: Share of the moves that take a task of the longest path, and that go over a single task.
_CRITICAL_SHARE, _ADJACENT_SHARE = 0.8, 0.4


def _uniform(state: State) -> float:
    """Return a random number of 0 to 1, without both (xorshift: Marsaglia, 2003)."""
    x = state.counts[RANDOM]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state.counts[RANDOM] = x
    return float(x / 4294967296.0)


def _last_task(lanes: Lanes, state: State, span: bool) -> int:
    """Return the last task of the device that determines the objective."""
    value, task = -math.inf, -1
    for device in range(len(state.next)):
        end = device_value(lanes, state, device, span)
        if end > value or (task >= 0 and end == value and _uniform(state) < 0.5):
            value, task = end, state.task[lanes.ptr[device + 1] - 1]
    return task


def _trace(lanes: Lanes, state: State, span: bool) -> None:
    """List the tasks of a longest path; where two tasks end together, one at random."""
    task, n = _last_task(lanes, state, span), 0
    while task >= 0:
        state.critical[n] = task
        n += 1
        lane, position = lanes.lane[task], state.position[task]
        begin, before, source = state.start[task], -1, -1
        if position > lanes.ptr[lanes.device[lane]]:
            other = state.task[position - 1]
            if state.start[other] + lanes.seconds[lanes.row[other]] >= begin:
                before = other
        if lanes.source[lane] != 0:
            other = task + lanes.source[lane]
            if state.sent[other] + lanes.latency[lanes.row[task]] >= begin:
                source = other
        takes_before = before >= 0 and (source < 0 or _uniform(state) < 0.5)
        task = before if takes_before else source
    state.counts[N_CRITICAL] = n


def _accept(lanes: Lanes, state: State, first: int, n_changed: int, span: bool) -> None:
    """Keep the last change: count ranks anew, trace the longest path, note the best order."""
    for k in range(n_changed):
        state.sequence[first + k] = state.changed[k]
        state.rank[state.changed[k]] = first + k
    state.counts[ACCEPTED] += 1
    _trace(lanes, state, span)
    if state.values[CURRENT] < state.values[BEST]:
        state.values[BEST] = state.values[CURRENT]
        for position in range(len(state.task)):
            state.best[position] = state.task[position]


def _move(lanes: Lanes, state: State) -> tuple[int, int, int]:
    """Move a random task; return its device, the first and the last place that changed."""
    n_critical = state.counts[N_CRITICAL]
    if _uniform(state) < _CRITICAL_SHARE:
        task = state.critical[int(_uniform(state) * n_critical)]
    else:
        task = int(_uniform(state) * len(state.task))
    position = state.position[task]
    device = lanes.device[lanes.lane[task]]
    length = lanes.ptr[device + 1] - lanes.ptr[device]
    distance = 1
    if _uniform(state) > _ADJACENT_SHARE:
        longest = min(length, 64)
        distance = 1 + int(longest ** _uniform(state))
    later = _uniform(state) < 0.5
    # Tasks of the same lane are interchangeable: begin behind or before all of them.
    lane = lanes.lane[task]
    if later:
        while position + 1 < lanes.ptr[device + 1] and lanes.lane[state.task[position + 1]] == lane:
            position += 1
        return device, position, position + move_later(lanes, state, position, distance, False)
    while position > lanes.ptr[device] and lanes.lane[state.task[position - 1]] == lane:
        position -= 1
    return device, position, position - move_earlier(lanes, state, position, distance, False)


def _try_move(lanes: Lanes, state: State, temperature: float, span: bool) -> None:
    """Make a random move, and undo it unless it is accepted."""
    device, origin, target = _move(lanes, state)
    if origin == target:
        return
    first, last = min(origin, target), max(origin, target)
    sum_seconds(lanes, state, device, first, last)
    rank = len(state.task)
    for position in range(first, last + 1):
        rank = min(rank, state.rank[state.task[position]])
    most = state.values[CURRENT] - temperature * math.log(_uniform(state))
    n_changed = propagate(lanes, state, rank, most, span)
    state.counts[EVALUATIONS] += 1
    if n_changed == len(state.task) - rank:
        value = objective_value(lanes, state, span)
        if value <= most:
            state.values[CURRENT] = value
            _accept(lanes, state, rank, n_changed, span)
            return
    undo_times(state, n_changed if n_changed >= 0 else -1 - n_changed)
    if target > origin:
        move_earlier(lanes, state, target, target - origin, True)
    else:
        move_later(lanes, state, target, origin - target, True)
    sum_seconds(lanes, state, device, first, last)


_HELPERS = (
    _uniform, _last_task, _trace, _accept, _fits, move_later, move_earlier, sum_seconds, sum_bytes,
    _resume, propagate, device_value, objective_value, undo_times, _move, _try_move,
)  # fmt: skip


@kernel(*_HELPERS, allocates=False)
def begin(lanes: Lanes, state: State, span: bool) -> bool:
    """Compute the times of the first order; return False for a deadlock."""
    for device in range(len(state.next)):
        sum_bytes(lanes, state, device)
        sum_seconds(lanes, state, device, lanes.ptr[device], lanes.ptr[device + 1] - 1)
    n_changed = propagate(lanes, state, 0, math.inf, span)
    if n_changed < len(state.task):
        return False
    state.values[CURRENT] = objective_value(lanes, state, span)
    state.values[BEST] = math.inf
    _accept(lanes, state, 0, n_changed, span)
    return True


@kernel(*_HELPERS, allocates=False)
def anneal(
    lanes: Lanes, state: State, span: bool, first: int, last: int, length: int, target: float
) -> int:
    """Make the moves ``first`` to ``last`` of a round of ``length`` moves.

    The temperature falls from the first to the last one of the round. It stops at the target.
    Return the number of the next move.
    """
    hot, cold = state.values[FIRST_TEMPERATURE], state.values[LAST_TEMPERATURE]
    for move in range(first, last):
        if state.values[BEST] <= target:
            return move
        temperature = hot * (cold / hot) ** (move / length) if hot > 0.0 else 0.0
        _try_move(lanes, state, temperature, span)
    return last

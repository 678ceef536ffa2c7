"""Times of the current order of a search, computed anew from the first changed task on."""

from __future__ import annotations

import math

from pipesim.order_search.state import Lanes, State

#: Share by which sums of seconds may exceed a bound on them, since they are rounded.
_ROUNDING = 1e-12


def _resume(lanes: Lanes, state: State, first: int) -> None:
    """Set each device to its first task whose rank is ``first`` or more."""
    for device in range(len(state.next)):
        low, high = lanes.ptr[device], lanes.ptr[device + 1]
        begin = low
        while low < high:
            middle = (low + high) // 2
            if state.rank[state.task[middle]] < first:
                low = middle + 1
            else:
                high = middle
        state.next[device] = low
        state.free[device] = 0.0
        if low > begin:
            last = state.task[low - 1]
            state.free[device] = state.start[last] + lanes.seconds[lanes.row[last]]
        state.stack[device], state.is_stacked[device] = device, 1
    for channel in range(len(lanes.sender)):
        device = lanes.sender[channel]
        state.channel_free[channel] = 0.0
        for position in range(state.next[device] - 1, lanes.ptr[device] - 1, -1):
            task = state.task[position]
            if lanes.channel[lanes.lane[task]] == channel:
                state.channel_free[channel] = state.sent[task]
                break


def propagate(lanes: Lanes, state: State, first: int, most: float, span: bool) -> int:
    """Compute the times of all tasks whose rank is ``first`` or more.

    It stops early if a device must end later than ``most`` seconds, or, for a span, must take
    longer than that from its first task on.

    Returns
    -------
    int
        Number of tasks computed; all of them unless some wait for each other, or it stopped.
    """
    _resume(lanes, state, first)
    n_stacked, n_changed = len(state.next), 0
    most += _ROUNDING * abs(most)
    while n_stacked > 0:
        n_stacked -= 1
        device = state.stack[n_stacked]
        state.is_stacked[device] = 0
        position, free = state.next[device], state.free[device]
        last, late = lanes.ptr[device + 1], most - lanes.tail[device]
        if span:
            late = most
            if position > lanes.ptr[device]:
                late += state.start[state.task[lanes.ptr[device]]]
        while position < last:
            task = state.task[position]
            lane, row = lanes.lane[task], lanes.row[task]
            begin = free
            if lanes.source[lane] != 0:
                source = task + lanes.source[lane]
                if state.position[source] >= state.next[lanes.device[lanes.lane[source]]]:
                    break
                begin = max(free, state.sent[source] + lanes.latency[row])
            if span and position == lanes.ptr[device]:
                late = most + begin
            if begin + state.rest[position] > late:
                return -1 - n_changed
            state.changed[n_changed] = task
            state.old_start[n_changed] = state.start[task]
            state.old_sent[n_changed] = state.sent[task]
            n_changed += 1
            state.start[task] = begin
            free = begin + lanes.seconds[row]
            sent, channel = free, lanes.channel[lane]
            if channel >= 0:
                sent = max(state.channel_free[channel], free) + lanes.hold[row]
                state.channel_free[channel] = sent
            state.sent[task] = sent
            position += 1
            state.next[device] = position
            if lanes.receiver[lane] != 0:
                receiver = task + lanes.receiver[lane]
                other = lanes.device[lanes.lane[receiver]]
                if state.is_stacked[other] == 0 and other != device:
                    waiting = state.next[other]
                    if waiting < lanes.ptr[other + 1] and state.task[waiting] == receiver:
                        state.stack[n_stacked] = other
                        state.is_stacked[other] = 1
                        n_stacked += 1
        state.free[device] = free
    return n_changed


def undo_times(state: State, n_changed: int) -> None:
    """Restore the times before the last `propagate`, which computed ``n_changed`` tasks."""
    for k in range(n_changed - 1, -1, -1):
        task = state.changed[k]
        state.start[task], state.sent[task] = state.old_start[k], state.old_sent[k]


def device_value(lanes: Lanes, state: State, device: int, span: bool) -> float:
    """Return when a device ends, with its STEPs, or for a span its time from first to last task."""
    first, last = lanes.ptr[device], lanes.ptr[device + 1]
    if first == last:
        return -math.inf
    task = state.task[last - 1]
    end = state.start[task] + lanes.seconds[lanes.row[task]]
    return float(end + (-state.start[state.task[first]] if span else lanes.tail[device]))


def objective_value(lanes: Lanes, state: State, span: bool) -> float:
    """Return the makespan, or the longest time of a device from first start to last end (s)."""
    value = -math.inf
    for device in range(len(state.next)):
        value = max(value, device_value(lanes, state, device, span))
    return value

"""Simulated annealing over moves of tasks on a longest path (compiled).

A makespan can only fall if its longest path changes. So most moves take a task of that path along
the order of its device: earlier or later, over one or several tasks. Others take any task, since a
task that is off the path may hold memory that one on the path needs. A move is accepted if the
objective falls, or rises by no more than a random threshold (Van Laarhoven, Aarts and Lenstra, "Job
shop scheduling by simulated annealing", Operations Research 40, 1992).

The tasks of a lane have consecutive numbers: task ``first[lane] + k`` is of its k-th micro-batch.
So a task finds the tasks that it needs, and those that need it, by the offsets of its lane.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search.evaluate import receivers
from pipesim.order_search.lane_order import (
    LaneOrder,
    first_tasks,
    occurrences,
    rows_of,
    task_lanes,
)
from pipesim.order_search.problem import OrderProblem
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]


class Lanes(NamedTuple):
    """Lanes, and the limits of their devices; as in `OrderProblem`, where nothing else is said."""

    device: Ints
    seconds: Floats
    allocated: Floats
    workspace: Floats
    # Offsets from a task of each lane; 0 for none.
    source: Ints  # to the task whose data it needs
    receiver: Ints  # to the task that needs its data
    own: Ints  # to the F or I of its stage that it needs
    latency: Floats  # of the message from ``source``, of each row (s)
    hold: Floats  # seconds for which the message to ``receiver`` holds its channel, of each row
    channel: Ints  # of this message, of each lane; -1 for none
    net: Floats  # bytes allocated less bytes released, of each row
    lane: Ints  # of each task
    row: Ints  # of each task
    ptr: Ints  # positions ``ptr[d]`` to ``ptr[d + 1]`` are device ``d``'s
    sender: Ints  # device that sends on each channel; empty if no message holds its channel
    limit: Floats
    tail: Floats


class State(NamedTuple):
    """The current order, its times, and data of kernels that change it and undo a change."""

    task: Ints  # at each position
    position: Ints  # of each task
    start: Floats  # of each task (s)
    sent: Floats  # when its message has left its channel; without message its end (s)
    held: Floats  # bytes that the device holds before each position
    rest: Floats  # seconds of the device's tasks from each position on
    sequence: Ints  # all tasks in an order in which times can be computed
    rank: Ints  # place of each task there
    changed: Ints  # tasks whose times were computed by the last change, in that order
    old_start: Floats  # their times before
    old_sent: Floats
    next: Ints  # position of each device
    free: Floats  # when each device is free (s)
    channel_free: Floats  # when each channel is free (s)
    stack: Ints  # devices that may go on
    is_stacked: Ints
    critical: Ints  # tasks of a longest path
    best: Ints  # task at each position of the best order
    counts: Ints  # length of ``critical``, state of the random numbers, evaluations, acceptances
    values: Floats  # of the objective, now and of the best order; first and last temperature


def lanes_of(problem: OrderProblem, order: LaneOrder) -> Lanes:
    """Return the lanes of a problem, with offsets between their tasks, and rows for an order."""
    n_lanes, first = len(problem.count), first_tasks(problem)
    source, own = problem.needs.T
    receiving = np.flatnonzero(source >= 0)
    hold, channel = np.zeros((len(problem.hold) // n_lanes, n_lanes)), np.full(n_lanes, -1)
    hold[:, source[receiving]] = problem.hold[:, 0].reshape(hold.shape)[:, receiving]
    channel[source[receiving]] = problem.channel[receiving, 0]
    sender = np.zeros(int(channel.max(initial=-1)) + 1 if hold.any() else 0, dtype=np.int64)
    if len(sender):
        sender[channel[channel >= 0]] = problem.device[channel >= 0]

    def offset(lanes: Ints) -> Ints:
        return np.where(lanes >= 0, first[lanes] - first, 0)

    return Lanes(
        device=problem.device,
        seconds=problem.seconds,
        allocated=problem.allocated,
        workspace=problem.workspace,
        source=offset(source),
        receiver=offset(receivers(problem)),
        own=offset(own),
        latency=problem.latency[:, 0].copy(),
        hold=hold.ravel(),
        channel=channel if len(sender) else np.full_like(channel, -1),
        net=problem.allocated - problem.released,
        lane=task_lanes(problem),
        row=rows_of(problem, order.microbatches),
        ptr=order.ptr,
        sender=sender,
        limit=problem.limit,
        tail=problem.tail,
    )


def new_state(problem: OrderProblem, order: LaneOrder, seed: int) -> State:
    """Return the state of an order, without times."""
    n, n_devices = len(order.lanes), problem.n_devices
    n_channels = int(problem.channel.max(initial=-1)) + 1
    task = first_tasks(problem)[order.lanes] + occurrences(order.lanes)
    position = np.empty(n, dtype=np.int64)
    position[task] = np.arange(n)

    def ints(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return State(
        task=task,
        position=position,
        start=np.zeros(n),
        sent=np.zeros(n),
        held=np.zeros(n),
        rest=np.zeros(n),
        sequence=ints(n),
        rank=ints(n),
        changed=ints(n),
        old_start=np.zeros(n),
        old_sent=np.zeros(n),
        next=ints(n_devices),
        free=np.zeros(n_devices),
        channel_free=np.zeros(n_channels),
        stack=ints(n_devices),
        is_stacked=ints(n_devices),
        critical=ints(n),
        best=task.copy(),
        counts=np.array([0, 1 + (seed * 2654435761 + 12345) % (2**32 - 1), 0, 0]),
        values=np.zeros(4),
    )


def order_of_state(
    problem: OrderProblem, task: Ints, ptr: Ints, microbatches: Ints | None = None
) -> LaneOrder:
    """Return an order of tasks as one of lanes."""
    return LaneOrder(task_lanes(problem)[task], ptr, microbatches)


# Moves of a task along the order of its device, place by place.


def sum_seconds(lanes: Lanes, state: State, device: int, first: int, last: int) -> None:
    """Sum the seconds from each position ``first`` to ``last`` to the end of the device."""
    rest = 0.0
    if last + 1 < lanes.ptr[device + 1]:
        rest = state.rest[last + 1]
    for position in range(last, first - 1, -1):
        rest += lanes.seconds[lanes.row[state.task[position]]]
        state.rest[position] = rest


def sum_bytes(lanes: Lanes, state: State, device: int) -> None:
    """Sum the bytes that a device holds before each position."""
    held = 0.0
    for position in range(lanes.ptr[device], lanes.ptr[device + 1]):
        state.held[position] = held
        held += lanes.net[lanes.row[state.task[position]]]


def _fits(lanes: Lanes, device: int, held: float, first: int, second: int) -> bool:
    """Return whether tasks of two rows, one after the other, keep the limit of their device."""
    limit = lanes.limit[device]
    if held + lanes.allocated[first] + lanes.workspace[first] > limit:
        return False
    held += lanes.net[first]
    return bool(held + lanes.allocated[second] + lanes.workspace[second] <= limit)


def move_later(lanes: Lanes, state: State, position: int, distance: int, is_undo: bool) -> int:
    """Move a task over up to ``distance`` others of its device; return how many.

    It stops before a task that needs it, and before the memory limit would break. Neither stops a
    move that undoes another. Behind another task of its lane it is that one: numbers of
    micro-batches stay in order.
    """
    task = state.task[position]
    lane = lanes.lane[task]
    device = lanes.device[lane]
    last = min(position + distance, lanes.ptr[device + 1] - 1)
    place = position
    while place < last:
        other = state.task[place + 1]
        passed = lanes.lane[other]
        if passed != lane:
            own, source = lanes.own[passed], lanes.source[passed]
            if not is_undo and (
                (own != 0 and other + own == task)
                or (source != 0 and other + source == task)
                or not _fits(lanes, device, state.held[place], lanes.row[other], lanes.row[task])
            ):
                break
            state.task[place], state.position[other] = other, place
            state.held[place + 1] = state.held[place] + lanes.net[lanes.row[other]]
        else:
            state.task[place], state.position[task] = task, place
            task = other
        place += 1
    state.task[place], state.position[task] = task, place
    return place - position


def move_earlier(lanes: Lanes, state: State, position: int, distance: int, is_undo: bool) -> int:
    """Move a task before up to ``distance`` others of its device; return how many.

    It stops behind a task that it needs, and before the memory limit would break. Neither stops a
    move that undoes another.
    """
    task = state.task[position]
    lane = lanes.lane[task]
    device = lanes.device[lane]
    own, source = lanes.own[lane], lanes.source[lane]
    last = max(position - distance, lanes.ptr[device])
    place = position
    while place > last:
        other = state.task[place - 1]
        passed = lanes.lane[other]
        if passed != lane:
            if not is_undo and (
                (own != 0 and task + own == other)
                or (source != 0 and task + source == other)
                or not _fits(
                    lanes, device, state.held[place - 1], lanes.row[task], lanes.row[other]
                )
            ):
                break
            state.task[place], state.position[other] = other, place
            state.held[place] = state.held[place - 1] + lanes.net[lanes.row[task]]
        else:
            state.task[place], state.position[task] = task, place
            task = other
        place -= 1
    state.task[place], state.position[task] = task, place
    return position - place


# Times of the current order, computed anew from the first changed task on.

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

    Return their number: less than all if some wait for each other. It stops early, with -1 less
    that number, if a device must end later than ``most`` seconds, or, for a span, must take longer
    than that from its first task on.
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


# Annealing.

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

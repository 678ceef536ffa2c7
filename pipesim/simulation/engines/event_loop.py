"""The compiled engine's loop over events: streams walk, and links serve, in order of time.

Long, because calls would cost as much as what they do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.simulation.engines import RECV, SEND
from pipesim.simulation.engines.one_pass import made
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["events"]

Floats = NDArray[np.float64]


def _push(times: Floats, tasks: Ints, size: int, time: float, task: int) -> None:
    """Add a request to a binary heap of ``size`` entries, ordered by time, then task."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if times[above] < time or (times[above] == time and tasks[above] < task):
            break
        times[at], tasks[at] = times[above], tasks[above]
        at = above
    times[at], tasks[at] = time, task


def _pop(times: Floats, tasks: Ints, size: int) -> None:
    """Take the first of ``size`` requests off the heap."""
    size -= 1
    time, task = times[size], tasks[size]
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        right = below + 1
        if right < size and (
            times[right] < times[below]
            or (times[right] == times[below] and tasks[right] < tasks[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and task < tasks[below]):
            break
        times[at], tasks[at] = times[below], tasks[below]
        at = below
    times[at], tasks[at] = time, task


def _wake(waiting: Ints, next_waiting: Ints, of: int, todo: Ints, n_todo: int) -> int:
    """Move the streams that wait for ``of`` to ``todo``; return how many are there now."""
    stream = waiting[of]
    waiting[of] = -1
    while stream >= 0:
        todo[n_todo] = stream
        n_todo += 1
        stream = next_waiting[stream]
    return n_todo


def _asks(
    first: int,
    last: int,
    members: Ints,
    row: Ints,
    asks: NDArray[np.bool_],
    duration: Floats,
    drawn: Floats,
) -> bool:
    """Tell whether a collective, ``members[first:last]``, waits for links; all must take time."""
    shared = False
    for j in range(first, last):
        member = members[j]
        if (drawn[member] if len(drawn) else duration[row[member]]) <= 0.0:
            return False
        shared = shared or asks[row[member]]
    return shared


def _hold(
    first: int,
    last: int,
    members: Ints,
    row: Ints,
    links: Ints,
    duration: Floats,
    drawn: Floats,
    begin: float,
    link_free: Floats,
) -> float:
    """Let a collective hold its links; return when all are free."""
    for j in range(first, last):
        for k in range(links.shape[1]):
            link = links[row[members[j]], k]
            if link >= 0:
                begin = max(begin, link_free[link])
    for j in range(first, last):
        member = members[j]
        finish = begin + (drawn[member] if len(drawn) else duration[row[member]])
        for k in range(links.shape[1]):
            link = links[row[member], k]
            if link >= 0:
                link_free[link] = max(link_free[link], finish)
    return begin


@kernel(_push, _pop, _wake, _asks, _hold, made)
def events(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    during: Ints,
    share: Floats,
    issued: Floats,
    group: Ints,
    members_ptr: Ints,
    members: Ints,
    rendezvous: bool,
    n_streams: int,
    links: Ints,
    asks: NDArray[np.bool_],
    duration: Floats,
    drawn: Floats,
    queue_ptr: Ints,
    queue: Ints,
    link_free: Floats,
    start: Floats,
    end: Floats,
) -> None:
    """Fill start and end (comes in as -1), streams walking and links serving in turn.

    A stream that meets an unfinished task is listed with it, and walks on when it is finished. A
    stream that meets a shared link (``asks``) puts its request on a heap. When no stream can walk,
    no request earlier than the first on the heap can come any more, so that one is served (rule
    8). Streams of a collective are listed with it until the last is there, and until it may hold
    its links; its request is that of its first member.
    """
    n_tasks, n_groups = len(kind), len(members_ptr) - 1
    cursor = queue_ptr[:-1].copy()
    free = np.zeros(n_streams)
    waiting = np.full(n_tasks + n_groups, -1, np.int32)  # first stream that waits for a task
    next_waiting = np.full(n_streams, -1, np.int32)
    arrived, together = np.zeros(n_groups, np.int64), np.zeros(n_groups)
    granted = np.zeros(n_groups, np.bool_)  # whether nothing keeps a collective any more
    joined = np.zeros(n_streams, np.bool_)  # whether the stream's head is among the arrived
    times, requests, n_requests = np.empty(n_streams), np.empty(n_streams, np.int64), 0
    todo, n_todo = np.arange(n_streams), n_streams
    while n_todo > 0 or n_requests > 0:
        served = -1
        begin = 0.0
        if n_todo > 0:
            n_todo -= 1
            on = todo[n_todo]
        else:
            served, begin = requests[0], times[0]
            _pop(times, requests, n_requests)
            n_requests -= 1
            if len(group) and group[served] >= 0:
                number = group[served]
                held = members_ptr[number], members_ptr[number + 1], members, row, links
                together[number] = _hold(*held, duration, drawn, begin, link_free)
                granted[number] = True
                n_todo = _wake(waiting, next_waiting, n_tasks + number, todo, n_todo)
                continue
            on = stream[kind[served]]
        while cursor[on] < queue_ptr[on + 1]:
            task = queue[cursor[on]]
            of, at, blocker = kind[task], row[task], -1
            if task != served:
                begin = free[on]
                for k in range(needs_ptr[task], needs_ptr[task + 1]):
                    ended = end[needs[k]]
                    if ended < 0.0:
                        blocker = needs[k]
                        break
                    begin = max(begin, ended)
                if blocker < 0 and len(during) and during[task] >= 0:  # a part of it suffices
                    other = during[task]
                    if end[other] < 0.0:
                        blocker = other
                    begin = max(begin, made(task, during, share, row, duration, drawn, start))
                if blocker < 0 and role[of] == RECV and end[pair[task]] < 0.0:
                    blocker = pair[task]
                if blocker < 0 and role[of] == SEND and rendezvous:
                    other = pair[task]
                    there = stream[kind[other]]
                    if cursor[there] >= queue_ptr[there + 1] or queue[cursor[there]] != other:
                        blocker = other
                    begin = max(begin, free[there])
                    if len(issued):
                        begin = max(begin, issued[other])
                if blocker >= 0:
                    next_waiting[on] = waiting[blocker]
                    waiting[blocker] = on
                    break
                if len(issued):
                    begin = max(begin, issued[task])
            seconds = drawn[task] if len(drawn) else duration[at]
            finish = 0.0
            if role[of] == RECV:  # RECV: head and tail arrive a latency after they leave (rule 4)
                begin = max(begin, start[pair[task]] + latency[at])
                finish = max(begin, end[pair[task]] + latency[at])
            elif role[of] == SEND and asks[at] and seconds > 0.0:
                if task != served:
                    _push(times, requests, n_requests, begin, task)
                    n_requests += 1
                    break
                for k in range(links.shape[1]):
                    if links[at, k] >= 0:
                        begin = max(begin, link_free[links[at, k]])
                finish = begin + seconds
                for k in range(links.shape[1]):
                    if links[at, k] >= 0:
                        link_free[links[at, k]] = finish
            else:
                if len(group) and group[task] >= 0:
                    number = group[task]
                    together[number] = max(together[number], begin)
                    begin = together[number]
                    if not joined[on]:
                        joined[on] = True
                        arrived[number] += 1
                    first, last = members_ptr[number], members_ptr[number + 1]
                    if arrived[number] == last - first and not granted[number]:
                        if _asks(first, last, members, row, asks, duration, drawn):
                            _push(times, requests, n_requests, begin, members[first])
                            n_requests += 1
                        else:
                            granted[number] = True
                    if not granted[number]:
                        next_waiting[on] = waiting[n_tasks + number]
                        waiting[n_tasks + number] = on
                        break
                finish = begin + seconds
            start[task] = begin
            end[task] = free[on] = finish
            cursor[on] += 1
            if waiting[task] >= 0:
                n_todo = _wake(waiting, next_waiting, task, todo, n_todo)
            if len(group) and group[task] >= 0:
                joined[on] = False
                n_todo = _wake(waiting, next_waiting, n_tasks + group[task], todo, n_todo)
            if rendezvous and cursor[on] < queue_ptr[on + 1]:  # who waits for the next head
                n_todo = _wake(waiting, next_waiting, queue[cursor[on]], todo, n_todo)

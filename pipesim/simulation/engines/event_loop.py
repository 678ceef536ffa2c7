"""The compiled engine's loop over events, for graphs in which tasks wait for links.

Streams run their queues as far as they can. Links are granted in order of time (rule 8).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.simulation.engines.plan import (
    HOLDS,
    RECV,
    SEND,
    Plan,
    part_done,
    receive_times,
    task_seconds,
)
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]
#: Places in `State.sizes`.
_READY, _REQUESTS = 0, 1


class State(NamedTuple):
    """State of the loop."""

    #: Tasks of each stream in order, as CSR, and the position of the stream's next task.
    queue_ptr: Ints
    queue: Ints
    cursor: Ints
    #: When each stream and each link is free, in seconds.
    stream_free: Floats
    link_free: Floats
    #: Linked lists of streams, ended by -1: the first stream that each task blocks, then the first
    #: that each collective blocks; and the stream after each stream.
    blocked: Ints
    next_blocked: Ints
    #: Whether each stream's next task has joined its collective. For each collective: how many
    #: members have joined, when the last of them was ready (s), and whether it may start.
    joined: NDArray[np.bool_]
    n_joined: Ints
    group_ready: Floats
    granted: NDArray[np.bool_]
    #: Binary heap of the requests for links: time (s) and task.
    request_time: Floats
    request_task: Ints
    #: Stack of the streams that can go on.
    ready_streams: Ints
    #: Entries of ``ready_streams`` and of the heap.
    sizes: Ints


def new_state(plan: Plan, queue_ptr: Ints, queue: Ints) -> State:
    """Return the state at the start: every stream can go on."""
    n_tasks, n_streams, n_groups = len(plan.kind), plan.n_streams, len(plan.members_ptr) - 1
    return State(
        queue_ptr,
        queue,
        queue_ptr[:-1].copy(),
        np.zeros(n_streams),
        np.zeros(plan.n_links),
        np.full(n_tasks + n_groups, -1, np.int32),
        np.full(n_streams, -1, np.int32),
        np.zeros(n_streams, np.bool_),
        np.zeros(n_groups, np.int64),
        np.zeros(n_groups),
        np.zeros(n_groups, np.bool_),
        np.empty(n_streams),
        np.empty(n_streams, np.int64),
        np.arange(n_streams),
        np.array([n_streams, 0]),
    )


def _push_request(state: State, time: float, task: int) -> None:
    """Add a request to the heap, ordered by time, then task."""
    times, tasks = state.request_time, state.request_task
    place = state.sizes[_REQUESTS]
    state.sizes[_REQUESTS] += 1
    while place > 0:
        above = (place - 1) // 2
        if times[above] < time or (times[above] == time and tasks[above] < task):
            break
        times[place], tasks[place] = times[above], tasks[above]
        place = above
    times[place], tasks[place] = time, task


def _pop_request(state: State) -> tuple[float, int]:
    """Take the first request off the heap; return its time and task."""
    times, tasks = state.request_time, state.request_task
    first = times[0], tasks[0]
    state.sizes[_REQUESTS] -= 1
    size = state.sizes[_REQUESTS]
    time, task = times[size], tasks[size]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        right = below + 1
        if right < size and (
            times[right] < times[below]
            or (times[right] == times[below] and tasks[right] < tasks[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and task < tasks[below]):
            break
        times[place], tasks[place] = times[below], tasks[below]
        place = below
    times[place], tasks[place] = time, task
    return first


def _block(state: State, stream: int, blocker: int) -> None:
    """List a stream with the task or collective that it waits for."""
    state.next_blocked[stream] = state.blocked[blocker]
    state.blocked[blocker] = stream


def _release(state: State, blocker: int) -> None:
    """Mark the streams that a task or collective blocked as ready."""
    stream = state.blocked[blocker]
    if stream < 0:
        return
    state.blocked[blocker] = -1
    size = state.sizes[_READY]
    while stream >= 0:
        state.ready_streams[size] = stream
        size += 1
        stream = state.next_blocked[stream]
    state.sizes[_READY] = size


def _ready(
    plan: Plan, state: State, task: int, stream: int, start: Floats, end: Floats
) -> tuple[float, int]:
    """Return the time at which a task is ready (s), and a task that blocks it, or -1.

    The time is valid only if no task blocks it.
    """
    ready = state.stream_free[stream]
    for k in range(plan.needs_ptr[task], plan.needs_ptr[task + 1]):
        ended = end[plan.needs[k]]
        if ended < 0.0:
            return ready, plan.needs[k]
        ready = max(ready, ended)
    if len(plan.partial) and plan.partial[task] >= 0:
        if end[plan.partial[task]] < 0.0:
            return ready, plan.partial[task]
        ready = max(ready, part_done(plan, task, start))
    role = plan.role[plan.kind[task]]
    if role == RECV and end[plan.pair[task]] < 0.0:
        return ready, plan.pair[task]
    if role == SEND and plan.rendezvous:
        partner = plan.pair[task]
        other = plan.stream[plan.kind[partner]]
        place = state.cursor[other]
        if place >= state.queue_ptr[other + 1] or state.queue[place] != partner:
            return ready, partner
        ready = max(ready, state.stream_free[other])
        if len(plan.issued):
            ready = max(ready, plan.issued[partner])
    if len(plan.issued):
        ready = max(ready, plan.issued[task])
    return ready, -1


def _hold_links(
    plan: Plan, state: State, task: int, ready: float, seconds: float
) -> tuple[float, float]:
    """Hold the links of a SEND or a copy once all are free; return its start and end (s)."""
    row, begin = plan.row[task], ready
    for k in range(plan.links.shape[1]):
        if plan.links[row, k] >= 0:
            begin = max(begin, state.link_free[plan.links[row, k]])
    for k in range(plan.links.shape[1]):
        if plan.links[row, k] >= 0:
            state.link_free[plan.links[row, k]] = begin + seconds
    return begin, begin + seconds


def _group_waits_for_links(plan: Plan, group: int) -> bool:
    """Return whether a collective holds shared links; one with a member of 0 s holds none."""
    shared = False
    for j in range(plan.members_ptr[group], plan.members_ptr[group + 1]):
        if task_seconds(plan, plan.members[j]) <= 0.0:
            return False
        shared = shared or plan.asks[plan.row[plan.members[j]]]
    return shared


def _hold_group_links(plan: Plan, state: State, group: int, ready: float) -> None:
    """Hold the links of a collective once all are free; record its start."""
    first, last = plan.members_ptr[group], plan.members_ptr[group + 1]
    begin, link_free = ready, state.link_free
    for j in range(first, last):
        for k in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], k]
            if link >= 0:
                begin = max(begin, link_free[link])
    for j in range(first, last):
        finish = begin + task_seconds(plan, plan.members[j])
        for k in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], k]
            if link >= 0:
                link_free[link] = max(link_free[link], finish)
    state.group_ready[group] = begin


def _join_group(plan: Plan, state: State, group: int, stream: int, ready: float) -> bool:
    """Join the task of a stream to its collective; return whether that may start.

    The last member to join asks for the links, as the collective's first member.
    """
    state.group_ready[group] = max(state.group_ready[group], ready)
    if not state.joined[stream]:
        state.joined[stream] = True
        state.n_joined[group] += 1
    first, last = plan.members_ptr[group], plan.members_ptr[group + 1]
    if state.n_joined[group] == last - first and not state.granted[group]:
        if _group_waits_for_links(plan, group):
            _push_request(state, state.group_ready[group], plan.members[first])
        else:
            state.granted[group] = True
    return bool(state.granted[group])


def _finish(plan: Plan, state: State, task: int, stream: int) -> None:
    """Move a stream on to its next task, and release the streams that waited for that."""
    state.cursor[stream] += 1
    _release(state, task)
    if len(plan.group) and plan.group[task] >= 0:
        state.joined[stream] = False
        _release(state, len(plan.kind) + plan.group[task])
    place = state.cursor[stream]
    if plan.rendezvous and place < state.queue_ptr[stream + 1]:
        _release(state, state.queue[place])


@kernel(
    task_seconds, part_done, receive_times, _push_request, _pop_request, _block,
    _release, _ready, _hold_links, _group_waits_for_links, _hold_group_links, _join_group, _finish,
    allocates=False,
)  # fmt: skip
def event_loop(plan: Plan, state: State, start: Floats, end: Floats) -> None:
    """Fill start and end (s); ``end`` is -1 at first, ``state`` comes from `new_state`.

    A stream whose next task needs an unfinished task is listed with that task, and goes on when it
    is finished. A stream whose next SEND holds shared links puts a request on the heap. When no
    stream can go on, no earlier request than the heap's first can follow, so that one is granted
    (rule 8). The streams of a collective are listed with it until it may start.
    """
    while state.sizes[_READY] > 0 or state.sizes[_REQUESTS] > 0:
        granted, ready = -1, 0.0
        if state.sizes[_READY] > 0:
            state.sizes[_READY] -= 1
            stream = state.ready_streams[state.sizes[_READY]]
        else:
            ready, granted = _pop_request(state)
            if len(plan.group) and plan.group[granted] >= 0:
                _hold_group_links(plan, state, plan.group[granted], ready)
                state.granted[plan.group[granted]] = True
                _release(state, len(plan.kind) + plan.group[granted])
                continue
            stream = plan.stream[plan.kind[granted]]
        while state.cursor[stream] < state.queue_ptr[stream + 1]:
            task = state.queue[state.cursor[stream]]
            if task != granted:
                ready, blocker = _ready(plan, state, task, stream, start, end)
                if blocker >= 0:
                    _block(state, stream, blocker)
                    break
            role, seconds = plan.role[plan.kind[task]], task_seconds(plan, task)
            begin, finish = ready, ready + seconds
            if role == RECV:
                begin, finish = receive_times(plan, task, ready, start, end)
            elif role & HOLDS and plan.asks[plan.row[task]] and seconds > 0.0:
                if task != granted:
                    _push_request(state, ready, task)
                    break
                begin, finish = _hold_links(plan, state, task, ready, seconds)
            elif len(plan.group) and plan.group[task] >= 0:
                group = plan.group[task]
                if not _join_group(plan, state, group, stream, ready):
                    _block(state, stream, len(plan.kind) + group)
                    break
                begin = state.group_ready[group]
                finish = begin + seconds
            start[task] = begin
            end[task] = state.stream_free[stream] = finish
            _finish(plan, state, task, stream)

"""Loops over the predecessors of tasks: levels, and a topological order of ids."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel


class LevelInputs(NamedTuple):
    """The columns of a graph from which levels are counted.

    Attributes
    ----------
    kind, pair, group
        One entry a task; see `TaskGraph`. ``group`` is empty without collectives.
    stream_of_kind, is_recv, is_send
        One entry a kind.
    queue_ptr, queue
        CSR: the tasks of each stream, in order.
    needs_ptr, needs
        CSR: the dependencies of each task.
    group_size
        Number of members of each collective.
    rendezvous
        Whether a SEND waits until its RECV is reached.
    """

    kind: Ints
    stream_of_kind: Ints
    is_recv: Ints
    is_send: Ints
    queue_ptr: Ints
    queue: Ints
    needs_ptr: Ints
    needs: Ints
    pair: Ints
    group: Ints
    group_size: Ints
    rendezvous: bool


class _LevelState(NamedTuple):
    """Position of each stream in its queue, and the streams that wait.

    Attributes
    ----------
    level
        Level of each task, -1 before it is reached.
    cursor, last
        Position in the queue of each stream's head, and level of the task before the head.
    first_waiter, next_waiter
        Linked lists of the streams that wait for a task, or for a collective (numbered after the
        tasks): the first stream of each list, and the stream behind each stream; -1 at the end.
    arrived, group_level
        Number of members of each collective that are heads or done, and the level before them.
    has_arrived
        Whether the head of each stream is among ``arrived``.
    todo
        Stack of the streams that can go on.
    """

    level: Ints
    cursor: Ints
    last: Ints
    first_waiter: Ints
    next_waiter: Ints
    arrived: Ints
    group_level: Ints
    has_arrived: NDArray[np.bool_]
    todo: Ints


def levels(inputs: LevelInputs) -> NDArray[np.int32]:
    """Return the distance of each task from the first, in tasks; -1 for tasks that never start."""
    n_tasks, n_streams = len(inputs.kind), len(inputs.queue_ptr) - 1
    n_groups = len(inputs.group_size)
    state = _LevelState(
        level=np.full(n_tasks, -1, np.int32),
        cursor=inputs.queue_ptr[:-1].copy(),
        last=np.full(n_streams, -1, np.int64),
        first_waiter=np.full(n_tasks + n_groups, -1, np.int32),
        next_waiter=np.full(n_streams, -1, np.int32),
        arrived=np.zeros(n_groups, np.int64),
        group_level=np.full(n_groups, -1, np.int64),
        has_arrived=np.zeros(n_streams, np.bool_),
        todo=np.arange(n_streams),
    )
    _fill_levels(inputs, state)
    return state.level


def _wake(first_waiter: Ints, next_waiter: Ints, todo: Ints, n_todo: int, blocker: int) -> int:
    """Put the streams that wait for a task or a collective on the stack; return its new height."""
    waiter = first_waiter[blocker]
    first_waiter[blocker] = -1
    while waiter >= 0:
        todo[n_todo] = waiter
        n_todo += 1
        waiter = next_waiter[waiter]
    return n_todo


@kernel(_wake)
def _fill_levels(inputs: LevelInputs, state: _LevelState) -> None:
    """Fill ``state.level``.

    Each stream walks along its queue until its head waits for another task. The stream is then
    queued on that task, and resumes when it is done. Each task is visited once. The function is one
    loop, longer than 40 lines: helpers that take all columns make it 30 times slower, since
    compiled code counts references to each column for every task.
    """
    kind, stream_of_kind, is_recv, is_send, queue_ptr, queue, needs_ptr, needs = inputs[:8]
    pair, group, group_size, rendezvous = inputs[8:]
    level, cursor, last, first_waiter, next_waiter, arrived, group_level, has_arrived, todo = state
    n_todo = len(todo)
    while n_todo > 0:
        n_todo -= 1
        stream = todo[n_todo]
        while cursor[stream] < queue_ptr[stream + 1]:
            task = queue[cursor[stream]]
            own, other = kind[task], pair[task]
            number = group[task] if len(group) else -1
            before, blocker = last[stream], -1
            for k in range(needs_ptr[task], needs_ptr[task + 1]):
                if level[needs[k]] < 0:
                    blocker = needs[k]
                    break
                before = max(before, level[needs[k]])
            if blocker < 0 and other >= 0 and is_recv[own]:
                if level[other] < 0:
                    blocker = other
                before = max(before, level[other])
            if blocker < 0 and other >= 0 and rendezvous and is_send[own]:
                peer = stream_of_kind[kind[other]]
                if cursor[peer] >= queue_ptr[peer + 1] or queue[cursor[peer]] != other:
                    blocker = other
                before = max(before, last[peer])
            if blocker < 0 and number >= 0:
                before = group_level[number] = max(group_level[number], before)
                if not has_arrived[stream]:
                    has_arrived[stream] = True
                    arrived[number] += 1
                if arrived[number] < group_size[number]:
                    blocker = len(kind) + number
            if blocker >= 0:
                next_waiter[stream] = first_waiter[blocker]
                first_waiter[blocker] = stream
                break
            level[task] = last[stream] = before + 1
            has_arrived[stream] = False
            cursor[stream] += 1
            n_todo = _wake(first_waiter, next_waiter, todo, n_todo, task)
            if number >= 0:
                n_todo = _wake(first_waiter, next_waiter, todo, n_todo, len(kind) + number)
            if rendezvous and cursor[stream] < queue_ptr[stream + 1]:
                n_todo = _wake(first_waiter, next_waiter, todo, n_todo, queue[cursor[stream]])


def stable_topological_order(waits: CSR) -> Ints:
    """Return a topological order with the smallest ready id first; incomplete for a circle."""
    remaining = np.diff(waits.ptr).tolist()
    followers = waits.transpose()
    ready = [task for task, count in enumerate(remaining) if count == 0]
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for follower in followers[task].tolist():
            remaining[follower] -= 1
            if remaining[follower] == 0:
                heapq.heappush(ready, follower)
    return np.array(order, dtype=np.int64)

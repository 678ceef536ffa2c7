"""Loops over what must come before a task: its level, and whether ids are a topological order."""

from __future__ import annotations

import heapq

import numpy as np

from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel

__all__ = ["levels", "stable_topological_order"]


@kernel()
def levels(
    kind: Ints,
    stream_of: Ints,
    is_recv: Ints,
    is_send: Ints,
    queue_ptr: Ints,
    queue: Ints,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    rendezvous: bool,
    group: Ints,
    group_size: Ints,
    level: Ints,
) -> int:
    """Fill ``level`` (comes in as -1) with distances from the first task; return how many can run.

    Each stream walks along its queue until a task waits for another; it is then listed with that
    other task, and walks on when that one is done: no step is taken in vain.
    """
    n_streams, n_groups = len(queue_ptr) - 1, len(group_size)
    cursor = queue_ptr[:-1].copy()
    last = np.full(n_streams, -1, np.int64)  # level of the stream's last task
    waiting = np.full(len(kind) + n_groups, -1, np.int32)  # first stream that waits for a task
    next_waiting = np.full(n_streams, -1, np.int32)
    arrived, group_level = np.zeros(n_groups, np.int64), np.full(n_groups, -1, np.int64)
    joined = np.zeros(n_streams, np.bool_)  # whether the stream's head is among the arrived
    todo, n_todo, done = np.arange(n_streams), n_streams, 0
    while n_todo > 0:
        n_todo -= 1
        stream = todo[n_todo]
        while cursor[stream] < queue_ptr[stream + 1]:
            task = queue[cursor[stream]]
            of, after, blocker = kind[task], last[stream], -1
            for k in range(needs_ptr[task], needs_ptr[task + 1]):
                if level[needs[k]] < 0:
                    blocker = needs[k]
                    break
                after = max(after, level[needs[k]])
            other = pair[task]
            if blocker < 0 and other >= 0 and is_recv[of]:
                if level[other] < 0:
                    blocker = other
                after = max(after, level[other])
            if blocker < 0 and other >= 0 and rendezvous and is_send[of]:
                there = stream_of[kind[other]]
                if cursor[there] >= queue_ptr[there + 1] or queue[cursor[there]] != other:
                    blocker = other
                after = max(after, last[there])
            if blocker < 0 and len(group) and group[task] >= 0:
                number = group[task]
                group_level[number] = max(group_level[number], after)
                after = group_level[number]
                if not joined[stream]:
                    joined[stream] = True
                    arrived[number] += 1
                if arrived[number] < group_size[number]:
                    blocker = len(kind) + number
            if blocker >= 0:
                next_waiting[stream] = waiting[blocker]
                waiting[blocker] = stream
                break
            level[task] = last[stream] = after + 1
            joined[stream] = False
            cursor[stream] += 1
            done += 1
            freed = task
            for _ in range(3):  # those who wait for the task, for its group, for the next head
                waiter = waiting[freed]
                waiting[freed] = -1
                while waiter >= 0:
                    todo[n_todo] = waiter
                    n_todo += 1
                    waiter = next_waiting[waiter]
                if freed == task and len(group) and group[task] >= 0:
                    freed = len(kind) + group[task]
                elif rendezvous and cursor[stream] < queue_ptr[stream + 1]:
                    freed = queue[cursor[stream]]
                else:
                    break
    return done


def stable_topological_order(waits: CSR) -> Ints:
    """Return a topological order that takes the smallest id it can; short if there is a circle."""
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

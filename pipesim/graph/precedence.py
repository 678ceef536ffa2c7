"""The order of tasks: what each task waits for, and all that comes before it.

`ancestors` marks one bit for each pair of tasks.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.ops import RECVS, SENDS
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.host_memory import check_memory
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    from pipesim.graph.graph import TaskGraph


def precedence(graph: TaskGraph) -> CSR:
    """Return `TaskGraph.precedence`."""
    rows, values = zip(*earlier_by_kind(graph).values(), strict=True)
    return CSR.from_pairs(np.concatenate(rows), np.concatenate(values), len(graph))


def earlier_by_kind(graph: TaskGraph) -> dict[str, tuple[Ints, Ints]]:
    """Return the entries of `TaskGraph.precedence` by kind.

    Each kind has two arrays: tasks, and the task that each of them waits for. Kinds are
    ``"dependency"``, ``"stream"`` (the task before it on its stream), ``"message"`` (the SEND of a
    RECV), ``"rendezvous"`` and ``"group"`` (a task that another member of its collective waits
    for).
    """
    before = graph.queue_predecessor
    queued = np.flatnonzero(before >= 0)
    recvs = np.flatnonzero(graph.is_op(RECVS) & (graph.pair >= 0))
    entries: dict[str, tuple[Ints, Ints]] = {
        "dependency": (graph.dependencies.rows, graph.dependencies.values),
        "stream": (queued, before[queued]),
        "message": (recvs, graph.pair[recvs]),
    }
    if graph.rendezvous:
        sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
        sends = sends[before[graph.pair[sends]] >= 0]
        entries["rendezvous"] = sends, before[graph.pair[sends]]
    if len(graph.collectives):
        entries["group"] = _earlier_of_groups(graph, entries)
    return entries


def _earlier_of_groups(
    graph: TaskGraph, entries: dict[str, tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Return the members of collectives, and the tasks that the other members wait for."""
    rows, values = (np.concatenate(part) for part in zip(*entries.values(), strict=True))
    own = CSR.from_pairs(rows, values, len(graph))
    sizes = np.diff(graph.collectives.ptr).astype(np.float64)
    nbytes = int(32 * (sizes**2).sum())
    check_memory("what members of collectives wait for", nbytes, FEWER_TASKS)
    later, earlier = [], []
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        # The last task of each stream suffices, as the others are before it.
        needed = np.sort(own.gather(members))[::-1]
        needed = needed[np.unique(graph.stream[needed], return_index=True)[1]]
        later.append(np.repeat(members, len(needed)))
        earlier.append(np.tile(needed, len(members)))
    return np.concatenate(later), np.concatenate(earlier)


def issued_first(graph: TaskGraph) -> CSR:
    """Return `TaskGraph.issued_first`."""
    waits, members = graph.precedence, graph.collectives
    rows, values = [waits.rows], [waits.values]
    for number in range(len(members)):
        later, earlier = np.tril_indices(len(members[number]), -1)
        rows.append(members[number][later])
        values.append(members[number][earlier].astype(waits.values.dtype))
    row, value = np.concatenate(rows), np.concatenate(values)
    host = graph.host[graph.device]
    foreign = (host[row] != host[value]) & (value < row)  # ids of files may be in any order
    return CSR.from_pairs(row[foreign], value[foreign], len(graph))


class _LevelInputs(NamedTuple):
    """The columns of a graph from which levels are counted; see `TaskGraph`.

    ``group`` is empty without collectives.
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
    """Position of each stream in its queue, and the streams that wait."""

    #: Level of each task, -1 before it is reached.
    level: Ints
    #: Position in the queue of each stream's head, and level of the task before the head.
    cursor: Ints
    last: Ints
    #: Linked lists of the streams that wait for a task, or for a collective (numbered after the
    #: tasks): the first stream of each list, and the stream behind each stream; -1 at the end.
    first_waiter: Ints
    next_waiter: Ints
    #: Number of members of each collective that are heads or done, and the level before them.
    arrived: Ints
    group_level: Ints
    #: Whether the head of each stream is among ``arrived``.
    has_arrived: NDArray[np.bool_]
    #: Stack of the streams that can go on.
    todo: Ints


def levels(graph: TaskGraph) -> NDArray[np.int32]:
    """Return `TaskGraph.levels`."""
    n_tasks, n_streams, n_groups = len(graph), len(graph.streams), len(graph.collectives)
    inputs = _LevelInputs(
        graph.kind,
        graph.stream_of_kind,
        graph.kinds.is_op(RECVS),
        graph.kinds.is_op(SENDS),
        graph.queues.ptr,
        graph.queues.values,
        graph.dependencies.ptr,
        graph.dependencies.values,
        graph.pair,
        graph.group if n_groups else np.empty(0, np.int32),
        np.diff(graph.collectives.ptr).astype(np.int64),
        graph.rendezvous,
    )
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
def _fill_levels(inputs: _LevelInputs, state: _LevelState) -> None:
    """Fill ``state.level``.

    Each stream walks along its queue until its head waits for another task. The stream is then
    queued on that task, and resumes when it is done. Each task is visited once. Helpers that take
    all columns make the loop 30 times slower, since compiled code counts references to each column
    for every task.
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


Bits = NDArray[np.uint64]


class Edges(NamedTuple):
    """Edges between nodes that are numbered in topological order: ``before`` is the smaller.

    An edge from a node to itself is ignored and counts as implied.
    """

    before: Ints
    after: Ints

    @classmethod
    def joined(cls, *others: Edges) -> Edges:
        """Return the concatenated edges of all groups."""
        return cls(*(np.concatenate(column) for column in zip(*others, strict=True)))

    def kept(self, mask: NDArray[np.bool_]) -> Edges:
        """Return the edges where ``mask`` is True."""
        return Edges(self.before[mask], self.after[mask])


def ancestors(edges: Edges, n: int) -> tuple[Bits, NDArray[np.bool_]]:
    """Return one row of bits for each node: the nodes from which a path leads to it.

    Returns
    -------
    bits
        Shape ``(n, ceil(n / 64))``.
    is_implied
        Whether another path leads from the first node of each edge to its second; an equal edge
        earlier in ``edges`` is such a path. Shape ``(len(edges.before),)``.
    """
    order = CSR.group(edges.after, n)
    bits = np.zeros((n, -(-n // 64)), dtype=np.uint64)
    implied = np.zeros(len(order.values), dtype=np.bool_)
    _close(order.ptr, edges.before[order.values], bits, implied)
    is_implied = np.empty_like(implied)
    is_implied[order.values] = implied
    return bits, is_implied


@kernel()
def _close(ptr: Ints, values: Ints, bits: Bits, implied: NDArray[np.bool_]) -> None:
    """Fill ``bits`` and ``implied``, which are zeros at first; see `ancestors`."""
    for node in range(len(ptr) - 1):
        for k in range(ptr[node], ptr[node + 1]):
            words = (values[k] >> 6) + 1
            if values[k] != node:
                bits[node, :words] |= bits[values[k], :words]
        for k in range(ptr[node], ptr[node + 1]):
            if values[k] == node:
                implied[k] = True
                continue
            word, place = values[k] >> 6, np.uint64(values[k] & 63)
            implied[k] = (bits[node, word] >> place) & np.uint64(1) != np.uint64(0)
            bits[node, word] |= np.uint64(1) << place


def before(bits: Bits, first: Ints, second: Ints) -> NDArray[np.bool_]:
    """Return whether a path leads from each ``first`` node to the ``second``."""
    place = (first & 63).astype(np.uint64)
    is_before: NDArray[np.bool_] = (bits[second, first >> 6] >> place) & np.uint64(1) != 0
    return is_before

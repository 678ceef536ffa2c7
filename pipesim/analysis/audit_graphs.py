"""Graphs that the audit simulates: without one kind of wait, or with streams merged.

A kind of wait has a name such as ``"B needs R"`` (data), ``"B after F on compute"`` (the order of a
queue) or ``"RECV_F needs its SEND_F"`` (a message). Its edges lead from the earlier task to the
task that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import check_name
from pipesim.graph.dependencies import overlapped_pairs
from pipesim.graph.graph import TaskGraph
from pipesim.graph.precedence import Edges, stable_topological_order
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.ops import RECVS, SENDS, TRANSFERS, Op, part_name
from pipesim.utils.csr import CSR, Ints


class WaitKind(NamedTuple):
    """A kind of wait."""

    sort: str  # "data", "message", "queue", "collective" or "rendezvous"
    name: str
    edges: Edges  # each earlier task, and the task that waits for it; none for a collective
    tasks: Ints  # that wait; the members of a collective


def kinds_of_waits(graph: TaskGraph) -> list[WaitKind]:
    """Return the kinds of wait of a graph; each edge belongs to one kind."""
    kinds = [
        *_data_waits(graph),
        *_message_waits(graph),
        *_queue_waits(graph),
        *_collective_waits(graph),
    ]
    if graph.rendezvous and (graph.pair >= 0).any():
        sends = np.flatnonzero(graph.is_op(SENDS))
        reached = graph.queue_predecessor[graph.pair[sends]].astype(np.int64)
        edges = Edges(reached[reached >= 0], sends[reached >= 0])
        kinds.append(WaitKind("rendezvous", "SEND waits until its RECV is reached", edges, sends))
    return kinds


def inside_actions(graph: TaskGraph) -> Edges:
    """Return the edges from the F to the B of each overlapped action; no kind has them."""
    halves = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    return Edges(*(half.astype(np.int64) for half in halves))


def remaining(graph: TaskGraph, kinds: list[WaitKind], kind: WaitKind) -> list[WaitKind]:
    """Return the kinds of wait of a graph without one of them.

    A rendezvous follows from the order of the RECV's queue, and is removed with that order.
    """
    left = [other for other in kinds if other.name != kind.name]
    if kind.sort != "queue":
        return left
    return [
        other._replace(edges=other.edges.kept(~np.isin(graph.pair[other.edges.after], kind.tasks)))
        if other.sort == "rendezvous"
        else other
        for other in left
    ]


def without(graph: TaskGraph, kind: WaitKind | str) -> TaskGraph:
    """Return the graph without one kind of wait, given itself or by name, for `pipesim.simulate`.

    A task that no longer waits for the task before it on its stream begins a new queue there, and
    the tasks behind it are in the new queue. A RECV that no longer waits for its SEND takes no
    time. It then has another operation, and only the simulator accepts such a graph.
    """
    if isinstance(kind, str):
        kinds = {item.name: item for item in kinds_of_waits(graph)}
        kind = kinds[check_name("kind of wait", kind, kinds)]
    if kind.sort == "data":
        left = _without_dependencies(graph, kind.edges)
    elif kind.sort == "message":
        op = graph.kinds.op.copy()
        op[graph.kind[kind.tasks]] = Op.STEP  # neither a message nor a collective, for engines
        left = replace(graph, kinds=replace(graph.kinds, op=op))
    elif kind.sort == "queue":
        left = _with_cut_queues(graph, kind.tasks)
    elif kind.sort == "collective":
        left = _with_members_apart(graph, kind.tasks)
    else:
        left = replace(graph, options=replace(graph.options, rendezvous=False))
    return left.as_verified()


def _data_waits(graph: TaskGraph) -> list[WaitKind]:
    """Return the dependencies by the operations at both ends and the offset of their stages."""
    waits, needed = graph.dependencies.rows, graph.dependencies.values.astype(np.int64)
    offset = np.clip(graph.stage[needed].astype(np.int64) - graph.stage[waits], -2, 2)
    columns = []
    for tasks in (waits, needed):
        columns += [graph.op[tasks], _parts(graph, tasks), graph.peer_stage[tasks] >= 0]

    def name(row: list[int]) -> str:
        return f"{_operation(*row[:3])} needs {_operation(*row[3:6])}{_OFFSETS[row[6]]}"

    kinds = _grouped("data", Edges(needed, waits), [*columns, offset], name)
    return sorted(kinds, key=lambda kind: int(kind.tasks[0]))


def _grouped(
    sort: str, edges: Edges, columns: Sequence[Ints], name: Callable[[list[int]], str]
) -> list[WaitKind]:
    """Return a kind of wait for each distinct row of the columns, which have one entry an edge."""
    rows, row_of_edge = np.unique(np.stack(columns), axis=1, return_inverse=True)
    kinds = []
    for number, row in enumerate(rows.T.tolist()):
        selected = row_of_edge.ravel() == number
        own = Edges(edges.before[selected], edges.after[selected])
        kinds.append(WaitKind(sort, name(row), own, own.after))
    return kinds


#: The text of each difference between the stages of two tasks.
_OFFSETS = {
    -2: " of an earlier stage",
    -1: " of the stage before",
    0: "",
    1: " of the stage behind",
    2: " of a later stage",
}


def _parts(graph: TaskGraph, tasks: Ints) -> Ints:
    """Return the number in `EXCHANGES` of each exchange, and of each REORDER of one; else -1."""
    of_exchange = graph.is_op(frozenset({Op.ALL_TO_ALL, Op.REORDER}))[tasks]
    return np.where(of_exchange, graph.part[tasks], -1).astype(np.int64)


def _operation(op: int, part: int, is_skip: int = False) -> str:
    name = Op(op).name if part < 0 else f"{Op(op).name}.{part_name(Op(op), part)}"
    return f"{name} of a skip" if is_skip else name


def _message_waits(graph: TaskGraph) -> list[WaitKind]:
    kinds = []
    for op in sorted(RECVS):
        recvs = np.flatnonzero((graph.op == op) & (graph.pair >= 0))
        if len(recvs):
            sends = graph.pair[recvs].astype(np.int64)
            name = f"{op.name} needs its {Op(graph.op[sends[0]]).name}"
            kinds.append(WaitKind("message", name, Edges(sends, recvs), recvs))
    return kinds


def _queue_waits(graph: TaskGraph) -> list[WaitKind]:
    """Return the order of the queues by operations, without the edges of `inside_actions`."""
    queued = np.flatnonzero(graph.queue_predecessor >= 0)
    queued = queued[~np.isin(queued, inside_actions(graph).after)]
    earlier = graph.queue_predecessor[queued].astype(np.int64)
    sorts = [name.partition(":")[0] for _, name in graph.streams]
    names, sort = np.unique(sorts, return_inverse=True)
    ends = [column for t in (queued, earlier) for column in (graph.op[t], _parts(graph, t))]

    def name(row: list[int]) -> str:
        return f"{_operation(*row[:2])} after {_operation(*row[2:4])} on {names[row[4]]}"

    kinds = _grouped("queue", Edges(earlier, queued), [*ends, sort[graph.stream[queued]]], name)
    return sorted(kinds, key=lambda kind: ("compute" not in kind.name, int(kind.tasks[0])))


def _collective_waits(graph: TaskGraph) -> list[WaitKind]:
    members = graph.collectives.values
    none = np.empty(0, dtype=np.int64)
    return [
        WaitKind("collective", f"members of {op.name} meet", Edges(none, none),
             members[graph.op[members] == op])
        for op in Op
        if (graph.op[members] == op).any()
    ]  # fmt: skip


def _without_dependencies(graph: TaskGraph, edges: Edges) -> TaskGraph:
    waits, n = graph.dependencies, len(graph)
    removed = np.isin(
        waits.rows.astype(np.int64) * n + waits.values, edges.after * np.int64(n) + edges.before
    )
    left = CSR.from_pairs(waits.rows[~removed], waits.values[~removed], n)
    during = graph.partial_dependency
    if len(during):
        kept = np.zeros(n, dtype=bool)
        buckets = np.flatnonzero(during >= 0)
        pairs = np.stack([edges.after, edges.before], axis=1).tolist()
        dropped = {tuple(pair) for pair in pairs}
        kept[buckets] = [(b, int(during[b])) not in dropped for b in buckets.tolist()]
        during = np.where(kept, during, -1)
    return replace(graph, dependencies=left, partial_dependency=during)


def _with_members_apart(graph: TaskGraph, members: Ints) -> TaskGraph:
    """Return the graph with members of collectives that do not wait for each other."""
    group = graph.group.astype(np.int64)
    group[members] = -1
    tasks = np.flatnonzero(group >= 0)
    _, number = np.unique(group[tasks], return_inverse=True)
    n = int(number.max(initial=-1)) + 1
    left = CSR.from_pairs(number, tasks, n) if n else CSR(np.zeros(1, np.int64), tasks)
    return replace(graph, collectives=left)


def _with_cut_queues(graph: TaskGraph, tasks: Ints) -> TaskGraph:
    """Return the graph in which each of ``tasks`` begins a new queue on its stream."""
    order = graph.queues.values
    begins = np.zeros(len(graph), dtype=np.int64)
    begins[tasks] = 1
    first = graph.queues.ptr[:-1][graph.queues.rows]
    cuts = np.cumsum(begins[order])
    part = np.empty(len(graph), dtype=np.int64)
    part[order] = cuts - cuts[first] + begins[order][first]
    return with_queues(graph, graph.stream.astype(np.int64), part)


def with_queues(graph: TaskGraph, stream: Ints, part: Ints) -> TaskGraph:
    """Return the graph with a new queue for each stream and part of tasks; other waits stay.

    The queue of part 0 has the name of the stream.
    """
    queues, queue = np.unique(np.stack([stream, part]), axis=1, return_inverse=True)
    queue = queue.ravel()
    width = queues.shape[1]
    cells, kind = np.unique(graph.kind * np.int64(width) + queue, return_inverse=True)
    kind_of_cell = cells // width
    names = tuple(
        (device, f"{name}#{number}" if number else name)
        for (device, name), number in (
            (graph.streams[place], number) for place, number in queues.T.tolist()
        )
    )
    kinds = Kinds(*(getattr(graph.kinds, column.name)[kind_of_cell] for column in fields(Kinds)))
    return replace(
        graph,
        kinds=kinds,
        kind=kind.astype(np.int32),
        streams=names,
        stream_of_kind=(cells % width).astype(np.int32),
    )


# Streams of messages or collectives, merged: new queues, and a new order of the tasks.


def merged(graph: TaskGraph, names: list[str]) -> TaskGraph:
    """Return the graph with renamed streams; streams of one device and name become one queue."""
    places = [(device, name) for (device, _), name in zip(graph.streams, names, strict=True)]
    streams = tuple(sorted(set(places)))
    number = np.array([streams.index(place) for place in places], dtype=np.int32)
    return replace(
        graph, streams=streams, stream_of_kind=number[graph.stream_of_kind]
    ).as_verified()


def on_compute(graph: TaskGraph, costs: TaskCosts) -> tuple[TaskGraph, TaskCosts]:
    """Return the graph with its messages on compute streams, as by ``lower(overlap=False)``.

    A RECV comes right before its consumer, or before the consumer of a message that was sent later.
    """
    kinds = graph.kinds
    stream = np.where(kinds.is_op(TRANSFERS), StreamKind.COMPUTE, kinds.stream)
    copies = ("send", "recv", "copy")
    names = ["compute" if name[:4] in copies else name for _, name in graph.streams]
    moved = merged(replace(graph, kinds=replace(kinds, stream=stream)), names)
    order = _received_late(graph)
    moved, costs = _reordered(moved, order), _costs_in(costs, order)
    if graph.rendezvous:
        order = stable_topological_order(moved.precedence)
        if len(order) < len(graph):
            return moved, costs  # its simulation raises DeadlockError
        moved, costs = _reordered(moved, order), _costs_in(costs, order)
    return moved.as_verified(), costs


def _received_late(graph: TaskGraph) -> Ints:
    """Return the order of tasks in which each RECV is right before its consumer."""
    is_recv, pair = graph.is_op(RECVS), graph.pair
    waiting: dict[tuple[int, int], deque[int]] = {}
    channel: dict[int, tuple[int, int]] = {}
    for send in np.flatnonzero(graph.is_op(SENDS)).tolist():
        recv = int(pair[send])
        channel[recv] = int(graph.device[send]), int(graph.device[recv])
        waiting.setdefault(channel[recv], deque()).append(recv)
    order: list[int] = []
    for task in np.flatnonzero(~is_recv).tolist():
        for needed in graph.dependencies[task].tolist():
            queue = waiting[channel[needed]] if is_recv[needed] else deque[int]()
            while needed in queue:
                order.append(queue.popleft())
        order.append(task)
    return np.array([*order, *(recv for queue in waiting.values() for recv in queue)])


def _reordered(graph: TaskGraph, order: Ints) -> TaskGraph:
    """Return the same tasks under other ids: ``order[k]`` becomes task ``k``."""
    rank = np.empty(len(graph) + 1, dtype=np.int64)
    rank[order] = np.arange(len(graph))
    rank[-1] = -1  # index -1 means no task
    waits, members = graph.dependencies, graph.collectives
    by_id = np.lexsort((rank[members.values], members.rows))
    return replace(
        graph,
        kind=graph.kind[order],
        microbatch=graph.microbatch[order],
        dependencies=CSR.from_pairs(rank[waits.rows], rank[waits.values], len(graph)),
        partial_dependency=rank[graph.partial_dependency[order]]
        if len(graph.partial_dependency)
        else graph.partial_dependency,
        pair=rank[graph.pair[order]].astype(graph.pair.dtype),
        collectives=CSR(members.ptr, rank[members.values][by_id].astype(members.values.dtype)),
    )


def _costs_in(costs: TaskCosts, order: Ints) -> TaskCosts:
    """Return the costs of tasks under other ids."""
    drawn, issued = (None if x is None else x[order] for x in (costs.drawn, costs.issued))
    return replace(costs, row=costs.row[order], drawn=drawn, issued=issued)

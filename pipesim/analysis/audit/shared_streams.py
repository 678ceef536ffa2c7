"""Merge streams of messages or collectives: new queues, and a new order of the tasks."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from pipesim.costs.task_costs import TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind
from pipesim.graph.topological_order import stable_topological_order
from pipesim.ops import RECVS, SENDS, TRANSFERS
from pipesim.utils.csr import CSR, Ints


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

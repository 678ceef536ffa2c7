"""`Plan`: the columns of a task graph and its costs that the compiled engine's loops read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.issue_order import issue_times
from pipesim.ops import COLLECTIVES, COPIES, RECVS, SENDS
from pipesim.utils.csr import CSR, Ints

Floats = NDArray[np.float64]
#: Values of `Plan.role`, besides 0 for all other kinds.
SEND, RECV, COPY = 1, 2, 3
#: Bit of the roles whose tasks hold links by themselves: `SEND` and `COPY`.
HOLDS = 1


class Plan(NamedTuple):
    """Columns that the loops read of a graph and its costs."""

    #: Kind of each task. Stream of each kind, and its role: `SEND`, `RECV`, `COPY` or 0.
    kind: Ints
    stream: Ints
    role: Ints
    #: Row of costs of each task. Latency and duration of each row, in seconds.
    row: Ints
    latency: Floats
    duration: Floats
    #: Seconds of each task in one scenario of noise, in place of ``duration``; else empty.
    drawn: Floats
    #: Tasks that must end before each task, as CSR. Transfer partner of each task.
    needs_ptr: Ints
    needs: Ints
    pair: Ints
    #: The backward of which each bucket of gradients needs only a part, or -1; empty without
    #: buckets. The needed share of the backward, 0..1, of each row.
    partial: Ints
    share: Floats
    #: Issue time of each task by its host (rule 7), in seconds; empty if launches cost nothing.
    issued: Floats
    #: Collective of each task, or -1; empty without collectives. Members of each, as CSR.
    group: Ints
    members_ptr: Ints
    members: Ints
    #: Whether a SEND waits for its RECV (rule 6).
    rendezvous: bool
    n_streams: int
    #: Shared links that each row holds, numbered from 0, padded with -1: shape ``(n_rows, most)``.
    #: Whether the row holds any.
    links: Ints
    asks: NDArray[np.bool_]

    @property
    def n_links(self) -> int:
        """Number of links that several streams share."""
        return int(self.links.max(initial=-1)) + 1


def make_plan(graph: TaskGraph, costs: TaskCosts) -> Plan:
    """Return the columns of a graph and its costs."""
    collectives, links = graph.collectives, shared_links(graph, costs)
    needs, share = _needs(graph, costs)
    role = SEND * graph.kinds.is_op(SENDS) + RECV * graph.kinds.is_op(RECVS)
    if not graph.kinds.ops.isdisjoint(COPIES):
        role = role + COPY * graph.kinds.is_op(COPIES)
    issued = costs.issued
    if issued is None and costs.table.launch.any():
        issued = issue_times(graph, costs.table.launch, costs.row)
    return Plan(
        kind=graph.kind,
        stream=graph.stream_of_kind,
        role=role.astype(np.int8),
        row=costs.row,
        latency=costs.table.latency,
        duration=costs.table.duration,
        drawn=np.empty(0) if costs.drawn is None else costs.drawn,
        needs_ptr=needs.ptr,
        needs=needs.values,
        pair=graph.pair,
        partial=graph.partial_dependency,
        share=share,
        issued=np.empty(0) if issued is None else issued,
        group=graph.group if len(collectives) else np.empty(0, np.int32),
        members_ptr=collectives.ptr.astype(np.int64),
        members=collectives.values.astype(np.int64),
        rendezvous=graph.rendezvous,
        n_streams=len(graph.streams),
        links=links,
        asks=links.max(axis=1) >= 0,
    )


def _needs(graph: TaskGraph, costs: TaskCosts) -> tuple[CSR, Floats]:
    """Return the dependencies that are needed whole, and ``share`` of `Plan`."""
    needs = graph.dependencies
    if not len(graph.partial_dependency):
        return needs, np.empty(0)
    whole = needs.values != graph.partial_dependency[needs.rows]
    needs = CSR.from_pairs(needs.rows[whole], needs.values[whole], len(graph))
    share = costs.table.share
    return needs, np.ones(len(costs.table.duration)) if share is None else share


def shared_links(graph: TaskGraph, costs: TaskCosts) -> Ints:
    """Return ``links`` of `Plan`: the links of each row that several streams share.

    Tasks of one stream never compete for a link: each holds the stream as long as the link.
    """
    none = np.full((len(costs.table.duration), 1), -1, dtype=np.int64)
    holders = SENDS | COLLECTIVES | COPIES
    if costs.row is graph.kind:
        rows = np.flatnonzero(graph.kinds.is_op(holders))
        streams = graph.stream_of_kind[rows]
    else:
        tasks = np.flatnonzero(graph.is_op(holders))
        rows, streams = costs.row[tasks], graph.stream_of_kind[graph.kind[tasks]]
    links = costs.table.links[rows]
    if not (links >= 0).any():
        return none
    rows, streams = (np.repeat(x, links.shape[1])[links.ravel() >= 0] for x in (rows, streams))
    used, number = np.unique(links[links >= 0], return_inverse=True)
    is_shared = with_several_streams(number, streams, len(used))
    if not is_shared.any():
        return none
    place = np.minimum(np.searchsorted(used, costs.table.links), len(used) - 1)
    keep = (used[place] == costs.table.links) & is_shared[place]
    return np.where(keep, (np.cumsum(is_shared) - 1)[place], -1)


def with_several_streams(link: Ints, stream: Ints, n_links: int) -> NDArray[np.bool_]:
    """Mark the links that several streams hold, given each pair of a link and a stream."""
    last = np.zeros(n_links, dtype=stream.dtype)
    last[link] = stream
    marked = np.zeros(n_links, dtype=bool)
    marked[link[stream != last[link]]] = True
    return marked


class Progress(NamedTuple):
    """State of a simulation: times at which streams and links become free and collectives start.

    All times are in seconds. A batch of scenarios has them as a second axis of each array.
    """

    stream_free: Floats
    link_free: Floats
    #: When the last task that held the link asked for it.
    link_asked: Floats
    #: Below 0 until it is known.
    group_start: Floats


def new_progress(plan: Plan, *n_scenarios: int) -> Progress:
    """Return the progress at the start of a step."""
    return Progress(
        np.zeros((plan.n_streams, *n_scenarios)),
        np.zeros((plan.n_links, *n_scenarios)),
        np.zeros((plan.n_links, *n_scenarios)),
        np.full((len(plan.members_ptr) - 1, *n_scenarios), -1.0),
    )


# Helpers of several kernels.


def task_seconds(plan: Plan, task: int) -> float:
    """Return how long a task lasts, in seconds."""
    return float(plan.drawn[task] if len(plan.drawn) else plan.duration[plan.row[task]])


def part_done(plan: Plan, task: int, start: Floats) -> float:
    """Return when the backward has done the part that ``task`` needs of it, in seconds."""
    backward = plan.partial[task]
    return float(start[backward] + plan.share[plan.row[task]] * task_seconds(plan, backward))


def receive_times(
    plan: Plan, task: int, ready: float, start: Floats, end: Floats
) -> tuple[float, float]:
    """Return start and end of a RECV that is ``ready``, in seconds.

    Head and tail of the message arrive a latency after they leave (rule 4).
    """
    send, latency = plan.pair[task], plan.latency[plan.row[task]]
    begin = max(ready, start[send] + latency)
    return begin, max(begin, end[send] + latency)

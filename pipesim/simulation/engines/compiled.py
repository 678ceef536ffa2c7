"""The fast engine: the rules of docs/time.md as loops over arrays, compiled by numba.

Where nobody waits for a link, every time follows from times of smaller ids: one pass in order of
ids suffices (`by_ids`; `side_by_side` for several scenarios), which gives up when transfers or
collectives meet on a link. Then they ask for their links in order of time: `by_events` lets each
stream walk until it meets a shared link, and serves the earliest request of all when none can walk
on. Times are made by ``max`` and ``+`` alone, so that engines agree exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, RECVS, SENDS
from pipesim.simulation.engines import RECV, SEND
from pipesim.simulation.engines.event_loop import events
from pipesim.simulation.engines.one_pass import issue, one_pass
from pipesim.simulation.engines.one_pass_batched import pass_many, prune
from pipesim.simulation.noise import Noise
from pipesim.utils.csr import CSR, Ints

__all__ = ["Many", "run"]

Floats = NDArray[np.float64]
#: Scenarios that are simulated side by side.
LANES = 32


class Plan(NamedTuple):
    """What the loops read of a graph and its costs, whatever the durations.

    Attributes
    ----------
    kind, stream, role
        Kind of each task; stream of each kind, and whether it is a SEND (1), a RECV (2) or not.
    row, latency
        Row of costs of each task; latency of each row.
    needs_ptr, needs, pair
        Dependencies whose end is needed, and partners.
    during, share
        Of each task, the backward that it needs no more than a part of, or -1, empty where there is
        none; and the part, of each row.
    issued
        When each task has been issued (rule 7); empty where that costs nothing.
    group, members_ptr, members
        Collective of each task, empty where there is none; and the members of each.
    rendezvous
        Rule 6.
    n_streams
        Number of streams.
    links, asks
        Links of each row that several streams share, numbered from 0, or -1; and whether it has
        any.
    """

    kind: Ints
    stream: Ints
    role: Ints
    row: Ints
    latency: Floats
    needs_ptr: Ints
    needs: Ints
    pair: Ints
    during: Ints
    share: Floats
    issued: Floats
    group: Ints
    members_ptr: Ints
    members: Ints
    rendezvous: bool
    n_streams: int
    links: Ints
    asks: NDArray[np.bool_]

    @property
    def n_links(self) -> int:
        """Number of links that several streams share."""
        return int(self.links.max(initial=-1)) + 1


def run(graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task, in seconds."""
    start, end = np.empty(len(graph)), np.empty(len(graph))
    plan = planned(graph, costs)
    drawn = np.empty(0) if costs.drawn is None else costs.drawn
    if not one_pass(*plan, costs.table.duration, drawn, np.zeros(plan.n_links), start, end):
        run_events(graph, plan, costs.table.duration, drawn, start, end)
    return start, end


class Many:
    """Scenarios of noise on one graph, ready to run in any number and on any thread.

    ``costs`` have the constant factors of `Noise.slowed` in them already.
    """

    def __init__(self, graph: TaskGraph, costs: TaskCosts, noise: Noise) -> None:
        self.graph, self.costs, self.noise = graph, costs, noise
        self.prepared = noise.prepare(graph)
        self.plan = planned(graph, costs)
        ptr, needs = np.zeros_like(self.plan.needs_ptr), np.empty_like(self.plan.needs)
        reach = prune(*self.plan, ptr, needs)
        self.pruned = self.plan._replace(needs_ptr=ptr, needs=needs)
        self.window = 1 << int(reach).bit_length()
        pass_many.compile()  # its 64-bit arithmetic wraps round, which Python's does not

    def nbytes(self, n_scenarios: int) -> int:
        """Return bytes of the times that a call with so many scenarios holds at once."""
        one_by_one = 24 * len(self.graph) if self.plan.n_links else 0  # where some met
        return (24 if len(self.plan.during) else 16) * self.window * n_scenarios + one_by_one

    def __call__(self, scenarios: Sequence[int]) -> tuple[Floats, Floats]:
        """Return makespan (s), and seconds that all devices compute, of each scenario."""
        n, seconds = len(scenarios), self.costs.table.duration
        makespan, busy, met = np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool)
        times = np.empty((2, self.window, n))
        lasted = np.empty((self.window if len(self.plan.during) else 0, n))
        pass_many(
            *self.pruned,
            seconds,
            *self.prepared,
            self.noise.device_factors(self.graph.n_devices, scenarios),
            self.noise.keys(scenarios),
            times[0],
            times[1],
            lasted,
            makespan,
            busy,
            met,
        )
        for k in np.flatnonzero(met).tolist():
            drawn = self.noise.draw(self.graph, self.costs, scenarios[k])
            start, end = np.empty(len(self.graph)), np.empty(len(self.graph))
            run_events(self.graph, self.plan, seconds, drawn, start, end)
            makespan[k] = end.max()
        return makespan, busy


def planned(graph: TaskGraph, costs: TaskCosts) -> Plan:
    """Return the arrays that the loops read."""
    role = SEND * graph.kinds.is_op(SENDS) + RECV * graph.kinds.is_op(RECVS)
    collectives, links = graph.collectives, shared_links(graph, costs)
    issued = np.empty(0)
    if costs.issued is not None:
        issued = costs.issued
    elif costs.table.launch.any():
        issued = np.empty(len(graph))
        host, n_hosts = graph.host[graph.kinds.device], int(graph.host.max()) + 1
        none = CSR(np.empty(0, np.int32), np.empty(0, np.int32))
        first = graph.issued_first if graph.host_threads and n_hosts > 1 else none
        launch, clock = costs.table.launch, np.zeros(n_hosts)
        issue(graph.kind, host, costs.row, launch, first.ptr, first.values, clock, issued)
    ends = graph.dependencies
    share = np.empty(0)
    if len(graph.during):
        whole = ends.values != graph.during[ends.rows]
        ends = CSR.from_pairs(ends.rows[whole], ends.values[whole], len(graph))
        share = np.ones(len(costs.table.duration))
        if costs.table.share is not None:
            share = costs.table.share
    return Plan(
        kind=graph.kind,
        stream=graph.stream_of_kind,
        role=role.astype(np.int8),
        row=costs.row,
        latency=costs.table.latency,
        needs_ptr=ends.ptr,
        needs=ends.values,
        pair=graph.pair,
        during=graph.during,
        share=share,
        issued=issued,
        group=graph.group if len(collectives) else np.empty(0, np.int32),
        members_ptr=collectives.ptr.astype(np.int64),
        members=collectives.values.astype(np.int64),
        rendezvous=graph.rendezvous,
        n_streams=len(graph.streams),
        links=links,
        asks=links.max(axis=1) >= 0,
    )


def shared_links(graph: TaskGraph, costs: TaskCosts) -> Ints:
    """Return the links of each row that several streams share, numbered from 0; -1 for none.

    What one stream runs never meets on a link, because it holds the stream as long.
    """
    none = np.full((len(costs.table.duration), 1), -1, dtype=np.int64)
    holders = SENDS | COLLECTIVES
    if costs.row is graph.kind:
        rows = np.flatnonzero(graph.kinds.is_op(holders))
        streams = graph.stream_of_kind[rows]
    else:
        of = np.flatnonzero(graph.is_op(holders))
        rows, streams = costs.row[of], graph.stream_of_kind[graph.kind[of]]
    links = costs.table.links[rows]
    if not (links >= 0).any():
        return none
    rows, streams = (np.repeat(x, links.shape[1])[links.ravel() >= 0] for x in (rows, streams))
    used, number = np.unique(links[links >= 0], return_inverse=True)
    users = np.unique(np.stack([number, streams]), axis=1)[0]
    is_shared = np.bincount(users, minlength=len(used)) > 1
    if not is_shared.any():
        return none
    place = np.minimum(np.searchsorted(used, costs.table.links), len(used) - 1)
    found = (used[place] == costs.table.links) & is_shared[place]
    return np.where(found, (np.cumsum(is_shared) - 1)[place], -1)


def run_events(
    graph: TaskGraph, plan: Plan, duration: Floats, drawn: Floats, start: Floats, end: Floats
) -> None:
    """Fill start and end where some wait for links."""
    end.fill(-1.0)
    queues = graph.queues
    free = np.zeros(plan.n_links)
    events(*plan, duration, drawn, queues.ptr, queues.values, free, start, end)

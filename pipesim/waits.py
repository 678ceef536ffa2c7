"""What tasks of a timeline waited for besides other tasks: hosts, links, latencies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.csr import CSR, Ints
from pipesim.ops import RECVS, SENDS
from pipesim.timeline import Timeline

__all__ = ["held_links", "issue_times", "message_latency"]


def issue_times(timeline: Timeline) -> NDArray[np.float64]:
    """Return when the hosts had issued each task and those it meets (rule 7), as costs have it.

    Seconds, shape ``(len(graph),)``; 0 where there are no costs.
    """
    graph = timeline.graph
    issued = np.zeros(len(graph))
    if timeline.costs is None:
        return issued
    launch = timeline.costs.per_stage("launch", graph.n_stages)[graph.stage]
    host = graph.host[graph.device]
    mine = CSR.group(host, graph.n_devices)
    for number in np.unique(host):
        issued[mine[number]] = np.cumsum(launch[mine[number]])
    together = issued.copy()
    if graph.rendezvous:
        sends = np.flatnonzero(graph.is_op(SENDS))
        together[sends] = np.maximum(issued[sends], issued[graph.pair[sends]])
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        together[members] = issued[members].max()
    return together


def held_links(timeline: Timeline) -> Ints:
    """Return what held one of a message's links last before it started (rule 8), for each.

    A message or a collective's member, and likewise for each collective, whose members wait for
    the links of all. Shape ``(len(graph),)``. -1 where there is none, or where links are not known
    for want of costs. Of several that ended at one moment, the smallest id.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    found = np.full(len(graph), -1, dtype=np.int64)
    if timeline.costs is None:
        return found
    links = timeline.costs.of(graph).links
    # What takes no time holds nothing, and waits for no link.
    task, place = np.nonzero((links >= 0) & (end > start)[:, None])
    if not len(task):
        return found
    link = links[task, place].astype(np.int64)
    # Sorted by link, then end; of one end the smallest id comes last.
    moments = np.unique(end[task])
    width = len(moments) + 1
    ended = link * width + np.searchsorted(moments, end[task], "right")
    order = np.lexsort((-task, ended))
    began = link * width + np.searchsorted(moments, start[task], "right")
    position = np.searchsorted(ended[order], began, "right") - 1
    there = (position >= 0) & (link[order[position]] == link)
    holder, waiter = task[order[position[there]]], task[there]
    latest = np.lexsort((holder, -end[holder], waiter))
    first = latest[np.unique(waiter[latest], return_index=True)[1]]
    found[waiter[first]] = holder[first]
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        holders = found[members][found[members] >= 0]
        if len(holders):
            found[members] = holders[np.lexsort((holders, -end[holders]))[0]]
    return found


def message_latency(timeline: Timeline) -> NDArray[np.float64]:
    """Return the latency of each RECV, 0 for other tasks; seconds, shape ``(len(graph),)``.

    Without costs, the shortest time from the start of a SEND to that of its RECV that any message
    of this kind took.
    """
    graph = timeline.graph
    recv = np.flatnonzero(graph.is_op(RECVS) & (graph.pair >= 0))
    latency = np.zeros(len(graph))
    if timeline.costs is not None:
        latency[recv] = timeline.costs.of(graph).latency[recv]
        return latency
    shortest = np.full(len(graph.kinds), np.inf)
    took = timeline.start[recv] - timeline.start[graph.pair[recv]]
    np.minimum.at(shortest, graph.kind[recv], np.fmax(took, 0.0))
    latency[recv] = shortest[graph.kind[recv]]
    return latency

"""What tasks of a timeline waited for besides ends of others: hosts, links, parts of backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_costs import MEASURED_COLLECTIVES
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, RECVS, SENDS
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

__all__ = [
    "bucket_shares",
    "collective_latency",
    "exact_seconds",
    "held_links",
    "issued_together",
    "let_go",
    "measured_shares",
    "message_latency",
]

#: Differences of times below this share of the makespan are rounding.
_ROUNDING = 1e-12


def issued_together(graph: TaskGraph, issued: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when the hosts had issued each task and those it meets (rule 7).

    ``issued`` is when they had issued each alone; both in seconds, shape ``(len(graph),)``.
    """
    together = issued.copy()
    if graph.rendezvous:
        sends = np.flatnonzero(graph.is_op(SENDS))
        together[sends] = np.maximum(issued[sends], issued[graph.pair[sends]])
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        together[members] = issued[members].max()
    return together


def exact_seconds(first: NDArray[np.float64], last: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds from ``first`` to ``last`` such that ``first + seconds == last``.

    A difference is rounded; where the sum is off, a neighbouring double is right, if any is. So
    times that an engine made are made again, bit by bit. Where none is, the sum is the smaller one:
    what ended at ``last`` then waited for something else, too.
    """
    return _nearest(last - first, 1.0, first, last)


def _nearest(
    factor: NDArray[np.float64],
    of: NDArray[np.float64] | float,
    first: NDArray[np.float64],
    last: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return ``factor`` or a neighbouring double, such that ``first + factor * of == last``.

    Where none of them is right, one whose sum is smaller.
    """
    below, above = np.nextafter(factor, -np.inf), np.nextafter(factor, np.inf)
    found = np.where(first + factor * of > last, below, factor)
    for near in (above, below, factor):
        found = np.where(first + near * of == last, near, found)
    return found


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


def let_go(timeline: Timeline, shares: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return when each task of ``graph.precedence`` let the one go that it comes before; seconds.

    One value for each of ``graph.precedence.values``: the end of that task, or for buckets of
    gradients, the moment when their last backward had got as far as they need: ``shares``, one a
    task, or those of `bucket_shares`.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    waits = graph.precedence
    moments: NDArray[np.float64] = end[waits.values]
    buckets = np.flatnonzero(graph.during >= 0)
    if not len(buckets):
        return moments
    backward = graph.during[buckets]
    shares = bucket_shares(timeline) if shares is None else shares
    made = start[backward] + shares[buckets] * (end[backward] - start[backward])
    # Draws aside, a bucket that starts at once does so at this very moment.
    near = np.abs(made - start[buckets]) <= _ROUNDING * timeline.makespan
    made = np.minimum(np.where(near, start[buckets], made), end[backward])
    behind = graph.stream[buckets] == graph.stream[backward]  # the stream itself comes to it later
    made = np.where(behind, end[backward], made)
    # All members of a collective wait for what each of them needs.
    label = np.where(graph.group >= 0, graph.group, len(graph) + np.arange(len(graph)))
    cells, of = np.unique(label[buckets] * len(graph) + backward, return_inverse=True)
    latest = np.full(len(cells), -np.inf)
    np.fmax.at(latest, of, made)
    wanted = label[waits.rows] * len(graph) + waits.values
    place = np.minimum(np.searchsorted(cells, wanted), len(cells) - 1)
    return np.where(cells[place] == wanted, latest[place], moments)


def bucket_shares(timeline: Timeline) -> NDArray[np.float64]:
    """Return the part of its backward that each bucket needs, 1 for other tasks.

    As costs have it, or without them as `measured_shares`. Shape ``(len(graph),)``.
    """
    if timeline.costs is None or not len(timeline.graph.during):
        return measured_shares(timeline)
    return timeline.costs.of(timeline.graph).share


def measured_shares(
    timeline: Timeline, said: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the part of its backward after which each bucket started, 1 for other tasks.

    Where it may have waited for something else beyond the part that is ``said``, by default that of
    the timeline's costs, no more than that: the start does not show it. Shape ``(len(graph),)``.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    shares = np.ones(len(graph))
    buckets = np.flatnonzero(graph.during >= 0)
    if not len(buckets):
        return shares
    backward = graph.during[buckets]
    lasted = exact_seconds(start[backward], end[backward])
    after = exact_seconds(start[backward], start[buckets])
    part = np.divide(after, lasted, out=np.ones(len(buckets)), where=lasted > 0)
    shares[buckets] = np.clip(_nearest(part, lasted, start[backward], start[buckets]), 0.0, 1.0)
    if said is None and timeline.costs is None:
        return shares
    said = bucket_shares(timeline) if said is None else said
    waits, held = graph.precedence, held_links(timeline)[buckets]
    rows, values = waits.rows, waits.values
    other = ~np.isin(values, backward)
    busy = np.where(held >= 0, end[held], 0.0)
    latest = issued_together(graph, timeline.issue_times)
    np.maximum.at(latest, rows[other], end[values[other]])
    busy = np.maximum(busy, latest[buckets])
    hidden = busy > start[backward] + said[buckets] * lasted
    shares[buckets] = np.where(hidden, np.minimum(shares[buckets], said[buckets]), shares[buckets])
    return shares


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
    like = graph.kinds.without_streams()[graph.kind[recv]]
    np.minimum.at(shortest, like, np.fmax(took, 0.0))
    latency[recv] = shortest[like]
    return latency


def collective_latency(timeline: Timeline) -> NDArray[np.float64]:
    """Return what each collective would take without its bytes, 0 for other tasks.

    Seconds, shape ``(len(graph),)``; 0 without costs, and where seconds of it were measured.
    """
    graph = timeline.graph
    of_kind = np.zeros(len(graph.kinds))
    rows = graph.kinds.is_op(COLLECTIVES)
    if timeline.costs is not None and rows.any():
        costs = timeline.costs
        measured = (
            name for name in MEASURED_COLLECTIVES.values() if getattr(costs, name) is not None
        )
        none: dict[str, Any] = dict.fromkeys(measured, 0.0)
        empty = replace(costs, network=costs.network.unlimited(), **none)
        of_kind[rows] = empty.of(graph).table.duration[rows]
    return of_kind[graph.kind]

"""Constraints other than dependencies that delayed tasks: host launch, links, gradient buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.rows import MEASURED
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COPIES, RECVS, SENDS, Op
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]

#: Differences of times below this share of the makespan are rounding.
ROUNDING = 1e-12


def joint_issue_times(graph: TaskGraph, issued: Floats) -> Floats:
    """Return the time at which the hosts had issued each task and its partners (rule 7).

    Partners are the RECV of a rendezvous and the members of a collective. ``issued`` is the
    issue time of each task alone. Both are in seconds, shape ``(len(graph),)``.
    """
    together = issued.copy()
    if graph.rendezvous:
        sends = np.flatnonzero(graph.is_op(SENDS))
        together[sends] = np.maximum(issued[sends], issued[graph.pair[sends]])
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        together[members] = issued[members].max()
    return together


def exact_seconds(first: Floats, last: Floats) -> Floats:
    """Return the seconds from ``first`` to ``last`` such that ``first + seconds == last``.

    The difference is rounded. If the sum is not ``last``, a neighbouring double may give it, so
    that times of an engine are reproduced exactly. If no double does, the result is the one with
    the smaller sum: the task that ended at ``last`` then waited for another event, too.
    """
    return _nearest(last - first, 1.0, first, last)


def _nearest(
    factor: Floats,
    multiplier: Floats | float,
    first: Floats,
    last: Floats,
) -> Floats:
    """Return ``factor`` or a neighbour, such that ``first + factor * multiplier == last``.

    If no such double is right, return one whose sum is smaller.
    """
    below, above = np.nextafter(factor, -np.inf), np.nextafter(factor, np.inf)
    nearest = np.where(first + factor * multiplier > last, below, factor)
    for near in (above, below, factor):
        nearest = np.where(first + near * multiplier == last, near, nearest)
    return nearest


def last_link_holder(timeline: Timeline) -> Ints:
    """Return the task that held one of a task's links last before it started (rule 8).

    Members of a collective wait for the links of all its members. Shape ``(len(graph),)``. -1
    without a holder, or without costs, as links are then unknown. If several holders ended at the
    same time, the smallest id counts.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    holder_of_task = np.full(len(graph), -1, dtype=np.int64)
    if timeline.costs is None:
        return holder_of_task
    links = timeline.costs.of(graph).links
    # A task of 0 s holds no link and waits for none.
    task, place = np.nonzero((links >= 0) & (end > start)[:, None])
    if not len(task):
        return holder_of_task
    link = links[task, place].astype(np.int64)
    # Sorted by link, then end; at equal ends the smallest id comes last.
    moments = np.unique(end[task])
    width = len(moments) + 1
    ended = link * width + np.searchsorted(moments, end[task], "right")
    order = np.lexsort((-task, ended))
    began = link * width + np.searchsorted(moments, start[task], "right")
    position = np.searchsorted(ended[order], began, "right") - 1
    same_link = (position >= 0) & (link[order[position]] == link)
    holder, waiter = task[order[position[same_link]]], task[same_link]
    latest = np.lexsort((holder, -end[holder], waiter))
    first = latest[np.unique(waiter[latest], return_index=True)[1]]
    holder_of_task[waiter[first]] = holder[first]
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        holders = holder_of_task[members][holder_of_task[members] >= 0]
        if len(holders):
            holder_of_task[members] = holders[np.lexsort((holders, -end[holders]))[0]]
    return holder_of_task


def release_times(timeline: Timeline, shares: Floats | None = None) -> Floats:
    """Return, for each entry of ``graph.precedence``, when it stopped blocking its successor (s).

    It is the end of that task. For buckets of gradients it is the time at which their last backward
    has done the part that they need: ``shares``, one a task, or those of `bucket_shares`.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    waits = graph.precedence
    moments: Floats = end[waits.values]
    buckets = np.flatnonzero(graph.partial_dependency >= 0)
    if not len(buckets):
        return moments
    backward = graph.partial_dependency[buckets]
    shares = bucket_shares(timeline) if shares is None else shares
    done = start[backward] + shares[buckets] * (end[backward] - start[backward])
    # Without drawn noise, a bucket that starts at once starts exactly at this time.
    near = np.abs(done - start[buckets]) <= ROUNDING * timeline.makespan
    done = np.minimum(np.where(near, start[buckets], done), end[backward])
    same_stream = graph.stream[buckets] == graph.stream[backward]  # its own stream reaches it later
    done = np.where(same_stream, end[backward], done)
    # All members of a collective wait for the dependencies of each member.
    label = np.where(graph.group >= 0, graph.group, len(graph) + np.arange(len(graph)))
    cells, number_of_cell = np.unique(label[buckets] * len(graph) + backward, return_inverse=True)
    latest = np.full(len(cells), -np.inf)
    np.fmax.at(latest, number_of_cell, done)
    wanted = label[waits.rows] * len(graph) + waits.values
    place = np.minimum(np.searchsorted(cells, wanted), len(cells) - 1)
    return np.where(cells[place] == wanted, latest[place], moments)


def bucket_shares(timeline: Timeline) -> Floats:
    """Return the share of its backward that each bucket needs by its costs; 1 for other tasks.

    Without costs, it is that of `measured_shares`. Shape ``(len(graph),)``.
    """
    if timeline.costs is None or not len(timeline.graph.partial_dependency):
        return measured_shares(timeline)
    return timeline.costs.of(timeline.graph).share


def measured_shares(timeline: Timeline, predicted: Floats | None = None) -> Floats:
    """Return the share of its backward after which each bucket started, 1 for other tasks.

    ``predicted`` are the expected shares, by default those of the timeline's costs. They are upper
    bounds for buckets that may have waited for another event, as their start does not show the
    share. Shape ``(len(graph),)``.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    shares = np.ones(len(graph))
    buckets = np.flatnonzero(graph.partial_dependency >= 0)
    if not len(buckets):
        return shares
    backward = graph.partial_dependency[buckets]
    lasted = exact_seconds(start[backward], end[backward])
    after = exact_seconds(start[backward], start[buckets])
    part = np.divide(after, lasted, out=np.ones(len(buckets)), where=lasted > 0)
    shares[buckets] = np.clip(_nearest(part, lasted, start[backward], start[buckets]), 0.0, 1.0)
    if predicted is None and timeline.costs is None:
        return shares
    predicted = bucket_shares(timeline) if predicted is None else predicted
    waits, held = graph.precedence, last_link_holder(timeline)[buckets]
    rows, values = waits.rows, waits.values
    other = ~np.isin(values, backward)
    busy = np.where(held >= 0, end[held], 0.0)
    latest = joint_issue_times(graph, timeline.issue_times)
    np.maximum.at(latest, rows[other], end[values[other]])
    busy = np.maximum(busy, latest[buckets])
    hidden = busy > start[backward] + predicted[buckets] * lasted
    shares[buckets] = np.where(
        hidden, np.minimum(shares[buckets], predicted[buckets]), shares[buckets]
    )
    return shares


def message_latency(timeline: Timeline) -> Floats:
    """Return the latency of each RECV, 0 for other tasks; seconds, shape ``(len(graph),)``.

    Without costs, it is the shortest time from the start of a SEND to the start of its RECV, over
    all messages of the same kind.
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


def collective_latency(timeline: Timeline) -> Floats:
    """Return the time of each collective and copy without its bytes, 0 for other tasks.

    Seconds, shape ``(len(graph),)``; 0 without costs, if its seconds were measured, and for
    GRAD_NORM, most of whose time is work of its device.
    """
    graph = timeline.graph
    latency = np.zeros(len(graph))
    rows = graph.is_op((COLLECTIVES - {Op.GRAD_NORM}) | COPIES)
    if timeline.costs is not None and rows.any():
        costs = timeline.costs
        measured = (name for name in MEASURED.values() if getattr(costs, name) is not None)
        none: dict[str, Any] = dict.fromkeys(measured, 0.0)
        empty = replace(costs, network=costs.network.unlimited(), **none)
        latency[rows] = empty.of(graph).duration[rows]
    return latency

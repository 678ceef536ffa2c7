"""Lanes: the tasks of a graph without the order of streams, and bounds that hold in every order.

A *lane* is one operation of one stage on one replica: all its micro-batches, of which each takes as
long and as many bytes as the others. The *place* of a task is its position among the starts of its
lane: the j-th start has place j. Bounds are computed on places, not on micro-batches. If
micro-batches differ, all are taken to be as the least one, and a second bound is computed on tasks.

Longest paths over places give heads (earliest starts) and tails (time after each end). With these,
each stream has Jackson's preemptive bound, and each device a bound on its span: the time from its
first start to its last end.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import TaskCosts
from pipesim.errors import GraphError
from pipesim.graph.dependencies import apply_rules
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Kinds
from pipesim.ops import FETCHES, RECVS
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]


class Arcs(NamedTuple):
    """Pairs of places: ``start[head] >= end[tail] + lag`` (s) in every order; one entry each."""

    tail: Ints
    head: Ints
    lag: Floats


class LaneGraph(NamedTuple):
    """The lanes of a graph, and arcs between their places.

    The last lanes are starts of collectives, without a kind.
    """

    first: Ints  # lane ``k`` has the places ``first[k]`` to ``first[k + 1]``
    seconds: Floats  # least duration of a task of each lane
    stream: Ints  # that runs all tasks of the lane one at a time; -1 if it has several streams
    lane_of_kind: Ints
    arcs: Arcs  # of dependencies, and of the places of a lane


def lane_graph(graph: TaskGraph, costs: TaskCosts) -> LaneGraph:
    """Return the lanes of a graph, with arcs that hold for every order of its streams.

    The order of streams is dropped. The following is kept of the graph; each statement holds for
    the starts and ends of every order, so that a longest path over the arcs is a lower bound.

    - **Durations.** A place takes at least the least duration of a task of its lane: halves of
      overlapped actions may be shorter than the same operations alone.
    - **Places of a lane.** On one stream, place j + 1 starts after the end of place j. On several
      streams, it ends no earlier, as all tasks of a lane are taken to last equally long.
    - **Dependencies.** Of lane A, let task a(i) have to end before task b(i) of lane B starts, for
      n pairs without a common task, and let B have d further tasks. The j-th of those b comes at
      place j + d or before, and the j-th of those a at place j or later. So place j of A
      ends before place j + d of B starts, for j below n. If each b needs several tasks, the j + 1
      first b need at least the sum of their j + 1 smallest counts. Of tasks that several b need,
      the j + 1 first b need at least as many as one of them.
    - **Messages.** A RECV ends a latency after its SEND (rule 4). It holds no stream here.
    - **Buckets of gradients** need each backward of their stage until its share is done (rule 3):
      which one is the last depends on the order.
    - **Overlapped actions.** An F of one waits for the dependencies of its B only in this order.
      These dependencies are dropped.
    - **Fetches.** UNSHARD and RELOAD wait for tasks that come before their use in this order
      (`pipesim.graph.dependencies`). These dependencies are dropped.
    - **Collectives** start when all members can start (rule 9). The start is a lane of its own,
      between the dependencies of all members and the members.

    Launches of hosts, waits for links, and rendezvous only delay tasks: they are left out.
    """
    kinds = graph.kinds
    lane_of_kind = _lanes(kinds)
    n_lanes, n_groups = int(lane_of_kind.max(initial=-1)) + 1, len(graph.collectives)
    lane = lane_of_kind[graph.kind].astype(np.int64)
    seconds = np.full(n_lanes, np.inf)
    np.minimum.at(seconds, lane, np.where(graph.is_op(RECVS), 0.0, costs.duration))
    stream = _single_streams(lane_of_kind, graph.stream_of_kind, n_lanes)
    if n_groups:
        least = np.full(n_groups, n_lanes)
        np.minimum.at(least, graph.collectives.rows, lane[graph.collectives.values])
        _, of_group = np.unique(least, return_inverse=True)
        lane = np.concatenate([lane, n_lanes + of_group])
        n_more = int(of_group.max()) + 1
        seconds = np.concatenate([seconds, np.zeros(n_more)])
        stream = np.concatenate([stream, np.full(n_more, -1)])
    count = np.bincount(lane, minlength=len(seconds))
    first = np.concatenate([[0], np.cumsum(count)])
    needs = _dependencies(graph, costs, lane, seconds[lane])
    arcs = joined_arcs(_place_arcs(first, seconds, stream), _arcs_of_pairs(needs, lane, first))
    return LaneGraph(first, seconds, stream, lane_of_kind, arcs)


def task_lanes(graph: TaskGraph, costs: TaskCosts) -> tuple[LaneGraph, Ints]:
    """Return the graph in which each task is a lane of its own, and the kind of each lane.

    So micro-batches may differ: each task has its own seconds, and its own dependencies of
    `lane_graph`. No arcs hold between the tasks of a stream, as their order is dropped. Starts of
    collectives have kind -1.
    """
    n_tasks, n_groups = len(graph), len(graph.collectives)
    seconds = np.where(graph.is_op(RECVS), 0.0, costs.duration)
    lane = _lanes(graph.kinds)[graph.kind]
    needs = _dependencies(graph, costs, lane, seconds)
    first = np.arange(n_tasks + n_groups + 1)
    none = np.full(n_groups, -1)
    kind = np.concatenate([graph.kind, none])
    stream = np.concatenate([graph.stream_of_kind[graph.kind], none])
    seconds = np.concatenate([seconds, np.zeros(n_groups)])
    return LaneGraph(first, seconds, stream, np.empty(0, dtype=np.int64), needs), kind


def _lanes(kinds: Kinds) -> Ints:
    """Return the lane of each kind: kinds that differ in stream or overlap alone share one."""
    left_out = ("stream", "overlapped")
    columns = [getattr(kinds, f.name) for f in fields(kinds) if f.name not in left_out]
    _, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return number.ravel()


def _single_streams(lane_of_kind: Ints, stream_of_kind: Ints, n_lanes: int) -> Ints:
    """Return the stream of each lane, or -1 for several."""
    lowest, highest = np.full(n_lanes, np.iinfo(np.int64).max), np.full(n_lanes, -1)
    np.minimum.at(lowest, lane_of_kind, stream_of_kind)
    np.maximum.at(highest, lane_of_kind, stream_of_kind)
    return np.where(lowest == highest, highest, -1)


def _dependencies(graph: TaskGraph, costs: TaskCosts, lane: Ints, seconds: Floats) -> Arcs:
    """Return pairs of tasks that hold in every order; starts of collectives are tasks too.

    ``lane`` and ``seconds`` are of each task.
    """
    needs = graph.dependencies
    if graph.kinds.overlapped.any() or graph.is_op(FETCHES).any():
        needs = _rules_alone(graph)
    rows, values = needs.rows.astype(np.int64), needs.values.astype(np.int64)
    lag = np.zeros(len(rows))
    if len(graph.partial_dependency):
        last = graph.partial_dependency[rows]
        partly = (last >= 0) & (lane[values] == lane[last])
        lag[partly] = (costs.share[rows] - 1.0)[partly] * seconds[values[partly]]
    recvs = np.flatnonzero(graph.is_op(RECVS) & (graph.pair >= 0))
    if len(graph.collectives):
        group = graph.group[rows]
        rows = np.where(group >= 0, len(graph) + group, rows)
    members, starts = graph.collectives.values, len(graph) + graph.collectives.rows
    return Arcs(
        tail=np.concatenate([values, graph.pair[recvs], starts]),
        head=np.concatenate([rows, recvs, members]),
        lag=np.concatenate([lag, costs.latency[recvs], np.zeros(len(members))]),
    )


def _rules_alone(graph: TaskGraph) -> CSR:
    """Return the dependencies without those of overlapped actions, and of fetches on an order."""
    kinds = replace(graph.kinds, overlapped=np.zeros_like(graph.kinds.overlapped))
    size = graph.n_microbatches // graph.n_batches
    groups = graph.reduction_groups
    needs, _ = apply_rules(
        kinds, graph.kind, graph.microbatch, size, graph.stream_of_kind, groups, graph.tied,
        edges=graph.edges,
    )  # fmt: skip
    return needs


def _place_arcs(first: Ints, seconds: Floats, stream: Ints) -> Arcs:
    """Return the arcs from each place of a lane to the next."""
    count = np.diff(first)
    lane = np.repeat(np.arange(len(count)), np.maximum(count - 1, 0))
    is_last = np.zeros(int(first[-1]), dtype=bool)
    is_last[first[1:][count > 0] - 1] = True
    tail = np.flatnonzero(~is_last)
    return Arcs(tail, tail + 1, np.where(stream[lane] >= 0, 0.0, -seconds[lane]))


def _arcs_of_pairs(pairs: Arcs, lane: Ints, first: Ints) -> Arcs:
    """Return arcs of places, given pairs of tasks; `lane_graph` says why they hold."""
    if not len(pairs.tail):
        return pairs
    n_lanes, n_tasks = len(first) - 1, len(lane)
    keys, number = np.unique(lane[pairs.tail] * n_lanes + lane[pairs.head], return_inverse=True)
    lag = np.full(len(keys), np.inf)
    np.minimum.at(lag, number, pairs.lag)
    heads, needed = np.unique(number * n_tasks + pairs.head, return_counts=True)
    tails, users = np.unique(number * n_tasks + pairs.tail, return_counts=True)
    of_head, most_users = heads // n_tasks, np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(most_users, tails // n_tasks, users)
    # Smallest counts of needed tasks first, within each pair of lanes.
    order = np.lexsort((needed, of_head))
    needed, of_head = needed[order], of_head[order]
    begin = np.searchsorted(of_head, np.arange(len(keys) + 1))
    n_heads = np.diff(begin)
    total = np.cumsum(needed)
    total -= np.repeat(total[begin[:-1]] - needed[begin[:-1]], n_heads)
    ended = np.where(most_users[of_head] == 1, total, needed)
    tail_lane, head_lane = np.divmod(keys, n_lanes)
    place = np.arange(len(of_head)) - begin[of_head]
    shift = np.diff(first)[head_lane] - n_heads
    return Arcs(
        tail=first[tail_lane][of_head] + ended - 1,
        head=first[head_lane][of_head] + (place + shift[of_head]),
        lag=lag[of_head],
    )


def joined_arcs(*parts: Arcs) -> Arcs:
    """Return the arcs of all parts."""
    tail, head, lag = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Arcs(tail, head, lag)


# Longest paths.


class Places(NamedTuple):
    """Places of lanes in a topological order, with their arcs."""

    seconds: Floats  # least duration of each place
    lane: Ints
    stream: Ints  # or -1
    number: Ints  # of each place of a `LaneGraph` in this order
    # CSR: the arcs that lead to each place. Tails have smaller numbers than their heads.
    ptr: Ints
    before: Ints
    lag: Floats


def ordered_places(lanes: LaneGraph, arcs: Arcs) -> Places:
    """Return the places in a topological order of ``arcs``."""
    n_places = int(lanes.first[-1])
    tail, head = arcs.tail.astype(np.int64), arcs.head.astype(np.int64)
    followers = CSR.group(tail, n_places)
    waits = np.bincount(head, minlength=n_places)
    order = np.empty(n_places, dtype=np.int64)
    n_ordered = _order_places(followers.ptr, followers.values, head, waits, order)
    if n_ordered < n_places:
        raise GraphError(
            f"{n_places - n_ordered} tasks wait for each other in a circle, in whatever order "
            "streams run them; check the tasks that were given to TaskGraph.build"
        )
    number = np.empty(n_places, dtype=np.int64)
    number[order] = np.arange(n_places)
    into = CSR.group(number[head], n_places)
    lane = np.repeat(np.arange(len(lanes.seconds)), np.diff(lanes.first))[order]
    return Places(
        seconds=lanes.seconds[lane],
        lane=lane,
        stream=lanes.stream[lane],
        number=number,
        ptr=into.ptr.astype(np.int64),
        before=number[tail[into.values]],
        lag=arcs.lag[into.values],
    )


@kernel()
def _order_places(ptr: Ints, arcs: Ints, head: Ints, waits: Ints, order: Ints) -> int:
    """Fill ``order``; return the number of places that are not on a circle or behind one."""
    n = 0
    for place in range(len(order)):
        if waits[place] == 0:
            order[n] = place
            n += 1
    done = 0
    while done < n:
        place = order[done]
        done += 1
        for k in range(ptr[place], ptr[place + 1]):
            follower = head[arcs[k]]
            waits[follower] -= 1
            if waits[follower] == 0:
                order[n] = follower
                n += 1
    return n


def heads_of(places: Places) -> Floats:
    """Return the earliest start of each place (s)."""
    head = np.zeros(len(places.seconds))
    raise_heads(places.ptr, places.before, places.lag, places.seconds, head)
    return head


def tails_of(places: Places) -> Floats:
    """Return the least time from the end of each place to the end of the step (s)."""
    tail = np.zeros(len(places.seconds))
    raise_tails(places.ptr, places.before, places.lag, places.seconds, tail)
    return tail


def heads_pass(ptr: Ints, before: Ints, lag: Floats, seconds: Floats, head: Floats) -> None:
    """Raise each head to the longest path from the heads before it."""
    for place in range(len(head)):
        latest = head[place]
        for k in range(ptr[place], ptr[place + 1]):
            latest = max(latest, head[before[k]] + seconds[before[k]] + lag[k])
        head[place] = latest


def tails_pass(ptr: Ints, before: Ints, lag: Floats, seconds: Floats, tail: Floats) -> None:
    """Raise each tail to the longest path to the tails behind it."""
    for place in range(len(tail) - 1, -1, -1):
        after = tail[place] + seconds[place]
        for k in range(ptr[place], ptr[place + 1]):
            tail[before[k]] = max(tail[before[k]], after + lag[k])


@kernel(heads_pass, allocates=False)
def raise_heads(ptr: Ints, before: Ints, lag: Floats, seconds: Floats, head: Floats) -> None:
    """Call `heads_pass`."""
    heads_pass(ptr, before, lag, seconds, head)


@kernel(tails_pass, allocates=False)
def raise_tails(ptr: Ints, before: Ints, lag: Floats, seconds: Floats, tail: Floats) -> None:
    """Call `tails_pass`."""
    tails_pass(ptr, before, lag, seconds, tail)


# Jackson's preemptive bound: the shortest time of one stream whose tasks have heads and tails.


def shared_streams(lane: Ints, stream: Ints) -> CSR:
    """Return the places of each stream that runs several lanes, as CSR.

    One lane alone is a chain of arcs, so that longest paths already contain its stream.
    """
    used = np.unique(np.stack([stream, lane]), axis=1)
    n_streams = int(stream.max(initial=-1)) + 1
    n_lanes = np.bincount(used[0][used[0] >= 0], minlength=n_streams)
    number = np.cumsum(n_lanes > 1) - 1
    n_shared = int(number[-1]) + 1 if n_streams else 0
    is_shared = (stream >= 0) & np.append(n_lanes > 1, False)[stream]
    label = np.where(is_shared, np.append(number, -1)[stream], n_shared)
    grouped = CSR.group(label, n_shared + 1)
    ptr = grouped.ptr[: n_shared + 1].astype(np.int64)
    return CSR(ptr, grouped.values[: ptr[-1]].astype(np.int64))


def busiest_stream(streams: CSR, head: Floats, seconds: Floats, tail: Floats) -> float:
    """Return the largest of Jackson's preemptive bounds of all streams (s); 0 without streams.

    J. R. Jackson, 1955; J. Carlier, European Journal of Operational Research 11, 1982.
    """
    longest = 0.0
    for number in range(len(streams)):
        places = streams[number]
        own_head = head[places]
        order = np.argsort(own_head, kind="stable")
        columns = own_head[order], seconds[places][order], tail[places][order]
        longest = max(longest, preemptive_bound(*columns))
    return longest


def _sift_up(heap: Ints, tail: Floats, last: int) -> None:
    """Move the last task of the heap up to its place; the longest tail is on top."""
    child = last
    while child > 0:
        parent = (child - 1) // 2
        if tail[heap[parent]] >= tail[heap[child]]:
            break
        heap[parent], heap[child] = heap[child], heap[parent]
        child = parent


def _sift_down(heap: Ints, tail: Floats, size: int) -> None:
    """Move the task on top of the heap down to its place."""
    parent = 0
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and tail[heap[child + 1]] > tail[heap[child]]:
            child += 1
        if tail[heap[parent]] >= tail[heap[child]]:
            break
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child


@kernel(_sift_up, _sift_down)
def preemptive_bound(head: Floats, seconds: Floats, tail: Floats) -> float:
    """Return the makespan of the preemptive order by longest tail (s).

    Tasks are sorted by ``head``. No order of the stream, preemptive or not, has a shorter one.
    """
    n = len(head)
    heap, left = np.empty(n, np.int64), seconds.copy()
    size, arrived, now, longest = 0, 0, 0.0, 0.0
    while size > 0 or arrived < n:
        if size == 0:
            now = max(now, head[arrived])
        while arrived < n and head[arrived] <= now:
            heap[size] = arrived
            size += 1
            arrived += 1
            _sift_up(heap, tail, size - 1)
        task = heap[0]
        until = now + left[task]
        if arrived < n and head[arrived] < until:
            left[task] -= head[arrived] - now
            now = head[arrived]
            continue
        now = until
        longest = max(longest, now + tail[task])
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, tail, size)
    return longest


# Spans of devices.


class Spans(NamedTuple):
    """Devices whose span is limited, and the places of their actions.

    Time zero is the start of the first task of the first device.
    """

    first: Ints  # place of each device that is before all of its others
    ptr: Ints  # CSR: the places of each device
    place: Ints


NO_SPANS = Spans(
    np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
)


def longest_span_bound(places: Places, device: Ints) -> float:
    """Return a lower bound on the longest span of any device (s).

    The span of a device is that of its F, B, I, W and R. Time counts from the first start of
    these, which is a head of 0 for all of them; tasks elsewhere may start earlier. Likewise,
    tails count to the last end on the device. ``device`` is -1 for places of other operations.
    """
    longest = 0.0
    for number in range(int(device.max(initial=-1)) + 1):
        own = device == number
        stream = np.flatnonzero(own)
        head = np.where(own, 0.0, -np.inf)
        tail = head.copy()
        raise_heads(places.ptr, places.before, places.lag, places.seconds, head)
        raise_tails(places.ptr, places.before, places.lag, places.seconds, tail)
        one = CSR(np.array([0, len(stream)]), stream)
        longest = max(longest, busiest_stream(one, head, places.seconds, tail))
    return longest


def spans_of_devices(places: Places, device: Ints) -> Spans:
    """Return the spans of all devices; none if a device has no task that is before all others.

    The first device is the one whose first task is before all other tasks.
    """
    firsts: list[int] = []
    streams: list[Ints] = []
    for number in range(int(device.max(initial=-1)) + 1):
        stream = np.flatnonzero(device == number)
        if not len(stream):
            return NO_SPANS
        head = np.full(len(device), -np.inf)
        head[stream[0]] = 0.0
        raise_heads(places.ptr, places.before, places.lag, places.seconds, head)
        if np.isinf(head[stream]).any():
            return NO_SPANS
        is_first = not np.isinf(head).any()
        firsts.insert(0 if is_first else len(firsts), int(stream[0]))
        streams.insert(0 if is_first else len(streams), stream)
    if not firsts or firsts[0] != 0:
        return NO_SPANS
    ptr = np.cumsum([0, *map(len, streams)])
    return Spans(np.array(firsts), ptr, np.concatenate(streams))


def limit_spans(places: Places, spans: Spans, head: Floats, tail: Floats, horizon: float) -> None:
    """Raise heads and tails such that each device ends a horizon after its first start."""
    for number in range(len(spans.first)):
        first = spans.first[number]
        if number == 0:
            tail[first] = max(tail[first], horizon - places.seconds[first])
        latest = horizon - tail[first] - places.seconds[first]
        for k in range(spans.ptr[number], spans.ptr[number + 1]):
            place = spans.place[k]
            tail[place] = max(tail[place], -latest)
            head[first] = max(head[first], head[place] + places.seconds[place] - horizon)

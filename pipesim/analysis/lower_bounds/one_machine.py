"""Jackson's preemptive bound: the shortest time of one stream whose tasks have heads and tails."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.lower_bounds.lanes import Floats
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel


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

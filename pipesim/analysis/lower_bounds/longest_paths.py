"""Longest paths over the places of lanes: earliest starts, and the time after each end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.lanes import Arcs, Floats, LaneGraph
from pipesim.errors import GraphError
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel


class Places(NamedTuple):
    """Places of lanes in a topological order, with their arcs.

    Attributes
    ----------
    seconds, lane, stream
        Least duration, lane and stream (or -1) of each place; shape ``(n_places,)``.
    number
        Number of each place of a `LaneGraph` in this order; shape ``(n_places,)``.
    ptr, before, lag
        CSR: the arcs that lead to each place. Tails have smaller numbers than their heads.
    """

    seconds: Floats
    lane: Ints
    stream: Ints
    number: Ints
    ptr: Ints
    before: Ints
    lag: Floats


def ordered_places(lanes: LaneGraph, arcs: Arcs) -> Places:
    """Return the places in a topological order of ``arcs``.

    Raises
    ------
    GraphError
        If arcs lead in a circle.
    """
    n_places = int(lanes.first[-1])
    tail, head = arcs.tail.astype(np.int64), arcs.head.astype(np.int64)
    followers = CSR.group(tail, n_places)
    waits = np.bincount(head, minlength=n_places)
    order = np.empty(n_places, dtype=np.int64)
    n_ordered = _topological_order(followers.ptr, followers.values, head, waits, order)
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
def _topological_order(ptr: Ints, arcs: Ints, head: Ints, waits: Ints, order: Ints) -> int:
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


# Helpers of kernels.


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

"""Lower bounds on the span of a device: from its first start to its last end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.lanes import Floats
from pipesim.analysis.lower_bounds.longest_paths import Places, raise_heads, raise_tails
from pipesim.analysis.lower_bounds.one_machine import busiest_stream
from pipesim.utils.csr import CSR, Ints


class Spans(NamedTuple):
    """Devices whose span is limited, and the places of their actions.

    Time zero is the start of the first task of the first device.

    Attributes
    ----------
    first
        Place of each device that is before all of its others; shape ``(n_devices,)``.
    ptr, place
        CSR: the places of each device.
    """

    first: Ints
    ptr: Ints
    place: Ints


NO_SPANS = Spans(
    np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
)


def longest_span_bound(places: Places, device: Ints) -> float:
    """Return a lower bound on the longest span of any device (s).

    The span of a device is that of its F, B, I, W and R. Time counts from the first start of
    these, which is a head of 0 for all of them; tasks elsewhere may start earlier. Likewise,
    tails count to the last end on the device.

    Parameters
    ----------
    places
        Places in topological order.
    device
        Device of each place of F, B, I, W or R, -1 for others; shape ``(n_places,)``.
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


# Helper of a kernel.


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

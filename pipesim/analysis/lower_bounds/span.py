"""Lower bounds on the span of a device: from its first start to its last end."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.lower_bounds.longest_paths import Places, raise_heads, raise_tails
from pipesim.analysis.lower_bounds.one_machine import busiest_stream
from pipesim.utils.csr import CSR, Ints

__all__ = ["longest_span"]


def longest_span(places: Places, device: Ints) -> float:
    """Return a lower bound on the longest span of any device (s).

    The span of a device is that of its compute stream. Time counts from the first start on this
    stream, which is a head of 0 for all of its tasks; tasks elsewhere may start earlier. Likewise,
    tails count to the last end on the device.

    Parameters
    ----------
    places
        Places in topological order.
    device
        Device on whose compute stream each place is, or -1; shape ``(n_places,)``.
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

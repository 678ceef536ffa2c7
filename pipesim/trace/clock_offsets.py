"""Align the clocks of several ranks by the messages between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.csr import Ints

#: Seconds by which clocks may break their bounds and still count as right. A call returns a little
#: after its message has left.
TOLERATED = 100e-6


class ClockBounds(NamedTuple):
    """Messages, each of which bounds the clock of rank ``target`` against that of rank ``source``.

    ``sent`` is when a message was ready, by the clock of ``source`` (s). ``used`` is when its
    consumer started, by the clock of ``target`` (s).
    """

    source: Ints
    target: Ints
    sent: NDArray[np.float64]
    used: NDArray[np.float64]


def align_clocks(messages: ClockBounds, n_ranks: int) -> tuple[NDArray[np.float64], float]:
    """Return what to add to each rank's clock, and the error that remains (s).

    A message cannot be used before it was sent. So messages from a to b bound how far b's clock
    may be behind a's, and those from b to a how far it may be ahead.

    - Recorded clocks that keep within their bounds, to `TOLERATED`, stay as they are: the ranks of
      one host share a clock.
    - Otherwise the offset of two ranks is the middle between their bounds, as in the Network Time
      Protocol (RFC 5905, section 8). With only one bound, it is the nearest offset that keeps it.
    - Ranks are joined along a tree of pairs, the pair with the closest bounds first (Prim),
      starting from rank 0.

    Returns
    -------
    offsets
        Seconds, shape ``(n_ranks,)``; 0 for rank 0, and for the lowest of ranks that no message
        connects with it.
    residual
        Seconds by which the worst message is still used before it was sent; 0 if none is.
    """
    least = _least(messages)
    offsets, joined = np.zeros(n_ranks), {0}
    if all(seconds <= TOLERATED for seconds in least.values()):
        return offsets, max(0.0, max(least.values(), default=0.0))
    near: dict[int, set[int]] = {rank: set() for rank in range(n_ranks)}
    for a, b in least:
        near[a].add(b)
        near[b].add(a)
    edges: list[tuple[float, int, int]] = []
    newest, next_rank = 0, 1
    while len(joined) < n_ranks:
        for other in near[newest] - joined:
            bounds = least.get((newest, other), -math.inf), least.get((other, newest), -math.inf)
            heapq.heappush(edges, (-sum(bounds), newest, other))
        while edges and edges[0][2] in joined:
            heapq.heappop(edges)
        if edges:
            _, a, newest = heapq.heappop(edges)
            offsets[newest] = offsets[a] + _between(
                least.get((a, newest), -math.inf), -least.get((newest, a), -math.inf)
            )
        else:  # no message connects the remaining ranks with these
            while next_rank in joined:
                next_rank += 1
            newest = next_rank
        joined.add(newest)
    residual = max(s + offsets[a] - offsets[b] for (a, b), s in least.items())
    return offsets, max(0.0, float(residual))


def _least(messages: ClockBounds) -> Mapping[tuple[int, int], float]:
    """Return the least advance of a target's clock against its source's, for each pair (s)."""
    pairs, number = np.unique(
        np.stack([messages.source, messages.target]), axis=1, return_inverse=True
    )
    least = np.full(pairs.shape[1], -np.inf)
    np.maximum.at(least, number, messages.sent - messages.used)
    return dict(zip(zip(*pairs.tolist(), strict=True), least.tolist(), strict=True))


def _between(low: float, high: float) -> float:
    """Return 0 if between the bounds, to `TOLERATED`; else their middle, or the only bound."""
    if low - TOLERATED <= 0 <= high + TOLERATED:
        return 0.0
    if math.isinf(low) or math.isinf(high):
        return high if math.isinf(low) else low
    return (low + high) / 2

"""Join clocks of several ranks by the messages between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Message", "join"]


#: Seconds by which clocks may break their bounds and still be taken for right: a call returns a
#: little after its message has left.
TOLERATED = 100e-6


class Message(NamedTuple):
    """From ``source``, where it was ready at ``sent``, to ``target``, where it served ``used``.

    Both in seconds, each by its own rank's clock.
    """

    source: int
    target: int
    sent: float
    used: float


def join(messages: list[Message], n_ranks: int) -> tuple[NDArray[np.float64], float]:
    """Return what to add to each rank's clock, and what remains wrong (seconds).

    A message cannot be used before it was sent. So messages from a to b bound how far b's clock
    may be behind a's, those from b to a how far it may be ahead. Recorded clocks that keep within
    their bounds, give or take `TOLERATED`, stay as they are: those of one host are one clock.
    Otherwise the offset is the
    middle between the bounds, as in the Network Time Protocol (RFC 5905, section 8), or the nearest
    one that keeps to the only bound. Ranks are joined along a tree of pairs, those with the
    closest bounds first (Prim), from rank 0 on.

    Returns
    -------
    offsets
        Seconds, shape ``(n_ranks,)``; 0 for rank 0, and for ranks without messages.
    residual
        By how much the worst message is still used before it was sent; 0 if none is.
    """
    least = _least(messages)
    offsets, joined = np.zeros(n_ranks), {0}
    if all(seconds <= TOLERATED for seconds in least.values()):
        return offsets, max(0.0, *least.values(), 0.0)
    while len(joined) < n_ranks:
        edges = [
            (_width(least, a, b), a, b)
            for a in joined
            for b in set(range(n_ranks)) - joined
            if (a, b) in least or (b, a) in least
        ]
        if not edges:  # what is left has no messages with these
            joined.add(min(set(range(n_ranks)) - joined))
            continue
        _, a, b = min(edges)
        offsets[b] = offsets[a] + _between(
            least.get((a, b), -math.inf), -least.get((b, a), -math.inf)
        )
        joined.add(b)
    residual = max(s + offsets[a] - offsets[b] for (a, b), s in least.items())
    return offsets, max(0.0, float(residual))


def _least(messages: list[Message]) -> Mapping[tuple[int, int], float]:
    """Return the least seconds by which a target's clock must be moved on against its source's."""
    least: dict[tuple[int, int], float] = {}
    for source, target, sent, used in messages:
        pair = (source, target)
        least[pair] = max(least.get(pair, -math.inf), sent - used)
    return least


def _width(least: Mapping[tuple[int, int], float], a: int, b: int) -> float:
    return -least.get((a, b), -math.inf) - least.get((b, a), -math.inf)


def _between(low: float, high: float) -> float:
    """Return 0 if it is about between the bounds, else their middle, or the one that there is."""
    if low - TOLERATED <= 0 <= high + TOLERATED:
        return 0.0
    if math.isinf(low) or math.isinf(high):
        return high if math.isinf(low) else low
    return (low + high) / 2

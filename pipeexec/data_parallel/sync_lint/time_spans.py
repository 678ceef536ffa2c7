"""Spans of time: how long at least one lasts, and what others leave uncovered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

#: Start and end, seconds.
TimeSpan = tuple[float, float]


def covered_seconds(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds that at least one span covers."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def uncovered(span: TimeSpan, others: Sequence[TimeSpan]) -> Iterator[TimeSpan]:
    """Yield the parts of a span that no other span covers; the others are sorted."""
    begin, end = span
    for start, stop in others:
        if stop <= begin:
            continue
        if start >= end:
            break
        if start > begin:
            yield begin, start
        begin = stop
        if begin >= end:
            return
    if begin < end:
        yield begin, end

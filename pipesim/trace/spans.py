"""Spans of time in a trace, and arrays of many of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """Start and end (s). ``on_device``: whether a GPU recorded them."""

    start: float
    end: float
    on_device: bool = False


def span_rows(spans: Iterable[Span]) -> NDArray[np.float64]:
    """Return starts and ends in order, shape ``(n_spans, 2)``."""
    return np.array(sorted(span[:2] for span in spans), dtype=np.float64).reshape(-1, 2)


def starting_within(rows: NDArray[np.float64], span: Span) -> NDArray[np.float64]:
    """Return the rows whose first column is within a span; ``rows`` are sorted by that column."""
    first, last = np.searchsorted(rows[:, 0], [span.start, span.end])
    return rows[first:last]

"""Measured times of collectives: their members start together (rule 9 of docs/time.md)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph

Floats = NDArray[np.float64]


def align_collectives(graph: TaskGraph, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return times in which members of a collective start when its last member arrives (rule 9).

    Each member's measured start is its own arrival. It stays if a member has no time, as in another
    process.
    """
    start = start.copy()
    for row in range(len(graph.collectives)):
        members = graph.collectives[row]
        latest = start[members].max()
        if not np.isnan(latest):  # clocks of two processes differ slightly: keep start <= end
            start[members] = np.fmin(latest, end[members])
    return start, end

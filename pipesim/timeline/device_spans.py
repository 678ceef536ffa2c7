"""`longest_span`: the longest time of a device from its first start to its last end."""

from __future__ import annotations

import math

import numpy as np

from pipesim.ops import SCHEDULED
from pipesim.timeline.timeline import Timeline


def longest_span(timeline: Timeline) -> float:
    """Return the longest time of a device from its first start to its last end (s), without STEP.

    It is the interval at which steps follow each other if optimizers do not wait for each other.
    """
    graph = timeline.graph
    tasks = np.flatnonzero(graph.is_op(SCHEDULED))
    device = graph.device[tasks]
    first, last = np.full(graph.n_devices, math.inf), np.zeros(graph.n_devices)
    np.minimum.at(first, device, timeline.start[tasks])
    np.maximum.at(last, device, timeline.end[tasks])
    return float((last - first).max())

"""Lower bound of the orders of a timeline's tasks, and the timeline's gap to it."""

from __future__ import annotations

import math

import numpy as np

from pipesim.analysis.lower_bounds.graph_bound import graph_bound
from pipesim.ops import RECVS
from pipesim.timeline.timeline import Timeline

#: Differences of times below this share of the makespan are rounding.
_ROUNDING = 1e-9


def timeline_bound(timeline: Timeline) -> float:
    """Return `Timeline.lower_bound`."""
    costs = timeline.costs
    if costs is None or not timeline.complete or not len(timeline):
        return math.nan
    others = ~timeline.graph.is_op(RECVS)  # a RECV lasts as long as it waits for its SEND
    expected = costs.of(timeline.graph).duration
    error = np.abs(timeline.duration - expected)[others]
    if error.max(initial=0.0) > _ROUNDING * timeline.makespan:
        return math.nan
    limit = timeline.memory_limit if timeline.fits else None
    return graph_bound(timeline.graph, costs, memory_limit=limit, target=timeline.makespan)


def gap(timeline: Timeline) -> float:
    """Return `Timeline.gap`; differences by rounding count as 0."""
    bound = timeline.lower_bound
    if not bound > 0.0:
        return math.nan
    share = timeline.makespan / bound - 1.0
    return share if share > _ROUNDING else 0.0

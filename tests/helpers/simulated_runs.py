"""Simulated timelines of tests, published figures, and what tests compare them by."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from places import PUBLISHED

import pipesim as ps
from pipesim.ops import SCHEDULED

#: A second for each of F, I and W; a byte from F to I, and from I to W.
UNIFORM = ps.Costs(forward=1, input_grad=1, weight_grad=1, activation_bytes=1, weight_grad_bytes=1)


def run_schedule(schedule: ps.Schedule, costs: ps.Costs = UNIFORM, **options: Any) -> ps.Timeline:
    """Simulate a schedule without optimizer steps."""
    return ps.simulate(ps.lower(schedule, step="none", **options), costs)


def run(name: str, p: int, m: int, costs: ps.Costs, **options: Any) -> ps.Timeline:
    """Simulate a named schedule without optimizer steps."""
    return run_schedule(ps.schedule(name, p, m), costs, **options)


def without_costs(timeline: ps.Timeline, **changes: Any) -> ps.Timeline:
    """Return the timeline as a measurement has it: times, and sizes of messages."""
    return replace(timeline, sizes=timeline.nbytes, costs=None, **changes)


def longest_span(timeline: ps.Timeline) -> float:
    """Return the longest time from a device's first compute task to the end of its last."""
    compute = timeline.graph.is_op(SCHEDULED)
    spans = [
        timeline.end[own].max() - timeline.start[own].min()
        for own in (compute & (timeline.graph.device == d) for d in range(timeline.n_devices))
    ]
    return float(max(spans))


def published(name: str) -> dict[str, Any]:
    """Read a file of published figures; each file names its source."""
    values: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return values

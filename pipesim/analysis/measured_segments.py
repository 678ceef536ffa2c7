"""Shares of F, B and I that lie between exchanges of experts, as a timeline shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import SEGMENTED, Op
from pipesim.timeline.timeline import Timeline

Floats = NDArray[np.float64]


def measured_segments(timeline: Timeline, average: Callable[[Floats], Any]) -> dict[str, Any]:
    """Return ``expert_layers`` and ``segments`` of `pipesim.Costs`; empty without segments.

    Operations that a stage does not run have even shares.
    """
    graph = timeline.graph
    if not (graph.kinds.is_op(SEGMENTED) & (graph.kinds.part >= 0)).any():
        return {}
    n_segments = [_n_segments(graph, stage) for stage in range(graph.n_stages)]
    segments = [
        tuple(_shares(timeline, op, stage, n, average) for op in (Op.F, Op.B, Op.I))
        for stage, n in enumerate(n_segments)
    ]
    return {"expert_layers": [(n - 1) // 2 for n in n_segments], "segments": segments}


def _n_segments(graph: TaskGraph, stage: int) -> int:
    """Return the number of segments of F of a stage; 1 if it is whole."""
    own = graph.kinds.is_op(SEGMENTED) & (graph.kinds.stage == stage)
    return 1 + max(0, int(graph.kinds.part[own].max(initial=0)))


def _shares(
    timeline: Timeline, op: Op, stage: int, n: int, average: Callable[[Floats], Any]
) -> tuple[float, ...]:
    """Return the share of each of an operation's n segments in a stage."""
    graph = timeline.graph
    tasks = (graph.op == op) & (graph.stage == stage)
    if n == 1 or not tasks.any():
        return (1 / n,) * n
    parts = [tasks & (graph.part == part) for part in range(n)]
    seconds = np.array([average(timeline.duration[part]) for part in parts])
    if not seconds.sum():
        return (1 / n,) * n
    return tuple((seconds / seconds.sum()).tolist())

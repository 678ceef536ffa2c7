"""Measure the seconds and bytes of OFFLOAD and RELOAD in a timeline, as fields of `Costs`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipesim.analysis.measured_collectives import Average
from pipesim.costs.copy_costs import MEASURED_COPIES
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline


def measured_copies(
    timeline: Timeline, average: Average, *, has_activations: bool
) -> dict[str, Any]:
    """Return the seconds of copies by stage, and bytes if the timeline has no costs.

    They are the bytes moved, or, unless the caller ``has_activations``, those of activations, of
    which an OFFLOAD moves a known share; 0 for stages without one.

    Copies of whole activations count, or those of inputs for a stage that has no others. A stage
    without any has the mean of the others. Empty without copies.
    """
    graph, values = timeline.graph, dict[str, Any]()
    for op, name in MEASURED_COPIES.items():
        tasks = np.flatnonzero(graph.op == op)
        seconds = np.full(graph.n_stages, np.nan)
        for stage in np.unique(graph.stage[tasks]).tolist():
            own = tasks[graph.stage[tasks] == stage]
            whole = own[graph.part[own] < 0]
            seconds[stage] = average(timeline.duration[whole if len(whole) else own])
        if len(tasks):
            mean = float(np.nanmean(seconds))
            values[name] = tuple(np.where(np.isnan(seconds), mean, seconds).tolist())
    whole = (graph.op == Op.OFFLOAD) & (graph.part < 0)
    if timeline.costs is None and whole.any():
        nbytes = np.zeros(graph.n_stages)
        np.maximum.at(nbytes, graph.stage[whole], timeline.nbytes[whole])
        if has_activations:
            values["offload_bytes"] = tuple(nbytes.tolist())
        else:
            values["activation_bytes"] = tuple((nbytes / graph.offload_shares).tolist())
    return values

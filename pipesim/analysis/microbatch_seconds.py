"""Seconds and message bytes of each micro-batch in a timeline, as fields of `pipesim.Costs`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

Floats = NDArray[np.float64]
#: Operations on one micro-batch, by field of `pipesim.Costs`.
_OPS = {
    "forward": Op.F,
    "backward": Op.B,
    "input_grad": Op.I,
    "weight_grad": Op.W,
    "recompute": Op.R,
}


def n_measured(graph: TaskGraph) -> int:
    """Return the number of micro-batches of all data-parallel replicas."""
    return (1 + int(copy_of_replicas(graph.homes).max())) * graph.n_microbatches


def microbatch_values(timeline: Timeline, averages: dict[str, Any]) -> dict[str, Floats]:
    """Return the fields that differ between micro-batches.

    Parameters
    ----------
    timeline
        A complete timeline.
    averages
        Fields of `pipesim.Costs` with one value a stage. They stand for micro-batches without a
        task of the operation, and for halves of overlapped actions.

    Returns
    -------
    dict
        Arrays of shape ``(n_stages, n_microbatches)``, or with the micro-batches of all
        data-parallel replicas one after the other.
    """
    values = {}
    for name, op in _OPS.items():
        if name in averages:
            seconds = _of_tasks(timeline, op, timeline.duration)
            if name == "backward":
                halves = [_of_tasks(timeline, half, timeline.duration) for half in (Op.I, Op.W)]
                seconds = np.where(np.isnan(seconds), sum(halves), seconds)
            values[name] = _filled(seconds, averages[name])
    forward = _of_tasks(timeline, Op.SEND_F, timeline.nbytes)
    gradient = np.roll(_of_tasks(timeline, Op.SEND_B, timeline.nbytes), -1, axis=0)
    values["output_bytes"] = _filled(np.fmax(forward, gradient), averages["output_bytes"])
    return values


def _filled(values: Floats, averages: Any) -> Floats:
    """Return values with the average of their stage in place of NaN."""
    of_stage = np.broadcast_to(np.asarray(averages, dtype=np.float64), len(values))
    return np.where(np.isnan(values), of_stage[:, None], values)


def _of_tasks(timeline: Timeline, op: Op, values: Floats) -> Floats:
    """Return the value of an operation's task of each stage and micro-batch; NaN without one.

    Values of its segments are added up.
    """
    graph = timeline.graph
    half = (graph.kinds.overlapped > 0) | (graph.kinds.peer_stage >= 0)
    tasks = np.flatnonzero((graph.op == op) & ~half[graph.kind] & (graph.microbatch >= 0))
    copy = copy_of_replicas(graph.homes)
    values_of = np.full((graph.n_stages, n_measured(graph)), np.nan)
    column = copy[graph.replica[tasks]] * graph.n_microbatches + graph.microbatch[tasks]
    place = graph.stage[tasks], column
    values_of[place] = 0.0
    np.add.at(values_of, place, values[tasks])
    return values_of

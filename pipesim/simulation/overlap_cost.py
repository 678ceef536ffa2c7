"""Compute beside collectives: how much longer its tasks last, with `Costs.overlap_cost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COMPUTE
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: Return start and end of each task (s).
Engine: TypeAlias = Callable[[TaskGraph, TaskCosts], tuple[Floats, Floats]]


def run_twice(run: Engine, graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task (s), with the cost of overlap if there is one.

    The first run has no cost, and says which tasks overlap. In the second one, tasks last longer.
    """
    start, end = run(graph, costs)
    if costs.table.overlap_cost is None:
        return start, end
    added = overlap_seconds(graph, costs.row, costs.table, start, end)
    return run(graph, replace(costs, drawn=costs.duration + added))


def overlap_seconds(
    graph: TaskGraph, row: Ints, table: CostTable, start: Floats, end: Floats
) -> Floats:
    """Return the seconds that each task lasts longer, given times without the cost of overlap.

    It is 0 for other tasks than compute. ``row`` and ``table`` are those of `TaskCosts`.
    """
    added = np.zeros(len(graph))
    assert table.overlap_cost is not None
    queues, cost = graph.queues, table.overlap_cost[row]
    computes, lasting = graph.is_op(COMPUTE), graph.is_op(COLLECTIVES) & (cost > 0)
    of_device: dict[int, list[int]] = {}
    for stream, (device, _) in enumerate(graph.streams):
        of_device.setdefault(device, []).append(stream)
    for streams in of_device.values():
        queued = [queues[stream] for stream in streams]
        compute = np.concatenate([tasks[computes[tasks]] for tasks in queued])
        for tasks in queued:
            own = tasks[lasting[tasks]]
            if len(own) == 0:
                continue
            # Seconds lost by each moment: a line that rises while a collective is under way.
            moments = np.stack([start[own], end[own]], axis=1).ravel()
            lost = np.cumsum(np.stack([np.zeros(len(own)), cost[own] * (end - start)[own]], axis=1))
            added[compute] += np.interp(end[compute], moments, lost)
            added[compute] -= np.interp(start[compute], moments, lost)
    return added

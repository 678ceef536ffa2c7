"""The graph of one micro-batch a path, and the bytes that a device may hold beside its stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.memory_limit import limits_beyond_static
from pipesim.timeline.task_bytes import workspaces

Floats = NDArray[np.float64]


@lru_cache(maxsize=16)  # a search over configurations asks for the same placements
def one_microbatch_graph(placement: Placement, ops: tuple[Op, ...]) -> TaskGraph:
    """Return a graph of one micro-batch a path: all F down the stages, then all others up."""
    actions: list[list[tuple[Op, int, int]]] = [[] for _ in range(placement.n_devices)]
    n_stages = placement.n_stages
    for stage in range(n_stages):
        for path, devices in enumerate(placement.paths):
            actions[devices[stage]].append((Op.F, stage, path))
    for stage in reversed(range(n_stages)):
        for path, devices in enumerate(placement.paths):
            actions[devices[stage]] += [(op, stage, path) for op in ops[1:]]
    columns = (tuple(map(list, zip(*rows, strict=True))) for rows in actions)
    return lower(Schedule.from_columns("one micro-batch", placement, placement.n_paths, columns))


def activation_limits(graph: TaskGraph, costs: Sequence[Costs], memory_limit: object) -> Floats:
    """Return the bytes of activations that each device may hold, by a limit of all its bytes.

    Parameters
    ----------
    graph
        Tasks of the devices.
    costs
        Costs of each class of equal micro-batches.
    memory_limit
        All bytes of a device, as in `pipesim.simulate`.

    Returns
    -------
    numpy.ndarray
        The limit without parameters, gradients, optimizer, the largest workspace of the device's
        tasks and the allocator's reserve; shape ``(n_devices,)``. Negative where these exceed it.
    """
    workspace = np.zeros(graph.n_devices)
    for own in costs:
        np.maximum.at(workspace, graph.kinds.device, workspaces(graph, own))
    return limits_beyond_static(graph, costs[0], memory_limit) - workspace

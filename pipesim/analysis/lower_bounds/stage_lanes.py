"""Lanes and bytes of the stages of each device, for bounds under a memory limit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.lanes import Floats, LaneGraph
from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.task_bytes import kind_bytes, static_parts, weight_versions, workspaces

#: Relative error of sums of bytes.
BYTES_ROUNDING = 1e-9


class StageLanes(NamedTuple):
    """Lanes of one stage on one replica, and their bytes.

    Attributes
    ----------
    forward, recompute, backward, weight
        Lanes of F, of R, of B or I, and of W; -1 for lanes that do not exist.
    input_bytes
        Bytes that F takes. Without R, these are all activations.
    recomputed_bytes
        Bytes that R takes.
    more_bytes, released, weight_released
        Bytes that I takes, that B or I releases, and that W releases.
    forward_workspace, backward_workspace
        Bytes that are held only while F or R runs, and while B, I or W runs.
    """

    forward: int
    recompute: int
    backward: int
    weight: int
    input_bytes: float
    recomputed_bytes: float
    more_bytes: float
    released: float
    weight_released: float
    forward_workspace: float
    backward_workspace: float


class DeviceStages(NamedTuple):
    """Stages of one device.

    Attributes
    ----------
    limit
        Bytes that the device may hold; infinity without a limit.
    static
        Bytes that it holds throughout in any order.
    room
        Bytes for micro-batches: the limit without the allocator's reserve and static bytes.
    chains
        For each replica on the device, its stages in ascending order. Replicas with stages of which
        some micro-batches have B and others I and W are left out.
    complete
        Whether no replica is left out.
    """

    limit: float
    static: float
    room: float
    chains: list[list[StageLanes]]
    complete: bool


def device_stages(
    graph: TaskGraph, lanes: LaneGraph, costs: Costs | None, limits: Floats | None
) -> list[DeviceStages]:
    """Return the stages of each device; ``limits`` has the bytes that each may hold.

    Bytes are those of the order that holds least:

    - if some micro-batches of a stage are recomputed, all are taken to be;
    - gradients that wait for a reduction, and stashed versions of weights beyond one, do not count.

    Without ``costs`` or ``limits``, nothing is held.
    """
    limited = costs is not None and limits is not None
    stages = _stages(graph, lanes, costs if limited else None)
    held = _static(graph, costs) if costs is not None and limited else np.zeros(graph.n_devices)
    reserve = costs.memory_reserve if costs is not None else 0.0
    devices = []
    for device in range(graph.n_devices):
        limit = math.inf if limits is None else float(limits[device])
        room = limit / (1.0 + reserve) - float(held[device]) + BYTES_ROUNDING * limit
        chains, complete = [], True
        for replica in range(graph.n_replicas):
            numbers = np.flatnonzero(graph.homes[replica] == device).tolist()
            own = [stages.get((replica, stage)) for stage in numbers]
            chain = [stage for stage in own if stage is not None]
            complete &= len(chain) == len(own)
            if chain and len(chain) == len(own):
                chains.append(chain)
        devices.append(DeviceStages(limit, float(held[device]), room, chains, complete))
    return devices


def _static(graph: TaskGraph, costs: Costs) -> Floats:
    """Return bytes that each device holds throughout in any order; shape ``(n_devices,)``."""
    parts = static_parts(graph, costs)
    parameters = parts.parameters
    if graph.weight_versions == "stashed":  # their number depends on the order
        stage_bytes = costs.per_stage("parameter_bytes", graph.n_stages)
        spare = (weight_versions(graph) - 1) * stage_bytes
        parameters = parameters - np.bincount(
            graph.homes.ravel(), spare.ravel(), minlength=graph.n_devices
        )
    total: Floats = parameters + parts.gradients + parts.optimizer
    return total


def _stages(
    graph: TaskGraph, lanes: LaneGraph, costs: Costs | None
) -> dict[tuple[int, int], StageLanes]:
    """Return lanes and bytes of each replica and stage whose lanes have equally many tasks."""
    kinds, count = graph.kinds, np.diff(lanes.first)
    zero: NDArray[np.float64] = np.zeros(len(kinds))
    allocated = kept = released = workspace = zero
    if costs is not None:
        allocated, kept, released = kind_bytes(graph, costs)
        workspace = workspaces(graph, costs)
    kind_of: dict[tuple[int, int, int], int] = {}
    keys = zip(kinds.replica.tolist(), kinds.stage.tolist(), kinds.op.tolist(), strict=True)
    for kind, key in enumerate(keys):
        kind_of.setdefault(key, kind)
    stages = {}
    for (replica, stage, op), f in kind_of.items():
        r, b, i, w = (kind_of.get((replica, stage, op), -1) for op in (Op.R, Op.B, Op.I, Op.W))
        back = b if i < 0 else i
        sizes = {int(count[lanes.lane_of_kind[kind]]) for kind in (f, back, w) if kind >= 0}
        mixed = (b >= 0 and i >= 0) or kinds.part[f] >= 0  # segments are lanes of their own
        if op != Op.F or back < 0 or mixed or len(sizes) > 1 or (i >= 0) != (w >= 0):
            continue
        stages[replica, stage] = StageLanes(
            *(int(lanes.lane_of_kind[kind]) if kind >= 0 else -1 for kind in (f, r, back, w)),
            *(float(x) for x in (
                kept[f] if r >= 0 else allocated[f],
                allocated[r] if r >= 0 else 0.0,
                allocated[back],
                released[back],
                released[w] if w >= 0 else 0.0,
                workspace[f],
                workspace[back],
            )),
        )  # fmt: skip
    return stages

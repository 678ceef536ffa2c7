"""Bytes of the stages of each device, and the arcs that a memory limit adds.

An arc says which start needs which earlier release, in every order.

A device computes one task after the other, so that the bytes that it holds depend on the order of
its tasks alone. Take a task T that begins a micro-batch at place i of its lane, and a later lane R
of the same device and replica. Before T starts, i micro-batches have passed T. Those that have
not passed R hold at least ``low`` bytes each. So at most ``(room - own) / low`` of them have not
passed R, where T itself needs ``own`` bytes: the task at place ``i - 1 - cap`` of R ends before T.

With one stage a device, activations that W (or B) releases, and room for ``cap + 1`` micro-batches,
this is the usual rule that F of micro-batch i waits for the W (or B) of micro-batch i - cap - 1.

The arcs stay valid, and get weaker, in these cases:

- a device with several stages: ``low`` is the least that a micro-batch holds between T and R;
- a bidirectional pipeline: the other path is held to hold nothing;
- recompute of some micro-batches: all are held to be recomputed, which holds less;
- gradients that wait for a reduction, and stashed versions of weights beyond one: not counted.

Stages whose lanes differ in their number of tasks, such as B of some micro-batches and I and W of
others, get no arcs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.lanes import Arcs, Floats, LaneGraph, joined_arcs
from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.memory_limit import too_low_limit
from pipesim.timeline.task_bytes import kind_bytes, static_parts, weight_versions, workspaces

#: Relative error of sums of bytes.
BYTES_ROUNDING = 1e-9


class StageLanes(NamedTuple):
    """Lanes of one stage on one replica (-1 for none), and their bytes."""

    forward: int
    recompute: int
    backward: int  # B or I
    weight: int
    input_bytes: float  # taken by F; without R, all activations
    recomputed_bytes: float  # taken by R
    more_bytes: float  # taken by I
    released: float  # by B or I
    weight_released: float
    forward_workspace: float  # held only while F or R runs
    backward_workspace: float  # held only while B, I or W runs


class DeviceStages(NamedTuple):
    """Stages of one device.

    Replicas with stages of which some micro-batches have B and others I and W are left out.
    """

    limit: float  # bytes that it may hold
    static: float  # bytes that it holds throughout in any order
    room: float  # for micro-batches: the limit without the allocator's reserve and static bytes
    chains: list[list[StageLanes]]  # for each replica, its stages in ascending order
    complete: bool  # whether no replica is left out


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


# Arcs.


class _Chain(NamedTuple):
    """F of all stages of a device and replica, then their B or I, in the order of a micro-batch."""

    lane: list[int]
    weight: list[int]  # lane of W of each I, -1 for other steps
    own: list[float]  # least bytes during each step that its micro-batch needs
    low: list[float]  # that a micro-batch holds after each step, when each possible W has run
    freed: list[float]  # by W of each step


def memory_arcs(devices: Sequence[DeviceStages], lanes: LaneGraph, reserve: float) -> Arcs:
    """Return the arcs of the memory limits of devices; ``reserve`` is `Costs.memory_reserve`."""
    none = np.empty(0, dtype=np.int64)
    arcs = [Arcs(none, none, np.empty(0))]
    for number, device in enumerate(devices):
        for stages in device.chains:
            chain = _chain(stages)
            own = max([0.0, *chain.own])
            if own > device.room:
                needed = (device.static + own) * (1.0 + reserve)
                raise too_low_limit(number, device.limit, needed)
            arcs.extend(_arcs_of_chain(chain, lanes, device.room))
    return joined_arcs(*arcs)


def _chain(stages: list[StageLanes]) -> _Chain:
    """Return the chain of stages in ascending order."""
    chain = _Chain([], [], [], [], [])
    held = 0.0
    for stage in stages:
        chain.lane.append(stage.forward)
        chain.weight.append(-1)
        chain.own.append(held + stage.input_bytes + stage.forward_workspace)
        held += stage.input_bytes
        chain.low.append(held)
        chain.freed.append(0.0)
    for stage in reversed(stages):
        chain.lane.append(stage.backward)
        chain.weight.append(stage.weight)
        whole = held + stage.recomputed_bytes
        recompute = whole + (stage.forward_workspace if stage.recompute >= 0 else 0.0)
        backward = whole + stage.more_bytes + stage.backward_workspace
        held = whole + stage.more_bytes - stage.released
        weight = held + (stage.backward_workspace if stage.weight >= 0 else 0.0)
        chain.own.append(max(recompute, backward, weight))
        held -= stage.weight_released
        chain.low.append(max(0.0, held))
        chain.freed.append(stage.weight_released)
    return chain


def _arcs_of_chain(chain: _Chain, lanes: LaneGraph, room: float) -> list[Arcs]:
    """Return the arcs to each step that takes bytes, from the steps that release them."""
    arcs = []
    n_steps = len(chain.lane)
    for step in range(n_steps):
        before = chain.low[step - 1] if step else 0.0
        if chain.low[step] + chain.freed[step] <= before:  # takes no bytes that stay
            continue
        lowest, last = math.inf, -1.0
        for later in range(step, n_steps):
            if later > step and lowest > 0.0:
                following = min(lowest, chain.low[later])
                if following < lowest or later == n_steps - 1:  # else the next step is as good
                    arcs.append(_arcs(chain, lanes, room, step, chain.lane[later], lowest))
            if chain.weight[later] >= 0:
                last = min([lowest, *(low + chain.freed[later] for low in chain.low[later:])])
                if last > 0.0:
                    arcs.append(_arcs(chain, lanes, room, step, chain.weight[later], last))
            lowest = min(lowest, chain.low[later])
    return arcs


def _arcs(
    chain: _Chain, lanes: LaneGraph, room: float, step: int, release: int, low: float
) -> Arcs:
    """Return the arcs from the lane ``release`` to a step; ``low`` as the module says."""
    cap = math.floor(min((room - chain.own[step]) / low + BYTES_ROUNDING, 2.0**60))
    first, end = (int(x) for x in lanes.first[chain.lane[step] : chain.lane[step] + 2])
    n = max(0, end - first - cap - 1)
    tail = lanes.first[release] + np.arange(n)
    return Arcs(tail, np.arange(end - n, end), np.zeros(n))

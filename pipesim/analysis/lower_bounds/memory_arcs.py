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
- a bidirectional pipeline, or stages that are no chain: other chains are held to hold nothing;
- recompute of some micro-batches: all are held to be recomputed, which holds less;
- gradients that wait for a reduction, and stashed versions of weights beyond one: not counted.

Stages whose lanes differ in their number of tasks, such as B of some micro-batches and I and W of
others, get no arcs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.lanes import Arcs, Floats, LaneGraph, joined_arcs
from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.scheduling.placement import chains_of, reached_stages
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
    # For each replica, its stages in ascending order. Stages that are no chain are several chains:
    # a stage does not wait for another that no edges lead from.
    chains: list[list[StageLanes]]
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
    reach = reached_stages(graph.edges, graph.n_stages)
    devices = []
    for device in range(graph.n_devices):
        limit = math.inf if limits is None else float(limits[device])
        room = limit / (1.0 + reserve) - float(held[device]) + BYTES_ROUNDING * limit
        chains, complete = [], True
        for replica in range(graph.n_replicas):
            numbers = np.flatnonzero(graph.homes[replica] == device).tolist()
            if any((replica, stage) not in stages for stage in numbers):
                complete = False
                continue
            for chain in chains_of(numbers, reach):
                chains.append([stages[replica, stage] for stage in chain])
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


class ChainStep(NamedTuple):
    """A step of a micro-batch on its device and replica: F of all stages, then their B or I."""

    lane: int
    weight: int  # lane of W of an I, -1 for other steps
    own: float  # least bytes during the step that its micro-batch needs
    low: float  # that a micro-batch holds after the step, when each possible W has run
    freed: float  # by W


def memory_arcs(devices: Sequence[DeviceStages], lanes: LaneGraph, reserve: float) -> Arcs:
    """Return the arcs of the memory limits of devices; ``reserve`` is `Costs.memory_reserve`."""
    none = np.empty(0, dtype=np.int64)
    arcs = [Arcs(none, none, np.empty(0))]
    for number, device in enumerate(devices):
        for stages in device.chains:
            chain = _chain(stages)
            own = max([0.0, *(step.own for step in chain)])
            if own > device.room:
                needed = (device.static + own) * (1.0 + reserve)
                raise too_low_limit(number, device.limit, needed)
            arcs.extend(_arcs_of_chain(chain, lanes, device.room))
    return joined_arcs(*arcs)


def _chain(stages: list[StageLanes]) -> list[ChainStep]:
    """Return the steps of stages in ascending order."""
    chain: list[ChainStep] = []
    held = 0.0
    for stage in stages:
        own = held + stage.input_bytes + stage.forward_workspace
        held += stage.input_bytes
        chain.append(ChainStep(stage.forward, -1, own, held, 0.0))
    for stage in reversed(stages):
        whole, freed = held + stage.recomputed_bytes, stage.weight_released
        recompute = whole + (stage.forward_workspace if stage.recompute >= 0 else 0.0)
        backward = whole + stage.more_bytes + stage.backward_workspace
        held = whole + stage.more_bytes - stage.released
        weight = held + (stage.backward_workspace if stage.weight >= 0 else 0.0)
        own, held = max(recompute, backward, weight), held - freed
        chain.append(ChainStep(stage.backward, stage.weight, own, max(0.0, held), freed))
    return chain


def releases(chain: Sequence[ChainStep], step: int) -> Iterator[tuple[int, float, bool]]:
    """Yield lanes of which a task must have ended before a step, and ``low`` of each.

    The third value is whether the arc from a later lane contains the one from this.
    """
    lowest = math.inf
    for later in range(step, len(chain)):
        lane, weight, _, low, freed = chain[later]
        if later > step and lowest > 0.0:
            yield lane, lowest, low >= lowest and later < len(chain) - 1
        last = min([lowest, *(x.low + freed for x in chain[later:])])
        if weight >= 0 and last > 0.0:
            yield weight, last, False
        lowest = min(lowest, low)


def _arcs_of_chain(chain: list[ChainStep], lanes: LaneGraph, room: float) -> list[Arcs]:
    """Return the arcs to each step that takes bytes, from the steps that release them."""
    arcs, before = [], 0.0
    for number, step in enumerate(chain):
        if step.low + step.freed > before:  # takes bytes that stay
            rows = releases(chain, number)
            arcs += [_arcs(step, lanes, room, x, low) for x, low, implied in rows if not implied]
        before = step.low
    return arcs


def _arcs(step: ChainStep, lanes: LaneGraph, room: float, release: int, low: float) -> Arcs:
    """Return the arcs from the lane ``release`` to a step; ``low`` as the module says."""
    cap = math.floor(min((room - step.own) / low + BYTES_ROUNDING, 2.0**60))
    first, end = (int(x) for x in lanes.first[step.lane : step.lane + 2])
    n = max(0, end - first - cap - 1)
    tail = lanes.first[release] + np.arange(n)
    return Arcs(tail, np.arange(end - n, end), np.zeros(n))

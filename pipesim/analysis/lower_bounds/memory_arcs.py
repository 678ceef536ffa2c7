"""Arcs that a memory limit adds: which starts need which earlier releases, in every order.

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
from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.lanes import Arcs, Floats, LaneGraph, joined_arcs
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.task_bytes import kind_bytes, static_parts, weight_versions, workspaces
from pipesim.utils.units import format_bytes

__all__ = ["memory_arcs"]

#: Relative error of sums of bytes.
_ROUNDING = 1e-9


class _Stage(NamedTuple):
    """Lanes and bytes of one stage of a device; lanes are -1 if they do not exist.

    ``backward`` is the lane of B or I. ``needed`` are bytes of F, of B or I, and of W beyond what
    the device holds before them. ``after_forward`` and ``after_backward`` are changes of the bytes
    held, ``after_weight`` is what W releases.
    """

    forward: int
    backward: int
    weight: int
    needed: tuple[float, float, float]
    after_forward: float
    after_backward: float
    after_weight: float


class _Chain(NamedTuple):
    """F of all stages of a device and replica, then their B or I, in the order of a micro-batch.

    Attributes
    ----------
    lane
        Lane of each step.
    weight
        Lane of W of each I, -1 for other steps.
    own
        Least bytes during each step that its micro-batch needs.
    low
        Least bytes that a micro-batch holds after each step, when each possible W has run.
    freed
        Bytes that W of each step releases.
    """

    lane: list[int]
    weight: list[int]
    own: list[float]
    low: list[float]
    freed: list[float]


def memory_arcs(graph: TaskGraph, lanes: LaneGraph, costs: Costs, limits: Floats) -> Arcs:
    """Return the arcs of memory limits.

    Parameters
    ----------
    graph, lanes, costs
        Tasks, their lanes, and the bytes of stages.
    limits
        Bytes that each device may hold, as `pipesim.simulate` takes them; shape ``(n_devices,)``.

    Raises
    ------
    ArgumentError
        For a limit that is less than one micro-batch needs, naming device and bytes.
    """
    none = np.empty(0, dtype=np.int64)
    arcs = [Arcs(none, none, np.empty(0))]
    stages, held = _stages(graph, lanes, costs), _static(graph, costs)
    for device in range(graph.n_devices):
        limit = float(limits[device])
        room = limit / (1.0 + costs.memory_reserve) - held[device]
        room += _ROUNDING * limit
        for chain in _chains(graph, stages, device):
            needed = held[device] + max([0.0, *chain.own])
            _check_room(device, limit, needed * (1.0 + costs.memory_reserve), room, chain)
            arcs.extend(_arcs_of_chain(chain, lanes, room))
    return joined_arcs(*arcs)


def _static(graph: TaskGraph, costs: Costs) -> Floats:
    """Return bytes that each device holds throughout in any order; shape ``(n_devices,)``."""
    parts = static_parts(graph, costs)
    if graph.weight_versions == "stashed":  # their number depends on the order
        stage_bytes = costs.per_stage("parameter_bytes", graph.n_stages)
        spare = (weight_versions(graph) - 1) * stage_bytes
        parameters = parts.parameters.copy()
        np.subtract.at(parameters, graph.homes.ravel(), spare.ravel())
        parts = parts._replace(parameters=parameters)
    return parts.parameters + parts.gradients + parts.optimizer


def _stages(graph: TaskGraph, lanes: LaneGraph, costs: Costs) -> dict[tuple[int, int], _Stage]:
    """Return lanes and bytes of each replica and stage, where all lanes have as many tasks."""
    kinds, count = graph.kinds, np.diff(lanes.first)
    allocated, kept, released = kind_bytes(graph, costs)
    workspace = workspaces(graph, costs)
    kind_of: dict[tuple[int, int, int], int] = {}
    for kind, key in enumerate(
        zip(kinds.replica.tolist(), kinds.stage.tolist(), kinds.op.tolist(), strict=True)
    ):
        kind_of.setdefault(key, kind)
    stages = {}
    for replica, stage, op in kind_of:
        f, r, b, i, w = (
            kind_of.get((replica, stage, op), -1) for op in (Op.F, Op.R, Op.B, Op.I, Op.W)
        )
        back = b if i < 0 else i
        own = [int(lanes.lane_of_kind[kind]) for kind in (f, back, w) if kind >= 0]
        mixed = (b >= 0 and i >= 0) or len(set(count[own].tolist())) > 1
        if op != Op.F or back < 0 or mixed or (i >= 0) != (w >= 0):
            continue
        rest = float(allocated[r]) if r >= 0 else 0.0
        held = float(kept[f] if r >= 0 else allocated[f])
        more = float(allocated[back])
        stages[replica, stage] = _Stage(
            own[0],
            own[1],
            own[2] if w >= 0 else -1,
            (
                held + float(workspace[f]),
                rest + max(float(workspace[r]) if r >= 0 else 0.0, more + float(workspace[back])),
                float(workspace[w]) if w >= 0 else 0.0,
            ),
            held,
            rest + more - float(released[back]),
            float(released[w]) if w >= 0 else 0.0,
        )
    return stages


def _chains(graph: TaskGraph, stages: dict[tuple[int, int], _Stage], device: int) -> list[_Chain]:
    """Return the chain of each replica on a device; none for replicas with a stage left out."""
    chains = []
    for replica in range(graph.n_replicas):
        numbers = np.flatnonzero(graph.homes[replica] == device).tolist()
        own = [stages.get((replica, stage)) for stage in numbers]
        whole = [stage for stage in own if stage is not None]
        if whole and len(whole) == len(own):
            chains.append(_chain(whole))
    return chains


def _chain(stages: list[_Stage]) -> _Chain:
    """Return the chain of stages in ascending order."""
    chain = _Chain([], [], [], [], [])
    held = 0.0
    for stage in stages:
        chain.lane.append(stage.forward)
        chain.weight.append(-1)
        chain.own.append(held + stage.needed[0])
        held += stage.after_forward
        chain.low.append(held)
        chain.freed.append(0.0)
    for stage in reversed(stages):
        chain.lane.append(stage.backward)
        chain.weight.append(stage.weight)
        in_backward = held + stage.needed[1]
        held += stage.after_backward
        in_weight = held + stage.needed[2] if stage.weight >= 0 else 0.0
        chain.own.append(max(in_backward, in_weight))
        held -= stage.after_weight
        chain.low.append(max(0.0, held))
        chain.freed.append(stage.after_weight)
    return chain


def _check_room(device: int, limit: float, needed: float, room: float, chain: _Chain) -> None:
    """Raise `ArgumentError` if a device has no room for one micro-batch."""
    if max([0.0, *chain.own]) <= room:
        return
    raise ArgumentError(
        f"memory_limit of device {device} is {format_bytes(limit)} ({limit:.10g} bytes), but its "
        f"parameters, gradients and optimizer state with one micro-batch need "
        f"{format_bytes(needed)} there, the allocator's reserve included; give at least "
        f"{math.nextafter(needed, math.inf):.10g} bytes"
    )


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
    cap = math.floor(min((room - chain.own[step]) / low + _ROUNDING, 2.0**60))
    first, end = (int(x) for x in lanes.first[chain.lane[step] : chain.lane[step] + 2])
    n = max(0, end - first - cap - 1)
    tail = lanes.first[release] + np.arange(n)
    return Arcs(tail, np.arange(end - n, end), np.zeros(n))

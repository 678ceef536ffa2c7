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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.lanes import Arcs, LaneGraph, joined_arcs
from pipesim.analysis.lower_bounds.stage_lanes import BYTES_ROUNDING, DeviceStages, StageLanes
from pipesim.timeline.memory_limit import too_low_limit


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


def memory_arcs(devices: Sequence[DeviceStages], lanes: LaneGraph, reserve: float) -> Arcs:
    """Return the arcs of the memory limits of devices; ``reserve`` is `Costs.memory_reserve`."""
    none = np.empty(0, dtype=np.int64)
    arcs = [Arcs(none, none, np.empty(0))]
    for number, device in enumerate(devices):
        for stages in device.chains:
            chain = _chain(stages)
            _check_room(number, device, max([0.0, *chain.own]), reserve)
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


def _check_room(number: int, device: DeviceStages, own: float, reserve: float) -> None:
    """Raise `ArgumentError` if a device has no room for the ``own`` bytes of a micro-batch."""
    if own <= device.room:
        return
    needed = (device.static + own) * (1.0 + reserve)
    raise too_low_limit(number, device.limit, needed)


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

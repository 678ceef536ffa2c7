"""Choose the lanes of each device whose orders are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import N_LANES, DeviceLanes
from pipesim.analysis.lower_bounds.lanes import LaneGraph
from pipesim.analysis.lower_bounds.longest_paths import Places
from pipesim.analysis.lower_bounds.stage_lanes import BYTES_ROUNDING, DeviceStages, StageLanes
from pipesim.utils.csr import Ints

__all__ = ["device_lanes"]


class _Row(NamedTuple):
    """A lane: the lane before it, bytes that it needs, and bytes that it holds more at its end."""

    lane: int
    before: int
    needed: float
    change: float


def device_lanes(lanes: LaneGraph, places: Places, devices: Sequence[DeviceStages]) -> DeviceLanes:
    """Return the lanes of each device whose orders are counted; none where four do not suffice.

    Lanes of W are left out if there are too many, and then those of R. What they hold is then
    taken to be as little as it can be.
    """
    shape = (len(devices), N_LANES)
    first, n_tasks = np.zeros((2, *shape), dtype=np.int64)
    before, spread = np.full(shape, -1), np.full(shape, 2**60)
    seconds, needed, change = np.zeros((3, *shape))
    place: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for d, device in enumerate(devices):
        rows = _rows(device, np.diff(lanes.first))
        index = {row.lane: k for k, row in enumerate(rows)}
        spread[d, : len(rows)] = _spread(rows, device)
        for k, row in enumerate(rows):
            own = places.number[lanes.first[row.lane] : lanes.first[row.lane + 1]]
            first[d, k], n_tasks[d, k] = sum(map(len, place)), len(own)
            place.append(own)
            seconds[d, k] = lanes.seconds[row.lane]
            before[d, k] = index.get(row.before, -1)
            needed[d, k], change[d, k] = row.needed, row.change
    room = np.array([device.room for device in devices])
    return DeviceLanes(
        first, n_tasks, seconds, before, needed, change, spread, room, np.concatenate(place)
    )


def _spread(rows: Sequence[_Row], device: DeviceStages) -> list[int]:
    """Return the largest number of tasks that lane 0 can be ahead of each lane.

    A micro-batch that has passed lane 0, and not the lane, holds at least ``low`` bytes.
    """
    spreads = []
    held = low = 0.0
    first_chain = {lane for stage in device.chains[0] for lane in stage[:4]} if rows else set()
    for k, row in enumerate(rows):
        if k == 0 or row.lane not in first_chain or low <= 0.0:
            spreads.append(2**60)
        else:
            whole = (device.room - rows[0].needed) / low + 1.0
            spreads.append(int(min(2.0**60, whole + BYTES_ROUNDING)))
        held += row.change
        low = held if k == 0 else min(low, held)
    return spreads


def _rows(device: DeviceStages, count: Ints) -> list[_Row]:
    """Return up to `N_LANES` rows of a device; none if there are more without W and R.

    Lanes of R are left out too if only some micro-batches are recomputed.
    """
    if not device.complete:
        return []
    stages = [stage for chain in device.chains for stage in chain]
    every = all(s.recompute < 0 or count[s.recompute] == count[s.forward] for s in stages)
    for with_weights, with_recompute in ((True, every), (False, every), (False, False)):
        rows = [
            row
            for chain in device.chains
            for row in _rows_of_chain(chain, with_weights, with_recompute)
        ]
        if len(rows) <= N_LANES:
            return rows
    return []


def _rows_of_chain(
    stages: Sequence[StageLanes], with_weights: bool, with_recompute: bool
) -> list[_Row]:
    """Return F of all stages, then R, B or I, and W of each from the last stage on."""
    rows = []
    before = -1
    for s in stages:
        rows.append(_Row(s.forward, before, s.input_bytes + s.forward_workspace, s.input_bytes))
        before = s.forward
    for s in reversed(stages):
        rest, workspace = s.recomputed_bytes, s.backward_workspace
        if s.recompute >= 0 and with_recompute:
            rows.append(_Row(s.recompute, s.forward, rest + s.forward_workspace, rest))
            before, rest = s.recompute, 0.0
        change = rest + s.more_bytes - s.released
        if s.weight >= 0 and not with_weights:
            change -= s.weight_released
        rows.append(_Row(s.backward, before, rest + s.more_bytes + workspace, change))
        before = s.backward
        if s.weight >= 0 and with_weights:
            rows.append(_Row(s.weight, s.backward, workspace, -s.weight_released))
    return rows

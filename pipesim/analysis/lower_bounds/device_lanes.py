"""Choose the lanes of each device whose orders are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import MOST_STATES, DeviceLanes
from pipesim.analysis.lower_bounds.lanes import LaneGraph
from pipesim.analysis.lower_bounds.longest_paths import Places
from pipesim.analysis.lower_bounds.stage_lanes import BYTES_ROUNDING, DeviceStages, StageLanes
from pipesim.utils.csr import Ints

#: Lanes of a device whose orders are counted.
MOST_LANES = 6


class _Lane(NamedTuple):
    """A lane: the lane before it, bytes that it needs, and bytes that it holds more at its end."""

    lane: int
    before: int
    needed: float
    change: float


def device_lanes(lanes: LaneGraph, places: Places, devices: Sequence[DeviceStages]) -> DeviceLanes:
    """Return the lanes of each device whose orders are counted; none where six do not suffice.

    Lanes of W are left out if there are too many, and then those of R. What they hold is then
    taken to be as little as it can be. A device with lanes of W has a second row without them.
    """
    count = np.diff(lanes.first)
    rows = [(d, own) for d, device in enumerate(devices) for own in _choices(device, count)]
    shape = (len(rows), max([1, *(len(own) for _, own in rows)]))
    first, n_tasks = np.zeros((2, *shape), dtype=np.int64)
    before, spread = np.full(shape, -1), np.full(shape, 2**60)
    seconds, needed, change = np.zeros((3, *shape))
    place: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for r, (d, own) in enumerate(rows):
        index = {lane.lane: k for k, lane in enumerate(own)}
        spread[r, : len(own)] = _spread(own, devices[d])
        for k, lane in enumerate(own):
            first[r, k], n_tasks[r, k] = sum(map(len, place)), count[lane.lane]
            place.append(places.number[lanes.first[lane.lane] : lanes.first[lane.lane + 1]])
            seconds[r, k] = lanes.seconds[lane.lane]
            before[r, k] = index.get(lane.before, -1)
            needed[r, k], change[r, k] = lane.needed, lane.change
    device = np.array([d for d, _ in rows], dtype=np.int64)
    room = np.array([devices[d].room for d, _ in rows])
    return DeviceLanes(
        first, n_tasks, seconds, before, needed, change, spread, room, device, np.concatenate(place)
    )


def _spread(rows: Sequence[_Lane], device: DeviceStages) -> list[int]:
    """Return the largest number of tasks that lane 0 can be ahead of each lane.

    A micro-batch that has passed lane 0, and not the lane, holds at least ``low`` bytes. It may
    have passed all lanes before, and, as no lane waits for W, those after W.
    """
    first_chain = {lane for stage in device.chains[0] for lane in stage[:4]} if rows else set()
    waited_for = {row.before for row in rows}
    held = np.cumsum([row.change for row in rows])
    spreads = [2**60] * len(rows)
    for k, row in enumerate(rows[1:], start=1):
        low = held[:k].min()
        if row.lane not in waited_for:
            low = min(low, (held[k:] - row.change).min())
        if row.lane in first_chain and low > 0.0:
            whole = (device.room - rows[0].needed) / low + 1.0
            spreads[k] = int(min(2.0**60, whole + BYTES_ROUNDING))
    return spreads


def _choices(device: DeviceStages, count: Ints) -> list[list[_Lane]]:
    """Return choices of up to `MOST_LANES` lanes of a device, with most lanes first.

    Lanes of R are left out too if only some micro-batches are recomputed.
    """
    stages = [stage for chain in device.chains for stage in chain]
    if not device.complete or any(count[stage.forward] > MOST_STATES for stage in stages):
        return []
    every = all(s.recompute < 0 or count[s.recompute] == count[s.forward] for s in stages)
    choices: list[list[_Lane]] = []
    for with_weights, with_recompute in ((True, every), (False, every), (False, False)):
        chains = [_rows_of_chain(chain, with_weights, with_recompute) for chain in device.chains]
        own = [lane for chain in chains for lane in chain]
        if len(own) <= MOST_LANES and all(len(own) < len(more) for more in choices):
            choices.append(own)
    return choices


def _rows_of_chain(
    stages: Sequence[StageLanes], with_weights: bool, with_recompute: bool
) -> list[_Lane]:
    """Return F of all stages, then R, B or I, and W of each from the last stage on."""
    rows = []
    before = -1
    for s in stages:
        rows.append(_Lane(s.forward, before, s.input_bytes + s.forward_workspace, s.input_bytes))
        before = s.forward
    for s in reversed(stages):
        rest, workspace = s.recomputed_bytes, s.backward_workspace
        if s.recompute >= 0 and with_recompute:
            rows.append(_Lane(s.recompute, s.forward, rest + s.forward_workspace, rest))
            before, rest = s.recompute, 0.0
        change = rest + s.more_bytes - s.released
        if s.weight >= 0 and not with_weights:
            change -= s.weight_released
        rows.append(_Lane(s.backward, before, rest + s.more_bytes + workspace, change))
        before = s.backward
        if s.weight >= 0 and with_weights:
            rows.append(_Lane(s.weight, s.backward, workspace, -s.weight_released))
    return rows

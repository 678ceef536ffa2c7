"""Count all orders of a few lanes of each device, which gives exact windows of their tasks.

All orders of a few lanes of a compute stream are counted at once. A *state* is the number of
tasks of each lane that have ended. From a state, the next task of a lane may run if it keeps its
window (earliest start, latest end), its predecessor on the device has ended, and there is room for
its bytes: the bytes held follow from the state. The earliest time of each state, and the latest
time from which all other tasks still keep their windows, give the exact windows of each task, for
this device alone.

Other lanes of the stream are left out: they only take more time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.lanes import Floats, LaneGraph, Places
from pipesim.analysis.lower_bounds.memory_arcs import BYTES_ROUNDING, DeviceStages, StageLanes
from pipesim.utils.csr import Ints

#: States of a row that are reached in time, up to which its orders are counted.
MOST_STATES = 2**18
#: Indices of a row that fit into an integer.
MOST_INDICES = 2.0**59


class DeviceLanes(NamedTuple):
    """Lanes of devices. A row is a choice of lanes of one device, without tasks where it has fewer.

    Rows of one device follow each other, those with more lanes first: the first one counts whose
    states are few enough. Lane ``k`` of row ``r`` has the places ``place[i:i + n_tasks[r, k]]``,
    ``i`` being ``first[r, k]``.
    """

    first: Ints  # like the next six, of shape ``(n_rows, n_lanes)``
    n_tasks: Ints
    seconds: Floats  # of a task
    before: Ints  # lane of the row of which the task of the same place must have ended, or -1
    needed: Floats  # bytes that a task needs while it runs, beyond those held
    change: Floats  # bytes that are held more at its end than before
    spread: Ints  # most tasks that lane 0 can be ahead of a lane in the room of the device
    room: Floats  # bytes that the device of each row may hold
    device: Ints
    place: Ints  # places of the lanes, one lane after the other


class StateSpace(NamedTuple):
    """Room for the states of one row, and windows that are being computed.

    For each number of tasks of lane 0, states have ``low[k]`` to ``high[k]`` tasks of lane k. So
    each state has an index. States that are reached in time are numbered by their tasks in all.
    Lanes k < l are pair ``l (l - 1) / 2 + k``.
    """

    low: Ints  # shape ``(n_lanes, most tasks of a lane + 1)``
    high: Ints
    stride: Ints  # distance of the indices of states that differ by one task of each lane
    number: Ints  # hash table of the numbers of states, see `slot_of`; -1 where it is empty
    # By number of the state.
    state_index: Ints
    done: Ints  # number of tasks of each lane; shape ``(n_states, n_lanes)``
    next_state: Ints  # number of the state after the next task of each lane, or -1
    earliest: Floats  # (s)
    latest: Floats
    # Earliest start and latest end of each place (s), over all orders.
    start: Floats
    end: Floats
    # Number of tasks of lane l before each task of lane k, for pairs k < l: orders with others are
    # left out; shape ``(n_rows, n_pairs, most tasks of a lane)``.
    least: Ints
    most: Ints
    fewest: Ints  # in the orders that are left
    greatest: Ints
    # Of each row: whether its states are few enough, and the number of indices that were too many.
    is_counted: NDArray[np.bool_]
    too_many: Floats


def new_states(lanes: DeviceLanes) -> StateSpace:
    """Return room for the states of any row, up to `MOST_STATES`."""
    n_rows, n_lanes = lanes.n_tasks.shape
    most = int(lanes.n_tasks.max(initial=0))
    products = np.prod(lanes.n_tasks + 1.0, axis=1)
    n_states = int(min(products.max(initial=1.0), MOST_STATES))
    n_slots = 2 ** (2 * n_states - 1).bit_length()
    n_states += n_lanes + 1  # one more than there may be, and what its last step adds
    low, high = np.zeros((2, n_lanes, most + 1), dtype=np.int64)
    earliest, latest = np.empty((2, n_states))
    start, end = np.empty((2, len(lanes.place)))
    least = np.zeros((n_rows, n_lanes * (n_lanes - 1) // 2, most), dtype=np.int32)
    return StateSpace(
        low=low,
        high=high,
        stride=np.ones(n_lanes, dtype=np.int64),
        number=np.full(n_slots, -1, dtype=np.int32),
        state_index=np.empty(n_states, dtype=np.int64),
        done=np.zeros((n_states, n_lanes), dtype=np.int32),
        next_state=np.empty((n_states, n_lanes), dtype=np.int32),
        earliest=earliest,
        latest=latest,
        start=start,
        end=end,
        least=least,
        most=np.full_like(least, most),
        fewest=np.zeros_like(least),
        greatest=np.zeros_like(least),
        is_counted=np.zeros(n_rows, dtype=bool),
        too_many=np.full(n_rows, 2.0 * MOST_INDICES),
    )


# Choice of the lanes.

#: Lanes of a device whose orders are counted.
MOST_LANES = 6


class _CountedLane(NamedTuple):
    """A lane, as in `DeviceLanes`."""

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
    rows = [
        (d, own) for d, device in enumerate(devices) for own in _choices_of_lanes(device, count)
    ]
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


def _spread(rows: Sequence[_CountedLane], device: DeviceStages) -> list[int]:
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


def _choices_of_lanes(device: DeviceStages, count: Ints) -> list[list[_CountedLane]]:
    """Return choices of up to `MOST_LANES` lanes of a device, with most lanes first.

    Lanes of R are left out too if only some micro-batches are recomputed.
    """
    stages = [stage for chain in device.chains for stage in chain]
    if not device.complete or any(count[stage.forward] > MOST_STATES for stage in stages):
        return []
    every = all(s.recompute < 0 or count[s.recompute] == count[s.forward] for s in stages)
    choices: list[list[_CountedLane]] = []
    for with_weights, with_recompute in ((True, every), (False, every), (False, False)):
        chains = [_rows_of_chain(chain, with_weights, with_recompute) for chain in device.chains]
        own = [lane for chain in chains for lane in chain]
        if len(own) <= MOST_LANES and all(len(own) < len(more) for more in choices):
            choices.append(own)
    return choices


def _rows_of_chain(
    stages: Sequence[StageLanes], with_weights: bool, with_recompute: bool
) -> list[_CountedLane]:
    """Return F of all stages, then R, B or I, and W of each from the last stage on."""
    rows = []
    before = -1
    for s in stages:
        rows.append(
            _CountedLane(s.forward, before, s.input_bytes + s.forward_workspace, s.input_bytes)
        )
        before = s.forward
    for s in reversed(stages):
        rest, workspace = s.recomputed_bytes, s.backward_workspace
        if s.recompute >= 0 and with_recompute:
            rows.append(_CountedLane(s.recompute, s.forward, rest + s.forward_workspace, rest))
            before, rest = s.recompute, 0.0
        change = rest + s.more_bytes - s.released
        if s.weight >= 0 and not with_weights:
            change -= s.weight_released
        rows.append(_CountedLane(s.backward, before, rest + s.more_bytes + workspace, change))
        before = s.backward
        if s.weight >= 0 and with_weights:
            rows.append(_CountedLane(s.weight, s.backward, workspace, -s.weight_released))
    return rows


# Times of the states of one row of lanes: helpers of the kernel in `horizon`.


def set_ranges(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, due: Floats, slack: float
) -> float:
    """Set the range of each lane for each number of tasks of lane 0; return the number of indices.

    A task that cannot start before the last of lane 0 ends has ended before. A task that cannot
    run before the next of lane 0 has not started.
    """
    n, n_lanes = lanes.n_tasks[row, 0], len(space.stride)
    for lane in range(1, n_lanes):
        count, first = lanes.n_tasks[row, lane], lanes.first[row, lane]
        both = lanes.seconds[row, lane] + lanes.seconds[row, 0]
        before, pair = lanes.before[row, lane], lane * (lane - 1) // 2
        low, high, width = 0, 0, 1
        for k in range(n + 1):
            low = max(low, min(count, k - lanes.spread[row, lane]))
            if k > 0:
                task = lanes.place[lanes.first[row, 0] + k - 1]
                low = max(low, space.least[row, pair, k - 1])
                while low < count and head[task] + both > due[lanes.place[first + low]] + slack:
                    low += 1
            high = max(high, low)
            most = count
            if k == n:
                high = count
            else:
                task = lanes.place[lanes.first[row, 0] + k]
                most = min(most, space.most[row, pair, k])
                while high < count and head[lanes.place[first + high]] + both <= due[task] + slack:
                    high += 1
            if before == 0:
                most = min(most, k)
            elif before > 0:
                most = min(most, space.high[before, k])
            space.low[lane, k], space.high[lane, k] = low, min(most, high)
            width = max(width, min(most, high) - low + 1)
        space.stride[lane] = width
    n_indices, product = 1, n + 1.0
    for lane in range(n_lanes - 1, 0, -1):
        width = space.stride[lane]
        space.stride[lane] = n_indices
        product *= width
        if product <= MOST_INDICES:
            n_indices *= width
    space.stride[0] = n_indices
    return float(product)


def following_index(
    lanes: DeviceLanes, space: StateSpace, row: int, state: int, lane: int, held: float
) -> int:
    """Return the index of the state after the next task of a lane, or -1 if it may not run.

    ``held`` are the bytes that the device holds in the state.
    """
    done, low, high = space.done, space.low, space.high
    own, a, before = done[state, lane], done[state, 0], lanes.before[row, lane]
    if own >= lanes.n_tasks[row, lane] or (before >= 0 and done[state, before] <= own):
        return -1
    if held + lanes.needed[row, lane] > lanes.room[row] or (lane > 0 and own >= high[lane, a]):
        return -1
    following = space.state_index[state] + space.stride[lane]
    for other in range(lane + 1, len(space.stride)):
        pair, count = other * (other - 1) // 2 + lane, done[state, other]
        if count < space.least[row, pair, own] or count > space.most[row, pair, own]:
            return -1
        if lane == 0:
            if count < low[other, a + 1] or count > high[other, a + 1]:
                return -1
            following += (low[other, a] - low[other, a + 1]) * space.stride[other]
    return int(following)


def slot_of(space: StateSpace, index: int) -> int:
    """Return the slot of a state in the hash table, or an empty one for it."""
    n_slots = len(space.number)  # a power of two
    slot = (index + 7919 * (index // n_slots)) & (n_slots - 1)
    while space.number[slot] >= 0 and space.state_index[space.number[slot]] != index:
        slot = (slot + 1) & (n_slots - 1)
    return int(slot)


def fill_earliest(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, due: Floats, slack: float
) -> int:
    """Number the states that are reached in time, with their earliest times.

    Return their number, or -1 if there is no room for them.
    """
    earliest, done, n_lanes = space.earliest, space.done, len(space.stride)
    earliest[0], space.state_index[0], space.number[0] = 0.0, 0, 0
    for lane in range(n_lanes):
        done[0, lane] = 0
    state, n_states = 0, 1
    most = len(space.state_index) - n_lanes - 1
    while state < n_states <= most:
        held = 0.0
        for lane in range(n_lanes):
            held += done[state, lane] * lanes.change[row, lane]
        for lane in range(n_lanes):
            space.next_state[state, lane] = -1
            index = following_index(lanes, space, row, state, lane, held)
            if index < 0:
                continue
            task = lanes.place[lanes.first[row, lane] + done[state, lane]]
            end = max(earliest[state], head[task]) + lanes.seconds[row, lane]
            if end > due[task] + slack:
                continue
            slot = slot_of(space, index)
            following = space.number[slot]
            if following < 0:
                following = n_states
                n_states += 1
                space.number[slot], space.state_index[following] = following, index
                earliest[following] = end
                for other in range(n_lanes):
                    done[following, other] = done[state, other]
                done[following, lane] += 1
            earliest[following] = min(earliest[following], end)
            space.next_state[state, lane] = following
        state += 1
    for k in range(n_states - 1, -1, -1):  # the last one first: those before keep their slots
        space.number[slot_of(space, space.state_index[k])] = -1
    return n_states if n_states <= most else -1


def fill_latest(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, due: Floats, slack: float,
    n_states: int,
) -> None:  # fmt: skip
    """Fill the latest time of each state from which the rest keeps its windows; set windows.

    ``latest`` is minus infinity for states from which the rest is too late. ``space.start`` and
    ``space.end`` get the windows over all orders that are in time.
    """
    latest, done, n_lanes = space.latest, space.done, len(space.stride)
    for lane in range(n_lanes):
        first, count = lanes.first[row, lane], lanes.n_tasks[row, lane]
        for task in range(count):
            space.start[first + task], space.end[first + task] = np.inf, -np.inf
            for other in range(lane + 1, n_lanes):
                entry = (row, other * (other - 1) // 2 + lane, task)
                space.fewest[entry], space.greatest[entry] = lanes.n_tasks[row, other], 0
    latest[n_states - 1] = np.inf  # all tasks have ended
    for state in range(n_states - 2, -1, -1):
        latest[state] = -np.inf
        for lane in range(n_lanes):
            following = space.next_state[state, lane]
            if following < 0:
                continue
            own = lanes.first[row, lane] + done[state, lane]
            end = min(latest[following], due[lanes.place[own]])
            start = max(space.earliest[state], head[lanes.place[own]])
            if start + lanes.seconds[row, lane] <= end + slack:
                latest[state] = max(latest[state], end - lanes.seconds[row, lane])
                space.start[own] = min(space.start[own], start)
                space.end[own] = max(space.end[own], end)
                for other in range(lane + 1, n_lanes):
                    entry = (row, other * (other - 1) // 2 + lane, done[state, lane])
                    space.fewest[entry] = min(space.fewest[entry], done[state, other])
                    space.greatest[entry] = max(space.greatest[entry], done[state, other])


def keep_numbers(space: StateSpace, row: int) -> None:
    """Leave the numbers of tasks of a row in the orders that are left as they were."""
    for pair in range(space.least.shape[1]):
        for task in range(space.least.shape[2]):
            entry = (row, pair, task)
            space.fewest[entry], space.greatest[entry] = space.least[entry], space.most[entry]

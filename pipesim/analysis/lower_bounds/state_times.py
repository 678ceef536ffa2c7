"""Times of the states of one row of lanes: helpers of the kernel in `windows`."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import MOST_INDICES, DeviceLanes, StateSpace
from pipesim.analysis.lower_bounds.lanes import Floats


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

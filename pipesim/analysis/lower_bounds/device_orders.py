"""Orders of one device within a horizon: which starts and ends are possible in any of them.

All orders of up to four lanes of a compute stream are counted at once. A *state* is the number of
tasks of each lane that have ended. From a state, the next task of a lane may run if it keeps its
window (earliest start, latest end), its predecessor on the device has ended, and there is room for
its bytes: the bytes held follow from the state. The earliest time of each state, and the latest
time from which all other tasks still keep their windows, give the exact windows of each task, for
this device alone.

Other lanes of the stream are left out: they only take more time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.lanes import Floats
from pipesim.utils.csr import Ints

__all__ = ["N_LANES", "DeviceLanes", "StateSpace", "new_states"]

#: Lanes of a device whose orders are counted.
N_LANES = 4


class DeviceLanes(NamedTuple):
    """Up to four lanes of each device, without tasks where there are fewer.

    Attributes
    ----------
    first, n_tasks
        Lane ``k`` of device ``d`` has the places ``place[i:i + n_tasks[d, k]]``, ``i`` being
        ``first[d, k]``; shape ``(n_devices, 4)``, like the next six.
    seconds
        Duration of a task.
    before
        Lane, 0 to 3, of which the task of the same place must have ended; -1 for none.
    needed
        Bytes that a task needs while it runs, beyond those held.
    change
        Bytes that are held more at its end than before.
    spread
        Largest number of tasks that lane 0 can be ahead of a lane in the room of the device.
    room
        Bytes that the device may hold; shape ``(n_devices,)``.
    place
        Places of the lanes, one lane after the other.
    """

    first: Ints
    n_tasks: Ints
    seconds: Floats
    before: Ints
    needed: Floats
    change: Floats
    spread: Ints
    room: Floats
    place: Ints


class StateSpace(NamedTuple):
    """Room for the states of one device, and windows that are being computed.

    For each number of tasks of lane 0, states have ``low[k]`` to ``high[k]`` tasks of lane k.

    Attributes
    ----------
    low, high
        Shape ``(4, most tasks of a lane + 1)``.
    width
        Largest number of states along each lane; shape ``(4,)``.
    earliest, latest
        Times of states (s).
    start, end
        Earliest start and latest end of each place (s), over all orders.
    least, most
        Number of tasks of lane 1 before each task of lane 0: orders with others are left out;
        shape ``(n_devices, most tasks of a lane + 1)``.
    fewest, greatest
        The same numbers in the orders that are left.
    is_counted
        Whether the states of a device are few enough; shape ``(n_devices,)``.
    """

    low: Ints
    high: Ints
    width: Ints
    earliest: Floats
    latest: Floats
    start: Floats
    end: Floats
    least: Ints
    most: Ints
    fewest: Ints
    greatest: Ints
    is_counted: NDArray[np.bool_]


def new_states(lanes: DeviceLanes, n_states: int) -> StateSpace:
    """Return room for up to ``n_states`` states."""
    most = int(lanes.n_tasks.max(initial=0)) + 1
    low, high = np.zeros((2, N_LANES, most), dtype=np.int64)
    earliest, latest = np.empty((2, n_states))
    start, end = np.empty((2, len(lanes.place)))
    least, greatest, fewest = np.zeros((3, len(lanes.room), most), dtype=np.int64)
    return StateSpace(
        low=low,
        high=high,
        width=np.ones(N_LANES, np.int64),
        earliest=earliest,
        latest=latest,
        start=start,
        end=end,
        least=least,
        most=np.full_like(least, most),
        fewest=fewest,
        greatest=greatest,
        is_counted=np.zeros(len(lanes.room), dtype=bool),
    )


# Helpers of the kernel `pipesim.analysis.lower_bounds.windows._windows_are_left`.


def set_ranges(
    lanes: DeviceLanes, space: StateSpace, device: int, head: Floats, due: Floats, slack: float
) -> int:
    """Set the range of each lane for each number of tasks of lane 0; return the number of states.

    A task that cannot start before the last of lane 0 ends has ended before. A task that cannot
    run before the next of lane 0 has not started.
    """
    n, before = lanes.n_tasks[device, 0], lanes.before
    n_states = n + 1
    for lane in range(1, N_LANES):
        count, first = lanes.n_tasks[device, lane], lanes.first[device, lane]
        both = lanes.seconds[device, lane] + lanes.seconds[device, 0]
        low, high, width = 0, 0, 1
        for k in range(n + 1):
            low = max(low, min(count, k - lanes.spread[device, lane]))
            if k > 0:
                task = lanes.place[lanes.first[device, 0] + k - 1]
                while low < count and head[task] + both > due[lanes.place[first + low]] + slack:
                    low += 1
            high = max(high, low)
            if k == n:
                high = count
            else:
                task = lanes.place[lanes.first[device, 0] + k]
                while high < count and head[lanes.place[first + high]] + both <= due[task] + slack:
                    high += 1
            most = high
            if before[device, lane] == 0:
                most = min(most, k)
            elif before[device, lane] > 0:
                most = min(most, space.high[before[device, lane], k])
            space.low[lane, k], space.high[lane, k] = low, most
            width = max(width, most - low + 1)
        space.width[lane] = width
        n_states *= width
    return int(n_states)


def can_run(
    lanes: DeviceLanes, device: int, lane: int, done: int, before: int, held: float
) -> bool:
    """Return whether the next task of a lane may run.

    ``done`` is its number of tasks that have ended, ``before`` that of the lane before it, and
    ``held`` the bytes that the device holds.
    """
    if lanes.before[device, lane] >= 0 and before <= done:
        return False
    fits: bool = held + lanes.needed[device, lane] <= lanes.room[device]
    return fits


def held_bytes(lanes: DeviceLanes, device: int, a: int, b: int, c: int, d: int) -> float:
    """Return the bytes that a device holds in a state."""
    change = lanes.change
    return float(
        a * change[device, 0]
        + b * change[device, 1]
        + c * change[device, 2]
        + d * change[device, 3]
    )


def state_index(space: StateSpace, a: int, b: int, c: int, d: int) -> int:
    """Return the index of a state, or -1 outside the ranges."""
    low, high, width = space.low, space.high, space.width
    if b < low[1, a] or b > high[1, a] or c < low[2, a] or c > high[2, a]:
        return -1
    if d < low[3, a] or d > high[3, a]:
        return -1
    index = (a * width[1] + b - low[1, a]) * width[2] + c - low[2, a]
    return int(index * width[3] + d - low[3, a])


def count_of(lane: int, a: int, b: int, c: int, d: int) -> int:
    """Return the number of tasks of a lane in a state."""
    if lane == 0:
        return a
    if lane == 1:
        return b
    return c if lane == 2 else d


def fill_earliest(
    lanes: DeviceLanes, space: StateSpace, device: int, head: Floats, due: Floats, slack: float
) -> None:
    """Fill the earliest time of each state; infinity for states that no order reaches in time."""
    earliest, count = space.earliest, lanes.n_tasks
    for a in range(count[device, 0] + 1):
        for b in range(space.low[1, a], space.high[1, a] + 1):
            for c in range(space.low[2, a], space.high[2, a] + 1):
                index = state_index(space, a, b, c, space.low[3, a])
                for d in range(space.low[3, a], space.high[3, a] + 1):
                    now = earliest[index]
                    index += 1
                    if now == np.inf:
                        continue
                    held = held_bytes(lanes, device, a, b, c, d)
                    for lane in range(N_LANES):
                        done = count_of(lane, a, b, c, d)
                        if done >= count[device, lane]:
                            continue
                        if lane == 0 and not space.least[device, a] <= b <= space.most[device, a]:
                            continue
                        before = count_of(lanes.before[device, lane], a, b, c, d)
                        if not can_run(lanes, device, lane, done, before, held):
                            continue
                        task = lanes.place[lanes.first[device, lane] + done]
                        end = max(now, head[task]) + lanes.seconds[device, lane]
                        if end > due[task] + slack:
                            continue
                        following = state_index(
                            space,
                            a + (lane == 0),
                            b + (lane == 1),
                            c + (lane == 2),
                            d + (lane == 3),
                        )
                        if following >= 0 and end < earliest[following]:
                            earliest[following] = end


def fill_latest(
    lanes: DeviceLanes, space: StateSpace, device: int, head: Floats, due: Floats, slack: float
) -> None:
    """Fill the latest time of each state from which the rest keeps its windows; set windows.

    ``latest`` is minus infinity for states from which the rest is too late. ``space.start`` and
    ``space.end`` get the windows over all orders that are in time.
    """
    earliest, latest, count = space.earliest, space.latest, lanes.n_tasks
    n_tasks = 0
    for lane in range(N_LANES):
        first = lanes.first[device, lane]
        n_tasks += count[device, lane]
        for k in range(first, first + count[device, lane]):
            space.start[k], space.end[k] = np.inf, -np.inf
    for a in range(count[device, 0]):
        space.fewest[device, a], space.greatest[device, a] = count[device, 1], 0
    for a in range(count[device, 0], -1, -1):
        for b in range(space.high[1, a], space.low[1, a] - 1, -1):
            for c in range(space.high[2, a], space.low[2, a] - 1, -1):
                own = state_index(space, a, b, c, space.low[3, a])
                own += space.high[3, a] - space.low[3, a] + 1
                for d in range(space.high[3, a], space.low[3, a] - 1, -1):
                    own -= 1
                    now = earliest[own]
                    if now == np.inf:
                        latest[own] = -np.inf
                        continue
                    last = np.inf if a + b + c + d == n_tasks else -np.inf
                    held = held_bytes(lanes, device, a, b, c, d)
                    for lane in range(N_LANES):
                        done = count_of(lane, a, b, c, d)
                        if done >= count[device, lane]:
                            continue
                        if lane == 0 and not space.least[device, a] <= b <= space.most[device, a]:
                            continue
                        before = count_of(lanes.before[device, lane], a, b, c, d)
                        if not can_run(lanes, device, lane, done, before, held):
                            continue
                        following = state_index(
                            space,
                            a + (lane == 0),
                            b + (lane == 1),
                            c + (lane == 2),
                            d + (lane == 3),
                        )
                        if following < 0:
                            continue
                        k = lanes.first[device, lane] + done
                        task = lanes.place[k]
                        end = min(latest[following], due[task])
                        start = max(now, head[task])
                        if start + lanes.seconds[device, lane] <= end + slack:
                            last = max(last, end - lanes.seconds[device, lane])
                            space.start[k] = min(space.start[k], start)
                            space.end[k] = max(space.end[k], end)
                            if lane == 0:
                                space.fewest[device, a] = min(space.fewest[device, a], b)
                                space.greatest[device, a] = max(space.greatest[device, a], b)
                    latest[own] = last

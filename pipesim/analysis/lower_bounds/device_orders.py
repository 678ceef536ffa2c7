"""Lanes of each device whose orders are counted, and room for their states.

All orders of a few lanes of a compute stream are counted at once. A *state* is the number of
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

#: States of a row that are reached in time, up to which its orders are counted.
MOST_STATES = 2**18
#: Indices of a row that fit into an integer.
MOST_INDICES = 2.0**59


class DeviceLanes(NamedTuple):
    """Lanes of devices. A row is a choice of lanes of one device, without tasks where it has fewer.

    Attributes
    ----------
    first, n_tasks
        Lane ``k`` of row ``r`` has the places ``place[i:i + n_tasks[r, k]]``, ``i`` being
        ``first[r, k]``; shape ``(n_rows, n_lanes)``, like the next five.
    seconds
        Duration of a task.
    before
        Lane of the row of which the task of the same place must have ended; -1 for none.
    needed
        Bytes that a task needs while it runs, beyond those held.
    change
        Bytes that are held more at its end than before.
    spread
        Largest number of tasks that lane 0 can be ahead of a lane in the room of the device.
    room
        Bytes that the device may hold; shape ``(n_rows,)``.
    device
        Device of each row; shape ``(n_rows,)``. Rows of one device follow each other, those with
        more lanes first: the first one counts whose states are few enough.
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
    device: Ints
    place: Ints


class StateSpace(NamedTuple):
    """Room for the states of one row, and windows that are being computed.

    For each number of tasks of lane 0, states have ``low[k]`` to ``high[k]`` tasks of lane k. So
    each state has an index. States that are reached in time are numbered by their tasks in all.
    Lanes k < l are pair ``l (l - 1) / 2 + k``.

    Attributes
    ----------
    low, high
        Shape ``(n_lanes, most tasks of a lane + 1)``.
    stride
        Distance of the indices of states that differ by one task of a lane; shape ``(n_lanes,)``.
    number
        Hash table of the numbers of states, see `slot_of`; -1 where it is empty.
    state_index
        Index of each state, by number.
    done, next_state
        Number of tasks of each lane in a state, and number of the state after the next task of the
        lane, or -1; by number, shape ``(n_states, n_lanes)``.
    earliest, latest
        Times of states (s), by number.
    start, end
        Earliest start and latest end of each place (s), over all orders.
    least, most
        Number of tasks of lane l before each task of lane k, for pairs k < l: orders with others
        are left out; shape ``(n_rows, n_pairs, most tasks of a lane)``.
    fewest, greatest
        The same numbers in the orders that are left.
    is_counted
        Whether the states of a row are few enough; shape ``(n_rows,)``.
    too_many
        Number of indices of a row for which its states were too many; shape ``(n_rows,)``.
    """

    low: Ints
    high: Ints
    stride: Ints
    number: Ints
    state_index: Ints
    done: Ints
    next_state: Ints
    earliest: Floats
    latest: Floats
    start: Floats
    end: Floats
    least: Ints
    most: Ints
    fewest: Ints
    greatest: Ints
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

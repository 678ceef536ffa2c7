"""Destructive bounds: horizons by which no order can end.

A horizon gives each task a window, from its head to the horizon minus its tail. Windows are
narrowed along arcs, and by counting the orders of each device alone
(`pipesim.analysis.lower_bounds.device_orders`), until nothing changes. If a window is too short, or
a device has no order left, no order ends by the horizon: the horizon is a lower bound (R. Klein and
A. Scholl, European Journal of Operational Research 112, 1999).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import (
    DeviceLanes,
    StateSpace,
    can_run,
    count_of,
    fill_earliest,
    fill_latest,
    held_bytes,
    new_states,
    set_ranges,
    state_index,
)
from pipesim.analysis.lower_bounds.lanes import Floats
from pipesim.analysis.lower_bounds.longest_paths import Places, heads_pass, tails_pass
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["Windows", "latest_excluded_horizon"]

#: States of a device up to which its orders are counted, and visits of states and places after
#: which no further horizon is excluded: about half a second.
MOST_STATES, MOST_VISITS = 500_000, 20_000_000
#: States of a device from which a kernel that was compiled before is loaded at once.
_FEW_STATES = 20
#: Horizons are told apart to this share of the bound.
_RESOLUTION = 1 / 8192
#: Shares of the horizon: changes of windows that are rounding, and that are worth another round.
_ROUNDING, _CHANGE = 1e-10, 1e-6


@dataclass
class Windows:
    """Earliest starts and least times after ends of all places (s), and horizons to try on them.

    Attributes
    ----------
    places, lanes
        The places and their arcs, and the lanes of devices whose orders are counted.
    head, tail
        Heads and tails of each place; shape ``(n_places,)``.
    visits
        Visits that are left, in an array of one number.
    """

    places: Places
    lanes: DeviceLanes
    head: Floats
    tail: Floats
    visits: Ints
    space: StateSpace

    @classmethod
    def of_places(cls, places: Places, lanes: DeviceLanes, head: Floats, tail: Floats) -> Windows:
        """Return windows with all their visits left."""
        n_states = int(
            np.minimum(np.prod(lanes.n_tasks + 1.0, axis=1).max(initial=1.0), MOST_STATES)
        )
        visits = np.array([MOST_VISITS], dtype=np.int64)
        return cls(places, lanes, head, tail, visits, new_states(lanes, n_states))

    def allow(self, horizon: float) -> bool:
        """Return whether windows are left for all tasks, as far as the visits can tell."""
        if len(self.space.earliest) > _FEW_STATES and _windows_are_left.cached:
            _windows_are_left.compile()
        return _windows_are_left(
            self.places,
            self.lanes,
            self.space,
            self.head.copy(),
            self.tail.copy(),
            np.empty_like(self.head),
            self.visits,
            horizon,
        )


def latest_excluded_horizon(
    windows: Windows, bound: float, target: float = math.inf, *, whole: bool = False
) -> float:
    """Return the latest horizon by which no order ends, as far as windows tell; s.

    Parameters
    ----------
    windows
        Windows without a horizon.
    bound
        A lower bound, which is returned if no later horizon is excluded.
    target
        A time that some order takes: no later horizon is tried.
    whole
        Whether all times are whole numbers. If a horizon is excluded then, so are all times before
        the next whole number.
    """
    if not 0.0 < bound < target or not len(windows.lanes.place) or windows.allow(bound):
        return bound
    # All tasks one after the other.
    target = min(target, float(windows.places.seconds.sum() + windows.places.lag.clip(0.0).sum()))
    less = 1.0 if whole else 0.0
    unit = bound * _RESOLUTION
    unit = max(1.0, math.floor(unit)) if whole else unit
    low, step = bound + less, 32.0 * unit
    while low < target and not windows.allow(low + step - less):
        low, step = low + step, 2.0 * step
    high = min(low + step, target)
    while high - low > unit * (1.0 if whole else 1.5):
        half = (high - low) / 2.0
        middle = low + (max(1.0, math.floor(half)) if whole else half)
        if windows.allow(middle - less):
            high = middle
        else:
            low = middle
    return min(low, target)


@kernel(
    heads_pass, tails_pass, set_ranges, state_index, can_run, count_of, held_bytes,
    fill_earliest, fill_latest, allocates=False,
)  # fmt: skip
def _windows_are_left(
    places: Places,
    lanes: DeviceLanes,
    space: StateSpace,
    head: Floats,
    tail: Floats,
    due: Floats,
    visits: Ints,
    horizon: float,
) -> bool:
    """Narrow windows until nothing changes; return False if none is left for a task.

    ``head`` and ``tail`` are changed. ``due`` gets the latest end of each place.
    """
    slack = _ROUNDING * horizon
    while visits[0] > 0:
        visits[0] -= len(head)
        heads_pass(places.ptr, places.before, places.lag, places.seconds, head)
        tails_pass(places.ptr, places.before, places.lag, places.seconds, tail)
        for place in range(len(head)):
            due[place] = horizon - tail[place]
            if head[place] + places.seconds[place] > due[place] + slack:
                return False
        largest = 0.0
        for device in range(len(lanes.room)):
            n_states = set_ranges(lanes, space, device, head, due, slack)
            if n_states > len(space.earliest):
                continue
            visits[0] -= n_states
            if space.low[1, 0] + space.low[2, 0] + space.low[3, 0] > 0:
                return False
            for k in range(n_states):
                space.earliest[k] = np.inf
            space.earliest[0] = 0.0
            fill_earliest(lanes, space, device, head, due, slack)
            fill_latest(lanes, space, device, head, due, slack)
            for lane in range(len(lanes.n_tasks[device])):
                first = lanes.first[device, lane]
                for k in range(first, first + lanes.n_tasks[device, lane]):
                    place = lanes.place[k]
                    if space.start[k] == np.inf:
                        return False
                    later = horizon - space.end[k]
                    largest = max(largest, space.start[k] - head[place], later - tail[place])
                    head[place] = max(head[place], space.start[k])
                    tail[place] = max(tail[place], later)
        if largest <= _CHANGE * horizon:
            break
    return True

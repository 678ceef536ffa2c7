"""Destructive bounds: horizons by which no order can end.

A horizon gives each task a window, from its head to the horizon minus its tail. Windows are
narrowed along arcs, and by counting the orders of each device alone
(`pipesim.analysis.lower_bounds.device_orders`), until nothing changes.

If a window within a horizon is too short, or a device has no order left, no order ends by the
horizon: the horizon is a lower bound (R. Klein and A. Scholl, European Journal of Operational
Research 112, 1999). So it is if none is left in any branch of a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipesim.analysis.lower_bounds.device_orders import (
    DeviceLanes,
    StateSpace,
    fill_earliest,
    fill_latest,
    following_index,
    keep_numbers,
    new_states,
    set_ranges,
    slot_of,
)
from pipesim.analysis.lower_bounds.lanes import (
    NO_SPANS,
    Floats,
    Places,
    Spans,
    heads_pass,
    limit_spans,
    tails_pass,
)
from pipesim.utils import jit
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

#: Visits of places and of lanes of states, after which no further horizon is excluded: about a
#: quarter of a second; and those of a search, about a second.
MOST_VISITS, MOST_VISITS_OF_SEARCH = 8_000_000, 30_000_000
#: States of a device from which a kernel that was compiled before is loaded at once.
_FEW_STATES = 20
#: Shares of the horizon: changes of windows that are rounding, and that are worth another round.
_ROUNDING, _CHANGE = 1e-10, 1e-6


@dataclass
class Windows:
    """Earliest starts and least times after ends of all places (s), and horizons to try on them."""

    places: Places
    lanes: DeviceLanes  # whose orders are counted
    head: Floats
    tail: Floats
    visits: Ints  # that are left, in an array of one number
    space: StateSpace  # of a device, and the orders of devices that are left
    spans: Spans = NO_SPANS  # limited by the horizon; none if it limits the makespan

    @classmethod
    def of_places(
        cls,
        places: Places,
        lanes: DeviceLanes,
        head: Floats,
        tail: Floats,
        spans: Spans = NO_SPANS,
    ) -> Windows:
        """Return windows with all their visits left."""
        visits = np.array([MOST_VISITS], dtype=np.int64)
        return cls(places, lanes, head, tail, visits, new_states(lanes), spans)

    def allow(self, horizon: float) -> bool:
        """Return whether windows are left for all tasks, as far as the visits can tell."""
        return self.narrow(self.head.copy(), self.tail.copy(), horizon)

    def narrow(self, head: Floats, tail: Floats, horizon: float, row: int = -1) -> bool:
        """Change heads and tails to those within a horizon; return whether windows are left.

        With ``row``, all other rows are as narrow as they get from their own orders.
        """
        if len(self.space.earliest) > _FEW_STATES and _windows_are_left.cached:
            _windows_are_left.compile()
        due = np.empty_like(head)
        space = self.space
        if row >= 0:
            space.start[:], space.end[:] = head[self.lanes.place], horizon - tail[self.lanes.place]
            space.fewest[:], space.greatest[:] = space.least, space.most
        else:
            space.is_counted[:] = False
        return _windows_are_left(
            self.places, self.lanes, space, self.spans, head, tail, due, self.visits, horizon, row
        )

    @staticmethod
    def compile() -> None:
        """Compile the kernel, or load it, as a search calls it very often."""
        _windows_are_left.compile()


def _has_changed(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, due: Floats, slack: float
) -> bool:
    """Return whether windows of a row are narrower than when its orders were counted last."""
    if not space.is_counted[row]:
        return True
    for lane in range(lanes.n_tasks.shape[1]):
        first = lanes.first[row, lane]
        for k in range(first, first + lanes.n_tasks[row, lane]):
            place = lanes.place[k]
            if head[place] > space.start[k] + slack or due[place] < space.end[k] - slack:
                return True
    return False


def _count_orders(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, due: Floats, slack: float
) -> int:
    """Count the orders of a row; return the number of states, or -1 if no order is left."""
    n_indices = set_ranges(lanes, space, row, head, due, slack)
    space.is_counted[row] = n_indices <= space.too_many[row] / 2.0
    n_states = 0
    if space.is_counted[row]:
        n_states = fill_earliest(lanes, space, row, head, due, slack)
        if n_states < 0:
            space.is_counted[row], space.too_many[row] = False, n_indices
            n_states = len(space.state_index)
    if not space.is_counted[row]:
        keep_numbers(space, row)
        return n_states
    for lane in range(len(space.stride)):
        if space.done[n_states - 1, lane] < lanes.n_tasks[row, lane]:
            return -1
    fill_latest(lanes, space, row, head, due, slack, n_states)
    return n_states


def _set_windows(
    lanes: DeviceLanes, space: StateSpace, row: int, head: Floats, tail: Floats, horizon: float
) -> float:
    """Narrow the windows of a row to those of its orders; return the largest change (s)."""
    largest = 0.0
    for lane in range(lanes.n_tasks.shape[1]):
        first = lanes.first[row, lane]
        for k in range(first, first + lanes.n_tasks[row, lane]):
            place, later = lanes.place[k], horizon - space.end[k]
            largest = max(largest, space.start[k] - head[place], later - tail[place])
            head[place] = max(head[place], space.start[k])
            tail[place] = max(tail[place], later)
    return largest


def _narrow_along_arcs(
    places: Places, spans: Spans, head: Floats, tail: Floats, due: Floats, horizon: float,
    slack: float,
) -> bool:  # fmt: skip
    """Narrow windows along arcs, and set the latest ends; return whether all tasks have one."""
    heads_pass(places.ptr, places.before, places.lag, places.seconds, head)
    tails_pass(places.ptr, places.before, places.lag, places.seconds, tail)
    limit_spans(places, spans, head, tail, horizon)
    for place in range(len(head)):
        due[place] = horizon - tail[place]
        if head[place] + places.seconds[place] > due[place] + slack:
            return False
    return True


@kernel(
    heads_pass, tails_pass, limit_spans, set_ranges, following_index, keep_numbers, slot_of,
    fill_earliest, fill_latest, _has_changed, _count_orders, _set_windows, _narrow_along_arcs,
    allocates=False,
)  # fmt: skip
def _windows_are_left(
    places: Places,
    lanes: DeviceLanes,
    space: StateSpace,
    spans: Spans,
    head: Floats,
    tail: Floats,
    due: Floats,
    visits: Ints,
    horizon: float,
    changed: int,
) -> bool:
    """Narrow windows until nothing changes; return False if none is left for a task.

    ``head`` and ``tail`` are changed. ``due`` gets the latest end of each place. ``changed`` is a
    row that is counted anew even if its windows are as they were.
    """
    slack, n_places = _ROUNDING * horizon, len(head)
    largest = np.inf
    while visits[0] > 0 and largest > _CHANGE * horizon:
        largest, counted, n_visits = 0.0, -1, n_places
        for row in range(len(lanes.room)):
            if n_visits >= n_places:
                visits[0] -= n_places
                n_visits = 0
                if not _narrow_along_arcs(places, spans, head, tail, due, horizon, slack):
                    return False
            if lanes.device[row] == counted:
                space.is_counted[row] = False
            elif row == changed or _has_changed(lanes, space, row, head, due, slack):
                n_states = _count_orders(lanes, space, row, head, due, slack)
                if n_states < 0:
                    return False
                n_visits += n_states * lanes.n_tasks.shape[1]
                visits[0] -= n_states * lanes.n_tasks.shape[1]
                if space.is_counted[row]:
                    largest = max(largest, _set_windows(lanes, space, row, head, tail, horizon))
                if visits[0] <= 0:
                    return True
            if space.is_counted[row]:
                counted = lanes.device[row]
        changed = -1
    return True


# Branches on the orders of devices.

#: Branches that wait while a search goes deeper. A search that is deeper is given up: it has seldom
#: time for all of them.
_MOST_BRANCHES = 32


def some_branch_is_left(windows: Windows, horizon: float) -> bool:
    """Return whether an order may end by the horizon, as far as the visits can tell.

    A branch limits, for each pair of lanes of a device, the number of tasks of the second lane
    before each task of the first. It is split into the lower and the upper half of the numbers of
    one task. The search stops at the first branch with one number for each task, as an order may
    then exist, and after a number of visits or branches.
    """
    space = windows.space
    no_limits = space.least.copy(), space.most.copy()
    branches = [(windows.head, windows.tail, *no_limits, space.is_counted.copy(), -1)]
    is_left = False
    while branches and not is_left:
        head, tail, space.least[:], space.most[:], space.is_counted[:], row = branches.pop()
        head, tail = head.copy(), tail.copy()
        if not windows.narrow(head, tail, horizon, row):
            continue
        fewest, greatest = space.fewest.copy(), space.greatest.copy()
        is_counted = space.is_counted.copy()
        split = _fewest_choices(np.where(is_counted[:, None, None], greatest - fewest, 0))
        is_over = windows.visits[0] <= 0 or len(branches) >= _MOST_BRANCHES
        is_left = split is None or is_over
        if split is not None:
            middle = (fewest[split] + greatest[split]) // 2
            lower, upper = greatest.copy(), fewest.copy()
            lower[split], upper[split] = middle, middle + 1
            branches += [
                (head, tail, upper, greatest, is_counted, split[0]),
                (head, tail, fewest, lower, is_counted, split[0]),
            ]
    space.least[:], space.most[:] = no_limits
    return is_left


def _fewest_choices(choices: Ints) -> tuple[int, int, int] | None:
    """Return row, pair and task with the fewest choices, but some; None if none has.

    It is in the first pair that has choices for some row: F and B or I come before W.
    """
    for pair in range(choices.shape[1]):
        own = choices[:, pair]
        if own.any():
            row, task = np.unravel_index(np.where(own > 0, own, own.max() + 1).argmin(), own.shape)
            return int(row), pair, int(task)
    return None


# Horizons.

#: Horizons are told apart to this share of the bound.
_RESOLUTION = 1 / 8192
#: First step from the bound to a later horizon: in these shares of the bound.
_STEP, _STEP_OF_SEARCH = 32, 8
#: Share of the visits that are left which a search may spend on one horizon.
_SHARE_OF_VISITS = 4


def latest_excluded_horizon(
    windows: Windows, bound: float, target: float, *, whole: bool = False, search: bool = False
) -> float:
    """Return the latest horizon by which no order ends, as far as windows tell; s.

    It is ``bound``, a lower bound, if no later horizon is excluded. None is tried that is later
    than ``target``, a time that some order takes. If all times are ``whole`` numbers, an excluded
    horizon excludes all times before the next whole number. To ``search`` branches, too, takes
    about a second longer.
    """
    if not 0.0 < bound < target or not len(windows.lanes.place):
        return bound
    # All tasks one after the other.
    target = min(target, float(windows.places.seconds.sum() + windows.places.lag.clip(0.0).sum()))
    bound = _raised(windows.allow, bound, target, _STEP, whole)
    if not search or not jit.available():
        return bound
    windows.compile()
    windows.visits[0] = MOST_VISITS_OF_SEARCH

    def branch_is_left(horizon: float) -> bool:
        """Search with a share of the visits that are left."""
        visits = int(windows.visits[0])
        windows.visits[0] = visits // _SHARE_OF_VISITS
        is_left = some_branch_is_left(windows, horizon)
        windows.visits[0] += visits - visits // _SHARE_OF_VISITS
        return is_left

    return _raised(branch_is_left, bound, target, _STEP_OF_SEARCH, whole)


def _raised(
    allow: Callable[[float], bool], bound: float, target: float, first_step: int, whole: bool
) -> float:
    """Return the latest horizon that is not allowed: steps double, then halve."""
    if bound >= target or allow(bound):
        return bound
    less = 1.0 if whole else 0.0
    unit = bound * _RESOLUTION
    unit = max(1.0, math.floor(unit)) if whole else unit
    low, step = min(bound + less, target), first_step * unit
    while low < target and not allow(min(low + step, target) - less):
        low, step = min(low + step, target), 2.0 * step
    high = min(low + step, target)
    while high - low > unit * (1.0 if whole else 1.5):
        half = (high - low) / 2.0
        middle = low + (max(1.0, math.floor(half)) if whole else half)
        if allow(middle - less):
            high = middle
        else:
            low = middle
    return low

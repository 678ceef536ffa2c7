"""Destructive bounds: horizons by which no order can end.

If a window within a horizon is too short, or a device has no order left, no order ends by the
horizon: the horizon is a lower bound (R. Klein and A. Scholl, European Journal of Operational
Research 112, 1999). So it is if none is left in any branch of a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pipesim.analysis.lower_bounds.branching import some_branch_is_left
from pipesim.analysis.lower_bounds.windows import MOST_VISITS_OF_SEARCH, Windows
from pipesim.utils import jit

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
    search
        Whether to search branches, too: about a second longer.
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

"""Branch on the orders of devices: a horizon is excluded if no branch is left."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.lower_bounds.windows import Windows

__all__ = ["some_branch_is_left"]


def some_branch_is_left(windows: Windows, horizon: float) -> bool:
    """Return whether an order may end by the horizon, as far as the visits can tell.

    A branch limits, for each device, the number of tasks of lane 1 (B or I) before each task of
    lane 0 (F). It is split where the fewest numbers are left, into the lower and the upper half.
    The search stops at the first branch with one number for each task: an order may then exist.
    """
    space = windows.space
    no_limits = space.least.copy(), space.most.copy()
    branches = [(windows.head, windows.tail, *no_limits)]
    is_left = False
    while branches and not is_left:
        head, tail, space.least[:], space.most[:] = branches.pop()
        head, tail = head.copy(), tail.copy()
        if not windows.narrow(head, tail, horizon):
            continue
        fewest, greatest = space.fewest.copy(), space.greatest.copy()
        choices = np.where(space.is_counted[:, None], greatest - fewest, 0)
        choices[np.arange(choices.shape[1]) >= windows.lanes.n_tasks[:, :1]] = 0
        split = int(np.where(choices > 0, choices, np.inf).argmin())
        is_left = choices.flat[split] <= 0 or windows.visits[0] <= 0
        middle = (fewest.flat[split] + greatest.flat[split]) // 2
        lower, upper = greatest.copy(), fewest.copy()
        lower.flat[split], upper.flat[split] = middle, middle + 1
        branches += [(head, tail, upper, greatest), (head, tail, fewest, lower)]
    space.least[:], space.most[:] = no_limits
    return is_left

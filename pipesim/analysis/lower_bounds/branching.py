"""Branch on the orders of devices: a horizon is excluded if no branch is left."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.lower_bounds.windows import Windows
from pipesim.utils.csr import Ints

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

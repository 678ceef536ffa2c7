"""`can_prove`: whether CP-SAT's model of a problem is small enough."""

from __future__ import annotations

import numpy as np

from pipesim.order_search import OrderProblem, has_equal_microbatches
from pipesim.planning.orders.cp_sat.proof import MOST_TASKS
from pipesim.planning.orders.effort import Effort

#: Seconds for each pair of tasks of a device in the model of its memory limit, and the most that
#: the model may take, as a share of the seconds, if that is more than a second.
_PAIR_SECONDS, _MODEL_SHARE = 5e-6, 0.1


def can_prove(problem: OrderProblem, effort: Effort) -> bool:
    """Return whether CP-SAT takes the problem, and builds its model within about a second.

    It takes micro-batches to be identical. The model has a boolean for pairs of tasks of devices
    that hold several stages and have a limit.
    """
    if problem.count.sum() > MOST_TASKS or not has_equal_microbatches(problem):
        return False
    limited = np.isfinite(problem.limit)
    changes = (problem.allocated != problem.released) & limited[problem.device]
    n_tasks = np.bincount(problem.device, np.where(changes, problem.count, 0), problem.n_devices)
    rows = np.unique(np.stack([problem.device, problem.stage, problem.path]), axis=1)
    several = np.bincount(rows[0], minlength=problem.n_devices) > 1
    seconds = _PAIR_SECONDS * float((n_tasks**2)[several].sum())
    return effort.evaluations is not None or seconds <= max(1.0, _MODEL_SHARE * effort.seconds)

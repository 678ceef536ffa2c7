"""`schedule_name`: the named schedule whose orders the tasks of a measured step have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.errors import PipeError
from pipesim.graph.compute_tasks import overlapped_halves
from pipesim.ops import SCHEDULED
from pipesim.scheduling.registry import options_of_schedules, schedule

if TYPE_CHECKING:
    from pipesim.trace.measured_tasks import MeasuredTasks


#: Options that follow from the number of stages of a device, and that number over the option.
_CHUNKS = {"n_chunks": 1, "n_waves": 2}


def schedule_name(tasks: MeasuredTasks) -> str | None:
    """Return the name of the first schedule with the orders of the first replica, or None.

    Recomputes are ignored: a schedule has the same orders with and without them. Schedules whose
    orders depend on other options than the number of chunks are tried with the options' defaults.
    """
    rows = tasks.in_order(SCHEDULED)
    rows = rows[tasks.replica[rows] == 0]
    columns = (tasks.device, tasks.op, tasks.stage, tasks.microbatch, tasks.other_half >= 0)
    own = [column[rows] for column in columns]
    n_devices, n_stages, n_microbatches = (int(own[k].max()) + 1 for k in (0, 2, 3))
    if n_stages % n_devices:
        return None
    n_chunks = n_stages // n_devices
    for name, options in options_of_schedules().items():
        chosen = {x: n_chunks // _CHUNKS[x] for x in options if x in _CHUNKS}
        if chosen and n_chunks == 1:  # another schedule has these orders, under its usual name
            continue
        try:
            named = schedule(name, n_devices, n_microbatches, **chosen)
        except PipeError:  # not of these counts
            continue
        columns = (named.device, named.op, named.stage, named.microbatch, overlapped_halves(named))
        others = [column[np.isin(named.op, sorted(SCHEDULED))] for column in columns]
        if all(map(np.array_equal, own, others)):
            return name
    return None

"""Schedules of some of the actions of another schedule, in its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, check_count
from pipesim.ops import Op
from pipesim.scheduling.schedule import Schedule


def kept_actions(schedule: Schedule, kept: NDArray[np.bool_]) -> Schedule:
    """Return the schedule with the actions that ``kept`` marks, in the same order.

    An F whose overlapped B is left out runs alone.
    """
    n_before = np.concatenate([[0], np.cumsum(kept)])
    overlapped = schedule.overlapped
    if overlapped is not None:
        pairs = overlapped & np.append(kept[1:], False)
        overlapped = pairs[kept] if pairs[kept].any() else None
    return replace(
        schedule,
        op=schedule.op[kept],
        stage=schedule.stage[kept],
        microbatch=schedule.microbatch[kept],
        ptr=n_before[schedule.ptr],
        overlapped=overlapped,
    )


def forward_actions(schedule: Schedule) -> Schedule:
    """Return the F of a schedule, as one mini-batch with one version of the weights.

    Each device keeps the order of its F. The order can run if that of the schedule can.
    """
    forwards = kept_actions(schedule, schedule.op == Op.F)
    return replace(forwards, n_batches=1, weight_versions="one")


def fewer_microbatches(schedule: Schedule, n_microbatches: int) -> Schedule:
    """Return a schedule with fewer micro-batches, as one mini-batch.

    The first micro-batches of each path are kept. They are numbered anew, so that each path has the
    numbers that `Placement.path_of` gives it.

    >>> import pipesim as ps
    >>> print(fewer_microbatches(ps.schedule("gpipe", 2, 3), 2).grid())
    device 0 | 0F0 0F1 0B1 0B0
    device 1 | 1F0 1F1 1B1 1B0

    Raises
    ------
    ScheduleError
        For more micro-batches than the schedule has, or fewer than its placement has paths.
    """
    n_paths, most = schedule.placement.n_paths, schedule.n_microbatches
    if not n_paths <= check_count("n_microbatches", n_microbatches) <= most:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {most} micro-batches, and its placement {n_paths} "
            f"paths; it cannot run with {n_microbatches} micro-batches: give {n_paths} to {most}"
        )
    if n_microbatches % schedule.n_slices:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_slices} slices a sequence; it cannot run "
            f"with {n_microbatches} micro-batches: give a multiple of {schedule.n_slices}"
        )
    old, new = (schedule.placement.path_of(n) for n in (most, n_microbatches))
    number = np.full(most, -1, dtype=schedule.microbatch.dtype)
    for path in range(n_paths):
        targets = np.flatnonzero(new == path)
        number[np.flatnonzero(old == path)[: len(targets)]] = targets
    fewer = kept_actions(schedule, number[schedule.microbatch] >= 0)
    return replace(
        fewer,
        n_microbatches=n_microbatches,
        microbatch=number[fewer.microbatch],
        n_batches=1,
        weight_versions="one",
        recipe=None,
    )

"""Give a schedule another order of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, ScheduleError, number
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from pipesim.scheduling.schedule import Schedule


def with_microbatch_order(schedule: Schedule, order: object) -> Schedule:
    """Return `Schedule.with_microbatch_order`."""
    m = schedule.n_microbatches
    numbers = _permutation(order, m)
    places = np.arange(m)
    path = schedule.placement.path_of(m)
    _check_groups(numbers, path, "path", "paths take the micro-batches that they took before")
    batch = places * schedule.n_batches // m
    _check_groups(numbers, batch, "mini-batch", "a step follows each mini-batch")
    _check_slices(numbers, schedule.n_slices)
    if np.array_equal(numbers, places):
        return schedule
    microbatch = numbers[schedule.microbatch].astype(np.int32)
    return schedule._ordered_anew(microbatch=microbatch, recipe=None)


def _check_slices(numbers: Ints, n_slices: int) -> None:
    """Raise if an order takes the slices of a sequence apart."""
    slices = numbers.reshape(-1, n_slices)
    apart = (slices[:, :1] % n_slices != 0) | (slices != slices[:, :1] + np.arange(n_slices))
    for sequence in np.flatnonzero(apart.any(axis=1))[:1].tolist():
        raise ScheduleError(
            f"order has {slices[sequence].tolist()} in place of sequence {sequence}: a sequence is "
            f"{n_slices} slices, which stay together and in order; permute sequences"
        )


def _permutation(order: object, m: int) -> Ints:
    """Return an order as an array of whole numbers, checked to name each micro-batch once."""
    advice = f"give each micro-batch from 0 to {m - 1} once"
    if not isinstance(order, Sequence | np.ndarray) or isinstance(order, str | bytes):
        raise ArgumentError(f"order must be a sequence of micro-batches, got {order!r:.60}")
    values: list[Any] = list(order)
    if len(values) != m:
        raise ArgumentError(
            f"order has {len(values)} entries, but the schedule has {m} micro-batches; {advice}"
        )
    is_listed = np.zeros(m, dtype=bool)
    for place, value in enumerate(values):
        index = number(value)
        if index is None or not 0 <= index < m or index != int(index):
            raise ArgumentError(f"order has {value!r:.60} at position {place}; {advice}")
        if is_listed[int(index)]:
            raise ArgumentError(f"order has micro-batch {int(index)} twice; {advice}")
        is_listed[int(index)] = True
    return np.array(values).astype(np.int64)


def _check_groups(numbers: Ints, group: NDArray[Any], name: str, reason: str) -> None:
    """Raise if an order moves a micro-batch to another group, such as a path."""
    moved = np.flatnonzero(group[numbers] != group)
    if len(moved):
        place, microbatch = int(moved[0]), int(numbers[moved[0]])
        own = np.flatnonzero(group == group[place])
        raise ScheduleError(
            f"order has micro-batch {microbatch} of {name} {group[microbatch]} at position {place} "
            f"of {name} {group[place]}; {reason}, so give one of {own[0]} to {own[-1]} there"
        )

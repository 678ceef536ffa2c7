"""Columns of a schedule: checked, made from orders of actions, and turned back into orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.ops import Action, Overlapped

#: ``(ops, stages, microbatches)`` of a device, and optionally which F are overlapped.
DeviceOrder = tuple[Sequence[int] | NDArray[Any], ...]


def checked_columns(devices: Iterable[DeviceOrder]) -> list[list[NDArray[Any]]]:
    """Return the columns of each device as arrays of their types, all of one length."""
    types = (np.int8, np.int32, np.int32, np.bool_)
    wanted = "devices must be a sequence of columns (ops, stages, microbatches) of each device"
    if not isinstance(devices, Iterable):
        raise ArgumentError(f"{wanted}, got {devices!r:.60} ({type(devices).__name__})")
    checked: list[list[NDArray[Any]]] = []
    for device, user_columns in enumerate(devices):
        try:
            columns: list[NDArray[Any]] = [
                np.asarray(c, t) for c, t in zip(user_columns, types, strict=False)
            ]
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"{wanted}; of device {device} got {user_columns!r:.60}: {error}"
            ) from None
        if (
            len(columns) < 3
            or len({column.shape for column in columns}) > 1
            or columns[0].ndim != 1
        ):
            raise ArgumentError(
                f"{wanted}, each with one number an action; of device {device} got "
                f"{user_columns!r:.60}"
            )
        checked.append(columns)
    if not checked:
        raise ArgumentError(f"{wanted}, got none; give at least one device")
    return checked


def single_actions(order: Iterable[Action | Overlapped]) -> Iterator[tuple[Action, bool]]:
    """Yield the actions of an order, and whether each is overlapped with the next."""
    for entry in order:
        if isinstance(entry, Overlapped):
            yield from ((entry.forward, True), (entry.backward, False))
        else:
            yield entry, False


def action_columns(actions: Sequence[tuple[Action, bool]]) -> DeviceOrder:
    """Return the four columns of a device's `single_actions`."""
    return (
        [a.op for a, _ in actions],
        [a.stage for a, _ in actions],
        [a.microbatch or 0 for a, _ in actions],
        [overlapped for _, overlapped in actions],
    )


def join_overlapped(actions: list[Action], overlapped: list[bool]) -> Iterator[Action | Overlapped]:
    """Yield the actions of a device; an overlapped F and the B after it as one `Overlapped`."""
    position = 0
    while position < len(actions):
        if overlapped[position] and position + 1 < len(actions):
            yield Overlapped(actions[position], actions[position + 1])
            position += 2
        else:
            yield actions[position]
            position += 1

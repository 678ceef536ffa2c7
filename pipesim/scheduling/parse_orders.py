"""Parse and check a user's orders of actions: `Action`, `Overlapped`, or their texts."""

from __future__ import annotations

import numbers
from collections.abc import Iterable

import numpy as np

from pipesim.errors import ArgumentError, ScheduleError
from pipesim.ops import LISTED, Action, Op, Overlapped, parse_action
from pipesim.utils.host_memory import check_memory

#: Largest number of a stage or a micro-batch: columns have 32 bits.
_LARGEST = int(np.iinfo(np.int32).max)
#: Actions between two checks of the memory; bytes of each action until it is in columns.
_BETWEEN, _BYTES_PER_ACTION = 1 << 16, 250
_EXAMPLE = "such as '0F0'"


def parse_orders(orders: object) -> list[list[Action | Overlapped]]:
    """Return the actions of each device, with texts parsed and each action checked.

    Parameters
    ----------
    orders
        The user's argument: an iterable of iterables, one a device.

    Raises
    ------
    ScheduleError
        If a schedule may not list an action of this kind.
    CapacityError
        If an order does not end before its actions fill the memory.
    """
    if not isinstance(orders, Iterable) or isinstance(orders, str):
        raise ArgumentError(
            f"orders must be a sequence of orders, one a device, got {_description(orders)}; "
            "list each device's actions"
        )
    return [_device_actions(device, order) for device, order in enumerate(orders)]


def _device_actions(device: int, order: object) -> list[Action | Overlapped]:
    if not isinstance(order, Iterable) or isinstance(order, str | Action | Overlapped):
        raise ArgumentError(
            f"device {device}: an order must be a sequence of actions, got {_description(order)}; "
            f"list or yield actions or their texts, {_EXAMPLE}"
        )
    actions = []
    for position, entry in enumerate(order):
        if position % _BETWEEN == _BETWEEN - 1:
            check_memory(
                f"an order of more than {position:,} actions (device {device})",
                (position + _BETWEEN) * _BYTES_PER_ACTION,
                "make sure that it ends, or list fewer actions",
            )
        try:
            actions.append(_action(entry))
        except (ArgumentError, ScheduleError) as error:
            raise type(error)(f"device {device}, position {position}: {error}") from error
    return actions


def _action(entry: object) -> Action | Overlapped:
    """Return one entry of an order, parsed and checked."""
    if isinstance(entry, str):
        entry = parse_action(entry)
    if isinstance(entry, Overlapped):
        return Overlapped(_checked(entry.forward), _checked(entry.backward))
    return _checked(entry)


def _checked(action: object) -> Action:
    if not isinstance(action, Action):
        raise ArgumentError(
            f"{_description(action)} is not an action; give an Action, an Overlapped of two, or a "
            f"text {_EXAMPLE}"
        )
    if not isinstance(action.op, Op):
        raise ArgumentError(
            f"{_description(action)} names no operation: op must be one of pipesim.Op, got "
            f"{action.op!r}; write for example Action(0, Op.F, 0), or a text {_EXAMPLE}"
        )
    stage = _whole(action, "stage", action.stage)
    if action.op not in LISTED or action.microbatch is None:
        raise ScheduleError(
            f"{_description(action)} is not a compute action; "
            f"a schedule lists {', '.join(op.name for op in sorted(LISTED))} of "
            "one micro-batch, and lower() adds the rest"
        )
    microbatch = _whole(action, "microbatch", action.microbatch)
    if stage < 0 or microbatch < 0:
        raise ScheduleError(f"{action} is out of range; number stages and micro-batches from 0")
    if stage > _LARGEST or microbatch > _LARGEST:
        raise ScheduleError(
            f"{action} is out of range; stages and micro-batches go from 0 to {_LARGEST}"
        )
    return Action(stage, action.op, microbatch)


def _whole(action: Action, field: str, value: object) -> int:
    if type(value) is int:  # by far the most common case, and the quickest to check
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(
            f"{_description(action)} has a {field} that is no whole number, {value!r} "
            f"({type(value).__name__}); give an int from 0"
        )
    return int(value)


def _description(value: object) -> str:
    """Return a value as errors show it: an action as its text, others with their type."""
    if isinstance(value, Action) and isinstance(value.op, Op):
        return str(value)
    return f"{value!r:.60} ({type(value).__name__})"

"""Orders of actions: parsed, checked, as columns, as text, and the placement that they imply."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, ScheduleError, check_count
from pipesim.ops import LISTED, Action, Op, Overlapped, parse_action
from pipesim.scheduling.placement import Placement
from pipesim.utils.host_memory import check_memory

#: Largest number of a stage or a micro-batch: columns have 32 bits.
_LARGEST = int(np.iinfo(np.int32).max)
#: Actions between two checks of the memory; bytes of each action until it is in columns.
_BETWEEN, _BYTES_PER_ACTION = 1 << 16, 250
_EXAMPLE = "such as '0F0'"


def parse_orders(orders: object) -> list[list[Action | Overlapped]]:
    """Return the actions of each device, with texts parsed and each action checked."""
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
            action = parse_action(entry) if isinstance(entry, str) else entry
            actions.append(
                Overlapped(_checked(action.forward), _checked(action.backward))
                if isinstance(action, Overlapped)
                else _checked(action)
            )
        except (ArgumentError, ScheduleError) as error:
            raise type(error)(f"device {device}, position {position}: {error}") from error
    return actions


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


Order = Sequence[Action | Overlapped]


def _actions(orders: Iterable[Order]) -> Iterator[tuple[int, Action]]:
    """Yield the device and each action of some orders, an overlapped F and B one by one."""
    for device, order in enumerate(orders):
        for action, _ in single_actions(order):
            yield device, action


def infer_placement(orders: Sequence[Order]) -> Placement:
    """Return the placement in which each stage lies on the first device that lists it."""
    home: dict[int, int] = {}
    for device, action in _actions(orders):
        home.setdefault(action.stage, device)
    missing = next(stage for stage in itertools.count() if stage not in home)
    if missing < len(home):
        raise ScheduleError(f"no action names stage {missing}; number stages from 0")
    for device, order in enumerate(orders):
        if not order:
            raise ScheduleError(
                f"device {device} lists nothing; list at least one action, or leave the device out"
            )
        if device not in home.values():
            raise ScheduleError(
                f"device {device} has no stage of its own: earlier devices list all of its stages; "
                "give each stage one device"
            )
    return Placement([home[stage] for stage in range(len(home))])


def infer_file_placement(where: str, orders: Sequence[Order]) -> Placement | None:
    """Return the placement of a file's orders if stages lie on two devices each, else None.

    None means one path: `infer_placement` then places each stage on the first device that lists
    it, and `pipesim.verify` shows actions that are elsewhere. With two paths, each half of the
    micro-batches has one. If no two paths fit, and F and B of a stage and micro-batch are on two
    devices, some action is misplaced; a stage then lies where most of its actions are.
    """
    home: dict[tuple[int, int], int] = {}
    devices_of: dict[int, set[int]] = {}
    has_misplaced = False
    for device, action in _actions(orders):
        has_misplaced |= home.setdefault((action.stage, action.microbatch or 0), device) != device
        devices_of.setdefault(action.stage, set()).add(device)
    n_stages = len(devices_of)
    shared = sum(len(devices) > 1 for devices in devices_of.values())
    # In a bidirectional placement of an odd number of stages the middle one lies on one device.
    if not shared or shared < n_stages - n_stages % 2 or max(devices_of) >= n_stages:
        return None
    try:
        return _two_paths(where, home, n_stages)
    except ScheduleError:
        if has_misplaced:
            return _most_actions(orders, n_stages)
        raise


def _most_actions(orders: Sequence[Order], n_stages: int) -> Placement | None:
    """Return the placement of each stage on the device with most of its actions.

    At equal numbers an F outweighs a B. None if a device then has no stage.
    """
    votes = np.zeros((n_stages, len(orders)), dtype=np.int64)
    for device, action in _actions(orders):
        votes[action.stage, device] += 3 if action.op == Op.F else 2
    device_of = votes.argmax(axis=1).tolist()
    return Placement(device_of) if len(set(device_of)) == len(orders) else None


def _two_paths(where: str, home: dict[tuple[int, int], int], n_stages: int) -> Placement:
    """Return the placement in which each half of the micro-batches has one path."""
    n_microbatches = 1 + max(microbatch for _, microbatch in home)
    paths: list[dict[int, int]] = [{}, {}]
    for (stage, microbatch), device in sorted(home.items()):
        half = microbatch * 2 // n_microbatches
        if paths[half].setdefault(stage, device) != device:
            raise ScheduleError(
                f"{where}: device {device} lists stage {stage} of micro-batch {microbatch}, but "
                f"device {paths[half][stage]} lists that stage of an earlier one of the same half; "
                "if a stage lies on two devices, the first half of the micro-batches takes one "
                "and the second half the other"
            )
    for half, path in enumerate(paths):
        if len(path) < n_stages:
            missing = next(stage for stage in range(n_stages) if stage not in path)
            raise ScheduleError(
                f"{where}: stages lie on two devices, but no micro-batch of the "
                f"{('first', 'second')[half]} half goes through stage {missing}; list it, or give "
                "each stage one device"
            )
    for stage in range(n_stages):
        if paths[0][stage] == paths[1][stage]:
            raise ScheduleError(
                f"{where}: stage {stage} lies on device {paths[0][stage]} for all micro-batches, "
                "and other stages on two devices; in a file of two paths, each has a copy of all "
                "stages"
            )
    try:
        return Placement(*([path[stage] for stage in range(n_stages)] for path in paths))
    except ArgumentError as error:
        raise ScheduleError(f"{where}: {error}") from error


def grid_text(
    orders: Sequence[Sequence[Action | Overlapped]], mark: tuple[int, int] | None, width: int
) -> str:
    """Return the orders of devices as `Schedule.grid` describes it."""
    check_count("width", width, 0)
    mark = None if mark is None else _checked_mark(mark, len(orders))
    first, last = 0, max((len(order) for order in orders), default=0)
    if mark is not None:
        first, last = max(0, mark[1] - width), min(last, mark[1] + width + 1)
    cells = [[str(action) for action in order[first:last]] for order in orders]
    if mark is not None:
        row = cells[mark[0]]
        row += [""] * (mark[1] - first + 1 - len(row))
        row[mark[1] - first] = f">{row[mark[1] - first]}<"
    pad = max((len(cell) for row in cells for cell in row), default=0)
    label = len(f"device {len(orders) - 1}")
    lines = (
        f"{f'device {device}':<{label}} |{' ...' if first else ''} "
        + " ".join(f"{cell:<{pad}}" for cell in row).rstrip()
        + (" ..." if len(orders[device]) > last else "")
        for device, row in enumerate(cells)
    )
    return "\n".join(line.rstrip() for line in lines)


def _checked_mark(mark: object, n_devices: int) -> tuple[int, int]:
    if not isinstance(mark, (tuple, list)) or len(mark) != 2:
        raise ArgumentError(f"mark must be (device, position) of a cell, got {mark!r:.60}")
    device = check_count("device of mark", mark[0], 0)
    position = check_count("position of mark", mark[1], 0)
    if device >= n_devices:
        raise ArgumentError(f"mark names device {device}; there are {n_devices}, from 0")
    return device, position

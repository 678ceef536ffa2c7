"""Infer a placement from orders of actions that come without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipesim.errors import ArgumentError, ScheduleError
from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.order_columns import single_actions
from pipesim.scheduling.placement import Placement

Order = Sequence[Action | Overlapped]


def _actions(orders: Iterable[Order]) -> Iterator[tuple[int, Action]]:
    """Yield the device and each action of some orders, an overlapped F and B one by one."""
    for device, order in enumerate(orders):
        for action, _ in single_actions(order):
            yield device, action


def infer_placement(orders: Sequence[Order]) -> Placement:
    """Return the placement in which each stage lies on the first device that lists it.

    Raises
    ------
    ScheduleError
        For a number that no stage has, and for a device without an action or without a stage.
    """
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

    Raises
    ------
    ScheduleError
        If stages lie on two devices each, and no two paths fit; ``where`` names the file.
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
    try:
        return Placement(*([path[stage] for stage in range(n_stages)] for path in paths))
    except ArgumentError as error:
        raise ScheduleError(f"{where}: {error}") from error

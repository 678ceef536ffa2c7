"""Files of a schedule: the CSV of torch.distributed.pipelining, and the grid as text.

In the CSV a row is a rank, which is a device, and a cell is an action, such as ``0F0`` or
``(0F1;1B0)OVERLAP_F_B``; empty cells are idle steps. The grid is what `Schedule.grid` prints.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from pipesim.errors import ArgumentError, ScheduleError
from pipesim.ops import LISTED, TRANSFERS, Action, Op, Overlapped, parse_action
from pipesim.scheduling.csv_message_checks import Cell, check_messages, place, refuse
from pipesim.scheduling.file_checksums import check_signature, signed_grid, signed_rows, unsigned
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.atomic_write import check_path, read_bytes, write_text
from pipesim.utils.texts import csv_rows

__all__ = ["read_schedule", "schedule_from_texts", "write_schedule"]

_FORMS = "a CSV with a row a device, or a grid such as 'device 0 | 0F0 0B0'"
_NEEDS = "path: a schedule's file must be"
_LABEL = re.compile(r"\s*(?:(?:device|rank)\s+([0-9]{1,9}))?\s*\|")
#: Characters of a text that may be an action: two overlapped ones, with numbers of 19 digits.
_LONGEST = 99
#: What torch lists for stages whose parameters are sharded by FSDP; nothing here depends on it.
_SHARDING = re.compile(r"\s*[0-9]+(?:UNSHARD|RESHARD)\s*")
_Order = list[Action | Overlapped]


def write_schedule(schedule: Schedule, path: Path | str) -> None:
    """Do what `Schedule.save` says."""
    path = check_path("path", path, "write", _NEEDS)
    if schedule.n_batches > 1 or schedule.weight_versions != "one":
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} has {schedule.n_batches} "
            f"mini-batches and weight_versions={schedule.weight_versions!r}, for which its form "
            "has no place; write schedule.with_updates(1, 'one'), and call with_updates again on "
            "what is loaded"
        )
    if path.suffix.lower() == ".txt":
        text = signed_grid(schedule.grid())
    elif (schedule.op == Op.R).any():
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} lists recomputes (R), which torch's "
            "CSV has no action for; write a grid, to a file whose name ends in .txt"
        )
    else:
        text = signed_rows(schedule.orders)
    write_text(path, text)


def read_schedule(path: Path | str, name: str | None = None) -> Schedule:
    """Do what `Schedule.load` says."""
    path = check_path("path", path, needs=_NEEDS)
    text, signature = unsigned(_content(path))
    schedule = _schedule(str(path), _rows(str(path), text), name or path.stem)
    check_signature(str(path), text, signature)  # last: an error that names a cell says more
    return schedule


def schedule_from_texts(
    where: str, orders: Sequence[Sequence[str]], name: str, n_microbatches: int | None = None
) -> Schedule:
    """Return the schedule of the texts of actions, one sequence a device; ``where`` is for errors.

    Messages, reductions and empty texts are left out, as `Schedule.load` does. Without a number of
    micro-batches it is read off.
    """
    rows = [
        [Cell(text, device, device + 1, column + 1) for column, text in enumerate(order)]
        for device, order in enumerate(orders)
    ]
    return _schedule(where, rows, name, n_microbatches)


def _content(path: Path) -> str:
    """Return the text of a file."""
    try:
        text = read_bytes(path, "schedule", ScheduleError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_form(str(path), f"it is no UTF-8 text (byte {error.start})")
    if "\0" in text:
        _refuse_form(str(path), "it is no text: it has a NUL character")
    if not text.strip():
        _refuse_form(str(path), "it is empty")
    return text


def _refuse_form(where: str, problem: str) -> NoReturn:
    raise ScheduleError(f"cannot read schedule {where}: {problem}; give {_FORMS}")


def _rows(where: str, text: str) -> list[list[Cell]]:
    """Return the cells of each device; a grid has no commas, and may have labels."""
    lines = _table_lines(where, text.rstrip()) if "," in text else _grid_lines(where, text)
    return [
        [Cell(cell, device, row, column) for column, cell in enumerate(cells, 1)]
        for device, (row, cells) in enumerate(lines)
    ]


def _table_lines(where: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each row of a CSV."""
    try:
        yield from csv_rows(text, "row")
    except ValueError as error:
        _refuse_form(where, str(error))


def _grid_lines(where: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line of a grid, blank lines left out."""
    device = 0
    for row, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        label, bar, cells = line.rpartition("|")
        match = _LABEL.fullmatch(label + bar)
        if bar and match is None:
            _refuse_form(
                where, f"row {row}: {reprlib.repr(label.strip())} is no label of device {device}"
            )
        if match is not None and match[1] is not None and int(match[1]) != device:
            raise ScheduleError(
                f"{where}: row {row} is of device {device}, but its label says {match[1]}; give a "
                "row a device, in order"
            )
        yield row, cells.split()
        device += 1


def _schedule(
    where: str, rows: list[list[Cell]], name: str, n_microbatches: int | None = None
) -> Schedule:
    orders: list[_Order] = []
    messages: dict[Action, Cell] = {}
    computed: dict[tuple[int, Action], Cell] = {}
    for row in rows:
        order: _Order = []
        for cell in row:
            action = _action(where, cell)
            if isinstance(action, Overlapped) or (action and action.op in LISTED):
                order.append(action)
                for part in _parts(action):
                    computed.setdefault((cell.device, part), cell)
            elif action and action.op in TRANSFERS and messages.setdefault(action, cell) != cell:
                refuse(where, cell, "is listed before")
        orders.append(order)
    check_messages(where, messages, computed)
    if not any(orders):
        _refuse_form(where, "it lists no F, B, I or W")
    for device, order in enumerate(orders):
        if not order:
            raise ScheduleError(
                f"{where}: device {device} lists no F, B, I or W; every device runs at least one, "
                f"so leave no row empty between rows that have actions ({len(rows)} rows)"
            )
    placement = _placement(where, orders)
    try:
        return Schedule.from_orders(
            orders, placement=placement, n_microbatches=n_microbatches, name=name
        )
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error


def _action(where: str, cell: Cell) -> Action | Overlapped | None:
    """Return what a cell says, or None if it says nothing that a schedule is about."""
    text = cell.text.strip()
    if not text or _SHARDING.fullmatch(text):
        return None
    if len(text) > _LONGEST:
        raise ScheduleError(
            f"{place(where, cell)}: {len(text)} characters are no action; give {_FORMS}"
        )
    try:
        action = parse_action(text)
    except ArgumentError as error:
        raise ScheduleError(f"{place(where, cell)}: {error}{_advice(text)}") from error
    if isinstance(action, Action) and action.peer_stage >= 0:
        refuse(where, cell, "is a message of a skip connection, which pipesim.lower(..., skips=) "
                            "adds; leave it out")  # fmt: skip
    if isinstance(action, Overlapped) or action.op in (*LISTED, *TRANSFERS):
        if any(part.microbatch is None for part in _parts(action)):
            refuse(where, cell, "names no micro-batch; write such as '2F0'")
    elif action.op != Op.REDUCE_GRAD:
        refuse(where, cell, "is no action that a schedule lists (F, B, I, W, R): pipesim.lower "
                             "adds the rest; leave it out")  # fmt: skip
    return action


def _advice(text: str) -> str:
    """Return what to do about a text that is no action, where that can be told."""
    if text.startswith("("):
        return "; torch may run any actions as one, but only an F and a B can be simulated so"
    if text.strip(".") == "":
        return "; a grid that was cut is no whole schedule, and idle time is not written"
    if text[0] == ">" or text[-1] == "<":
        return "; remove the mark of an error message"
    return ""


def _parts(action: Action | Overlapped) -> tuple[Action, ...]:
    return (action,) if isinstance(action, Action) else (action.forward, action.backward)


def _placement(where: str, orders: Sequence[_Order]) -> Placement | None:
    """Return the placement of a path for each half of the micro-batches; None if there is one path.

    A stage of one path lies where it is first named, so that `pipesim.verify` can show what is
    elsewhere. Where no two paths fit, and a stage's F and B of one micro-batch are on two devices,
    something is misplaced: a stage then lies where most of it is.
    """
    home: dict[tuple[int, int], int] = {}
    homes: dict[int, set[int]] = {}
    apart = False
    for device, order in enumerate(orders):
        for action in (part for listed in order for part in _parts(listed)):
            apart |= home.setdefault((action.stage, action.microbatch or 0), device) != device
            homes.setdefault(action.stage, set()).add(device)
    shared = sum(len(found) > 1 for found in homes.values())
    # In a bidirectional placement of an odd number of stages the middle one lies on one device.
    if not shared or shared < len(homes) - len(homes) % 2 or max(homes) >= len(homes):
        return None
    try:
        return _two_paths(where, home, len(homes))
    except ScheduleError:
        if apart:
            return _likeliest(orders, len(homes))
        raise


def _likeliest(orders: Sequence[_Order], n_stages: int) -> Placement | None:
    """Return where most actions of each stage are, an F before a B; None if a row has no stage."""
    votes = np.zeros((n_stages, len(orders)), dtype=np.int64)
    for device, order in enumerate(orders):
        for action in (part for listed in order for part in _parts(listed)):
            votes[action.stage, device] += 3 if action.op == Op.F else 2
    device_of = votes.argmax(axis=1).tolist()
    return Placement(device_of) if len(set(device_of)) == len(orders) else None


def _two_paths(where: str, home: dict[tuple[int, int], int], n_stages: int) -> Placement:
    """Return the placement in which each half of the micro-batches has a path of its own."""
    n_microbatches = 1 + max(microbatch for _, microbatch in home)
    paths: list[dict[int, int]] = [{}, {}]
    for (stage, microbatch), device in sorted(home.items()):
        half = microbatch * 2 // n_microbatches
        if paths[half].setdefault(stage, device) != device:
            raise ScheduleError(
                f"{where}: device {device} lists stage {stage} of micro-batch {microbatch}, but "
                f"device {paths[half][stage]} lists that stage of an earlier one of the same half; "
                "where a stage lies on two devices, the first half of the micro-batches takes one "
                "and the second half the other"
            )
    for half, path in enumerate(paths):
        if len(path) < n_stages:
            lacking = next(stage for stage in range(n_stages) if stage not in path)
            raise ScheduleError(
                f"{where}: stages lie on two devices, but no micro-batch of the "
                f"{('first', 'second')[half]} half goes through stage {lacking}; list it, or give "
                "each stage one device"
            )
    try:
        return Placement(*([path[stage] for stage in range(n_stages)] for path in paths))
    except ArgumentError as error:
        raise ScheduleError(f"{where}: {error}") from error

"""Files of schedules: the CSV of torch.distributed.pipelining, and the grid as text.

In the CSV a row is a rank, which is a device, and a cell is an action, such as ``0F0`` or
``(0F1;1B0)OVERLAP_F_B``; empty cells are idle steps. The grid is the text of `Schedule.grid`.
"""

from __future__ import annotations

import csv
import io
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from pipesim.errors import ArgumentError, ScheduleError
from pipesim.ops import LISTED, SENDS, TRANSFERS, Action, Op, Overlapped, parse_action
from pipesim.scheduling.orders import infer_file_placement, single_actions
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.files import check_path, read_bytes, write_text
from pipesim.utils.texts import checksum, checksum_mismatch, csv_rows

# Checksums in files of orders, at a place that other readers of these files ignore.
#
# In a CSV the checksum follows an action, in the same cell: ``1W3 sha256:0123456789abcdef``. The
# reader of torch.distributed.pipelining takes the action at the start of a cell, and ignores the
# text after it. A separate row or cell would count as a rank or a step. In a grid the checksum is
# the last word.

_DIGITS = 16
_SIGNATURE = re.compile(rf" (sha256:[0-9a-f]{{{_DIGITS}}})(?=[,\s]|$)")


def _signature(text: str) -> str:
    return f"sha256:{checksum(text.replace(chr(13), '').rstrip())[:_DIGITS]}"


def signed_rows(orders: Sequence[Sequence[object]]) -> str:
    """Return orders as CSV, a row a device, with a checksum in the last cell of a single action."""
    rows = [[*map(str, order)] for order in orders]
    signature = _signature(_csv(rows))
    for row in reversed(rows):
        for column in reversed(range(len(row))):
            if not row[column].startswith("("):  # torch takes no text after an overlapped pair
                row[column] += f" {signature}"
                return _csv(rows)
    return _csv(rows)


def unsigned(text: str) -> tuple[str, str]:
    """Return the text of a file without its checksum, and the checksum, empty if it has none."""
    match = _SIGNATURE.search(text)
    if match is None:
        return text, ""
    return text[: match.start()] + text[match.end() :], match[1]


def _csv(rows: Sequence[Sequence[str]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()


# Checks of the messages that a file lists; the schedule leaves them out

#: Operation of the other end of a message, and the offset of its stage.
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
#: Operations that compute the content of a SEND, or use that of a RECV.
_COMPUTED = {
    Op.SEND_F: (Op.F,),
    Op.RECV_F: (Op.F,),
    Op.SEND_B: (Op.B, Op.I),
    Op.RECV_B: (Op.B, Op.I),
}


class CsvCell(NamedTuple):
    """A text and its place: the device counts from 0, row and column from 1."""

    text: str
    device: int
    row: int
    column: int


def cell_place(where: str, cell: CsvCell) -> str:
    """Return the place of a cell of the file ``where``, as error messages name it."""
    return f"{where}: row {cell.row} (device {cell.device}), column {cell.column}"


def refuse(where: str, cell: CsvCell, problem: str) -> NoReturn:
    """Raise `ScheduleError` for a cell."""
    raise ScheduleError(f"{cell_place(where, cell)}: {cell.text.strip()!r} {problem}")


def check_messages(
    where: str, messages: Mapping[Action, CsvCell], computed: Mapping[tuple[int, Action], CsvCell]
) -> None:
    """Check that messages pair up, are on the device of their stage, and on the right side of it.

    A SEND comes after the action that computes its content, and a RECV before the action that
    uses it. ``computed`` has the cell where a device first lists a compute action.
    """
    stages = {(device, action.stage) for device, action in computed}
    for message, cell in messages.items():
        if (cell.device, message.stage) not in stages:
            refuse(where, cell, f"is misplaced: this device runs nothing of stage {message.stage}")
        op, offset = _OTHER_END[message.op]
        other = Action(message.stage + offset, op, message.microbatch)
        if other not in messages:
            problem = "has no receiver" if message.op in SENDS else "has no sender"
            refuse(where, cell, f"{problem}: the file has no {other}; add it, or leave out all "
                                "messages, which pipesim.lower adds")  # fmt: skip
        for action in (message._replace(op=op) for op in _COMPUTED[message.op]):
            _check_side(where, message, cell, action, computed.get((cell.device, action)))


def _check_side(
    where: str, message: Action, cell: CsvCell, action: Action, action_cell: CsvCell | None
) -> None:
    if action_cell is None:  # `pipesim.verify` reports an action that the row lacks
        return
    if message.op in SENDS and cell.column < action_cell.column:
        refuse(where, cell, f"comes before {action} in column {action_cell.column}, which "
                            "computes its content; list the SEND after it")  # fmt: skip
    if message.op not in SENDS and cell.column > action_cell.column:
        refuse(where, cell, f"comes after {action} in column {action_cell.column}, which needs "
                            "its content; list the RECV before it")  # fmt: skip


_FORMS = "a CSV with a row a device, or a grid such as 'device 0 | 0F0 0B0'"
_NEEDS = "path: a schedule's file must be"
_LABEL = re.compile(r"\s*(?:(?:device|rank)\s+([0-9]{1,9}))?\s*\|")
#: Longest text of an action, in characters: two overlapped ones, with numbers of 19 digits.
_LONGEST = 99
#: Actions that torch lists for stages with parameters sharded by FSDP; they are ignored.
_SHARDING = re.compile(r"\s*[0-9]+(?:UNSHARD|RESHARD)\s*")
_Order = list[Action | Overlapped]


def write_schedule(schedule: Schedule, path: Path | str) -> None:
    """Write a schedule to a file, as `Schedule.save` describes."""
    path = check_path("path", path, "write", _NEEDS)
    if schedule.n_batches > 1 or schedule.weight_versions != "one":
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} has {schedule.n_batches} "
            f"mini-batches and weight_versions={schedule.weight_versions!r}, which the file "
            "cannot hold; write schedule.with_updates(1, 'one'), and call with_updates again "
            "after loading"
        )
    if schedule.n_slices > 1:
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} has {schedule.n_slices} slices a "
            "sequence, which the file cannot hold; write schedule.with_slices(1), and call "
            f"with_slices({schedule.n_slices}) again after loading"
        )
    placement = schedule.placement
    if placement.shares_stages or placement.n_paths > (1 if placement.edges else 2):
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} has paths that share stages, more "
            "than two paths, or edges beside several paths, which the file cannot hold; write the "
            "texts of schedule.orders, and give ps.Schedule.from_orders the placement again"
        )
    if placement.edges:
        raise ScheduleError(
            f"cannot write {path}: the stages of schedule {schedule.name!r} have edges, which the "
            "file cannot hold; write the orders of ps.Schedule.from_orders(schedule.orders), and "
            "give from_orders the placement again after loading"
        )
    if path.suffix.lower() == ".txt":
        grid = schedule.grid()
        text = f"{grid} {_signature(grid + chr(10))}\n"
    elif (schedule.op == Op.R).any():
        raise ScheduleError(
            f"cannot write {path}: schedule {schedule.name!r} lists recomputes (R), for which "
            "torch's CSV has no action; write a grid, to a file whose name ends in .txt"
        )
    else:
        text = signed_rows(schedule.orders)
    write_text(path, text)


def read_schedule(path: Path | str, name: str | None = None) -> Schedule:
    """Read a schedule from a file, as `Schedule.load` describes."""
    path = check_path("path", path, needs=_NEEDS)
    where = str(path)
    text, signature = unsigned(_content(path))
    # A grid has no commas, and may have labels.
    lines = _table_lines(where, text.rstrip()) if "," in text else _grid_lines(where, text)
    rows = [
        [CsvCell(cell, device, row, column) for column, cell in enumerate(cells, 1)]
        for device, (row, cells) in enumerate(lines)
    ]
    schedule = _build(where, rows, name or path.stem)
    if signature and signature != _signature(text):  # last: an error that names a cell says more
        raise ScheduleError(checksum_mismatch(path, f"delete {signature!r} from it"))
    return schedule


def schedule_from_texts(
    where: str, orders: Sequence[Sequence[str]], name: str, n_microbatches: int | None = None
) -> Schedule:
    """Return the schedule of texts of actions, one sequence a device; errors name ``where``.

    Messages, reductions and empty texts are left out, as by `Schedule.load`. By default the number
    of micro-batches is inferred from the actions.
    """
    rows = [
        [CsvCell(text, device, device + 1, column + 1) for column, text in enumerate(order)]
        for device, order in enumerate(orders)
    ]
    return _build(where, rows, name, n_microbatches)


def _content(path: Path) -> str:
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


def _table_lines(where: str, text: str) -> Iterator[tuple[int, list[str]]]:
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


def _build(
    where: str, rows: list[list[CsvCell]], name: str, n_microbatches: int | None = None
) -> Schedule:
    """Return the schedule of the cells of each device."""
    orders: list[_Order] = []
    messages: dict[Action, CsvCell] = {}
    computed: dict[tuple[int, Action], CsvCell] = {}
    for row in rows:
        order: _Order = []
        for cell in row:
            action = _action(where, cell)
            if isinstance(action, Overlapped) or (action and action.op in LISTED):
                order.append(action)
                for part, _ in single_actions([action]):
                    computed.setdefault((cell.device, part), cell)
            elif action and action.op in TRANSFERS and messages.setdefault(action, cell) != cell:
                refuse(where, cell, "is listed twice")
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
    placement = infer_file_placement(where, orders)
    try:
        return Schedule.from_orders(
            orders, placement=placement, n_microbatches=n_microbatches, name=name
        )
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error


def _action(where: str, cell: CsvCell) -> Action | Overlapped | None:
    """Return the action of a cell; None for an empty cell and for FSDP's actions."""
    text = cell.text.strip()
    if not text or _SHARDING.fullmatch(text):
        return None
    if len(text) > _LONGEST:
        raise ScheduleError(
            f"{cell_place(where, cell)}: {len(text)} characters are no action; give {_FORMS}"
        )
    try:
        action = parse_action(text)
    except ArgumentError as error:
        raise ScheduleError(f"{cell_place(where, cell)}: {error}{_advice(text)}") from error
    if isinstance(action, Action) and action.peer_stage >= 0:
        refuse(where, cell, "is a message of a skip connection, which pipesim.lower(..., skips=) "
                            "adds; leave it out")  # fmt: skip
    if isinstance(action, Overlapped) or action.op in (*LISTED, *TRANSFERS):
        if any(part.microbatch is None for part, _ in single_actions([action])):
            refuse(where, cell, "names no micro-batch; write for example '2F0'")
    elif action.op != Op.REDUCE_GRAD:
        refuse(where, cell, "is no action that a schedule lists (F, B, I, W, R): pipesim.lower "
                             "adds the rest; leave it out")  # fmt: skip
    return action


def _advice(text: str) -> str:
    """Return advice about a text that is no action, or an empty text."""
    if text.startswith("("):
        return "; torch may run any actions as one, but only an F and a B can be simulated this way"
    if text.strip(".") == "":
        return "; a grid that was cut is not a whole schedule, and idle time is not written"
    if text[0] == ">" or text[-1] == "<":
        return "; remove the mark of an error message"
    return ""

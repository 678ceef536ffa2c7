"""Check the messages that a file of a schedule lists; the schedule itself leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from pipesim.errors import ScheduleError
from pipesim.ops import SENDS, Action, Op

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


def refuse(where: str, cell: CsvCell, problem: str) -> NoReturn:
    """Raise `ScheduleError` for a cell of the file ``where``."""
    raise ScheduleError(f"{cell_place(where, cell)}: {cell.text.strip()!r} {problem}")


def cell_place(where: str, cell: CsvCell) -> str:
    """Return the place of a cell, as error messages name it."""
    return f"{where}: row {cell.row} (device {cell.device}), column {cell.column}"


def check_messages(
    where: str, messages: Mapping[Action, CsvCell], computed: Mapping[tuple[int, Action], CsvCell]
) -> None:
    """Check that messages pair up, are on the device of their stage, and on the right side of it.

    A SEND comes after the action that computes its content, and a RECV before the action that
    uses it.

    Parameters
    ----------
    where
        Name of the file in errors.
    messages
        Cell of each message.
    computed
        Cell where a device first lists a compute action.

    Raises
    ------
    ScheduleError
        The message names row and column.
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
    """Check that a SEND comes after the action that computes its content, a RECV before its use.

    `pipesim.verify` reports an action that the row lacks.
    """
    if action_cell is None:
        return
    if message.op in SENDS and cell.column < action_cell.column:
        refuse(where, cell, f"comes before {action} in column {action_cell.column}, which "
                            "computes its content; list the SEND after it")  # fmt: skip
    if message.op not in SENDS and cell.column > action_cell.column:
        refuse(where, cell, f"comes after {action} in column {action_cell.column}, which needs "
                            "its content; list the RECV before it")  # fmt: skip

"""Check the messages that a schedule's file lists, which are then left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from pipesim.errors import ScheduleError
from pipesim.ops import SENDS, Action, Op

__all__ = ["Cell", "check_messages", "place", "refuse"]

#: The other end of a message, and how many stages on it is.
_OTHER_END = {
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}
#: What makes the content of a SEND, or uses that of a RECV.
_COMPUTED = {
    Op.SEND_F: (Op.F,),
    Op.RECV_F: (Op.F,),
    Op.SEND_B: (Op.B, Op.I),
    Op.RECV_B: (Op.B, Op.I),
}


class Cell(NamedTuple):
    """A text, and where it stands: counted from 0, but the row and the column from 1."""

    text: str
    device: int
    row: int
    column: int


def refuse(where: str, cell: Cell, problem: str) -> NoReturn:
    """Raise `ScheduleError` for a cell of the file ``where``."""
    raise ScheduleError(f"{place(where, cell)}: {cell.text.strip()!r} {problem}")


def place(where: str, cell: Cell) -> str:
    """Return how an error names a cell's place."""
    return f"{where}: row {cell.row} (device {cell.device}), column {cell.column}"


def check_messages(
    where: str, messages: Mapping[Action, Cell], computed: Mapping[tuple[int, Action], Cell]
) -> None:
    """Check that messages pair up, lie with their stage, and stand on the right side of its work.

    Parameters
    ----------
    where
        What errors call the file.
    messages
        The cell of each.
    computed
        The cell where a device first lists a compute action.

    Raises
    ------
    ScheduleError
        Naming row and column.
    """
    held = {(device, action.stage) for device, action in computed}
    for message, cell in messages.items():
        if (cell.device, message.stage) not in held:
            refuse(where, cell, f"is misplaced: this device runs nothing of stage {message.stage}")
        op, offset = _OTHER_END[message.op]
        other = Action(message.stage + offset, op, message.microbatch)
        if other not in messages:
            does = "sends to nobody" if message.op in SENDS else "waits for nothing"
            refuse(where, cell, f"{does}: the file has no {other}; add it, or leave out all "
                                "messages, which pipesim.lower adds")  # fmt: skip
        for action in (message._replace(op=op) for op in _COMPUTED[message.op]):
            _check_side(where, message, cell, action, computed.get((cell.device, action)))


def _check_side(
    where: str, message: Action, cell: Cell, action: Action, of_action: Cell | None
) -> None:
    """Check that a SEND comes after the action that makes what it sends, a RECV before its use.

    An action that the row lacks is left to `pipesim.verify`.
    """
    if of_action is None:
        return
    if message.op in SENDS and cell.column < of_action.column:
        refuse(where, cell, f"comes before {action} in column {of_action.column}, which makes "
                            "what it sends; list the SEND after it")  # fmt: skip
    if message.op not in SENDS and cell.column > of_action.column:
        refuse(where, cell, f"comes after {action} in column {of_action.column}, which needs "
                            "what it brings; list the RECV before it")  # fmt: skip

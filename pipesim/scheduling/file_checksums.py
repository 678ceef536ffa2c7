"""The checksum in a file of orders, such that other readers of these files pass over it.

In a CSV it stands behind an action, in its cell: ``1W3 sha256:0123456789abcdef``. The reader of
torch.distributed.pipelining takes the action that a cell begins with, and no text behind it; a row
or a cell of its own would be a rank or a step. In a grid it is the last word.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from pipesim.errors import ScheduleError
from pipesim.utils.texts import changed, checksum

__all__ = ["check_signature", "signed_grid", "signed_rows", "unsigned"]

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
            if not row[column].startswith("("):  # behind two that overlap, torch takes no text
                row[column] += f" {signature}"
                return _csv(rows)
    return _csv(rows)


def signed_grid(grid: str) -> str:
    """Return a grid as text with a checksum as its last word."""
    return f"{grid} {_signature(grid + chr(10))}\n"


def unsigned(text: str) -> tuple[str, str]:
    """Return the text of a file without its checksum, and the checksum; empty if it has none."""
    found = _SIGNATURE.search(text)
    if found is None:
        return text, ""
    return text[: found.start()] + text[found.end() :], found[1]


def check_signature(where: str, text: str, signature: str) -> None:
    """Raise if the checksum of a file is that of other content.

    Raises
    ------
    ScheduleError
        Saying how to have the file read all the same.
    """
    if signature and signature != _signature(text):
        raise ScheduleError(changed(where, f"delete {signature!r} from it"))


def _csv(rows: Sequence[Sequence[str]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()

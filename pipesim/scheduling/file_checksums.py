"""Checksums in files of orders, at a place that other readers of these files ignore.

In a CSV the checksum follows an action, in the same cell: ``1W3 sha256:0123456789abcdef``. The
reader of torch.distributed.pipelining takes the action at the start of a cell, and ignores the text
after it. A separate row or cell would count as a rank or a step. In a grid the checksum is the last
word.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from pipesim.errors import ScheduleError
from pipesim.utils.texts import checksum, checksum_mismatch

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


def signed_grid(grid: str) -> str:
    """Return a grid as text with a checksum as its last word."""
    return f"{grid} {_signature(grid + chr(10))}\n"


def unsigned(text: str) -> tuple[str, str]:
    """Return the text of a file without its checksum, and the checksum, empty if it has none."""
    match = _SIGNATURE.search(text)
    if match is None:
        return text, ""
    return text[: match.start()] + text[match.end() :], match[1]


def check_signature(where: str, text: str, signature: str) -> None:
    """Raise if the checksum of a file does not match its content.

    Raises
    ------
    ScheduleError
        The message tells how to read the file all the same.
    """
    if signature and signature != _signature(text):
        raise ScheduleError(checksum_mismatch(where, f"delete {signature!r} from it"))


def _csv(rows: Sequence[Sequence[str]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()

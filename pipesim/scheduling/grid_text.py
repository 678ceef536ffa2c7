"""The orders of a schedule as text: a row a device."""

from __future__ import annotations

from collections.abc import Sequence

from pipesim.errors import ArgumentError, check_count
from pipesim.ops import Action, Overlapped


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
    """Return the device and the position of a cell."""
    if not isinstance(mark, (tuple, list)) or len(mark) != 2:
        raise ArgumentError(f"mark must be (device, position) of a cell, got {mark!r:.60}")
    device = check_count("device of mark", mark[0], 0)
    position = check_count("position of mark", mark[1], 0)
    if device >= n_devices:
        raise ArgumentError(f"mark names device {device}; there are {n_devices}, from 0")
    return device, position

"""Orders in V shape, written as phases: actions of a device's two chunks, so many times over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.named_schedules.patterns import numbered
from pipesim.ops import Op

__all__ = ["Phase", "order_of"]

#: Actions and how often they are repeated. ``F0`` is the F of the chunk on the way down, ``F1`` of
#: that on the way up; ``F0&B1`` are overlapped.
Phase = tuple[str, int]


def order_of(device: int, n_devices: int, phases: Iterable[Phase]) -> tuple[NDArray[Any], ...]:
    """Return the columns of a device, whose chunks take the micro-batches in order."""
    columns = np.concatenate([np.tile(_read(actions), times) for actions, times in phases], axis=1)
    ops, chunks, overlapped = columns
    stages = np.where(chunks == 0, device, 2 * n_devices - 1 - device)
    return ops, stages, numbered(ops, stages), overlapped


def _read(actions: str) -> NDArray[np.int8]:
    """Return operation, chunk, and whether it is overlapped with the next, of each action."""
    rows = [
        (Op[one[0]], int(one[1]), k < both.count("&"))
        for both in actions.split()
        for k, one in enumerate(both.split("&"))
    ]
    return np.array(rows, dtype=np.int8).reshape(-1, 3).T

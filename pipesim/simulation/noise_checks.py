"""Check the arguments of `pipesim.Noise`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipesim.errors import ArgumentError, UnknownNameError, check_name, number
from pipesim.ops import COMPUTE


def distributions_by_name(task: object) -> dict[str, object]:
    """Return the distributions of compute tasks by their names in error messages."""
    if not isinstance(task, Mapping):
        return {"task": task}
    for name in task:
        try:
            check_name("compute operation", name, [op.name for op in COMPUTE])
        except UnknownNameError as error:
            raise UnknownNameError(f"task: {error}") from None
    return {f"task {name}": value for name, value in task.items()}


def checked_factors(name: str, factors: object, example: str) -> dict[Any, float]:
    """Return factors as floats; raise `ArgumentError` for other values."""
    if not isinstance(factors, Mapping):
        raise ArgumentError(f"{name} must be a mapping, such as {example}, got {factors!r}")
    checked = {}
    for where, factor in factors.items():
        got = number(factor)
        if got is None or not 0 < got < np.inf:
            raise ArgumentError(f"{name}[{where!r}] must be a factor > 0, got {factor!r}")
        checked[where] = got
    return checked

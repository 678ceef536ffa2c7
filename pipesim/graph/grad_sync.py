"""Check and print when replicas reduce gradients: one value for all stages, or one a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.utils.csr import Ints
from pipesim.utils.texts import parse_int

GradSync = Literal["last", "every", "bucketed"]
GRAD_SYNC: tuple[GradSync, ...] = ("last", "every", "bucketed")
#: As a graph has it: one value for all stages, or one a stage. A number k is every k micro-batches.
GradSyncs: TypeAlias = str | int | tuple[str | int, ...]
#: As users give it.
GradSyncArgument: TypeAlias = str | int | Sequence[str | int] | Mapping[int, str | int]
#: Between the values of stages, as text.
_BETWEEN = "/"


def checked_grad_sync(grad_sync: GradSyncArgument, n_stages: int, batch_size: int) -> GradSyncs:
    """Return when gradients are reduced: one value if all stages have the same, else one a stage.

    Parameters
    ----------
    grad_sync
        ``"last"``, ``"every"``, ``"bucketed"``, a number of micro-batches, or one of these a stage:
        in a sequence, as text between slashes, or in a mapping from stages, whose other stages
        have ``"last"``.
    n_stages
        Number of stages.
    batch_size
        Micro-batches of a mini-batch. This number means ``"last"``, and 1 means ``"every"``.
    """
    if isinstance(grad_sync, str) and grad_sync not in GRAD_SYNC:
        grad_sync = from_text(grad_sync)
    if isinstance(grad_sync, Mapping):
        grad_sync = [grad_sync.get(stage, "last") for stage in _checked_stages(grad_sync, n_stages)]
    elif isinstance(grad_sync, (list, tuple)):
        if len(grad_sync) != n_stages:
            raise ArgumentError(
                f"grad_sync has {len(grad_sync)} values, and there are {n_stages} stages; give one "
                "value for all, one a stage, or a mapping from stages"
            )
    else:
        return _checked(grad_sync, "grad_sync", batch_size)
    values = [
        _checked(value, f"grad_sync of stage {stage}", batch_size)
        for stage, value in enumerate(grad_sync)
    ]
    return values[0] if len(set(values)) == 1 else tuple(values)


def _checked_stages(stages: Mapping[int, str | int], n_stages: int) -> range:
    """Return all stages, if a mapping names one of them or several, and no others."""
    if not stages:
        raise ArgumentError("grad_sync is a mapping that names no stage; give such as {0: 'every'}")
    for stage in stages:
        if check_count("grad_sync: a stage", stage, 0) >= n_stages:
            raise ArgumentError(
                f"grad_sync names stage {stage}; there are {n_stages} stages, 0..{n_stages - 1}"
            )
    return range(n_stages)


def _checked(value: object, name: str, batch_size: int) -> str | int:
    """Return the value of one stage; 1 and the size of a mini-batch become modes."""
    if isinstance(value, str):
        return check_name(name, value, GRAD_SYNC)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(
            f"{name} must be {', '.join(map(repr, GRAD_SYNC))}, or a whole number k, to reduce "
            f"after every k micro-batches; got {value!r} ({type(value).__name__})"
        )
    k = check_count(name, value)
    if batch_size % k:
        divisors = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
        raise ArgumentError(
            f"{name} reduces after every {k} micro-batches, which do not divide the {batch_size} "
            f"of a mini-batch; give one of {divisors}"
        )
    if k == batch_size:
        return "last"
    return "every" if k == 1 else k


def of_stages(grad_sync: GradSyncs, n_stages: int) -> tuple[str | int, ...]:
    """Return the value of each stage."""
    return grad_sync if isinstance(grad_sync, tuple) else (grad_sync,) * n_stages


def group_sizes(grad_sync: GradSyncs, n_stages: int) -> Ints:
    """Return the number of micro-batches after which each stage reduces its gradients.

    0 for once a mini-batch, with ``"last"`` and ``"bucketed"``. Shape ``(n_stages,)``.
    """
    sizes = {"every": 1, "last": 0, "bucketed": 0}
    values = of_stages(grad_sync, n_stages)
    groups: Ints = np.array([sizes[x] if isinstance(x, str) else x for x in values], dtype=np.int64)
    return groups


def to_text(grad_sync: GradSyncs) -> str:
    """Return the text that `from_text` reads."""
    return _BETWEEN.join(map(str, grad_sync if isinstance(grad_sync, tuple) else (grad_sync,)))


def from_text(text: str) -> str | int | tuple[str | int, ...]:
    """Read a value, or one a stage between slashes: ``"every"``, ``"2"``, ``"every/2/last"``."""
    values = tuple(text if (k := parse_int(text)) is None else k for text in text.split(_BETWEEN))
    return values if len(values) > 1 else values[0]

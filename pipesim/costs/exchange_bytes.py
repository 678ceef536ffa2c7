"""Bytes of a sharded stage's exchanges for each pair of replicas, as `pipesim.Costs` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import CostsError, check_name
from pipesim.ops import EXCHANGES

Matrix = tuple[tuple[float, ...], ...]
#: For each stage, its exchanges by name: row ``i`` is sent by replica ``i``, column ``j`` to ``j``.
ExchangeBytes = tuple[tuple[int, tuple[tuple[str, Matrix], ...]], ...]

_FORM = (
    "exchange_bytes must map stages to the bytes of their exchanges, such as {0: "
    "keys.exchange_bytes(4, dim=64)}"
)


def checked_exchange_bytes(value: object) -> ExchangeBytes | None:
    """Return bytes of exchanges as tuples, by stage and in the order of `pipesim.ops.EXCHANGES`.

    Parameters
    ----------
    value
        A mapping from stage (or its text, as in files) to a mapping from exchange to a square
        matrix; a result of this function; or None.

    Raises
    ------
    CostsError
        For another form, and bytes that are negative or not finite.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, (Mapping, tuple)):
            raise TypeError
        stages = {_stage(stage): dict(matrices) for stage, matrices in dict(value).items()}
    except (TypeError, ValueError):
        raise CostsError(f"{_FORM}, got {value!r:.60}") from None
    result = []
    for stage, matrices in sorted(stages.items()):
        for name in matrices:
            check_name("exchange", name, EXCHANGES)
        names = [name for name in EXCHANGES if name in matrices]
        exchanges = tuple((name, _matrix(stage, name, matrices[name])) for name in names)
        result.append((stage, exchanges))
    return tuple(result)


def as_mapping(value: ExchangeBytes | None) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Return the matrices of each stage by the name of the exchange."""
    return {
        stage: {name: np.array(matrix) for name, matrix in matrices}
        for stage, matrices in value or ()
    }


def _stage(stage: Any) -> int:
    """Return a stage as an integer, from an integer or its text; raise `ValueError` for others."""
    if isinstance(stage, str) and stage.isdecimal():
        return int(stage)
    if isinstance(stage, bool) or not isinstance(stage, (int, np.integer)) or stage < 0:
        raise ValueError
    return int(stage)


def _matrix(stage: int, name: str, values: object) -> Matrix:
    """Return a square matrix of bytes as tuples; raise `CostsError` for anything else."""
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise CostsError(
            f"exchange_bytes of {name} of stage {stage} must be a square matrix, one row a sending "
            f"replica, got {values!r:.60}"
        )
    for i, j in np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))[:1].tolist():
        raise CostsError(
            f"exchange_bytes of {name} of stage {stage}, from replica {i} to {j}, must be finite "
            f"bytes >= 0, got {matrix[i, j]}"
        )
    return tuple(map(tuple, matrix.tolist()))

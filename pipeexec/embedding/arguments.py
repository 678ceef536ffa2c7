"""Check the arguments of `ShardedEmbedding`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from pipesim.costs.key_tables import checked_tables
from pipesim.costs.keys import Keys
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_name,
    check_type,
)

#: All rows of a table.
FullTable = Tensor | nn.Embedding | nn.EmbeddingBag


def checked_rows(n_rows: int | Sequence[int]) -> list[int]:
    """Return the number of rows of each table."""
    if isinstance(n_rows, Sequence) and not isinstance(n_rows, (str, bytes)):
        if not n_rows:
            raise ArgumentError("n_rows is empty; give the rows of at least one table")
        return [check_count(f"n_rows[{i}]", rows) for i, rows in enumerate(n_rows)]
    return [check_count("n_rows", n_rows)]


def checked_loads(
    counts: Keys | ArrayLike | None, n_rows: list[int], placement: str, unique: bool
) -> list[NDArray[np.float64]] | None:
    """Return how often each row is sent, for ``"frequency"``; None for other placements."""
    if placement != "frequency":
        if counts is not None:
            raise ArgumentError(
                f'counts are for placement="frequency", but placement is {placement!r}; leave them '
                "out, or change it"
            )
        return None
    if counts is None:
        raise ArgumentError(
            'placement="frequency" needs counts: how often each row is requested, or pipesim.Keys'
        )
    if isinstance(counts, Keys):
        loads = counts.loads(unique=unique)
    else:
        loads = checked_tables("counts", counts)
    if list(map(len, loads)) != n_rows:
        raise ArgumentError(
            f"counts are of tables of {list(map(len, loads))} rows, but n_rows is {n_rows}; give "
            "one count for each row"
        )
    return loads


def check_modes(
    combiner: str | None, padding_key: int | None, gradients: str, dtype: torch.dtype
) -> None:
    """Raise `ArgumentError` for an invalid combiner, padding key, ``gradients`` or dtype."""
    if combiner is not None:
        check_name("combiner", combiner, ["sum", "mean"])
    check_name("gradients", gradients, ["sum", "mean"])
    if padding_key is not None and type(padding_key) is not int:
        raise ArgumentTypeError(f"padding_key must be an int or None, got {padding_key!r}")
    if not check_type("dtype", dtype, torch.dtype).is_floating_point:
        raise ArgumentTypeError(f"dtype must be a floating-point type, got {dtype}")


def check_device(device: object) -> None:
    """Raise `ArgumentError` unless torch can make tensors on the device."""
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]  # raises for other types
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ArgumentError(
            f"device {device!r:.60} cannot hold the rows: {str(error).splitlines()[0]}; give such "
            "as 'cpu'"
        ) from error


def table_rows(table: FullTable) -> Tensor:
    """Return the rows of a table."""
    rows = table if isinstance(table, Tensor) else getattr(table, "weight", None)
    if not isinstance(rows, Tensor):
        raise ArgumentTypeError(
            "weights must be a tensor of all rows, or a module that has them as its weight, got "
            f"{table!r:.60} ({type(table).__name__})"
        )
    if rows.dim() != 2:
        raise ArgumentError(f"a table must have shape (rows, dim), got {tuple(rows.shape)}")
    return rows.detach()

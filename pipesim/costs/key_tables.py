"""Tables of counts as `pipesim.Keys` is given them, checked; and draws without replacement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count
from pipesim.utils.host_memory import check_memory

__all__ = [
    "bounded",
    "expected_maximum",
    "per_table",
    "row_counts",
    "tables_of",
    "without_replacement",
]

Floats = NDArray[np.float64]
#: The largest count: larger ones are not exact as floats.
_MOST = 1 << 53


def expected_maximum(mean: Floats, deviation: Floats) -> float:
    """Return the mean of the largest of independent normal values.

    The integral of one minus the product of their distribution functions, over six deviations.
    """
    low, high = (mean - 6 * deviation).max(), (mean + 6 * deviation).max()
    if high <= low:
        return float(high)
    x = np.linspace(low, high, 1001)
    z = (x - mean[:, None]) / np.maximum(deviation, 1e-12 * high)[:, None] / math.sqrt(2)
    erf = np.frompyfunc(math.erf, 1, 1)(z).astype(np.float64)
    return float(high - np.trapezoid((0.5 + 0.5 * erf).prod(axis=0), x))


def without_replacement(counts: Floats, n: int) -> Floats:
    """Return the probability that each row is among n of all counted keys."""
    total = int(counts.sum())
    values, which = np.unique(counts, return_inverse=True)
    whole = math.lgamma(total + 1) - math.lgamma(total - n + 1)
    missed = [
        0.0 if total - c < n else
        math.exp(math.lgamma(total - c + 1) - math.lgamma(total - c - n + 1) - whole)
        for c in values.tolist()
    ]  # fmt: skip
    found: Floats = np.where(values > 0, 1.0 - np.array(missed), 0.0)[which]
    return found


def bounded(name: str, value: object, minimum: int = 1) -> int:
    """Return a count that a float holds exactly."""
    count = check_count(name, value, minimum)
    if count > _MOST:
        raise ArgumentError(f"{name} must be at most {_MOST}, got {count:.3e}" if count < 10**300
                            else f"{name} must be at most {_MOST}")  # fmt: skip
    return count


def row_counts(n_rows: int | Sequence[int]) -> list[int]:
    """Return the rows of each table."""
    several = isinstance(n_rows, Sequence) and not isinstance(n_rows, (str, bytes))
    given: Sequence[Any] = n_rows if several else [n_rows]  # type: ignore[assignment]
    if not given:
        raise ArgumentError("n_rows is empty; give the rows of at least one table")
    name = "n_rows[{}]" if several else "n_rows"
    sizes = [bounded(name.format(i), rows) for i, rows in enumerate(given)]
    check_memory(f"a histogram of {sum(sizes):,} rows", 40 * sum(sizes), "give fewer rows")
    return sizes


def per_table(name: str, values: int | Sequence[int], n_tables: int) -> tuple[int, ...]:
    """Return a whole number a table."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return (bounded(name, values),) * n_tables
    if len(values) != n_tables:
        raise ArgumentError(
            f"{name} has {len(values)} values for {n_tables} tables; give one, or one a table"
        )
    return tuple(bounded(f"{name}[{i}]", value) for i, value in enumerate(values))


def tables_of(name: str, values: Any) -> list[Floats]:
    """Return one array of finite numbers >= 0 a table, given that, or the array of one table."""
    try:
        several = isinstance(values, (list, tuple)) and len(values) > 0 and np.ndim(values[0]) == 1
        tables = [np.asarray(x) for x in (values if several else [values])]
    except (TypeError, ValueError):
        tables = []
    if not tables or any(x.ndim != 1 or not len(x) or x.dtype.kind not in "iuf" for x in tables):
        raise ArgumentError(
            f"{name} must be an array of numbers, one a row, or a list of one array a table, got "
            f"{values!r:.60}"
        )
    for index, table in enumerate(tables):
        if not np.isfinite(table).all() or (table < 0).any() or not table.any():
            raise ArgumentError(
                f"{name} of table {index} must be finite and >= 0, and above 0 for some row"
            )
    return [table.astype(np.float64) for table in tables]

"""Tables of counts for `pipesim.Keys`: checks, Zipf's law, counting, and probabilities of draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ArgumentError, ArgumentTypeError, check_count, number
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

Floats = NDArray[np.float64]
#: The largest count: larger ones are not exact as floats.
_MOST = 1 << 53


def expected_maximum(mean: Floats, deviation: Floats) -> float:
    """Return the mean of the largest of independent normal values.

    It is the integral of one minus the product of their distribution functions, taken over six
    deviations.
    """
    low, high = (mean - 6 * deviation).max(), (mean + 6 * deviation).max()
    if high <= low:
        return float(high)
    x = np.linspace(low, high, 1001)
    z = (x - mean[:, None]) / np.maximum(deviation, 1e-12 * high)[:, None] / math.sqrt(2)
    erf = np.frompyfunc(math.erf, 1, 1)(z).astype(np.float64)
    return float(high - np.trapezoid((0.5 + 0.5 * erf).prod(axis=0), x))


def inclusion_probability(counts: Floats, n: int) -> Floats:
    """Return the probability that each row is among n of all counted keys.

    The n keys are drawn without replacement; see `pipesim.Keys.loads` for the formula.
    """
    total = int(counts.sum())
    values, index = np.unique(counts, return_inverse=True)
    whole = math.lgamma(total + 1) - math.lgamma(total - n + 1)
    absent = [
        0.0 if total - c < n else
        math.exp(math.lgamma(total - c + 1) - math.lgamma(total - c - n + 1) - whole)
        for c in values.tolist()
    ]  # fmt: skip
    present: Floats = np.where(values > 0, 1.0 - np.array(absent), 0.0)
    return present[index]


def zipf_tables(n_rows: int | Sequence[int], exponent: float, seed: int | None) -> list[Floats]:
    """Return the relative frequencies of rows by Zipf's law; see `pipesim.Keys.zipf`."""
    power = number(exponent)
    if power is None or not 0 <= power < math.inf:
        raise ArgumentError(f"exponent must be finite and >= 0, got {exponent!r}")
    generator = None if seed is None else np.random.default_rng(check_count("seed", seed, 0))
    tables = []
    for rows in row_counts(n_rows):
        table = np.arange(1, rows + 1, dtype=np.float64) ** -power
        tables.append(table if generator is None else generator.permutation(table))
    return tables


def count_keys(keys: ArrayLike, sizes: Sequence[int], *, several: bool) -> list[Ints]:
    """Return how often each row occurs among ``keys``, one array a table.

    With ``several`` tables, the last dimension of ``keys`` is the table; see
    `pipesim.Keys.counted`.
    """
    try:
        array = np.asarray(keys)
    except ValueError:  # a ragged sequence
        array = np.empty(0)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"keys must be an array of integers, got {keys!r:.60}")
    if several and array.shape[-1:] != (len(sizes),):
        raise ArgumentError(
            f"keys must have shape (..., {len(sizes)}), a column a table, got {array.shape}"
        )
    counts = []
    columns = array.reshape(-1, len(sizes)).T
    for table, (column, rows) in enumerate(zip(columns, sizes, strict=True)):
        for wrong in column[(column < 0) | (column >= rows)][:1].tolist():
            raise ArgumentError(
                f"key {wrong} is no row of table {table}, whose keys are 0 to {rows - 1}"
            )
        counts.append(np.bincount(column, minlength=rows))
    return counts


def exact_count(name: str, value: object, minimum: int = 1) -> int:
    """Return a count, checked to be one that a float holds exactly."""
    count = check_count(name, value, minimum)
    if count > _MOST:
        raise ArgumentError(f"{name} must be at most {_MOST}, got {count:.3e}" if count < 10**300
                            else f"{name} must be at most {_MOST}")  # fmt: skip
    return count


def row_counts(n_rows: int | Sequence[int]) -> list[int]:
    """Return the number of rows of each table."""
    several = isinstance(n_rows, Sequence) and not isinstance(n_rows, (str, bytes))
    values: Sequence[Any] = n_rows if several else [n_rows]  # type: ignore[assignment]
    if not values:
        raise ArgumentError("n_rows is empty; give the rows of at least one table")
    name = "n_rows[{}]" if several else "n_rows"
    sizes = [exact_count(name.format(i), rows) for i, rows in enumerate(values)]
    check_memory(f"a histogram of {sum(sizes):,} rows", 40 * sum(sizes), "give fewer rows")
    return sizes


def counts_per_table(name: str, values: int | Sequence[int], n_tables: int) -> tuple[int, ...]:
    """Return one whole number a table, from that or from one number for all tables."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return (exact_count(name, values),) * n_tables
    if len(values) != n_tables:
        raise ArgumentError(
            f"{name} has {len(values)} values for {n_tables} tables; give one, or one a table"
        )
    return tuple(exact_count(f"{name}[{i}]", value) for i, value in enumerate(values))


def checked_tables(name: str, values: Any) -> list[Floats]:
    """Return one array of finite numbers >= 0 a table, from that or from the array of one table."""
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

"""`CSR`: rows of different lengths in two arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.jit import kernel

#: Arrays of task ids and counts: 32 bits if they suffice, to halve the bytes that engines read.
Ints = NDArray[Any]


def ids_dtype(n: int) -> type[np.signedinteger[Any]]:
    """Return the integer type for numbers up to ``n``."""
    return np.int32 if n < 2**31 else np.int64


@dataclass(frozen=True)
class CSR:
    """Compressed rows: row ``i`` is ``values[ptr[i]:ptr[i + 1]]``."""

    ptr: Ints
    values: Ints

    @classmethod
    def group(cls, labels: Ints, n_rows: int, row_of: Ints | None = None) -> CSR:
        """Return, for each row, the positions in ``labels`` that hold its number, in order.

        With ``row_of``, the row of a label is ``row_of[label]``.
        """
        dtype = ids_dtype(len(labels))
        ptr, values = np.zeros(n_rows + 1, dtype), np.empty(len(labels), dtype)
        _group(labels, np.arange(n_rows) if row_of is None else row_of, ptr, values)
        return cls(ptr, values)

    @classmethod
    def from_pairs(cls, rows: Ints, values: Ints, n_rows: int) -> CSR:
        """Group ``values`` by ``rows``, keeping their order within a row.

        ``values`` are ids. Their type becomes that of `ids_dtype`, for which engines are compiled.
        """
        grouped = cls.group(rows, n_rows)
        dtype = ids_dtype(int(values.max(initial=0)))
        return cls(grouped.ptr, values[grouped.values].astype(dtype, copy=False))

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.ptr[row] : self.ptr[row + 1]]

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def rows(self) -> Ints:
        """Row of each value."""
        rows: Ints = np.repeat(np.arange(len(self)), np.diff(self.ptr))
        return rows

    def transpose(self) -> CSR:
        """Exchange rows and values; values are numbers of rows."""
        return CSR.from_pairs(self.values, self.rows, len(self))

    def gather(self, rows: Ints) -> Ints:
        """Return the values of some rows, concatenated in the order of ``rows``."""
        counts = self.ptr[rows + 1] - self.ptr[rows]
        first = np.repeat(self.ptr[rows] - np.cumsum(counts) + counts, counts)
        values: Ints = self.values[first + np.arange(counts.sum())]
        return values


def count(labels: Ints, n_labels: int) -> NDArray[np.int64]:
    """Return the number of times that each label occurs in ``labels``."""
    counts = np.zeros(n_labels, dtype=np.int64)
    _count(labels, counts)
    return counts


def bincount(rows: Ints, values: NDArray[np.float64], n_rows: int) -> NDArray[np.float64]:
    """Return the sum of the ``values`` of each row; shape ``(n_rows,)``."""
    return np.bincount(rows, values, minlength=n_rows).astype(np.float64)


@kernel()
def _count(labels: Ints, counts: Ints) -> None:
    for k in range(len(labels)):
        counts[labels[k]] += 1


@kernel()
def _group(labels: Ints, row_of: Ints, ptr: Ints, values: Ints) -> None:
    """Sort positions by counting; ``ptr`` must contain zeros."""
    n_rows = len(ptr) - 1
    for k in range(len(labels)):
        ptr[row_of[labels[k]] + 1] += 1
    for row in range(n_rows):
        ptr[row + 1] += ptr[row]
    for k in range(len(labels)):
        row = row_of[labels[k]]
        values[ptr[row]] = k
        ptr[row] += 1
    for row in range(n_rows, 0, -1):  # ``ptr[row]`` is now the end of the row: shift
        ptr[row] = ptr[row - 1]
    ptr[0] = 0

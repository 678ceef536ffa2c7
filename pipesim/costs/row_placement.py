"""Owners of the rows of sharded tables: ``"modulo"``, ``"hash"`` or ``"frequency"``.

Each of n ranks has ``ceil(rows / n)`` places for a table's rows. Row ``key`` of a table has

=============  =====================================================================================
modulo         owner ``key % n``, place ``key // n``
hash           ``h = (a * key + b) % m``, owner ``h // (m / n)``, place ``h % (m / n)``
frequency      a table of owners and places; see `assign_rows`
=============  =====================================================================================

- ``m`` is ``n`` times the places of a rank.
- ``a`` is the first number, from ``m`` over the golden ratio on, that is coprime to ``m``, so that
  two rows never share a place.
- ``b`` differs from table to table.

Multiplicative hashing: Knuth, The Art of Computer Programming 3, section 6.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

PLACEMENTS = ("modulo", "hash", "frequency")
#: Most rows of a table that 64-bit integers can hash; see `multiply_modulo`.
MOST_HASHED = 1 << 39
#: 2**64 over the golden ratio, and over the plastic number.
_GOLDEN, _PLASTIC = 0x9E3779B97F4A7C15, 0xC13FA9A902A6328F
_LOW_BITS = 16
Array = TypeVar("Array")


class RowHash(NamedTuple):
    """The hash of a table: ``h = (factor * key + offset) % size``.

    Attributes
    ----------
    factor, offset, size
        The ``a``, ``b`` and ``m`` of the formula; ``size`` is a multiple of the number of ranks.
    inverse
        Inverse of ``factor`` modulo ``size``: ``key = inverse * (h - offset) % size``.
    """

    factor: int
    offset: int
    size: int
    inverse: int


def row_hash(table: int, n_rows: int, n_ranks: int) -> RowHash:
    """Return the hash of a table's rows."""
    size = -(-n_rows // n_ranks) * n_ranks
    if size > MOST_HASHED:
        raise ArgumentError(
            f'placement="hash" takes tables of at most {MOST_HASHED} rows, and table {table} has '
            f'{n_rows}; take placement="modulo"'
        )
    factor = max(1, size * _GOLDEN >> 64)
    while math.gcd(factor, size) > 1:
        factor += 1
    offset = size * (table * _PLASTIC % (1 << 64)) >> 64
    return RowHash(factor, offset, size, pow(factor, -1, size) if size > 1 else 0)


def multiply_modulo(x: Any, factor: Any, size: Any) -> Any:
    """Return ``x * factor % size`` without overflow, for arrays or tensors of int64 below 2**39."""
    high, low = factor >> _LOW_BITS, factor & ((1 << _LOW_BITS) - 1)
    return ((x * high % size << _LOW_BITS) + x * low) % size


def row_owners(
    placement: str,
    n_rows: Sequence[int],
    n_ranks: int,
    loads: Sequence[NDArray[np.float64]] | None = None,
) -> list[Ints]:
    """Return the rank that owns each row of each table.

    ``loads`` are the argument of `assign_rows`; only ``"frequency"`` needs them.
    """
    if placement == "frequency":
        assert loads is not None
        return assign_rows(loads, n_ranks)[0]
    owners = []
    for table, rows in enumerate(n_rows):
        keys = np.arange(rows)
        if placement == "modulo":
            owners.append(keys % n_ranks)
        else:
            terms = row_hash(table, rows, n_ranks)
            hashed = (multiply_modulo(keys, terms.factor, terms.size) + terms.offset) % terms.size
            owners.append(hashed // (terms.size // n_ranks))
    return owners


def assign_rows(
    loads: Sequence[NDArray[np.float64]], n_ranks: int
) -> tuple[list[Ints], list[Ints]]:
    """Assign the rows of all tables to ranks, such that the sums of their loads are about even.

    Rows come in descending order of load; among equal loads, by table and then by row. Each row
    goes to the rank with the least load so far among those with a free place for its table; a tie
    goes to the smaller rank. This is "longest processing time first": Graham, "Bounds on
    multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969. A rank's places of a table
    are filled in the same order.

    Parameters
    ----------
    loads
        For each table, how often each of its rows is sent; shape ``(rows,)``.
    n_ranks
        Number of ranks.

    Returns
    -------
    owners, places
        For each table, the rank of each row, and its place on that rank; shape ``(rows,)``.
    """
    sizes = [len(table) for table in loads]
    load = np.concatenate(loads).astype(np.float64)
    table = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(-load, kind="stable")
    capacity = np.repeat([[-(-rows // n_ranks)] for rows in sizes], n_ranks, axis=1)
    owner, place = np.empty(len(load), np.int64), np.empty(len(load), np.int64)
    used, rank_load = np.zeros_like(capacity), np.zeros(n_ranks)
    _assign(order, load, table, capacity, used, rank_load, owner, place)
    ends = np.cumsum(sizes)[:-1]
    return np.split(owner, ends), np.split(place, ends)


@kernel()
def _assign(
    order: Ints,
    load: NDArray[np.float64],
    table: Ints,
    capacity: Ints,
    used: Ints,
    rank_load: NDArray[np.float64],
    owner: Ints,
    place: Ints,
) -> None:
    """Fill ``owner`` and ``place``; ``used`` and ``rank_load`` must be zeros before."""
    for k in range(len(order)):
        row = order[k]
        t = table[row]
        best = -1
        for rank in range(len(rank_load)):
            if used[t, rank] < capacity[t, rank] and (
                best < 0 or rank_load[rank] < rank_load[best]
            ):
                best = rank
        owner[row], place[row] = best, used[t, best]
        used[t, best] += 1
        rank_load[best] += load[row]

"""Rank and place of each row of sharded tables, and the rows' initial values.

Each rank has equally many places for the rows of a table. `pipesim.costs.keys` gives the
rank and place of each row. The places of a table follow those of the table before; some places may
be unused. A key thus has one number, its address: ``owner * rows_per_rank + row``. By modulo::

    n = 2, tables of 5 and 2 rows      rank 0            rank 1
                                       0: key 0 of 0     4: key 1 of 0
                                       1: key 2 of 0     5: key 3 of 0
                                       2: key 4 of 0     6: unused
                                       3: key 0 of 1     7: key 1 of 1
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipesim.costs.keys import assign_rows, multiply_modulo, row_hash
from pipesim.errors import ArgumentError, ArgumentTypeError

#: Largest number of elements drawn at once, and of rows copied at once.
_AT_ONCE = 1 << 20


class RowLayout:
    """The owner and place of each row of some tables.

    Parameters
    ----------
    n_rows, n_ranks
        Number of rows of each table, and of ranks that share them.
    several
        Whether keys have a dimension of tables.
    placement
        As of `pipeexec.ShardedEmbedding`.
    loads
        For each table, how often each row is sent; ``"frequency"`` assigns rows by it.

    Attributes
    ----------
    rows_per_rank
        Places of a rank for rows of all tables, unused places included.
    n_addresses
        Number of addresses, and thus the first number that is no address.
    dtype
        Type of addresses: int32 if they fit, else int64.
    """

    def __init__(
        self,
        n_rows: Sequence[int],
        n_ranks: int,
        *,
        several: bool,
        placement: str = "modulo",
        loads: Sequence[NDArray[np.float64]] | None = None,
    ) -> None:
        self.n_rows, self.n_ranks, self.several = tuple(n_rows), n_ranks, several
        self.placement = placement
        self._places = [-(-rows // n_ranks) for rows in self.n_rows]
        *self._starts, self.rows_per_rank = accumulate(self._places, initial=0)
        self.n_addresses = n_ranks * self.rows_per_rank
        self.dtype = (
            torch.int32 if self.n_addresses <= torch.iinfo(torch.int32).max else torch.int64
        )
        self._columns: dict[torch.device, tuple[Tensor, ...]] = {}
        self._hashes = [
            row_hash(table, rows, n_ranks) for table, rows in enumerate(self.n_rows)
        ] if placement == "hash" else []  # fmt: skip
        self._table = torch.empty(0, dtype=self.dtype)
        if placement == "frequency":
            assert loads is not None
            tables = zip(*assign_rows(loads, n_ranks), self._starts, strict=True)
            addresses = [
                owner * self.rows_per_rank + start + place for owner, place, start in tables
            ]
            self._table = torch.from_numpy(np.concatenate(addresses)).to(self.dtype)

    @property
    def digest(self) -> int:
        """A hash of the addresses of ``"frequency"``; 0 for placements by a formula."""
        if not len(self._table):
            return 0
        return int(hashlib.sha256(self._table.numpy().tobytes()).hexdigest()[:15], 16)

    def shards(self, rank: int) -> Iterator[tuple[int, slice | Tensor, Tensor]]:
        """Yield the rows of a rank in parts: number of the table, rows of the rank, and their keys.

        A part has at most 2**20 rows.
        """
        for table, (start, rows) in enumerate(zip(self._starts, self.n_rows, strict=True)):
            places = self._places[table]
            first_key = sum(self.n_rows[:table])
            size = rows if self.placement == "frequency" else places
            for begin in range(0, size, _AT_ONCE):
                part = torch.arange(begin, min(begin + _AT_ONCE, size))
                if self.placement == "modulo":
                    keys = part * self.n_ranks + rank
                    keys = keys[keys < rows]
                    yield table, slice(start + begin, start + begin + len(keys)), keys
                elif self.placement == "hash":
                    terms = self._hashes[table]
                    hashed = (part + rank * places - terms.offset) % terms.size
                    keys = multiply_modulo(hashed, terms.inverse, terms.size)
                    used = keys < rows
                    yield table, start + part[used], keys[used]
                else:
                    first = first_key + begin
                    addresses = self._table[first : first + len(part)].long()
                    own = addresses // self.rows_per_rank == rank
                    yield table, addresses[own] - rank * self.rows_per_rank, part[own]

    def check_form(self, keys: object, device: torch.device, *, bags: bool) -> None:
        """Raise `ArgumentError` unless keys are integers on ``device``, in an allowed shape."""
        if not isinstance(keys, Tensor) or keys.dtype not in (torch.int32, torch.int64):
            got = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
            raise ArgumentTypeError(f"keys must be a tensor of int32 or int64, got {got}")
        if keys.device != device:
            raise ArgumentError(
                f"keys are on {keys.device}, the rows on {device}; move one of them to the other"
            )
        dimensions = ["tables"] * self.several + ["bag"] * bags
        wanted = f"(..., {', '.join(dimensions)})"
        if keys.dim() < len(dimensions):
            raise ArgumentError(f"keys must have shape {wanted}, got {tuple(keys.shape)}")
        if self.several and keys.shape[-len(dimensions)] != len(self.n_rows):
            raise ArgumentError(
                f"keys must have shape {wanted}, with {len(self.n_rows)} tables, got "
                f"{tuple(keys.shape)}"
            )

    def outside(self, keys: Tensor, *, bags: bool) -> Tensor:
        """Return a mask of the keys that are no rows of their tables."""
        rows, *_ = self._by_key(keys.device, bags=bags)
        return (keys < 0) | (keys >= rows)

    def addresses(self, keys: Tensor, *, bags: bool) -> Tensor:
        """Return the address of each key; for a key outside its table, any number."""
        if self.placement == "modulo":
            _, starts = self._by_key(keys.device, bags=bags)
            numbers = keys.to(self.dtype)
            if self.several:
                numbers = numbers + starts.to(self.dtype)
            row = numbers.div(self.n_ranks, rounding_mode="floor")
            owner = torch.add(numbers, row, alpha=-self.n_ranks)
            return torch.add(row, owner, alpha=self.rows_per_rank)
        if self.placement == "frequency":
            rows, first, table = self._by_key(keys.device, bags=bags)
            clamped = torch.minimum(keys.long().clamp(min=0), rows - 1)
            return table[clamped + first]
        _, starts, places, factor, offset, size = self._by_key(keys.device, bags=bags)
        hashed = (multiply_modulo(keys.long(), factor, size) + offset) % size
        owner = hashed.div(places, rounding_mode="floor")
        # The places of a table on a rank begin at starts; they are for the hashes from
        # owner * places on.
        address: Tensor = owner * (self.rows_per_rank - places) + hashed + starts
        return address.to(self.dtype)

    def explain(self, keys: Tensor, bad: Tensor, *, bags: bool) -> ArgumentError:
        """Return the error that names the first key of the mask ``bad``."""
        position = tuple(bad.nonzero()[0].tolist())
        table = position[-1 - bags] if self.several else 0
        return ArgumentError(
            f"key {int(keys[position])} at {position} of the keys is no row of table {table}, "
            f"whose keys are 0 to {self.n_rows[table] - 1}; no key was sent"
        )

    def _by_key(self, device: torch.device, *, bags: bool) -> tuple[Tensor, ...]:
        """Return the number of rows of each key's table, and the numbers that give its address.

        - ``"modulo"``: the number of the table's first key.
        - ``"frequency"``: the number of the table's first key, and the addresses of all keys.
        - ``"hash"``: the first place of the table, its places a rank, and the terms of the hash.
        """
        if device not in self._columns:
            columns: list[Sequence[int]]
            if self.placement == "modulo":
                columns = [[self.n_ranks * start for start in self._starts]]
            elif self.placement == "frequency":
                columns = [list(accumulate(self.n_rows, initial=0))[:-1]]
            else:
                terms = [list(column) for column in zip(*self._hashes, strict=True)]
                columns = [self._starts, self._places, *terms[:3]]
            self._columns[device] = tuple(
                torch.tensor(column, device=device) for column in (self.n_rows, *columns)
            )
        by_table = self._columns[device]
        if bags and self.several:
            by_table = tuple(column[:, None] for column in by_table)
        if self.placement == "frequency":
            if self._table.device != device:
                self._table = self._table.to(device)
            return *by_table, self._table
        return by_table

    def draw(self, weight: Tensor, rank: int, seed: int) -> None:
        """Fill a rank's rows with normal values that do not depend on the number of ranks."""
        weight.zero_()
        n_at_once = max(1, _AT_ONCE // weight.shape[1])
        for table, place, keys in self.shards(rank):
            columns = torch.arange(weight.shape[1], device=weight.device)
            origin = _mixed(torch.tensor(seed * 65_521 + table, device=weight.device))
            for start in range(0, len(keys), n_at_once):
                numbers = keys[start : start + n_at_once].to(weight.device)
                counters = numbers[:, None] * weight.shape[1] + columns
                rows = place if isinstance(place, Tensor) else torch.arange(place.start, place.stop)
                rows = rows[start : start + n_at_once].to(weight.device)
                weight[rows] = _normal(_mixed(counters + origin)).to(weight.dtype)


def _mixed(x: Tensor) -> Tensor:
    """Return 64 random bits for each number: the last steps of SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def _normal(bits: Tensor) -> Tensor:
    """Return a normal value for each 64 bits (Box and Muller, 1958)."""
    radius = ((bits >> 32) & 0xFFFFFFFF).add(1).float().mul(2.0**-32).log().mul(-2).sqrt()
    angle = (bits & 0xFFFFFFFF).float().mul(2 * math.pi * 2.0**-32)
    return radius * angle.cos()


def row_state(layout: RowLayout, rank: int, n_ranks: int) -> Tensor:
    """Return the rank, the number of ranks, the rows of each table, and a code of the placement.

    Codes are negative: none for ``"modulo"``, -1 for ``"hash"``, -2 and a digest for
    ``"frequency"``.
    """
    codes = {"modulo": [], "hash": [-1], "frequency": [-2, layout.digest]}
    return torch.tensor([rank, n_ranks, *layout.n_rows, *codes[layout.placement]])


def check_row_state(state: Tensor, layout: RowLayout, rank: int, n_ranks: int) -> None:
    """Raise `ArgumentError` unless a state has the rows of this rank."""
    if state.tolist() == row_state(layout, rank, n_ranks).tolist():
        return
    state_rank, n_state_ranks, *rows = state.tolist()
    end = next((i for i, x in enumerate(rows) if x < 0), len(rows))
    placement = {0: "modulo", -1: "hash", -2: "frequency"}.get(sum(rows[end:][:1]), "?")
    raise ArgumentError(
        f"a state of rank {state_rank} of {n_state_ranks}, tables of {rows[:end]} rows"
        f"{f' placed by {placement}' if rows[end:] or layout.placement != 'modulo' else ''}, "
        f"cannot be loaded into rank {rank} of {n_ranks}, tables of {list(layout.n_rows)} rows "
        f"placed by {layout.placement}; keep full_weight() instead, and load it by from_full"
    )


def row_numbers(layout: RowLayout, rank: int) -> Tensor:
    """Return the number of the row at each place of a rank; -1 for an unused place.

    A row's number is its key, plus the rows of the tables before its own.
    """
    numbers = torch.full((layout.rows_per_rank,), -1)
    for table, place, keys in layout.shards(rank):
        numbers[place] = keys + sum(layout.n_rows[:table])
    return numbers

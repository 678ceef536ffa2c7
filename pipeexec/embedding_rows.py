"""Where the rows of sharded tables lie, and what they hold at first.

Row ``key`` of a table belongs to rank ``key % n``, which has it at ``key // n`` of its shard of
that table. A rank's shards lie one behind the other, and those of a table are equally long on all
ranks, though the last row of some may be nobody's. So a key has one number, its address, that says
all: ``owner * rows_per_rank + row``::

    n = 2, tables of 5 and 2 rows      rank 0            rank 1
                                       0: key 0 of 0     4: key 1 of 0
                                       1: key 2 of 0     5: key 3 of 0
                                       2: key 4 of 0     6: nobody's
                                       3: key 0 of 1     7: key 1 of 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pipesim.errors import ArgumentError, ArgumentTypeError

__all__ = ["Layout"]

#: Elements that are drawn at once.
_DRAWN = 1 << 20


class Layout:
    """Which rank has which rows of some tables, and where.

    Parameters
    ----------
    n_rows
        Rows of each table.
    n_ranks
        Over how many ranks they are spread.
    several
        Whether keys have a dimension of tables.

    Attributes
    ----------
    rows_per_rank
        Rows of all tables that a rank has, nobody's included.
    beyond
        The first number that is no address.
    dtype
        Of addresses: int32 where they fit.
    """

    def __init__(self, n_rows: Sequence[int], n_ranks: int, *, several: bool) -> None:
        self.n_rows, self.n_ranks, self.several = tuple(n_rows), n_ranks, several
        *self._starts, self.rows_per_rank = accumulate(
            (-(-rows // n_ranks) for rows in self.n_rows), initial=0
        )
        self.beyond = n_ranks * self.rows_per_rank
        self.dtype = torch.int32 if self.beyond <= torch.iinfo(torch.int32).max else torch.int64
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def shards(self, rank: int) -> Iterator[tuple[int, slice, range]]:
        """Return each table's number, its part of a rank's rows, and the keys of that part."""
        for table, (start, rows) in enumerate(zip(self._starts, self.n_rows, strict=True)):
            keys = range(rank, rows, self.n_ranks)
            yield table, slice(start, start + len(keys)), keys

    def check_form(self, keys: object, device: torch.device, *, bags: bool) -> None:
        """Raise unless keys are integers, on this device, in a shape that the tables allow."""
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
        """Return where keys are no rows of their tables."""
        _, rows = self._by_key(keys.device, bags=bags)
        return (keys < 0) | (keys >= rows)

    def addresses(self, keys: Tensor, *, bags: bool) -> Tensor:
        """Return the address of each key; that of one outside its table means nothing."""
        starts, _ = self._by_key(keys.device, bags=bags)
        numbers = keys.to(self.dtype)
        if self.several:
            numbers = numbers + starts.to(self.dtype)
        row = numbers.div(self.n_ranks, rounding_mode="floor")
        owner = torch.add(numbers, row, alpha=-self.n_ranks)
        return torch.add(row, owner, alpha=self.rows_per_rank)

    def explain(self, keys: Tensor, bad: Tensor, *, bags: bool) -> ArgumentError:
        """Return the error that names the first bad key."""
        position = tuple(bad.nonzero()[0].tolist())
        table = position[-1 - bags] if self.several else 0
        return ArgumentError(
            f"key {int(keys[position])} at {position} of the keys is no row of table {table}, "
            f"whose keys are 0 to {self.n_rows[table] - 1}; no key was sent"
        )

    def _by_key(self, device: torch.device, *, bags: bool) -> tuple[Tensor, Tensor]:
        """Return what keys of each table are counted from, and how many there are."""
        if device not in self._on:
            starts = [self.n_ranks * start for start in self._starts]
            self._on[device] = (
                torch.tensor(starts, device=device), torch.tensor(self.n_rows, device=device)
            )  # fmt: skip
        starts_of, rows_of = self._on[device]
        if bags and self.several:
            return starts_of[:, None], rows_of[:, None]
        return starts_of, rows_of

    def draw(self, weight: Tensor, rank: int, seed: int) -> None:
        """Fill a rank's rows with normal values, which do not depend on the number of ranks."""
        weight.zero_()
        at_once = max(1, _DRAWN // weight.shape[1])
        for table, place, keys in self.shards(rank):
            rows = weight[place]
            for start in range(0, len(keys), at_once):
                part = keys[start : start + at_once]
                numbers = torch.arange(part.start, part.stop, part.step, device=weight.device)
                columns = torch.arange(weight.shape[1], device=weight.device)
                counters = numbers[:, None] * weight.shape[1] + columns
                origin = _mixed(torch.tensor(seed * 65_521 + table, device=weight.device))
                rows[start : start + at_once] = _normal(_mixed(counters + origin))


def _mixed(x: Tensor) -> Tensor:
    """Return 64 random bits for each number: the last steps of SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def _normal(bits: Tensor) -> Tensor:
    """Return a normal value for each 64 bits, by Box and Muller."""
    radius = ((bits >> 32) & 0xFFFFFFFF).add(1).float().mul(2.0**-32).log().mul(-2).sqrt()
    angle = (bits & 0xFFFFFFFF).float().mul(2 * math.pi * 2.0**-32)
    return radius * angle.cos()

"""`Keys`: how often each row of sharded tables is asked for, and what their exchanges send."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.costs.key_tables import (
    bounded,
    expected_maximum,
    per_table,
    row_counts,
    tables_of,
    without_replacement,
)
from pipesim.costs.row_placement import PLACEMENTS, row_owners
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_flag,
    check_name,
    number,
)
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

__all__ = ["Keys"]

Floats = NDArray[np.float64]
#: Bytes of a count, of an int32 key and of a float32.
_COUNT, _KEY, _NUMBER = 8, 4, 4


class Keys:
    """A histogram of the keys that each rank asks sharded tables for, in one micro-batch.

    Every rank draws ``n_keys`` keys of each table, independently of the other ranks. From that
    follow the expected sizes of the exchanges of a sharded embedding, pair by pair.

    Parameters
    ----------
    frequencies
        How often each row is asked for, relative to the others of its table; an array, or a list of
        one a table.
    n_keys
        Keys that a rank draws from each table in a micro-batch: one number for all tables, or one
        a table.

    Attributes
    ----------
    frequencies
        Share of each row in the keys of its table; one array a table, which sums to 1.
    n_keys
        One number a table.

    Raises
    ------
    ArgumentError
        For frequencies that are negative, not finite, or 0 for all rows of a table, and counts that
        are no whole numbers of at least 1.

    Examples
    --------
    >>> keys = Keys.zipf(1000, n_keys=500, exponent=1.2)
    >>> keys.load(4, "modulo", unique=False) > keys.load(4, "frequency", unique=False)
    True
    """

    def __init__(self, frequencies: ArrayLike, n_keys: int | Sequence[int]) -> None:
        tables = tables_of("frequencies", frequencies)
        self.frequencies = tuple(table / table.sum() for table in tables)
        self.n_keys = per_table("n_keys", n_keys, len(tables))
        self._counts: tuple[Floats, ...] | None = None

    @classmethod
    def zipf(
        cls,
        n_rows: int | Sequence[int],
        n_keys: int | Sequence[int],
        *,
        exponent: float = 1.0,
        seed: int | None = 0,
    ) -> Keys:
        """Return keys by Zipf's law: the k-th most frequent row has a share of ``k ** -exponent``.

        Parameters
        ----------
        n_rows
            Rows of the table, or of each of several.
        n_keys
            As for the class.
        exponent
            0 is evenly.
        seed
            Draws which rows are frequent. None: row 0 is the most frequent, then row 1.

        Raises
        ------
        ArgumentError
            For an exponent that is negative or not finite, and counts that are none.
        """
        power = number(exponent)
        if power is None or not 0 <= power < math.inf:
            raise ArgumentError(f"exponent must be finite and >= 0, got {exponent!r}")
        tables = []
        generator = None if seed is None else np.random.default_rng(check_count("seed", seed, 0))
        for rows in row_counts(n_rows):
            table = np.arange(1, rows + 1, dtype=np.float64) ** -power
            tables.append(table if generator is None else generator.permutation(table))
        return cls(tables, n_keys)

    @classmethod
    def uniform(cls, n_rows: int | Sequence[int], n_keys: int | Sequence[int]) -> Keys:
        """Return keys that are drawn from all rows of a table alike; see `zipf`."""
        return cls([np.ones(rows) for rows in row_counts(n_rows)], n_keys)

    @classmethod
    def from_counts(cls, counts: ArrayLike, n_keys: int | Sequence[int] | None = None) -> Keys:
        """Return keys that are drawn from counted ones, each of them at most once.

        So that with as many ``n_keys`` as were counted, exactly the rows that occurred are asked
        for. `Keys` itself takes counts as frequencies, and draws as many keys as you say.

        Parameters
        ----------
        counts
            How often each row occurred; an array, or a list of one a table.
        n_keys
            As for the class; by default all that were counted, as of one rank's micro-batch.

        Raises
        ------
        ArgumentError
            For counts that are no whole numbers, and more ``n_keys`` than were counted.
        """
        tables = tables_of("counts", counts)
        for index, table in enumerate(tables):
            if (table != np.floor(table)).any():
                raise ArgumentError(
                    f"counts of table {index} must be whole numbers; give shares to pipesim.Keys"
                )
        sums = [int(table.sum()) for table in tables]
        made = cls(tables, sums if n_keys is None else n_keys)
        for index, (wanted, counted) in enumerate(zip(made.n_keys, sums, strict=True)):
            if wanted > counted:
                raise ArgumentError(
                    f"n_keys of table {index} is {wanted}, but {counted} keys were counted; give "
                    "at most as many, or take the counts as frequencies: pipesim.Keys(counts, "
                    f"{wanted})"
                )
        made._counts = tuple(tables)
        return made

    @classmethod
    def counted(
        cls,
        keys: ArrayLike,
        n_rows: int | Sequence[int],
        n_keys: int | Sequence[int] | None = None,
    ) -> Keys:
        """Return the keys of a batch, counted; see `from_counts`.

        Parameters
        ----------
        keys
            Integers of any shape; of several tables ``(..., n_tables)``.
        n_rows, n_keys
            Rows of the table, or of each of several; keys of a rank's micro-batch, by default all.

        Raises
        ------
        ArgumentError
            For keys that are no rows, naming the first, and for a batch without keys.
        """
        sizes = row_counts(n_rows)
        several = isinstance(n_rows, Sequence)
        try:
            given = np.asarray(keys)
        except ValueError:  # a ragged sequence
            given = np.empty(0)
        if given.dtype.kind not in "iu":
            raise ArgumentTypeError(f"keys must be an array of integers, got {keys!r:.60}")
        if several and given.shape[-1:] != (len(sizes),):
            raise ArgumentError(
                f"keys must have shape (..., {len(sizes)}), a column a table, got {given.shape}"
            )
        columns = given.reshape(-1, len(sizes)).T
        counts = []
        for table, (column, rows) in enumerate(zip(columns, sizes, strict=True)):
            for wrong in column[(column < 0) | (column >= rows)][:1].tolist():
                raise ArgumentError(
                    f"key {wrong} is no row of table {table}, whose keys are 0 to {rows - 1}"
                )
            counts.append(np.bincount(column, minlength=rows))
        return cls.from_counts(counts, n_keys)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(map(len, self.frequencies))

    def __repr__(self) -> str:
        return f"<Keys: {list(self.n_keys)} keys of tables of {list(self.n_rows)} rows>"

    def loads(self, *, unique: bool = True, n_microbatches: int = 1) -> list[Floats]:
        """Return how often a rank sends each row's key on average, one array a table.

        Parameters
        ----------
        unique
            Whether a rank sends each of its keys once: the probability that the row is among its
            ``n`` keys, ``1 - (1 - p) ** n``; of counted keys, which are drawn without replacement,
            ``1 - C(N - c, n) / C(N, n)`` (Hurlbert, Ecology 52(4), 1971). Otherwise every duplicate
            is sent: ``n * p``.
        n_microbatches
            Micro-batches whose keys are made unique together.

        Raises
        ------
        ArgumentError
            For more micro-batches than there are counted keys for, and other wrong arguments.
        """
        check_flag("unique", unique)
        times = bounded("n_microbatches", n_microbatches)
        found = []
        for table, (share, one) in enumerate(zip(self.frequencies, self.n_keys, strict=True)):
            n = one * times
            if self._counts is not None and n > (total := int(self._counts[table].sum())):
                raise ArgumentError(
                    f"n_microbatches={times} draw {n} keys from table {table}, but {total} were "
                    "counted; count more, or give n_keys of one micro-batch"
                )
            if not unique:
                found.append(share * n)
            elif self._counts is not None:
                found.append(without_replacement(self._counts[table], n))
            else:
                with np.errstate(divide="ignore"):
                    found.append(-np.expm1(n * np.log1p(-np.minimum(share, 1.0))))
        return found

    def owners(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> list[Ints]:
        """Return the rank that owns each row, one array a table; shape ``(rows,)``.

        Parameters
        ----------
        n_ranks
            Number of ranks that share the tables.
        placement
            ``"modulo"``: row ``key`` is on rank ``key % n_ranks``. ``"hash"``: by a fixed mixing.
            ``"frequency"``: rows are dealt by descending `loads`, each to the rank with the least
            load so far. `pipesim.costs.row_placement` has the formulas.
        unique
            As in `loads`, which ``"frequency"`` deals by.

        Raises
        ------
        ArgumentError
            For wrong arguments.
        """
        n_ranks = bounded("n_ranks", n_ranks)
        check_memory(f"bytes of n_ranks={n_ranks:,} pairs", 8 * n_ranks**2, "give fewer ranks")
        check_flag("unique", unique)
        check_name("placement", placement, PLACEMENTS)
        loads = self.loads(unique=unique) if placement == "frequency" else None
        return row_owners(placement, self.n_rows, n_ranks, loads)

    def sent(
        self,
        n_ranks: int,
        placement: str = "modulo",
        *,
        unique: bool = True,
        n_microbatches: int = 1,
    ) -> Floats:
        """Return how many keys each rank sends each owner, on average.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.
        n_microbatches
            As for `loads`.

        Returns
        -------
        numpy.ndarray
            Shape ``(n_ranks, n_ranks)``: row ``i`` is what rank ``i`` sends, column ``j`` what
            rank ``j`` receives. The diagonal stays in its process.
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(unique=unique, n_microbatches=n_microbatches)
        return np.tile(_of_owners(owners, loads, n_ranks), (n_ranks, 1))

    def load(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> float:
        """Return the keys that the busiest owner receives on average, over the mean of all owners.

        Those of one micro-batch vary around the average: `busiest` is a little more.
        """
        received = self.sent(n_ranks, placement, unique=unique).sum(axis=0)
        return float(received.max() / received.mean())

    def busiest(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> float:
        """Return the most keys that an owner receives, over the mean of all owners.

        The average over micro-batches, in each of which another owner may be the busiest, as `load`
        is not: received keys are taken for normal and independent, with the variance of draws
        (Poisson's of duplicates, ``p * (1 - p)`` of a row that is sent with probability p).

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(unique=unique)
        mean = n_ranks * _of_owners(owners, loads, n_ranks)
        spread = [load * (1 - load) for load in loads] if unique else loads
        deviation = np.sqrt(n_ranks * _of_owners(owners, spread, n_ranks))
        return expected_maximum(mean, deviation) / float(mean.mean())

    def exchange_bytes(
        self,
        n_ranks: int,
        dim: int,
        *,
        placement: str = "modulo",
        unique: bool = True,
        n_microbatches: int = 1,
        key_itemsize: int = _KEY,
        itemsize: int = _NUMBER,
    ) -> dict[str, Floats]:
        """Return the bytes of each exchange, pair by pair, as `pipesim.Costs` takes them.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.
        dim
            Length of a vector.
        n_microbatches
            Micro-batches of a step, for ``"accumulated"``.
        key_itemsize, itemsize
            Bytes of a key, and of a number of a vector or gradient.

        Returns
        -------
        dict
            ``"counts"``, ``"keys"``, ``"vectors"`` and ``"gradients"`` of a micro-batch, and
            ``"accumulated"``: gradients of all micro-batches, each row once, whatever ``unique``
            says. Each of shape ``(n_ranks, n_ranks)``, from the row's rank to the column's.
        """
        one, key = (
            bounded("dim", dim) * bounded("itemsize", itemsize),
            bounded("key_itemsize", key_itemsize),
        )
        sent = self.sent(n_ranks, placement, unique=unique)
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(n_microbatches=n_microbatches)
        union = _of_owners(owners, loads, n_ranks)
        return {
            "counts": np.full((n_ranks, n_ranks), float(_COUNT)),
            "keys": key * sent,
            "vectors": one * sent.T,
            "gradients": one * sent,
            "accumulated": one * np.tile(union, (n_ranks, 1)),
        }

    def draw(self, seed: int) -> list[Ints]:
        """Return the keys of one rank's micro-batch, one array a table; shape ``(n_keys,)``.

        Raises
        ------
        ArgumentError
            For a seed that is no whole number of at least 0.
        """
        generator = np.random.default_rng(check_count("seed", seed, 0))
        found: list[Ints] = []
        for table, (share, n) in enumerate(zip(self.frequencies, self.n_keys, strict=True)):
            check_memory(f"n_keys={n} keys of table {table}", 8 * n, "draw fewer keys")
            if self._counts is None:
                found.append(generator.choice(len(share), n, p=share))
            else:
                counted = np.repeat(np.arange(len(share)), self._counts[table].astype(np.int64))
                found.append(generator.permutation(counted)[:n])
        return found


def _of_owners(owners: list[Ints], values: list[Floats], n_ranks: int) -> Floats:
    """Return the sum of the values of the rows that each rank owns."""
    total = np.zeros(n_ranks)
    for owner, value in zip(owners, values, strict=True):
        total += np.bincount(owner, value, minlength=n_ranks)
    return total

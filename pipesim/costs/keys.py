"""`Keys`: how often each row of sharded tables is requested, and the bytes of their exchanges.

One class, of which more than half is docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.costs.key_tables import (
    checked_tables,
    count_keys,
    counts_per_table,
    exact_count,
    expected_maximum,
    inclusion_probability,
    row_counts,
    zipf_tables,
)
from pipesim.costs.row_placement import PLACEMENTS, row_owners
from pipesim.errors import ArgumentError, check_count, check_flag, check_name
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory

Floats = NDArray[np.float64]
#: Bytes of a count, of an int32 key and of a float32.
_COUNT, _KEY, _NUMBER = 8, 4, 4


class Keys:
    """A histogram of the keys that each rank requests from sharded tables in one micro-batch.

    Every rank draws ``n_keys`` keys of each table, independently of the other ranks. This model
    gives the expected sizes of the exchanges of a sharded embedding, for each pair of ranks.

    Parameters
    ----------
    frequencies
        How often each row is requested, relative to the other rows of its table: an array, or a
        list of one array a table.
    n_keys
        Keys that a rank draws from each table in a micro-batch: one number for all tables, or one
        a table.

    Attributes
    ----------
    frequencies
        Share of each row in the keys of its table; one array a table, which sums to 1.
    n_keys
        One number a table.

    See Also
    --------
    pipesim.Costs : Costs of a stage; `exchange_bytes` is one of its fields.
    pipesim.Network.all_to_all : Seconds of an exchange.

    Examples
    --------
    >>> import pipesim as ps
    >>> keys = ps.Keys.zipf(1000, n_keys=500, exponent=1.2)
    >>> keys.load(4, "modulo", unique=False) > keys.load(4, "frequency", unique=False)
    True
    """

    def __init__(self, frequencies: ArrayLike, n_keys: int | Sequence[int]) -> None:
        tables = checked_tables("frequencies", frequencies)
        self.frequencies = tuple(table / table.sum() for table in tables)
        self.n_keys = counts_per_table("n_keys", n_keys, len(tables))
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
            Exponent of the law, at least 0; 1 by default, 0 for equal shares.
        seed
            Seed of the order of rows by frequency, 0 by default. None: row 0 is the most frequent,
            then row 1.

        Returns
        -------
        Keys
            Keys of tables with these rows.

        Raises
        ------
        CapacityError
            For more rows than fit in memory.

        Examples
        --------
        Shares are in the ratio of 1, 1/2, 1/3 and 1/4.

        >>> import pipesim as ps
        >>> ps.Keys.zipf(4, n_keys=100, seed=None).frequencies
        (array([0.48, 0.24, 0.16, 0.12]),)
        """
        return cls(zipf_tables(n_rows, exponent, seed), n_keys)

    @classmethod
    def uniform(cls, n_rows: int | Sequence[int], n_keys: int | Sequence[int]) -> Keys:
        """Return keys for which all rows of a table are equally frequent.

        Parameters
        ----------
        n_rows
            Rows of the table, or of each of several.
        n_keys
            As for the class.

        Returns
        -------
        Keys
            Keys of tables with these rows.

        Raises
        ------
        CapacityError
            For more rows than fit in memory.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Keys.uniform(4, n_keys=100).frequencies
        (array([0.25, 0.25, 0.25, 0.25]),)
        """
        return cls([np.ones(rows) for rows in row_counts(n_rows)], n_keys)

    @classmethod
    def from_counts(cls, counts: ArrayLike, n_keys: int | Sequence[int] | None = None) -> Keys:
        """Return keys that are drawn from counted keys without replacement.

        With ``n_keys`` as many as were counted, exactly the rows that occurred are requested.
        `Keys` itself takes counts as frequencies, and draws any number of keys.

        Parameters
        ----------
        counts
            How often each row occurred; an array, or a list of one a table.
        n_keys
            As for the class; by default all counted keys, taken as one rank's micro-batch.

        Returns
        -------
        Keys
            Keys that occur at most as often as they were counted.

        Examples
        --------
        Three keys were counted: row 0 twice and row 2 once. Unique keys are sent once each.

        >>> import pipesim as ps
        >>> ps.Keys.from_counts([2, 0, 1]).loads()
        [array([1., 0., 1.])]
        """
        tables = checked_tables("counts", counts)
        for index, table in enumerate(tables):
            if (table != np.floor(table)).any():
                raise ArgumentError(
                    f"counts of table {index} must be whole numbers; give shares to pipesim.Keys"
                )
        sums = [int(table.sum()) for table in tables]
        result = cls(tables, sums if n_keys is None else n_keys)
        for index, (wanted, counted) in enumerate(zip(result.n_keys, sums, strict=True)):
            if wanted > counted:
                raise ArgumentError(
                    f"n_keys of table {index} is {wanted}, but {counted} keys were counted; give "
                    "at most as many, or take the counts as frequencies: pipesim.Keys(counts, "
                    f"{wanted})"
                )
        result._counts = tuple(tables)
        return result

    @classmethod
    def counted(
        cls,
        keys: ArrayLike,
        n_rows: int | Sequence[int],
        n_keys: int | Sequence[int] | None = None,
    ) -> Keys:
        """Return the keys of a batch, counted.

        Parameters
        ----------
        keys
            Integers of any shape; for several tables, of shape ``(..., n_tables)``.
        n_rows, n_keys
            Rows of the table, or of each of several; keys of a rank's micro-batch, by default all.

        Returns
        -------
        Keys
            Keys that occur at most as often as in the batch.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Keys.counted([[0, 0], [2, 0]], n_rows=3).loads(unique=False)
        [array([3., 0., 1.])]
        """
        several = isinstance(n_rows, Sequence)
        return cls.from_counts(count_keys(keys, row_counts(n_rows), several=several), n_keys)

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
            Whether a rank sends each of its keys once. The result is then the probability that the
            row is among its ``n`` keys, ``1 - (1 - p) ** n``. For counted keys, which are drawn
            without replacement, it is ``1 - C(N - c, n) / C(N, n)`` (Hurlbert, Ecology 52(4),
            1971). Otherwise every duplicate is sent: ``n * p``.
        n_microbatches
            Micro-batches whose keys are made unique together.

        Returns
        -------
        list
            Average numbers of keys, one array of shape ``(rows,)`` a table.

        Examples
        --------
        Four keys, of which three of four are row 0; all duplicates are sent.

        >>> import pipesim as ps
        >>> ps.Keys([3, 1], n_keys=4).loads(unique=False)
        [array([3., 1.])]
        """
        check_flag("unique", unique)
        times = exact_count("n_microbatches", n_microbatches)
        loads = []
        for table, (share, one) in enumerate(zip(self.frequencies, self.n_keys, strict=True)):
            n = one * times
            if self._counts is not None and n > (total := int(self._counts[table].sum())):
                raise ArgumentError(
                    f"n_microbatches={times} draw {n} keys from table {table}, but {total} were "
                    "counted; count more, or give n_keys of one micro-batch"
                )
            if not unique:
                loads.append(share * n)
            elif self._counts is not None:
                loads.append(inclusion_probability(self._counts[table], n))
            else:
                with np.errstate(divide="ignore"):
                    loads.append(-np.expm1(n * np.log1p(-np.minimum(share, 1.0))))
        return loads

    def owners(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> list[Ints]:
        """Return the rank that owns each row.

        Parameters
        ----------
        n_ranks
            Number of ranks that share the tables.
        placement
            ``"modulo"``: row ``key`` is on rank ``key % n_ranks``. ``"hash"``: by a fixed hash.
            ``"frequency"``: rows are assigned by descending `loads`, each to the rank with the
            least load so far. `pipesim.costs.row_placement` has the formulas.
        unique
            As in `loads`, which ``"frequency"`` uses.

        Returns
        -------
        list
            Numbers of ranks, one array of shape ``(rows,)`` a table.

        Raises
        ------
        CapacityError
            For more ranks than fit in memory.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Keys.uniform(5, n_keys=2).owners(n_ranks=2)
        [array([0, 1, 0, 1, 0])]
        """
        n_ranks = exact_count("n_ranks", n_ranks)
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
        """Return the average number of keys that each rank sends to each owner.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.
        n_microbatches
            As for `loads`.

        Returns
        -------
        numpy.ndarray
            Shape ``(n_ranks, n_ranks)``: rank ``i`` sends row ``i``, rank ``j`` receives column
            ``j``. The diagonal stays in its process.

        Raises
        ------
        ArgumentError, CapacityError
            As `owners` and `loads`.

        Examples
        --------
        >>> import pipesim as ps
        >>> ps.Keys([3, 1], n_keys=4).sent(n_ranks=2, unique=False)
        array([[3., 1.],
               [3., 1.]])
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(unique=unique, n_microbatches=n_microbatches)
        return np.tile(_owner_sums(owners, loads, n_ranks), (n_ranks, 1))

    def load(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> float:
        """Return the largest average of received keys of an owner, over the mean of all owners.

        The keys of one micro-batch vary around the average, so that `busiest` is a little more.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.

        Returns
        -------
        float
            1 if all owners receive as many keys on average; more otherwise.

        Raises
        ------
        ArgumentError, CapacityError
            As `owners`.

        Examples
        --------
        Owners receive 6 and 2 keys, 4 on average.

        >>> import pipesim as ps
        >>> ps.Keys([3, 1], n_keys=4).load(n_ranks=2, unique=False)
        1.5
        """
        received = self.sent(n_ranks, placement, unique=unique).sum(axis=0)
        return float(received.max() / received.mean())

    def busiest(self, n_ranks: int, placement: str = "modulo", *, unique: bool = True) -> float:
        """Return the average of the most keys that an owner receives, over the mean of all owners.

        The maximum is taken in each micro-batch, in which any owner may be the busiest; `load` is
        the maximum of averages. Received keys are modelled as normal and independent, with the
        variance of their draws: that of Poisson for duplicates, ``p * (1 - p)`` for a row that is
        sent with probability p.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.

        Returns
        -------
        float
            At least about the value of `load`.

        Raises
        ------
        ArgumentError, CapacityError
            As `owners`.

        Examples
        --------
        >>> import pipesim as ps
        >>> keys = ps.Keys.uniform(1000, n_keys=100)
        >>> keys.busiest(n_ranks=4) > keys.load(n_ranks=4)
        True
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(unique=unique)
        mean = n_ranks * _owner_sums(owners, loads, n_ranks)
        spread = [load * (1 - load) for load in loads] if unique else loads
        deviation = np.sqrt(n_ranks * _owner_sums(owners, spread, n_ranks))
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
        """Return the bytes of each exchange for each pair of ranks, as `pipesim.Costs` takes them.

        Parameters
        ----------
        n_ranks, placement, unique
            As for `owners`.
        dim
            Length of a vector.
        n_microbatches
            Micro-batches of a step, for ``"accumulated"``.
        key_itemsize, itemsize
            Bytes of a key, and of one element of a vector or gradient.

        Returns
        -------
        dict
            ``"counts"``, ``"keys"``, ``"vectors"`` and ``"gradients"`` of a micro-batch, and
            ``"accumulated"``: gradients of all micro-batches, each row once, regardless of
            ``unique``. Each of shape ``(n_ranks, n_ranks)``, from the row's rank to the column's.

        Raises
        ------
        ArgumentError, CapacityError
            As `owners` and `loads`; and for sizes that are no whole numbers of at least 1.

        Examples
        --------
        Rank 0 owns row 0, which each rank sends three times: 12 bytes of keys, and 96 of vectors.

        >>> import pipesim as ps
        >>> nbytes = ps.Keys([3, 1], n_keys=4).exchange_bytes(n_ranks=2, dim=8, unique=False)
        >>> nbytes["keys"].tolist(), nbytes["vectors"].tolist()
        ([[12.0, 4.0], [12.0, 4.0]], [[96.0, 96.0], [32.0, 32.0]])
        """
        vector = exact_count("dim", dim) * exact_count("itemsize", itemsize)
        key = exact_count("key_itemsize", key_itemsize)
        sent = self.sent(n_ranks, placement, unique=unique)
        owners = self.owners(n_ranks, placement, unique=unique)
        loads = self.loads(n_microbatches=n_microbatches)
        distinct = _owner_sums(owners, loads, n_ranks)
        return {
            "counts": np.full((n_ranks, n_ranks), float(_COUNT)),
            "keys": key * sent,
            "vectors": vector * sent.T,
            "gradients": vector * sent,
            "accumulated": vector * np.tile(distinct, (n_ranks, 1)),
        }

    def draw(self, seed: int) -> list[Ints]:
        """Return the keys of one rank's micro-batch, one array a table; shape ``(n_keys,)``.

        Parameters
        ----------
        seed
            Seed of the draw, at least 0.

        Returns
        -------
        list
            Numbers of rows, one array of shape ``(n_keys,)`` a table.

        Raises
        ------
        CapacityError
            For more keys than fit in memory.

        Examples
        --------
        >>> import pipesim as ps
        >>> (keys,) = ps.Keys.uniform(1000, n_keys=100).draw(seed=0)
        >>> keys.shape
        (100,)
        """
        generator = np.random.default_rng(check_count("seed", seed, 0))
        keys: list[Ints] = []
        for table, (share, n) in enumerate(zip(self.frequencies, self.n_keys, strict=True)):
            check_memory(f"n_keys={n} keys of table {table}", 8 * n, "draw fewer keys")
            if self._counts is None:
                keys.append(generator.choice(len(share), n, p=share))
            else:
                counted = np.repeat(np.arange(len(share)), self._counts[table].astype(np.int64))
                keys.append(generator.permutation(counted)[:n])
        return keys


def _owner_sums(owners: list[Ints], values: list[Floats], n_ranks: int) -> Floats:
    """Return the sum of the values of the rows that each rank owns."""
    total = np.zeros(n_ranks)
    for owner, value in zip(owners, values, strict=True):
        total += np.bincount(owner, value, minlength=n_ranks)
    return total

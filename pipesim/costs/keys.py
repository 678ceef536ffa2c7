"""`Keys`: how often each row of sharded tables is requested, and the bytes of their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_flag,
    check_name,
    check_type,
    number,
)
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_memory
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]
#: Bytes of a count, of an int32 key and of a float32.
_COUNT, _KEY, _NUMBER = 8, 4, 4


@checked_names
class Keys:
    """A histogram of the keys that each rank requests from sharded tables in one micro-batch.

    Every rank draws ``n_keys`` keys of each table, independently of the other ranks. This model
    gives the expected sizes of the exchanges of a sharded embedding, for each pair of ranks. Ranks
    with different histograms, or with the keys of a given batch, are made by `per_rank`.

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
        Share of each row in the keys of its table; one array a table, which sums to 1. Of
        `per_rank` the share in the keys of all ranks.
    n_keys
        One number a table. Of `per_rank` the number of all ranks together.
    ranks
        The keys of each rank, of `per_rank`; else empty: all ranks draw from the same histogram.

    Examples
    --------
    >>> import pipesim as ps
    >>> keys = ps.Keys.zipf(1000, n_keys=500, exponent=1.2)
    >>> keys.load(4, "modulo", unique=False) > keys.load(4, "frequency", unique=False)
    True
    """

    def __init__(self, frequencies: ArrayLike, n_keys: int | Sequence[int]) -> None:
        tables = checked_tables("frequencies", frequencies)
        self._set(tables, counts_per_table("n_keys", n_keys, len(tables)))

    def _set(
        self,
        tables: Sequence[Floats],
        n_keys: tuple[int, ...],
        *,
        counts: tuple[Floats, ...] | None = None,
        ranks: tuple[Keys, ...] = (),
    ) -> None:
        """Set the attributes; a table of zeros has no keys."""
        self.frequencies = tuple(table / (table.sum() or 1.0) for table in tables)
        self.n_keys, self.ranks, self._counts = n_keys, ranks, counts

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

        Examples
        --------
        Shares are in the ratio of 1, 1/2, 1/3 and 1/4.

        >>> import pipesim as ps
        >>> ps.Keys.zipf(4, n_keys=100, seed=None).frequencies
        (array([0.48, 0.24, 0.16, 0.12]),)
        """
        power = number(exponent)
        if power is None or not 0 <= power < math.inf:
            raise ArgumentError(f"exponent must be finite and >= 0, got {exponent!r}")
        generator = None if seed is None else np.random.default_rng(check_count("seed", seed, 0))
        tables = []
        for rows in row_counts(n_rows):
            table = np.arange(1, rows + 1, dtype=np.float64) ** -power
            tables.append(table if generator is None else generator.permutation(table))
        return cls(tables, n_keys)

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
        tables = checked_tables("counts", counts, may_be_zero=True)
        for index, table in enumerate(tables):
            if (table != np.floor(table)).any():
                raise ArgumentError(
                    f"counts of table {index} must be whole numbers; give shares to pipesim.Keys"
                )
        sums = [int(table.sum()) for table in tables]
        drawn = sums if n_keys is None else n_keys
        numbers = counts_per_table("n_keys", drawn, len(tables), minimum=0)
        for index, (wanted, counted) in enumerate(zip(numbers, sums, strict=True)):
            if wanted > counted:
                raise ArgumentError(
                    f"n_keys of table {index} is {wanted}, but {counted} keys were counted; give "
                    "at most as many, or take the counts as frequencies: pipesim.Keys(counts, "
                    f"{wanted})"
                )
        result = cls.__new__(cls)
        result._set(tables, numbers, counts=tuple(tables))
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
        """
        several = isinstance(n_rows, Sequence)
        return cls.from_counts(count_keys(keys, row_counts(n_rows), several=several), n_keys)

    @classmethod
    def per_rank(cls, keys: Sequence[Keys]) -> Keys:
        """Return keys that each rank draws from a histogram of its own.

        With the counted keys of a given batch, no number is an expectation: `sent` and
        `exchange_bytes` are exactly what the ranks send.

        Parameters
        ----------
        keys
            Keys of rank 0, of rank 1 and so on, for tables with the same rows. Leave out padding
            keys, which are not sent.

        Returns
        -------
        Keys
            Keys of as many ranks. Its methods take that number as ``n_ranks``; `loads` is the mean
            of the ranks.

        Examples
        --------
        Of eight rows, rank 0 has the even ones. Rank 0 sends it one key and rank 1 three; the
        second rank sends two to each.

        >>> import pipesim as ps
        >>> batches = [0, 1, 3, 5], [4, 5, 6, 7]
        >>> keys = ps.Keys.per_rank([ps.Keys.counted(batch, n_rows=8) for batch in batches])
        >>> keys.sent(n_ranks=2).tolist()
        [[1.0, 3.0], [2.0, 2.0]]
        """
        ranks = tuple(keys) if isinstance(keys, (list, tuple)) else ()
        if not ranks:
            raise ArgumentError(f"keys must be a list, pipesim.Keys of each rank, got {keys!r:.60}")
        for rank, own in enumerate(ranks):
            if check_type(f"keys[{rank}]", own, Keys).ranks or own.n_rows != ranks[0].n_rows:
                raise ArgumentError(
                    f"keys[{rank}] are {own}, and keys[0] are {ranks[0]}; give one histogram a "
                    "rank, of tables with the same rows"
                )
        by_table = [
            [n * share for n, share in zip(own.n_keys, own.frequencies, strict=True)]
            for own in ranks
        ]
        result = cls.__new__(cls)
        result._set(
            [sum(tables[1:], tables[0]) for tables in zip(*by_table, strict=True)],
            tuple(map(sum, zip(*(own.n_keys for own in ranks), strict=True))),
            ranks=ranks,
        )
        return result

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(map(len, self.frequencies))

    def __repr__(self) -> str:
        ranks = f" of {len(self.ranks)} ranks" if self.ranks else ""
        return f"<Keys: {list(self.n_keys)} keys{ranks} of tables of {list(self.n_rows)} rows>"

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
        if self.ranks:
            of_ranks = [x.loads(unique=unique, n_microbatches=times) for x in self.ranks]
            return [sum(x[1:], x[0]) / len(x) for x in zip(*of_ranks, strict=True)]
        loads = []
        for table, (share, one) in enumerate(zip(self.frequencies, self.n_keys, strict=True)):
            n = one * times
            if self._counts is not None and n > (total := int(self._counts[table].sum())):
                raise ArgumentError(
                    f"n_microbatches={times} draw {n} keys from table {table}, but {total} were "
                    "counted; count more, or give n_keys of one micro-batch"
                )
            if self._counts is not None:
                counts = self._counts[table]
                share_drawn = n / (counts.sum() or 1.0)  # 1 of a given batch, whose loads are exact
                loads.append(inclusion_probability(counts, n) if unique else counts * share_drawn)
            elif not unique:
                loads.append(share * n)
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
            least load so far. `pipesim.costs.keys` has the formulas.
        unique
            As in `loads`, which ``"frequency"`` uses.

        Returns
        -------
        list
            Numbers of ranks, one array of shape ``(rows,)`` a table.
        """
        n_ranks = exact_count("n_ranks", n_ranks)
        if self.ranks and n_ranks != len(self.ranks):
            raise ArgumentError(
                f"n_ranks is {n_ranks}, but the keys are of {len(self.ranks)} ranks; give that "
                "number, or keys that all ranks draw alike"
            )
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
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        return self._sums(
            owners, n_ranks, lambda x: x.loads(unique=unique, n_microbatches=n_microbatches)
        )

    def _sums(
        self, owners: list[Ints], n_ranks: int, values: Callable[[Keys], list[Floats]]
    ) -> Floats:
        """Return, for each rank, the sum of its values of the rows that each owner has."""
        rows = [_owner_sums(owners, values(keys), n_ranks) for keys in self.ranks or (self,)]
        return np.tile(rows, (n_ranks // len(rows), 1))

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

        Examples
        --------
        Owners receive 6 and 2 keys, 4 on average.

        >>> import pipesim as ps
        >>> ps.Keys([3, 1], n_keys=4).load(n_ranks=2, unique=False)
        1.5
        """
        received = self.sent(n_ranks, placement, unique=unique).sum(axis=0)
        return float(received.max() / received.mean()) if received.any() else 1.0

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
        """
        owners = self.owners(n_ranks, placement, unique=unique)
        mean = self._sums(owners, n_ranks, lambda x: x.loads(unique=unique)).sum(axis=0)
        variance = self._sums(
            owners,
            n_ranks,
            lambda x: [load * (1 - load) if unique else load for load in x.loads(unique=unique)],
        ).sum(axis=0)
        return expected_maximum(mean, np.sqrt(variance)) / float(mean.mean()) if mean.any() else 1.0

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
        distinct = self._sums(owners, n_ranks, lambda x: x.loads(n_microbatches=n_microbatches))
        return {
            "counts": np.full((n_ranks, n_ranks), float(_COUNT)),
            "keys": key * sent,
            "vectors": vector * sent.T,
            "gradients": vector * sent,
            "accumulated": vector * distinct,
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
        """
        if self.ranks:
            raise ArgumentError("each rank has keys of its own; draw those of one: keys.ranks[0]")
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


# Tables of counts: checks, counting, and probabilities of draws

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
    """Return the probability that each row is among n of all counted keys; see `Keys.loads`."""
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


def count_keys(keys: ArrayLike, sizes: Sequence[int], *, several: bool) -> list[Ints]:
    """Return how often each row occurs among ``keys``, one array a table; see `Keys.counted`."""
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


def counts_per_table(
    name: str, values: int | Sequence[int], n_tables: int, *, minimum: int = 1
) -> tuple[int, ...]:
    """Return one whole number a table, from that or from one number for all tables."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return (exact_count(name, values, minimum),) * n_tables
    if len(values) != n_tables:
        raise ArgumentError(
            f"{name} has {len(values)} values for {n_tables} tables; give one, or one a table"
        )
    return tuple(exact_count(f"{name}[{i}]", value, minimum) for i, value in enumerate(values))


def checked_tables(name: str, values: Any, *, may_be_zero: bool = False) -> list[Floats]:
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
        if not np.isfinite(table).all() or (table < 0).any():
            raise ArgumentError(f"{name} of table {index} must be finite and >= 0")
        if not may_be_zero and not table.any():
            raise ArgumentError(f"{name} of table {index} are all 0; some row must have more")
    return [table.astype(np.float64) for table in tables]


# Owners of the rows of sharded tables: ``"modulo"``, ``"hash"`` or ``"frequency"``.
#
# Each of n ranks has ``ceil(rows / n)`` places for a table's rows. Row ``key`` of a table has
#
# =============  ================================================================================
# modulo         owner ``key % n``, place ``key // n``
# hash           ``h = (a * key + b) % m``, owner ``h // (m / n)``, place ``h % (m / n)``
# frequency      a table of owners and places; see `assign_rows`
# =============  ================================================================================
#
# - ``m`` is ``n`` times the places of a rank.
# - ``a`` is the first number, from ``m`` over the golden ratio on, that is coprime to ``m``, so
#   that two rows never share a place.
# - ``b`` differs from table to table.
#
# Multiplicative hashing: Knuth, The Art of Computer Programming 3, section 6.4.

PLACEMENTS = ("modulo", "hash", "frequency")
#: Most rows of a table that 64-bit integers can hash; see `multiply_modulo`.
MOST_HASHED = 1 << 39
#: 2**64 over the golden ratio, and over the plastic number.
_GOLDEN, _PLASTIC = 0x9E3779B97F4A7C15, 0xC13FA9A902A6328F
_LOW_BITS = 16
Array = TypeVar("Array")


class RowHash(NamedTuple):
    """The hash of a table: ``h = (factor * key + offset) % size``."""

    factor: int
    offset: int
    size: int  # a multiple of the number of ranks
    inverse: int  # of factor modulo size: key = inverse * (h - offset) % size


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
    """Return the rank that owns each row of each table; only ``"frequency"`` needs ``loads``."""
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

    ``loads`` say, for each table, how often each of its rows is sent; shape ``(rows,)``. The result
    has, for each table, the rank of each row, and its place on that rank.
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

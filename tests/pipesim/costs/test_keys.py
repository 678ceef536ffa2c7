"""`pipesim.Keys`: closed forms by hand, against draws, and what they make of uneven exchanges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.costs.keys import assign_rows, multiply_modulo, row_hash, row_owners
from pipesim.errors import ArgumentError, CostsError
from pipesim.ops import EXCHANGES, Op


def test_two_rows_by_hand() -> None:
    """Two draws of rows of 3/4 and 1/4: the first is missed by both in 1/16, the other in 9/16."""
    keys = ps.Keys([3, 1], 2)
    assert keys.loads()[0] == pytest.approx([15 / 16, 7 / 16])
    assert keys.loads(unique=False)[0] == pytest.approx([1.5, 0.5])
    assert keys.loads(n_microbatches=2)[0] == pytest.approx([255 / 256, 1 - (3 / 4) ** 4])
    assert keys.sent(2) == pytest.approx(np.array([[15, 7], [15, 7]]) / 16)
    assert keys.load(2, unique=False) == 1.5


def test_uniform_keys_and_zipfs() -> None:
    """The closed forms; ``rows * (1 - (1 - 1/rows) ** n)`` differ."""
    keys = ps.Keys.uniform([1000, 10], [500, 7])
    for load, rows, n in zip(keys.loads(), (1000, 10), (500, 7), strict=True):
        assert load.sum() == pytest.approx(rows * (1 - (1 - 1 / rows) ** n))
    zipf = ps.Keys.zipf(4, 1, exponent=2, seed=None)
    weights = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    assert zipf.frequencies[0] == pytest.approx(weights / weights.sum())
    shuffled = ps.Keys.zipf(4, 1, exponent=2, seed=3).frequencies[0]
    assert np.sort(shuffled)[::-1] == pytest.approx(zipf.frequencies[0])


def test_counted_keys_are_drawn_once_each() -> None:
    """All of them: the rows that occurred. Two of 0 0 1 4: row 0 is missed in one of six pairs."""
    batch = np.array([[0, 2], [0, 2], [1, 2], [4, 2]])
    whole = ps.Keys.counted(batch, [5, 3])
    assert [x.tolist() for x in whole.loads()] == [[1, 1, 0, 0, 1], [0, 0, 1]]
    half = ps.Keys.counted(batch[:, 0], 5, 2)
    assert half.loads()[0] == pytest.approx([5 / 6, 1 / 2, 0, 0, 1 / 2])
    assert half.loads(n_microbatches=2)[0].tolist() == [1, 1, 0, 0, 1]
    with pytest.raises(ArgumentError, match="draw 6 keys from table 0, but 4 were counted"):
        half.loads(n_microbatches=3)


# Keys of each rank

#: Of two ranks: row k is on rank k % 2.
SEED = ps.Keys.per_rank([ps.Keys.counted(x, 8) for x in ([0, 1, 3, 5, 5], [4, 5, 6, 7])])


def test_bytes_of_a_given_batch() -> None:
    """Rank 0 sends key 0 to itself and 1, 3, 5 to rank 1, which sends 4, 6 and keeps 5, 7."""
    nbytes = SEED.exchange_bytes(2, dim=2)
    assert nbytes["counts"].tolist() == [[8, 8], [8, 8]]
    assert nbytes["keys"].tolist() == [[4, 12], [8, 8]]
    assert nbytes["vectors"].tolist() == [[8, 16], [24, 16]]
    assert nbytes["gradients"].tolist() == nbytes["accumulated"].tolist() == [[8, 24], [16, 16]]
    assert SEED.sent(2, unique=False).tolist() == [[1, 4], [2, 2]]  # key 5 of rank 0 twice
    assert SEED.load(2) == SEED.busiest(2) == 5 / 4
    assert (SEED.n_keys, SEED.n_rows) == ((9,), (8,))
    assert SEED.frequencies[0] == pytest.approx(np.array([1, 1, 0, 1, 1, 3, 1, 1]) / 9)
    assert repr(SEED) == "<Keys: [9] keys of 2 ranks of tables of [8] rows>"


def test_histograms_of_ranks() -> None:
    """Each rank's row is as if all ranks drew like it; owners by frequency serve their mean."""
    first, second = (ps.Keys.zipf([60, 7], [80, 20], seed=seed) for seed in (0, 1))
    both = ps.Keys.per_rank([first, second])
    for unique in (True, False):
        sent = both.sent(2, unique=unique)
        assert sent[0].tolist() == first.sent(2, unique=unique)[0].tolist()
        assert sent[1].tolist() == second.sent(2, unique=unique)[0].tolist()
        one, two, mean = (x.loads(unique=unique)[0] for x in (first, second, both))
        assert mean == pytest.approx((one + two) / 2)
    assert both.load(2, "frequency") == pytest.approx(1, abs=0.02)
    alike = ps.Keys.per_rank([first] * 3)
    assert alike.busiest(3) == pytest.approx(first.busiest(3))
    for name, matrix in alike.exchange_bytes(3, 4, n_microbatches=2).items():
        assert matrix == pytest.approx(first.exchange_bytes(3, 4, n_microbatches=2)[name])


def test_a_rank_without_keys() -> None:
    none = ps.Keys.counted(np.empty(0, np.int64), 8)
    keys = ps.Keys.per_rank([none, ps.Keys.counted([1, 3, 3], 8)])
    assert keys.sent(2, unique=False).tolist() == [[0, 0], [0, 3]]
    assert none.draw(0)[0].tolist() == []
    assert none.load(2) == none.busiest(2) == 1


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["modulo", "hash", "frequency"])
@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_expected_keys_are_those_of_draws(placement: str, unique: bool, counted: bool) -> None:
    """Means of 200 drawn micro-batches, owner by owner, within five standard errors."""
    keys: Any = ps.Keys.zipf([60, 7], [80, 20], exponent=1.2)
    if counted:
        keys = ps.Keys.from_counts([np.round(x * 500) for x in keys.frequencies], [80, 20])
    owners = keys.owners(3, placement, unique=unique)
    counts = np.zeros((200, 3))
    for seed, row in enumerate(counts):
        for owner, drawn in zip(owners, keys.draw(seed), strict=True):
            row += np.bincount(owner[np.unique(drawn) if unique else drawn], minlength=3)
    error = counts.std(axis=0) / len(counts) ** 0.5
    wanted = keys.sent(3, placement, unique=unique)
    assert (np.abs(counts.mean(axis=0) - wanted) <= 5 * error + 1e-9).all()
    assert keys.load(3, placement, unique=unique) == pytest.approx(
        wanted[0].max() / wanted[0].mean()
    )


@pytest.mark.slow
@pytest.mark.parametrize("unique", [True, False])
def test_the_busiest_owner_of_drawn_micro_batches(unique: bool) -> None:
    """The mean of 100 maxima, of four ranks' draws; of even loads the largest is above the mean."""
    keys = ps.Keys.zipf([2000, 50], [300, 200], exponent=1.1)
    for placement in ("modulo", "frequency"):
        owners = keys.owners(4, placement, unique=unique)
        ratios = []
        for batch in range(100):
            received = np.zeros(4)
            for rank in range(4):
                for owner, drawn in zip(owners, keys.draw(4 * batch + rank), strict=True):
                    sent = np.unique(drawn) if unique else drawn
                    received += np.bincount(owner[sent], minlength=4)
            ratios.append(received.max() / received.mean())
        ratio = keys.busiest(4, placement, unique=unique)
        assert ratio == pytest.approx(np.mean(ratios), rel=0.01)
        assert ratio >= keys.load(4, placement, unique=unique)
    assert ratio > 1.005  # though each rank owns equally many rows
    always = ps.Keys.from_counts([1, 1, 1, 1])
    assert always.busiest(2) == always.load(2) == 1


# Placements


@pytest.mark.parametrize("n_rows", [1, 2, 5, 12, 1000, 1 << 38])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_a_hash_gives_each_row_a_place_of_its_own(n_rows: int, n_ranks: int) -> None:
    """No two rows share one, and the inverse leads back, also where products exceed 64 bits."""
    for table in range(3):
        terms = row_hash(table, n_rows, n_ranks)
        keys = np.unique(np.linspace(0, n_rows - 1, 1000).astype(np.int64))
        hashed = (multiply_modulo(keys, terms.factor, terms.size) + terms.offset) % terms.size
        assert len(np.unique(hashed)) == len(keys)
        assert (hashed >= 0).all()
        assert (hashed < terms.size).all()
        back = multiply_modulo((hashed - terms.offset) % terms.size, terms.inverse, terms.size)
        assert (back == keys).all()
        exact = [(k * terms.factor + terms.offset) % terms.size for k in keys.tolist()]
        assert hashed.tolist() == exact


def test_a_hash_spreads_what_modulo_does_not() -> None:
    """Only every fourth row occurs: all of them on one of four ranks by modulo."""
    keys = ps.Keys([1, 0, 0, 0] * 250, 100)
    assert keys.load(4, "modulo") == 4
    assert keys.load(4, "hash") < 1.05
    first_rows = [owners[0] for owners in row_owners("hash", [9] * 40, 4)]
    assert len(set(first_rows)) == 4  # not all tables have row 0 on one rank


def test_dealing_by_hand() -> None:
    """Of two ranks with two places a table: 9 to 0; 8, then 3 to 1; 2, 1 where there is room."""
    owners, places = assign_rows([np.array([3.0, 9, 1]), np.array([8.0, 2])], 2)
    assert [x.tolist() for x in owners] == [[1, 0, 0], [1, 0]]
    assert [x.tolist() for x in places] == [[0, 0, 1], [0, 0]]


def test_frequent_rows_are_spread_evenly() -> None:
    """By what is sent: with duplicates the frequent rows count for more."""
    keys = ps.Keys.zipf(800, 600, exponent=1.1)
    for unique in (True, False):
        assert keys.load(4, "frequency", unique=unique) == pytest.approx(1, abs=0.02)
        counts = np.bincount(keys.owners(4, "frequency", unique=unique)[0])
        assert counts.tolist() == [200] * 4
    assert keys.load(4, "modulo", unique=False) > 1.1


# Bytes and seconds


def test_bytes_of_exchanges() -> None:
    """Vectors go back; counts are eight bytes a pair; accumulated gradients are unique."""
    keys = ps.Keys([3, 1], 2)
    nbytes = keys.exchange_bytes(2, 8, unique=False, n_microbatches=2, itemsize=2)
    assert list(nbytes) == list(EXCHANGES)
    assert nbytes["counts"].tolist() == [[8, 8], [8, 8]]
    assert nbytes["keys"] == pytest.approx(4 * np.array([[1.5, 0.5], [1.5, 0.5]]))
    assert nbytes["vectors"] == pytest.approx(16 * np.array([[1.5, 1.5], [0.5, 0.5]]))
    assert nbytes["gradients"] == pytest.approx(16 * np.array([[1.5, 0.5], [1.5, 0.5]]))
    union = [255 / 256, 1 - (3 / 4) ** 4]
    assert nbytes["accumulated"] == pytest.approx(16 * np.array([union, union]))


def simulated(costs: ps.Costs, n_replicas: int = 2) -> ps.Timeline:
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=n_replicas, sharded=[0])
    return ps.simulate(graph, costs)


def test_the_busiest_pair_says_how_long_an_exchange_lasts(tmp_path: Path) -> None:
    """Rank 0 receives 6 bytes of keys and sends 1; what stays counts for nothing."""
    sizes = {"keys": [[50, 1], [6, 2]], "vectors": [[0, 4], [8, 0]]}
    costs = ps.Costs(1, 2, exchange_bytes={0: sizes}, network=ps.Network(bandwidth=2))
    timeline = simulated(costs)
    graph = timeline.graph
    for name, seconds, nbytes in (("keys", 3, [1, 6]), ("vectors", 4, [4, 8])):
        exchanges = (graph.op == Op.ALL_TO_ALL) & (graph.part == EXCHANGES.index(name))
        assert timeline.duration[exchanges].tolist() == [seconds] * 2
        assert timeline.nbytes[exchanges].tolist() == nbytes
    costs.save(tmp_path / "costs.json")
    assert ps.Costs.load(tmp_path / "costs.json") == costs
    assert json.loads((tmp_path / "costs.json").read_text())["exchange_bytes"]["0"]["keys"]
    back = ps.Costs.from_timeline(timeline)
    assert back.exchange_bytes == costs.exchange_bytes
    assert ps.simulate(graph, back).makespan == pytest.approx(timeline.makespan)
    half = {0: {"keys": [[0, 1], [3, 0]]}}
    other = ps.Costs.from_timeline(timeline, exchange_bytes=half, network=costs.network)
    assert simulated(other).duration[graph.part == EXCHANGES.index("keys")].max() == 1.5


def test_even_bytes_of_pairs_are_those_of_one_number() -> None:
    """Every start and end, to the last bit."""
    costs = ps.Costs(1, 2, key_bytes=9, vector_bytes=33, network=ps.Network(0.1, 7))
    even = {name: np.full((3, 3), n / 3) for name, n in (("keys", 9), ("vectors", 33))}
    timeline = simulated(replace(costs, exchange_bytes={0: even}), 3)
    assert (timeline.end == simulated(costs, 3).end).all()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("keys", "must map stages to the bytes"),
        ({-1: {}}, "must map stages to the bytes"),
        ({0: {"words": [[1]]}}, "unknown exchange 'words'"),
        ({0: {"keys": [[1, 2]]}}, "keys of stage 0 must be a square matrix"),
        ({0: {"keys": [[1, -2], [1, 1]]}}, "from replica 0 to 1, must be finite bytes >= 0, got -"),
    ],
)
def test_bytes_that_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ps.Costs(1, 2, exchange_bytes=value)


def test_bytes_of_other_replicas_are_refused() -> None:
    costs = ps.Costs(1, 2, exchange_bytes={0: {"keys": np.ones((3, 3))}})
    with pytest.raises(CostsError, match="keys of stage 0 are of 3 replicas, but the graph has 2"):
        simulated(costs)
    with pytest.raises(CostsError, match="are of stage 2, but the graph has 2 stages"):
        simulated(ps.Costs(1, 2, exchange_bytes={2: {}}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ps.Keys([0, 0], 2), "frequencies of table 0 are all 0; some row must have more"),
        (lambda: ps.Keys([[1], [1, -1]], 2), "of table 1 must be finite"),
        (lambda: ps.Keys("ab", 2), "frequencies must be an array of numbers"),
        (lambda: ps.Keys([1, 2], [1, 2]), "n_keys has 2 values for 1 tables"),
        (lambda: ps.Keys.zipf(9, 2, exponent=-1), "exponent must be finite and >= 0, got -1"),
        (lambda: ps.Keys.from_counts([1, 0.5]), "counts of table 0 must be whole numbers"),
        (lambda: ps.Keys.from_counts([1, 2], 4), "n_keys of table 0 is 4, but 3 keys were counted"),
        (lambda: ps.Keys.counted([0, 5], 3), "key 5 is no row of table 0, whose keys are 0 to 2"),
        (lambda: ps.Keys.counted([0.5], 3), r"keys must be an array of integers, got \[0.5\]"),
        (lambda: ps.Keys([1], 2).sent(2, "random"), "unknown placement 'random'"),
        (lambda: ps.Keys.per_rank([]), r"keys must be a list, pipesim.Keys of each rank, got"),
        (lambda: ps.Keys.per_rank([SEED]), r"keys\[0\] are .* of 2 ranks .*; give one histogram"),
        (
            lambda: ps.Keys.per_rank([ps.Keys([1], 2), ps.Keys([1, 2], 2)]),
            r"keys\[1\] are .* of \[2\] rows>, and keys\[0\] are .* of \[1\] rows>",
        ),
        (lambda: SEED.sent(3), "n_ranks is 3, but the keys are of 2 ranks"),
        (lambda: SEED.draw(0), r"draw those of one: keys.ranks\[0\]"),
    ],
)
def test_keys_that_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()

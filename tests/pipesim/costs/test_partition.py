"""`balanced_split` of many layers, and of weights that floats do not add up exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs import layer_split
from pipesim.errors import ArgumentError

Score = tuple[Fraction, Fraction, tuple[int, ...]]


def dynamic_program(seconds: list[float], n_stages: int) -> tuple[int, ...]:
    """Return the balanced split by two O(n^2 k) dynamic programs over exact sums."""
    n = len(seconds)
    sums = [Fraction(0), *itertools.accumulate(map(Fraction, seconds))]
    bound: list[Fraction | None] = [*[None] * n, Fraction(0)]
    for _ in range(n_stages):
        bound = [
            min((max(sums[j] - sums[i], rest) for j, rest in after(bound, i)), default=None)
            for i in range(n + 1)
        ]
    largest = bound[0]
    assert largest is not None
    best: list[tuple[Fraction, tuple[int, ...]] | None] = [*[None] * n, (Fraction(0), ())]
    for _ in range(n_stages):
        best = [
            min(
                (
                    ((sums[j] - sums[i]) ** 2 + rest[0], (j - i, *rest[1]))
                    for j, rest in after(best, i)
                    if sums[j] - sums[i] <= largest
                ),
                default=None,
            )
            for i in range(n + 1)
        ]
    assert best[0] is not None
    return best[0][1]


def after(values, i):  # type: ignore[no-untyped-def]
    """Return the borders after ``i`` that have a value, with it."""
    return [(j, x) for j, x in enumerate(values) if j > i and x is not None]


#: Few values, so that many splits are equally even; and numbers of very different sizes.
weights = st.one_of(
    *(
        st.lists(st.sampled_from(values), min_size=1, max_size=14)
        for values in (
            [0.0, 1.0, 2.0, 7.0],
            [0.1, 0.2, 0.3, 0.7],
            [0.0, 5e-324, 1e-310, 1 / 3, 1.0, 1e16, 1e308],
            [1.0, 1 + 2**-52, 1 - 2**-53, 2.0**70],
        )
    ),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=14),
)


@given(weights, st.data())
def test_against_dynamic_program(seconds: list[float], data: st.DataObject) -> None:
    """The least slowest stage, the least squares, the fewest layers first; exact despite sizes."""
    n_stages = data.draw(st.integers(1, len(seconds)))
    assert ps.balanced_split(seconds, n_stages) == dynamic_program(seconds, n_stages)


@pytest.mark.parametrize("values", [[0.1, 0.3], [0.1, 0.2, 0.3], [1.0, 1 + 2**-52, 2**-40]])
def test_splits_that_floats_cannot_tell_apart(values: list[float]) -> None:
    """Weights without a common unit in turn: exact sums decide among many splits."""
    for n_stages in (5, 8):
        seconds = [*np.tile(values, 33)[:64].tolist(), 7 * values[0]]
        assert ps.balanced_split(seconds, n_stages) == dynamic_program(seconds, n_stages)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 30),
)
@example([(8, 2), (1, 5), (0, 5)], 2, 9)  # one stage stops at the limit, and the other at the bound
def test_limited_splits(layers: list[tuple[int, int]], n_stages: int, limit: int) -> None:
    """The same order of splits, among those that have at most so many bytes a stage."""
    n_stages, splits = min(n_stages, len(layers)), []
    for cut in itertools.combinations(range(1, len(layers)), n_stages - 1):
        stages = [layers[a:b] for a, b in itertools.pairwise((0, *cut, len(layers)))]
        weights, nbytes = ([sum(x[k] for x in stage) for stage in stages] for k in (0, 1))
        if max(nbytes) <= limit:
            sizes = tuple(map(len, stages))
            splits.append((max(weights), sum(x * x for x in weights), sizes))
    weights, nbytes = (layer_split.whole_sums(x) for x in zip(*layers, strict=True))
    split = layer_split.limited_split(weights, n_stages, [(nbytes, limit)])
    assert split == (min(splits)[2] if splits else None)


def test_many_layers() -> None:
    """A fill of stages up to the slowest one needs all stages, if that is any faster."""
    random = np.random.default_rng(1)
    n, n_stages = 2000, 32
    for seconds in (random.random(n), np.append(random.random(n - 1), 100.0), np.full(n, 0.1)):
        sizes = ps.balanced_split(seconds, n_stages)
        assert sum(sizes) == n
        assert min(sizes) >= 1
        stages = np.add.reduceat(seconds, np.cumsum([0, *sizes[:-1]]))
        assert stages_filled(seconds, stages.max() * (1 - 1e-9)) > n_stages
        others = np.sort(stages)[:-1]
        assert others.max() - others.min() <= 2.5 * np.sort(seconds)[-2]


def stages_filled(seconds: np.ndarray[tuple[int], np.dtype[np.float64]], bound: float) -> float:
    """Return the number of stages if each is filled up to a bound, in order."""
    if seconds.max() > bound:
        return np.inf
    sums, first, used = np.concatenate([[0.0], seconds.cumsum()]), 0, 0
    while first < len(seconds):
        first, used = int(np.searchsorted(sums, sums[first] + bound, "right")) - 1, used + 1
    return used


def test_heavy_layer_leaves_the_others_even() -> None:
    """One layer is as slow as all others; these are divided evenly over the other stages."""
    assert ps.balanced_split([1.0] * 30 + [30.0], 4) == (10, 10, 10, 1)
    assert ps.balanced_split([1.0] * 15 + [40.0] + [1.0] * 15, 4) == (7, 8, 1, 15)


@pytest.mark.parametrize("n_ones", [0, 3, 12, 30])
def test_mostly_zeros(n_ones: int) -> None:
    """Layers without weight, many more than stages: as the dynamic program, and quick."""
    seconds = np.zeros(60)
    seconds[np.random.default_rng(n_ones).choice(60, n_ones, replace=False)] = 1
    for n_stages in (1, 4, 12):
        assert ps.balanced_split(seconds, n_stages) == dynamic_program(seconds.tolist(), n_stages)


def test_many_zeros_and_few_weights() -> None:
    """Fewer weights than stages: each has its own. Else borders are those without the zeros."""
    seconds = np.zeros(4000)
    places = np.random.default_rng(0).choice(4000, 150, replace=False)
    seconds[places[:50]] = 1
    stages = np.add.reduceat(seconds, np.cumsum([0, *ps.balanced_split(seconds, 54)[:-1]]))
    assert sorted(stages) == [0] * 4 + [1] * 50
    seconds[places] = np.random.default_rng(0).random(150)
    split = ps.balanced_split(seconds, 54)
    heavy = np.flatnonzero(seconds)
    alone = np.cumsum(ps.balanced_split(seconds[heavy], 54))[:-1]
    assert np.cumsum(split)[:-1].tolist() == (heavy[alone - 1] + 1).tolist()


@pytest.mark.parametrize(
    "seconds",
    [{1: 2, 0: 1}, {1.0, 2.0}, (x for x in [1, 2]), np.ones((2, 2)), np.ones((0, 3)), "12", b"12",
     3, None, [], (), np.array([]), np.array(3.0)],
    ids=lambda seconds: f"{seconds!r:.20}".partition(" at ")[0],
)  # fmt: skip
def test_no_list_of_weights(seconds: object) -> None:
    """A collection that is no list, an array of two dimensions, or no layer: the error says so."""
    with pytest.raises(ArgumentError, match=r"^seconds must (be a list|have one weight a layer)"):
        ps.balanced_split(seconds, 1)  # type: ignore[arg-type]

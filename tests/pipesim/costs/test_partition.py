"""`balanced_split` of many layers, and of weights that floats do not add up exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import kernels
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs import exact_sums, stage_partition
from pipesim.costs.exact_sums import to_limbs
from pipesim.errors import ArgumentError, CostsWarning

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


@pytest.mark.slow
def test_compiled_as_python() -> None:
    """Compiled loops give the same splits, in one limb, in two and in many."""
    random = np.random.default_rng(0)
    for case in range(60):
        n = int(random.integers(1, 40))
        values = random.choice([0.1, 0.25, 3.0, 0.0, 1e-20, 4e15], n) * random.integers(0, 3, n)
        seconds = [values, random.random(n), random.lognormal(0, 3, n)][case % 3]
        n_stages = int(random.integers(1, n + 1))
        with kernels.as_python():
            expected = ps.balanced_split(seconds, n_stages)
        with kernels.compiled():
            assert ps.balanced_split(seconds, n_stages) == expected
        assert ps.balanced_split(seconds.tolist(), n_stages) == expected


@pytest.mark.parametrize("values", [[0.1, 0.3], [0.1, 0.2, 0.3], [1.0, 1 + 2**-52, 2**-40]])
def test_splits_that_floats_cannot_tell_apart(values: list[float]) -> None:
    """Weights without a common unit in turn: exact sums decide among many splits."""
    for n_stages in (5, 8):
        seconds = [*np.tile(values, 33)[:64].tolist(), 7 * values[0]]
        assert ps.balanced_split(seconds, n_stages) == dynamic_program(seconds, n_stages)


@given(st.lists(st.integers(0, 2**186 - 1), min_size=3, max_size=3), st.integers(0, 2**372))
def test_squares_are_exact(numbers: list[int], before: int) -> None:
    """The square of a stage less a level, of either sign, is added to a sum in limbs of 31 bits."""
    first, end, level = numbers
    total = np.array([before >> 31 * k & 2**31 - 1 for k in range(13)])
    sums = np.array([to_limbs(first, 3), to_limbs(first + end, 3)])
    exact_sums._add_square(sums, to_limbs(level, 3), 0, 1, np.zeros(6, dtype=np.int64), total)
    assert sum(int(limb) << 31 * k for k, limb in enumerate(total)) == before + (end - level) ** 2


@pytest.mark.slow
def test_many_layers() -> None:
    """A fill of stages up to the slowest one needs all stages, if that is any faster."""
    random = np.random.default_rng(1)
    n, n_stages = 200_000, 256
    for seconds in (random.random(n), np.append(random.random(n - 1), 5e4), np.full(n, 0.1)):
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


def test_long_exact_sums_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split is exact nevertheless."""
    weights = np.tile([0.1, 0.3], 50)
    expected = ps.balanced_split(weights, 7)
    monkeypatch.setattr(exact_sums, "_MOST_PRODUCTS", 8)
    with pytest.warns(CostsWarning, match="the most even split of 100 layers takes long"):
        assert ps.balanced_split(weights, 7) == expected


def test_too_many_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many borders are possible, the slowest stage is still the least; a warning says so."""
    monkeypatch.setattr(stage_partition, "_MOST_BORDERS", 8)
    random = np.random.default_rng(2)
    seconds = np.append(random.choice([1.0, 40.0], 120), 900.0)
    with pytest.warns(CostsWarning, match="others may be less even than possible"):
        sizes = ps.balanced_split(seconds, 8)
    assert (sum(sizes), sizes[-1]) == (121, 1)
    assert min(sizes) > 1 or sizes.count(1) == 1


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


def test_a_million_zeros_and_few_weights() -> None:
    """Fewer weights than stages: each has its own. Else borders are those without the zeros."""
    seconds = np.zeros(10**6)
    places = np.random.default_rng(0).choice(10**6, 3000, replace=False)
    seconds[places[:1000]] = 1
    stages = np.add.reduceat(seconds, np.cumsum([0, *ps.balanced_split(seconds, 1024)[:-1]]))
    assert sorted(stages) == [0] * 24 + [1] * 1000
    seconds[places] = np.random.default_rng(0).random(3000)
    split = ps.balanced_split(seconds, 1024)
    heavy = np.flatnonzero(seconds)
    alone = np.cumsum(ps.balanced_split(seconds[heavy], 1024))[:-1]
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

"""Constants from synthetic rows, of which the truth is known."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import least_squares

from pipesim.calibration.robust_fit import (
    LEAST_DETERMINED,
    Fit,
    Floats,
    Ints,
    Problem,
    fit,
    minimize,
)
from pipesim.errors import ArgumentError

TRUTH = np.array([0.6, -0.4, 0.9])
N_ROWS = 12
#: Seconds of each row in three parts, which constants multiply.
PARTS = np.random.default_rng(0).uniform(0.1, 10, (N_ROWS, 3))


def sums(x: Floats, rows: Ints) -> Floats:
    """Rows that are sums of three parts."""
    return np.log(PARTS[rows] @ np.exp(x[:3]))


def twins(x: Floats, rows: Ints) -> Floats:
    """The first and the fourth constant multiply the same part."""
    return np.log(PARTS[rows] @ np.exp([x[0] + x[3], x[1], x[2]]))


def floors(x: Floats, rows: Ints) -> Floats:
    """A floor under the rows, which is below all of them at the start."""
    return np.log(np.maximum(PARTS[rows].sum(1), 2 * np.exp(x[0])))


def fitted(
    predict: Callable[[Floats, Ints], Floats], measured: Floats, n: int, most: float = 4.6
) -> Fit:
    return fit(predict, measured, np.full(n, -4.6), np.full(n, most))


def measured(noise: float = 0.0, seed: int = 0) -> Floats:
    drawn = np.random.default_rng(seed).normal(0, noise, N_ROWS) if noise else np.zeros(N_ROWS)
    return sums(TRUTH, np.arange(N_ROWS)) + drawn


def test_rows_without_noise_give_back_the_constants() -> None:
    """The prior pulls them towards their start by less than 1 %."""
    result = fitted(sums, measured(), 3)
    np.testing.assert_allclose(result.x, TRUTH, atol=0.01)
    np.testing.assert_allclose(result.predicted, measured(), atol=2e-3)
    np.testing.assert_allclose(result.left_out, measured(), atol=5e-3)
    assert result.together == {}


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_measurements() -> None:
    results = [fitted(sums, measured(0.03, seed), 3) for seed in range(30)]
    spread = np.std([result.x for result in results], axis=0)
    stated = np.mean([result.standard_errors for result in results], axis=0)
    assert (spread > stated / 1.6).all()
    assert (spread < stated * 1.6).all()


def test_an_outlier_has_little_weight() -> None:
    """Least squares without a robust loss move the constants three times as far, or more."""
    rows = measured(0.01)
    rows[3] += np.log(2)
    robust = np.abs(fitted(sums, rows, 3).x - TRUTH).max()
    plain = least_squares(lambda x: sums(x, np.arange(N_ROWS)) - rows, np.zeros(3)).x
    assert robust < 0.15
    assert np.abs(plain - TRUTH).max() > 3 * robust


@pytest.mark.parametrize(("scale", "seed"), [(3.0, 0), (3.0, 1), (0.05, 2), (0.05, 3)])
def test_small_errors_have_the_minimum_of_plain_least_squares(scale: float, seed: int) -> None:
    """Constants have nearly the same effect; those of the small scale are at their bounds."""
    rng = np.random.default_rng(seed)
    parts = rng.uniform(1, 10, (N_ROWS, 1)) * rng.uniform(0.8, 1.2, (N_ROWS, 3))
    rows = np.log(parts @ np.exp(TRUTH)) + rng.normal(0, 0.02, N_ROWS)
    bounds, start = (np.full(3, -4.6), np.full(3, 0.5)), np.array([-1.0, 0.0, -2.0])
    problem = Problem(
        lambda x, k: np.log(parts[k] @ np.exp(x)), rows, *bounds, scale, np.arange(N_ROWS),
        np.ones(3),
    )  # fmt: skip
    every = problem.rows
    plain = least_squares(
        lambda x: np.append(problem.errors(x, every) / scale, x), start, bounds=bounds
    ).x
    assert (plain > 0.499).any() == (scale < 1)
    x = minimize(problem, start, np.arange(3))
    np.testing.assert_allclose(x, plain, atol=0.01)
    least = problem.objective(plain, problem.errors(plain, every))
    assert problem.objective(x, problem.errors(x, every)) < least + 1e-3


def test_scipy_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ArgumentError, match=r"SciPy, .* pip install 'pipesim\[fit\]'"):
        fitted(sums, measured(0.01), 3)


def test_a_constant_without_effect_keeps_its_start() -> None:
    result = fitted(sums, measured(0.01), 4)
    assert result.x[3] == 0
    assert result.together == {3: ()}
    assert result.standard_errors[3] > LEAST_DETERMINED > result.standard_errors[:3].max()
    np.testing.assert_allclose(result.x[:3], TRUTH, atol=0.1)


def test_a_constant_of_zero_without_effect_stays_zero() -> None:
    given_up = np.array([0.0, 0.0, 0.0, -np.inf])
    bounds = np.full(4, -4.6), np.full(4, 4.6)
    result = fit(sums, measured(0.01), *bounds, given_up)
    assert np.exp(result.x[3]) == 0
    np.testing.assert_array_equal(result.x[:3], fitted(sums, measured(0.01), 4).x[:3])


def test_of_two_constants_with_one_effect_the_later_keeps_its_start() -> None:
    result = fitted(twins, measured(0.01), 4)
    assert result.x[3] == 0
    assert result.together == {3: (0,)}
    np.testing.assert_allclose(result.x[:3], TRUTH, atol=0.1)


def test_a_constant_without_effect_at_its_start_is_found() -> None:
    """A factor of 4 gives the floor an effect."""
    rows = floors(np.array([2.3]), np.arange(N_ROWS))
    assert (floors(np.array([0.1]), np.arange(N_ROWS)) == np.log(PARTS.sum(1))).all()
    assert fitted(floors, rows, 1).x == pytest.approx([2.3], abs=1e-3)


def test_bounds_hold_and_the_other_constants_are_the_best_within_them() -> None:
    result = fitted(sums, measured(), 3, most=0.5)
    assert result.x[0] == 0.5
    assert result.x[2] == 0.5
    assert result.x[1] > TRUTH[1]  # makes up for them


def test_a_left_out_row_has_no_influence_on_its_prediction() -> None:
    rows = measured(0.02)
    before = fitted(sums, rows, 3)
    rows[5] += np.log(1.5)
    after = fitted(sums, rows, 3)
    assert after.left_out[5] == pytest.approx(before.left_out[5], abs=0.01)
    assert after.predicted[5] > before.predicted[5]


def test_rows_are_left_out_nearly_as_by_fits_without_them() -> None:
    rows = measured(0.05)
    both = fitted(sums, rows, 3)
    assert np.abs(both.left_out - both.predicted).max() > 0.015
    for k in range(N_ROWS):
        others = np.delete(np.arange(N_ROWS), k)
        without = fitted(lambda x, n, others=others: sums(x, others[n]), rows[others], 3)
        assert both.left_out[k] == pytest.approx(sums(without.x, np.array([k]))[0], abs=0.01)


@pytest.mark.parametrize("n_rows", [1, 5, 100])
def test_rows_and_prior_have_the_weights_of_their_variances(n_rows: int) -> None:
    """Rows agree on 0.005, so that their variance is that of the assumed error, 0.05 of two rows.

    They weigh as much as n / variance, beside 1 / 0.1^2 of the prior.
    """
    bounds, width, agreed = np.array([9.0]), np.array([0.1]), np.full(n_rows, 0.005)
    result = fit(lambda x, rows: np.repeat(x[0], len(rows)), agreed, -bounds, bounds, width=width)
    of_rows = result.x[0] / 0.005
    assert of_rows > 0.8
    variance = 2 * 0.05**2 / (n_rows + 2 - of_rows)
    information = n_rows / variance + 1 / 0.1**2
    assert of_rows == pytest.approx(n_rows / variance / information, rel=1e-2)
    assert result.standard_errors == pytest.approx([information**-0.5], rel=1e-2)


@pytest.mark.slow
def test_few_rows_with_noise_stay_near_the_prior_and_many_leave_it() -> None:
    """The truth is the start for five rows, and far from the prior for the others."""
    width, bounds = np.full(3, 0.1), (np.full(3, -4.6), np.full(3, 4.6))
    every, five = np.arange(N_ROWS), np.arange(5)
    near, free = [], []
    for seed in range(10):
        drawn = sums(np.zeros(3), every) + np.random.default_rng(seed).normal(0, 0.1, N_ROWS)
        near.append(fit(sums, drawn[five], *bounds, width=width).x)
        free.append(fit(sums, drawn[five], *bounds).x)
    assert np.sqrt(np.mean(np.square(near))) < 0.08
    assert np.sqrt(np.mean(np.square(free))) > 0.2
    many = np.concatenate([measured(0.02, seed) for seed in range(20)])
    far = fit(lambda x, rows: sums(x, rows % N_ROWS), many, *bounds, width=width)
    np.testing.assert_allclose(far.x, TRUTH, atol=0.05)


def test_as_many_rows_as_constants() -> None:
    """Such rows are met; their left-out errors are larger."""
    rows = np.arange(3)
    result = fit(sums, measured()[:3], np.full(3, -4.6), np.full(3, 4.6))
    near = np.abs(result.predicted - measured()[:3])
    assert near.max() < 0.03
    assert np.abs(result.left_out - measured()[rows]).max() > 2 * near.max()

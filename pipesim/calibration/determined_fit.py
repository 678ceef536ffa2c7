"""`fit`: constants that rows determine, those that they do not, and errors of left-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pipesim.calibration.least_squares import (
    Floats,
    Ints,
    Problem,
    curvature,
    minimize,
    search,
)

#: Standard error of a logarithm above which the rows do not determine a constant. The prior's is 1.
LEAST_DETERMINED = 0.5
#: Standard error of a logarithm above which they determine it weakly: the 95 % interval reaches
#: beyond a factor of 2 = exp(1.96 x 0.35) in either direction.
WEAKLY_DETERMINED = 0.35
#: Most configurations for which each is left out by a fit of its own; see `fit`.
EXACT_ROWS = 12
#: Error of predictions that is assumed at first, and the number of rows that the assumption counts.
_SCALE, _SCALE_ROWS = 0.05, 2.0
#: Times that the error is estimated. A smaller one gives less weight to outliers.
_SCALES = 2
#: Correlation of two constants, as a size, from which the rows tell them together only.
_TOGETHER = 0.7


@dataclass(frozen=True, eq=False)
class Fit:
    """Constants that suit measured rows.

    Attributes
    ----------
    x
        log(constant / start); ``undetermined`` of `fit` for a constant that is not determined.
    standard_errors
        Of x. For a constant that is not determined: when it was given up.
    together
        For each constant that is not determined, others with which the rows tell it together only.
        Empty for other constants, and where it has no effect on any row.
    predicted, left_out
        Logarithm of the predicted seconds of each row: by x, and by a fit without all rows of its
        configuration.
    """

    x: Floats
    standard_errors: Floats
    together: dict[int, tuple[int, ...]]
    predicted: Floats
    left_out: Floats


def fit(
    predict: Callable[[Floats, Ints], Floats],
    measured: Floats,
    lower: Floats,
    upper: Floats,
    undetermined: Floats | None = None,
    configuration: Ints | None = None,
) -> Fit:
    """Return the constants that suit measured rows.

    The error of predictions that is not unusual is estimated from the rows. While the standard
    error of a constant is above `LEAST_DETERMINED`, the one with the largest is given up, and the
    others are fitted again. Of constants that the rows tell together only, the later in order is
    given up.

    Rows of one configuration count as one, and are left out together. Left-out predictions have a
    fit of their own for up to `EXACT_ROWS` configurations. For more, the fit without one is one
    step of Gauss and Newton from the fit to all rows. Either keeps the constants that are not
    determined by all rows.

    Parameters
    ----------
    predict, measured, lower, upper
        As in `pipesim.calibration.least_squares.Problem`.
    undetermined
        x of each constant if it is given up: 0 (the default), its start, or -inf, a constant of 0.
    configuration
        Number of each row's configuration, from 0 on; by default, each row has its own.
    """
    if configuration is None:
        configuration = np.arange(len(measured))
    problem = Problem(predict, measured, lower, upper, _SCALE, configuration)
    free = np.arange(len(lower))
    x = np.zeros(len(lower))
    for _ in range(_SCALES):
        x = minimize(problem, search(problem, x, free), free, problem.rows)
        problem = replace(problem, scale=_scale(problem, x, free))
    together: dict[int, tuple[int, ...]] = {}
    standard_errors = np.full(len(lower), np.nan)
    while True:
        x = minimize(problem, x, free, problem.rows)
        spread = _covariance(problem, x, free)
        standard_errors[free] = deviations = np.sqrt(np.diag(spread))
        if not (deviations > LEAST_DETERMINED).any():
            break
        # The last of the largest.
        worst = len(free) - 1 - int(np.argmax(deviations[::-1].round(3)))
        tied = np.abs(spread[worst]) > _TOGETHER * deviations[worst] * deviations
        together[int(free[worst])] = tuple(int(k) for k in free[tied] if k != free[worst])
        x[free[worst]] = 0.0 if undetermined is None else undetermined[free[worst]]
        free = np.delete(free, worst)
    left_out = _left_out(problem, x, free)
    return Fit(x, standard_errors, together, predict(x, problem.rows), left_out)


def _scale(problem: Problem, x: Floats, free: Ints) -> float:
    """Return the error of predictions, estimated from the rows and from the assumption."""
    errors = problem.errors(x, problem.rows)
    squares = float((problem.share * (problem.weights(errors) * errors) ** 2).sum())
    n_degrees = problem.share.sum() - len(free) + _SCALE_ROWS
    return float(np.sqrt((squares + _SCALE_ROWS * _SCALE**2) / n_degrees))


def _covariance(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the covariance of the free constants, shape ``(n_free, n_free)``."""
    errors = problem.errors(x, problem.rows)
    jacobian = problem.jacobian(x, errors, problem.rows, free)
    return np.asarray(np.linalg.inv(curvature(problem, jacobian, errors)), np.float64)


def _left_out(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the logarithm of each row's seconds, by a fit without its configuration."""
    rows = problem.rows
    errors = problem.errors(x, rows)
    jacobian = problem.jacobian(x, errors, rows, free)
    weights = problem.share * problem.weights(errors) / problem.scale**2
    bent = curvature(problem, jacobian, errors)
    predicted = np.empty(len(rows))
    n_configurations = 1 + int(problem.configuration.max())
    for number in range(n_configurations):
        is_out = problem.configuration == number
        if n_configurations <= EXACT_ROWS:
            moved = minimize(problem, x, free, rows[~is_out])
        else:
            lines, weighted = jacobian[is_out], (weights[:, None] * jacobian)[is_out]
            change = np.linalg.solve(bent - lines.T @ weighted, weighted.T @ errors[is_out])
            moved = problem.moved(x, free, change)
        predicted[is_out] = problem.predict(moved, rows[is_out])
    return predicted

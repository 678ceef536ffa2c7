"""Robust least squares over the logarithms of constants, with a weak prior.

The objective, for measured seconds t and predicted seconds p(x)::

    sum of share rho(log(p / t) / scale) + sum of (x / PRIOR)^2

x is log(constant / start), one number a constant. The prior says that a constant is rarely more
than a factor e, about 2.7, from its start. It decides only where the rows say little. rho(z) is
``2 c^2 (sqrt(1 + z^2 / c^2) - 1)`` with c = 1.5: a square for small errors, and the distance for
large ones, so that an outlier has little weight. The shares of rows of one configuration, which was
measured several times, sum to 1.

`scipy.optimize.least_squares` finds the minimum, by its method "dogbox", which may end at a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.utils.packages import import_extra

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Standard deviation of the prior of log(constant / start).
PRIOR = 1.0
#: Error, in scales, from which it counts by its distance and no longer by its square.
_TURN = 1.5
#: Difference of a logarithm by which derivatives are taken. Predictions have kinks.
_DIFFERENCE = 1e-3
#: Most evaluations, and the least relative gain of the objective for another. A gain of 1e-4 moves
#: a constant by about 0.01 of its standard error.
_EVALUATIONS, _GAIN = 40, 1e-4
#: Factors by which each constant is moved in search of a better start.
_FACTORS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Measured rows, and a prediction of them; both are logarithms of seconds.

    ``predict`` is a function of x, shape ``(n_constants,)``, and of indices of rows. ``scale`` is
    an error of a prediction, as a share, that is not unusual. ``configuration`` is the number of
    each row's configuration, from 0 on; rows of one are predicted alike.
    """

    predict: Callable[[Floats, Ints], Floats]
    measured: Floats
    lower: Floats
    upper: Floats
    scale: float
    configuration: Ints

    @property
    def share(self) -> Floats:
        """1 over the number of rows of each row's configuration."""
        shares: Floats = 1.0 / np.bincount(self.configuration)[self.configuration]
        return shares

    @property
    def rows(self) -> Ints:
        """Indices of all rows."""
        return np.arange(len(self.measured))

    def errors(self, x: Floats, rows: Ints) -> Floats:
        """Return log(predicted / measured) of some rows."""
        return self.predict(x, rows) - self.measured[rows]

    def jacobian(self, x: Floats, errors: Floats, rows: Ints, free: Ints) -> Floats:
        """Return the derivatives of ``errors``, at x, by each free constant: a column each."""
        columns = []
        for constant in free:
            moved = x.copy()
            inside = moved[constant] + _DIFFERENCE <= self.upper[constant]
            moved[constant] += _DIFFERENCE if inside else -_DIFFERENCE
            change = moved[constant] - x[constant]
            columns.append((self.errors(moved, rows) - errors) / change)
        return np.array(columns).reshape(len(free), len(rows)).T

    def moved(self, x: Floats, free: Ints, change: ArrayLike) -> Floats:
        """Return x with some constants changed, as far as their bounds allow."""
        moved = x.copy()
        moved[free] = np.clip(
            x[free] + np.asarray(change, np.float64), self.lower[free], self.upper[free]
        )
        return moved

    def objective(self, x: Floats, errors: Floats) -> float:
        """Return the objective at x, where all rows have these errors.

        A constant of 0 has x = -inf. It does not vary, and has no prior.
        """
        z = errors / self.scale
        robust = 2 * _TURN**2 * (np.sqrt(1 + (z / _TURN) ** 2) - 1)
        return float((self.share * robust).sum() + ((x[np.isfinite(x)] / PRIOR) ** 2).sum())

    def weights(self, errors: Floats) -> Floats:
        """Return the weight of each error's square, at most 1; small for outliers."""
        weights: Floats = 1 / np.sqrt(1 + (errors / self.scale / _TURN) ** 2)
        return weights


def curvature(problem: Problem, jacobian: Floats, errors: Floats) -> Floats:
    """Return half the curvature of the objective by the columns of a Jacobian, prior included."""
    weights = (problem.share * problem.weights(errors))[:, None] / problem.scale**2
    both: Floats = jacobian.T @ (weights * jacobian) + np.eye(jacobian.shape[1]) / PRIOR**2
    return both


def minimize(problem: Problem, x: Floats, free: Ints, rows: Ints) -> Floats:
    """Return the x with the least objective over some rows, from x, which is not changed."""
    least_squares = import_extra("scipy.optimize", "fit", "fitting constants").least_squares
    n_rows, share = len(rows), problem.share[rows]

    def whole(values: Floats) -> Floats:
        """Return x with the free constants at ``values``."""
        moved = x.copy()
        moved[free] = values
        return moved

    def residuals(values: Floats) -> Floats:
        """Return errors over their scale, and the prior's part of each free constant."""
        return np.append(problem.errors(whole(values), rows) / problem.scale, values / PRIOR)

    def jacobian(values: Floats) -> Floats:
        """Return the derivatives of ``residuals``."""
        moved = whole(values)
        lines = problem.jacobian(moved, problem.errors(moved, rows), rows, free)
        return np.vstack([lines / problem.scale, np.eye(len(free)) / PRIOR])

    def loss(squares: Floats) -> Floats:
        """Return rho and its two derivatives by the square; the prior keeps its squares."""
        root = np.sqrt(1 + squares[:n_rows] / _TURN**2)
        terms = np.vstack([squares, np.ones_like(squares), np.zeros_like(squares)])
        terms[:, :n_rows] = 2 * _TURN**2 * (root - 1), 1 / root, -1 / (2 * _TURN**2 * root**3)
        terms[:, :n_rows] *= share
        return terms

    if not len(free):
        return x
    bounds = problem.lower[free], problem.upper[free]
    start = np.clip(x[free], *bounds)
    result = least_squares(
        residuals, start, jac=jacobian, bounds=bounds, method="dogbox", loss=loss, ftol=_GAIN,
        xtol=_DIFFERENCE / 10, max_nfev=_EVALUATIONS,
    )  # fmt: skip
    return whole(result.x)


def search(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the best x that is reached by moving one free constant after the other.

    Steps alone would not leave a start at which a constant has no effect, as `launch` has none
    where kernels take longer.
    """
    rows = problem.rows
    best = problem.objective(x, problem.errors(x, rows))
    for constant in free:
        around = x
        for factor in _FACTORS:
            moved = problem.moved(around, free[free == constant], np.log(factor))
            value = problem.objective(moved, problem.errors(moved, rows))
            if value < best:
                x, best = moved, value
    return x


# Constants that rows determine, those that they do not, and errors of left-out rows.

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

    ``undetermined`` is x of each constant if it is given up: 0 (the default), its start, or -inf,
    a constant of 0. By default, each row has its own configuration.
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

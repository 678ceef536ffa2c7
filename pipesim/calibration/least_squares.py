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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.utils.extras import import_extra

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
    """Measured rows, and a prediction of them.

    Attributes
    ----------
    predict
        Function of x, shape ``(n_constants,)``, and of indices of rows. It returns the logarithms
        of the seconds that are predicted for these rows.
    measured
        Logarithm of the measured seconds of each row.
    lower, upper
        Bounds of x.
    scale
        Error of a prediction, as a share, that is not unusual.
    configuration
        Number of each row's configuration, from 0 on. Rows of one are predicted alike.
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
    """Return the x with the least objective over some rows.

    Parameters
    ----------
    problem
        Rows and prediction.
    x
        Start. It is not changed.
    free
        Indices of the constants that vary; the others stay.
    rows
        Indices of the rows that count.
    """
    least_squares, n_rows = _scipy_least_squares(), len(rows)
    share = problem.share[rows]

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


def _scipy_least_squares() -> Callable[..., Any]:
    """Return SciPy's least squares; raise `ArgumentError` if SciPy is missing."""
    function: Callable[..., Any] = import_extra(
        "scipy.optimize", "fit", "fitting constants"
    ).least_squares
    return function


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

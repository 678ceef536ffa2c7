"""Robust least squares over the logarithms of constants, with a prior.

The objective, for measured seconds t and predicted seconds p(x)::

    sum of share rho(log(p / t) / scale, 1.5) + sum of rho(x / width, 4)

x is log(constant / start), one number a constant, and width the standard deviation of its prior.
rho(z, c) is ``2 c^2 (sqrt(1 + z^2 / c^2) - 1)``: a square for z below c, and the distance above, so
that an outlier has little weight, and a prior gives way to rows that agree on another value.
The shares of rows of one configuration, which was measured several times, sum to 1.

A prediction is a simulation and takes milliseconds. So `minimize` goes from one minimum of a simple
model of the predictions to the next. `scipy.optimize.least_squares` finds those, by its method
"dogbox", which may end at a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.packages import import_extra

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Width of a prior that decides only where the rows say little: a factor e, about 2.7.
WEAK = 1.0
#: Error, in scales, from which it counts by its distance and no longer by its square; and log of a
#: constant over its start, in widths of its prior, from which it does.
_TURN, _PRIOR_TURN = 1.5, 4.0
#: Difference of a logarithm by which derivatives are taken. Predictions have kinks.
_DIFFERENCE = 1e-3
#: Most steps to the minimum, and the least relative gain of the objective for another. A gain of
#: 1e-4 moves a constant by about 0.01 of its standard error.
_STEPS, _GAIN = 10, 1e-4
#: Likewise, while the scale of errors is not known.
_ROUGH_GAIN = 0.03
#: Most times that a step is halved.
_HALVINGS = 6
#: Least seconds of a row by `_nearby`, as a share of those from which it is far then.
_LEAST_PART = 1e-3
#: Factors by which a constant is moved in search of a better start, if no row has a larger
#: derivative by its logarithm.
_LEAST_EFFECT = 0.01
_FACTORS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Measured rows, and a prediction of them; both are logarithms of seconds.

    ``predict`` is a function of x, shape ``(n_constants,)``, and of indices of rows. ``scale`` is
    an error of a prediction, as a share, that is not unusual. ``configuration`` is the number of
    each row's configuration, from 0 on; rows of one are predicted alike. ``width`` is the standard
    deviation of the prior of each x.
    """

    predict: Callable[[Floats, Ints], Floats]
    measured: Floats
    lower: Floats
    upper: Floats
    scale: float
    configuration: Ints
    width: Floats

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

    def objective(self, x: Floats, errors: Floats) -> float:
        """Return the objective at x, where all rows have these errors.

        A constant of 0 has x = -inf. It does not vary, and has no prior.
        """
        prior = _rho((x / self.width)[np.isfinite(x)], _PRIOR_TURN)
        return float((self.share * _rho(errors / self.scale, _TURN)).sum() + prior.sum())


def _rho(z: Floats, turn: float) -> Floats:
    """Return z^2 if it is small, and a multiple of its size beyond the turn."""
    loss: Floats = 2 * turn**2 * (np.sqrt(1 + (z / turn) ** 2) - 1)
    return loss


def _weight(z: Floats, turn: float) -> Floats:
    """Return the slope of `_rho` over that of z^2: at most 1, and small beyond the turn."""
    weight: Floats = 1 / np.sqrt(1 + (z / turn) ** 2)
    return weight


def minimize(problem: Problem, x: Floats, free: Ints, least_gain: float = _GAIN) -> Floats:
    """Return the x with the least objective, from x, which is not changed.

    `_nearby` has the predictions around x. Its minimum is the next x, and so on. A step that does
    not lower the objective is halved. A gain below a share ``least_gain`` ends the search.
    """
    errors = problem.errors(x, problem.rows)
    value = problem.objective(x, errors)
    for _ in range(_STEPS if len(free) else 0):
        better = _near_minimum(_nearby(problem, x, errors, free), x, free, problem.rows)
        for _ in range(_HALVINGS):
            errors = problem.errors(better, problem.rows)
            reached = problem.objective(better, errors)
            if reached < value:
                break
            better = (x + better) / 2
        else:
            return x
        gain, value, x = value - reached, reached, better
        if gain < least_gain * value:
            return x
    return x


def _nearby(problem: Problem, x: Floats, errors: Floats, free: Ints) -> Problem:
    """Return a problem with the same predictions and derivatives at x, without simulations.

    The seconds of a row are a sum of parts: one for each free constant, to which it is proportional
    or inversely proportional, and one that does not vary.
    """
    start = problem.measured + errors
    effects = problem.jacobian(x, errors, problem.rows, free)

    def predict(moved: Floats, rows: Ints) -> Floats:
        """Return log(seconds) of some rows."""
        sizes, signs = np.abs(effects[rows]), np.sign(effects[rows])
        change = (sizes * np.expm1(signs * (moved[free] - x[free]))).sum(axis=1)
        seconds: Floats = start[rows] + np.log(np.maximum(1 + change, _LEAST_PART))
        return seconds

    return replace(problem, predict=predict)


def _near_minimum(problem: Problem, x: Floats, free: Ints, rows: Ints) -> Floats:
    """Return the x with the least objective over some rows; it calls for many predictions."""
    least_squares = import_extra("scipy.optimize", "fit", "fitting constants").least_squares
    width, ones = problem.width[free], np.ones(len(free))
    share = np.append(problem.share[rows], ones)
    turn = np.append(np.full(len(rows), _TURN), _PRIOR_TURN * ones)

    def whole(values: Floats) -> Floats:
        """Return x with the free constants at ``values``."""
        moved = x.copy()
        moved[free] = values
        return moved

    def residuals(values: Floats) -> Floats:
        """Return errors over their scale, and the prior's part of each free constant."""
        return np.append(problem.errors(whole(values), rows) / problem.scale, values / width)

    def jacobian(values: Floats) -> Floats:
        """Return the derivatives of ``residuals``."""
        moved = whole(values)
        lines = problem.jacobian(moved, problem.errors(moved, rows), rows, free)
        return np.vstack([lines / problem.scale, np.diag(1 / width)])

    def loss(squares: Floats) -> Floats:
        """Return rho and its two derivatives by the square."""
        root = np.sqrt(1 + squares / turn**2)
        terms = 2 * turn**2 * (root - 1), 1 / root, -1 / (2 * turn**2 * root**3)
        losses: Floats = share * np.vstack(terms)
        return losses

    bounds = problem.lower[free], problem.upper[free]
    start = np.clip(x[free], *bounds)
    result = least_squares(
        residuals, start, jac=jacobian, bounds=bounds, method="dogbox", loss=loss, ftol=_GAIN,
        xtol=_DIFFERENCE / 10, max_nfev=40,
    )  # fmt: skip
    return whole(result.x)


def search(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the best x that is reached by moving constants without an effect one after the other.

    Steps alone would not leave a start at which a constant has no effect, as `launch` has none
    where kernels take longer.
    """
    rows = problem.rows
    errors = problem.errors(x, rows)
    best = problem.objective(x, errors)
    effects = np.abs(problem.jacobian(x, errors, rows, free)).max(axis=0)
    for constant in free[effects < _LEAST_EFFECT]:
        around = x
        for factor in _FACTORS:
            moved = around.copy()
            moved[constant] += np.log(factor)
            moved = np.clip(moved, problem.lower, problem.upper)
            value = problem.objective(moved, problem.errors(moved, rows))
            if value < best:
                x, best = moved, value
    return x


# Constants that rows determine, those that they do not, and errors of left-out rows.

#: Standard error of a logarithm above which the rows do not determine a constant; and likewise as
#: a share of the prior's, so that rows give at least a third of what is known of the constant.
LEAST_DETERMINED, _LEAST_GAIN = 0.5, 0.8
#: Standard error of a logarithm above which they determine it weakly: the 95 % interval reaches
#: beyond a factor of 2 = exp(1.96 x 0.35) in either direction.
WEAKLY_DETERMINED = 0.35
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
    width: Floats | None = None,
) -> Fit:
    """Return the constants that suit measured rows.

    The error of predictions that is not unusual is estimated from the rows. While the standard
    error of a constant is above `LEAST_DETERMINED`, or above 0.8 of the prior's, the one with the
    largest is given up, and the others are fitted again. Of constants that the rows tell together
    only, the later in order is given up.

    Rows of one configuration count as one, and are left out together. The fit without them is that
    of `_nearby` at the fit to all rows. It keeps the constants that are not determined by all rows.

    ``undetermined`` is x of each constant if it is given up: 0 (the default), its start, or -inf,
    a constant of 0. By default, each row has its own configuration, and ``width`` is `WEAK`.
    """
    if configuration is None:
        configuration = np.arange(len(measured))
    if width is None:
        width = np.full(len(lower), WEAK)
    problem = Problem(predict, measured, lower, upper, _SCALE, configuration, width)
    free = np.arange(len(lower))
    x = np.zeros(len(lower))
    x = search(problem, x, free)
    for _ in range(_SCALES):
        x = minimize(problem, x, free, _ROUGH_GAIN)
        problem = replace(problem, scale=_scale(problem, x, free))
    together: dict[int, tuple[int, ...]] = {}
    standard_errors = np.full(len(lower), np.nan)
    while True:
        x = minimize(problem, x, free)
        spread = _covariance(problem, x, free)
        standard_errors[free] = deviations = np.sqrt(np.diag(spread))
        limits = np.minimum(LEAST_DETERMINED, _LEAST_GAIN / np.sqrt(_prior(problem, x, free)))
        if not (deviations > limits).any():
            break
        # The last of the largest.
        worst = len(free) - 1 - int(np.argmax((deviations / limits)[::-1].round(3)))
        tied = np.abs(spread[worst]) > _TOGETHER * deviations[worst] * deviations
        together[int(free[worst])] = tuple(int(k) for k in free[tied] if k != free[worst])
        x[free[worst]] = 0.0 if undetermined is None else undetermined[free[worst]]
        free = np.delete(free, worst)
    left_out = _left_out(problem, x, free)
    return Fit(x, standard_errors, together, predict(x, problem.rows), left_out)


def _scale(problem: Problem, x: Floats, free: Ints) -> float:
    """Return the error of predictions, estimated from the rows and from the assumption.

    Each constant takes as much of a row as the rows say more than its prior.
    """
    errors = problem.errors(x, problem.rows)
    squares = problem.share * (_weight(errors / problem.scale, _TURN) * errors) ** 2
    shares = 1 - np.diag(_covariance(problem, x, free)) * _prior(problem, x, free)
    n_degrees = problem.share.sum() - shares.sum() + _SCALE_ROWS
    return float(np.sqrt((squares.sum() + _SCALE_ROWS * _SCALE**2) / n_degrees))


def _covariance(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the covariance of the free constants, shape ``(n_free, n_free)``."""
    errors = problem.errors(x, problem.rows)
    jacobian = problem.jacobian(x, errors, problem.rows, free)
    weights = problem.share * _weight(errors / problem.scale, _TURN) / problem.scale**2
    precision = jacobian.T @ (weights[:, None] * jacobian) + np.diag(_prior(problem, x, free))
    return np.asarray(np.linalg.inv(precision), np.float64)


def _prior(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return 1 over the variance of each free constant's prior; less where it gives way."""
    width = problem.width[free]
    return _weight(x[free] / width, _PRIOR_TURN) / width**2


def _left_out(problem: Problem, x: Floats, free: Ints) -> Floats:
    """Return the logarithm of each row's seconds, by a fit without its configuration."""
    rows = problem.rows
    predicted = np.empty(len(rows))
    near = _nearby(problem, x, problem.errors(x, rows), free)
    for number in range(1 + int(problem.configuration.max())):
        is_out = problem.configuration == number
        moved = _near_minimum(near, x, free, rows[~is_out]) if len(free) else x
        predicted[is_out] = problem.predict(moved, rows[is_out])
    return predicted

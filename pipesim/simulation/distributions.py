"""Distributions of factors on durations, and failures, for `pipesim.Noise`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, PipeError, number
from pipesim.utils import random_draws
from pipesim.utils.checks import Positive, Seconds, checked

Floats = NDArray[np.float64]
#: Largest ``sigma`` of `LogNormal`. The table of draws ends 5.9 standard deviations above the mean
#: of the logarithm. For this ``sigma``, it has 99.8 % of the mean.
_MOST_SIGMA = 3.0


class Distribution(Protocol):
    """Distribution of factors on a duration; hashable, as a frozen dataclass is."""

    def __hash__(self) -> int: ...

    def quantile(self, level: Floats) -> Floats:
        """Return the quantiles of the factors at ``level`` (0..1, exclusive); same shape."""


def _standard_normal(level: Floats) -> Floats:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(x) for x in level.ravel().tolist()]).reshape(level.shape)


@dataclass(frozen=True)
class Normal:
    """Factors of mean 1 and standard deviation ``std``; those below 0 are 0.

    With an ``std`` of 0.2, one factor in three million is below 0. With a much larger ``std``, the
    mean is above 1.

    Attributes
    ----------
    std
        Standard deviation of the factors, at least 0, such as 0.02 for 2 %.

    Examples
    --------
    Factors of two devices in scenario 0:

    >>> import pipesim as ps
    >>> from pipesim.simulation import Normal
    >>> ps.Noise(device=Normal(0.1), seed=0).device_factors(2, [0]).round(3)
    array([[0.91 , 1.032]])
    """

    std: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", _checked_spread("std", self.std))

    def quantile(self, level: Floats) -> Floats:
        """Return the factors below which given shares of all factors lie.

        Parameters
        ----------
        level
            Array of shares, above 0 and below 1.

        Returns
        -------
        numpy.ndarray
            Factors, of the shape of ``level``.

        Examples
        --------
        >>> import numpy as np
        >>> from pipesim.simulation import Normal
        >>> Normal(0.1).quantile(np.array([0.5, 0.975])).round(3)
        array([1.   , 1.196])
        """
        return np.maximum(0.0, 1.0 + self.std * _standard_normal(level))


@dataclass(frozen=True)
class LogNormal:
    """Factors of mean 1 whose logarithm has the standard deviation ``sigma``, 0 to 3.

    Above 3, the mean depends on factors that are too rare to be drawn in any scenario.

    Attributes
    ----------
    sigma
        Standard deviation of the logarithm, 0 to 3. Small ones are relative: 0.02 is about 2 %.
    """

    sigma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", _checked_spread("sigma", self.sigma, _MOST_SIGMA))

    def quantile(self, level: Floats) -> Floats:
        """Return the factors below which given shares of all factors lie.

        Parameters
        ----------
        level
            Array of shares, above 0 and below 1.

        Returns
        -------
        numpy.ndarray
            Factors, of the shape of ``level``.

        Examples
        --------
        The median is below the mean of 1: ``exp(-0.1**2 / 2)``.

        >>> import numpy as np
        >>> from pipesim.simulation import LogNormal
        >>> LogNormal(0.1).quantile(np.array([0.5])).round(4)
        array([0.995])
        """
        return np.exp(self.sigma * _standard_normal(level) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Empirical:
    """Measured values divided by their mean, each equally likely.

    Parameters
    ----------
    samples
        Measured values, such as the seconds of an operation in each step.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim.simulation import Empirical
    >>> noise = ps.Noise(device=Empirical([9, 10, 11]), seed=0)  # measured seconds
    >>> noise.device_factors(4, [0])
    array([[0.9, 1. , 1. , 1.1]])
    """

    samples: Sequence[float] | Floats

    def __post_init__(self) -> None:
        values = np.sort(_sampled(self.samples))
        if not len(values):
            raise ArgumentError("samples are empty; give at least one measured value")
        bad = values[~(np.isfinite(values) & (values >= 0))]
        if len(bad):
            raise ArgumentError(f"samples must be finite and >= 0, got {bad[0]}")
        if not values.any():
            raise ArgumentError("samples are all 0; a factor cannot be made of them")
        object.__setattr__(self, "samples", tuple(values.tolist()))

    def quantile(self, level: Floats) -> Floats:
        """Return the factors below which given shares of all factors lie.

        Parameters
        ----------
        level
            Array of shares, at least 0 and at most 1.

        Returns
        -------
        numpy.ndarray
            Measured values over their mean, of the shape of ``level``.
        """
        values = np.array(self.samples)
        values = np.ldexp(values, -int(np.frexp(values.max())[1]))  # exact; no sum overflows
        values /= values.mean()
        factors: Floats = values[
            np.minimum((level * len(values)).astype(np.int64), len(values) - 1)
        ]
        return factors


@checked
@dataclass(frozen=True)
class Failures:
    """Failures and the pauses after them: a task with a failure lasts ``pause`` longer.

    Attributes
    ----------
    every
        Mean seconds of work between failures of one GPU. A task of d seconds has a failure with
        probability d / every.
    pause
        Seconds from a failure until the device continues.

    Examples
    --------
    A failure in 100 s of work, after which the device pauses for 10 s:

    >>> import pipesim as ps
    >>> from pipesim.simulation import Failures
    >>> noise = ps.Noise(failures=Failures(every=100, pause=10), seed=0)
    >>> graph, costs = ps.lower(ps.schedule("gpipe", 2, 2)), ps.Costs(forward=1, backward=2)
    >>> scenarios = ps.simulate_many(graph, costs, noise, n=200, progress=False)
    >>> float(scenarios.makespan.min()), bool(scenarios.makespan.max() > 19)
    (9.0, True)
    """

    every: Positive
    pause: Seconds


@lru_cache(maxsize=64)
def tabulated(distribution: Distribution, slowest_of: int) -> Floats:
    """Return the table of quantiles of a distribution, which may be a class of the user."""
    what = f"quantile of {distribution!r:.60}"

    def quantile(level: Floats) -> Floats:
        try:
            with np.errstate(over="ignore"):
                got = distribution.quantile(level)
        except PipeError:
            raise
        except Exception as error:
            raise ArgumentError(f"{what} raised {type(error).__name__}: {error}") from error
        if np.shape(got) != level.shape or np.asarray(got).dtype.kind not in "fiu":
            raise ArgumentError(
                f"{what} must return an array of factors of the shape of its levels, "
                f"{level.shape}, got {type(got).__name__} {got!r:.60}"
            )
        return got

    table = random_draws.quantile_table(quantile, slowest_of)
    bad = table[~(np.isfinite(table) & (table >= 0))]
    if len(bad):
        raise ArgumentError(f"factors must be finite and >= 0, but {distribution!r} has {bad[0]}")
    return table


def check_distribution(name: str, value: object) -> None:
    """Raise `ArgumentError` unless ``value`` is a distribution, or None."""
    if value is None:
        return
    if isinstance(value, type) or not hasattr(value, "quantile"):
        raise ArgumentError(f"{name} must be a distribution, such as Normal(0.02), got {value!r}")
    try:
        hash(value)  # the key of its cached table
    except TypeError:
        raise ArgumentError(
            f"{name} must be hashable, as a frozen dataclass is, got {value!r}"
        ) from None


def _sampled(samples: object) -> Floats:
    """Return measured values as floats; raise `ArgumentError` if they are no numbers."""
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "fiu":
        return samples.astype(np.float64).ravel()
    listed = samples.tolist() if isinstance(samples, np.ndarray) else samples
    if isinstance(listed, (str, bytes, Mapping)) or not isinstance(listed, Iterable):
        raise ArgumentError(f"samples must be numbers, got {samples!r:.60}; give a list of them")
    values = []
    for place, sample in enumerate(listed):
        if isinstance(sample, bool) or not isinstance(sample, numbers.Real):
            raise ArgumentError(
                f"samples must be numbers; number {place} is {sample!r:.60} "
                f"({type(sample).__name__})"
            )
        value = number(sample)  # None for NaN, and for numbers beyond float64
        values.append(math.nan if value is None else value)
    return np.array(values, dtype=np.float64)


def _checked_spread(name: str, value: object, most: float = np.inf) -> float:
    got = number(value)
    if got is None or not 0 <= got < np.inf:
        raise ArgumentError(f"{name} must be finite and >= 0, got {value!r}")
    if got > most:
        raise ArgumentError(f"{name} must be at most {most:g}, got {value!r}")
    return got

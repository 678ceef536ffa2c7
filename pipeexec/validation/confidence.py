"""Confidence intervals of means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

#: 97.5 % quantile of Student's t for 1 to 30 degrees of freedom; NIST/SEMATECH e-Handbook of
#: Statistical Methods, 1.3.6.7.2.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
#: 97.5 % quantile of the normal distribution.
_NORMAL = 1.959964


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Iterable[float]) -> Interval:
    """Return the mean of independent values and its 95 % interval, by Student's t.

    The interval is NaN for fewer than two values, as their deviation is unknown. The mean is NaN
    for no values.
    """
    sample = np.array(list(values), dtype=np.float64)
    if not len(sample):
        return Interval(math.nan, math.nan, math.nan)
    mean = float(sample.mean())
    if len(sample) < 2:
        return Interval(mean, math.nan, math.nan)
    half = _student_quantile(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


def _student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for ``freedom`` degrees of freedom."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # Abramowitz and Stegun, 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)

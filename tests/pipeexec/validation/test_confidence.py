"""Confidence intervals of means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeexec.validation.accuracy import mean_interval


def test_intervals_by_hand() -> None:
    """Two values: t is 12.706, and their standard error half of their difference."""
    mean, low, high = mean_interval([1.0, 3.0])
    assert (mean, low, high) == pytest.approx((2, 2 - 12.706, 2 + 12.706))
    assert mean_interval([4.0]).mean == 4
    assert math.isnan(mean_interval([4.0]).low)
    assert math.isnan(mean_interval([]).mean)


@pytest.mark.parametrize(("n", "t"), [(3, 4.30265), (5, 2.77645), (31, 2.04227), (41, 2.02108),
                                      (1001, 1.96234)])  # fmt: skip
def test_students_t(n: int, t: float) -> None:
    """The published values, of the table and beyond it."""
    values = np.zeros(n)
    values[:2] = 1, -1
    half = mean_interval(values).high
    assert half == pytest.approx(t * values.std(ddof=1) / math.sqrt(n), rel=2e-4)

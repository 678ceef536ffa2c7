"""Confidence intervals of medians."""

from __future__ import annotations


def interval(n: int) -> tuple[int, int]:
    """Return which of n sorted values bound their median with 95 % confidence, at least.

    The number of values below the median is binomial, of n and 1/2.
    """
    below, ways, low = 0, 1, 0
    for k in range(n // 2):
        below += ways
        if below > 0.025 * 2**n:
            break
        low = k
        ways = ways * (n - k) // (k + 1)
    return low, n - 1 - low

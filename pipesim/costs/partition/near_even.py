"""Ranges of borders of the most even split, where a bound on stages leaves wide ones.

A layer heavier than the mean stage forces a large stage, but leaves the others free. With weights
capped at a level, a stage of ``x`` has at least the square ``(x - level)**2`` of its heavy layers,
plus the square of its capped surplus. By Cauchy's inequality, ``s`` stages whose surplus is ``d``
have squares of at least ``d**2 / s``. Borders where that exceeds the squares of any known split are
not those of the best.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np

from pipesim.costs.partition.even_stages import stage_units
from pipesim.costs.partition.exact_sums import ExactSums, Floats, Ints, add, to_whole
from pipesim.costs.partition.stage_bound import BORDER_HELPERS, last_within
from pipesim.errors import CostsWarning
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.jit import kernel

#: Steps of the search for the level; any level is right, and a good one narrows ranges more.
_LEVELS = 20
#: Most possible borders in all; each takes 40 bytes, and about a tenth of a microsecond.
_MOST_BORDERS = 20_000_000
_EPS = float(np.finfo(np.float64).eps)


def narrow_ranges(weights: Floats, sums: ExactSums, bound: Ints, low: Ints, high: Ints) -> int:
    """Narrow ranges of borders to those of the most even split; return the level, in units.

    Ranges are changed in place.

    Parameters
    ----------
    weights
        Weights; shape ``(n_layers,)``.
    sums
        Their sums.
    bound
        Largest stage, as limbs.
    low, high
        Least and largest border after each number of stages; shape ``(n_stages + 1,)``.

    Warns
    -----
    CostsWarning
        If too many borders are possible. Then ranges around an even split are kept.
    """
    n_stages = len(low) - 1
    bits, _ = stage_units(bound)
    shares = np.ldexp(weights, -(sums.exponent + bits)) / sums.divisor
    level = _level(shares, n_stages)
    capped = np.concatenate([[0.0], np.minimum(shares, level).cumsum()])
    stage = np.arange(n_stages + 1)
    middle = capped[-1] * stage / n_stages
    near = np.searchsorted(capped, middle)
    after = capped[np.minimum(near, len(weights))]
    near -= (near > 0) & (middle - capped[near - 1] < after - middle)
    borders = np.zeros(n_stages + 1, dtype=np.int64)
    _nearest_split(sums.limbs, bound, near, low, high, borders)
    spare = _excess(shares, sums.limbs, borders, level, bits)
    spare -= (capped[-1] - n_stages * level) ** 2 / n_stages
    rounding = 4 * len(weights) * _EPS * capped[-1]
    radius = np.sqrt(max(0.0, spare) * stage * (n_stages - stage) / n_stages) + rounding
    np.maximum(low, np.searchsorted(capped, middle - radius), out=low)
    np.minimum(high, np.searchsorted(capped, middle + radius, "right") - 1, out=high)
    if (high - low).sum() > _MOST_BORDERS:
        half = _MOST_BORDERS // (2 * n_stages)
        np.maximum(low, borders - half, out=low)
        np.minimum(high, borders + half, out=high)
        warn_caller(
            f"the slowest stage of the split of {len(weights)} layers is as fast as possible, but "
            "the others may be less even than possible, as too many borders would have to be "
            "tried; give fewer layers, such as groups of them",
            CostsWarning,
        )
    return int(Fraction(level) * 2**bits)


def _level(shares: Floats, n_stages: int) -> float:
    """Return the mean of stages that have no layer heavier than this mean, if there is one."""
    total = float(shares.sum())
    level = total / n_stages
    for _ in range(_LEVELS):
        heavy = shares[shares > level]
        if len(heavy) >= n_stages:
            break
        lower = (total - float(heavy.sum())) / (n_stages - len(heavy))
        if not 0 < lower < level:
            break
        level = lower
    return level


@kernel(*BORDER_HELPERS)
def _nearest_split(
    sums: Ints, bound: Ints, near: Ints, low: Ints, high: Ints, borders: Ints
) -> None:
    """Fill the borders of a split within a bound, each as near as possible to a given one."""
    limit = np.empty_like(bound)
    for stage in range(1, len(near)):
        first = borders[stage - 1]
        add(sums, first, bound, limit)
        border = min(max(near[stage], low[stage], first + 1), high[stage])
        borders[stage] = min(border, last_within(sums, limit, first, border))


def _excess(shares: Floats, sums: Ints, borders: Ints, level: float, bits: int) -> float:
    """Return the squares of a split, without those of its heavy layers, rounded up."""
    whole = [to_whole(sums[border]) for border in borders.tolist()]
    values = np.array([(b - a) / 2**bits for a, b in itertools.pairwise(whole)])
    heavy = np.flatnonzero(shares > level)
    stage = np.searchsorted(borders, heavy, "right") - 1
    squares = np.bincount(stage, (shares[heavy] - level) ** 2, len(values))
    excess = (values - level) ** 2 - squares
    return float((excess + 16 * _EPS * (values**2 + squares + level**2)).sum()) * (1 + 1e-9)

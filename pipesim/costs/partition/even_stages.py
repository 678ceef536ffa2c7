"""The most even of the splits within a bound, by dynamic programming over borders.

It has the least sum of squares of stages. As all splits have the same sum, that is also the least
sum of squared deviations from any one number. Costs of this kind have Monge's property: the best
next border moves right as a border does, so that a stage with ``w`` possible borders takes
``w log w`` steps (divide and conquer).

Sums of squares are floats. If they are exact, the split is too. If not, borders that may be the
best despite rounding are kept, and Python's integers decide among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.costs.partition.exact_sums import (
    BITS,
    Floats,
    Ints,
    add,
    to_limbs,
    to_whole,
)
from pipesim.costs.partition.stage_bound import BORDER_HELPERS, first_reaching, last_within
from pipesim.utils.jit import kernel

__all__ = ["States", "even_borders", "stage_units"]

#: Largest whole number up to which floats have no gaps.
_EXACT = 2.0**53
_LIMB = 1 << BITS


class States(NamedTuple):
    """Possible borders of stages. A state is one of the borders after a number of stages.

    Attributes
    ----------
    low, high
        Least and largest border after each number of stages; shape ``(n_stages + 1,)``.
    ptr
        First state of each number of stages; shape ``(n_stages + 2,)``.
    offset
        Sum up to the border of each state, minus that of as many stages of a whole number near the
        mean, as a share of about the bound. The difference of two is that of a stage and the mean.
    reach
        Last border of a stage within the bound that begins at each state.
    """

    low: Ints
    high: Ints
    ptr: Ints
    offset: Floats
    reach: Ints


def stage_units(bound: Ints) -> tuple[int, Floats]:
    """Return the bits of a bound, and the value of one in each limb in units of ``2**bits``."""
    bits = to_whole(bound).bit_length()
    shifts = [BITS * k - bits for k in reversed(range(len(bound)))]
    return bits, np.array([2.0**shift if shift > -1074 else 0.0 for shift in shifts])


def _signed(sums: Ints, row: int, mean: Ints, scale: Floats) -> float:
    """Return the difference of a sum and a number, in units of the scale.

    Whole numbers are subtracted, and the difference or its negative is rounded, without
    cancellation.
    """
    value, negative, borrow, one = 0.0, 0.0, 0, 1
    for k in range(len(mean) - 1, 0, -1):
        limb = sums[row, k] - mean[k] - borrow
        borrow = 1 if limb < 0 else 0
        limb += borrow << BITS
        value += limb * scale[k]
        negative += (_LIMB - 1 - limb + one) * scale[k]
        one = 0
    limb = sums[row, 0] - mean[0] - borrow
    if limb >= 0:
        return float(value + limb * scale[0])
    return float(-(negative + (one - 1 - limb) * scale[0]))


@kernel(*BORDER_HELPERS)
def _drop_dead_ends(sums: Ints, bound: Ints, low: Ints, high: Ints) -> None:
    """Narrow ranges of borders to those from which a stage reaches the next range, in place."""
    limit = np.empty_like(bound)
    for stage in range(len(low) - 2, 0, -1):
        high[stage] = min(high[stage], high[stage + 1] - 1)
        first = first_reaching(sums, bound, low[stage + 1], high[stage], limit)
        low[stage] = max(low[stage], first)


@kernel(*BORDER_HELPERS, _signed)
def _fill_states(sums: Ints, bound: Ints, mean: Ints, scale: Floats, states: States) -> None:
    """Fill the offset and the reach of each state."""
    limit, stages_mean = np.empty_like(bound), np.zeros_like(bound)
    for stage in range(len(states.low)):
        guess = 0
        for border in range(states.low[stage], states.high[stage] + 1):
            state = states.ptr[stage] + border - states.low[stage]
            states.offset[state] = _signed(sums, border, stages_mean, scale)
            add(sums, border, bound, limit)
            guess = last_within(sums, limit, border, guess)
            states.reach[state] = guess
        carry = 0
        for k in range(len(mean) - 1, -1, -1):
            stages_mean[k] += mean[k] + carry
            carry = stages_mean[k] >> BITS if k else 0
            stages_mean[k] &= _LIMB - 1


@kernel(allocates=False)
def _least_squares(states: States, least: Floats, choice: Ints) -> None:
    """Fill the least sum of squares from each state on, and the next border.

    Of equals, it is the first. ``least`` and ``choice`` have one element a state.
    """
    low, high, ptr = states.low, states.high, states.ptr
    n_stages = len(low) - 1
    least[ptr[n_stages]] = 0.0
    for stage in range(n_stages - 1, -1, -1):
        base, after = ptr[stage], ptr[stage + 1] - low[stage + 1]
        n_rows = high[stage] - low[stage] + 1
        step = 1
        while 2 * step <= n_rows:
            step *= 2
        # Rows at odd multiples of a step lie between rows that are done, as do their choices.
        while step:
            for row in range(step - 1, n_rows, 2 * step):
                begin = max(low[stage + 1], low[stage] + row + 1)
                last = min(high[stage + 1], states.reach[base + row])
                if row - step >= 0:
                    begin = max(begin, choice[base + row - step])
                if row + step < n_rows:
                    last = min(last, choice[base + row + step])
                best, place = np.inf, begin
                for end in range(begin, last + 1):
                    deviation = states.offset[after + end] - states.offset[base + row]
                    total = deviation * deviation + least[after + end]
                    if total < best:
                        best, place = total, end
                least[base + row], choice[base + row] = best, place
            step //= 2


@kernel(allocates=False)
def _near_optimal(
    states: States, least: Floats, before: Floats, largest: float, edges: Ints
) -> int:
    """Return the number of stages in splits whose sum of squares is at most ``largest``.

    As far as there is room, ``edges`` gets their number, first layer and end, in order. ``before``
    gets the least sum of squares up to each state; it has to be infinite except for the first.
    """
    low, high, ptr = states.low, states.high, states.ptr
    n_edges = 0
    for stage in range(len(low) - 1):
        after = ptr[stage + 1] - low[stage + 1]
        for state in range(ptr[stage], ptr[stage + 1]):
            if before[state] + least[state] > largest:
                continue
            first = low[stage] + state - ptr[stage]
            last = min(high[stage + 1], states.reach[state])
            for end in range(max(low[stage + 1], first + 1), last + 1):
                deviation = states.offset[after + end] - states.offset[state]
                total = before[state] + deviation * deviation
                if total + least[after + end] > largest:
                    continue
                before[after + end] = min(before[after + end], total)
                if n_edges < len(edges):
                    edges[n_edges, 0], edges[n_edges, 1], edges[n_edges, 2] = stage, first, end
                n_edges += 1
    return n_edges


def even_borders(sums: Ints, bound: Ints, level: int, low: Ints, high: Ints) -> list[int]:
    """Return the borders of the most even split; of equals, the one with the first borders.

    Parameters
    ----------
    sums
        Sums of layers up to each border, as limbs; shape ``(n_layers + 1, n_limbs)``.
    bound
        Largest stage, as limbs.
    level
        Number near most stages. It changes nothing but rounding.
    low, high
        Least and largest border after each number of stages; shape ``(n_stages + 1,)``. They are
        narrowed in place.
    """
    n_stages = len(low) - 1
    _drop_dead_ends(sums, bound, low, high)
    ptr = np.concatenate([[0], np.cumsum(high - low + 1)])
    states = States(low, high, ptr, np.empty(ptr[-1]), np.empty(ptr[-1], dtype=np.int64))
    bits, scale = stage_units(bound)
    _fill_states(sums, bound, to_limbs(level, len(bound)), scale, states)
    least, choice = np.empty(ptr[-1]), np.empty(ptr[-1], dtype=np.int64)
    _least_squares(states, least, choice)
    # No sum of squares exceeds that of the farthest offsets.
    farthest = np.maximum.reduceat(abs(states.offset), ptr[:-1])
    most = float(((farthest[1:] + farthest[:-1]) ** 2).sum())
    if 2 * bits < 53 and most * 4.0**bits < _EXACT:
        borders = [0]
        for stage in range(n_stages):
            borders.append(int(choice[ptr[stage] + borders[-1] - low[stage]]))
        return borders
    edges = _near_edges(states, least, most)
    if len(edges) == n_stages:  # no other split is as even
        return [0, *edges[:, 2].tolist()]
    return _best_of_edges(sums, level, n_stages, edges)


def _near_edges(states: States, least: Floats, most: float) -> Ints:
    """Return the stages in all splits that may be the most even one, despite rounding.

    Each has its number, first layer and end; shape ``(n_edges, 3)``. ``most`` is a bound of sums of
    squares.
    """
    n_stages = len(states.low) - 1
    # Offsets are rounded by a share of themselves, squares by one of the farthest ones, and sums
    # by one each. Each of the steps that halve ranges may prefer a border for its rounding.
    eps = 64 * float(np.finfo(np.float64).eps)
    largest = float(least[0]) * (1 + (n_stages + 16) * eps) + 4 * eps * most
    edges = np.empty((2 * n_stages, 3), dtype=np.int64)
    while True:
        before = np.full(len(least), np.inf)
        before[0] = 0.0
        n_edges = _near_optimal(states, least, before, largest, edges)
        if n_edges <= len(edges):
            return edges[:n_edges]
        edges = np.empty((n_edges, 3), dtype=np.int64)


def _best_of_edges(sums: Ints, level: int, n_stages: int, edges: Ints) -> list[int]:
    """Return the borders of the most even split of given stages, by exact sums."""
    whole = {border: to_whole(sums[border]) for border in np.unique(edges[:, 1:]).tolist()}
    best: dict[tuple[int, int], tuple[int, int]] = {(n_stages, len(sums) - 1): (0, -1)}
    for stage, first, end in reversed(edges.tolist()):
        if (stage + 1, end) not in best:
            continue
        total = (whole[end] - whole[first] - level) ** 2 + best[stage + 1, end][0]
        # Ends come in falling order, so that the last of equals is the first border.
        if (stage, first) not in best or total <= best[stage, first][0]:
            best[stage, first] = total, end
    borders = [0]
    for stage in range(n_stages):
        borders.append(best[stage, borders[-1]][1])
    return borders

"""The most even of the splits that floats cannot tell apart, by exact sums of squares.

A sum of squares is a row of limbs of 31 bits, the least significant first, so that a product of two
limbs and what is carried to it fit in 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.costs.partition.exact_sums import BITS, Floats, Ints
from pipesim.errors import CostsWarning
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.jit import kernel

_HALF = BITS // 2
_HALF_MASK = (1 << _HALF) - 1
_MASK = (1 << BITS) - 1
#: Most products of limbs without a warning; each takes about a nanosecond.
_MOST_PRODUCTS = 10**10


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
        Last possible border of a stage within the bound that begins at each state.
    """

    low: Ints
    high: Ints
    ptr: Ints
    offset: Floats
    reach: Ints


def choose_exactly(
    sums: Ints, level: Ints, states: States, least: Floats, choice: Ints, most: float
) -> None:
    """Change the next borders of states in splits that may be the most even, despite rounding.

    Parameters
    ----------
    sums
        Sums of layers up to each border, as limbs; shape ``(n_layers + 1, n_limbs)``.
    level
        Number near most stages, as limbs.
    states
        Possible borders.
    least, choice
        Least sum of squares from each state on, and its next border.
    most
        Bound of sums of squares.

    Warns
    -----
    CostsWarning
        If this takes ten seconds or more.
    """
    n_stages = len(states.low) - 1
    # Offsets are rounded by a share of themselves, squares by one of the farthest ones, and sums
    # by one each. Each of the steps that halve ranges may prefer a border for its rounding.
    eps = 64 * float(np.finfo(np.float64).eps)
    largest = float(least[0]) * (1 + (n_stages + 16) * eps) + 4 * eps * most
    before = np.full(len(least), np.inf)
    before[0] = 0.0
    n_edges = _near_optimal(states, least, choice, largest, before)
    if n_edges > n_stages:
        if n_edges * (2 * len(level)) ** 2 > _MOST_PRODUCTS:
            warn_caller(
                f"the most even split of {len(sums) - 1} layers takes long, as sums of weights "
                "that differ by huge factors are exact; give 0 for weights that do not matter",
                CostsWarning,
            )
        widest = int((states.high - states.low).max()) + 1
        squares = np.zeros((3, widest, 4 * len(level) + 1), dtype=np.int64)
        _choose(sums, level, states, least, before, largest, squares, choice)


def _first_near(offset: Floats, state: int, end: int, low: int, before: float, most: float) -> int:
    """Return the first state from which on the square of a stage may be small enough.

    Stages grow with their ends, which are states from ``low`` to ``end``.
    """
    while end > low:
        deviation = offset[end - 1] - offset[state]
        if deviation < 0 and before + deviation * deviation > most:
            break
        end -= 1
    return end


@kernel(_first_near, allocates=False)
def _near_optimal(
    states: States, least: Floats, choice: Ints, largest: float, before: Floats
) -> int:
    """Return the number of stages in splits whose sum of squares is at most ``largest``.

    ``before`` gets the least sum of squares up to each state; it has to be infinite except for the
    first.
    """
    low, ptr, offset = states.low, states.ptr, states.offset
    n_edges = 0
    for stage in range(len(low) - 1):
        after = ptr[stage + 1] - low[stage + 1]
        for state in range(ptr[stage], ptr[stage + 1]):
            so_far = before[state]
            if so_far + least[state] > largest:
                continue
            first = low[stage] + state - ptr[stage]
            begin = after + max(low[stage + 1], first + 1)
            begin = _first_near(offset, state, after + choice[state], begin, so_far, largest)
            for end in range(begin, after + states.reach[state] + 1):
                deviation = offset[end] - offset[state]
                total = so_far + deviation * deviation
                if deviation > 0 and total > largest:
                    break
                if total + least[end] <= largest:
                    before[end] = min(before[end], total)
                    n_edges += 1
    return n_edges


def _add_square(sums: Ints, level: Ints, first: int, end: int, halves: Ints, total: Ints) -> None:
    """Add the square of the difference of a stage and the level to ``total``, in place.

    ``halves`` is overwritten with the absolute difference.
    """
    carry, size = 0, 2 * len(level)
    for k in range(len(level) - 1, -1, -1):
        limb = sums[end, k] - sums[first, k] - level[k] + carry
        carry = limb >> BITS
        limb &= _MASK
        place = 2 * (len(level) - 1 - k)
        halves[place], halves[place + 1] = limb & _HALF_MASK, limb >> _HALF
    if carry < 0:
        carry = 1
        for k in range(size):
            half = _HALF_MASK - halves[k] + carry
            halves[k], carry = half & _HALF_MASK, half >> _HALF
    while size and halves[size - 1] == 0:
        size -= 1
    for i in range(size):
        carry = 0
        for j in range(size):
            value = total[i + j] + halves[i] * halves[j] + carry
            total[i + j], carry = value & _HALF_MASK, value >> _HALF
        place = i + size
        while carry:
            value = total[place] + carry
            total[place], carry = value & _HALF_MASK, value >> _HALF
            place += 1


def _is_smaller(a: Ints, b: Ints) -> bool:
    """Return whether one sum of squares is less than another."""
    for k in range(len(a) - 1, -1, -1):
        if a[k] != b[k]:
            return bool(a[k] < b[k])
    return False


def _copy(source: Ints, target: Ints) -> None:
    """Copy a sum of squares; numba's own copy allocates."""
    for k in range(len(target)):
        target[k] = source[k]


@kernel(_first_near, _add_square, _copy, _is_smaller, allocates=False)
def _choose(
    sums: Ints, level: Ints, states: States, least: Floats, before: Floats, largest: float,
    squares: Ints, choice: Ints,
) -> None:  # fmt: skip
    """Fill the next border of each state of `_near_optimal`; of equals, it is the first.

    ``squares`` has rows of zeros for the sums of two numbers of stages, and scratch.
    """
    low, ptr, offset = states.low, states.ptr, states.offset
    total, halves = squares[2, 0], squares[2, 1]
    for stage in range(len(low) - 2, -1, -1):
        current, following = squares[stage % 2], squares[1 - stage % 2]
        after = ptr[stage + 1] - low[stage + 1]
        for state in range(ptr[stage], ptr[stage + 1]):
            so_far = before[state]
            before[state] = np.inf  # till it has an end
            if so_far + least[state] > largest:
                continue
            first = low[stage] + state - ptr[stage]
            begin = after + max(low[stage + 1], first + 1)
            begin = _first_near(offset, state, after + choice[state], begin, so_far, largest)
            best = current[state - ptr[stage]]
            for end in range(begin, after + states.reach[state] + 1):
                deviation = offset[end] - offset[state]
                square = so_far + deviation * deviation
                if deviation > 0 and square > largest:
                    break
                if square + least[end] > largest or before[end] == np.inf:
                    continue
                _copy(following[end - ptr[stage + 1]], total)
                _add_square(sums, level, first, end - after, halves, total)
                if before[state] == np.inf or _is_smaller(total, best):
                    before[state], choice[state] = so_far, end - after
                    _copy(total, best)

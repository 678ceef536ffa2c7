"""Exact sums of floats, and the most even of the splits that floats cannot tell apart.

A float is a whole number times a power of two. So floats are whole multiples of a common unit, and
their sums have no rounding. A sum is a row of limbs of 62 bits, the most significant first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import CostsWarning
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Bits of a limb. Two limbs, and a carry, add up in 64 bits.
BITS = 62
_MASK = (1 << BITS) - 1
#: Bits of a float's mantissa, without and with the one that is not stored; bits without the sign.
_STORED, _LEADING, _MAGNITUDE = (1 << 52) - 1, 1 << 52, (1 << 63) - 1
#: Exponent field of infinity and NaN.
_NOT_FINITE = 2047


class ExactSums(NamedTuple):
    """Sums of weights up to each layer, in units of ``divisor * 2.0**exponent``."""

    limbs: Ints  # shape (n_layers + 1, n_limbs)
    exponent: int
    divisor: int


def exact_sums(weights: Floats) -> ExactSums | int:
    """Return the sums of contiguous weights, or the index of the first not finite or negative."""
    bits = weights.view(np.int64)
    wrong, low, high, divisor = _common_unit(bits)
    if wrong >= 0:
        return int(wrong)
    if not divisor:  # all weights are zero
        low, high, divisor = 1, 1, 1
    n_bits = int(high - low) + 54 - int(divisor).bit_length() + len(weights).bit_length()
    limbs = np.empty((len(weights) + 1, max(1, -(-n_bits // BITS))), dtype=np.int64)
    limbs[0] = 0
    _add_up(bits, low, divisor, limbs)
    return ExactSums(limbs, int(low) - 1075, int(divisor))


@kernel()
def _common_unit(bits: Ints) -> tuple[int, int, int, int]:
    """Return the first wrong weight (-1: none), and the parts of the unit of all others.

    They are the least exponent of a lowest bit, the largest exponent field, and the greatest common
    divisor of the odd parts of mantissas.
    """
    low, high, divisor, last = 4096, 0, 0, 0
    for i in range(len(bits)):
        word = bits[i]
        if word & _MAGNITUDE == 0:
            continue
        exponent, mantissa = word >> 52, word & _STORED
        if word < 0 or exponent == _NOT_FINITE:
            return i, low, high, divisor
        if exponent == 0:
            exponent = 1
        else:
            mantissa |= _LEADING
        high = max(high, exponent)
        is_new = divisor != 1 and mantissa != last
        last = mantissa
        shift = min(low - exponent, 53)
        if not is_new and (shift <= 0 or mantissa & ((1 << shift) - 1) == 0):
            continue
        while mantissa & 1 == 0:
            mantissa >>= 1
            exponent += 1
        low = min(low, exponent)
        while mantissa:
            divisor, mantissa = mantissa, divisor % mantissa
    return -1, low, high, divisor


@kernel()
def _add_up(bits: Ints, low: int, divisor: int, sums: Ints) -> None:
    """Fill the sums of weights with a unit, but the first; see `_common_unit`."""
    n_limbs = sums.shape[1]
    for i in range(len(bits)):
        for limb in range(n_limbs):
            sums[i + 1, limb] = sums[i, limb]
        word = bits[i]
        if word & _MAGNITUDE == 0:
            continue
        exponent, mantissa = word >> 52, word & _STORED
        if exponent == 0:
            exponent = 1
        else:
            mantissa |= _LEADING
        shift = exponent - low
        if shift < 0:
            mantissa >>= -shift
            shift = 0
        if divisor > 1:
            mantissa //= divisor
        limb, offset = n_limbs - 1, shift
        while offset >= BITS:
            limb, offset = limb - 1, offset - BITS
        sums[i + 1, limb] += (mantissa & ((1 << (BITS - offset)) - 1)) << offset
        if limb > 0:
            sums[i + 1, limb - 1] += mantissa >> (BITS - offset)
        for k in range(limb, 0, -1):
            sums[i + 1, k - 1] += sums[i + 1, k] >> BITS
            sums[i + 1, k] &= _MASK


def exceeds(sums: Ints, row: int, limit: Ints) -> bool:
    """Return whether a sum is larger than a number."""
    for k in range(len(limit)):
        if sums[row, k] != limit[k]:
            return bool(sums[row, k] > limit[k])
    return False


def add(sums: Ints, row: int, number: Ints, result: Ints) -> None:
    """Fill ``result`` with a sum plus a number."""
    carry = 0
    for k in range(len(number) - 1, -1, -1):
        total = sums[row, k] + number[k] + carry
        carry = total >> BITS if k else 0
        result[k] = total & _MASK if k else total


def subtract(sums: Ints, row: int, other: int, result: Ints) -> None:
    """Fill ``result`` with the difference of two sums, the first of which is not smaller."""
    borrow = 0
    for k in range(len(result) - 1, -1, -1):
        total = sums[row, k] - sums[other, k] - borrow
        borrow = 1 if total < 0 else 0
        result[k] = total + (borrow << BITS)


def to_whole(limbs: Ints) -> int:
    """Return a number as Python's integer."""
    whole = 0
    for limb in limbs.tolist():
        whole = (whole << BITS) + limb
    return whole


def to_limbs(whole: int, n_limbs: int) -> Ints:
    """Return a number of at most 63 bits beyond the last ``n_limbs - 1`` limbs as limbs."""
    shifts = [BITS * k for k in reversed(range(n_limbs))]
    limbs = [whole >> shifts[0], *((whole >> shift) & _MASK for shift in shifts[1:])]
    return np.array(limbs, dtype=np.int64)


# The most even of the splits that floats cannot tell apart, by exact sums of squares.
#
# A sum of squares is a row of limbs of 31 bits, the least significant first, so that a product of
# two limbs and what is carried to it fit in 64 bits.

_HALF = BITS // 2
_HALF_MASK = (1 << _HALF) - 1
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

    ``least`` and ``choice`` are the least sum of squares from each state on, and its next border.
    ``level`` is a number near most stages, as limbs, and ``most`` a bound of sums of squares. Warn
    if this takes ten seconds or more.
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

"""Exact sums of floats: whole multiples of one unit, as limbs of 62 bits.

A float is a whole number times a power of two. So floats are whole multiples of a common unit, and
their sums have no rounding. A sum is a row of limbs, the most significant first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Sums of weights up to each layer.

    Attributes
    ----------
    limbs
        Sums; shape ``(n_layers + 1, n_limbs)``.
    exponent, divisor
        One unit is ``divisor * 2.0**exponent``.
    """

    limbs: Ints
    exponent: int
    divisor: int


def exact_sums(weights: Floats) -> ExactSums | int:
    """Return the sums of weights, or the index of the first that is negative or not finite.

    Parameters
    ----------
    weights
        Weights; shape ``(n_layers,)``, contiguous.
    """
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

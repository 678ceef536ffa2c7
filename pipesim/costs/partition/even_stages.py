"""The most even of the splits within a bound, by dynamic programming over borders.

It has the least sum of squares of stages. As all splits have the same sum, that is also the least
sum of squared deviations from any one number. Costs of this kind have Monge's property: the best
next border moves right as a border does, so that a stage with ``w`` possible borders takes
``w log w`` steps (divide and conquer).

Sums of squares are floats. If they are exact, the split is too. If not, borders that may be the
best despite rounding are kept, and exact sums decide among them.
"""

from __future__ import annotations

import numpy as np

from pipesim.costs.partition.exact_choice import States, choose_exactly
from pipesim.costs.partition.exact_sums import (
    BITS,
    Floats,
    Ints,
    add,
    exceeds,
    to_limbs,
    to_whole,
)
from pipesim.costs.partition.stage_bound import BORDER_HELPERS, first_reaching
from pipesim.utils.jit import kernel

#: Largest whole number up to which floats have no gaps.
_EXACT = 2.0**53
_LIMB = 1 << BITS


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


@kernel(add, exceeds, _signed, allocates=False)
def _fill_states(
    sums: Ints, bound: Ints, mean: Ints, scale: Floats, states: States, scratch: Ints
) -> None:
    """Fill the offset and the reach of each state; ``scratch`` has two rows of zeros, as limbs."""
    limit, stages_mean = scratch[0], scratch[1]
    low, high = states.low, states.high
    for stage in range(len(low)):
        following = min(stage + 1, len(low) - 1)
        end, last = low[following], high[following]
        for border in range(low[stage], high[stage] + 1):
            state = states.ptr[stage] + border - low[stage]
            states.offset[state] = _signed(sums, border, stages_mean, scale)
            add(sums, border, bound, limit)
            while end < last and not exceeds(sums, end + 1, limit):
                end += 1
            states.reach[state] = end
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
    low, ptr, offset = states.low, states.ptr, states.offset
    n_stages = len(low) - 1
    least[ptr[n_stages]] = 0.0
    for stage in range(n_stages - 1, -1, -1):
        base, after = ptr[stage], ptr[stage + 1] - low[stage + 1]
        n_rows = ptr[stage + 1] - base
        step = 1
        while 2 * step <= n_rows:
            step *= 2
        # Rows at odd multiples of a step lie between rows that are done, as do their choices.
        while step:
            for row in range(step - 1, n_rows, 2 * step):
                begin = max(low[stage + 1], low[stage] + row + 1)
                last = states.reach[base + row]
                if row - step >= 0:
                    begin = max(begin, choice[base + row - step])
                if row + step < n_rows:
                    last = min(last, choice[base + row + step])
                best, place, origin = np.inf, begin, offset[base + row]
                for end in range(begin, last + 1):
                    deviation = offset[after + end] - origin
                    total = deviation * deviation + least[after + end]
                    if total < best:
                        best, place = total, end
                least[base + row], choice[base + row] = best, place
            step //= 2


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
    space = np.empty((4, ptr[-1]))  # a single array, which numpy keeps in large pages
    offset, least = space[:2]
    reach, choice = space[2:].view(np.int64)
    states = States(low, high, ptr, offset, reach)
    bits, scale = stage_units(bound)
    mean = to_limbs(level, len(bound))
    scratch = np.zeros((2, len(bound)), dtype=np.int64)
    _fill_states(sums, bound, mean, scale, states, scratch)
    _least_squares(states, least, choice)
    # No sum of squares exceeds that of the farthest offsets, which are the first or the last.
    farthest = np.maximum(abs(states.offset[ptr[:-1]]), abs(states.offset[ptr[1:] - 1]))
    most = float(((farthest[1:] + farthest[:-1]) ** 2).sum())
    if 2 * bits >= 53 or most * 4.0**bits >= _EXACT:
        choose_exactly(sums, mean, states, least, choice, most)
    borders = [0]
    for stage in range(n_stages):
        borders.append(int(choice[ptr[stage] + borders[-1] - low[stage]]))
    return borders

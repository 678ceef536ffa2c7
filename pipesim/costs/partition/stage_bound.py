"""The least bound on the largest stage, and the borders that it allows.

A bound suffices if filling stages up to it, in order, needs at most as many stages as there are.
Each such probe visits the borders alone. A bisection over bounds ends at the sum of a stage: a
probe that suffices lowers the upper end to the largest stage that it filled, and one that does not
raises the lower end to the least bound that would fill a stage with one more layer. This is a
parametric search as in Pinar and Aykanat, "Fast Optimal Load Balancing Algorithms for 1D
Partitioning", 2004.
"""

from __future__ import annotations

import numpy as np

from pipesim.costs.partition.exact_sums import (
    BITS,
    Ints,
    add,
    exceeds,
    subtract,
    to_limbs,
    to_whole,
)
from pipesim.utils.jit import kernel


def last_within(sums: Ints, limit: Ints, first: int, guess: int) -> int:
    """Return the last border whose sum is at most ``limit``; that of ``first`` must be.

    The search widens from ``guess``, as borders of one probe are near those of the last.
    """
    n_layers = len(sums) - 1
    low = min(max(guess, first), n_layers)
    step = 1
    if exceeds(sums, low, limit):
        high = low
        low = max(first, high - 1)
        while exceeds(sums, low, limit):
            high, step = low, 2 * step
            low = max(first, high - step)
    else:
        high = low + 1
        while high <= n_layers and not exceeds(sums, high, limit):
            low, step = high, 2 * step
            high = low + step
        high = min(high, n_layers + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if exceeds(sums, middle, limit):
            high = middle
        else:
            low = middle
    return low


def first_reaching(sums: Ints, bound: Ints, end: int, last: int, limit: Ints) -> int:
    """Return the first border from which a stage within a bound reaches ``end``; ``last`` does.

    ``limit`` is overwritten.
    """
    step, first = 1, last
    while True:  # `last` reaches the end; widen till `first` does not, or is 0
        first = max(0, last - step)
        add(sums, first, bound, limit)
        if exceeds(sums, end, limit):
            break
        last, step = first, 2 * step
        if first == 0:
            return 0
    while last - first > 1:
        middle = (first + last) // 2
        add(sums, middle, bound, limit)
        if exceeds(sums, end, limit):
            first = middle
        else:
            last = middle
    return last


#: Functions that a kernel needs to call `last_within` and `first_reaching`.
BORDER_HELPERS = (add, exceeds, last_within, first_reaching)


def _is_less(a: Ints, b: Ints) -> bool:
    """Return whether one number is less than another."""
    for k in range(len(a)):
        if a[k] != b[k]:
            return bool(a[k] < b[k])
    return False


def _probe(sums: Ints, n_stages: int, bound: Ints, result: Ints, scratch: Ints) -> bool:
    """Return whether a bound suffices; fill ``result`` with the next end of the bisection."""
    n_layers = len(sums) - 1
    first, guess = 0, n_layers // n_stages
    largest, least = scratch[0], scratch[1]
    limit, value = scratch[2], scratch[3]
    largest[:] = 0
    least[:] = sums[n_layers]
    for _ in range(n_stages):
        add(sums, first, bound, limit)
        end = last_within(sums, limit, first, guess)
        subtract(sums, end, first, value)
        if _is_less(largest, value):
            largest[:] = value
        if end == n_layers:
            result[:] = largest
            return True
        subtract(sums, end + 1, first, value)
        if _is_less(value, least):
            least[:] = value
        first, guess = end, end + (end - first)
    result[:] = least
    return False


@kernel(*BORDER_HELPERS, subtract, _is_less, _probe)
def _bisect(sums: Ints, n_stages: int, low: Ints, high: Ints) -> None:
    """Raise ``low``, which no split undercuts, and lower ``high``, which suffices, till they meet.

    Both are changed in place.
    """
    scratch = np.empty((6, len(low)), dtype=np.int64)
    middle, result = scratch[4], scratch[5]
    while _is_less(low, high):
        odd = 0  # halves of limbs: a bit that falls off one is the highest of the next
        for k in range(len(low)):
            total = low[k] + high[k]
            # The sum of the most significant limbs stays below 2**63, as that of all sums does.
            middle[k] = total // 2 + (odd << (BITS - 1))
            odd = total % 2
        for k in range(len(low) - 1, 0, -1):
            middle[k - 1] += middle[k] >> BITS
            middle[k] &= (1 << BITS) - 1
        if _probe(sums, n_stages, middle, result, scratch):
            high[:] = result
        else:
            low[:] = result


def least_bound(sums: Ints, largest: int, n_stages: int) -> Ints:
    """Return the least bound on a stage for which ``n_stages`` suffice, as limbs.

    ``largest`` is the largest weight of a layer.
    """
    n_limbs = sums.shape[1]
    total = to_whole(sums[-1])
    least = max(largest, -(-total // n_stages))
    low, high = to_limbs(least, n_limbs), to_limbs(min(total, least + largest), n_limbs)
    _bisect(sums, n_stages, low, high)
    return high


@kernel(*BORDER_HELPERS)
def possible_borders(sums: Ints, n_stages: int, bound: Ints, low: Ints, high: Ints) -> None:
    """Fill the least and the largest border after each number of stages; none exceeds the bound.

    Every border between is possible. ``low`` and ``high`` have ``n_stages + 1`` elements.
    """
    n_layers, guess = len(sums) - 1, 0
    limit = np.empty_like(bound)
    low[0] = high[0] = 0
    for stage in range(1, n_stages + 1):
        first = high[stage - 1]
        add(sums, first, bound, limit)
        high[stage] = last_within(sums, limit, first, first + guess)
        guess = high[stage] - first
    for stage in range(n_stages + 1):
        high[stage] = min(high[stage], n_layers - (n_stages - stage))
    low[n_stages] = n_layers
    for stage in range(n_stages - 1, 0, -1):
        low[stage] = first_reaching(sums, bound, low[stage + 1], high[stage], limit)
    for stage in range(1, n_stages):
        low[stage] = max(low[stage], stage)

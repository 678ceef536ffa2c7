"""The split of layers whose slowest stage is as fast as possible, and then the most even one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.exact_sums import (
    BITS,
    ExactSums,
    Floats,
    Ints,
    States,
    add,
    choose_exactly,
    exact_sums,
    exceeds,
    subtract,
    to_limbs,
    to_whole,
)
from pipesim.errors import ArgumentError, CostsError, CostsWarning, check_count, number
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.jit import kernel


def balanced_split(
    seconds: Sequence[float] | NDArray[np.floating], n_stages: int
) -> tuple[int, ...]:
    """Return the layers of each stage such that the slowest stage is as fast as possible.

    Among such splits, the result is the one whose stages are most even (least sum of squares).
    Among those, it has the fewest layers on the first stages, which hold the most activations in
    1F1B. It is exact: weights are whole multiples of a common unit, whose sums are not rounded.

    Parameters
    ----------
    seconds
        Seconds of each layer; or any other weight >= 0, such as bytes. An array of floats is fast:
        a million layers take some twenty milliseconds (see Notes for exceptions).
    n_stages
        Number of stages; each gets at least one layer.

    Returns
    -------
    tuple of int
        Layers of each stage; they sum to ``len(seconds)``.

    Warns
    -----
    CostsWarning
        If stages may be less even than possible, as they have more than 20 million possible
        borders. This takes many layers, of which many are heavier than the mean stage.
        Also if exact sums take ten seconds or more, as weights differ by huge factors.

    Notes
    -----
    The least bound of the slowest stage is found by bisection: a bound is feasible if filling
    stages up to it, in order, needs at most ``n_stages``. The bound leaves a range for each border.
    The most even split is found by dynamic programming over the borders in these ranges. Layers
    of weight 0 take part in neither. A million layers take a tenth of a second where many splits
    are almost equally even, as with two alternating weights without a common unit. They take
    seconds where ranges are wide: many layers are heavier than the mean stage, or a heavy one is
    between many others. A few thousand weights from 1e-300 to 1e300 take a minute, as their exact
    sums have some 2,000 bits.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.balanced_split([1, 1, 1, 1, 1, 1, 3], 3)
    (3, 3, 1)
    """
    weights = _weights(seconds)
    n_layers = len(weights)
    if check_count("n_stages", n_stages) > n_layers:
        raise ArgumentError(
            f"{n_layers} layers cannot be split into {n_stages} stages; each needs at least one "
            f"layer, so n_stages may be 1..{n_layers}"
        )
    # Zeros are left out, as they are many in some lists, and all borders between them are alike.
    is_dense = np.count_nonzero(weights) == n_layers
    heavy = weights if is_dense else weights[weights != 0]
    sums = exact_sums(heavy)
    if not isinstance(sums, tuple):
        layer = int(np.flatnonzero(weights)[sums])
        value: object = list(seconds)[layer]
        raise CostsError(f"seconds of layer {layer} must be finite and >= 0, got {value!r}")
    if len(heavy) <= n_stages:
        borders = _borders_of_few(np.flatnonzero(weights), n_layers, n_stages)
    elif is_dense:
        borders = _borders(heavy, sums, n_stages)
    else:
        # Each stage of the most even split has a layer that is not zero, and ends at its last.
        inner = np.array(_borders(heavy, sums, n_stages)[1:-1], dtype=np.int64)
        borders = [0, *(np.flatnonzero(weights)[inner - 1] + 1).tolist(), n_layers]
    return tuple(b - a for a, b in pairwise(borders))


def _borders(weights: Floats, sums: ExactSums, n_stages: int) -> list[int]:
    """Return the borders of layers that are more than stages."""
    largest = int(weights.argmax())
    bound = least_bound(
        sums.limbs, to_whole(sums.limbs[largest + 1]) - to_whole(sums.limbs[largest]), n_stages
    )
    low, high = np.zeros((2, n_stages + 1), dtype=np.int64)
    possible_borders(sums.limbs, n_stages, bound, low, high)
    level = to_whole(sums.limbs[-1]) // n_stages
    if (high - low).sum() > len(weights):
        level = narrow_ranges(weights, sums, bound, low, high)
    return even_borders(sums.limbs, bound, level, low, high)


def _borders_of_few(layers: Ints, n_layers: int, n_stages: int) -> list[int]:
    """Return the first borders such that each of a few layers is on a stage of its own.

    As many stages as zeros can spare come first, of one layer each. Each further stage ends at the
    next of ``layers``, those that are not zero.
    """
    is_zero = np.ones(n_layers, dtype=np.bool_)
    is_zero[layers] = False
    n_spare = n_stages - len(layers)
    n_single = int(np.flatnonzero(is_zero)[n_spare - 1]) + 1 if n_spare else 0
    ends = [*range(1, n_single + 1), *(layers[layers >= n_single] + 1).tolist()]
    return [0, *ends[: n_stages - 1], n_layers]


def _weights(seconds: object) -> Floats:
    """Return weights as a contiguous array; those that are no numbers are NaN."""
    values = seconds
    if isinstance(seconds, np.ndarray) and seconds.ndim == 1:
        if seconds.dtype == np.float64 and len(seconds):
            return np.ascontiguousarray(seconds)
        values = seconds.tolist()
    is_listed = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    if not is_listed or isinstance(values, (np.ndarray, Mapping, str, bytes)):
        dimensions = f" of shape {seconds.shape}" if isinstance(seconds, np.ndarray) else ""
        raise ArgumentError(
            "seconds must be a list or a 1-d array of one weight a layer, such as [1, 1, 3], got "
            f"{seconds!r:.60} ({type(seconds).__name__}{dimensions})"
        )
    values = list(values)  # type: ignore[call-overload]
    if not values:
        raise ArgumentError("seconds must have one weight a layer, of at least one layer, got none")
    if set(map(type, values)) <= {float}:
        return np.array(values, dtype=np.float64)
    converted = map(number, values)
    return np.array([np.nan if x is None else x for x in converted], dtype=np.float64)


# The least bound on the largest stage, and the borders that it allows.
#
# A bound suffices if filling stages up to it, in order, needs at most as many stages as there are.
# Each such probe visits the borders alone. A bisection over bounds ends at the sum of a stage: a
# probe that suffices lowers the upper end to the largest stage that it filled, and one that does
# not raises the lower end to the least bound that would fill a stage with one more layer. This is
# a parametric search as in Pinar and Aykanat, "Fast Optimal Load Balancing Algorithms for 1D
# Partitioning", 2004.


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
    """Return the least bound on a stage for which ``n_stages`` suffice, given the largest layer."""
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


# The most even of the splits within a bound, by dynamic programming over borders.
#
# It has the least sum of squares of stages. As all splits have the same sum, that is also the
# least sum of squared deviations from any one number. Costs of this kind have Monge's property:
# the best next border moves right as a border does, so that a stage with ``w`` possible borders
# takes ``w log w`` steps (divide and conquer).
#
# Sums of squares are floats. If they are exact, the split is too. If not, borders that may be the
# best despite rounding are kept, and exact sums decide among them.

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

    ``low`` and ``high``, the least and the largest border after each number of stages, are narrowed
    in place. ``level`` is a number near most stages, and changes nothing but rounding.
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
    if 2 * bits >= 53 or most * 4.0**bits >= 2.0**53:  # floats have gaps from there on
        choose_exactly(sums, mean, states, least, choice, most)
    borders = [0]
    for stage in range(n_stages):
        borders.append(int(choice[ptr[stage] + borders[-1] - low[stage]]))
    return borders


# Ranges of borders of the most even split, where a bound on stages leaves wide ones.
#
# A layer heavier than the mean stage forces a large stage, but leaves the others free. With
# weights capped at a level, a stage of ``x`` has at least the square ``(x - level)**2`` of its
# heavy layers, plus the square of its capped surplus. By Cauchy's inequality, ``s`` stages whose
# surplus is ``d`` have squares of at least ``d**2 / s``. Borders where that exceeds the squares of
# any known split are not those of the best.

#: Most possible borders in all; each takes 40 bytes, and about a tenth of a microsecond.
_MOST_BORDERS = 20_000_000
_EPS = float(np.finfo(np.float64).eps)


def narrow_ranges(weights: Floats, sums: ExactSums, bound: Ints, low: Ints, high: Ints) -> int:
    """Narrow ``low`` and ``high`` to borders of the most even split; return the level, in units.

    If too many borders are possible, warn, and keep ranges around an even split.
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
    for _ in range(20):  # any level is right, and a good one narrows ranges more
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

"""The split of layers whose slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.partition.even_stages import even_borders
from pipesim.costs.partition.exact_sums import Floats, exact_sums, to_whole
from pipesim.costs.partition.near_even import narrow_ranges
from pipesim.costs.partition.stage_bound import least_bound, possible_borders
from pipesim.errors import ArgumentError, CostsError, check_count, number

__all__ = ["balanced_split"]


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
        a million layers take some ten milliseconds.
    n_stages
        Number of stages; each gets at least one layer.

    Returns
    -------
    tuple of int
        Layers of each stage; they sum to ``len(seconds)``.

    Raises
    ------
    ArgumentError
        If there are more stages than layers, or ``seconds`` is no sequence.
    CostsError
        For a weight that is negative, NaN or infinite.

    Warns
    -----
    CostsWarning
        If stages may be less even than possible, as too many splits have the same slowest stage.
        This needs a million layers, many of which are heavier than the mean stage.

    Notes
    -----
    The least bound of the slowest stage is found by bisection: a bound is feasible if filling
    stages up to it, in order, needs at most ``n_stages``. The bound leaves a range for each border.
    The most even split is found by dynamic programming over the borders in these ranges. It takes
    longer where they are wide, as with many layers that are heavier than the mean stage.

    Examples
    --------
    >>> balanced_split([1, 1, 1, 1, 1, 1, 3], 3)
    (3, 3, 1)
    """
    weights = _weights(seconds)
    sums = exact_sums(weights)
    if not isinstance(sums, tuple):
        value: object = seconds[sums]
        raise CostsError(f"seconds of layer {sums} must be finite and >= 0, got {value!r}")
    n_layers = len(weights)
    if check_count("n_stages", n_stages) > n_layers:
        raise ArgumentError(
            f"{n_layers} layers cannot be split into {n_stages} stages; each needs at least one "
            f"layer, so n_stages may be 1..{n_layers}"
        )
    largest = int(weights.argmax())
    bound = least_bound(
        sums.limbs, to_whole(sums.limbs[largest + 1]) - to_whole(sums.limbs[largest]), n_stages
    )
    low, high = np.zeros((2, n_stages + 1), dtype=np.int64)
    possible_borders(sums.limbs, n_stages, bound, low, high)
    level = to_whole(sums.limbs[-1]) // n_stages
    if (high - low).sum() > n_layers:
        level = narrow_ranges(weights, sums, bound, low, high)
    return tuple(b - a for a, b in pairwise(even_borders(sums.limbs, bound, level, low, high)))


def _weights(seconds: object) -> Floats:
    """Return weights as a contiguous array; those that are no numbers are NaN.

    Raises
    ------
    ArgumentError
        If ``seconds`` is no sequence.
    """
    if isinstance(seconds, np.ndarray) and seconds.ndim == 1 and seconds.dtype == np.float64:
        return np.ascontiguousarray(seconds)
    try:
        values = list(seconds)  # type: ignore[call-overload]
    except TypeError:
        raise ArgumentError(
            f"seconds must be a sequence of one weight a layer, such as [1, 1, 3], got {seconds!r}"
        ) from None
    if set(map(type, values)) <= {float}:
        return np.array(values, dtype=np.float64)
    converted = map(number, values)
    return np.array([np.nan if x is None else x for x in converted], dtype=np.float64)

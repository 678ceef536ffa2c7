"""The split of layers whose slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.partition.even_stages import even_borders
from pipesim.costs.partition.exact_sums import ExactSums, Floats, Ints, exact_sums, to_whole
from pipesim.costs.partition.near_even import narrow_ranges
from pipesim.costs.partition.stage_bound import least_bound, possible_borders
from pipesim.errors import ArgumentError, CostsError, check_count, number


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

    Raises
    ------
    CostsError
        For a weight that is negative, NaN or infinite.

    Warns
    -----
    CostsWarning
        If stages may be less even than possible, as they have more than 20 million possible
        borders. This takes many layers, of which many are heavier than the mean stage.
        Also if exact sums take ten seconds or more, as weights differ by huge factors.

    See Also
    --------
    pipesim.Transformer.costs : Costs of stages with these layers.
    pipesim.write_layout : The layers as a layout string of Megatron.

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
    next of the layers.

    Parameters
    ----------
    layers
        Layers that are not zero, at most ``n_stages``.
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

"""Layers dealt to stages: a stage is a run of neighbours, so a split is a list of sizes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, lcm
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, CostsError, check_count, check_name, number
from pipesim.utils.host_memory import check_stages

__all__ = [
    "Partition",
    "Split",
    "balanced_split",
    "check_partition",
    "checked_counts",
    "checked_split",
]

#: Number of stages, or layers of each stage.
Split = int | Sequence[int] | NDArray[np.integer[Any]]
#: How a number of stages is made of layers: of as many each, or so that the slowest is fastest.
Partition = Literal["even", "balanced"]


def check_partition(partition: object, split: object, name: str) -> bool:
    """Return whether ``split`` is a number of stages, which alone a partition may be given for.

    Raises
    ------
    ArgumentError
        For a partition beside the layers of each stage.
    UnknownNameError
        For an unknown partition.
    """
    is_number = isinstance(split, Integral)
    if partition is not None:
        check_name("partition", partition, get_args(Partition))
        if not is_number:
            raise ArgumentError(
                f"{name} gives the layers of each stage, so that there is nothing for "
                f"partition={partition!r} to say; leave it out, or give a number of stages"
            )
    return is_number


def checked_split(
    split: object, n_layers: int, name: str, *, ends_may_be_empty: bool = False
) -> tuple[int, ...]:
    """Return the layers of each stage, if there are ``n_layers`` in all.

    Parameters
    ----------
    split
        Layers of each stage, or a number of stages that get as many layers each.
    n_layers
        Layers of the model.
    name
        What the argument is called.
    ends_may_be_empty
        Whether the first and the last stage need no layer, as they hold something else.

    Raises
    ------
    ArgumentError
        If ``n_layers`` do not divide evenly, sizes do not sum to it, or a stage is empty.
    """
    if isinstance(split, Integral):
        n_stages = check_count(name, split)
        check_stages(min(n_stages, n_layers))
        size, rest = divmod(n_layers, n_stages)
        if rest or not size:
            raise ArgumentError(
                f"{name}={n_stages}: {n_layers} layers do not divide into {n_stages} stages of as "
                f"many each; give {_advice(size, rest, n_stages)}"
            )
        return (size,) * n_stages
    counts = checked_counts(split, name, ends_may_be_empty=ends_may_be_empty)
    if sum(counts) != n_layers:
        raise ArgumentError(
            f"{name}={shown(counts)} sums to {sum(counts)} layers, but there are {n_layers}; "
            "every layer belongs to one stage"
        )
    return counts


def _advice(size: int, rest: int, n_stages: int) -> str:
    """Return what to give where layers do not divide evenly."""
    if not size:
        return f"at most {rest} stages"
    even = [size + (stage >= n_stages - rest) for stage in range(n_stages)]
    return f"the layers of each stage, such as {shown(even)}"


def checked_counts(split: object, name: str, *, ends_may_be_empty: bool = False) -> tuple[int, ...]:
    """Return the layers of each stage, whatever their sum; see `checked_split`."""
    if isinstance(split, np.ndarray):
        split = split.tolist()
    if not isinstance(split, (list, tuple)) or not split:
        raise ArgumentError(
            f"{name} must be a number of stages or the layers of each stage, such as [3, 3, 2], "
            f"got {split!r}"
        )
    ends = (0, len(split) - 1) if ends_may_be_empty else ()
    return tuple(
        check_count(f"{name}: layers of stage {stage}", size, 0 if stage in ends else 1)
        for stage, size in enumerate(split)
    )


def shown(sizes: Sequence[int]) -> str:
    """Return sizes as text, shortened where there are many."""
    if len(sizes) <= 16:
        return f"[{', '.join(map(str, sizes))}]"
    return f"[{', '.join(map(str, sizes[:8]))}, ..., {', '.join(map(str, sizes[-4:]))}]"


def balanced_split(seconds: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage such that the slowest stage is as fast as can be.

    Among those splits, the one whose stages are most even (least sum of squares); among those,
    the one with the fewest layers on the first stages, which hold the most activations in 1F1B.
    Exact, whatever the rounding of sums: it counts in whole multiples of a common unit.

    Parameters
    ----------
    seconds
        Of each layer; or any other weight >= 0, such as bytes.
    n_stages
        Each gets at least one layer.

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

    Notes
    -----
    The least bound of the slowest stage is found by halving (a bound can be kept if filling stages
    up to it, one after the other, needs no more than there are), and the most even split within
    it by dynamic programming over (stages left, first layer).

    Examples
    --------
    >>> balanced_split([1, 1, 1, 1, 1, 1, 3], 3)
    (3, 3, 1)
    """
    try:
        listed = list(seconds)
    except TypeError:
        raise ArgumentError(
            f"seconds must be a sequence of one weight a layer, such as [1, 1, 3], got {seconds!r}"
        ) from None
    weights = _whole(listed)
    n_layers = len(weights)
    if check_count("n_stages", n_stages) > n_layers:
        raise ArgumentError(
            f"{n_layers} layers cannot be split into {n_stages} stages; each needs at least one "
            f"layer, so n_stages may be 1..{n_layers}"
        )
    ends = [0, *accumulate(weights)]
    bound = _least_bound(ends, max(weights), n_stages)
    # best[i]: least sum of squares of layers i.. in the stages counted so far.
    best: list[float] = [inf] * n_layers + [0]
    choices: list[list[int]] = []
    for _ in range(n_stages):
        earlier, best, choice = best, [inf] * (n_layers + 1), [0] * n_layers
        for first in range(n_layers):
            last = bisect.bisect_right(ends, ends[first] + bound) - 1
            for end in range(first + 1, last + 1):
                if earlier[end] == inf:
                    continue
                total = (ends[end] - ends[first]) ** 2 + earlier[end]
                if total < best[first]:  # of equals the first, which is the shortest
                    best[first], choice[first] = total, end
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(b - a for a, b in pairwise(bounds))


def _whole(seconds: Sequence[object]) -> list[int]:
    """Return weights as whole multiples of one unit; every float is a whole number over 2**n."""
    values = []
    for layer, weight in enumerate(seconds):
        got = number(weight)
        if got is None or not 0 <= got < inf:
            raise CostsError(f"seconds of layer {layer} must be finite and >= 0, got {weight!r}")
        values.append(Fraction(got))
    unit = lcm(*(value.denominator for value in values))
    return [int(value * unit) for value in values]


def _least_bound(ends: list[int], largest: int, n_stages: int) -> int:
    """Return the least sum that no stage needs to exceed."""
    low, high = largest, ends[-1]
    while low < high:
        middle = (low + high) // 2
        first, used = 0, 0
        while first < len(ends) - 1:
            first, used = bisect.bisect_right(ends, ends[first] + middle) - 1, used + 1
        low, high = (low, middle) if used <= n_stages else (middle + 1, high)
    return low

"""Splits of layers into stages. A stage has consecutive layers, so a split is a list of sizes."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, lcm
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.megatron_layout import layout_mistake, layout_stages
from pipesim.errors import (
    ArgumentError,
    CostsError,
    UnknownNameError,
    check_count,
    check_name,
    number,
    suggestion,
)
from pipesim.scheduling.memory_checks import check_stages

__all__ = [
    "LayerPartition",
    "Split",
    "balanced_split",
    "check_partition",
    "checked_counts",
    "checked_split",
]

#: Number of stages, or layers of each stage: one number each, or a layout string of Megatron.
#: With a placement, also the word of a `LayerPartition`.
Split = int | Sequence[int] | NDArray[np.integer[Any]] | str
#: How layers are divided: as many for each stage, or so that the slowest stage, or the busiest
#: device of a placement, is fastest.
LayerPartition = Literal["even", "balanced"]


def check_partition(partition: object, split: object, name: str) -> bool:
    """Return whether ``split`` is a number of stages; only then may a partition be given.

    Raises
    ------
    ArgumentError
        For a partition together with the layers of each stage.
    UnknownNameError
        For an unknown partition.
    """
    is_number = isinstance(split, Integral)
    if partition is not None:
        check_name("partition", partition, get_args(LayerPartition))
        if not is_number:
            raise ArgumentError(
                f"{name} gives the layers of each stage, so that partition={partition!r} has no "
                "effect; leave it out, or give a number of stages"
            )
    return is_number


def checked_split(
    split: object, n_layers: int, name: str, *, ends_may_be_empty: bool = False
) -> tuple[int, ...]:
    """Return the layers of each stage, checked to have ``n_layers`` in all.

    Parameters
    ----------
    split
        Layers of each stage, or a number of stages that get as many layers each.
    n_layers
        Number of layers of the model.
    name
        Name of the argument, for messages.
    ends_may_be_empty
        Whether the first and the last stage may have no layer, since they hold other modules.

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
                f"many each; give {_alternative(size, rest, n_stages)}"
            )
        return (size,) * n_stages
    counts = checked_counts(split, name, ends_may_be_empty=ends_may_be_empty)
    if sum(counts) != n_layers:
        raise ArgumentError(
            f"{name}={_sizes_text(counts)} sums to {sum(counts)} layers, but there are {n_layers}; "
            "every layer belongs to one stage"
        )
    return counts


def _alternative(size: int, rest: int, n_stages: int) -> str:
    """Return a split to suggest if layers do not divide evenly, as text."""
    if not size:
        return f"at most {rest} stages"
    even = [size + (stage >= n_stages - rest) for stage in range(n_stages)]
    return f"the layers of each stage, such as {_sizes_text(even)}"


def checked_counts(split: object, name: str, *, ends_may_be_empty: bool = False) -> tuple[int, ...]:
    """Return the layers of each stage, without a check of their sum; see `checked_split`."""
    if isinstance(split, str):
        return _layout_counts(split, name, ends_may_be_empty)
    if isinstance(split, np.ndarray):
        split = split.tolist()
    if not isinstance(split, (list, tuple)) or not split:
        raise _no_counts(split, name)
    ends = (0, len(split) - 1) if ends_may_be_empty else ()
    return tuple(
        check_count(f"{name}: layers of stage {stage}", size, 0 if stage in ends else 1)
        for stage, size in enumerate(split)
    )


def _layout_counts(text: str, name: str, ends_may_be_empty: bool) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string, none of which may be empty."""
    hint = suggestion(text.lower(), get_args(LayerPartition)) if text.isalpha() else ""
    if hint and not set(text) <= set("EtL"):
        raise UnknownNameError(f"unknown {name} {text!r}{hint}")
    if re.fullmatch(r"[\[(]?\s*\d+(\s*,\s*\d+)+\s*,?\s*[])]?", text):
        sizes = _sizes_text([int(value) for value in re.findall(r"\d+", text)])
        raise ArgumentError(f"{name}={text!r:.60} is text; give {sizes}, without quotes")
    if not set("EtL|") & set(text):
        raise _no_counts(text, name)
    counts, positions = layout_stages(text, name)
    ends = (0, len(counts) - 1) if ends_may_be_empty else ()
    for stage, size in enumerate(counts):
        if not size and stage not in ends:
            raise layout_mistake(
                name, text, positions[stage], f"stage {stage}, which ends here, has no layer"
            )
    return counts


def _no_counts(split: object, name: str) -> ArgumentError:
    """Return the error of a value that is no split."""
    return ArgumentError(
        f"{name} must be a number of stages or the layers of each stage, such as [3, 3, 2] or "
        f"'Et*3|t*3|t*2L', got {split!r}"
    )


def _sizes_text(sizes: Sequence[int]) -> str:
    """Return sizes as text; more than 16 are shortened."""
    if len(sizes) <= 16:
        return f"[{', '.join(map(str, sizes))}]"
    return f"[{', '.join(map(str, sizes[:8]))}, ..., {', '.join(map(str, sizes[-4:]))}]"


def balanced_split(seconds: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage such that the slowest stage is as fast as possible.

    Among such splits, the result is the one whose stages are most even (least sum of squares).
    Among those, it has the fewest layers on the first stages, which hold the most activations in
    1F1B. It is exact despite the rounding of sums: weights are whole multiples of a common unit.

    Parameters
    ----------
    seconds
        Seconds of each layer; or any other weight >= 0, such as bytes.
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

    Notes
    -----
    The least bound of the slowest stage is found by bisection: a bound is feasible if filling
    stages up to it, in order, needs at most ``n_stages``. The most even split within the bound is
    found by dynamic programming over (stages left, first layer).

    Examples
    --------
    >>> balanced_split([1, 1, 1, 1, 1, 1, 3], 3)
    (3, 3, 1)
    """
    try:
        values = list(seconds)
    except TypeError:
        raise ArgumentError(
            f"seconds must be a sequence of one weight a layer, such as [1, 1, 3], got {seconds!r}"
        ) from None
    weights = _whole_weights(values)
    n_layers = len(weights)
    if check_count("n_stages", n_stages) > n_layers:
        raise ArgumentError(
            f"{n_layers} layers cannot be split into {n_stages} stages; each needs at least one "
            f"layer, so n_stages may be 1..{n_layers}"
        )
    ends = [0, *accumulate(weights)]
    bound = _least_bound(ends, max(weights), n_stages)
    borders = [0]
    for choice in reversed(_most_even_choices(ends, bound, n_stages)):
        borders.append(choice[borders[-1]])
    return tuple(b - a for a, b in pairwise(borders))


def _most_even_choices(ends: list[int], bound: int, n_stages: int) -> list[list[int]]:
    """Return the border after the first stage, for 1 to ``n_stages`` stages from each layer on.

    ``ends`` are the sums of weights up to each layer. No stage exceeds ``bound``, and the sum of
    squares of the stages is the least.
    """
    n_layers = len(ends) - 1
    # best[i]: least sum of squares of layers i.. in the stages counted so far.
    best: list[float] = [inf] * n_layers + [0]
    choices: list[list[int]] = []
    for _ in range(n_stages):
        options = [_best_stage(ends, bound, first, best) for first in range(n_layers)]
        best = [total for total, _ in options] + [inf]
        choices.append([end for _, end in options])
    return choices


def _best_stage(ends: list[int], bound: int, first: int, best: list[float]) -> tuple[float, int]:
    """Return the least sum of squares from layer ``first`` on, and the end of its first stage.

    ``best`` has the least sums of the layers after that stage. Among equal sums, the stage is the
    shortest. Without any possible stage, the sum is infinite and the end 0.
    """
    least, choice = inf, 0
    last = bisect.bisect_right(ends, ends[first] + bound) - 1
    for end in range(first + 1, last + 1):
        if best[end] == inf:  # no float holds the sum of inf and a large integer
            continue
        total = (ends[end] - ends[first]) ** 2 + best[end]
        if total < least:
            least, choice = total, end
    return least, choice


def _whole_weights(seconds: Sequence[object]) -> list[int]:
    """Return weights as whole multiples of one unit; every float is a whole number over 2**n."""
    values = []
    for layer, weight in enumerate(seconds):
        result = number(weight)
        if result is None or not 0 <= result < inf:
            raise CostsError(f"seconds of layer {layer} must be finite and >= 0, got {weight!r}")
        values.append(Fraction(result))
    unit = lcm(*(value.denominator for value in values))
    return [int(value * unit) for value in values]


def _least_bound(ends: list[int], largest: int, n_stages: int) -> int:
    """Return the least bound on the sum of a stage for which ``n_stages`` suffice."""
    low, high = largest, ends[-1]
    while low < high:
        middle = (low + high) // 2
        first, used = 0, 0
        while first < len(ends) - 1:
            first, used = bisect.bisect_right(ends, ends[first] + middle) - 1, used + 1
        low, high = (low, middle) if used <= n_stages else (middle + 1, high)
    return low

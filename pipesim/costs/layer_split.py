"""Splits of layers into stages: as arguments, as Megatron's layout strings, and balanced ones.

A stage has consecutive layers, so a split is a list of sizes.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise
from math import inf
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    CostsError,
    UnknownNameError,
    check_count,
    check_list,
    check_name,
    check_text,
    number,
    suggestion,
)
from pipesim.scheduling.memory_checks import check_stages

#: Number of stages, or layers of each stage: one number each, or a layout string of Megatron.
#: With a placement, also the word of a `LayerPartition`.
Split = int | Sequence[int] | NDArray[np.integer[Any]] | str
#: How layers are divided: as many for each stage, or so that the slowest stage, or the busiest
#: device of a placement, is fastest.
LayerPartition = Literal["even", "balanced"]


def check_partition(partition: object, split: object, name: str) -> bool:
    """Return whether ``split`` is a number of stages; only then may a partition be given."""
    is_number = isinstance(split, Integral)
    if partition is not None:
        if isinstance(partition, list | tuple | np.ndarray):
            raise ArgumentError(
                f'partition must be "even" or "balanced", got {partition!r:.60}; give the layers '
                f"of each stage as {name}, in place of the number of stages"
            )
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

    A number of stages get as many layers each. ``name`` is that of the argument, for messages. With
    ``ends_may_be_empty``, the first and the last stage may have no layer: they hold other modules.
    """
    if isinstance(split, Integral):
        n_stages = check_count(name, split)
        check_stages(min(n_stages, n_layers))
        size, rest = divmod(n_layers, n_stages)
        if rest or not size:
            remedy = f"at most {rest} stages"
            if size:
                sizes = [size + (stage >= n_stages - rest) for stage in range(n_stages)]
                remedy = f"the layers of each stage, such as {_sizes_text(sizes)}"
            raise ArgumentError(
                f"{name}={n_stages}: {n_layers} layers do not divide into {n_stages} stages of as "
                f"many each; give {remedy}"
            )
        return (size,) * n_stages
    counts = checked_counts(split, name, ends_may_be_empty=ends_may_be_empty)
    if sum(counts) != n_layers:
        raise ArgumentError(
            f"{name}={_sizes_text(counts)} sums to {sum(counts)} layers, but there are {n_layers}; "
            "every layer belongs to one stage"
        )
    return counts


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
    return ArgumentError(
        f"{name} must be a number of stages or the layers of each stage, such as [3, 3, 2] or "
        f"'Et*3|t*3|t*2L', got {split!r}"
    )


def _sizes_text(sizes: Sequence[int]) -> str:
    """Return sizes as text; more than 16 are shortened."""
    if len(sizes) <= 16:
        return f"[{', '.join(map(str, sizes))}]"
    return f"[{', '.join(map(str, sizes[:8]))}, ..., {', '.join(map(str, sizes[-4:]))}]"


# Layout strings, such as ``"Et*2|(t*2|)*34t*3|tL"``: ``--pipeline-model-parallel-layout`` of
# Megatron-LM (docs, "Custom Pipeline Model Parallel Layout"). Stages are in the order of the
# model; with several a device, in that of chunks.
#
# =========  ===================================================
# ``E``      embedding, first of all
# ``t``      a decoder layer
# ``L``      head and loss, last of all
# ``|``      border between two stages
# ``(...)``  a group; may contain groups
# ``*n``     n times the letter, or the group, before it
# ``,``      nothing: separates for the eye
# =========  ===================================================

_TOKEN = re.compile(r"\*(?P<times>\d{1,9})|(?P<other>[EtL|(),])|(?P<space>\s+)")
#: Most letters of a written-out layout.
_LONGEST = 10**6


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string of Megatron.

    Parameters
    ----------
    text
        Value of ``--pipeline-model-parallel-layout``: ``E`` embedding, ``t`` layer, ``L`` loss,
        ``|`` end of a stage, ``*n`` repetition, brackets for groups, commas for the eye.

    Returns
    -------
    tuple of int
        Layers of each stage, without embedding and loss; shape ``(n_stages,)``.

    Examples
    --------
    >>> from pipesim.costs import read_layout
    >>> read_layout("Et*2|(tt|)*3,t|L")
    (2, 2, 2, 2, 1, 0)
    """
    return layout_stages(text, "text")[0]


def layout_stages(text: str, name: str) -> tuple[tuple[int, ...], list[int]]:
    """Return the layers of each stage of a layout string, and the position of each stage's end.

    ``name`` is the name of the argument. The end of a stage is its border, or the loss.
    """
    places = _written_out(check_text(name, text), name)
    letters = "".join(text[place] for place in places)
    n_embeddings, n_losses = letters.count("E"), letters.count("L")
    place, reason = 0, ""
    if not letters.startswith("E"):
        reason = "the layout must begin with E, the embedding"
    elif n_embeddings > 1:
        place, reason = (
            letters.rindex("E"),
            f"the embedding stands once, but E {n_embeddings} times",
        )
    elif n_losses > 1:
        place, reason = letters.index("L"), f"the loss stands once, but L {n_losses} times"
    elif not n_losses or letters[-1] != "L":
        place, reason = len(letters) - 1, "the layout must end with L, the loss"
    if reason:
        raise layout_mistake(name, text, places[place] if places else 0, reason)
    ends = [place for place, letter in zip(places, letters, strict=True) if letter in "|L"]
    return tuple(stage.count("t") for stage in letters.split("|")), ends


def write_layout(layers_per_stage: Sequence[int]) -> str:
    """Return the layout string of Megatron for the layers of each stage of a transformer.

    The first stage has the embedding, too, and the last one has head and loss.

    Parameters
    ----------
    layers_per_stage
        Layers of each stage, whole numbers of at least 0.

    Returns
    -------
    str
        Value for ``--pipeline-model-parallel-layout``.

    Examples
    --------
    >>> from pipesim.costs import write_layout
    >>> write_layout([2, 2, 2, 2, 1, 0])
    'Et*2|(t*2|)*3t|L'
    """
    values = check_list("layers_per_stage", layers_per_stage, "the layers of each stage")
    if not values:
        raise ArgumentError("layers_per_stage is empty; give the layers of each stage")
    first, *middle = (
        check_count(f"layers_per_stage: layers of stage {stage}", size, 0)
        for stage, size in enumerate(values)
    )
    if not middle:
        return f"E{_layers(first)}L"
    *middle, last = middle
    text = f"E{_layers(first)}|"
    for size, stages in groupby(middle):
        count = len(list(stages))
        text += f"({_layers(size)}|)*{count}" if count > 1 else f"{_layers(size)}|"
    return f"{text}{_layers(last)}L"


def _layers(size: int) -> str:
    return f"t*{size}" if size > 1 else "t" * size


def _written_out(text: str, name: str) -> list[int]:
    """Return the positions of letters and borders, without groups and with repetitions."""
    # Of each open group: the pieces before and inside it, and the position of its bracket.
    groups: list[tuple[list[list[int]], int]] = [([], 0)]
    position = 0
    while position < len(text):
        pieces = groups[-1][0]
        match = _TOKEN.match(text, position)
        if match is None:
            raise _unknown(name, text, position)
        token = match["other"] or ""
        if match["times"]:
            if not pieces:
                raise layout_mistake(
                    name, text, position, "nothing stands before it that it repeats"
                )
            piece, times = pieces.pop(), int(match["times"])
            if len(piece) * times > _LONGEST:
                raise ArgumentError(f"{name}={text!r:.60} has more than {_LONGEST:,} letters")
            pieces.append(piece * times)
        elif token == "(":
            groups.append(([], position))
        elif token == ")":
            if len(groups) == 1:
                raise layout_mistake(name, text, position, "no bracket is open")
            groups.pop()
            groups[-1][0].append(list(chain.from_iterable(pieces)))
        elif token and token != ",":
            pieces.append([position])
        position = match.end()
    if len(groups) > 1:
        raise layout_mistake(name, text, groups[-1][1], "the bracket is never closed")
    return list(chain.from_iterable(groups[0][0]))


def _unknown(name: str, text: str, position: int) -> ArgumentError:
    if text[position] != "*":
        return layout_mistake(
            name, text, position, "only E, t, L, |, *n, groups and commas are known"
        )
    if position + 1 == len(text):
        return layout_mistake(name, text, position, "a whole number must follow it, such as *4")
    reason = "a whole number from 0 to 999999999 must follow *, such as *4"
    return layout_mistake(name, text, position + 1, reason)


def layout_mistake(name: str, text: str, position: int, reason: str) -> ArgumentError:
    """Return the error of a mistake, which points to it."""
    letter = repr(text[position]) if text else "which is empty"
    return ArgumentError(
        f"{name}: mistake at position {position} of the layout, {letter}: {reason}\n"
        f"    {text}\n    {' ' * position}^"
    )


# Balanced splits.
#
# A float is a whole number times a power of two. So weights are whole multiples of a common unit,
# and their sums are exact as integers. A split is given by its borders: the first layer of each
# stage, and the number of layers at the end.

#: Sums of the weights of layers before each border, and the most that a stage may have of them.
_Limit = tuple[Sequence[int], int]


def balanced_split(
    seconds: Sequence[float] | NDArray[np.floating], n_stages: int
) -> tuple[int, ...]:
    """Return the layers of each stage such that the slowest stage is as fast as possible.

    Among such splits, the result is the one whose stages are most even (least sum of squares).
    Among those, it has the fewest layers on the first stages, which hold the most activations in
    1F1B. It is exact: sums are not rounded.

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

    Notes
    -----
    The least bound of the slowest stage is found by bisection: a bound is feasible if filling
    stages up to it, in order, needs at most ``n_stages``. The bound leaves a range for each border.
    The most even split is found by dynamic programming over the borders in these ranges.

    A thousand layers take some milliseconds, and 100,000 about a second. Ranges are wide where a
    layer is heavier than the mean stage: then a thousand layers take 0.1 s, and 4,000 some seconds.

    Examples
    --------
    >>> import pipesim as ps
    >>> ps.balanced_split([1, 1, 1, 1, 1, 1, 3], 3)
    (3, 3, 1)
    """
    values = seconds
    if isinstance(seconds, np.ndarray) and seconds.ndim == 1:
        values = seconds.tolist()
    is_listed = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    if not is_listed or isinstance(values, (np.ndarray, Mapping, str, bytes)):
        dimensions = f" of shape {seconds.shape}" if isinstance(seconds, np.ndarray) else ""
        raise ArgumentError(
            "seconds must be a list or a 1-d array of one weight a layer, such as [1, 1, 3], got "
            f"{seconds!r:.60} ({type(seconds).__name__}{dimensions})"
        )
    if not len(values):
        raise ArgumentError("seconds must have one weight a layer, of at least one layer, got none")
    if check_count("n_stages", n_stages) > len(values):
        raise ArgumentError(
            f"{len(values)} layers cannot be split into {n_stages} stages; each needs at least one "
            f"layer, so n_stages may be 1..{len(values)}"
        )
    weights = []
    for layer, value in enumerate(values):
        weight = number(value)
        if weight is None or not 0 <= weight < inf:
            raise CostsError(f"seconds of layer {layer} must be finite and >= 0, got {value!r}")
        weights.append(weight)
    sums = whole_sums(weights)
    split = limited_split(sums, n_stages, [(sums, sums[-1])])
    assert split is not None
    return split


def whole_sums(weights: Sequence[float]) -> list[int]:
    """Return the sums of weights before each border, as multiples of a common unit."""
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max(denominator for _, denominator in ratios)  # a power of two, as each of them
    return [0, *accumulate(value * (unit // denominator) for value, denominator in ratios)]


def limited_split(
    sums: Sequence[int], n_stages: int, limits: Sequence[_Limit]
) -> tuple[int, ...] | None:
    """Return the balanced split of those whose stages keep limits; None if there is none."""
    n_layers = len(sums) - 1
    if _last_borders(n_stages, limits)[-1] < n_layers:
        return None
    low, high = -(-sums[-1] // n_stages), sums[-1]
    while low < high:
        bound = (low + high) // 2
        stages = [*pairwise(_last_borders(n_stages, [(sums, bound), *limits]))]
        if stages[-1][1] == n_layers:
            high = max(sums[b] - sums[a] for a, b in stages)
        else:  # with the least bound for which any stage gets one more layer
            more = (sums[b + 1] - sums[a] for a, b in stages)
            low = min(x for x in more if x > bound)
    return most_even_split(sums, n_stages, [(sums, high), *limits])


def _last_border(first: int, limits: Sequence[_Limit]) -> int:
    """Return the last border that a stage may have which begins with layer ``first``."""
    return min(bisect_right(sums, sums[first] + most, first) for sums, most in limits) - 1


def _last_borders(n_stages: int, limits: Sequence[_Limit]) -> list[int]:
    """Return the last border after each number of stages, which are filled in order."""
    borders = [0]
    for _ in range(n_stages):
        borders.append(_last_border(borders[-1], limits))
    return borders


def most_even_split(
    sums: Sequence[int], n_stages: int, limits: Sequence[_Limit]
) -> tuple[int, ...]:
    """Return the split with the least sum of squares whose stages keep limits; some split must.

    Of equals, it is the one with the first borders.
    """
    n_layers = len(sums) - 1
    last = [min(x, n_layers - n_stages + k) for k, x in enumerate(_last_borders(n_stages, limits))]
    borders, best = range(n_layers, n_layers + 1), {n_layers: (0, n_layers)}
    tables = []
    for stage in reversed(range(n_stages)):
        reach = bisect_left(range(n_layers), borders[0], key=lambda x: _last_border(x, limits))
        before = range(max(reach, stage), last[stage] + 1)
        best = _next_borders(sums, limits, before, borders, best)
        borders = before
        tables.append(best)
    split = [0]
    for best in reversed(tables):
        split.append(best[split[-1]][1])
    return tuple(b - a for a, b in pairwise(split))


def _next_borders(
    sums: Sequence[int],
    limits: Sequence[_Limit],
    borders: range,
    following: range,
    best: Mapping[int, tuple[int, int]],
) -> dict[int, tuple[int, int]]:
    """Return the least sum of squares from each border on, and the next border.

    ``best`` has those of the following borders. From a later border the best next one is not
    earlier (squares have Monge's property): it divides the choices of the other borders.
    """
    result = {}

    def choose(borders: range, following: range) -> None:
        if not borders:
            return
        border = borders[len(borders) // 2]
        ends = range(
            max(following.start, border + 1),
            min(following.stop, _last_border(border, limits) + 1),
        )
        origin = sums[border]
        result[border] = min(((sums[end] - origin) ** 2 + best[end][0], end) for end in ends)
        end = result[border][1]
        choose(range(borders.start, border), range(following.start, end + 1))
        choose(range(border + 1, borders.stop), range(end, following.stop))

    choose(borders, following)
    return result

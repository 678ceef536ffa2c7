"""Splits of layers into stages: as arguments, as Megatron's layout strings, and balanced ones.

A stage has consecutive layers, so a split is a list of sizes.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from math import inf
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

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
from pipesim.utils.checks import checked_names

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
    ``ends_may_be_empty``, the layers are those of a transformer: the first and the last stage may
    have none, since they hold other modules, and so may stages of a layout with such modules.
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
    if hint and not set(text) <= set("EtmL"):
        raise UnknownNameError(f"unknown {name} {text!r}{hint}")
    if re.fullmatch(r"[\[(]?\s*\d+(\s*,\s*\d+)+\s*,?\s*[])]?", text):
        sizes = _sizes_text([int(value) for value in re.findall(r"\d+", text)])
        raise ArgumentError(f"{name}={text!r:.60} is text; give {sizes}, without quotes")
    if not set("EtL|") & set(text):
        raise _no_counts(text, name)
    stages = layout_stages(text, name, has_mtp=ends_may_be_empty)
    ends = (0, len(stages) - 1) if ends_may_be_empty else ()
    for index, stage in enumerate(stages):
        is_filled = stage.layers or (ends_may_be_empty and any(stage.modules[:2]))
        if not is_filled and index not in ends:
            reason = f"stage {index}, which ends here, has no layer"
            raise layout_mistake(name, text, stage.end, reason)
    return tuple(stage.layers for stage in stages)


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
# =========  ======================================================
# ``E``      embedding, first of all
# ``t``      a decoder layer
# ``m``      a layer of multi-token prediction (MTP), after all ``t``
# ``L``      head and loss, last of all; one for all losses, or one
#            for each (github.com/NVIDIA/Megatron-LM/pull/5318)
# ``|``      border between two stages
# ``(...)``  a group; may contain groups
# ``*n``     n times the letter, or the group, before it
# ``,``      nothing: separates for the eye
# =========  ======================================================

_TOKEN = re.compile(r"\*(?P<times>\d{1,9})|(?P<other>[EtmL|(),])|(?P<space>\s+)")
#: Most letters of a written-out layout.
_LONGEST = 10**6


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each stage of a layout string of Megatron.

    Parameters
    ----------
    text
        Value of ``--pipeline-model-parallel-layout``: ``E`` embedding, ``t`` layer, ``m`` layer of
        multi-token prediction, ``L`` loss, ``|`` end of a stage, ``*n`` repetition, brackets for
        groups, commas for the eye. ``L`` stands once, for all losses, or once for each.

    Returns
    -------
    tuple of int
        Layers of each stage, without embedding, multi-token prediction and losses; shape
        ``(n_stages,)``.

    Examples
    --------
    >>> from pipesim.costs import read_layout
    >>> read_layout("Et*2|(tt|)*3,t|m|L")
    (2, 2, 2, 2, 1, 0, 0)
    """
    return tuple(stage.layers for stage in layout_stages(text, "text", has_mtp=True))


class StageModules(NamedTuple):
    """Modules of a stage behind the last layer of a transformer, and what it sends on."""

    mtp: int  # layers of multi-token prediction
    losses: int  # of the last layer and of `mtp`, each with a head
    outputs: int = 1  # hidden states of its output


class LayoutStage(NamedTuple):
    """A stage of a layout string."""

    layers: int
    modules: StageModules
    end: int  # position of its border in the text, or of the last loss


def layout_modules(
    split: object, mtp_layers: int, name: str = "layers_per_stage"
) -> tuple[StageModules, ...]:
    """Return the modules of each stage of a layout string; none if all are on the last stage.

    Other splits have none. ``mtp_layers`` are those of the model.
    """
    if not isinstance(split, str) or "L" not in split:
        return ()
    modules = [stage.modules for stage in layout_stages(split, name, has_mtp=True)]
    n = sum(stage.mtp for stage in modules)
    if n != mtp_layers:
        raise ArgumentError(
            f"{name}={split!r:.60} has {n} layers of multi-token prediction (m), but the model has "
            f"{mtp_layers}; write {mtp_layers} m behind the last t, or change mtp_layers of the "
            "model (--mtp-num-layers)"
        )
    return tuple(modules) if any(any(stage[:2]) for stage in modules[:-1]) else ()


def copied_stages(modules: Sequence[StageModules], *, is_tied: bool) -> tuple[tuple[int, ...], ...]:
    """Return the groups of stages with copies of one matrix: of the embedding, of the LM head.

    Multi-token prediction uses the embedding, and each stage with a loss the head. They are one
    matrix if ``is_tied``.
    """
    mtp = {0, *(k for k, stage in enumerate(modules) if stage.mtp)}
    heads = {k for k, stage in enumerate(modules) if stage.losses}
    groups = [mtp | heads] if is_tied else [mtp, heads]
    return tuple(tuple(sorted(group)) for group in groups if len(group) > 1)


@lru_cache(maxsize=64)
def layout_copies(text: str, *, is_tied: bool) -> tuple[tuple[int, ...], ...]:
    """Return the `copied_stages` of a layout string."""
    stages = layout_stages(text, "layers_per_stage", has_mtp=True)
    return copied_stages([stage.modules for stage in stages], is_tied=is_tied)


def layout_stages(text: str, name: str, *, has_mtp: bool = False) -> list[LayoutStage]:
    """Return the stages of a layout string; ``m`` is a mistake unless ``has_mtp``.

    ``name`` is the name of the argument.
    """
    places = _written_out(check_text(name, text), name)
    letters = "".join(text[place] for place in places)
    n_embeddings, n_losses, n_mtp = (letters.count(letter) for letter in "ELm")
    place, reason = 0, ""
    if not letters.startswith("E"):
        reason = "the layout must begin with E, the embedding"
    elif n_embeddings > 1:
        place, reason = (
            letters.rindex("E"),
            f"the embedding stands once, but E {n_embeddings} times",
        )
    elif n_mtp and not has_mtp:
        place, reason = letters.index("m"), "these stages have no multi-token prediction"
    elif n_losses not in (0, 1, 1 + n_mtp):
        or_all = f", or once for each of {1 + n_mtp} losses" if n_mtp else ""
        place = letters.index("L")
        reason = f"the loss stands once{or_all}, but L {n_losses} times"
    elif not n_losses or letters[-1] != "L":
        place, reason = len(letters) - 1, "the layout must end with L, the loss"
    elif "m" in letters[: letters.rfind("t")]:
        place, reason = letters.index("m"), "multi-token prediction stands behind the last t"
    elif "L" in letters[: letters.rfind("t")]:
        place, reason = letters.index("L"), "a loss stands behind the last t"
    if not reason:
        modules, place = _stage_modules(letters, n_mtp)
        if place >= 0:
            reason = "the losses of all layers before it were computed"
    if reason:
        raise layout_mistake(name, text, places[place] if places else 0, reason)
    borders = [place for place, letter in zip(places, letters, strict=True) if letter == "|"]
    layers = [stage.count("t") for stage in letters.split("|")]
    return list(map(LayoutStage, layers, modules, [*borders, places[-1]]))


def _stage_modules(letters: str, n_mtp: int) -> tuple[list[StageModules], int]:
    """Return the modules of each stage, and the position of a loss that has no layer, or -1.

    Each loss is that of the last layer, or layer of multi-token prediction, without one. A message
    carries the hidden states that still need a loss, and the one that the next ``m`` reads.
    """
    share = 1 if letters.count("L") > 1 else 1 + n_mtp
    modules: list[StageModules] = []
    mtp = losses = 0
    without_loss, needs_loss, left = 1, True, n_mtp
    for place, letter in enumerate([*letters, "|"]):
        if letter == "m":
            mtp, left, without_loss, needs_loss = mtp + 1, left - 1, without_loss + 1, True
        elif letter == "L":
            if without_loss < share:
                return modules, place
            losses, without_loss, needs_loss = losses + share, without_loss - share, False
        elif letter == "|":
            outputs = without_loss + (left > 0 and not needs_loss)
            modules.append(StageModules(mtp, losses, max(1, outputs)))
            mtp = losses = 0
    return modules, -1


def write_layout(layers_per_stage: Sequence[int], *, mtp_layers: int = 0) -> str:
    """Return the layout string of Megatron for the layers of each stage of a transformer.

    The first stage has the embedding, too, and the last one has multi-token prediction, head and
    loss.

    Parameters
    ----------
    layers_per_stage
        Layers of each stage, whole numbers of at least 0.
    mtp_layers
        Layers of multi-token prediction.

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
    loss = f"{_layers(check_count('mtp_layers', mtp_layers, 0), 'm')}L"
    if not middle:
        return f"E{_layers(first)}{loss}"
    *middle, last = middle
    text = f"E{_layers(first)}|"
    for size, stages in groupby(middle):
        count = len(list(stages))
        text += f"({_layers(size)}|)*{count}" if count > 1 else f"{_layers(size)}|"
    return f"{text}{_layers(last)}{loss}"


def _layers(size: int, letter: str = "t") -> str:
    return f"{letter}*{size}" if size > 1 else letter * size


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
            name, text, position, "only E, t, m, L, |, *n, groups and commas are known"
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


@checked_names
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

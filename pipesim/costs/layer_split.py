"""Splits of layers into stages. A stage has consecutive layers, so a split is a list of sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.megatron_layout import layout_mistake, layout_stages
from pipesim.errors import (
    ArgumentError,
    UnknownNameError,
    check_count,
    check_name,
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

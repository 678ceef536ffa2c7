"""Shards of micro-batches of other lengths: padded or packed sequences, and slices of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import joined_microbatches
from pipesim.errors import ArgumentError
from pipesim.models.size_checks import check_divides, check_size

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


#: For each micro-batch, the tokens of its sequences, or of each document packed into one.
Lengths = Sequence[int | Sequence[int]]
#: Number of equal slices of a sequence, or the tokens of each slice.
Slices = int | Sequence[int]


def microbatch_shards(shard: Shard, lengths: Lengths | None, slices: Slices) -> list[Shard]:
    """Return the shard of each micro-batch, or of each slice; see `Transformer.costs`.

    Empty if all micro-batches are those of ``shard``.
    """
    wholes = [shard] if lengths is None else _of_lengths(shard, lengths)
    is_sliced = not (isinstance(slices, Integral) and not isinstance(slices, bool) and slices == 1)
    if not is_sliced:
        return [] if lengths is None else wholes
    return [part for whole in wholes for part in _of_slices(whole, slices)]


def _of_lengths(shard: Shard, lengths: Lengths) -> list[Shard]:
    """Return the shard of each micro-batch with these lengths."""
    if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__len__") or not len(lengths):
        raise ArgumentError(
            "lengths must be, for each micro-batch, the tokens of its sequences, or a list of the "
            f"tokens of each document packed into one; got {lengths!r:.60}"
        )
    return [_of_length(shard, f"lengths[{k}]", value) for k, value in enumerate(lengths)]


def _of_length(shard: Shard, name: str, value: Any) -> Shard:
    """Return the shard of a micro-batch of sequences of a length, or of packed documents."""
    if not hasattr(value, "__len__"):
        return replace(shard, model=_with_length(shard, check_size(name, value)))
    if isinstance(value, (str, bytes)) or not len(value):
        raise ArgumentError(f"{name} must be tokens, or those of each document; got {value!r:.60}")
    if shard.microbatch_size > 1:
        raise ArgumentError(
            f"{name} packs documents into one micro-batch, but microbatch_size is "
            f"{shard.microbatch_size}; give microbatch_size=1, and all documents of a micro-batch"
        )
    documents = tuple(check_size(f"{name}[{k}]", tokens) for k, tokens in enumerate(value))
    model = _with_length(shard, sum(documents))
    return replace(shard, model=model, documents=documents)


def _of_slices(shard: Shard, slices: Slices) -> list[Shard]:
    """Return the shard of each slice of a micro-batch, in the order of the sequence."""
    length = shard.model.sequence_length
    if shard.documents:
        raise ArgumentError(
            "slices are of one sequence, but lengths pack several documents into a micro-batch; "
            "leave one of both out"
        )
    if not hasattr(slices, "__len__"):
        n = check_size("slices", slices)
        check_divides("slices", n, "sequence_length", length)
        sizes = [length // n] * n
    else:
        if isinstance(slices, (str, bytes)):
            raise ArgumentError(f"slices must be a count, or tokens of each, got {slices!r:.60}")
        parts = cast(Sequence[int], slices)
        sizes = [check_size(f"slices[{k}]", tokens) for k, tokens in enumerate(parts)]
        if sum(sizes) != length:
            raise ArgumentError(
                f"slices have {sum(sizes)} tokens, but a sequence has {length}; give tokens that "
                "sum to it, or a number of equal slices"
            )
    starts = accumulate(sizes, initial=0)
    return [
        replace(shard, model=_with_length(shard, size), prefix=start)
        for size, start in zip(sizes, starts, strict=False)
    ]


def _with_length(shard: Shard, length: int) -> Any:
    """Return the model of a shard with another length of sequences."""
    return replace(shard.model, sequence_length=length)


def costs_of_shards(
    costs: Costs, shards: Sequence[Shard], costs_of: Callable[[Shard], Costs]
) -> Costs:
    """Return costs whose fields of one micro-batch are those of each of several shards.

    Parameters
    ----------
    costs
        Costs with the fields of whole stages.
    shards
        Shard of each micro-batch.
    costs_of
        Returns the costs of the same stages for a shard.
    """
    distinct = list(dict.fromkeys(shards))
    parts = [costs_of(shard) for shard in distinct]
    position = {shard: k for k, shard in enumerate(distinct)}
    return joined_microbatches(costs, parts, np.array([position[shard] for shard in shards]))

"""Layers of each stage of a transformer whose last stage has the LM head as well."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    check_partition,
    checked_split,
)
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.errors import ArgumentError, CostsWarning, check_count
from pipesim.utils.caller_warnings import warn_caller

#: Seconds of each layer, of the embedding and of the LM head.
_Seconds = tuple[Sequence[float], float, float]
#: Ratio of the slowest stage of an even split to that of a balanced one which is worth a warning.
_UNEVEN = 1.05


def stage_sizes(
    layers_per_stage: Split,
    partition: LayerPartition | None,
    n_layers: int,
    layers: Sequence[float],
    embedding: float,
    head: float,
) -> tuple[int, ...]:
    """Return the layers of each stage; see `Transformer.costs` for arguments, errors and warnings.

    ``layers``, ``embedding`` and ``head`` are the seconds of each layer, of the embedding and of
    the LM head, forward and backward.
    """
    seconds = (layers, embedding, head)
    is_number = check_partition(partition, layers_per_stage, "layers_per_stage")
    if is_number and partition == "balanced":
        return _balanced_sizes(layers_per_stage, n_layers, seconds)
    sizes = checked_split(layers_per_stage, n_layers, "layers_per_stage", ends_may_be_empty=True)
    if is_number and partition is None:
        balanced = _balanced_sizes(layers_per_stage, n_layers, seconds)
        slowest, least = _slowest(sizes, seconds), _slowest(balanced, seconds)
        if slowest > _UNEVEN * least:
            warn_caller(
                f"layers_per_stage={layers_per_stage} has as many layers on each stage; with "
                f"the LM head, the last takes {slowest / least:.2f} times as long as the slowest "
                'of a balanced split would; give partition="balanced", or "even" if that is meant',
                CostsWarning,
            )
    return sizes


def _balanced_sizes(n_stages: object, n_layers: int, seconds: _Seconds) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest; the last stage may have the head alone."""
    count = check_count("layers_per_stage", n_stages)
    if count > n_layers + 1:
        raise ArgumentError(
            f"layers_per_stage={count}: {n_layers} layers and the LM head cannot "
            f"be split into {count} stages; give at most {n_layers + 1}"
        )
    layers, embedding, head = seconds
    first = [embedding + layers[0], *layers[1:]]
    *sizes, last = balanced_split([*first, head], count)
    return (*sizes, last - 1)


def _slowest(sizes: tuple[int, ...], seconds: _Seconds) -> float:
    """Return the seconds of the slowest stage."""
    layers, embedding, head = seconds
    borders = [0, *itertools.accumulate(sizes)]
    stages = [_sum(layers[a:b]) for a, b in itertools.pairwise(borders)]
    stages[0] += embedding
    stages[-1] += head
    return max(stages)


def _sum(seconds: Sequence[float]) -> float:
    """Return a sum; of equal values their product with their number."""
    if not seconds:
        return 0.0
    is_equal = seconds[0] == seconds[-1]
    return seconds[0] * len(seconds) if is_equal else sum(seconds)

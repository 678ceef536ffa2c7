"""Slices of a sequence that take equal seconds: later slices attend to more keys, so are shorter.

Sources: the computation-wise partition of Seq1F1B (arXiv 2406.03488, section 3.3), for equal
FLOPs; dynamic chunking of prefills in SGLang ("Pipeline Parallelism in SGLang", lmsys.org,
2026-01-15), for equal seconds by a fitted quadratic. If a prefix of ``l`` tokens takes
``f(l) = a l^2 + b l + c`` seconds, the next ``x`` tokens take ``f(l + x) - f(l)``, which is
``a x^2 + (2 a l + b) x``. The search here takes the seconds of the model's own kernels instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pipesim.costs.layer_split import LayerPartition, Split
from pipesim.errors import ArgumentError
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.model_sizes import check_divides, check_size
from pipesim.models.placed_split import stage_sizes
from pipesim.models.shard import Shard, with_layout
from pipesim.models.stage_seconds import stage_seconds
from pipesim.network.network import Network
from pipesim.utils.checks import Count, checked

#: Relative width at which the search for the seconds of the slowest slice ends.
_PRECISION = 1e-3


@checked
def balanced_slices(
    shard: Shard,
    layers_per_stage: Split,
    n_slices: Count | None,
    *,
    first: Count | None,
    multiple: Count,
    backward: bool,
    gpu: GPU | Mapping[str, Any] | str | None,
    flops_per_second: float | None,
    partition: LayerPartition | None,
    network: Network | None,
    last_logits: bool,
) -> list[int]:
    """Return the tokens of each slice; see `Transformer.balanced_slices`."""
    if (n_slices is None) == (first is None):
        raise ArgumentError(
            f"got n_slices={n_slices} and first={first}; give one: the number of slices, or the "
            "tokens of the first"
        )
    if backward and last_logits:
        raise ArgumentError(
            "backward=True balances slices of a training step, and last_logits=True are costs of a "
            "server, which has no backward; leave one of the two out"
        )
    shard = replace(with_layout(shard, layers_per_stage), last_logits=last_logits)
    rates = None if gpu is None else as_gpu(gpu)
    whole = stage_seconds(shard, rates, flops_per_second, network)
    sizes = stage_sizes(
        layers_per_stage, partition, shard.model.n_layers, whole.layers, *whole.parts[1:]
    )
    length, multiple = shard.model.sequence_length, check_size("multiple", multiple)
    try:
        replace(shard, model=replace(shard.model, sequence_length=multiple))
    except ArgumentError as error:
        raise ArgumentError(f"slices in multiples of {multiple} tokens: {error}") from error

    @cache
    def seconds(start: int, size: int) -> float:
        own = replace(shard, model=replace(shard.model, sequence_length=size), prefix=start)
        stages = replace(whole, shard=own).stages(sizes)
        both = zip(stages["forward"], stages["backward"], strict=True)
        return max(f + b * backward for f, b in both)

    def longest(start: int, limit: float, guess: int) -> int:
        """Return the most tokens from ``start`` on that take at most ``limit`` seconds, or 0.

        Seconds rise with tokens, nearly in a line: an interval around the answer is cut where that
        line meets the limit, or else in half.
        """
        rest = length - start
        low, high = 0, 1 - (-rest // multiple)  # in multiples; the sequence may cut the last short
        trial, by_line = guess // multiple, True
        while high - low > 1:
            trial = min(max(trial, low + 1), high - 1)
            took = seconds(start, min(trial * multiple, rest))
            low, high = (trial, high) if took <= limit else (low, trial)
            trial = round(trial * limit / took) if by_line else (low + high) // 2
            by_line = not by_line
        return min(low * multiple, rest)

    def slices_within(limit: float, n: int) -> list[int] | None:
        """Return at most ``n`` slices of at most ``limit`` seconds each; None if there are none."""
        parts = list[int]()
        while (start := sum(parts)) < length:
            size = longest(start, limit, parts[-1] if parts else length // n)
            if not size or len(parts) == n:
                return None
            parts.append(size)
        return parts

    if first is not None:
        check_divides("multiple", multiple, "first", check_size("first", first))
        limit, parts = seconds(0, first), list[int]()
        while (start := sum(parts)) < length:
            size = longest(start, limit, parts[-1] if parts else first)
            parts.append(size or min(multiple, length - start))
        return parts
    n, most = check_size("n_slices", n_slices), -(-length // multiple)
    if n > most:
        raise ArgumentError(
            f"n_slices={n} slices in multiples of {multiple} tokens need a sequence longer than "
            f"{(n - 1) * multiple}, got sequence_length={length}; give fewer slices, or a smaller "
            "multiple"
        )
    best, low, high = [length], 0.0, math.inf
    limit = seconds(0, length) / n
    while high > low * (1 + _PRECISION):
        parts_within = slices_within(limit, n)
        if parts_within is None:
            low = limit
        else:
            best, high = parts_within, limit
        factor = math.sqrt(low * high) / limit if low and high < math.inf else 1.1
        limit = limit * factor if low else limit / factor
    while len(best) < n:  # shorter slices take no less time
        k = best.index(max(best))
        half = -(-best[k] // (2 * multiple)) * multiple
        best[k : k + 1] = [half, best[k] - half]
    return best

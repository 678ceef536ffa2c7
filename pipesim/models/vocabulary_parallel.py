"""Costs of stages whose vocabulary is divided over all devices (arXiv 2411.05288).

The stages are those of ``pipesim.schedule("1f1b", vocabulary_parallel=True)``: slices of the
embedding, layers, slices of the LM head, and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.rows import ROWS
from pipesim.errors import ArgumentError
from pipesim.models.gpu import GPU, Kernel
from pipesim.models.shard import Shard
from pipesim.models.shard_sizes import FP32_BYTES

#: Numbers of each token that a head slice sends to the loss: the logarithm of its sum of
#: exponentials, with the largest logit, and the logit of the target.
_STATISTICS = 2
#: Kernels that join them, and reads or writes of all statistics: largest, difference, exponential,
#: sum, logarithm.
_JOINS = 5


def check_vocabulary_parallel(shard: Shard, layers_per_stage: object, **others: Any) -> None:
    """Raise for arguments of `Transformer.costs` that a divided vocabulary does not take.

    ``others`` are arguments that must be None, or one number for all stages.
    """
    if isinstance(layers_per_stage, str):
        raise ArgumentError(
            f"layers_per_stage={layers_per_stage!r:.60} places embedding and loss, which "
            "vocabulary_parallel divides over all devices; give the layers of each device, such "
            "as [8, 8, 8, 8]"
        )
    if shard.model.mtp_layers:
        raise ArgumentError(
            f"the model has {shard.model.mtp_layers} mtp_layers, whose losses "
            "vocabulary_parallel does not divide; leave one of the two out"
        )
    for name, value in others.items():
        if name in ("launch", "optimizer_step"):
            if hasattr(value, "__len__"):
                raise ArgumentError(
                    f"{name} has values of stages; with vocabulary_parallel give one number, or "
                    f"change the costs with dataclasses.replace(costs, {name}=...)"
                )
        elif value is not None:
            raise ArgumentError(
                f"{name} chooses among splits of stages that are a chain; with vocabulary_parallel "
                f"give the layers of each device, and leave {name} out"
            )


def vocabulary_costs(
    shard: Shard,
    sizes: Sequence[int],
    costs_of: Callable[[Shard], Callable[[Sequence[int]], Costs]],
    gpu: GPU | None,
) -> Costs:
    """Return the costs of the stages for the layers of each of ``p`` devices.

    ``costs_of`` returns those of a chain, of which the first stage here is one slice of the
    embedding, and the last one slice of the head. Learned positions and dropout of the embedding
    are of the first layers, which sum the slices.
    """
    p, rows = len(sizes), -(-shard.model.vocabulary_size // len(sizes))
    model = replace(shard.model, vocabulary_size=rows)
    ends = replace(model, dropout=False, learned_positions=False)
    whole, slices = (costs_of(replace(shard, model=x))((0, *sizes, 0)) for x in (model, ends))
    values: dict[str, Any] = {}
    for name, row in ROWS.items():
        own, of_slice = getattr(whole, name), getattr(slices, name)
        if row.item == "stage" and isinstance(own, tuple):
            layers = np.array(own[1:-1])
            layers[0] += max(0.0, own[0] - of_slice[0])
            values[name] = (*[of_slice[0]] * p, *layers.tolist(), *[own[-1]] * p, 0.0)
    if whole.segments is not None:
        first, *others, last = whole.segments
        values["segments"] = (*[first] * p, *others, *[last] * p, first)
    nbytes = _STATISTICS * FP32_BYTES * shard.tokens
    values["output_bytes"] = (*values["output_bytes"][: 2 * p], *[nbytes] * p, 0.0)
    if gpu is not None:
        kernel = Kernel("loss", nbytes=_JOINS * p * nbytes, n_kernels=_JOINS)
        seconds = max(gpu.kernel_seconds(kernel), _JOINS * gpu.launch)
        for name in ("forward", "backward", "input_grad", "recompute"):
            values[name] = (*values[name][:-1], seconds)
    return replace(whole, **values)

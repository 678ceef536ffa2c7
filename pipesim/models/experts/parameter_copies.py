"""Bytes of experts, and shares of gradients that a GPU reduces, as fields of `pipesim.Costs`.

The c context-parallel groups of a device have copies of its parameters, and sum their gradients:
first within the device, after which each GPU has the sum of a c-th, and then over the replicas. A
ring over all GPUs takes as long: with n replicas ``2(c-1)/c + 2(n-1)/(nc) = 2(nc-1)/(nc)`` times
bytes over bandwidth.

Experts are spread over x GPUs, those of g = x/c replicas (with experts that t GPUs share). Their
gradients are summed over every g-th replica only ("expert data parallel" of Megatron-Core). If x
divides c, each device has all experts, and c/x copies of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipesim.models.stage_layers import per_stage

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


def dense_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of each stage on one GPU without those of experts."""
    copied = shard.copied_parameters if len(sizes) > 1 else 0.0
    return per_stage(
        shard.model, sizes, shard.layer_parameters, shard.embedding_parameters,
        shard.head_parameters + copied, experts=shard.expert_layer_parameters,
    )  # fmt: skip


def routed_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of the experts of each stage on one GPU."""
    return per_stage(shard.model, sizes, 0.0, experts=shard.routed_parameters)


def stage_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of each stage on one GPU."""
    dense, routed = dense_parameters(shard, sizes), routed_parameters(shard, sizes)
    return tuple(a + b for a, b in zip(dense, routed, strict=True))


def optimizer_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters that one GPU steps of each stage, if replicas do not share them.

    Those that it has, unless ``context_shards_optimizer`` divides copies among GPUs.
    """
    if shard.context_parallel == 1 or not shard.context_shards_optimizer:
        return stage_parameters(shard, sizes)
    dense, routed = dense_parameters(shard, sizes), routed_parameters(shard, sizes)
    c, copies = shard.context_parallel, max(1.0, shard.expert_copies)
    return tuple(a / c + b / copies for a, b in zip(dense, routed, strict=True))


def copied_bytes(shard: Shard, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `pipesim.Costs` about copies of parameters; none if there are none."""
    model, c, g = shard.model, shard.context_parallel, shard.expert_replicas
    fields: dict[str, Any] = {}
    routed = routed_parameters(shard, sizes)
    if g > 1:
        # With g > 1 a device has no two copies of an expert, so that all of its bytes are stepped.
        for name, nbytes in (
            ("parameter", model.bytes_per_parameter),
            ("gradient", model.bytes_per_gradient),
            ("optimizer", model.optimizer_bytes_per_parameter),
        ):
            fields[f"expert_{name}_bytes"] = tuple(n * nbytes for n in routed)
    if c > 1:
        dense, copies = dense_parameters(shard, sizes), shard.expert_copies
        if g > 1:
            fields["reduced_share"] = (1 / c,) * len(sizes)
        else:
            fields["reduced_share"] = tuple(
                (a / c + b / copies) / (a + b) if a + b else 1 / c
                for a, b in zip(dense, routed, strict=True)
            )
    return fields

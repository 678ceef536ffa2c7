"""Checks of the arguments of expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipesim.errors import ArgumentError, check_name
from pipesim.models.size_checks import check_divides, check_size, checked_value

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


ExpertExchange = Literal["direct", "hierarchical"]
EXCHANGE_WAYS = ("direct", "hierarchical")


def check_expert_parallel(shard: Shard) -> None:
    """Raise `ArgumentError` if expert parallelism does not suit the sizes that it splits."""
    model, x, t = shard.model, shard.expert_parallel, shard.tensor_parallel
    parts = check_size("expert_tensor_parallel", shard.expert_tensor_parallel, 0)
    object.__setattr__(shard, "expert_tensor_parallel", parts)
    check_name("expert_exchange", shard.expert_exchange, EXCHANGE_WAYS)
    nbytes = checked_value("dispatch_element_bytes", shard.dispatch_element_bytes, "bytes")
    object.__setattr__(shard, "dispatch_element_bytes", nbytes)
    if not model.n_experts:
        _check_unused(shard)
        return
    if x > model.n_experts:
        raise ArgumentError(
            f"expert_parallel={x} exceeds n_experts={model.n_experts}: each GPU has at least one "
            f"expert; give at most {model.n_experts}"
        )
    check_divides("expert_parallel", x, "n_experts", model.n_experts)
    if parts:
        check_divides("expert_tensor_parallel", parts, "tensor_parallel", t)
    check_divides(
        "expert_tensor_parallel" if parts else "tensor_parallel", parts or t, "expert_ffn_size",
        model.expert_ffn_size,
    )  # fmt: skip
    if model.shared_experts:
        size = model.shared_experts * model.expert_ffn_size
        check_divides("tensor_parallel", t, "shared_experts x expert_ffn_size", size)
    if parts not in (0, t) and not shard.sequence_parallel:
        raise ArgumentError(
            f"expert_tensor_parallel={parts} with tensor_parallel={t} needs "
            "sequence_parallel=True: otherwise several GPUs would send the same tokens to experts"
        )
    used, n_gpus = x * (parts or t), shard.n_gpus
    if used % n_gpus and n_gpus % used:
        raise ArgumentError(
            f"expert_parallel={x} and the {n_gpus} GPUs of a device (tensor_parallel x "
            "context_parallel) must be multiples of each other, so that groups of experts fill "
            "whole replicas; choose another expert_parallel"
        )
    shard.routing.shares(model.n_experts, model.experts_per_token)  # refuses other counts


def _check_unused(shard: Shard) -> None:
    """Raise `ArgumentError` for arguments of experts of a model that has none."""
    arguments = {
        "expert_parallel": (shard.expert_parallel, 1),
        "expert_tensor_parallel": (shard.expert_tensor_parallel, 0),
        "routing": (shard.routing.to_dict(), {"distribution": "uniform"}),
        "expert_exchange": (shard.expert_exchange, "direct"),
        "dispatch_element_bytes": (shard.dispatch_element_bytes, 0),
    }
    for name, (value, default) in arguments.items():
        if value != default:
            raise ArgumentError(
                f"{name}={value}, but the model has no experts; give n_experts, or leave {name} out"
            )

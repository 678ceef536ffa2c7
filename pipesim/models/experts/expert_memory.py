"""Bytes of a mixture of experts on one GPU, in the order of Megatron-LM with Transformer Engine.

Letters are those of `pipesim.models.kernels.expert_kernels`, with R the tokens that the busiest GPU
receives:

=============  ===========  ===================================================================
tensor         bytes        note
=============  ===========  ===================================================================
hidden         eTh          output of the norm, which router and shared experts keep
scores         8TE          logits and probabilities in 32 bits
sent           eTkh         copies of tokens before the dispatch, and results after the combine
received       eRh          tokens of the experts of this GPU, kept as input of their first map
inner          eRu          kept as input of the second map; gate and up have g times as many
shared inner   eTmu         likewise of the shared experts
=============  ===========  ===================================================================

The exchange, and the order by expert, have a buffer of their own for their output. Maps between
positions, and the probabilities of R tokens, are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.memory_tensors import (
    Operation,
    Tensors,
    branch_bytes,
    norm_operation,
    weight_grad_bytes,
)
from pipesim.models.shard_sizes import FP32_BYTES, routed_matrices, shared_matrices

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


class _ExpertTensors(NamedTuple):
    """Bytes of the tensors of the table above; ``up`` are gate and up."""

    scores: float
    sent: float
    received: float
    inner: float
    up: float


def _expert_tensors(shard: Shard) -> _ExpertTensors:
    """Return the bytes of the tensors of a mixture of experts."""
    model, e = shard.model, shard.model.bytes_per_activation
    inner = e * shard.routed_tokens * model.expert_ffn_size / shard.expert_tensor_size
    return _ExpertTensors(
        scores=2 * FP32_BYTES * shard.expert_tokens * model.n_experts,
        sent=e * shard.expert_tokens * model.experts_per_token * model.hidden_size,
        received=e * shard.routed_tokens * model.hidden_size,
        inner=inner,
        up=model.mlp_inputs * inner,
    )


def expert_operations(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the second half of a layer with experts."""
    y, branch = _expert_tensors(shard), branch_bytes(shard, x)
    weight = weight_grad_bytes(shard, routed_matrices(shard))
    # Without fusion, each expert's gradient is a tensor until it was added to the sum.
    grads = {name: nbytes * shard.local_experts for name, nbytes in weight.items()}
    output = x.hidden * (shard.model.shared_experts > 0)  # of the shared experts, until the sum
    moved = y.received if shard.expert_parallel * shard.expert_tensor_size > 1 else 0.0
    return (
        norm_operation(x),
        *_shared_operations(shard, x),
        Operation("router", x.hidden + y.scores, output + y.sent, y.sent + y.scores + 3 * x.hidden),
        Operation("dispatch", 0.0, output + y.sent + moved, y.sent + moved + 2 * x.hidden),
        Operation(
            "experts up",
            y.received,
            output + moved + y.up,
            y.up + y.received + 2 * x.hidden + grads["experts up"],
        ),
        Operation("experts activation", y.up, output + y.inner, y.inner + y.up + 2 * x.hidden),
        Operation(
            "experts down",
            y.inner,
            output + y.received,
            y.received + y.inner + 2 * x.hidden + grads["experts down"],
        ),
        Operation("combine", 0.0, output + y.received + y.sent, y.sent + y.received + 2 * x.hidden),
        Operation("sum", 0.0, output + y.sent + x.hidden, y.sent + branch + x.hidden),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _shared_operations(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the shared experts, whose input the router keeps."""
    maps = shared_matrices(shard)
    if not maps:
        return ()
    weight = weight_grad_bytes(shard, maps)
    up, down = maps.values()
    token = x.all_hidden / shard.model.hidden_size  # bytes of an element of all tokens of a group
    width, inner = token * up.outputs, token * down.inputs
    return (
        Operation(
            "shared up", 0.0, x.gathered + width, width + x.gathered + 3 * x.hidden
            + weight["shared up"],
        ),
        Operation("shared activation", width, inner, inner + width + 2 * x.hidden),
        Operation(
            "shared down", inner, x.all_hidden, x.all_hidden + inner + 2 * x.hidden
            + weight["shared down"],
        ),
    )  # fmt: skip

"""Bytes of the linear maps of latent attention, in the order of Megatron-LM.

Two maps make latent vectors of queries, and of keys and values. Norms keep their inputs and their
outputs, of which the maps to heads make queries, keys and values. The keys of all heads are copies
with the same rotary part, so that the output of the map is freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesim.models.memory_tensors import Operation, Tensors, weight_grad_bytes
from pipesim.models.shard_sizes import attention_matrices

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


def latent_operations(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations between the norm of a layer and the attention core."""
    model, t = shard.model, shard.tensor_parallel
    weight = weight_grad_bytes(shard, attention_matrices(shard))
    share = x.hidden / model.hidden_size  # bytes of an element of the tokens of this GPU
    latent = share * (model.query_rank + model.kv_rank)
    positions = share * model.rope_head_size
    whole = x.all_hidden / model.hidden_size
    raised = whole * (model.n_heads * model.head_size + model.value_size) / t
    heads = x.queries + x.keys + x.values
    down = weight.get("query down", 0.0) + weight["kv down"]
    up = weight.get("query up", weight.get("queries", 0.0)) + weight["kv up"]
    return (
        Operation(
            "latent maps", x.hidden, latent + positions, latent + positions + 3 * x.hidden + down
        ),
        Operation("latent norm", latent, latent + positions, 2 * latent + positions + x.hidden),
        Operation(
            "maps to heads",
            latent,
            x.queries + raised + positions,
            x.queries + raised + latent + positions + x.hidden + up,
        ),
        Operation("keys and values", 0.0, heads + raised, heads + raised + x.hidden),
    )

"""Sizes of a shard on which its kernels, its bytes and its collectives agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard
    from pipesim.models.transformer import Transformer


#: Bytes of a number in 32 bits: a logit of the loss (arXiv 2205.05198, section 4), a row's sum of
#: exponentials (arXiv 2307.08691, section 3.1).
FP32_BYTES = 4
#: Bytes of an element of a dropout mask (arXiv 2205.05198, section 4).
MASK_BYTES = 1


class Matrix(NamedTuple):
    """Elements a token that a linear map takes and gives, on one GPU.

    Attributes
    ----------
    inputs, outputs
        Columns and rows of its weight.
    """

    inputs: float
    outputs: float


def layer_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of a dense layer in order; ``"up"`` has the gate of a gated MLP."""
    model = shard.model
    f = model.ffn_size / shard.tensor_parallel
    mlp = {
        "up": Matrix(model.hidden_size, model.mlp_inputs * f),
        "down": Matrix(f, model.hidden_size),
    }
    return {**attention_matrices(shard), **mlp}


def attention_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of attention in order.

    With latent attention, each GPU has whole maps to latent vectors, and its heads of the others
    (`pipesim.models.experts.model_sizes`).
    """
    model, t = shard.model, shard.tensor_parallel
    h, q = model.hidden_size, model.query_size / t
    if not model.kv_rank:
        return {
            "qkv": Matrix(h, (model.query_size + 2 * model.kv_size) / t),
            "projection": Matrix(q, h),
        }
    rank, kv_rank = model.query_rank, model.kv_rank
    queries = {"queries": Matrix(h, q)}
    if rank:
        queries = {"query down": Matrix(h, rank), "query up": Matrix(rank, q)}
    keys = model.n_heads * model.head_size + model.value_size
    return {
        **queries,
        "kv down": Matrix(h, kv_rank + model.rope_head_size),
        "kv up": Matrix(kv_rank, keys / t),
        "projection": Matrix(model.value_size / t, h),
    }


def routed_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of one expert on one GPU."""
    model, parts = shard.model, shard.expert_tensor_size
    h, u = model.hidden_size, model.expert_ffn_size / parts
    return {"experts up": Matrix(h, model.mlp_inputs * u), "experts down": Matrix(u, h)}


def shared_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of all shared experts, which are one MLP; none without."""
    model, t = shard.model, shard.tensor_parallel
    h, u = model.hidden_size, model.shared_experts * model.expert_ffn_size / t
    if not u:
        return {}
    return {"shared up": Matrix(h, model.mlp_inputs * u), "shared down": Matrix(u, h)}


def fuses_weight_grads(model: Transformer) -> bool:
    """Return whether products of weight gradients add to main gradients of more bytes.

    That is ``gradient_accumulation_fusion`` of Megatron-LM. Otherwise a product writes a gradient
    of its own, and another kernel adds it to the sum.
    """
    return model.bytes_per_gradient > model.bytes_per_parameter

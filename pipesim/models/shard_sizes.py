"""Sizes of a shard on which its kernels, its bytes and its collectives agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard
    from pipesim.models.transformer import Transformer

__all__ = ["FP32_BYTES", "MASK_BYTES", "Matrix", "fuses_weight_grads", "layer_matrices"]

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
    """Return the linear maps of a layer in order; ``"up"`` has the gate of a gated MLP."""
    model, t = shard.model, shard.tensor_parallel
    h, f = model.hidden_size, model.ffn_size / t
    return {
        "qkv": Matrix(h, (model.query_size + 2 * model.kv_size) / t),
        "projection": Matrix(model.query_size / t, h),
        "up": Matrix(h, model.mlp_inputs * f),
        "down": Matrix(f, h),
    }


def fuses_weight_grads(model: Transformer) -> bool:
    """Return whether products of weight gradients add to main gradients of more bytes.

    That is ``gradient_accumulation_fusion`` of Megatron-LM. Otherwise a product writes a gradient
    of its own, and another kernel adds it to the sum.
    """
    return model.bytes_per_gradient > model.bytes_per_parameter

"""`Operation`, and the bytes of tensors on which the operations of a shard agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.shard_sizes import FP32_BYTES, MASK_BYTES, Matrix, fuses_weight_grads

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


class Operation(NamedTuple):
    """Bytes of an operation of one micro-batch on one GPU.

    Attributes
    ----------
    name
        Such as ``"qkv"``.
    kept
        Bytes of tensors that it keeps from its forward to its backward.
    forward, backward
        Bytes of further tensors that exist while it runs, besides those that it and the operations
        before it keep: outputs, gradients, gathered tensors. The gradient of the residual stream,
        which bypasses attention and MLP, is among them.
    """

    name: str
    kept: float
    forward: float
    backward: float


class Tensors(NamedTuple):
    """Bytes of the tensors of a shard; see the table of `pipesim.models.stage_memory`.

    ``mask`` is that of a dropout.
    """

    hidden: float
    all_hidden: float
    gathered: float
    queries: float
    keys: float
    values: float
    output: float
    scores: float
    rows: float
    inner: float
    logits: float
    softmax: float
    mask: float


def shard_tensors(shard: Shard) -> Tensors:
    """Return the bytes of the tensors of a shard."""
    model, t = shard.model, shard.tensor_parallel
    tokens, e = shard.tokens, model.bytes_per_activation
    share = t if shard.sequence_parallel else 1
    all_hidden = e * tokens * model.hidden_size
    return Tensors(
        hidden=all_hidden / share,
        all_hidden=all_hidden,
        gathered=all_hidden * (share > 1),
        queries=e * tokens * model.query_size / t,
        keys=e * tokens * model.kv_size / t,
        values=e * tokens * model.value_size / t,
        output=e * tokens * model.core_output_size / t,
        scores=e * tokens * model.sequence_length * shard.attended_columns * model.n_heads / t,
        rows=FP32_BYTES * tokens * model.n_heads / t,
        inner=e * tokens * model.ffn_size / t,
        logits=e * tokens * model.vocabulary_size / t,
        softmax=FP32_BYTES * tokens * model.vocabulary_size / t,
        mask=MASK_BYTES * tokens * model.hidden_size * model.dropout / share,
    )


def weight_grad_bytes(shard: Shard, matrices: Mapping[str, Matrix]) -> dict[str, float]:
    """Return the bytes of each weight's gradient until it was added to the sum; 0 if fused."""
    size = 0 if fuses_weight_grads(shard.model) else shard.model.bytes_per_gradient
    return {name: size * elements(matrix) for name, matrix in matrices.items()}


def elements(matrix: Matrix) -> float:
    """Return the number of elements of a matrix."""
    return matrix.inputs * matrix.outputs


def norm_operation(x: Tensors) -> Operation:
    """Return a norm of a layer."""
    return Operation("norm", x.hidden, x.hidden, 3 * x.hidden)


def branch_bytes(shard: Shard, x: Tensors) -> float:
    """Return the bytes of the gradients of branch and residual: two tensors after a dropout."""
    return x.hidden * (1 + shard.model.dropout)

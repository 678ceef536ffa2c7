"""Bytes of one GPU of a stage: tensors that each operation keeps for its backward, and workspace.

Sizes and order of operations are those of Megatron-LM with Transformer Engine. Letters are those of
`pipesim.models.transformer`, with T = bs tokens and e bytes an element. Tensors of T tokens:

==========  ============  ==================================================================
tensor      bytes         note
==========  ============  ==================================================================
hidden      eTh or eTh/t  residual stream; divided by t with sequence parallelism
gathered    eTh or 0      hidden of all GPUs, if sequence parallelism divides it
queries     eTq/t         the attention core's output has as many
keys        eTk/t         values have as many
scores      eTsa/t        kept and written only if attention is not fused
rows        4Ta/t         sums of exponentials that FlashAttention keeps (arXiv 2307.08691)
inner       eTf/t         input of down; gate and up have g times as many
logits      eTv/t         and 4Tv/t for their softmax in 32 bits
==========  ============  ==================================================================

Weight gradients: if gradients have more bytes than parameters, products add to the 32-bit main
gradients, and the framework passes an unused gradient of the parameter's type on to autograd.
Transformer Engine keeps one such tensor for each shape of a layer's matrices (its function
``get_dummy_wgrad``); Megatron-LM makes that of the LM head anew (its function
``linear_with_grad_accumulation_and_async_allreduce``). Otherwise each gradient is a tensor of its
own until it was added to the sum.

Not counted: parameters of norms, statistics of norms, token ids, workspaces of cuBLAS and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.shard_sizes import (
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    fuses_weight_grads,
    layer_matrices,
)

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard

__all__ = [
    "Operation",
    "embedding_operations",
    "head_operations",
    "kept_bytes",
    "layer_operations",
    "stage_workspaces",
]


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


class _Tensors(NamedTuple):
    """Bytes of the tensors of a shard; see the table above. ``mask`` is that of a dropout."""

    hidden: float
    all_hidden: float
    gathered: float
    queries: float
    keys: float
    scores: float
    rows: float
    inner: float
    logits: float
    softmax: float
    mask: float


def _tensors(shard: Shard) -> _Tensors:
    """Return the bytes of the tensors of a shard."""
    model, t = shard.model, shard.tensor_parallel
    tokens, e = shard.microbatch_size * model.sequence_length, model.bytes_per_activation
    share = t if shard.sequence_parallel else 1
    all_hidden = e * tokens * model.hidden_size
    return _Tensors(
        hidden=all_hidden / share,
        all_hidden=all_hidden,
        gathered=all_hidden * (share > 1),
        queries=e * tokens * model.query_size / t,
        keys=e * tokens * model.kv_size / t,
        scores=e * tokens * model.sequence_length * model.n_heads / t,
        rows=FP32_BYTES * tokens * model.n_heads / t,
        inner=e * tokens * model.ffn_size / t,
        logits=e * tokens * model.vocabulary_size / t,
        softmax=FP32_BYTES * tokens * model.vocabulary_size / t,
        mask=MASK_BYTES * tokens * model.hidden_size * model.dropout / share,
    )


@lru_cache(maxsize=256)
def layer_operations(shard: Shard) -> tuple[Operation, ...]:
    """Return the operations of a layer, in order; one that keeps its input, with full recompute."""
    x = _tensors(shard)
    operations = (*_attention(shard, x), *_mlp(shard, x))
    if shard.recompute != "full":
        return operations
    kept = kept_bytes(operations) - x.hidden
    again = kept + max(_most(operations, "forward"), _most(operations, "backward"))
    once = max(operation.kept + operation.forward for operation in operations)
    return (Operation("layer", x.hidden, once, again),)


def _attention(shard: Shard, x: _Tensors) -> tuple[Operation, ...]:
    """Return the operations of the first half of a layer, up to its sum with the residual."""
    weight, branch = _weight_grad_bytes(shard), _branch_bytes(shard, x)
    reduced = x.hidden * (x.gathered > 0)  # what a GPU keeps of a sum over the group
    return (
        _norm(x),
        Operation(
            "qkv",
            x.hidden,
            x.gathered + x.queries + 2 * x.keys,
            x.queries + 2 * x.keys + x.all_hidden + x.gathered + reduced + x.hidden + weight["qkv"],
        ),
        _core(shard, x),
        Operation(
            "projection",
            x.queries,
            x.all_hidden + reduced,
            branch + x.gathered + x.queries + weight["projection"],
        ),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _mlp(shard: Shard, x: _Tensors) -> tuple[Operation, ...]:
    """Return the operations of the second half of a layer."""
    weight, branch = _weight_grad_bytes(shard), _branch_bytes(shard, x)
    reduced = x.hidden * (x.gathered > 0)
    up = shard.model.mlp_inputs * x.inner
    return (
        _norm(x),
        Operation(
            "up",
            x.hidden,
            x.gathered + up,
            up + x.all_hidden + x.gathered + reduced + x.hidden + weight["up"],
        ),
        Operation("activation", up, x.inner, x.inner + up + x.hidden),
        Operation(
            "down",
            x.inner,
            x.all_hidden + reduced,
            branch + x.gathered + x.inner + weight["down"],
        ),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _norm(x: _Tensors) -> Operation:
    """Return a norm of a layer."""
    return Operation("norm", x.hidden, x.hidden, 3 * x.hidden)


def _branch_bytes(shard: Shard, x: _Tensors) -> float:
    """Return the bytes of the gradients of branch and residual: two tensors after a dropout."""
    return x.hidden * (1 + shard.model.dropout)


def _core(shard: Shard, x: _Tensors) -> Operation:
    """Return the attention core.

    Backward: gradients of its output, of queries, keys and values, and of the residual stream.
    Fused: the gradient of queries is summed in 32 bits, and each row has one more number
    (FlashAttention-2, arXiv 2307.08691, algorithm 2). Else: gradients of softmax and of scores.
    """
    model = shard.model
    kept, gradients = x.queries + 2 * x.keys, 2 * x.queries + 2 * x.keys + x.hidden
    if shard.flash_attention:
        core, once = x.rows, x.queries
        sums = FP32_BYTES * shard.microbatch_size * model.sequence_length * model.query_size
        gradients += sums / shard.tensor_parallel + x.rows
    else:
        masks = x.rows / FP32_BYTES * model.sequence_length * MASK_BYTES
        core = x.scores + (masks + x.scores) * model.dropout
        once = x.queries + x.scores * (not model.dropout)  # scores, until softmax is computed
        gradients += 2 * x.scores
    if shard.recompute == "selective":
        return Operation("core", kept, core + once, core + gradients)
    return Operation("core", kept + core, once, gradients)


@lru_cache(maxsize=256)
def embedding_operations(shard: Shard) -> tuple[Operation, ...]:
    """Return the embedding, which keeps the mask of its dropout and makes a whole gradient."""
    x, model = _tensors(shard), shard.model
    rows = model.vocabulary_size / shard.tensor_parallel
    gradient = model.bytes_per_parameter * rows * model.hidden_size
    return (
        Operation(
            "embedding", x.mask, x.all_hidden + x.hidden, x.hidden + x.gathered + gradient
        ),
    )  # fmt: skip


@lru_cache(maxsize=256)
def head_operations(shard: Shard) -> tuple[Operation, ...]:
    """Return final norm, LM head and loss.

    The loss is Megatron-LM's cross-entropy: a copy of the logits in 32 bits becomes their softmax,
    which is kept, and then their gradient, of which the LM head gets a copy in 16 bits. A fused
    loss keeps the logits, which it turned into their gradient.
    """
    x, model = _tensors(shard), shard.model
    columns = model.vocabulary_size / shard.tensor_parallel
    weight = model.bytes_per_parameter * columns * model.hidden_size
    reduced = x.hidden * (x.gathered > 0)
    loss = Operation("loss", x.softmax, x.logits, x.logits)
    if shard.fused_loss:
        loss = Operation("loss", x.logits, 0.0, 0.0)
    return (
        Operation("norm", x.hidden, x.hidden, 2 * x.hidden),
        Operation(
            "logits",
            x.hidden,
            x.gathered + x.logits,
            x.logits + x.all_hidden + x.gathered + reduced + weight,
        ),
        loss,
    )


def kept_bytes(operations: Iterable[Operation]) -> float:
    """Return the bytes that operations keep from their forward to their backward."""
    return sum(operation.kept for operation in operations)


def stage_workspaces(shard: Shard, sizes: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Return the fields of `pipesim.Costs` with the workspace of each stage.

    That is the most bytes that a stage holds beyond its activations, at any of its operations. An
    operation's forward has not yet got what later ones keep. Its backward has it no longer.
    """
    end, workspaces = len(sizes) - 1, _workspaces(shard)
    rows = [workspaces(n, stage == 0, stage == end) for stage, n in enumerate(sizes)]
    forward, backward = zip(*rows, strict=True)
    return {"forward_workspace_bytes": forward, "backward_workspace_bytes": backward}


@lru_cache(maxsize=256)
def _workspaces(shard: Shard) -> Callable[[int, bool, bool], tuple[float, float]]:
    """Return the workspace of F and of B of a stage as a function that keeps its results."""
    layer = layer_operations(shard)
    ends = (embedding_operations(shard), head_operations(shard))
    buffers, kept = _weight_grad_buffers(shard), kept_bytes(layer)

    @cache
    def workspaces(n_layers: int, is_first: bool, is_last: bool) -> tuple[float, float]:
        """Return the workspace of F and of B of a stage."""
        others = Operation("other layers", max(0, n_layers - 1) * kept, 0.0, 0.0)
        operations = (
            *(ends[0] if is_first else ()),
            *((others, *layer) if n_layers else ()),
            *(ends[1] if is_last else ()),
        )
        backward = _most(operations, "backward") + (buffers if n_layers else 0.0)
        return _most(operations, "forward"), backward

    return workspaces


def _most(operations: Sequence[Operation], direction: str) -> float:
    """Return the most bytes at any operation, beyond what all of them keep."""
    most = later = 0.0
    for operation in reversed(operations):
        most = max(most, getattr(operation, direction) - later)
        later += operation.kept
    return most


def _weight_grad_bytes(shard: Shard) -> dict[str, float]:
    """Return the bytes of each weight's gradient until it was added to the sum; 0 if fused."""
    size = 0 if fuses_weight_grads(shard.model) else shard.model.bytes_per_gradient
    return {name: size * _elements(matrix) for name, matrix in layer_matrices(shard).items()}


def _weight_grad_buffers(shard: Shard) -> float:
    """Return the bytes of the unused gradients, one for each shape of a layer's matrices."""
    if not fuses_weight_grads(shard.model):
        return 0.0
    elements = sum(_elements(matrix) for matrix in set(layer_matrices(shard).values()))
    return shard.model.bytes_per_parameter * elements


def _elements(matrix: Matrix) -> float:
    """Return the number of elements of a matrix."""
    return matrix.inputs * matrix.outputs

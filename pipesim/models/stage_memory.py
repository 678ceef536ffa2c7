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
from typing import TYPE_CHECKING

from pipesim.models.context.context_memory import context_bytes
from pipesim.models.experts.expert_memory import expert_operations
from pipesim.models.experts.latent_memory import latent_operations
from pipesim.models.memory_tensors import (
    Operation,
    Tensors,
    branch_bytes,
    elements,
    norm_operation,
    shard_tensors,
    weight_grad_bytes,
)
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    attention_matrices,
    fuses_weight_grads,
    layer_matrices,
    routed_matrices,
    shared_matrices,
)
from pipesim.models.stage_layers import StageKey, stage_keys

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


@lru_cache(maxsize=256)
def layer_operations(shard: Shard, *, experts: bool = False) -> tuple[Operation, ...]:
    """Return the operations of a layer, in order; one that keeps its input, with full recompute."""
    x = shard_tensors(shard)
    second = expert_operations(shard, x) if experts else _mlp(shard, x)
    operations = (*_attention(shard, x), *second)
    if shard.recompute != "full":
        return operations
    kept = kept_bytes(operations) - x.hidden
    again = kept + max(_most(operations, "forward"), _most(operations, "backward"))
    once = max(operation.kept + operation.forward for operation in operations)
    return (Operation("layer", x.hidden, once, again),)


def _attention(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the first half of a layer, up to its sum with the residual."""
    weight = weight_grad_bytes(shard, attention_matrices(shard))
    branch = branch_bytes(shard, x)
    reduced = x.hidden * (x.gathered > 0)  # what a GPU keeps of a sum over the group
    if shard.model.kv_rank:
        inputs = latent_operations(shard, x)
    else:
        outputs = x.queries + (x.keys + x.values)
        inputs = (
            Operation(
                "qkv",
                x.hidden,
                x.gathered + outputs,
                outputs + x.all_hidden + x.gathered + reduced + x.hidden + weight["qkv"],
            ),
        )
    return (
        norm_operation(x),
        *inputs,
        _core(shard, x),
        Operation(
            "projection",
            x.output,
            x.all_hidden + reduced,
            branch + x.gathered + x.output + weight["projection"],
        ),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _mlp(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the second half of a layer."""
    weight, branch = weight_grad_bytes(shard, layer_matrices(shard)), branch_bytes(shard, x)
    reduced = x.hidden * (x.gathered > 0)
    up = shard.model.mlp_inputs * x.inner
    return (
        norm_operation(x),
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


def _core(shard: Shard, x: Tensors) -> Operation:
    """Return the attention core, with the buffers of its exchange between GPUs.

    Backward: gradients of its output, of queries, keys and values, and of the residual stream.
    Fused: the gradient of queries is summed in 32 bits, and each row has one more number
    (FlashAttention-2, arXiv 2307.08691, algorithm 2). Else: gradients of softmax and of scores.
    """
    model, pair = shard.model, x.keys + x.values
    kept, gradients = x.queries + pair, x.queries + x.output + pair + x.hidden
    if shard.flash_attention:
        core, once = x.rows, x.output
        sums = FP32_BYTES * shard.tokens * model.query_size
        gradients += sums / shard.tensor_parallel + x.rows
    else:
        columns = model.sequence_length * shard.attended_columns
        masks = x.rows / FP32_BYTES * columns * MASK_BYTES
        core = x.scores + (masks + x.scores) * model.dropout
        once = x.output + x.scores * (not model.dropout)  # scores, until softmax is computed
        gradients += 2 * x.scores
    exchange = context_bytes(shard, x)
    core, once = core + exchange.kept, once + exchange.forward
    gradients += exchange.backward
    if shard.recompute == "selective":
        return Operation("core", kept, core + once, core + gradients)
    return Operation("core", kept + core, once, gradients)


@lru_cache(maxsize=256)
def embedding_operations(shard: Shard) -> tuple[Operation, ...]:
    """Return the embedding, which keeps the mask of its dropout and makes a whole gradient."""
    x, model = shard_tensors(shard), shard.model
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
    x, model = shard_tensors(shard), shard.model
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
    workspaces = _workspaces(shard)
    forward, backward = zip(*map(workspaces, stage_keys(shard.model, sizes)), strict=True)
    return {"forward_workspace_bytes": forward, "backward_workspace_bytes": backward}


@lru_cache(maxsize=256)
def _workspaces(shard: Shard) -> Callable[[StageKey], tuple[float, float]]:
    """Return the workspace of F and of B of a stage as a function that keeps its results."""
    ends = (embedding_operations(shard), head_operations(shard))

    @cache
    def workspaces(key: StageKey) -> tuple[float, float]:
        """Return the workspace of F and of B of a stage."""
        operations = (
            *(ends[0] if key.is_first else ()),
            *_layers(shard, key.n_dense, experts=False),
            *_layers(shard, key.n_experts, experts=True),
            *(ends[1] if key.is_last else ()),
        )
        backward = _most(operations, "backward") + _weight_grad_buffers(shard, key)
        return _most(operations, "forward"), backward

    return workspaces


def _layers(shard: Shard, n: int, *, experts: bool) -> tuple[Operation, ...]:
    """Return the operations of the last of n layers, after one that stands for the others."""
    if not n:
        return ()
    layer = layer_operations(shard, experts=experts)
    return (Operation("other layers", max(0, n - 1) * kept_bytes(layer), 0.0, 0.0), *layer)


def _most(operations: Sequence[Operation], direction: str) -> float:
    """Return the most bytes at any operation, beyond what all of them keep."""
    most = later = 0.0
    for operation in reversed(operations):
        most = max(most, getattr(operation, direction) - later)
        later += operation.kept
    return most


def _weight_grad_buffers(shard: Shard, key: StageKey) -> float:
    """Return the bytes of the unused gradients, one for each shape of a stage's matrices."""
    if not fuses_weight_grads(shard.model):
        return 0.0
    maps: dict[str, Matrix] = layer_matrices(shard) if key.n_dense else {}
    if key.n_experts:
        experts = {**routed_matrices(shard), **shared_matrices(shard)}
        maps = {**maps, **attention_matrices(shard), **experts}
    return shard.model.bytes_per_parameter * sum(elements(matrix) for matrix in set(maps.values()))

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.precision import FORMATS
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    StageKey,
    attention_matrices,
    fuses_weight_grads,
    layer_matrices,
    linear_elements,
    recomputes,
    routed_matrices,
    shared_matrices,
    stage_keys,
)

if TYPE_CHECKING:
    from pipesim.models.shard import Shard


class Operation(NamedTuple):
    """Bytes of an operation of one micro-batch on one GPU.

    ``kept`` are those of tensors that it keeps from its forward to its backward. ``forward`` and
    ``backward`` are those of further tensors that exist while it runs, besides those that it and
    the operations before it keep: outputs, gradients, gathered tensors. The gradient of the
    residual stream, which bypasses attention and MLP, is among them.
    """

    name: str
    kept: float
    forward: float
    backward: float


class Tensors(NamedTuple):
    """Bytes of the tensors of a shard; see the table of `pipesim.models.stage_memory`.

    ``mask`` is that of a dropout. ``operand`` is no tensor, but the bytes of an element that
    products keep for W over those of an activation.
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
    operand: float


def shard_tensors(shard: Shard) -> Tensors:
    """Return the `Tensors` of a shard."""
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
        logits=e * shard.logit_tokens * model.vocabulary_size / t,
        softmax=FP32_BYTES * tokens * model.vocabulary_size / t * (not shard.last_logits),
        mask=MASK_BYTES * tokens * model.hidden_size * model.dropout / share,
        operand=shard.operand_bytes / e if e else 1.0,
    )


def weight_grad_bytes(shard: Shard, matrices: Mapping[str, Matrix]) -> dict[str, float]:
    """Return the bytes of each weight's gradient until it was added to the sum; 0 if fused."""
    size = 0 if fuses_weight_grads(shard) else shard.model.bytes_per_gradient
    return {name: size * elements(matrix) for name, matrix in matrices.items()}


def elements(matrix: Matrix) -> float:
    """Return the number of elements of a matrix."""
    return matrix.inputs * matrix.outputs


def norm_operation(shard: Shard, x: Tensors) -> Operation:
    """Return a norm of a layer.

    One of single operations of torch keeps its input in its own format, and the normalized input,
    of which the product with the weight needs the gradient.
    """
    kept, e = x.hidden, shard.model.bytes_per_activation
    if not shard.framework.fused_norm and e:
        kept = x.hidden * (1 + shard.framework.norm_bytes / e)
    return Operation("norm", kept, x.hidden, 3 * x.hidden)


def _unfused(shard: Shard, inner: float) -> float:
    """Return the bytes that a gated activation of two operations keeps besides: their product's."""
    return inner * (shard.model.gated_mlp and not shard.framework.fused_activation)


def _again(name: str, operations: Sequence[Operation], kept: float) -> Operation:
    """Return operations that the backward computes again from the bytes that they keep."""
    others = kept_bytes(operations) - kept
    again = others + max(_most(operations, "forward"), _most(operations, "backward"))
    once = max(operation.kept + operation.forward for operation in operations)
    return Operation(name, kept, once, again)


def _dropped(operation: Operation, nbytes: float, *, drops: bool) -> Operation:
    """Return an operation that computes some of what it keeps again, if it drops them."""
    if not drops:
        return operation
    return operation._replace(kept=operation.kept - nbytes, backward=operation.backward + nbytes)


def branch_bytes(shard: Shard, x: Tensors) -> float:
    """Return the bytes of the gradients of branch and residual: two tensors after a dropout."""
    return x.hidden * (1 + shard.model.dropout)


@lru_cache(maxsize=256)
def layer_operations(shard: Shard, *, experts: bool = False) -> tuple[Operation, ...]:
    """Return the operations of a layer, in order; one that keeps its input, with full recompute."""
    x = shard_tensors(shard)
    second = expert_operations(shard, x) if experts else _mlp(shard, x)
    operations = (*_attention(shard, x), *second)
    if recomputes(shard, "second_products"):  # of input, core, q, v, gate, and down
        core = x.output + x.rows * shard.flash_attention
        kept = 2 * x.hidden + core + x.queries + x.values + x.inner
        return (_again("layer", operations, kept),)
    return (_again("layer", operations, x.hidden),) if shard.recompute == "full" else operations


def _attention(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
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
                x.operand * x.hidden,
                x.gathered + outputs,
                outputs + x.all_hidden + x.gathered + reduced + x.hidden + weight["qkv"],
            ),
        )
    first, *others = inputs
    return (
        norm_operation(shard, x),
        _dropped(first, first.kept, drops=recomputes(shard, "layernorm")),
        *others,
        _core(shard, x),
        Operation(
            "projection",
            x.operand * x.output,
            x.all_hidden + reduced,
            branch + x.gathered + x.output + weight["projection"],
        ),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _mlp(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    weight, branch = weight_grad_bytes(shard, layer_matrices(shard)), branch_bytes(shard, x)
    reduced = x.hidden * (x.gathered > 0)
    up = shard.model.mlp_inputs * x.inner
    operations: tuple[Operation, ...] = (
        Operation(
            "up",
            x.operand * x.hidden,
            x.gathered + up,
            up + x.all_hidden + x.gathered + reduced + x.hidden + weight["up"],
        ),
        Operation("activation", up + _unfused(shard, x.inner), x.inner, x.inner + up + x.hidden),
        Operation(
            "down",
            x.operand * x.inner,
            x.all_hidden + reduced,
            branch + x.gathered + x.inner + weight["down"],
        ),
    )
    if recomputes(shard, "mlp"):
        operations = (_again("mlp", operations, x.hidden),)
    first, *others = operations
    return (
        norm_operation(shard, x),
        _dropped(first, first.kept, drops=recomputes(shard, "layernorm")),
        *others,
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
        own = x.output * (x.operand < 1)  # the projection keeps it otherwise
        core, once = x.rows + own, x.output - own
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
    operation = Operation("core", kept + core, once, gradients)
    if recomputes(shard, "core_attn"):
        operation = Operation("core", kept, core + once, core + gradients)
    return _dropped(operation, kept, drops=recomputes(shard, "mla_up_proj"))


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
    """Return final norm, LM head and one loss.

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


@lru_cache(maxsize=256)
def mtp_operations(shard: Shard) -> tuple[Operation, ...]:
    """Return what comes before the layer of one of ``mtp_layers``: embedding, two norms, map."""
    x, model = shard_tensors(shard), shard.model
    columns = model.vocabulary_size / shard.tensor_parallel
    weight = model.bytes_per_parameter * columns * model.hidden_size
    gradient = model.bytes_per_parameter * elements(
        Matrix(2 * model.hidden_size, model.hidden_size / shard.tensor_parallel)
    )
    return (
        Operation("embedding", x.mask, x.all_hidden + x.hidden, x.hidden + x.gathered + weight),
        Operation("norms", 2 * x.hidden, 2 * x.hidden, 6 * x.hidden),
        Operation(
            "map",
            2 * x.hidden,
            2 * x.gathered + x.all_hidden,
            2 * (x.all_hidden + x.gathered) + x.hidden + gradient,
        ),
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
    forward, backward = zip(*map(workspaces, stage_keys(shard, sizes)), strict=True)
    return {"forward_workspace_bytes": forward, "backward_workspace_bytes": backward}


@lru_cache(maxsize=256)
def _workspaces(shard: Shard) -> Callable[[StageKey], tuple[float, float]]:
    """Return the workspace of F and of B of a stage as a function that keeps its results."""
    embedding, head = embedding_operations(shard), head_operations(shard)
    mtp = mtp_operations(shard) if shard.model.mtp_layers else ()
    dense, experts = linear_elements(shard)
    copies = 2 * shard.operand_bytes if shard.precision in FORMATS else 0.0

    @cache
    def workspaces(key: StageKey) -> tuple[float, float]:
        operations = (
            *(embedding if key.is_first else ()),
            *_layers(shard, key.n_dense, experts=False),
            *_layers(shard, key.n_experts, experts=True),
            *(key.mtp * mtp),
            *(key.losses * head),
        )
        backward = _most(operations, "backward") + _weight_grad_buffers(shard, key)
        held = copies * key.total(dense, experts=experts)
        return _most(operations, "forward") + held, backward + held

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
    if not fuses_weight_grads(shard):
        return 0.0
    maps: dict[str, Matrix] = layer_matrices(shard) if key.n_dense else {}
    if key.n_experts:
        experts = {**routed_matrices(shard), **shared_matrices(shard)}
        maps = {**maps, **attention_matrices(shard), **experts}
    return shard.model.bytes_per_parameter * sum(elements(matrix) for matrix in set(maps.values()))


# Bytes that the exchange of keys and values adds to the attention core.
#
# ==============  =============================================================================
# exchange        bytes
# ==============  =============================================================================
# ``ring``        buffers of two parts of keys and values, of which one arrives while the other
#                 is used; backward also of their gradients
# ``all_gather``  keys and values of the whole sequence; backward also their gradients
# ``all_to_all``  inputs of the exchange beside its outputs; and the core's own output, which is
#                 kept beside the one that the projection gets (Transformer Engine from 2.8 on)
# ==============  =============================================================================


def context_bytes(shard: Shard, x: Tensors) -> Operation:
    """Return the bytes that the exchange keeps, and those during F and B; 0 for one GPU."""
    c, pair = shard.context_parallel, x.keys + x.values
    if c == 1:
        return Operation("exchange", 0.0, 0.0, 0.0)
    if shard.context_exchange == "ring":
        return Operation("exchange", 0.0, 2 * pair, 4 * pair)
    if shard.context_exchange == "all_gather":
        return Operation("exchange", 0.0, c * pair, 2 * c * pair)
    sent = x.queries + pair
    return Operation("exchange", x.output, sent, sent)


# Bytes of a mixture of experts on one GPU, in the order of Megatron-LM with Transformer Engine.
#
# Letters are those of `pipesim.models.layer_kernels`, with R the tokens that the busiest GPU
# receives:
#
# =============  ===========  ===================================================================
# tensor         bytes        note
# =============  ===========  ===================================================================
# hidden         eTh          output of the norm, which router and shared experts keep
# scores         8TE          logits and probabilities in 32 bits
# sent           eTkh         copies of tokens before the dispatch, and results after the combine
# received       eRh          tokens of the experts of this GPU, kept as input of their first map
# inner          eRu          kept as input of the second map; gate and up have g times as many
# shared inner   eTmu         likewise of the shared experts
# =============  ===========  ===================================================================
#
# The exchange, and the order by expert, have a buffer of their own for their output. Maps between
# positions, and the probabilities of R tokens, are not counted.


def expert_operations(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the second half of a layer with experts."""
    model, e, branch = shard.model, shard.model.bytes_per_activation, branch_bytes(shard, x)
    scores = 2 * FP32_BYTES * shard.expert_tokens * model.n_experts
    sent = e * shard.expert_tokens * model.experts_per_token * model.hidden_size
    received = e * shard.routed_tokens * model.hidden_size
    inner = e * shard.routed_tokens * model.expert_ffn_size / shard.expert_tensor_size
    up = model.mlp_inputs * inner
    weight = weight_grad_bytes(shard, routed_matrices(shard))
    # Without fusion, each expert's gradient is a tensor until it was added to the sum.
    grads = {name: nbytes * shard.local_experts for name, nbytes in weight.items()}
    output = x.hidden * (model.shared_experts > 0)  # of the shared experts, until the sum
    moved = received if shard.expert_parallel * shard.expert_tensor_size > 1 else 0.0
    return (
        norm_operation(shard, x),
        *_shared_operations(shard, x),
        _dropped(
            Operation("router", x.hidden + scores, output + sent, sent + scores + 3 * x.hidden),
            x.hidden,
            drops=recomputes(shard, "layernorm"),
        ),
        Operation("dispatch", 0.0, output + sent + moved, sent + moved + 2 * x.hidden),
        Operation(
            "experts up",
            x.operand * received,
            output + moved + up,
            up + received + 2 * x.hidden + grads["experts up"],
        ),
        Operation("experts activation", up, output + inner, inner + up + 2 * x.hidden),
        _dropped(
            Operation(
                "experts down",
                x.operand * inner,
                output + received,
                received + inner + 2 * x.hidden + grads["experts down"],
            ),
            x.operand * inner,
            drops=recomputes(shard, "moe_act"),
        ),
        Operation("combine", 0.0, output + received + sent, sent + received + 2 * x.hidden),
        Operation("sum", 0.0, output + sent + x.hidden, sent + branch + x.hidden),
        Operation("residual", x.mask, x.hidden, branch),
    )


def _shared_operations(shard: Shard, x: Tensors) -> tuple[Operation, ...]:
    """Return the operations of the shared experts, whose input the router keeps, in 16 bits."""
    maps = shared_matrices(shard)
    if not maps:
        return ()
    weight = weight_grad_bytes(shard, maps)
    up, down = maps.values()
    token = x.all_hidden / shard.model.hidden_size  # bytes of an element of all tokens of a group
    width, inner = token * up.outputs, token * down.inputs
    operations = (
        Operation(
            "shared up", x.operand * x.hidden * (x.operand < 1), x.gathered + width,
            width + x.gathered + 3 * x.hidden + weight["shared up"],
        ),
        Operation(
            "shared activation", width + _unfused(shard, inner), inner,
            inner + width + 2 * x.hidden,
        ),
        Operation(
            "shared down", x.operand * inner, x.all_hidden, x.all_hidden + inner + 2 * x.hidden
            + weight["shared down"],
        ),
    )  # fmt: skip
    if recomputes(shard, "shared_experts"):
        return (_again("shared experts", operations, 0.0),)
    return operations


# Bytes of the linear maps of latent attention, in the order of Megatron-LM.
#
# Two maps make latent vectors of queries, and of keys and values. Norms keep their inputs and
# their outputs, of which the maps to heads make queries, keys and values. The keys of all heads
# are copies with the same rotary part, so that the output of the map is freed.


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
            "latent maps",
            x.operand * x.hidden,
            latent + positions,
            latent + positions + 3 * x.hidden + down,
        ),
        Operation("latent norm", latent, latent + positions, 2 * latent + positions + x.hidden),
        Operation(
            "maps to heads",
            x.operand * latent,
            x.queries + raised + positions,
            x.queries + raised + latent + positions + x.hidden + up,
        ),
        Operation("keys and values", 0.0, heads + raised, heads + raised + x.hidden),
    )

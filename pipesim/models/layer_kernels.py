"""Kernels of a transformer on one GPU: those of a layer, of the embedding, and of head and loss.

Each tensor is read or written once by a kernel. Frameworks fuse what is adjacent and element-wise:
bias, dropout and residual sum; bias and activation; scale, mask and softmax (Korthikanti et al.,
arXiv 2205.05198, section 5; Megatron-LM). Letters are those of `pipesim.models.transformer`, with
T = bs tokens, d = q/a elements a head, and e bytes an element.

Matrix products, forward, as (rows, columns, depth); each has a product for the gradient of its
input, (rows, depth, columns), and one for that of its weight, (depth, columns, rows):

==========  ================  ==========================================
name        shape             note
==========  ================  ==========================================
qkv         T, (q+2k)/t, h
projection  T, h, q/t
up          T, gf/t, h        with the gate of a gated MLP
down        T, h, f/t
logits      T, v/t, h
==========  ================  ==========================================

Gradients of weights are summed over micro-batches. Where gradients have more bytes than parameters,
the product adds to them (``gradient_accumulation_fusion`` of Megatron-LM), unless the framework has
no such product; otherwise autograd has a kernel for each parameter that adds. Parameters of norms
and biases always have such a kernel.

Operations that a framework does not fuse are kernels of torch, each of which reads and writes whole
tensors. Counted in Aleph-Alpha/scaling (``core/nn/rotary.py``, ``mlp.py``, ``norm/rms_norm.py``),
in reads and writes of a tensor of activations:

==============  ===============  ================  ===========================================
operation       fused            unfused           of
==============  ===============  ================  ===========================================
rotation        2; backward 2    10; backward 15   queries, and keys
gated product   3; backward 5    5; backward 9     one half of its input
norm            2; backward 5    8 + 5r; 12 + 17r  its input, where r is the size of an element
                                                   inside of the norm over that of activations
permutation     1+k; back. 1+k   2k; 1 + 3k        tokens of a GPU, each with k experts (Megatron-
unpermutation   1+k; back. 1+k   1 + 3k; 2k        LM, ``moe_utils.py``: copies, sums of zeros)
==============  ===============  ================  ===========================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.models.gpu import GPU, Kernel, as_gpu
from pipesim.models.precision import FORMATS, Precision
from pipesim.models.shard_sizes import (
    ALIGNED,
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    attention_matrices,
    fuses_weight_grads,
    layer_matrices,
    recomputes,
    routed_matrices,
    shared_matrices,
    vocabulary_parameters,
)

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.models.shard import Shard


class OperationKernels(NamedTuple):
    """Kernels of F, I and W of one layer, of the embedding, or of the head; B has those of I and W.

    ``recompute`` are those that a backward runs again with the ``recompute`` of the shard, and with
    ``recompute_modules`` of its framework.
    """

    forward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    weight_grad: tuple[Kernel, ...]
    recompute: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class KernelSizes:
    """Numbers of one shard that formulas of kernels share.

    ``precision`` is that of linear products.
    """

    shard: Shard
    precision: Precision = "bf16"

    @property
    def tokens(self) -> int:
        """T, tokens of one GPU of a context-parallel group."""
        return self.shard.tokens

    @property
    def share(self) -> float:
        """Tokens of the tensors that tensor parallelism leaves whole: T, or T/t."""
        return self.tokens / (self.shard.tensor_parallel if self.shard.sequence_parallel else 1)

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout's mask; 0 without dropout."""
        return MASK_BYTES * self.shard.model.dropout

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element of a product's operands."""
        own = FORMATS.get(self.precision)
        return self.shard.model.bytes_per_activation if own is None else own.operand

    def cast(self, name: str, elements: float) -> tuple[Kernel, ...]:
        """Return the cast of a tensor to the format of operands; none for 16 bits."""
        own = FORMATS.get(self.precision)
        return () if own is None else (Kernel(f"{name} cast", nbytes=own.cast * elements),)

    def product(self, name: str, rows: float, columns: float, depth: float) -> tuple[Kernel, ...]:
        """Return a matrix product, after the cast of its rows, unless a norm wrote them so.

        Its result is in 16 bits.
        """
        nbytes = self.operand_bytes * (rows * depth + depth * columns)
        nbytes += self.shard.model.bytes_per_activation * rows * columns
        product = Kernel(
            name, 2 * rows * columns * depth, nbytes, depth, precision=self.precision,
            splits_depth=rows < _TILE,
        )  # fmt: skip
        return (product,) if name in _FROM_NORM else (*self.cast(name, rows * depth), product)

    def forward_product(
        self, name: str, matrix: Matrix, rows: float | None = None
    ) -> tuple[Kernel, ...]:
        """Return the product of a linear map of ``rows`` tokens, T by default, forward."""
        tokens = self.tokens if rows is None else rows
        return self.product(name, tokens, matrix.outputs, matrix.inputs)

    def input_grad(
        self, name: str, matrix: Matrix, rows: float | None = None
    ) -> tuple[Kernel, ...]:
        """Return the product of the gradient of a linear map's input."""
        tokens = self.tokens if rows is None else rows
        return self.product(f"{name} input", tokens, matrix.inputs, matrix.outputs)

    def weight_grad(
        self, name: str, matrix: Matrix, *, bias: bool = True, rows: float | None = None
    ) -> tuple[Kernel, ...]:
        """Return the product of a weight's gradient and its sum, and those of the bias, if any.

        The gradient of a bias is a sum over the gradients of outputs.
        """
        tokens = self.tokens if rows is None else rows
        kernels = self._weight_products(name, matrix, tokens, 1)
        if self.shard.model.biases and bias:
            e, outputs = self.shard.model.bytes_per_activation, matrix.outputs
            kernels.append(Kernel(f"{name} bias", nbytes=e * tokens * outputs))
            kernels.append(self.accumulation(f"{name} bias", outputs))
        return tuple(kernels)

    def grouped(self, name: str, matrix: Matrix, rows: float, n: int) -> tuple[Kernel, ...]:
        """Return the products of n experts, which share ``rows`` tokens, after their cast.

        In one kernel for all, each expert has whole tiles of `_TILE` rows. Experts without a token
        are not read.
        """
        inputs, outputs = matrix
        n = min(n, math.ceil(rows))
        nbytes = self.operand_bytes * (rows * inputs + n * inputs * outputs)
        nbytes += self.shard.model.bytes_per_activation * rows * outputs
        computed = rows
        if self.shard.framework.expert_products == "grouped":
            computed = n * _TILE * math.ceil(rows / n / _TILE)
        product = Kernel(
            name, 2 * computed * outputs * inputs, nbytes, inputs, precision=self.precision
        )
        casts = self.cast(name, rows * inputs)
        if self.shard.framework.expert_products != "grouped":  # a tensor for each expert
            casts = tuple(cast._replace(n_kernels=n) for cast in casts)
        return (*casts, self._of_experts(product, n))

    def _of_experts(self, product: Kernel, n: int) -> Kernel:
        """Return the products of n experts as the kernels that the framework runs."""
        method = self.shard.framework.expert_products
        n_kernels = 1 if method == "grouped" else n
        return product._replace(n_kernels=n_kernels, is_grouped=method == "streams")

    def grouped_weight_grad(
        self, name: str, matrix: Matrix, rows: float, n: int
    ) -> tuple[Kernel, ...]:
        """Return the gradients of the weights of n experts, which share ``rows`` tokens."""
        product, *sums = self._weight_products(name, matrix, rows, n)
        return (self._of_experts(product, n), *sums)

    def _weight_products(self, name: str, matrix: Matrix, tokens: float, n: int) -> list[Kernel]:
        """Return the gradients of n weights of one shape, and their sums."""
        model = self.shard.model
        inputs, outputs = matrix
        g, size = model.bytes_per_gradient, inputs * outputs
        fused = fuses_weight_grads(self.shard)
        written = 2 * g if fused else model.bytes_per_parameter
        nbytes = self.operand_bytes * tokens * (inputs + outputs) + written * size * n
        product = Kernel(
            f"{name} weight", 2 * tokens * size, nbytes, tokens / n, n, precision=self.precision
        )
        return [product] if fused else [product, self.accumulation(name, size * n, n)]

    def accumulation(self, name: str, size: float, n_kernels: int = 1) -> Kernel:
        """Return the sum of a gradient with those of earlier micro-batches."""
        model = self.shard.model
        nbytes = (model.bytes_per_parameter + 2 * model.bytes_per_gradient) * size
        return Kernel(f"{name} accumulation", nbytes=nbytes, n_kernels=n_kernels)


#: Share of the bandwidth of element-wise kernels that a fused loss reaches, forward and backward
#: together: Transformer Engine's, on B200 (SimuMax, see `pipesim.models.data_sheets`): the five
#: reads and writes of `head_kernels` are at 0.375 of nominal; 0.85 is that of element-wise kernels.
_FUSED_LOSS_SHARE = 0.44
#: Linear maps to latent vectors: each GPU has them whole, for its own tokens.
_TO_LATENT = ("query down", "kv down")
#: Linear maps whose input a norm writes in the format of operands.
_FROM_NORM = ("qkv", "up", "query up", "kv up")


class LayerSegments(NamedTuple):
    """Kernels of a layer with experts, divided by its exchanges of tokens."""

    attention: OperationKernels  # attention, norms, router, permutation, and shared experts
    experts: OperationKernels
    rest: OperationKernels  # sum over the experts of a token, and the residual


def layer_kernels(shard: Shard, *, experts: bool = False) -> OperationKernels:
    """Return the kernels of a dense layer, or of one with experts."""
    if experts:
        attention, middle, rest = layer_segments(shard)
        return OperationKernels(
            attention.forward + middle.forward + rest.forward,
            rest.input_grad + middle.input_grad + attention.input_grad,
            rest.weight_grad + middle.weight_grad + attention.weight_grad,
            attention.recompute + middle.recompute + rest.recompute,
        )
    sizes = KernelSizes(shard, shard.precision)
    core = attention_core(sizes)
    norm, residual = _norm_and_residual(sizes)
    first = _attention(sizes, core)
    second = _mlp(sizes, layer_matrices(shard))
    # The backward of a norm also adds the gradient of its parameters; that of a residual comes
    # before the branch.
    forward = (
        norm.forward + first.forward + residual.forward
        + norm.forward + second.forward + residual.forward
    )  # fmt: skip
    input_grad = (
        residual.input_grad + second.input_grad + norm.input_grad
        + residual.input_grad + first.input_grad + norm.input_grad
    )  # fmt: skip
    weight_grad = second.weight_grad + norm.weight_grad + first.weight_grad + norm.weight_grad
    again = forward if shard.recompute == "full" else ()
    again += core.forward * recomputes(shard, "core_attn")
    again += 2 * norm.forward * recomputes(shard, "layernorm")
    again += _maps_to_heads(sizes) * recomputes(shard, "mla_up_proj")
    again += second.forward * recomputes(shard, "mlp")
    if recomputes(shard, "second_products"):
        again = (*_second_products(sizes), *2 * norm.forward, *residual.forward)
        again += core.forward * (not shard.flash_attention)
    return OperationKernels(forward, input_grad, weight_grad, again)


def _maps_to_heads(sizes: KernelSizes) -> tuple[Kernel, ...]:
    """Return the maps of latent vectors to heads, and positions, forward."""
    others = (*_TO_LATENT, "projection")
    maps = [x for x in attention_matrices(sizes.shard).items() if x[0] not in others]
    products = chain.from_iterable(sizes.forward_product(*x) for x in maps)
    return (*products, *rotary_kernels(sizes, is_backward=False))


def _second_products(sizes: KernelSizes) -> tuple[Kernel, ...]:
    """Return all but norms and residual of what torchtitan recomputes of a dense layer.

    Of its products (q, k, v, projection, gate, up, down) it keeps every other result. That of
    ``down`` is no input of a backward.
    """
    shard, model, t = sizes.shard, sizes.shard.model, sizes.shard.tensor_parallel
    maps = layer_matrices(shard)
    up, down = maps["up"], maps["down"]
    keys = sizes.product("qkv", sizes.tokens, model.kv_size / t, up.inputs)
    second = sizes.product("up", sizes.tokens, down.inputs, up.inputs) if model.gated_mlp else ()
    activation = [x for x in _mlp(sizes, maps).forward if x.name == "activation"]
    rotary = rotary_kernels(sizes, is_backward=False)
    projection = sizes.forward_product("projection", maps["projection"])
    return (*keys, *rotary, *projection, *second, *activation)


def layer_segments(shard: Shard) -> LayerSegments:
    """Return the kernels of a layer with experts between its exchanges."""
    sizes = KernelSizes(shard, shard.precision)
    core = attention_core(sizes)
    norm, residual = _norm_and_residual(sizes)
    first, (before, middle, after) = _attention(sizes, core), expert_kernels(sizes)
    attention = OperationKernels(
        norm.forward + first.forward + residual.forward + norm.forward + before.forward,
        before.input_grad + norm.input_grad
        + residual.input_grad + first.input_grad + norm.input_grad,
        before.weight_grad + norm.weight_grad + first.weight_grad + norm.weight_grad,
    )  # fmt: skip
    rest = OperationKernels(
        after.forward + residual.forward,
        residual.input_grad + after.input_grad,
        after.weight_grad,
    )
    if shard.recompute == "selective":
        again = core.forward * recomputes(shard, "core_attn")
        again += 2 * norm.forward * recomputes(shard, "layernorm")
        again += _maps_to_heads(sizes) * recomputes(shard, "mla_up_proj")
        if recomputes(shard, "shared_experts") and shared_matrices(shard):
            again += _mlp(sizes, shared_matrices(shard), "shared ").forward
        activation = [x for x in middle.forward if x.name == "experts activation"]
        attention = attention._replace(recompute=again)
        middle = middle._replace(recompute=tuple(activation) * recomputes(shard, "moe_act"))
    elif shard.recompute == "full":
        attention, middle, rest = (
            part._replace(recompute=part.forward) for part in (attention, middle, rest)
        )
    return LayerSegments(attention, middle, rest)


def _norm_and_residual(sizes: KernelSizes) -> tuple[OperationKernels, OperationKernels]:
    """Return the kernels of a norm, and of the sum of a branch with the residual stream."""
    model = sizes.shard.model
    h, e, share = model.hidden_size, model.bytes_per_activation, sizes.share
    # Gradients of a norm's parameters: sums over tokens, in two kernels.
    nbytes = 2 * e * h * share
    framework = sizes.shard.framework
    forward_norm, backward_norm = 2.0, 3.0  # besides the gradients of parameters
    kernels = (1, 1)
    if not framework.fused_norm:
        ratio = framework.norm_bytes / e
        forward_norm, backward_norm, kernels = 8 + 5 * ratio, 10 + 17 * ratio, (6, 13)
    norm = OperationKernels(
        (Kernel("norm", nbytes=forward_norm * e * h * share, n_kernels=kernels[0]),),
        (Kernel("norm", nbytes=backward_norm * e * h * share, n_kernels=kernels[1]),),
        (
            Kernel("norm weight", nbytes=nbytes, n_kernels=2),
            sizes.accumulation("norm", model.norm_parameters, 1 + model.biases),
        ),
    )
    name = "dropout and residual" if model.dropout else "residual"
    # The mask, if there is one, and the sum of the gradients of branch and residual.
    gradients = [Kernel("residual", nbytes=3 * e * h * share)]
    if model.dropout:
        gradients.insert(0, Kernel("dropout", nbytes=(2 * e + MASK_BYTES) * h * share))
    forward = Kernel(name, nbytes=(3 * e + sizes.mask) * h * share)
    return norm, OperationKernels((forward,), tuple(gradients), ())


def _attention(sizes: KernelSizes, core: OperationKernels) -> OperationKernels:
    """Return the kernels of attention, from the norm to the sum with the residual stream."""
    maps = [
        (name, matrix, sizes.share if name in _TO_LATENT else sizes.tokens)
        for name, matrix in attention_matrices(sizes.shard).items()
    ]
    *inputs, projection = [sizes.forward_product(*x) for x in maps]
    *input_grads, last = [sizes.input_grad(*x) for x in maps]
    weights = [sizes.weight_grad(name, matrix, rows=rows) for name, matrix, rows in maps]
    copies, copies_back = _attention_copies(sizes)
    rotary, rotary_back = (rotary_kernels(sizes, is_backward=x) for x in (False, True))
    return OperationKernels(
        (
            *chain.from_iterable(inputs),
            *latent_norms(sizes, 2),
            *rotary,
            *copies,
            *core.forward,
            *projection,
        ),
        (
            *last,
            *core.input_grad,
            *copies_back,
            *rotary_back,
            *latent_norms(sizes, 3),
            *chain.from_iterable(reversed(input_grads)),
        ),
        tuple(chain.from_iterable(reversed(weights))),
    )


def _attention_copies(sizes: KernelSizes) -> tuple[list[Kernel], list[Kernel]]:
    """Return the copies around the core, forward and backward; none in most frameworks.

    Several sequences are copied to another order and back. Gradients of queries, keys and values
    are copied into one tensor.
    """
    shard = sizes.shard
    if not shard.framework.attention_copies:
        return [], []
    queries = shard.model.bytes_per_activation * shard.model.query_size * sizes.tokens
    queries /= shard.tensor_parallel
    order = [Kernel("copy of order", nbytes=8 * queries, n_kernels=4)]
    order *= shard.microbatch_size > 1
    return order, [Kernel("concatenation", nbytes=6 * queries), *order]


def _mlp(sizes: KernelSizes, maps: Mapping[str, Matrix], prefix: str = "") -> OperationKernels:
    """Return the kernels of an MLP, of a dense layer or of the shared experts."""
    up_name, down_name, activation = f"{prefix}up", f"{prefix}down", f"{prefix}activation"
    up, down = maps[up_name], maps[down_name]
    model, framework = sizes.shard.model, sizes.shard.framework
    e, width, f = model.bytes_per_activation, up.outputs, down.inputs
    accesses, kernels = (width + f, 2 * width + f), (1, 1)
    is_gated = width != f
    if is_gated and not framework.fused_activation:
        accesses, kernels = (5 * f, 9 * f), (2, 4)
    added: tuple[Kernel, ...] = ()
    if is_gated and framework.separate_gate:  # gradients of the input of gate and up
        added = (Kernel(f"{up_name} sum", nbytes=3 * e * model.hidden_size * sizes.tokens),)
    return OperationKernels(
        (
            *sizes.forward_product(up_name, up),
            Kernel(activation, nbytes=e * accesses[0] * sizes.tokens, n_kernels=kernels[0]),
            *sizes.forward_product(down_name, down),
        ),
        (
            *sizes.input_grad(down_name, down),
            Kernel(activation, nbytes=e * accesses[1] * sizes.tokens, n_kernels=kernels[1]),
            *sizes.input_grad(up_name, up),
            *added,
        ),
        (*sizes.weight_grad(down_name, down), *sizes.weight_grad(up_name, up)),
    )


def embedding_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of the embedding: rows of tokens, sum with positions, dropout."""
    sizes, model = KernelSizes(shard), shard.model
    width = model.bytes_per_activation * model.hidden_size
    forward = [Kernel("embedding", nbytes=2 * width * sizes.tokens)]
    backward = []
    if model.learned_positions:
        forward.append(Kernel("positions", nbytes=3 * width * sizes.share))
    if model.dropout:
        masks = sizes.mask * model.hidden_size * sizes.share
        dropout = Kernel("dropout", nbytes=2 * width * sizes.share + masks)
        forward.append(dropout)
        backward.append(dropout)
    # The gradient has all rows of the vocabulary. It is set to zero, and those of tokens are added.
    rows = vocabulary_parameters(shard)
    e = model.bytes_per_parameter
    weight = (
        Kernel("embedding zeros", nbytes=e * rows),
        Kernel("embedding weight", nbytes=(width + 2 * e * model.hidden_size) * sizes.tokens),
        sizes.accumulation("embedding", rows),
    )
    return OperationKernels(tuple(forward), tuple(backward), weight)


def head_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of final norm, LM head and one loss, whose logits are in 32 bits.

    The cross-entropy is that of Megatron-LM over a split vocabulary: a cast, the largest logit, its
    subtraction, exponentials, their sum, and the probabilities that the backward keeps. A fused
    loss reads the logits for the sums of exponentials, and again to replace them by their gradient,
    which the backward multiplies by that of the loss. With ``last_logits`` there is no loss.
    """
    sizes, model, t = KernelSizes(shard), shard.model, shard.tensor_parallel
    h, v, e = model.hidden_size, model.vocabulary_size / t, model.bytes_per_activation
    logits = v * sizes.tokens
    norm = Kernel("norm", nbytes=2 * e * h * sizes.share)
    product = sizes.product("logits", shard.logit_tokens, v, h)
    if shard.last_logits:
        return OperationKernels((norm, *product), (), ())
    cast = Kernel("cast of logits", nbytes=(e + FP32_BYTES) * logits)
    # Reads and writes: largest 1, subtraction 2, exponentials 2, sum 1, probabilities 2.
    loss = Kernel("cross-entropy", nbytes=8 * FP32_BYTES * logits, n_kernels=5)
    loss_back = Kernel("cross-entropy", nbytes=2 * FP32_BYTES * logits, n_kernels=2)
    losses: tuple[Kernel, ...] = (cast, loss)
    losses_back: tuple[Kernel, ...] = (loss_back, cast)
    if shard.fused_loss:
        fused = Kernel("cross-entropy", nbytes=3 * e * logits, n_kernels=2, share=_FUSED_LOSS_SHARE)
        losses = (fused,)
        losses_back = (fused._replace(nbytes=2 * e * logits, n_kernels=1),)
    return OperationKernels(
        (norm, *product, *losses),
        (
            *losses_back, *sizes.product("logits input", sizes.tokens, h, v),
            norm._replace(nbytes=3 * e * h * sizes.share),
        ),
        sizes.weight_grad("logits", Matrix(h, v), bias=False),
    )  # fmt: skip


def mtp_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of what comes before the layer of one of ``mtp_layers``.

    That is the embedding of the next tokens, norms of it and of the output of the layer before,
    their concatenation, and its map (Megatron-LM, ``multi_token_prediction.py``).
    """
    sizes, embedding, h = KernelSizes(shard), embedding_kernels(shard), shard.model.hidden_size
    norm, _ = _norm_and_residual(sizes)
    e, wide = shard.model.bytes_per_activation, Matrix(2 * h, h / shard.tensor_parallel)
    both = (Kernel("concatenation", nbytes=4 * e * h * sizes.share),)
    return OperationKernels(
        embedding.forward + 2 * norm.forward + both + sizes.forward_product("mtp", wide),
        sizes.input_grad("mtp", wide) + both + 2 * norm.input_grad + embedding.input_grad,
        sizes.weight_grad("mtp", wide, bias=False) + 2 * norm.weight_grad + embedding.weight_grad,
    )


# Kernels of attention between its linear maps: rotary positions, and the attention core.
#
# A GPU of a context-parallel group computes the scores of its own tokens, with keys of the whole
# sequence of s tokens; or, with ``"all_to_all"``, those of all tokens and its part of the heads,
# which are as many.
#
# The core has 2 products forward, of depth d and s, and 4 backward. Fused (FlashAttention) it is
# one kernel of depth d, which computes the half of the scores that the causal mask leaves, and 5
# products backward, since it computes the scores again (Dao, arXiv 2307.08691, section 4.1): 2.5
# times as many FLOPs. With latent attention, 3 of the 5 have the depth of queries and 2 that of
# values. Unfused, scores are written and read by softmax and dropout, and none are left out.
#
# Latent attention rotates a part of each query in place, and one kernel makes keys and values of
# the output of ``kv up`` (``apply_rope_fusion`` of Megatron-LM, ``fused_mla_yarn_rope_apply.py``).
#
# A fused core has a tile for each head and `_TILE` queries. The causal mask makes the last tile
# twice as long as the mean; see `pipesim.GPU`. In a ring one step of each GPU has the mask.

#: Queries of a tile of a fused core, as in FlashAttention; rows of a tile of a grouped product.
_TILE = 128
#: Share of the rate that fused cores reach whose queries are deeper than values, as in latent
#: attention: those of 192 and 128 elements, on A100 (0.82) and on B200 (0.80); SimuMax, see
#: `pipesim.models.data_sheets`.
_LATENT_SHARE = 0.8


def rotary_kernels(sizes: KernelSizes, *, is_backward: bool) -> list[Kernel]:
    """Return the kernels that rotate queries and keys, or their gradients, if positions do.

    With latent attention, a kernel makes keys and values, too.
    """
    model, t = sizes.shard.model, sizes.shard.tensor_parallel
    e, kernels = model.bytes_per_activation, list[Kernel]()
    accesses, n = (2, 1) if sizes.shard.framework.fused_rotary else ((10, 5), (15, 7))[is_backward]
    if not model.kv_rank:
        if model.learned_positions:
            return []
        rotated = (model.query_size + model.kv_size) / t
        nbytes = accesses * e * rotated * sizes.tokens
        return [Kernel("rotary positions", nbytes=nbytes, n_kernels=2 * n)]
    if model.rope_head_size:
        rotated = model.rope_head_size * model.n_heads / t
        nbytes = accesses * e * rotated * sizes.tokens
        kernels.append(Kernel("rotary positions", nbytes=nbytes, n_kernels=n))
    width = (model.n_heads * model.head_size + model.value_size) / t
    moved = width + model.rope_head_size + (model.kv_size + model.value_size) / t
    return [*kernels, Kernel("keys and values", nbytes=e * moved * sizes.tokens)]


def latent_norms(sizes: KernelSizes, passes: int) -> list[Kernel]:
    """Return the norms of latent vectors, with reads and writes of ``passes`` tensors each."""
    model = sizes.shard.model
    width = model.query_rank + model.kv_rank
    if not width:
        return []
    n_norms = 1 + (model.query_rank > 0)
    nbytes = passes * model.bytes_per_activation * width * sizes.tokens
    return [Kernel("latent norm", nbytes=nbytes, n_kernels=n_norms)]


def attention_core(sizes: KernelSizes) -> OperationKernels:
    """Return the kernels of the attention core, which has no weights."""
    shard, tokens = sizes.shard, sizes.tokens
    model, t = shard.model, shard.tensor_parallel
    q, k = model.query_size, model.kv_size
    s = model.sequence_length * shard.attended_columns
    e, head = model.bytes_per_activation, q / model.n_heads
    if shard.flash_attention:
        return _fused_core(sizes)
    out, value_head = model.core_output_size, model.core_output_size / model.n_heads
    is_misaligned = any(size % ALIGNED for size in (head, value_head))
    scores = model.n_heads / t * s * tokens
    flops, context_flops = 2 * scores * head, 2 * scores * value_head
    # Each of the two products reads or writes the scores, and two tensors of the tokens.
    query_key = Kernel(
        "scores", flops, e * (scores + (q + k) / t * tokens), head, is_misaligned=is_misaligned
    )
    values_moved = e * (scores + (out + model.value_size) / t * tokens)
    context = Kernel("context", context_flops, values_moved, s, is_misaligned=is_misaligned)
    softmax = Kernel("softmax", nbytes=2 * e * scores)
    softmax_back = Kernel("softmax", nbytes=3 * e * scores)
    dropout = [Kernel("dropout of scores", nbytes=(2 * e + MASK_BYTES) * scores)] * model.dropout
    bias = [Kernel("score bias", nbytes=2 * e * scores, n_kernels=2)] * shard.framework.score_bias
    gradients = query_key._replace(name="scores input", n_kernels=2, flops=2 * flops, depth=s)
    # Gradients of the probabilities sum over a head, those of the values over the tokens.
    probabilities, values = (
        context._replace(name=f"context {name}", depth=depth)
        for name, depth in (("probabilities", value_head), ("values", s))
    )
    return OperationKernels(
        (*bias, query_key, softmax, *dropout, context),
        (
            probabilities, values, *dropout, softmax_back,
            gradients._replace(nbytes=2 * gradients.nbytes),
        ),
        (),
    )  # fmt: skip


def _fused_core(sizes: KernelSizes) -> OperationKernels:
    """Return the two fused kernels of the core, with one kernel for each step of a ring."""
    shard, tokens = sizes.shard, sizes.tokens
    model, t = shard.model, shard.tensor_parallel
    q, k, out, w = model.query_size, model.kv_size, model.core_output_size, model.value_size
    steps, attended = shard.context_steps, shard.attended * (1 + model.bidirectional)
    flops = tokens * model.sequence_length * (q + out) / t * shard.causal_share
    flops *= attended
    # Queries, keys, values, output; a ring reads the keys and values of each GPU.
    read = (k + w) * steps * shard.attended_columns
    ends = model.bytes_per_activation * (q + out + read) / t * tokens
    depth = (q + out) / (2 * model.n_heads)
    ratio = (3 * q + 2 * out) / (q + out)
    share = 1.0 if q == out else _LATENT_SHARE
    tiles = model.n_heads / t * tokens / _TILE * steps * max(1.0, attended)
    forward = Kernel(
        "attention", flops, ends, depth, steps, is_attention=True, share=share, tiles=tiles,
        attention_kernel=shard.framework.attention_kernel,
        sequence=model.sequence_length * max(1.0, attended),  # as many keys a query
    )  # fmt: skip
    backward = forward._replace(
        flops=ratio * flops, nbytes=2 * ends, n_kernels=2 * steps, is_backward=True
    )
    return OperationKernels((forward,), (backward,), ())


# Kernels of a mixture of experts on one GPU: router, permutation, grouped products, sum.
#
# A GPU has T tokens before the exchange (T/t with sequence parallelism), and R tokens for its E/x
# experts after it, where x is the expert-parallel size: R = Tk on average, times the imbalance of
# the busiest GPU.
# Transformer Engine runs one product for each expert, several at a time. Kernels are those of
# Megatron-LM with it (``--moe-grouped-gemm --moe-permute-fusion``,
# ``megatron/core/transformer/moe``):
#
# ===============  =================================================================
# kernel           work
# ===============  =================================================================
# router           product of T, E, h
# top-k            reads and writes of T times E scores in 32 bits
# permutation      reads the tokens once, and writes a copy for each expert of a token
# expert sort      tokens of each sender, by expert; and back
# experts up       grouped product of R, gu, h, with the weights of all E/x experts
# experts down     grouped product of R, h, u
# unpermutation    reads the results of all experts of a token, and writes their sum
# shared up, down  products of an MLP of inner size mu
# ===============  =================================================================

#: Kernels that read and write the scores, forward and backward: softmax, selection of groups and of
#: experts, masks, capacity, normalization, auxiliary loss; about as many as in ``moe_utils.py``.
_SCORE_KERNELS = (30, 15)
#: Share of the bandwidth of element-wise kernels that copies of tokens in another order reach, each
#: row in a place of its own: 0.54 of nominal on B200 for Transformer Engine's permutation (and 0.2
#: on A100), SimuMax, see `pipesim.models.data_sheets`; 0.85 is that of element-wise kernels.
_PERMUTATION_SHARE = 0.64


def expert_kernels(sizes: KernelSizes) -> LayerSegments:
    """Return the kernels of a layer's second half, from its norm to the sum with the residual."""
    shard, model = sizes.shard, sizes.shard.model
    router, maps, shared = _router(sizes), shared_matrices(shard), shared_kernels(shard)
    before = OperationKernels(
        router.forward + shared.forward,
        shared.input_grad + router.input_grad,
        shared.weight_grad + router.weight_grad,
    )
    # The sum over the experts of a token, and that with the shared experts.
    width = model.bytes_per_activation * model.hidden_size * shard.expert_tokens
    back, unpermutation = _permutations(sizes, "unpermutation")
    added = (Kernel("shared sum", nbytes=3 * width),) if maps else ()
    after = OperationKernels((unpermutation, *added), (back,), ())
    return LayerSegments(before, _experts(sizes), after)


def _permutations(sizes: KernelSizes, name: str) -> tuple[Kernel, Kernel]:
    """Return the copy of tokens for each of their experts, and the sum over these copies.

    One is the backward of the other.
    """
    shard, k = sizes.shard, sizes.shard.model.experts_per_token
    width = shard.model.bytes_per_activation * shard.model.hidden_size * shard.expert_tokens
    copied = summed = Kernel(name, nbytes=(1 + k) * width, share=_PERMUTATION_SHARE)
    if not shard.framework.fused_permute:
        copied = copied._replace(nbytes=2 * k * width)
        summed = summed._replace(nbytes=(1 + 3 * k) * width, n_kernels=2)
    return copied, summed


def shared_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of shared experts; none without."""
    maps = shared_matrices(shard)
    if not maps:
        return OperationKernels((), (), ())
    return _mlp(KernelSizes(shard, shard.precision), maps, "shared ")


def _router(sizes: KernelSizes) -> OperationKernels:
    shard, model = sizes.shard, sizes.shard.model
    sizes = KernelSizes(shard)  # scores are as exact in any precision
    tokens, h, e = shard.expert_tokens, model.hidden_size, model.bytes_per_activation
    matrix = Matrix(h, model.n_experts)
    scores = 2 * FP32_BYTES * tokens * model.n_experts
    counts = (3, 3) if shard.framework.fused_router else _SCORE_KERNELS
    top_k, top_k_back = (Kernel("top-k", nbytes=n * scores, n_kernels=n) for n in counts)
    permutation, permutation_back = _permutations(sizes, "permutation")
    branches = 1 + (model.shared_experts > 0)
    added = Kernel("router residual", nbytes=3 * e * h * tokens * branches, n_kernels=branches)
    return OperationKernels(
        (*sizes.forward_product("router", matrix, tokens), top_k, permutation),
        (permutation_back, top_k_back, *sizes.input_grad("router", matrix, tokens), added),
        sizes.weight_grad("router", matrix, bias=False, rows=tokens),
    )


def _experts(sizes: KernelSizes) -> OperationKernels:
    shard, model = sizes.shard, sizes.shard.model
    tokens, n = shard.routed_tokens, shard.local_experts
    up, down = routed_matrices(shard).values()
    e, width, u = model.bytes_per_activation, up.outputs, down.inputs
    sort: tuple[Kernel, ...] = ()  # orders received tokens by expert
    if n > 1 and shard.expert_parallel * shard.expert_tensor_size > 1:
        nbytes = 2 * e * model.hidden_size * tokens
        sort = (Kernel("expert sort", nbytes=nbytes, share=_PERMUTATION_SHARE),)
    if shard.framework.expert_padding and sizes.precision in FORMATS:
        sort += (Kernel("experts padding", nbytes=2 * e * model.hidden_size * tokens),)
    bias, bias_back = _expert_biases(sizes)
    back = [
        sizes.grouped(f"{name} input", Matrix(matrix.outputs, matrix.inputs), tokens, n)
        for name, matrix in (("experts down", down), ("experts up", up))
    ]
    return OperationKernels(
        (
            *sort,
            *sizes.grouped("experts up", up, tokens, n),
            Kernel("experts activation", nbytes=e * (width + u) * tokens),
            *sizes.grouped("experts down", down, tokens, n),
            *bias,
            *sort,
        ),
        (
            *sort,
            *bias_back,
            *back[0],
            Kernel("experts activation", nbytes=e * (2 * width + u) * tokens),
            *back[1],
            *sort,
        ),
        (
            *sizes.grouped_weight_grad("experts down", down, tokens, n),
            *sizes.grouped_weight_grad("experts up", up, tokens, n),
        ),
    )


def _expert_biases(sizes: KernelSizes) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Return the kernels of the biases of experts' results, forward and backward; none if fused.

    Of each expert, Megatron-LM multiplies bias and weights of tokens in 32 bits and adds the
    result; the parts are concatenated, and cast. Backward, gradients of bias and weights are sums
    of products of their own. Accesses of a tensor of results: in 16 bits 2 and 4, in 32 bits 6 and
    8.
    """
    shard = sizes.shard
    model, n = shard.model, shard.local_experts
    if not model.biases or shard.framework.fused_expert_bias:
        return (), ()
    elements, e = model.hidden_size * shard.routed_tokens, model.bytes_per_activation
    forward = Kernel(
        "experts bias", nbytes=(2 * e + 6 * FP32_BYTES) * elements, n_kernels=2 * n + 2
    )
    back = forward._replace(nbytes=(4 * e + 8 * FP32_BYTES) * elements, n_kernels=5 * n + 2)
    return (forward,), (back,)


#: Operation of each field of `OperationKernels`.
_OPS = {"forward": "F", "recompute": "R", "input_grad": "I", "weight_grad": "W"}


def kernel_table(shard: Shard, gpu: GPU | Mapping[str, Any] | str) -> pd.DataFrame:
    """Return the kernels of a shard; see `pipesim.Transformer.kernels` for its columns."""
    from pipesim.utils.packages import pandas as pd

    rates = as_gpu(gpu)
    rows = [
        (part, op, kernel.name, kernel.n_kernels, kernel.flops, kernel.nbytes,
         rates.kernel_seconds(kernel), max(shares, key=shares.__getitem__))
        for part, kernels in _parts(shard).items()
        for field, op in _OPS.items()
        for kernel in getattr(kernels, field)
        for shares in [rates.kernel_shares(kernel)]
    ]  # fmt: skip
    columns = ["part", "op", "kernel", "n_kernels", "flops", "bytes", "seconds", "bound"]
    return pd.DataFrame(rows, columns=columns)


def _parts(shard: Shard) -> dict[str, OperationKernels]:
    n_experts = shard.model.n_expert_layers
    parts = {}
    if n_experts < shard.model.n_layers:
        parts["layer"] = layer_kernels(shard)
    if n_experts:
        parts["expert layer"] = layer_kernels(shard, experts=True)
    parts |= {"embedding": embedding_kernels(shard), "head": head_kernels(shard)}
    return {**parts, "mtp": mtp_kernels(shard)} if shard.model.mtp_layers else parts

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

`pipesim.models.kernels.attention_core` has the core, and `.expert_kernels` experts.

Gradients of weights are summed over micro-batches. Where gradients have more bytes than parameters,
the product adds to them (``gradient_accumulation_fusion`` of Megatron-LM); otherwise autograd has a
kernel for each parameter that adds. Parameters of norms and biases always have such a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.kernels.attention_core import attention_core, latent_norms, rotary_kernels
from pipesim.models.kernels.expert_kernels import expert_kernels
from pipesim.models.kernels.kernel import Kernel
from pipesim.models.kernels.kernel_sizes import KernelSizes, OperationKernels
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    attention_matrices,
    layer_matrices,
)

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


#: Share of the bandwidth of element-wise kernels that a fused loss reaches, forward and backward
#: together: Transformer Engine's, on B200 (SimuMax, see `pipesim.models.data_sheets`): the five
#: reads and writes of `head_kernels` are at 0.375 of nominal; 0.85 is that of element-wise kernels.
_FUSED_LOSS_SHARE = 0.44
#: Linear maps to latent vectors: each GPU has them whole, for its own tokens.
_TO_LATENT = ("query down", "kv down")


class LayerSegments(NamedTuple):
    """Kernels of a layer with experts, divided by its exchanges of tokens.

    Attributes
    ----------
    attention
        Before the tokens are sent to their experts: attention, norms, router, permutation, and
        shared experts.
    experts
        Between both exchanges.
    rest
        After the results are back: sum over the experts of a token, and the residual.
    """

    attention: OperationKernels
    experts: OperationKernels
    rest: OperationKernels


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
    sizes = KernelSizes(shard)
    core = attention_core(sizes)
    norm, residual = _norm_and_residual(sizes)
    first = _attention(sizes, core)
    second = _mlp(sizes)
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
    recompute = {"none": (), "selective": core.forward, "full": forward}[shard.recompute]
    return OperationKernels(forward, input_grad, weight_grad, recompute)


def layer_segments(shard: Shard) -> LayerSegments:
    """Return the kernels of a layer with experts between its exchanges."""
    sizes = KernelSizes(shard)
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
        attention = attention._replace(recompute=core.forward)
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
    norm = OperationKernels(
        (Kernel("norm", nbytes=2 * e * h * share),),
        (Kernel("norm", nbytes=3 * e * h * share),),
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
    rotary = rotary_kernels(sizes)
    return OperationKernels(
        (*inputs, *latent_norms(sizes, 2), *rotary, *core.forward, projection),
        (last, *core.input_grad, *rotary, *latent_norms(sizes, 3), *reversed(input_grads)),
        tuple(kernel for own in reversed(weights) for kernel in own),
    )


def _mlp(sizes: KernelSizes) -> OperationKernels:
    """Return the kernels of the MLP of a dense layer."""
    maps, e = layer_matrices(sizes.shard), sizes.shard.model.bytes_per_activation
    up, down = maps["up"], maps["down"]
    width, f = up.outputs, down.inputs
    return OperationKernels(
        (
            sizes.forward_product("up", up),
            Kernel("activation", nbytes=e * (width + f) * sizes.tokens),
            sizes.forward_product("down", down),
        ),
        (
            sizes.input_grad("down", down),
            Kernel("activation", nbytes=e * (2 * width + f) * sizes.tokens),
            sizes.input_grad("up", up),
        ),
        (*sizes.weight_grad("down", down), *sizes.weight_grad("up", up)),
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
    rows = model.hidden_size * model.vocabulary_size / shard.tensor_parallel
    e = model.bytes_per_parameter
    weight = (
        Kernel("embedding zeros", nbytes=e * rows),
        Kernel("embedding weight", nbytes=(width + 2 * e * model.hidden_size) * sizes.tokens),
        sizes.accumulation("embedding", rows),
    )
    return OperationKernels(tuple(forward), tuple(backward), weight)


def head_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of final norm, LM head and loss, whose logits are in 32 bits.

    The cross-entropy is that of Megatron-LM over a split vocabulary: a cast, the largest logit, its
    subtraction, exponentials, their sum, and the probabilities that the backward keeps. A fused
    loss reads the logits for the sums of exponentials, and again to replace them by their gradient,
    which the backward multiplies by that of the loss.
    """
    sizes, model, t = KernelSizes(shard), shard.model, shard.tensor_parallel
    h, v, e = model.hidden_size, model.vocabulary_size / t, model.bytes_per_activation
    logits = v * sizes.tokens
    norm = Kernel("norm", nbytes=2 * e * h * sizes.share)
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
        (norm, sizes.product("logits", sizes.tokens, v, h), *losses),
        (
            *losses_back, sizes.product("logits input", sizes.tokens, h, v),
            norm._replace(nbytes=3 * e * h * sizes.share),
        ),
        sizes.weight_grad("logits", Matrix(h, v), bias=False),
    )  # fmt: skip

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

The attention core has 2 products forward, of depth d and s, and 4 backward. Fused (FlashAttention)
it is one kernel of depth d, which computes the half of the scores that the causal mask leaves. It
has 2.5 times as many FLOPs backward, five products against two, since it computes the scores again
(Dao, arXiv 2307.08691, section 4.1). Unfused, scores are written and read by softmax and dropout,
and none are left out.

Gradients of weights are summed over micro-batches. Where gradients have more bytes than parameters,
the product adds to them (``gradient_accumulation_fusion`` of Megatron-LM); otherwise autograd has a
kernel for each parameter that adds. Parameters of norms and biases always have such a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.kernels.kernel import Kernel
from pipesim.models.shard_sizes import (
    FP32_BYTES,
    MASK_BYTES,
    Matrix,
    fuses_weight_grads,
    layer_matrices,
)

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard

__all__ = ["OperationKernels", "embedding_kernels", "head_kernels", "layer_kernels"]

#: FLOPs of a fused attention core backward over those of its forward.
_FLASH_BACKWARD = 2.5


class OperationKernels(NamedTuple):
    """Kernels of one layer, of the embedding, or of the head, by operation.

    Attributes
    ----------
    forward, input_grad, weight_grad
        Kernels of F, I and W. B has those of I and W.
    recompute
        Kernels that a backward runs again with the ``recompute`` of the shard.
    """

    forward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    weight_grad: tuple[Kernel, ...]
    recompute: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class _Sizes:
    """Numbers of one shard that formulas share."""

    shard: Shard

    @property
    def tokens(self) -> int:
        """T."""
        return self.shard.microbatch_size * self.shard.model.sequence_length

    @property
    def share(self) -> float:
        """Tokens of the tensors that tensor parallelism leaves whole: T, or T/t."""
        return self.tokens / (self.shard.tensor_parallel if self.shard.sequence_parallel else 1)

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout's mask; 0 without dropout."""
        return MASK_BYTES * self.shard.model.dropout

    def product(self, name: str, rows: float, columns: float, depth: float) -> Kernel:
        """Return a matrix product whose operands and result are in 16 bits."""
        e = self.shard.model.bytes_per_activation
        nbytes = e * (rows * depth + depth * columns + rows * columns)
        return Kernel(name, 2 * rows * columns * depth, nbytes, depth)

    def forward_product(self, name: str, matrix: Matrix) -> Kernel:
        """Return the product of a linear map, forward."""
        return self.product(name, self.tokens, matrix.outputs, matrix.inputs)

    def input_grad(self, name: str, matrix: Matrix) -> Kernel:
        """Return the product of the gradient of a linear map's input."""
        return self.product(f"{name} input", self.tokens, matrix.inputs, matrix.outputs)

    def weight_grad(self, name: str, matrix: Matrix, *, bias: bool = True) -> tuple[Kernel, ...]:
        """Return the product of a weight's gradient and its sum, and those of the bias, if any.

        The gradient of a bias is a sum over the gradients of outputs.
        """
        model, tokens = self.shard.model, self.tokens
        inputs, outputs = matrix
        e, g, size = model.bytes_per_activation, model.bytes_per_gradient, inputs * outputs
        fused = fuses_weight_grads(model)
        written = 2 * g if fused else model.bytes_per_parameter
        nbytes = e * tokens * (inputs + outputs) + written * size
        product = Kernel(f"{name} weight", 2 * tokens * size, nbytes, tokens)
        kernels = [product] if fused else [product, self.accumulation(name, size)]
        if model.biases and bias:
            kernels.append(Kernel(f"{name} bias", nbytes=e * tokens * outputs))
            kernels.append(self.accumulation(f"{name} bias", outputs))
        return tuple(kernels)

    def accumulation(self, name: str, size: float, n_kernels: int = 1) -> Kernel:
        """Return the sum of a gradient with those of earlier micro-batches."""
        model = self.shard.model
        nbytes = (model.bytes_per_parameter + 2 * model.bytes_per_gradient) * size
        return Kernel(f"{name} accumulation", nbytes=nbytes, n_kernels=n_kernels)


def layer_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of a layer."""
    sizes = _Sizes(shard)
    core = _core(sizes)
    forward, input_grad = _layer_forward(sizes, core), _layer_input_grad(sizes, core)
    recompute = {"none": (), "selective": core.forward, "full": forward}[shard.recompute]
    return OperationKernels(forward, input_grad, _layer_weight_grad(sizes), recompute)


def _layer_forward(sizes: _Sizes, core: OperationKernels) -> tuple[Kernel, ...]:
    """Return the kernels of a layer's forward."""
    model, maps = sizes.shard.model, layer_matrices(sizes.shard)
    h, e, share = model.hidden_size, model.bytes_per_activation, sizes.share
    norm = Kernel("norm", nbytes=2 * e * h * share)
    name = "dropout and residual" if model.dropout else "residual"
    residual = Kernel(name, nbytes=(3 * e + sizes.mask) * h * share)
    up, f = maps["up"].outputs, maps["down"].inputs
    activation = Kernel("activation", nbytes=e * (up + f) * sizes.tokens)
    product = {name: sizes.forward_product(name, matrix) for name, matrix in maps.items()}
    return (
        norm, product["qkv"], *_rotary(sizes), *core.forward, product["projection"], residual,
        norm, product["up"], activation, product["down"], residual,
    )  # fmt: skip


def _layer_input_grad(sizes: _Sizes, core: OperationKernels) -> tuple[Kernel, ...]:
    """Return the kernels of the gradient of a layer's input."""
    model, maps = sizes.shard.model, layer_matrices(sizes.shard)
    h, e, share = model.hidden_size, model.bytes_per_activation, sizes.share
    norm = Kernel("norm", nbytes=3 * e * h * share)
    # The mask, if there is one, and the sum of the gradients of branch and residual.
    residual = [Kernel("residual", nbytes=3 * e * h * share)]
    if model.dropout:
        residual.insert(0, Kernel("dropout", nbytes=(2 * e + MASK_BYTES) * h * share))
    up, f = maps["up"].outputs, maps["down"].inputs
    activation = Kernel("activation", nbytes=e * (2 * up + f) * sizes.tokens)
    product = {name: sizes.input_grad(name, matrix) for name, matrix in maps.items()}
    return (
        *residual, product["down"], activation, product["up"], norm,
        *residual, product["projection"], *core.input_grad, *_rotary(sizes), product["qkv"], norm,
    )  # fmt: skip


def _layer_weight_grad(sizes: _Sizes) -> tuple[Kernel, ...]:
    """Return the kernels of the gradients of a layer's parameters."""
    model = sizes.shard.model
    # Gradients of a norm's parameters: sums over tokens, in two kernels.
    nbytes = 2 * model.bytes_per_activation * model.hidden_size * sizes.share
    norm = (
        Kernel("norm weight", nbytes=nbytes, n_kernels=2),
        sizes.accumulation("norm", model.norm_parameters, 1 + model.biases),
    )
    weight = {
        name: sizes.weight_grad(name, matrix)
        for name, matrix in layer_matrices(sizes.shard).items()
    }
    return (
        *weight["down"], *weight["up"], *norm, *weight["projection"], *weight["qkv"], *norm,
    )  # fmt: skip


def _rotary(sizes: _Sizes) -> list[Kernel]:
    """Return the kernels that rotate queries and keys, or their gradients, if positions do."""
    model, t = sizes.shard.model, sizes.shard.tensor_parallel
    if model.learned_positions:
        return []
    rotated = (model.query_size + model.kv_size) / t
    nbytes = 2 * model.bytes_per_activation * rotated * sizes.tokens
    return [Kernel("rotary positions", nbytes=nbytes, n_kernels=2)]


def _core(sizes: _Sizes) -> OperationKernels:
    """Return the kernels of the attention core, which has no weights."""
    shard, tokens = sizes.shard, sizes.tokens
    model, t = shard.model, shard.tensor_parallel
    q, k, s = model.query_size, model.kv_size, model.sequence_length
    e, head = model.bytes_per_activation, q / model.n_heads
    if shard.flash_attention:
        flops = 2 * tokens * s * q / t
        ends = e * (2 * q + 2 * k) / t * tokens  # queries, keys, values, output
        forward = Kernel("attention", flops, ends, head)
        backward = Kernel("attention", _FLASH_BACKWARD * flops, 2 * ends, head, n_kernels=2)
        return OperationKernels((forward,), (backward,), ())
    scores = model.n_heads / t * s * tokens
    flops = 2 * scores * head
    # Each of the two products reads or writes the scores, and two tensors of the tokens.
    query_key = Kernel("scores", flops, e * (scores + (q + k) / t * tokens), head)
    context = Kernel("context", flops, e * (scores + (q + k) / t * tokens), s)
    softmax = Kernel("softmax", nbytes=2 * e * scores)
    softmax_back = Kernel("softmax", nbytes=3 * e * scores)
    dropout = [Kernel("dropout of scores", nbytes=(2 * e + MASK_BYTES) * scores)] * model.dropout
    gradients = query_key._replace(name="scores input", n_kernels=2, flops=2 * flops, depth=s)
    # Gradients of the probabilities sum over a head, those of the values over the tokens.
    probabilities, values = (
        context._replace(name=f"context {name}", depth=depth)
        for name, depth in (("probabilities", head), ("values", s))
    )
    return OperationKernels(
        (query_key, softmax, *dropout, context),
        (
            probabilities, values, *dropout, softmax_back,
            gradients._replace(nbytes=2 * gradients.nbytes),
        ),
        (),
    )  # fmt: skip


def embedding_kernels(shard: Shard) -> OperationKernels:
    """Return the kernels of the embedding: rows of tokens, sum with positions, dropout."""
    sizes, model = _Sizes(shard), shard.model
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
    sizes, model, t = _Sizes(shard), shard.model, shard.tensor_parallel
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
        losses = (Kernel("cross-entropy", nbytes=3 * e * logits, n_kernels=2),)
        losses_back = (Kernel("cross-entropy", nbytes=2 * e * logits),)
    return OperationKernels(
        (norm, sizes.product("logits", sizes.tokens, v, h), *losses),
        (
            *losses_back, sizes.product("logits input", sizes.tokens, h, v),
            norm._replace(nbytes=3 * e * h * sizes.share),
        ),
        sizes.weight_grad("logits", Matrix(h, v), bias=False),
    )  # fmt: skip

"""Layers whose weight gradient can be computed apart from that of their input.

A `Layer` is three functions: forward, and the two halves of its backward. Their results equal
autograd's for the same call, to the last bit; but for linear layers of three or more dimensions and
16 bits, whose input is not contiguous: torch rounds their products before it adds the bias.
``LAYERS`` lists the calls that are layers: a new kind is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Gradients of weight and bias; None for one that is not needed.
WeightGradients = tuple[Tensor | None, Tensor | None]
#: Whether weight and bias need a gradient.
Needed = tuple[bool, bool]


class Layer(NamedTuple):
    """One kind of layer; ``options`` are those of the call.

    Attributes
    ----------
    forward
        ``forward(x, weight, bias, options)``; the output is no view of anything.
    input_gradient, weight_gradients
        ``input_gradient(gradient, x, weight, options)`` and ``weight_gradients(gradient, x, weight,
        needed, options)``, where ``gradient`` is that of the output.
    is_matrix
        Whether ``x`` and the output have two dimensions; further ones are folded into the first.
    is_autocast
        Whether autocast casts ``x``, weight and bias to its type.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor, Any], Tensor | None]
    weight_gradients: Callable[[Tensor, Tensor, Tensor, Needed, Any], WeightGradients]
    is_matrix: bool = False
    is_autocast: bool = True


class LayerCall(NamedTuple):
    """A call of a layer."""

    layer: Layer
    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    options: Any = None


# Products with a matrix: (rows, in) to (rows, out)


_LINEAR = Layer(
    lambda x, w, b, _: F.linear(x, w, b),
    lambda g, x, w, _: g.mm(w),
    lambda g, x, w, needed, _: (
        g.t().mm(x) if needed[0] else None,
        g.sum(0) if needed[1] else None,
    ),
    is_matrix=True,
)
_MATMUL = Layer(
    lambda x, w, b, _: x.mm(w) if b is None else torch.addmm(b, x, w),
    lambda g, x, w, _: g.mm(w.t()),
    lambda g, x, w, needed, _: (
        x.t().mm(g) if needed[0] else None,
        g.sum(0) if needed[1] else None,
    ),
    is_matrix=True,
)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LayerCall | None:
    return (
        LayerCall(_LINEAR, input, weight, bias) if input.dim() > 1 and weight.dim() == 2 else None
    )


def _matmul(input: Tensor, other: Tensor) -> LayerCall | None:
    return LayerCall(_MATMUL, input, other) if input.dim() > 1 and other.dim() == 2 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> LayerCall | None:
    # The gradient of a bias of another shape is summed over other dimensions.
    fits = input.dim() == 1 and mat2.dim() == 2 and len(input) == mat2.shape[1]
    return LayerCall(_MATMUL, mat1, mat2, input) if fits else None


# Convolutions: (batch, channels, ...) to the same


class _Geometry(NamedTuple):
    """The options of a convolution, in the order of ``torch.convolution``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, ...], options: _Geometry
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias that ``mask`` asks for."""
    bias_shape = [gradient.shape[1]] if mask[2] else None
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]
    gradients = torch.ops.aten.convolution_backward(gradient, x, weight, bias_shape, *options, mask)
    return gradients


_CONVOLUTION = Layer(
    lambda x, w, b, options: torch.convolution(x, w, b, *options),
    lambda g, x, w, options: _convolution_backward(g, x, w, (True, False, False), options)[0],
    lambda g, x, w, needed, options: _convolution_backward(g, x, w, (False, *needed), options)[1:],
)


def _per_dimension(value: Any, n: int) -> Sequence[int]:
    """Return an option as one number for each dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _convolution(n: int) -> Callable[..., LayerCall | None]:
    """Return a parser of calls of ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``."""

    def parse(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> LayerCall | None:
        if input.dim() != n + 2:  # a single sample
            return None
        if isinstance(padding, str):
            whole = [
                a * (b - 1)
                for a, b in zip(_per_dimension(dilation, n), weight.shape[2:], strict=True)
            ]
            if padding == "same" and (
                any(size % 2 for size in whole) or set(_per_dimension(stride, n)) != {1}
            ):
                return None  # one side is padded more than the other, or torch refuses it
            padding = [size // 2 if padding == "same" else 0 for size in whole]
        sizes = _per_dimension(stride, n), _per_dimension(padding, n), _per_dimension(dilation, n)
        options = _Geometry(*sizes, transposed=False, output_padding=[0] * n, groups=groups)
        return LayerCall(_CONVOLUTION, input, weight, bias, options)

    return parse


def _transposed(n: int) -> Callable[..., LayerCall | None]:
    """Return a parser of calls of ``F.conv_transpose1d`` to ``F.conv_transpose3d``."""

    def parse(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> LayerCall | None:
        if input.dim() != n + 2:
            return None
        sizes = _per_dimension(stride, n), _per_dimension(padding, n), _per_dimension(dilation, n)
        options = _Geometry(*sizes, True, _per_dimension(output_padding, n), groups)
        return LayerCall(_CONVOLUTION, input, weight, bias, options)

    return parse


# Embeddings: indices to (*indices, width)


def _embedding_rows(
    g: Tensor, x: Tensor, w: Tensor, _: Needed, options: tuple[int, bool]
) -> WeightGradients:
    return torch.ops.aten.embedding_dense_backward(g, x, len(w), *options), None


_EMBEDDING = Layer(
    lambda x, w, _, options: torch.embedding(w, x, *options),
    lambda g, x, w, _: None,  # indices have none
    _embedding_rows,
    is_autocast=False,
)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> LayerCall | None:
    row = -1 if padding_idx is None else padding_idx % len(weight)
    # max_norm changes the weight in place.
    if sparse or max_norm is not None or not -len(weight) <= (padding_idx or 0) < len(weight):
        return None
    return LayerCall(_EMBEDDING, input, weight, None, (row, scale_grad_by_freq))


#: Parser of the arguments of a call, by the function that torch passes to `__torch_function__`. It
#: returns None for a call that is no layer, and raises TypeError for arguments that it does not
#: know.
LAYERS: Mapping[Any, Callable[..., LayerCall | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.conv_transpose1d: _transposed(1),
    F.conv_transpose2d: _transposed(2),
    F.conv_transpose3d: _transposed(3),
    F.embedding: _embedding,
}

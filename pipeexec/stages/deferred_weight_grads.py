"""Deferred weight gradients: the backward of I computes those of inputs, and W the rest.

While `DeferredGradients.interception` is active in a thread, a `Layer` whose weight is a parameter
runs as the autograd function `_SplitLayer`. Its backward returns the gradient of the layer's input
alone. It keeps what the weight's gradient needs: the layer's input and the gradient of its output.
So the graph is freed at the end of I, and W computes nothing twice.

Autograd computes the other weight gradients in I:

- of operations without a row in ``LAYERS``, such as norms, recurrent layers, einsum, bmm, bilinear
  layers, bags of embeddings and single samples;
- of `torch.nn.MultiheadAttention`, whose layers torch calls where they cannot be intercepted;
- of weights that are computed, frozen or complex, or have hooks;
- of tensor subclasses, and sparse gradients;
- of operations without gradients, under `torch.func` or `torch.compile`, or within separate
  saved-tensor hooks, as in `torch.utils.checkpoint`. `pipeexec.stages.split_backward` defers those
  of compiled graphs.

Under autocast, layers compute in its type, and gradients of weights are cast to the weights' type.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeexec.stages.activations import ActivationMeter, CountedTensor, counted_tensors

#: Gradients of weight and bias; None for one that is not needed.
WeightGradients = tuple[Tensor | None, Tensor | None]
#: Whether weight and bias need a gradient.
Needed = tuple[bool, bool]


class Layer(NamedTuple):
    """One kind of layer, whose weight gradient can be computed apart from that of its input.

    It is three functions: forward, and the two halves of its backward. Their results equal
    autograd's for the same call, to the last bit; but for linear layers of three or more dimensions
    and 16 bits, whose input is not contiguous: torch rounds their products before it adds the bias.
    ``options`` are those of the call.

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


_EMBEDDING = Layer(
    lambda x, w, _, options: torch.embedding(w, x, *options),
    lambda g, x, w, _: None,  # indices have none
    lambda g, x, w, _, options: (
        torch.ops.aten.embedding_dense_backward(g, x, len(w), *options),
        None,
    ),
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


#: Parser of the arguments of a call, by the function that torch passes to `__torch_function__`: one
#: row for each call that can be a layer. It returns None for a call that is none, and raises
#: TypeError for arguments that it does not know.
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


_PLAIN = (Tensor, nn.Parameter)
#: Types that autocast casts to its own; it leaves double precision.
_CAST = (torch.float32, torch.float16, torch.bfloat16)
#: Key of the `DeferredGradients` of the backward of I that runs in a thread.
_COLLECTING = "pipeexec.DeferredGradients"


def collecting() -> DeferredGradients | None:
    """Return the store of the backward of I that runs in this thread; None in other backwards."""
    if not torch._C._is_key_in_tls(_COLLECTING):
        return None
    store: DeferredGradients = torch._C._get_obj_in_tls(_COLLECTING)
    return store


class DeferredGradients:
    """The weight gradients that one micro-batch of a stage leaves for W.

    The meter counts the bytes held from I to W.
    """

    def __init__(self, meter: ActivationMeter | None = None) -> None:
        self.meter = meter
        self.is_collecting = False
        self._layers: deque[_DeferredLayer | _DeferredGraph] = deque()

    def interception(self) -> TorchFunctionMode:
        """Return a context, for F or R, in which layers can defer their weight gradients."""
        return _InterceptionMode(self)

    def collect(self, outputs: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """Run the backward of I from the outputs, and keep what W needs of each layer.

        In any other backward, such as one within a module's forward, layers compute their weight
        gradients at once.
        """
        self.is_collecting = True
        torch._C._stash_obj_in_tls(_COLLECTING, self)  # autograd's threads of GPUs have it, too
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            torch._C._remove_obj_from_tls(_COLLECTING)
            self.is_collecting = False

    def defer(self, ctx: Any, x: Tensor, gradient: Tensor) -> None:
        """Keep what the gradients of a layer's weight and bias need."""
        x = x.detach()  # otherwise it holds the graph that made it
        counted = counted_tensors(self.meter, (x, gradient))
        self._layers.append(
            _DeferredLayer(ctx.layer, ctx.options, x, gradient, ctx.parameters, ctx.needed, counted)
        )

    def defer_graph(
        self,
        compute: Callable[[list[Tensor]], Sequence[Tensor]],
        tensors: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Keep what a compiled graph needs, which computes the gradients of parameters."""
        tensors = [x.detach() for x in tensors]
        counted = counted_tensors(self.meter, tensors)
        self._layers.append(_DeferredGraph(compute, tensors, tuple(parameters), counted))

    def parameter_ids(self) -> set[int]:
        """Return the ids of the parameters whose gradients are still to come."""
        return {id(p) for layer in self._layers for p in layer.parameters if p is not None}

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients to those of the parameters, and free the tensors kept for them."""
        n_uses = Counter(id(p) for layer in self._layers for p in layer.parameters)
        sums: dict[int, Tensor] = {}
        while self._layers:
            layer = self._layers.popleft()
            for parameter, gradient in zip(layer.parameters, layer.gradients(), strict=True):
                if parameter is None or gradient is None:
                    continue
                key = id(parameter)
                n_uses[key] -= 1
                if key in sums:  # as autograd does: sum the uses of a parameter first
                    gradient = sums.pop(key).add_(gradient)
                if n_uses[key]:
                    sums[key] = gradient
                else:
                    _accumulate(parameter, gradient)


class _DeferredLayer(NamedTuple):
    """Tensors from which W computes the gradients of a layer's weight and bias."""

    layer: Layer
    options: Any
    input: Tensor
    gradient: Tensor
    parameters: tuple[Tensor, Tensor | None]
    needed: tuple[bool, bool]
    counted: tuple[CountedTensor, ...]

    def gradients(self) -> WeightGradients:
        weight, bias = self.parameters
        with _without_autocast(weight.device):
            return _cast(
                self.layer.weight_gradients(
                    self.gradient, self.input, weight, self.needed, self.options
                ),
                (weight, bias),
            )


class _DeferredGraph(NamedTuple):
    """Tensors from which W computes the gradients of the parameters of a compiled graph."""

    compute: Callable[[list[Tensor]], Sequence[Tensor]]
    tensors: list[Tensor]
    parameters: tuple[nn.Parameter, ...]
    counted: tuple[CountedTensor, ...]

    def gradients(self) -> Sequence[Tensor]:
        with _without_autocast(self.parameters[0].device):
            return self.compute(self.tensors)


def _cast(gradients: WeightGradients, parameters: tuple[Tensor, Tensor | None]) -> WeightGradients:
    """Return gradients in the types of their parameters, as autograd does after a cast."""
    first, second = (
        g if g is None or p is None else g.to(p.dtype)
        for g, p in zip(gradients, parameters, strict=True)
    )
    return first, second


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a backward computes in the types of its tensors."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: a first gradient takes the parameter's layout."""
    sum_so_far = parameter.grad
    if sum_so_far is None:
        fits = gradient.stride() == parameter.stride()
        parameter.grad = gradient if fits else torch.empty_like(parameter).copy_(gradient)
    elif sum_so_far.is_sparse:  # from another use of the parameter
        parameter.grad = gradient + sum_so_far
    else:
        sum_so_far.add_(gradient)
    hooks: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    # Hooks that were set after the forward: otherwise the gradient is not deferred.
    for hook in tuple(hooks.values()):
        hook(parameter)


class _SplitLayer(torch.autograd.Function):
    """A layer whose backward defers the weight's part."""

    @staticmethod
    def forward(
        ctx: Any,
        store: DeferredGradients,
        layer: Layer,
        options: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.store, ctx.layer, ctx.options, ctx.parameters = store, layer, options, (weight, bias)
        ctx.needed = ctx.needs_input_grad[4:6]
        ctx.set_materialize_grads(False)
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        return layer.forward(x, weight, bias, options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        layer, options = ctx.layer, ctx.options
        input_gradient = None
        with _without_autocast(x.device):
            if ctx.needs_input_grad[3]:
                input_gradient = layer.input_gradient(gradient, x, weight, options)
            if not ctx.store.is_collecting:
                others = layer.weight_gradients(gradient, x, weight, ctx.needed, options)
                return None, None, None, input_gradient, *_cast(others, ctx.parameters), None
        ctx.store.defer(ctx, x, gradient)
        return None, None, None, input_gradient, None, None, None


class _InterceptionMode(TorchFunctionMode):
    """Runs layers that can defer through `_SplitLayer`, and everything else unchanged."""

    def __init__(self, store: DeferredGradients) -> None:
        super().__init__()
        self.store = store
        self.hooks = _saved_tensor_hooks()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or its layer."""
        kwargs = kwargs or {}
        call = None
        parse = LAYERS.get(func)
        if parse is not None:
            try:
                call = parse(*args, **kwargs)
            except (TypeError, AttributeError):  # torch accepts the arguments, or raises its error
                call = None
        if call is None or not self._can_defer(call):
            return func(*args, **kwargs)
        layer, x, weight, bias, options = call
        dtype = _autocast_type(call)
        if dtype is not None:
            x = x.to(dtype)
        folds = layer.is_matrix and x.dim() > 2
        rows = x.flatten(0, -2) if folds else x
        y: Tensor
        y = _SplitLayer.apply(self.store, layer, options, rows, weight, bias, dtype)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1]) if folds else y

    def _can_defer(self, call: LayerCall) -> bool:
        x, bias = call.input, call.bias
        return (
            is_deferrable(call.weight)
            and (
                bias is None
                or is_deferrable(bias)
                or (type(bias) in _PLAIN and not bias.requires_grad)
            )
            and type(x) in _PLAIN
            and torch.is_grad_enabled()
            and (
                _autocast_type(call) is None
                or all(t is None or t.dtype in _CAST for t in (x, call.weight, bias))
            )
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and _saved_tensor_hooks() is self.hooks
        )


def _autocast_type(call: LayerCall) -> torch.dtype | None:
    """Return the type to which autocast casts the tensors of a layer; None without a cast."""
    device = call.input.device.type
    if not call.layer.is_autocast or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def is_deferrable(parameter: object) -> bool:
    """Return whether a weight's gradient can be deferred: a floating-point parameter, no hooks."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.is_floating_point()
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _saved_tensor_hooks() -> object:
    """Return the hook that packs the tensors saved by autograd in this thread; None without."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]

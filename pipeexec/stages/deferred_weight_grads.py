"""Weight gradients that wait: the backward of I computes those of inputs, and W the rest.

While `Deferred.deferring` is active in a thread, layers (see `pipeexec.stages.splittable_layers`)
whose weight is a parameter run as an autograd function of our own. Its backward returns the
gradient of the layer's input alone, and notes what the weight's needs: the layer's input and the
gradient of its output. So the graph is let go at the end of I, and W has nothing to compute twice.

What does not wait gets its gradient in I, through autograd as ever: whatever is not in the table
of `pipeexec.stages.splittable_layers`, such as norms, recurrent layers, einsum, bmm, bilinear
layers, bags of embeddings and single samples; `torch.nn.MultiheadAttention` (torch calls the layers
in it out of our sight); weights that are
computed, frozen or complex, or have hooks; tensor subclasses and sparse gradients; and whatever
runs without gradients, under autocast, `torch.func` or `torch.compile`, or within saved-tensor
hooks of its own, as in `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeexec.stages.activation_bytes import Meter, Receipt
from pipeexec.stages.splittable_layers import LAYERS, Call, Found, Layer

__all__ = ["Deferred"]

_PLAIN = (Tensor, nn.Parameter)


class Deferred:
    """The weight gradients that one micro-batch of a stage leaves for W.

    Parameters
    ----------
    meter
        Counts the bytes held from I to W, where there is one.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter
        self.collects = False
        self._work: deque[_Work] = deque()

    def deferring(self) -> TorchFunctionMode:
        """Return a context, for F or R, in which layers are made such that they can wait."""
        return _Deferring(self)

    def collect(self, outputs: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """Go back from the outputs, and note the work of the layers on the way: that of I.

        In any other backward, as of a module that differentiates within its forward, layers do not
        wait.
        """
        self.collects = True
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self.collects = False

    def note(self, ctx: Any, x: Tensor, gradient: Tensor) -> None:
        """Keep what the weight and bias of a layer need."""
        x = x.detach()  # or it would hold the graph that made it
        meter = self.meter
        receipts = () if meter is None else (Receipt(meter, x), Receipt(meter, gradient))
        self._work.append(
            _Work(ctx.layer, ctx.options, x, gradient, ctx.parameters, ctx.wanted, receipts)
        )

    def parameters(self) -> set[int]:
        """Return the ids of the parameters whose gradients are still to come."""
        return {id(p) for work in self._work for p in work.parameters if p is not None}

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients to those of the parameters; let go of what they needed."""
        left = Counter(id(p) for work in self._work for p in work.parameters)
        sums: dict[int, Tensor] = {}
        while self._work:
            work = self._work.popleft()
            for parameter, gradient in zip(work.parameters, work.gradients(), strict=True):
                if parameter is None or gradient is None:
                    continue
                key = id(parameter)
                left[key] -= 1
                if key in sums:  # autograd, too, adds up the uses of a parameter first
                    gradient = sums.pop(key).add_(gradient)
                if left[key]:
                    sums[key] = gradient
                else:
                    _accumulate(parameter, gradient)


class _Work(NamedTuple):
    """What the gradients of a layer's weight and bias need, from I to W."""

    layer: Layer
    options: Any
    input: Tensor
    gradient: Tensor
    parameters: tuple[Tensor, Tensor | None]
    wanted: tuple[bool, bool]
    receipts: tuple[Receipt, ...]

    def gradients(self) -> Found:
        weight = self.parameters[0]
        return self.layer.of_weights(self.gradient, self.input, weight, self.wanted, self.options)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Do as autograd: a first gradient takes the parameter's layout, others are added to it."""
    before = parameter.grad
    if before is None:
        fits = gradient.stride() == parameter.stride()
        parameter.grad = gradient if fits else torch.empty_like(parameter).copy_(gradient)
    elif before.is_sparse:  # of another use of the parameter
        parameter.grad = gradient + before
    else:
        before.add_(gradient)
    hooks: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in tuple(hooks.values()):  # set since the forward, or the gradient would not be here
        hook(parameter)


class _Split(torch.autograd.Function):
    """A layer, whose backward leaves the weight's part for later."""

    @staticmethod
    def forward(
        ctx: Any,
        store: Deferred,
        layer: Layer,
        options: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.store, ctx.layer, ctx.options, ctx.parameters = store, layer, options, (weight, bias)
        ctx.wanted = ctx.needs_input_grad[4:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return layer.forward(x, weight, bias, options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        layer, options = ctx.layer, ctx.options
        of_input = layer.of_input(gradient, x, weight, options) if ctx.needs_input_grad[3] else None
        if not ctx.store.collects:
            now = layer.of_weights(gradient, x, weight, ctx.wanted, options)
            return None, None, None, of_input, *now
        ctx.store.note(ctx, x, gradient)
        return None, None, None, of_input, None, None


class _Deferring(TorchFunctionMode):
    """Runs layers that can wait through `_Split`, and everything else as it is."""

    def __init__(self, store: Deferred) -> None:
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
        read = LAYERS.get(func)
        if read is not None:
            try:
                call = read(*args, **kwargs)
            except (TypeError, AttributeError):  # torch may know better, or say what is wrong
                call = None
        if call is None or not self._can_wait(call):
            return func(*args, **kwargs)
        layer, x, weight, bias, options = call
        folds = layer.is_matrix and x.dim() > 2
        rows = x.flatten(0, -2) if folds else x
        y: Tensor
        y = _Split.apply(self.store, layer, options, rows, weight, bias)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1]) if folds else y

    def _can_wait(self, call: Call) -> bool:
        x, bias = call.input, call.bias
        return (
            _waits(call.weight)
            and (bias is None or _waits(bias) or _is_frozen(bias))
            and type(x) in _PLAIN
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and _saved_tensor_hooks() is self.hooks
        )


def _waits(parameter: Tensor) -> bool:
    """Whether the gradient of a weight can come later: it is a parameter that nobody watches."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.is_floating_point()
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _is_frozen(bias: Tensor) -> bool:
    return type(bias) in _PLAIN and not bias.requires_grad


def _saved_tensor_hooks() -> object:
    """Return what packs the tensors that autograd saves in this thread; None without hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]

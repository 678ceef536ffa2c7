"""Find the layers that break equality, each run alone on the inputs that it has in the whole model.

A layer breaks the equality of accumulation steps, replicas and stages in three ways: its output for
a sample depends on other samples of the micro-batch, it draws random numbers, or it changes from
call to call. Each module runs on the whole batch and on the micro-batches of both configurations.
A module is named if no module inside it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import LossFunction
from pipeexec.validation.small_runs import Layers

_RANDOM = (
    "draws random numbers for each micro-batch and stage, so that other micro-batches, stages or "
    "replicas draw others; compare in evaluation mode, or without it"
)


class BrokenLayer(NamedTuple):
    """A layer that breaks the equality, and why."""

    path: str  # of the module in the model, such as "2.norm"; "loss_fn" for the loss
    kind: str  # class of the module
    reason: str  # with what to do about it
    difference: float  # largest of its output, relative to the largest output


class _Call(NamedTuple):
    """Arguments of the first call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def broken_layers(
    layers: Layers, inputs: Batch, n_parts: Sequence[int], share: float
) -> tuple[list[BrokenLayer], Any]:
    """Return the layers that break equality, and the output of the whole model.

    The layers are left as they are. ``n_parts`` are the micro-batches of each configuration.
    ``share`` is the largest difference that rounding explains, as a share of the largest output.
    """
    calls, output = _calls(layers, inputs)
    n_samples = len(inputs[0] if isinstance(inputs, tuple) else inputs)
    broken: list[BrokenLayer] = []
    for path, module in reversed(list(_named_modules(layers))):  # modules come before their parts
        if path not in calls or any(x.path.startswith(f"{path}.") for x in broken):
            continue
        layer = _break_of(path, module, calls[path], n_samples, n_parts, share)
        broken += [layer] if layer else []
    return broken[::-1], output


def _named_modules(layers: Layers) -> list[tuple[str, nn.Module]]:
    """Return all modules by path."""
    return [
        (f"{name}.{inner}".rstrip("."), module)
        for name, layer in layers.items()
        for inner, module in layer.named_modules()
    ]


def _calls(layers: Layers, inputs: Batch) -> tuple[Mapping[str, _Call], Any]:
    """Return the arguments of the first call of each module, and the output of the last layer."""
    calls: dict[str, _Call] = {}
    copies = copy.deepcopy(layers)
    for path, module in _named_modules(copies):

        def keep(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            """Keep copies, as a module may change its inputs in place."""
            calls.setdefault(path, _Call(*pytree.tree_map(_copy, (args, kwargs))))

        module.register_forward_pre_hook(keep, with_kwargs=True)
    value: Any = inputs
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for layer in copies.values():
            value = layer(*value) if isinstance(value, tuple) else layer(value)
    return calls, value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _break_of(
    path: str,
    module: nn.Module,
    call: _Call,
    n_samples: int,
    n_parts: Sequence[int],
    share: float,
) -> BrokenLayer | None:
    """Return how a module breaks equality, or None if it does not alone."""

    def broken(first: list[Tensor], second: list[Tensor], reason: str) -> BrokenLayer | None:
        difference = _difference(first, second)
        kind = type(module).__name__
        return BrokenLayer(path, kind, reason, difference) if difference > share else None

    once = copy.deepcopy(module)
    first, again = (_outputs(once, [call], seed=0) for _ in range(2))
    other_seed = _outputs(copy.deepcopy(module), [call], seed=1)
    result = broken(first, other_seed, _RANDOM) or broken(
        first, again, "its output changes from call to call"
    )
    if result:
        return result
    split = [[_part(call, n_samples, k, n) for k in range(n)] for n in n_parts]
    try:
        joined = [_outputs(copy.deepcopy(module), calls, seed=0) for calls in split]
    except RuntimeError:  # an argument with as many rows as samples, but of something else
        return None
    return broken(joined[0], joined[1], _batch_reason(module))


def _batch_reason(module: nn.Module) -> str:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            "normalizes with mean and variance of a micro-batch, which are those of other samples "
            "in other micro-batches; use GroupNorm or LayerNorm, or equal micro-batches"
        )
    return "its output for a sample depends on the other samples of the micro-batch"


def _part(call: _Call, n_samples: int, number: int, n_parts: int) -> _Call:
    """Return a call with one part of the samples of each tensor that has all of them."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != n_samples:
            return value
        return value.chunk(n_parts)[number]

    return _Call(*pytree.tree_map(part, tuple(call)))


def _outputs(module: nn.Module, calls: Sequence[_Call], *, seed: int) -> list[Tensor]:
    """Return the floating-point outputs of a module, joined over calls."""
    columns: list[list[Tensor]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for call in calls:
            args, kwargs = pytree.tree_map(_copy, (call.args, call.kwargs))
            leaves = pytree.tree_leaves(module(*args, **kwargs))
            columns.append([x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()])
    return [
        torch.cat([x if x.dim() else x[None] for x in row]) for row in zip(*columns, strict=True)
    ]


def _difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest difference of tensors, relative to the largest value of each."""
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        if x.shape != y.shape or not x.numel():
            continue
        alike = (x == y) | (x.isnan() & y.isnan())
        difference = torch.where(alike, 0.0, (x - y).abs())
        if not difference.isfinite().all():  # NaN or infinity in one of them alone
            return math.inf
        largest = torch.where(x.isfinite(), torch.maximum(x.abs(), y.abs()), 0.0).max()
        worst = max(worst, float(difference.max()) / (float(largest) or 1.0))
    return worst


def broken_loss(
    loss_fn: LossFunction, output: Any, targets: Any, n_parts: Sequence[int], share: float
) -> BrokenLayer | None:
    """Return the loss as a broken layer, if it is not that of the batch in each configuration."""
    losses = [_combined(loss_fn, output, targets, n) for n in (1, *n_parts)]
    if not math.isfinite(losses[0]):
        return None
    difference = max(abs(x - losses[0]) for x in losses) / max(abs(losses[0]), 1e-300)
    is_finite = all(map(math.isfinite, losses))
    if is_finite and difference <= share:
        return None
    sizes = " and ".join(map(str, n_parts))
    wrong = f"its mean over a batch is not the mean of its values of {sizes} equal micro-batches"
    if not is_finite:
        difference = math.inf
        wrong = (
            f"it is finite for the batch, but not for each of {sizes} equal micro-batches (a mean "
            "over no value is NaN)"
        )
    advice = "return (sum, count), such as the sum over tokens that are not masked and their number"
    kind = getattr(loss_fn.function, "__name__", type(loss_fn.function).__name__)
    return BrokenLayer("loss_fn", kind, f"{wrong}; {advice}", difference)


def _combined(loss_fn: LossFunction, output: Any, targets: Any, n_parts: int) -> float:
    """Return the loss of a batch as a pipeline combines those of its micro-batches."""
    pairs = zip(_chunks(output, n_parts), _chunks(targets, n_parts), strict=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = [loss_fn(*pair) for pair in pairs]
    total = sum(float(loss) for loss, _ in values)
    if values[0][1] is not None:
        return total / sum(float(count) for _, count in values if count is not None)
    return total / n_parts if loss_fn.reduction == "mean" else total


def _chunks(value: Any, n_parts: int) -> list[Any]:
    """Return equal parts of the samples of a tensor, or of a tuple of tensors."""
    if isinstance(value, tuple):
        return list(zip(*(x.chunk(n_parts) for x in value), strict=True))
    return list(value.chunk(n_parts))

"""One step of a configuration on CPU workers: its loss, gradients, and weights after it."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.executor.pipeline import Pipeline
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss.loss_function import Loss
from pipeexec.validation.equivalence.small_runs import SmallRun
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchNormWarning,
    LossWarning,
    NanLossWarning,
    OversubscriptionWarning,
)

#: Layers by name, in order.
Layers = OrderedDict[str, nn.Module]

#: Optimizers of the compared steps: they take parameters and a learning rate.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}

#: Warnings of steps whose causes the report names, or that concern times alone.
_EXPECTED = (BatchNormWarning, LossWarning, NanLossWarning, OversubscriptionWarning)


class StepTensors(NamedTuple):
    """Results of a step by parameter; weights after a step of each optimizer of `OPTIMIZERS`.

    Buffers are those of the first replica.
    """

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor]


def named_layers(model: object) -> Layers:
    """Return the layers of a model that stages are made of.

    They are the modules of an `nn.Sequential` or of a list, and any other module as a whole.
    """
    if isinstance(model, nn.Sequential):
        return OrderedDict(model.named_children())
    if isinstance(model, nn.Module):
        return OrderedDict(model=model)
    modules = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ArgumentTypeError(
            "model must be an nn.Sequential, a list of modules, or another nn.Module, got "
            f"{model!r:.60} ({type(model).__name__})"
        )
    return OrderedDict((str(number), module) for number, module in enumerate(modules))


def check_layers(layers: Layers, n_stages: Mapping[str, int]) -> None:
    """Raise `ArgumentError` if no parameter trains, or stages of a configuration share one.

    ``n_stages`` has the number of stages by name of the configuration.
    """
    if not any(p.requires_grad for layer in layers.values() for p in layer.parameters()):
        raise ArgumentError(
            "model has no parameter that needs a gradient, so there is no training step to "
            "compare; give a model with parameters, and do not freeze all of them"
        )
    for name, number in n_stages.items():
        owner: dict[nn.Parameter, tuple[int, str]] = {}
        for index, stage in enumerate(_stages(layers, number)):
            for path, parameter in stage.named_parameters():
                first, other = owner.setdefault(parameter, (index, path))
                if first != index:
                    raise ArgumentError(
                        f"{name}: stages {first} and {index} of {number} share a parameter, "
                        f"{other!r} and {path!r}, but stages run at the same time; give {name} one "
                        "stage (n_stages=1), or a model with separate parameters"
                    )


def to_dtype(values: Any, dtype: torch.dtype | None) -> Any:
    """Return a tensor, or a tuple of tensors, with floating-point values of a type."""
    if isinstance(values, tuple):
        return tuple(to_dtype(value, dtype) for value in values)
    is_changed = dtype is not None and isinstance(values, Tensor) and values.is_floating_point()
    return values.to(dtype) if is_changed else values


def run_step(
    layers: Layers,
    run: SmallRun,
    batch: tuple[Batch, Any],
    loss_fn: Loss,
    *,
    loss_reduction: Any,
    learning_rate: float,
    seed: int,
) -> StepTensors:
    """Run a step with each optimizer from the same weights; ``layers`` are left as they are."""
    weights = {}
    for name, optimizer in OPTIMIZERS.items():
        stages = _stages(layers, run.n_stages)
        graph = run.graph()
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            for category in _EXPECTED:
                warnings.simplefilter("ignore", category)
            torch.manual_seed(seed)
            with Pipeline(
                stages, graph, ["cpu"] * graph.n_devices, loss_fn,
                partial(optimizer, lr=learning_rate), loss_reduction=loss_reduction,
                pin_threads=False,
            ) as pipeline:  # fmt: skip
                loss = float(pipeline.step(*batch).loss)
        parameters = {path: p for stage in stages for path, p in stage.named_parameters()}
        weights[name] = {path: p.detach() for path, p in parameters.items()}
        gradients = {
            path: torch.zeros_like(p) if p.grad is None else p.grad
            for path, p in parameters.items()
            if p.requires_grad
        }
    buffers = {path: buffer for stage in stages for path, buffer in stage.named_buffers()}
    return StepTensors(loss, gradients, weights, buffers)


def _stages(layers: Layers, n_stages: int) -> list[nn.Module]:
    """Return copies of layers as stages with as many layers each, in which paths stay the same."""
    copies = list(copy.deepcopy(layers).items())
    size, rest = divmod(len(copies), n_stages)
    sizes = [size + (stage < rest) for stage in range(n_stages)]
    borders = pairwise([0, *accumulate(sizes)])
    return [nn.Sequential(OrderedDict(copies[first:end])) for first, end in borders]

"""Configurations that CPU workers can run, and one step of each: loss, gradients and weights.

They come from mappings, or are scaled down from a plan's choices.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from pipeexec.executor.pipeline import Pipeline
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchNormWarning,
    LossWarning,
    NanLossWarning,
    OversubscriptionWarning,
    PipeError,
    check_count,
    check_name,
    find_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.planning.choice import PlanChoice
from pipesim.scheduling.registry import options_of_schedules, schedule
from pipesim.scheduling.schedule import Schedule

#: Two of these can be compared.
Configuration = PlanChoice | Mapping[str, Any]

#: Keys of a mapping.
_KEYS = ("n_stages", "n_microbatches", "n_replicas", "n_chunks", "schedule", "recompute")
Recompute = Literal["never", "always", "except_last"]
#: Most devices of a pipeline, stages of a device, and replicas of a choice that is scaled down.
_MOST = 2


@dataclass(frozen=True)
class SmallRun:
    """One configuration to run."""

    schedule: str
    n_devices: int  # of a replica
    n_chunks: int  # stages of a device
    n_microbatches: int  # of a replica: accumulation steps
    n_replicas: int
    recompute: Recompute  # as `pipesim.lower` takes it

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.n_devices * self.n_chunks

    @property
    def n_parts(self) -> int:
        """Micro-batches of all replicas."""
        return self.n_microbatches * self.n_replicas

    def order(self) -> Schedule:
        """Return the schedule."""
        takes_chunks = "n_chunks" in options_of_schedules().get(self.schedule, ())
        options = {"n_chunks": self.n_chunks} if takes_chunks else {}
        return schedule(self.schedule, self.n_devices, self.n_microbatches, **options)

    def graph(self) -> TaskGraph:
        """Return the tasks of a step."""
        return lower(self.order(), recompute=self.recompute, n_replicas=self.n_replicas)

    def __str__(self) -> str:
        return (
            f"{self.schedule}, stages: {self.n_stages}, micro-batches: {self.n_microbatches}, "
            f"replicas: {self.n_replicas}, recompute: {self.recompute}"
        )


def small_runs(
    a: Configuration, b: Configuration, n_samples: int, n_layers: int
) -> tuple[SmallRun, SmallRun]:
    """Return the runs of two configurations; see `check_equivalent`."""
    if isinstance(a, PlanChoice) and isinstance(b, PlanChoice):
        return _scaled(a, b, n_samples, n_layers)
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(
                f"{name} must be a mapping such as {{'n_stages': 2, 'n_microbatches': 4}}, got "
                f"{value!r:.60} ({type(value).__name__}); or give two choices of pipesim.plan"
            )
    runs = _from_mapping("a", a, n_layers), _from_mapping("b", b, n_layers)  # type: ignore[arg-type]
    for name, run in zip("ab", runs, strict=True):
        if n_samples % run.n_parts:
            raise ArgumentError(
                f"{name}: {n_samples} samples do not divide into {run.n_parts} equal micro-batches "
                f"({run.n_microbatches} of each of {run.n_replicas} replicas); give a batch of a "
                f"multiple of {run.n_parts} samples, or other counts"
            )
    return runs


def _from_mapping(name: str, values: Mapping[str, Any], n_layers: int) -> SmallRun:
    """Return the run of a mapping, checked."""
    for key in values:
        check_name(f"key of {name}", key, _KEYS)
    counts = {
        key: check_count(f"{name}: {key}", values.get(key, 1))
        for key in ("n_stages", "n_microbatches", "n_replicas", "n_chunks")
    }
    n_stages, n_chunks = counts["n_stages"], counts["n_chunks"]
    _check_stages(name, n_stages, n_layers)
    if n_stages % n_chunks:
        raise ArgumentError(
            f"{name}: {n_stages} stages do not divide into {n_chunks} chunks of each device"
        )
    kind = values.get("schedule", "interleaved_1f1b" if n_chunks > 1 else "1f1b")
    recompute = values.get("recompute", "never")
    run = SmallRun(
        find_name(f"{name}: schedule", kind, options_of_schedules()),
        n_stages // n_chunks,
        n_chunks,
        counts["n_microbatches"],
        counts["n_replicas"],
        cast("Recompute", check_name(f"{name}: recompute", recompute, get_args(Recompute))),
    )
    _check_updates(name, run)
    actual = run.order().n_stages
    if actual != n_stages:
        raise ArgumentError(
            f"{name}: {run.schedule} has {actual} stages on {run.n_devices} devices, not "
            f"{n_stages}; give n_chunks, the stages of each device"
        )
    return run


def _check_updates(name: str, run: SmallRun) -> None:
    """Raise `ArgumentError` if a schedule updates weights within a step, later, or in slices."""
    order = run.order()
    if order.n_batches > 1 or order.weight_versions != "one":
        raise ArgumentError(
            f"{name}: {run.schedule} computes gradients with older weights or updates them within "
            "a step, so it is not equal to another schedule even in theory; give one that updates "
            "weights once, at the end, such as '1f1b'"
        )
    if order.n_slices > 1:
        raise ArgumentError(
            f"{name}: {run.schedule} runs slices of sequences, and layers are compared on whole "
            "micro-batches; give one of whole micro-batches, such as '1f1b', and compare slices "
            "with a step of px.Pipeline"
        )


def _check_stages(name: str, n_stages: int, n_layers: int) -> None:
    """Raise `ArgumentError` unless each stage gets a layer."""
    if n_stages > n_layers:
        raise ArgumentError(
            f"{name} has {n_stages} stages, but the model has {n_layers} layers to divide; give an "
            "nn.Sequential, or a list of modules, with at least as many"
        )


def _scaled(
    a: PlanChoice, b: PlanChoice, n_samples: int, n_layers: int
) -> tuple[SmallRun, SmallRun]:
    """Return runs of two choices that are as small as their difference allows.

    The largest micro-batches are taken whose sizes have the same ratio as those of the choices.
    """
    common = gcd(a.microbatch_size, b.microbatch_size)
    for unit in range(n_samples, 0, -1):
        first, second = (
            _small(x, unit * x.microbatch_size // common, n_samples, n_layers) for x in (a, b)
        )
        if first and second:
            return first, second
    least = [min(x.data_parallel, _MOST) * min(x.pipeline_parallel, _MOST) for x in (a, b)]
    sizes = [x.microbatch_size // common * n for x, n in zip((a, b), least, strict=True)]
    multiple = sizes[0] * sizes[1] // gcd(*sizes)
    raise ArgumentError(
        f"{n_samples} samples do not divide into equal micro-batches for both configurations, of "
        f"{a.microbatch_size} and {b.microbatch_size} sequences a micro-batch; give a batch of "
        f"{2 * multiple} samples, or a multiple"
    )


def _small(choice: PlanChoice, size: int, n_samples: int, n_layers: int) -> SmallRun | None:
    """Return a small run with micro-batches of ``size`` samples; None if there is none."""
    n_devices, n_chunks = min(choice.pipeline_parallel, _MOST), min(choice.n_chunks, _MOST)
    _check_stages(choice.schedule, n_devices * n_chunks, n_layers)
    n_replicas = min(choice.data_parallel, _MOST)
    n_microbatches, rest = divmod(n_samples, size * n_replicas)
    if rest or n_microbatches < min(choice.n_microbatches, 2):
        return None
    recompute: Recompute = "never" if choice.recompute == "none" else "always"
    run = SmallRun(choice.schedule, n_devices, n_chunks, n_microbatches, n_replicas, recompute)
    try:
        order = run.order()
    except PipeError:  # a schedule whose micro-batches must divide by its devices, for example
        return None
    _check_updates(choice.schedule, run)
    return run if order.n_stages == run.n_stages else None


# Steps

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

"""Checks of a pipeline's arguments, of the batch of a step, and of its loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device
from pipeexec.devices.remote import RemoteDevice
from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.stage_like import StageLike
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    LossWarning,
    NanLossWarning,
    RandomnessWarning,
    number,
)
from pipesim.graph.graph import TaskGraph

__all__ = [
    "check_graph",
    "check_stages",
    "check_step_batch",
    "check_timeout",
    "warn_of_loss",
    "warn_of_nan",
    "warn_of_randomness",
]


def check_timeout(timeout: float | None) -> None:
    """Raise unless a timeout is a positive number of seconds, or None."""
    seconds = number(timeout)
    if timeout is not None and (seconds is None or not 0 < seconds < float("inf")):
        raise ArgumentError(
            "timeout must be a positive number of seconds, or None to wait for ever, got "
            f"{timeout!r}"
        )


def check_graph(graph: TaskGraph) -> None:
    """Raise unless a graph is a `TaskGraph`."""
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"Pipeline runs a TaskGraph, got {type(graph).__name__}; lower the schedule first"
        )


def check_stages(
    stages: Sequence[nn.Module | None], graph: TaskGraph, is_local: Sequence[bool]
) -> None:
    """Raise unless each stage has one module, and no two modules share parameters.

    ``is_local`` marks the copies of stages that run in this process, which need a module.
    """
    n = graph.n_stages
    if len(stages) != n or not all(
        isinstance(stage, nn.Module) or (stage is None and len(set(is_local)) > 1)
        for stage in stages
    ):
        raise ArgumentError(
            f"the graph has {graph.n_stages} stages, got {len(stages)} "
            f"({', '.join(type(s).__name__ for s in stages)}); give one nn.Module a stage"
        )
    for slot in np.flatnonzero(is_local).tolist():
        if stages[slot % n] is None:
            replica = f" of replica {slot // n}" if graph.n_replicas > 1 else ""
            device = graph.homes.ravel()[slot]
            raise ArgumentError(
                f"stage {slot % n}{replica} is on device {device} of this process, but its module "
                "is None; give its nn.Module"
            )
    owner: dict[nn.Parameter, int] = {}
    for index, module in enumerate(stages):
        for name, parameter in () if module is None else module.named_parameters():
            if owner.setdefault(parameter, index) != index:
                raise ArgumentError(
                    f"stages {owner[parameter]} and {index} share the parameter {name!r}; stages "
                    "run at the same time, so each needs separate parameters"
                )


def check_step_batch(
    inputs: Batch | None, targets: Any, graph: TaskGraph, devices: Sequence[Device]
) -> None:
    """Raise unless a step can train on a batch, and this process has the tensors that it needs."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ExecutionError(
            "a step trains, but was called under torch.no_grad() or torch.inference_mode(); "
            "call it outside"
        )
    check_batch(inputs, targets)
    for name, batch, stage in (("inputs", inputs, 0), ("targets", targets, -1)):
        where = {devices[d] for d in graph.homes[:, stage]}
        if batch is None and not all(isinstance(d, RemoteDevice) for d in where):
            raise ArgumentError(
                f"{name} are None, but this process has the "
                f"{'first' if stage == 0 else 'last'} stage; give them here"
            )


def warn_of_loss(loss: StepLoss, *, returns_count: bool | None) -> None:
    """Warn if the losses of micro-batches do not combine to the loss of several at once."""
    difference = loss.difference()
    if difference is not None:
        warnings.warn(
            f"the losses of {difference.n_microbatches} micro-batches combine to "
            f"{difference.combined:.6g}, but computed at once their loss is "
            f"{difference.whole:.6g}, and gradients at the output differ by "
            f"{difference.gradients:.2g} of their norm: a step is not one of the whole batch; "
            + (
                "loss_fn returns (sum, count), and both must add up over micro-batches, but "
                f"counts add up to {difference.combined_count:g}, and at once the count is "
                f"{difference.whole_count:g}"
                if returns_count
                else "if the loss is a mean over anything else than samples (unmasked tokens, "
                "class weights), let loss_fn return the tuple (sum, count), if it is a sum, "
                "give loss_reduction='sum'"
            ),
            LossWarning,
            stacklevel=5,
        )


def warn_of_nan(microbatches: Iterable[int], step: int) -> None:
    """Warn of micro-batches whose loss is NaN."""
    for microbatch in microbatches:
        warnings.warn(
            f"the loss of micro-batch {microbatch} is NaN (step {step}); "
            "look at its inputs, or lower the learning rate",
            NanLossWarning,
            stacklevel=5,
        )


def warn_of_randomness(stages: Sequence[StageLike], before: Tensor) -> None:
    """Warn if a stage has used the generator of the process since the state ``before``.

    Stages of several threads use that generator in no fixed order.
    """
    if torch.equal(before, torch.get_rng_state()):
        return
    for stage in stages:
        stage.is_random = dict.fromkeys((True, False), True)
    warnings.warn(
        "a stage drew random numbers that it did not draw in its first forward; this step "
        "cannot be repeated, later ones can",
        RandomnessWarning,
        stacklevel=5,
    )

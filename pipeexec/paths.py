"""Paths of a bidirectional pipeline: copies of the stages, and the sum of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipesim.errors import ArgumentError
from pipesim.graph import TaskGraph
from pipesim.ops import Op

__all__ = ["check_hooks", "copies", "follow", "paths_of_microbatches", "reduce_gradients"]


def paths_of_microbatches(graph: TaskGraph) -> NDArray[np.int64]:
    """Return the path that each micro-batch takes.

    Raises
    ------
    ArgumentError
        If replicas take the same micro-batches, as data-parallel ones do.
    """
    first = np.flatnonzero((graph.op == Op.F) & (graph.stage == 0))
    if len(first) > graph.n_microbatches:
        raise ArgumentError(
            f"the graph has {graph.n_replicas} replicas, some of them data-parallel, which can be "
            "simulated but not run yet; lower the schedule with n_replicas=1"
        )
    path = np.zeros(graph.n_microbatches, dtype=np.int64)
    path[graph.microbatch[first]] = graph.replica[first]
    return path


def copies(stages: Sequence[nn.Module], n_copies: int) -> list[nn.Module]:
    """Return copies of all stages, one set after the other.

    Raises
    ------
    ArgumentError
        If a stage cannot be copied.
    """
    found = []
    for index in list(range(len(stages))) * n_copies:
        try:
            found.append(copy.deepcopy(stages[index]))
        except Exception as error:  # whatever a module of the user's may raise
            raise ArgumentError(
                f"stage {index} cannot be copied ({type(error).__name__}: {error}), as each path "
                "of a bidirectional placement needs; keep locks and results out of its attributes"
            ) from error
    return found


def check_hooks(modules: Sequence[nn.Module], n_stages: int) -> None:
    """Raise `ArgumentError` for hooks on parameters, which neither copies nor versions have."""
    for index, module in enumerate(modules[:n_stages]):
        for name, p in module.named_parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ArgumentError(
                    f"parameter {name!r} of stage {index} has hooks, which a bidirectional "
                    "placement or several mini-batches would run for some micro-batches only; "
                    "remove them, or run another schedule"
                )


@torch.no_grad()
def follow(modules: Sequence[nn.Module], n_stages: int) -> None:
    """Give copies of stages the parameters, buffers and modes that the stages have now."""
    for index in range(n_stages, len(modules)):
        stage, copied = modules[index % n_stages], modules[index]
        for mine, its in zip(copied.modules(), stage.modules(), strict=True):
            mine.training = its.training
        for buffer, its_buffer in zip(copied.buffers(), stage.buffers(), strict=True):
            buffer.copy_(its_buffer)
        for parameter, its_parameter in zip(copied.parameters(), stage.parameters(), strict=True):
            parameter.copy_(its_parameter)
            parameter.requires_grad_(its_parameter.requires_grad)


@torch.no_grad()
def reduce_gradients(modules: Sequence[nn.Module]) -> None:
    """Give each copy of a stage the sum of all copies' gradients."""
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            continue
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient.to(total.device)
        for parameter in parameters:
            parameter.grad = total.to(parameter.device, copy=parameter is not parameters[0])

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

__all__ = ["copies", "follow", "paths_of_microbatches", "reduce_gradients"]


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
    """Return copies of all stages, one set after the other."""
    return [copy.deepcopy(stage) for _ in range(n_copies) for stage in stages]


@torch.no_grad()
def follow(modules: Sequence[nn.Module], n_stages: int) -> None:
    """Give copies of stages the parameters, and the mode, that the stages have now."""
    for index in range(n_stages, len(modules)):
        stage, module = modules[index % n_stages], modules[index]
        module.train(stage.training)
        for mine, its in zip(module.parameters(), stage.parameters(), strict=True):
            mine.copy_(its)
            mine.requires_grad_(its.requires_grad)


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

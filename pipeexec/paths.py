"""Paths of a bidirectional pipeline: copies of the stages, and the sum of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup

from pipesim.errors import ArgumentError
from pipesim.graph import TaskGraph
from pipesim.ops import Op

__all__ = [
    "Elsewhere",
    "check_hooks",
    "copies",
    "follow",
    "paths_of_microbatches",
    "reduce_gradients",
]


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


class Elsewhere(nn.Module):
    """Stands for a stage of another process: it has no parameters, and does not run."""


def copies(
    stages: Sequence[nn.Module | None], n_copies: int, here: Sequence[bool]
) -> list[nn.Module]:
    """Return copies of all stages, one set after the other; of those that are not here, none.

    Raises
    ------
    ArgumentError
        If a stage cannot be copied.
    """
    found: list[nn.Module] = []
    for index, is_here in zip(list(range(len(stages))) * n_copies, here, strict=True):
        if not is_here:
            found.append(Elsewhere())
            continue
        try:
            found.append(copy.deepcopy(_given(stages, index)))
        except Exception as error:  # whatever a module of the user's may raise
            raise ArgumentError(
                f"stage {index} cannot be copied ({type(error).__name__}: {error}), as each path "
                "of a bidirectional placement needs; keep locks and results out of its attributes"
            ) from error
    return found


def _given(stages: Sequence[nn.Module | None], index: int) -> nn.Module:
    stage = stages[index]
    if stage is None:
        raise TypeError("this process was given None for it")
    return stage


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
        if isinstance(stage, Elsewhere) or isinstance(copied, Elsewhere):
            continue  # its optimizer does the same to the same gradients
        for mine, its in zip(copied.modules(), stage.modules(), strict=True):
            mine.training = its.training
        for buffer, its_buffer in zip(copied.buffers(), stage.buffers(), strict=True):
            buffer.copy_(its_buffer)
        for parameter, its_parameter in zip(copied.parameters(), stage.parameters(), strict=True):
            parameter.copy_(its_parameter)
            parameter.requires_grad_(its_parameter.requires_grad)


@torch.no_grad()
def reduce_gradients(modules: Sequence[nn.Module], group: ProcessGroup | None = None) -> None:
    """Give each copy of a stage the sum of all copies' gradients, over the group's processes."""
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            continue
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient.to(total.device)
        for parameter in parameters:
            parameter.grad = total.to(parameter.device, copy=parameter is not parameters[0])
    if group is not None:
        _reduce_over(group, modules)


def _reduce_over(group: ProcessGroup, modules: Sequence[nn.Module]) -> None:
    """Sum the gradients of equal modules over processes; one without a gradient adds none."""
    lists = [list(module.parameters()) for module in modules]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in lists[0]]
    if not gradients:
        return
    there = torch.tensor([float(p.grad is not None) for p in lists[0]], dtype=gradients[0].dtype)
    flat = torch.cat(
        [*(gradient.reshape(-1) for gradient in gradients), there.to(gradients[0].device)]
    )
    dist.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(gradient.numel() for gradient in gradients), len(there)])
    for total, count, *parameters in zip(sums, counts.tolist(), *lists, strict=True):
        for parameter in parameters if count else ():
            parameter.grad = total.view_as(parameter).to(parameter, copy=True)

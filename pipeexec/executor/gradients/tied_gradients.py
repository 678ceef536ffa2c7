"""Sum the gradients of the copies of tied parameters (REDUCE_TIED)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pipeexec.data_parallel.gradient_reduction import sum_gradients
from pipeexec.executor.gradients.gradient_sync import (
    assign_reduced_gradients,
    copy_sums,
    gradient_bytes,
)
from pipeexec.executor.planned_task import PlannedTask
from pipesim.errors import ExecutionError

if TYPE_CHECKING:
    from pipeexec.executor.step import Step


@torch.no_grad()
def reduce_tied_gradients(step: Step, task: PlannedTask) -> None:
    """Sum the gradients of a group's parameters over its stages of one replica, in all processes.

    All copies get the same sum, to the last bit. A copy without a gradient adds nothing, and gets
    the sum too.

    Raises
    ------
    ExecutionError
        If a copy was frozen after the pipeline was made, and another one was not.
    """
    for slot in task.copies:
        assign_reduced_gradients(step, slot)
    stages = step.graph.tied[task.part]
    rows = [step.gradients.tied_parameters(slot, stages) for slot in task.copies]
    gradients = [[parameter.grad for parameter in row] for row in rows]
    for gradient in (x for row in gradients for x in row if x is not None):
        task.device.adopt(gradient, task.stream)  # computed on another stream
    graph = step.graph
    members = graph.collectives[int(graph.group[task.id])]
    slots = (graph.replica[members] * graph.n_stages + graph.stage[members]).tolist()
    for slot, present in zip(task.copies, gradients, strict=True):
        if slot in slots and len(members) > 1:
            nbytes = sum(gradient_bytes(x) for x in present if x is not None)
            step.events.nbytes[int(members[slots.index(slot)])] = nbytes
    sums = sum_gradients(gradients, rows[0], task.group)
    for number, row in enumerate(rows):
        totals = sums if number == 0 else copy_sums(sums, gradients[number], row)
        for parameter, total in zip(row, totals, strict=True):
            if total is not None and not parameter.requires_grad:
                raise _frozen_copy(step, task.copies[number], stages)
            parameter.grad = total


def _frozen_copy(step: Step, slot: int, stages: Sequence[int]) -> ExecutionError:
    own = slot % step.graph.n_stages
    others = ", ".join(str(stage) for stage in stages if stage != own)
    return ExecutionError(
        f"stage {own} has a copy of a tied parameter with requires_grad=False, while that of stage "
        f"{others} is trained: copies would not stay equal; set requires_grad of all copies alike, "
        "which are in pipeline.modules"
    )

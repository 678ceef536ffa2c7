"""Tied parameters: several stages have copies of one parameter, which must stay equal.

REDUCE_TIED sums the gradients of the copies. `TiedCopies` keeps their values equal if these change
between steps. A state that is loaded must have one value for all copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.gradient_reduction import sum_gradients
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import assign_reduced_gradients, copy_sums, gradient_bytes
from pipeexec.executor.named_state import StateNames
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.splitting.split_facts import TiedGroup, tied_parameter
from pipesim.errors import ArgumentError, ExecutionError, PipeError

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


class TiedCopies:
    """Copies of tied parameters in this process.

    Optimizers change all copies alike. Between steps, a user may load weights into the model, whose
    parameter is the first one: the others then take its values.

    Parameters
    ----------
    tied
        Groups of pairs of stage, and name in the stage's module.
    modules
        Modules of the stages.
    """

    def __init__(self, tied: Sequence[TiedGroup], modules: Sequence[nn.Module]) -> None:
        self._tied, self._modules = tied, modules
        self._versions: list[int] = []

    def _groups(self) -> list[list[nn.Parameter]]:
        return [
            [
                tied_parameter(self._modules[stage], name)
                for stage, name in group
                if not isinstance(self._modules[stage], RemoteStage)
            ]
            for group in self._tied
        ]

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the first parameter of each group to the others, if one has changed since `note`."""
        groups = self._groups()
        if self._versions == _versions(groups):
            return
        for group in groups:
            for parameter in group[1:]:
                parameter.copy_(group[0])
        self._versions = _versions(groups)

    def note(self) -> None:
        """Take the values as they are for equal, as they are after a step."""
        self._versions = _versions(self._groups())


def _versions(groups: Sequence[Sequence[nn.Parameter]]) -> list[int]:
    return [parameter._version for group in groups for parameter in group]


# Values of a state

#: Key and checksum of each local copy, by group; the key is empty for a value that stays.
TiedValues = list[list[tuple[str, str]]]


def tied_values(
    names: StateNames,
    tied: Sequence[TiedGroup],
    modules: Sequence[nn.Module],
    state: Mapping[str, Any],
) -> TiedValues:
    """Return keys and checksums of the values that local copies have after a state is loaded."""
    rows: TiedValues = []
    for group in tied:
        rows.append([])
        for stage, name in group:
            if not isinstance(modules[stage], RemoteStage):
                parameter = tied_parameter(modules[stage], name)
                key = names.find(state, _key(names, stage, parameter)) or ""
                value = state[key] if key else parameter
                rows[-1].append((key, _checksum(value, parameter.dtype)))
    return rows


def _key(names: StateNames, stage: int, parameter: nn.Parameter) -> str:
    """Return the key of a parameter of a stage."""
    parameters = names.modules[stage].named_parameters()
    return next(names.key(stage, name) for name, own in parameters if own is parameter)


def _checksum(value: Tensor, dtype: torch.dtype) -> str:
    """Return a checksum of a tensor that is loaded into one of a type."""
    flat = value.detach().to("cpu", dtype).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def check_tied_values(
    tied: Sequence[TiedGroup],
    rows: TiedValues,
    processes: Processes | None,
    *,
    error: type[PipeError] = ArgumentError,
    label: str = "the state",
) -> None:
    """Raise unless copies of each tied parameter get the same value; all processes must call this.

    Raises
    ------
    error
        Names the copies and their keys.
    """
    if not tied:
        return
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        pairs = [(key, checksum) for table in tables for key, checksum in table[index]]
        if len({checksum for _, checksum in pairs}) > 1:
            copies = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
            keys = " and ".join(dict.fromkeys(repr(key) for key, _ in pairs if key))
            raise error(
                f"{copies} are tied, but {label} has different values for them ({keys}): it is "
                "that of a model without tied parameters; make its values equal, or split such a "
                "model"
            )

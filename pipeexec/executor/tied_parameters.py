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
from pipeexec.splitting.split_facts import TiedGroup, first_tied_stage, split_facts, tied_parameter
from pipesim.errors import ArgumentError, ExecutionError, PipeError
from pipesim.graph.graph import TaskGraph

if TYPE_CHECKING:
    from pipeexec.executor.step import Step


#: A group of tied parameters, for messages.
_EXAMPLE = "[(0, 'embedding.weight'), (3, 'head.weight')]"


def checked_tied_parameters(
    tied: Sequence[Sequence[tuple[int, str]]] | None, stages: Sequence[nn.Module | None]
) -> tuple[TiedGroup, ...]:
    """Return the groups of tied parameters: those of split stages, or those that are given."""
    facts = split_facts(stages)
    if facts is not None:
        if tied is not None:
            raise ArgumentError("tied is for stages cut by hand; those of pipeexec.split know it")
        return facts.tied
    if tied is None and (index := first_tied_stage(stages)) is not None:
        raise ArgumentError(
            f"stage {index} has a stage of pipeexec.split inside, with a copy of a tied parameter, "
            "which other stages have too; give the stages of pipeexec.split themselves, which may "
            "be compiled or DistributedDataParallel, or name the copies in Pipeline(tied=...)"
        )
    groups = []
    for group in () if tied is None else _listed(tied):
        pairs = [_pair(pair, stages) for pair in _listed(group)]
        if len(pairs) < 2 or len({stage for stage, _ in pairs}) < len(pairs):
            raise ArgumentError(
                f"tied has the group {group!r:.80}; a group has the copies of one parameter in two "
                f"or more different stages, such as {_EXAMPLE}"
            )
        groups.append(tuple(sorted(pairs)))
    return tuple(groups)


def _listed(values: object) -> list[object]:
    if isinstance(values, (list, tuple)):
        return list(values)
    raise ArgumentError(f"tied must be groups such as [{_EXAMPLE}], got {values!r:.80}")


def _pair(pair: object, stages: Sequence[nn.Module | None]) -> tuple[int, str]:
    match pair:
        case (int(stage), str(name)) if not isinstance(stage, bool):
            pass
        case _:
            raise ArgumentError(
                f"tied names {pair!r:.80}; give a stage and a parameter's name in it: {_EXAMPLE}"
            )
    if not 0 <= stage < len(stages):
        raise ArgumentError(f"tied names stage {stage}; there are stages 0..{len(stages) - 1}")
    module = stages[stage]
    names = None if module is None else [x for x, _ in module.named_parameters()]
    if names is not None and name not in names:
        raise ArgumentError(
            f"tied names {name!r} of stage {stage}, which has no such parameter, but "
            f"{', '.join(names[:10]) or 'none'}"
        )
    return stage, name


def check_tied_graph(tied: Sequence[TiedGroup], graph: TaskGraph) -> None:
    """Raise `ArgumentError` unless a graph adds the gradients of just the stages that are tied."""
    if graph.forward_only:
        return
    summed = sorted(set(graph.tied))
    needed = sorted({tuple(sorted(stage for stage, _ in group)) for group in tied})
    for group in needed:
        if group not in summed:
            raise ArgumentError(
                f"stages {' and '.join(map(str, group))} have copies of one parameter (a tied "
                "embedding, for example), whose gradients the graph does not add; lower the "
                f"schedule with tied={needed!r}"
            )
    for group in summed:
        if group not in needed:
            raise ArgumentError(
                f"the graph adds gradients of stages {' and '.join(map(str, group))} "
                f"(tied={summed!r}), but no parameter of theirs is tied; lower with "
                f"tied={needed!r}, or name the parameters, such as "
                f"Pipeline(..., tied=[{_EXAMPLE}])"
            )
    if len(summed) < len(graph.tied):
        raise ArgumentError(
            f"the graph adds gradients of the same stages twice (tied={list(graph.tied)!r}); one "
            f"group is for all parameters that they share: lower with tied={summed!r}"
        )


def check_copies(
    tied: Sequence[TiedGroup], modules: Sequence[nn.Module], processes: Processes | None
) -> None:
    """Check that the copies of a tied parameter are equal when a pipeline is made."""
    rows = [
        ["" if isinstance(modules[s], RemoteStage) else _summary(modules[s], name)
         for s, name in group]
        for group in tied
    ]  # fmt: skip
    if not tied:
        return
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        present = {text for table in tables for text in table[index] if text}
        texts = {text.partition(" ")[0] for text in present}, present
        for kind, different in zip(("shapes, types or flags", "values"), texts, strict=True):
            if len(different) > 1:
                names = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
                raise ArgumentError(
                    f"{names} are tied, but have different {kind}; copies of one parameter begin "
                    "equal: copy the values of the first one to the others"
                )


def _summary(module: nn.Module, name: str) -> str:
    """Return shape, type and flag of a parameter, and a checksum of its values."""
    parameter = tied_parameter(module, name)
    shape = "x".join(map(str, parameter.shape))
    digest = _checksum(parameter, parameter.dtype)[:16]
    return f"{shape}/{parameter.dtype}/{parameter.requires_grad} {digest}"


def check_optimizers_of_copies(
    tied: Sequence[TiedGroup],
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer | None],
    processes: Processes | None,
) -> None:
    """Check that the copies of a tied parameter are trained alike, so that they stay equal."""
    if not tied:
        return
    rows = [
        [None if isinstance(modules[s], RemoteStage)
         else _training(optimizers[s], tied_parameter(modules[s], name)) for s, name in group]
        for group in tied
    ]  # fmt: skip
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        columns = zip(*(table[index] for table in tables), strict=True)
        texts = [next(x for x in column if x is not None) for column in columns]
        different = next((k for k, text in enumerate(texts) if text != texts[0]), None)
        if different is not None:
            (first, name), (stage, other) = group[0], group[different]
            raise ArgumentError(
                f"{name!r} of stage {first} and {other!r} of stage {stage} are tied, but trained "
                f"differently, so that they would not stay equal: {texts[0]}, and "
                f"{texts[different]}; put all copies in groups of equal options"
            )


def _training(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> str:
    """Return an optimizer's class, and the options of the group that has a parameter."""
    for group in () if optimizer is None else optimizer.param_groups:
        if any(x is parameter for x in group["params"]):
            options = (
                f"{key}={x.tolist() if isinstance(x, torch.Tensor) else x}"
                for key, x in sorted(group.items())
                if key not in ("params", "param_names", "foreach", "fused", "capturable")
            )
            return f"{type(optimizer).__name__}({', '.join(options)})"
    return "no optimizer"


@torch.no_grad()
def reduce_tied_gradients(step: Step, task: PlannedTask) -> None:
    """Sum the gradients of a group's parameters over its stages of one replica, in all processes.

    All copies get the same sum, to the last bit. A copy without a gradient adds nothing, and gets
    the sum too.
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


def clear_later_copies(tied: Sequence[TiedGroup], modules: Sequence[nn.Module]) -> None:
    """Clear the gradients of the copies of tied parameters after the first of each group."""
    for stage, name in (pair for group in tied for pair in group[1:]):
        if not isinstance(modules[stage], RemoteStage):
            tied_parameter(modules[stage], name).grad = None


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
                parameters = names.modules[stage].named_parameters()
                own_name = next(own for own, x in parameters if x is parameter)
                key = names.find(state, names.key(stage, own_name)) or ""
                value = state[key] if key else parameter
                rows[-1].append((key, _checksum(value, parameter.dtype)))
    return rows


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
    """Raise ``error`` unless copies of each tied parameter get the same value.

    All processes must call this.
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

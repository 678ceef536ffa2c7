"""Tied parameters: several stages have copies of one parameter, which stay equal.

Copies begin equal, are trained by optimizers of equal options, and get the same sum of gradients
(REDUCE_TIED). Between steps, a user may load weights into the model, whose parameter is the first
copy: the others then take its values. A state that is loaded must have one value for all copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.gradient_reduction import sum_gradients
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import assign_reduced_gradients, copy_sums, gradient_bytes
from pipeexec.executor.named_state import StateNames
from pipeexec.executor.op_handlers import for_all_members
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.sharding import sharding_argument
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.splitting.split_facts import SplitFacts, TiedGroup, tied_parameter
from pipeexec.splitting.split_stage import SplitStage
from pipesim.errors import ArgumentError, ExecutionError, PipeError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

#: A group of tied parameters, for messages.
_EXAMPLE = "[(0, 'embedding.weight'), (3, 'head.weight')]"

#: Key and checksum of each local copy, by group; the key is empty for a value that stays.
TiedValues = list[list[tuple[str, str]]]


class TiedParameters(StepPart):
    """Groups of tied parameters: those of split stages, or ``tied`` of `Pipeline`."""

    def __init__(
        self,
        tied: Sequence[Sequence[tuple[int, str]]] | None,
        stages: Sequence[nn.Module | None],
        facts: SplitFacts | None,
    ) -> None:
        if facts is not None and tied is not None:
            raise ArgumentError("tied is for stages cut by hand; those of pipeexec.split know it")
        self.groups = _checked_groups(tied, stages) if facts is None else facts.tied
        self._modules: Sequence[nn.Module] = ()
        self._adds_up = False
        self._versions: list[int] = []  # of copies that are equal

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handler of REDUCE_TIED."""
        return {Op.REDUCE_TIED: for_all_members(self._reduce)}

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless a graph adds the gradients of just these groups."""
        if self.groups and (what := sharding_argument(graph)) is not None:
            raise ArgumentError(
                f"{what}, but stages have tied parameters: their copies have other shares in each "
                "stage, so that gradients of copies cannot be summed; lower without it"
            )
        if graph.forward_only:
            return
        summed = sorted(set(graph.tied))
        needed = sorted({tuple(sorted(stage for stage, _ in group)) for group in self.groups})
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
                f"the graph adds gradients of the same stages twice (tied={list(graph.tied)!r}); "
                f"one group is for all parameters that they share: lower with tied={summed!r}"
            )

    def agree(self, model: PlacedModel, processes: Processes) -> None:
        """Check that every process ties the same parameters."""
        processes.agree("tied", repr(self.groups))

    def place(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Check that copies begin equal, and are trained alike, so that they stay equal."""
        self._modules, self._adds_up = model.modules, not model.zero_grad
        if not self.groups:
            return
        for group, texts in self._texts(model, lambda _, parameter: _summary(parameter)):
            kinds = zip(("shapes, types or flags", "values"), zip(*texts, strict=True), strict=True)
            for kind, facts in kinds:
                if len(set(facts)) > 1:
                    names = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
                    raise ArgumentError(
                        f"{names} are tied, but have different {kind}; copies of one parameter "
                        "begin equal: copy the values of the first one to the others"
                    )
        for group, texts in self._texts(model, lambda s, x: _training(model.optimizers[s], x)):
            different = next((k for k, text in enumerate(texts) if text != texts[0]), None)
            if different is not None:
                (first, name), (stage, other) = group[0], group[different]
                raise ArgumentError(
                    f"{name!r} of stage {first} and {other!r} of stage {stage} are tied, but "
                    f"trained differently, so that they would not stay equal: {texts[0]}, and "
                    f"{texts[different]}; put all copies in groups of equal options"
                )

    def _texts(
        self, model: PlacedModel, text: Callable[[int, nn.Parameter], Any]
    ) -> Iterator[tuple[TiedGroup, list[Any]]]:
        """Yield each group with a text of each copy, from the process that has it."""
        rows = [
            [None if isinstance(model.modules[s], RemoteStage)
             else text(s, tied_parameter(model.modules[s], name)) for s, name in group]
            for group in self.groups
        ]  # fmt: skip
        tables = [rows] if model.processes is None else model.processes.share(rows)
        for index, group in enumerate(self.groups):
            columns = zip(*(table[index] for table in tables), strict=True)
            yield group, [next(x for x in column if x is not None) for column in columns]

    def _copies(self) -> list[list[nn.Parameter]]:
        """Return the local copies of each group."""
        return [
            [
                tied_parameter(self._modules[stage], name)
                for stage, name in group
                if not isinstance(self._modules[stage], RemoteStage)
            ]
            for group in self.groups
        ]

    @torch.no_grad()
    def sync(self, step: Step) -> None:
        """Copy the first parameter of each group to the others, if one has changed since a step."""
        groups = self._copies()
        if self._versions == _versions(groups):
            return
        for group in groups:
            for parameter in group[1:]:
                parameter.copy_(group[0])
        self._versions = _versions(groups)

    def before(self, step: Step) -> None:
        """Let the first copy of each group count, and have the earlier gradients of the others."""
        for stage, name in (pair for group in self.groups for pair in group[1:]):
            if not isinstance(self._modules[stage], RemoteStage):
                parameter = tied_parameter(self._modules[stage], name)
                step.gradients.uncounted.add(id(parameter))
                if self._adds_up:
                    parameter.grad = None

    def after(self, step: Step) -> None:
        """Take the values as they are for equal, as they are after a step."""
        self._versions = _versions(self._copies())

    @torch.no_grad()
    def _reduce(self, step: Step, task: PlannedTask) -> None:
        """Sum the gradients of a group over its stages of one replica, in all processes.

        All copies get the same sum, to the last bit. A copy without a gradient adds nothing, and
        gets the sum too.
        """
        graph, n = step.graph, step.graph.n_stages
        stages = graph.tied[task.part]
        own = [x for x in task.copies if x // n == task.slot // n and x % n in stages]
        for slot in own:
            assign_reduced_gradients(step, slot)
        rows = [self._parameters(step, slot, stages) for slot in own]
        gradients = [[parameter.grad for parameter in row] for row in rows]
        for gradient in (x for row in gradients for x in row if x is not None):
            task.device.adopt(gradient, task.stream)  # computed on another stream
        members = graph.collectives[int(graph.group[task.id])]
        slots = (graph.replica[members] * n + graph.stage[members]).tolist()
        for slot, present in zip(own, gradients, strict=True):
            if slot in slots and len(members) > 1:
                nbytes = sum(gradient_bytes(x) for x in present if x is not None)
                step.events.nbytes[int(members[slots.index(slot)])] = nbytes
        sums = sum_gradients(gradients, rows[0], task.group)
        for number, row in enumerate(rows):
            totals = sums if number == 0 else copy_sums(sums, gradients[number], row)
            for parameter, total in zip(row, totals, strict=True):
                if total is not None and not parameter.requires_grad:
                    raise _frozen_copy(step, own[number], stages)
                parameter.grad = total

    def _parameters(self, step: Step, slot: int, stages: Sequence[int]) -> list[nn.Parameter]:
        """Return the parameters of a stage that all of some stages have, and no others."""
        stage, members = slot % step.graph.n_stages, sorted(stages)
        return [
            tied_parameter(step.gradients.stages[slot].module, dict(group)[stage])
            for group in self.groups
            if [k for k, _ in group] == members
        ]

    def loaded_values(self, names: StateNames, state: Mapping[str, Any]) -> TiedValues:
        """Return keys and checksums of the values that local copies have after loading a state."""
        rows: TiedValues = []
        for group in self.groups:
            rows.append([])
            for stage, name in group:
                if not isinstance(self._modules[stage], RemoteStage):
                    parameter = tied_parameter(self._modules[stage], name)
                    parameters = names.modules[stage].named_parameters()
                    own_name = next(own for own, x in parameters if x is parameter)
                    key = names.find(state, names.key(stage, own_name)) or ""
                    value = state[key] if key else parameter
                    rows[-1].append((key, _checksum(value, parameter.dtype)))
        return rows

    def check_loaded_values(
        self,
        rows: TiedValues,
        processes: Processes | None,
        *,
        error: type[PipeError] = ArgumentError,
        label: str = "the state",
    ) -> None:
        """Raise ``error`` unless the copies of each group get one value; all processes call it."""
        if not self.groups:
            return
        tables = [rows] if processes is None else processes.share(rows)
        for index, group in enumerate(self.groups):
            pairs = [(key, checksum) for table in tables for key, checksum in table[index]]
            if len({checksum for _, checksum in pairs}) > 1:
                copies = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
                keys = " and ".join(dict.fromkeys(repr(key) for key, _ in pairs if key))
                raise error(
                    f"{copies} are tied, but {label} has different values for them ({keys}): it is "
                    "that of a model without tied parameters; make its values equal, or split such "
                    "a model"
                )


def _checked_groups(
    tied: Sequence[Sequence[tuple[int, str]]] | None, stages: Sequence[nn.Module | None]
) -> tuple[TiedGroup, ...]:
    """Return the groups of tied parameters of stages that are cut by hand."""
    for index, stage in enumerate(stages if tied is None else ()):
        parts = stage.modules() if isinstance(stage, nn.Module) else ()
        if any(isinstance(x, SplitStage) and x.facts is not None and x.facts.tied for x in parts):
            raise ArgumentError(
                f"stage {index} has a stage of pipeexec.split inside, with a copy of a tied "
                "parameter, which other stages have too; give the stages of pipeexec.split "
                "themselves, which may be compiled or DistributedDataParallel, or name the copies "
                "in Pipeline(tied=...)"
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


def _summary(parameter: nn.Parameter) -> tuple[str, str]:
    """Return shape, type and flag of a parameter, and a checksum of its values."""
    shape = "x".join(map(str, parameter.shape))
    digest = _checksum(parameter, parameter.dtype)[:16]
    return f"{shape}/{parameter.dtype}/{parameter.requires_grad}", digest


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


def _versions(groups: Sequence[Sequence[nn.Parameter]]) -> list[int]:
    return [parameter._version for group in groups for parameter in group]


def _frozen_copy(step: Step, slot: int, stages: Sequence[int]) -> ExecutionError:
    own = slot % step.graph.n_stages
    others = ", ".join(str(stage) for stage in stages if stage != own)
    return ExecutionError(
        f"stage {own} has a copy of a tied parameter with requires_grad=False, while that of stage "
        f"{others} is trained: copies would not stay equal; set requires_grad of all copies alike, "
        "which are in pipeline.modules"
    )


def _checksum(value: Tensor, dtype: torch.dtype) -> str:
    """Return a checksum of a tensor that is loaded into one of a type."""
    flat = value.detach().to("cpu", dtype).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()

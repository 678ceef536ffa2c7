"""Stages with layers of experts: segments of F, B and I, and exchanges of tokens between them.

Replicas may have shares of the experts. The processes that have the same experts of a stage sum
their gradients among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.gradient_reduction import sum_gradients
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream
from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import reduce_gradients
from pipeexec.executor.op_handlers import (
    convert_collective_errors,
    for_all_members,
    output_gradients,
    task_input,
)
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StageArguments, StepPart
from pipeexec.experts.expert_shares import (
    ExpertGroup,
    ShapeModule,
    check_experts,
    expert_groups,
    expert_layers,
    layers_of_graph,
    member_of_replica,
    n_members,
    part_of_experts,
    shared_out,
)
from pipeexec.experts.stage import ExpertStage, ForwardExpertStage, Rows, exchange_rows
from pipeexec.stages.stage import StageLike
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import Op, is_expert_exchange


class ExpertLayers(StepPart):
    """Stages with experts; ``groups`` are the processes with the same experts as this one."""

    def __init__(self) -> None:
        #: By stage; empty if all processes have all experts.
        self.groups: Mapping[int, ExpertGroup] = {}
        self._counts: dict[int, bool] = {}

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless stages have the layers that a graph was lowered with."""
        if model.processes is None:
            expert_groups(model.modules, graph.n_stages, None)  # refuses a share of experts
        check_experts(model.modules, graph)

    def agree(self, model: PlacedModel, processes: Processes) -> None:
        """Find the processes with the same experts; the first copy in the first of them counts."""
        n = len(model.homes[0])
        self.groups = expert_groups(model.modules, n, processes)
        stages: set[int] = set()
        for slot, module in enumerate(model.modules):
            if slot % n in self.groups and not isinstance(module, RemoteStage):
                counts = self.groups[slot % n].is_first and slot % n not in stages
                self._counts.update((id(x), counts) for x in shared_out(module).values())
                stages.add(slot % n)

    def weight_shares(
        self, graph: TaskGraph, stage: int, module: nn.Module
    ) -> Mapping[nn.Parameter, str]:
        """Return the numbers of the experts that a stage has a share of."""
        return dict.fromkeys(shared_out(module).values(), part_of_experts(module))

    def make_stages(
        self, graph: TaskGraph, arguments: Sequence[StageArguments], *, trains: bool
    ) -> Mapping[int, StageLike]:
        """Return the stages with experts."""
        layers = layers_of_graph(graph)
        if not any(layers):
            return {}
        members, kind = member_of_replica(graph), ExpertStage if trains else ForwardExpertStage
        return {
            slot: kind(*x, member=members[slot // graph.n_stages], n_members=n_members(graph))
            for slot, x in enumerate(arguments)
            if layers[x.stage] and not isinstance(x.module, RemoteStage)
        }

    def stage_handler(self, task: Task, stage: StageLike) -> Handler | None:
        """Return the handler of a segment, of an exchange of tokens, or of a reduction."""
        if is_expert_exchange(task.op, task.part):
            return _exchange_rows
        if task.op == Op.REDUCE_GRAD and stage.index in self.groups:
            return for_all_members(partial(reduce_gradients, sum_copies=self._sums))
        return _SEGMENT_HANDLERS.get(task.op) if task.part >= 0 else None

    def group_backend(self, task: Task, ranks: Sequence[int]) -> str | None:
        """Return the backend of exchanges; gloo exchanges no tensors of GPUs."""
        if not is_expert_exchange(task.op, task.part):
            return None
        if list(ranks) != sorted(set(ranks)):
            raise ArgumentError(
                f"replicas that share the experts of stage {task.stage} are in processes "
                f"{list(ranks)}; give each a process of its own, or all of them one process"
            )
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"

    def shape_module(self, module: nn.Module) -> nn.Module:
        """Return a module with one expert in place of all, and without exchanges."""
        return ShapeModule(module) if expert_layers(module) else module

    def before(self, step: Step) -> None:
        """Let experts count once."""
        step.gradients.counts = self._counts

    def _sums(
        self,
        task: PlannedTask,
        gradients: list[list[Tensor | None]],
        parameters: Sequence[nn.Parameter],
    ) -> list[Tensor | None]:
        """Return the sum of each parameter's gradients; of experts over those that have them."""
        experts = {id(p) for p in shared_out(task.stage.module).values()}
        sums: list[Tensor | None] = [None] * len(parameters)
        groups = (False, task.group), (True, self.groups[task.stage.index].group)
        for has_share, group in groups:
            own = [k for k, p in enumerate(parameters) if (id(p) in experts) == has_share]
            rows = [[copy[k] for k in own] for copy in gradients]
            totals = sum_gradients(rows, [parameters[k] for k in own], group)
            for k, total in zip(own, totals, strict=True):
                sums[k] = total
        return sums


def _expert_stage(task: PlannedTask) -> ExpertStage:
    assert isinstance(task.stage, ExpertStage)
    return task.stage


def _forward_segment(step: Step, task: PlannedTask) -> None:
    stage, seed = _expert_stage(task), step.inputs.random_seed(task)
    values = stage.forward_segment(
        task.microbatch, task.part, task_input(step, task), seed, task.is_split
    )
    if stage.loss_fn is None or task.part < stage.last:
        step.results[task.id] = values


def _backward_segment(step: Step, task: PlannedTask) -> None:
    gradients = output_gradients(step, task)
    step.results[task.id] = _expert_stage(task).backward_segment(
        task.microbatch, task.part, gradients
    )


def _input_grad_segment(step: Step, task: PlannedTask) -> None:
    gradients = output_gradients(step, task)
    step.results[task.id] = _expert_stage(task).input_grad_segment(
        task.microbatch, task.part, gradients
    )


def _exchange_rows(step: Step, task: PlannedTask) -> None:
    """Exchange rows of all members in this process, unless another of their tasks does it."""
    if task.sync is not None and task.sync.leader >= 0:
        return
    graph = step.graph
    group = int(graph.group[task.id])
    members = [task.id] if task.group is not None else graph.collectives[group].tolist()
    members.sort(key=lambda member: int(graph.replica[member]))
    sent = [_pop_rows(step, task, member) for member in members]
    with convert_collective_errors(task.group):
        received = exchange_rows(sent, task.group)
    own = _expert_stage(task).member
    for number, (member, rows) in enumerate(zip(members, received, strict=True)):
        device = step.devices[int(graph.device[member])]
        _keep_for_stream(rows, device, device.stream("compute"))
        step.results[member] = rows
        step.events.nbytes[member] = rows.others_bytes(own if task.group else number)


def _pop_rows(step: Step, task: PlannedTask, member: int) -> Rows:
    """Return the rows that a member sends: the result of the segment before its exchange."""
    graph = step.graph
    segment = next(
        int(t) for t in graph.dependencies[member].tolist()
        if graph.microbatch[t] == graph.microbatch[member] and graph.stage[t] == graph.stage[member]
    )  # fmt: skip
    values = step.pop_result(segment)
    if not isinstance(values, Rows):
        raise ExecutionError(f"{step.graph.task(member)} has no rows to exchange")
    _keep_for_stream(values, task.device, task.stream)
    return values


def _keep_for_stream(values: Values, device: Device, stream: Stream) -> None:
    """Keep the memory of tensors of another stream until a stream of a device has used it."""
    for value in values:
        if value is not None:
            device.adopt(value, stream)


#: Handler of each operation in segments.
_SEGMENT_HANDLERS: dict[Op, Handler] = {
    Op.F: _forward_segment,
    Op.B: _backward_segment,
    Op.I: _input_grad_segment,
}

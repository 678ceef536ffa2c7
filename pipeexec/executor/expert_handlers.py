"""Handlers of stages with experts: segments of F, B and I, and the exchanges between them."""

from __future__ import annotations

from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream
from pipeexec.executor.op_handlers import convert_collective_errors, task_input
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.experts.stage import ExpertStage
from pipeexec.experts.token_exchange import Rows, exchange_rows
from pipesim.errors import ExecutionError
from pipesim.ops import Op, is_expert_exchange


def expert_handler(op: Op, part: int) -> Handler | None:
    """Return the handler of a segment, or of an exchange of experts' tokens; None for others."""
    if is_expert_exchange(op, part):
        return _exchange
    return _SEGMENT_HANDLERS.get(op) if part >= 0 else None


def _stage(task: PlannedTask) -> ExpertStage:
    """Return the stage of a task, which has experts."""
    assert isinstance(task.stage, ExpertStage)
    return task.stage


def _forward_segment(step: Step, task: PlannedTask) -> None:
    stage, seed = _stage(task), step.inputs.random_seed(task)
    values = stage.forward_segment(
        task.microbatch, task.part, task_input(step, task), seed, task.is_split
    )
    if stage.loss_fn is None or task.part < stage.last:
        step.results[task.id] = values


def _backward_segment(step: Step, task: PlannedTask) -> None:
    gradients = () if task.source < 0 else step.pop_result(task.source)
    step.results[task.id] = _stage(task).backward_segment(task.microbatch, task.part, gradients)


def _input_grad_segment(step: Step, task: PlannedTask) -> None:
    gradients = () if task.source < 0 else step.pop_result(task.source)
    step.results[task.id] = _stage(task).input_grad_segment(task.microbatch, task.part, gradients)


def _exchange(step: Step, task: PlannedTask) -> None:
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
    own = _stage(task).member
    for number, (member, rows) in enumerate(zip(members, received, strict=True)):
        device = step.devices[int(graph.device[member])]
        _keep_for_stream(rows, device, device.stream("compute"))
        step.results[member] = rows
        step.events.nbytes[member] = rows.others_bytes(own if task.group else number)


def _pop_rows(step: Step, task: PlannedTask, member: int) -> Rows:
    """Return the rows that a member sends."""
    values = step.pop_result(_source(step, member))
    if not isinstance(values, Rows):
        raise ExecutionError(f"{step.graph.task(member)} has no rows to exchange")
    _keep_for_stream(values, task.device, task.stream)
    return values


def _keep_for_stream(values: Values, device: Device, stream: Stream) -> None:
    """Keep the memory of tensors of another stream until a stream of a device has used it."""
    for value in values:
        if value is not None:
            device.adopt(value, stream)


def _source(step: Step, member: int) -> int:
    """Return the segment before an exchange."""
    graph = step.graph
    return next(
        int(t) for t in graph.dependencies[member].tolist()
        if graph.microbatch[t] == graph.microbatch[member] and graph.stage[t] == graph.stage[member]
    )  # fmt: skip


#: Handler of each operation in segments.
_SEGMENT_HANDLERS: dict[Op, Handler] = {
    Op.F: _forward_segment,
    Op.B: _backward_segment,
    Op.I: _input_grad_segment,
}

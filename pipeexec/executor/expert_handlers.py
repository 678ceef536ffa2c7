"""Handlers of stages with experts: segments of F, B and I, and the exchanges between them."""

from __future__ import annotations

from pipeexec.executor.op_handlers import (
    convert_collective_errors,
    keep_for_both_streams,
    task_input,
)
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.experts.stage import ExpertStage
from pipeexec.experts.token_exchange import Rows, exchange_rows
from pipesim.errors import ExecutionError
from pipesim.ops import Op, is_expert_exchange

__all__ = ["expert_handler"]


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
    for number, (member, before, rows) in enumerate(zip(members, sent, received, strict=True)):
        keep_for_both_streams(task, rows)
        step.results[member] = rows
        step.events.nbytes[member] = before.others_bytes(own if task.group else number)


def _pop_rows(step: Step, task: PlannedTask, member: int) -> Rows:
    """Return the rows that a member sends."""
    values = step.pop_result(_source(step, member))
    keep_for_both_streams(task, values)
    rows = values if isinstance(values, Rows) else None
    if rows is None:
        raise ExecutionError(f"{step.graph.task(member)} has no rows to exchange")
    return rows


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

"""Handlers: functions that run the tasks of each operation on their streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import DistError, ProcessGroup, get_process_group_ranks, get_rank

from pipeexec.devices import transfer
from pipeexec.devices.device import Values
from pipeexec.distributed.channels import LostConnection
from pipeexec.executor.gradient_sync import assign_reduced_gradients, reduce_gradients
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipesim.ops import Op


def task_input(step: Step, task: PlannedTask) -> Values:
    """Return the input of a task: results of other tasks, or a micro-batch of the batch."""
    if not task.sources:
        return step.inputs.microbatches[task.stage.index][task.global_microbatch]
    parts = [step.pop_source(source, task.microbatch) for source in task.sources]
    if len(parts) == 1:
        return parts[0]
    step.input_counts[task.slot, task.microbatch] = [len(part) for part in parts]
    return tuple(value for part in parts for value in part)


def output_gradients(step: Step, task: PlannedTask) -> Values:
    """Return the gradients of a stage's outputs, summed over the stages that take them."""
    rows = [step.pop_source(source, task.microbatch) for source in task.sources]
    if len(rows) < 2:
        return rows[0] if rows else ()
    columns = [[x for x in column if x is not None] for column in zip(*rows, strict=True)]
    return tuple(sum(column[1:], column[0]) if column else None for column in columns)


def _forward(step: Step, task: PlannedTask) -> None:
    values = task.stage.forward(
        task.microbatch,
        task_input(step, task),
        step.inputs.random_seed(task),
        task.is_recomputed,
        task.is_split,
    )
    if task.stage.loss_fn is None:
        step.results[task.id] = values


def _recompute(step: Step, task: PlannedTask) -> None:
    task.stage.recompute(task.microbatch, step.inputs.random_seed(task), task.is_split)


def _backward(step: Step, task: PlannedTask) -> None:
    gradients = output_gradients(step, task)
    step.results[task.id] = task.stage.backward(task.microbatch, gradients)


def _input_grad(step: Step, task: PlannedTask) -> None:
    gradients = output_gradients(step, task)
    step.results[task.id] = task.stage.input_grad(task.microbatch, gradients)


def _weight_grad(step: Step, task: PlannedTask) -> None:
    task.stage.weight_grad(task.microbatch)


def _send(step: Step, task: PlannedTask) -> None:
    """Send a result to another device of this process; record the bytes of the message."""
    values = step.pop_source(task.sources[0], task.microbatch)
    recv = int(step.graph.pair[task.id])
    target = step.devices[step.graph.device[recv]]
    step.results[task.id] = transfer.send(values, task.device, task.stream, target)
    step.events.nbytes[task.id] = step.events.nbytes[recv] = transfer.nbytes(values)


def _receive(step: Step, task: PlannedTask) -> None:
    consumer = task.device.stream("compute")
    step.results[task.id] = transfer.receive(step.pop_result(task.source), task.device, consumer)


def for_all_members(handler: Handler) -> Handler:
    """Return a handler of a collective, which one task of this process runs for all its members."""

    def run(step: Step, task: PlannedTask) -> None:
        if task.copies:
            with convert_collective_errors(task.group):
                handler(step, task)

    return run


@contextmanager
def convert_collective_errors(group: ProcessGroup | None) -> Iterator[None]:
    """Raise errors of a collective as `LostConnection`."""
    try:
        yield
    except DistError as error:
        raise _lost_connection(group, error) from error
    except RuntimeError as error:
        if group is None or "gloo" not in str(error).lower():
            raise
        raise _lost_connection(group, error) from error


def _lost_connection(group: ProcessGroup | None, error: Exception) -> LostConnection:
    """Return the error of a collective; it names the other member if there is only one."""
    others = [] if group is None else [r for r in get_process_group_ranks(group) if r != get_rank()]
    return LostConnection(others[0] if len(others) == 1 else -1, error)


def _step(step: Step, task: PlannedTask) -> None:
    """Complete the gradients of a stage, then run its optimizer, if it has one."""
    assign_reduced_gradients(step, task.slot)
    batch = max(task.microbatch, 0) // step.inputs.shares.batch_size
    step.gradients.divide(task.slot, batch, step.inputs.loss)
    steps = [part.before_optimizer(step, task) for part in step.parts]
    optimizer = step.gradients.optimizers[task.slot]
    if optimizer is not None and all(steps):
        optimizer.step()
    task.stage.after_optimizer_step(zero_grad=optimizer is not None)


#: Handler of each operation that no step part has.
HANDLERS: Mapping[Op, Handler] = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _input_grad,
    Op.W: _weight_grad,
    Op.R: _recompute,
    Op.SEND_F: _send,
    Op.RECV_F: _receive,
    Op.SEND_B: _send,
    Op.RECV_B: _receive,
    Op.REDUCE_GRAD: for_all_members(reduce_gradients),
    Op.STEP: _step,
}

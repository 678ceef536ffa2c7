"""Handlers: functions that run the tasks of each operation on their streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import DistError, ProcessGroup, get_process_group_ranks, get_rank

from pipeexec.devices import transfer
from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream
from pipeexec.distributed.channels import LostConnection
from pipeexec.embedding.stage import ShardedStage
from pipeexec.executor.gradient_sync import assign_reduced_gradients, reduce_gradients
from pipeexec.executor.offload_waits import outlasts_issue
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.experts.stage import ExpertStage, Rows, exchange_rows
from pipeexec.stages.stage import Stage
from pipesim.errors import ExecutionError
from pipesim.ops import EXCHANGES, Op, is_expert_exchange


def task_input(step: Step, task: PlannedTask) -> Values:
    """Return the input of a task: the result of another task, or a micro-batch of the batch."""
    return (
        step.inputs.microbatches[task.global_microbatch]
        if task.source < 0
        else step.pop_result(task.source)
    )


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
    gradients = () if task.source < 0 else step.pop_result(task.source)
    step.results[task.id] = task.stage.backward(task.microbatch, gradients)


def _input_grad(step: Step, task: PlannedTask) -> None:
    gradients = () if task.source < 0 else step.pop_result(task.source)
    step.results[task.id] = task.stage.input_grad(task.microbatch, gradients)


def _weight_grad(step: Step, task: PlannedTask) -> None:
    task.stage.weight_grad(task.microbatch)


def _send(step: Step, task: PlannedTask) -> None:
    """Send a result to another device of this process; record the bytes of the message."""
    values = step.pop_result(task.source)
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


def _unshard(step: Step, task: PlannedTask) -> None:
    shards = step.gradients.shards.get(task.slot)
    if shards is None:  # a stage without parameters
        return
    with convert_collective_errors(task.group):
        shards.gather(task.group)
    step.events.nbytes[task.id] = shards.nbytes
    if isinstance(task.stage, Stage):
        task.stage.forget_storages()
    if task.stage.meter is not None:
        task.stage.meter.ignore_weights(task.slot, shards.whole_tensors)


def _reshard(step: Step, task: PlannedTask) -> None:
    shards = step.gradients.shards.get(task.slot)
    if shards is None:
        return
    if task.stage.meter is not None:  # others may get this memory
        task.stage.meter.ignore_weights(task.slot, ())
    shards.free()


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


def _exchange(step: Step, task: PlannedTask) -> None:
    stage = task.stage
    assert isinstance(stage, ShardedStage)
    name = EXCHANGES[task.part]
    values = () if name == "accumulated" else task_input(step, task)
    keep_for_both_streams(task, (*values, *stage.held_tensors(task.microbatch)))
    with convert_collective_errors(task.group):
        outputs = step.results[task.id] = stage.exchange(name, task.microbatch, values)
    keep_for_both_streams(task, (*outputs, *stage.held_tensors(task.microbatch)))
    step.events.nbytes[task.id] = stage.sent


def _dispatch(step: Step, task: PlannedTask) -> None:
    assert isinstance(task.stage, ShardedStage)
    step.results[task.id] = task.stage.dispatch(task.microbatch, task_input(step, task))


def _reorder(step: Step, task: PlannedTask) -> None:
    assert isinstance(task.stage, ShardedStage)
    values, name = step.pop_result(task.source), EXCHANGES[task.part]
    step.results[task.id] = task.stage.reorder(name, task.microbatch, values)


def keep_for_both_streams(task: PlannedTask, values: Values) -> None:
    """Keep the memory of tensors until an exchange's stream and the compute stream have used it.

    Lookups read tensors that exchanges received. Exchanges send results of lookups.
    """
    for value in values:
        if value is not None:
            for stream in (task.stream, task.device.stream("compute")):
                task.device.adopt(value, stream)


def _offload(step: Step, task: PlannedTask) -> None:
    """Copy activations to the host, and record their bytes; a copy that runs on needs them."""
    assert isinstance(task.stage, Stage)
    share = float(step.graph.offload_shares[task.stage.index])
    moved = task.stage.offload(task.microbatch, share, task.device)
    step.events.nbytes[task.id] = sum(data.nbytes for data in moved)
    if outlasts_issue(task):
        step.results[task.id] = moved


def _reload(step: Step, task: PlannedTask) -> None:
    assert isinstance(task.stage, Stage)
    step.events.nbytes[task.id] = task.stage.reload(task.microbatch, task.device)


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
    Op.ALL_TO_ALL: _exchange,
    Op.DISPATCH: _dispatch,
    Op.REORDER: _reorder,
    Op.OFFLOAD: _offload,
    Op.RELOAD: _reload,
    Op.STEP: _step,
    Op.UNSHARD: _unshard,
    Op.RESHARD: _reshard,
}


# Stages with experts: segments of F, B and I, and the exchanges between them


def expert_handler(op: Op, part: int) -> Handler | None:
    """Return the handler of a segment, or of an exchange of experts' tokens; None for others."""
    if is_expert_exchange(op, part):
        return _exchange_rows
    return _SEGMENT_HANDLERS.get(op) if part >= 0 else None


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
    gradients = () if task.source < 0 else step.pop_result(task.source)
    step.results[task.id] = _expert_stage(task).backward_segment(
        task.microbatch, task.part, gradients
    )


def _input_grad_segment(step: Step, task: PlannedTask) -> None:
    gradients = () if task.source < 0 else step.pop_result(task.source)
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

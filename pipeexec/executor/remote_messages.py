"""Messages between processes, and what the processes agree on before they send any.

Each task has a remote part with its channel and the handlers of SEND and RECV. Processes agree on
the graph, the weights and the shapes of messages.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.devices import transfer
from pipeexec.devices.device import Device, RemoteDevice, Values, device_ranks
from pipeexec.devices.streams import InlineStream
from pipeexec.distributed.channels import (
    Channel,
    ChannelRoute,
    Content,
    ExpectedMessage,
    SentMessage,
    header,
)
from pipeexec.distributed.flight_recorder import FIRST_TASK, MOST_STREAMS
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.signatures import (
    Signature,
    check_values,
    from_json,
    output_signature,
    signature,
    to_json,
)
from pipeexec.executor.planned_task import PlannedTask, Remote
from pipeexec.executor.step import Step
from pipeexec.executor.step_inputs import StepInputs
from pipeexec.executor.step_part import StepPart
from pipeexec.nesting import Arguments
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import OF_DEVICES, RECVS, SENDS, Op
from pipesim.scheduling.placement import Edges, stage_pairs


class RemoteParts:
    """Make the part of each task of this process that involves other processes.

    The constructor opens the routes of messages and the groups of collectives. All processes must
    call it. ``tasks`` are the numbers of the tasks of this process.
    """

    def __init__(
        self,
        graph: TaskGraph,
        tasks: Sequence[int],
        devices: Sequence[Device],
        processes: Processes,
        parts: Sequence[StepPart],
    ) -> None:
        self.graph, self.processes = graph, processes
        local_devices = {d: x for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)}
        ranks = device_ranks(devices, processes.rank)
        routes = _routes(graph, ranks)
        _check_streams(graph, routes)
        processes.open(routes.values(), graph.n_devices, list(local_devices.values()))
        local_tasks = set(tasks)
        self._routes = {t: route for send, route in routes.items()
                        for t in (send, int(graph.pair[send])) if t in local_tasks}  # fmt: skip
        # With rendezvous, an early posted receive would tell the sender that the receiver is ready.
        self._next_message = {} if graph.rendezvous else _next_messages(self._routes)
        # Streams with messages, except those that only post sends.
        self._blocking = {
            int(graph.stream[t]) for t in self._routes
            if graph.rendezvous or graph.is_op(RECVS)[t] or graph.task(t).stream == "compute"
        }  # fmt: skip
        self._groups = _process_groups(graph, ranks, processes, parts)
        streams = [(d, name) for name in ("compute", "collective") for d in local_devices]
        self._slots = {x: FIRST_TASK + n for n, x in enumerate(streams[:MOST_STREAMS])}

    def add_to(self, task: PlannedTask) -> PlannedTask:
        """Return a task with its remote part, and with the stream and handler that it needs."""
        graph, name = self.graph, self.graph.task(task.id).stream
        if int(graph.stream[task.id]) in self._blocking:
            task = task._replace(stream=task.device.stream(name, blocks=True))
        remote = Remote(
            group=self._groups.get(int(graph.group[task.id])),
            task_slot=self._slots.get((int(graph.device[task.id]), name), -1),
        )
        if task.id not in self._routes:
            return task._replace(remote=remote)
        remote = remote._replace(channel=self.processes.channel(self._routes[task.id]))
        if graph.is_op(RECVS)[task.id]:
            next_task = self._next_message.get(task.id, -1)
            after_end = partial(_post_next_receive, next_task) if next_task >= 0 else None
            remote = remote._replace(before_start=_accept, after_end=after_end)
            return task._replace(handler=_receive, remote=remote)
        if graph.rendezvous:
            remote = remote._replace(before_start=_wait_for_receiver)
        elif isinstance(task.stream, InlineStream):  # a CUDA stream waits without a waiter
            waiter = task.device.stream(f"{name} sent", blocks=True)
            return task._replace(handler=_post, remote=remote._replace(send_waiter=waiter))
        return task._replace(handler=_send, remote=remote)


def expected_messages(
    graph: TaskGraph,
    tasks: Sequence[PlannedTask],
    signatures: Sequence[Sequence[Sequence[Signature]]],
) -> dict[int, ExpectedMessage]:
    """Return the expected message of each task that has a channel, with the header of step 0.

    ``signatures`` are those of the outputs, by share of the batch, stage and micro-batch.
    """
    messages = {}
    for task in tasks:
        if task.remote is not None and task.remote.channel is not None:
            op, pair = task.remote.channel.route.op, int(graph.pair[task.id])
            send, recv = (task.id, pair) if Op(graph.op[task.id]) in SENDS else (pair, task.id)
            source, target = int(graph.stage[send]), int(graph.stage[recv])
            path = int(graph.replica[task.id])
            content = Content(0, op, source, target, task.microbatch, path)
            share = task.global_microbatch // graph.n_microbatches
            # The outputs of this stage, or their gradients, are in the message.
            stage = target if op is Op.SEND_B else source
            signature = signatures[share][stage][task.microbatch]
            head = header(content, signature)
            messages[task.id] = ExpectedMessage.make(head, signature, waits=graph.rendezvous)
    return messages


def _channel(task: PlannedTask) -> Channel:
    assert task.remote is not None
    assert task.remote.channel is not None
    return task.remote.channel


def _checked_values(step: Step, task: PlannedTask) -> tuple[ExpectedMessage, Values]:
    """Return the message of a SEND and its tensors, after a check of their shapes and types."""
    message = step.expected_messages[task.id]
    values = step.source_values(task.sources[0], task.microbatch)
    check_values(values, message.signature, f"the output of {step.graph.task(task.id)}")
    return message, values


def _wait_for_receiver(step: Step, task: PlannedTask) -> None:
    channel = _channel(task)
    channel.wait(channel.offer(*_checked_values(step, task)), channel.route.target_rank)


def _send(step: Step, task: PlannedTask) -> None:
    """Send a message to a receiver that is ready, and wait until it is sent."""
    channel, (message, values) = _channel(task), _checked_values(step, task)
    step.events.nbytes[task.id] = transfer.nbytes(values)
    for value in values:
        if value is not None:  # computed on another stream
            task.device.adopt(value, task.stream)
    sent = (channel.send if step.graph.rendezvous else channel.post)(message, values)
    channel.finish(message, sent)
    step.pop_source(task.sources[0], task.microbatch)


def _post(step: Step, task: PlannedTask) -> None:
    """Send a message without waiting; `_finish_send` sets an event when it is sent."""
    assert task.remote is not None
    assert task.remote.send_waiter is not None
    channel, (message, values) = _channel(task), _checked_values(step, task)
    step.events.nbytes[task.id] = transfer.nbytes(values)
    task.remote.send_waiter.submit(partial(_finish_send, step, task, channel.post(message, values)))
    step.pop_source(task.sources[0], task.microbatch)


def _finish_send(step: Step, task: PlannedTask, sent: SentMessage) -> None:
    """Wait until a posted message is sent, then set its event."""
    try:
        _channel(task).finish(step.expected_messages[task.id], sent)
    except BaseException as error:
        step.fail(task, error)
    finally:
        step.events.sent_events[task.id].set()


def _accept(step: Step, task: PlannedTask) -> None:
    """Wait until a message can be received, and check that it is the expected one."""
    step.posted_receives[task.id] = _channel(task).accept(
        step.expected_messages[task.id], task.device.torch_device
    )


def _post_next_receive(next_task: int, step: Step, task: PlannedTask) -> None:
    """Post the receive of the channel's next message, after this one is delivered."""
    _channel(task).post_next_receive(step.expected_messages[next_task], task.device.torch_device)


def _receive(step: Step, task: PlannedTask) -> None:
    values = _channel(task).receive(
        step.expected_messages[task.id], step.posted_receives.pop(task.id)
    )
    step.events.nbytes[task.id] = transfer.nbytes(values)
    step.results[task.id] = transfer.receive(values, task.device, task.device.stream("compute"))


def _check_streams(graph: TaskGraph, sends: Iterable[int]) -> None:
    for send in sends:
        stream = graph.task(send).stream
        if "/" in stream:
            raise ArgumentError(
                f"{graph.task(send)} of device {graph.device[send]} is on stream {stream!r}, which "
                "carries one micro-batch, and goes to another process: messages between two "
                "processes arrive in the order in which they are sent; lower with "
                'streams="per_peer", or run all devices in one process'
            )


def _routes(graph: TaskGraph, ranks: Sequence[int]) -> dict[int, ChannelRoute]:
    """Return the route of each SEND to another process; ``ranks`` are those of the devices."""
    routes = {}
    for task in np.flatnonzero(graph.is_op(SENDS)).tolist():
        source, target = int(graph.device[task]), int(graph.device[graph.pair[task]])
        if ranks[source] != ranks[target]:
            op = Op(graph.op[task])
            routes[task] = ChannelRoute(ranks[source], ranks[target], source, target, op)
    return routes


def _next_messages(routes: Mapping[int, ChannelRoute]) -> dict[int, int]:
    """Return the next message of the same route for each message; the order is that of tasks."""
    successors, last = {}, dict[ChannelRoute, int]()
    for task in sorted(routes, reverse=True):
        if routes[task] in last:
            successors[task] = last[routes[task]]
        last[routes[task]] = task
    return successors


def _process_groups(
    graph: TaskGraph, ranks: Sequence[int], processes: Processes, parts: Sequence[StepPart]
) -> dict[int, ProcessGroup]:
    """Return the process group of each collective that spans processes.

    Every process makes the groups in the same order. There is one a stage and operation, so that no
    stage waits for collectives of another, nor an exchange or a gather for reductions, which are on
    another stream. Collectives of devices have one a part, such as a group of tied stages.
    """
    groups = {}
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        rank_of_member = [ranks[graph.device[t]] for t in members]
        member_ranks = sorted({*rank_of_member})
        if len(member_ranks) > 1:
            task = graph.task(int(members[0]))
            backends = (part.group_backend(task, rank_of_member) for part in parts)
            backend = next((x for x in backends if x is not None), "gloo")
            place = task.part if task.op in OF_DEVICES else task.stage
            key = f"{task.op} {place} of replica {task.replica}"
            groups[number] = processes.group(member_ranks, backend, key)
    return groups


# Agreement of processes


def agree_on_graph(graph: TaskGraph, processes: Processes) -> int:
    """Check that every process has the same graph, and that its messages cannot deadlock.

    A message between processes waits for its receiver, even in a graph without rendezvous. Return
    the number of the graph.
    """
    checksum = hashlib.sha256()
    columns: list[NDArray[Any]] = [
        graph.op, graph.stage, graph.microbatch, graph.device, graph.stream, graph.pair,
        graph.replica, graph.part, graph.group, graph.precedence.ptr, graph.precedence.values,
        graph.collectives.values,
    ]  # fmt: skip
    for column in columns:
        checksum.update(column.tobytes())
    words = (graph.rendezvous, graph.n_batches, graph.weight_versions, graph.grad_sync)
    checksum.update(repr(words).encode())
    processes.agree("the task graph", f"{graph!r}, checksum {checksum.hexdigest()[:16]}")
    if not graph.rendezvous:
        blocking = replace(graph, options=replace(graph.options, rendezvous=True))
        verify(blocking.in_topological_order())
    processes.n_graphs += 1
    return processes.n_graphs


def agree_on_weights(
    modules: Sequence[nn.Module],
    graph: TaskGraph,
    processes: Processes,
    parts: Sequence[StepPart],
) -> None:
    """Check that copies of a stage in different processes begin with the same weights."""
    n = graph.n_stages
    local = [_checksums(x, graph, slot % n, parts) for slot, x in enumerate(modules)]
    rows = processes.share(local)
    for stage in range(n):
        sums: dict[str, set[str]] = defaultdict(set)
        for share, checksum in (x for row in rows for own in row[stage::n] for x in own):
            sums[share].add(checksum)
        if any(len(different) > 1 for different in sums.values()):
            raise ArgumentError(
                f"stage {stage} begins with different weights in different processes; build "
                "the model from one seed, or load one checkpoint"
            )


def _checksums(
    module: nn.Module, graph: TaskGraph, stage: int, parts: Sequence[StepPart]
) -> list[tuple[str, str]]:
    """Return the checksum of each share of a module's parameters; none in other processes."""
    if isinstance(module, RemoteStage):
        return []
    shares: dict[nn.Parameter, str] = {}
    for part in parts:
        shares.update(part.weight_shares(graph, stage, module))
    checksums = {"": hashlib.sha256()}
    for x in module.parameters():
        checksum = checksums.setdefault(shares.get(x, ""), hashlib.sha256())
        checksum.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return [(share, checksum.hexdigest()) for share, checksum in checksums.items()]


def agree_on_shapes(
    modules: Sequence[nn.Module],
    devices: Sequence[Device],
    inputs: Mapping[int, Sequence[Values]],
    processes: Processes,
    arguments: Mapping[int, Sequence[Arguments] | None] = MappingProxyType({}),
    edges: Edges = (),
    decode_steps: Collection[int] = (),
) -> list[list[Signature]]:
    """Return the signatures of each stage's outputs, one a micro-batch.

    Those of the last stage are the inputs of the next micro-batch if that is a decode step, else
    empty. The process of each stage finds its signature, stage after stage. Every process must call
    this.
    ``inputs`` and ``arguments`` are those of the stages without a stage before them. Inputs are
    empty for micro-batches of another process.
    """
    outputs: list[list[Signature]] = []
    next_inputs: list[Signature] = []
    pairs = stage_pairs(edges, len(devices))
    for stage, device in enumerate(devices[:-1]):
        if stage in inputs:
            local = [signature([x for x in values if x is not None]) for values in inputs[stage]]
            inputs_of_stage = _merge_signatures(local, processes)
            next_inputs = next_inputs or [
                entries if k in decode_steps else () for k, entries in enumerate(inputs_of_stage)
            ]
        else:
            parts = [outputs[source] for source in pairs[pairs[:, 1] == stage, 0]]
            inputs_of_stage = [tuple(chain(*row)) for row in zip(*parts, strict=True)]
        local = [()] * len(inputs_of_stage)
        if not isinstance(device, RemoteDevice):
            calls: Sequence[Arguments | None] = arguments.get(stage) or [None] * len(local)
            outputs_by_call: dict[tuple[Signature, int], Signature] = {}
            for s, call in zip(inputs_of_stage, calls, strict=True):
                if (s, id(call)) not in outputs_by_call:
                    outputs_by_call[s, id(call)] = output_signature(
                        modules[stage], s, device.torch_device, stage, call
                    )
            local = [outputs_by_call[s, id(x)] for s, x in zip(inputs_of_stage, calls, strict=True)]
        outputs.append(_merge_signatures(local, processes))
    return [*outputs, [*next_inputs[1:], ()]]


def _merge_signatures(local: Sequence[Signature], processes: Processes) -> list[Signature]:
    """Return the signature of each micro-batch, from the process that has found it."""
    rows_by_process = processes.share([to_json(s) for s in local])
    return [from_json(max(rows, key=len)) for rows in zip(*rows_by_process, strict=True)]


def agree_on_messages(
    graph: TaskGraph,
    tasks: Sequence[PlannedTask],
    modules: Sequence[nn.Module],
    devices: Sequence[Device],
    inputs: StepInputs,
    processes: Processes,
) -> dict[int, ExpectedMessage]:
    """Return the expected message of each task; all processes agree on their shapes.

    ``inputs`` are those of the first step.
    """
    n, m = graph.n_stages, graph.n_microbatches
    signatures = [
        agree_on_shapes(
            modules[replica * n : (replica + 1) * n],
            [devices[d] for d in graph.homes[replica]],
            {s: rows[share * m : (share + 1) * m] for s, rows in inputs.microbatches.items()},
            processes,
            {s: rows and rows[share * m : (share + 1) * m] for s, rows in inputs.arguments.items()},
            graph.edges,
            np.flatnonzero(graph.is_decode_step).tolist(),
        )
        for share, replica in enumerate(range(0, graph.n_replicas, inputs.shares.n_paths))
    ]
    return expected_messages(graph, tasks, signatures)

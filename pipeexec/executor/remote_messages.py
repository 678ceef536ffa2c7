"""Messages to and from other processes, as tasks of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from torch.distributed import ProcessGroup

from pipeexec.devices import transfer
from pipeexec.devices.cpu_streams import InlineStream
from pipeexec.devices.device import Device, Values
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.distributed.channels import Channel, ChannelRoute, ExpectedMessage, SentMessage
from pipeexec.distributed.flight_recorder import FIRST_TASK, MOST_STREAMS
from pipeexec.distributed.message_headers import Content, header
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.signatures import Signature, check_values
from pipeexec.executor.step import Planned, Run
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import RECVS, SENDS, Op

__all__ = ["connected", "expected_messages"]


def connected(
    graph: TaskGraph, tasks: Sequence[Planned], devices: Sequence[Device], processes: Processes
) -> list[Planned]:
    """Return the tasks of this process with what other processes have to do with them."""
    own = {d: x for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)}
    ranks = device_ranks(devices, processes.rank)
    routes = _routes(graph, ranks)
    _check_streams(graph, routes)
    processes.open(routes.values(), graph.n_devices, list(own.values()))
    here = {task.id for task in tasks}
    away = {t: route for send, route in routes.items()
            for t in (send, int(graph.pair[send])) if t in here}  # fmt: skip
    following = {} if graph.rendezvous else _following(away)  # or RECVs would seem to be reached
    blocking = _blocking_streams(graph, away)
    groups = _reduction_groups(graph, ranks, processes)
    noted = [(device, stream) for stream in ("compute", "collective") for device in own]
    slates = {place: FIRST_TASK + number for number, place in enumerate(noted[:MOST_STREAMS])}
    found = []
    for task in tasks:
        name = graph.task(task.id).stream
        if int(graph.stream[task.id]) in blocking:
            task = task._replace(stream=task.device.stream(name, blocks=True))
        task = task._replace(slate=slates.get((int(graph.device[task.id]), name), -1))
        members = groups.get(int(graph.group[task.id]))
        if members is not None:
            task = task._replace(members=members)
        if task.id in away:
            task = task._replace(channel=processes.channel(away[task.id]))
            if graph.is_op(RECVS)[task.id]:
                task = _received(task, following.get(task.id, -1))
            else:
                task = _sent(task, graph.rendezvous, name)
        found.append(task)
    return found


def _received(task: Planned, following: int) -> Planned:
    """Return a RECV, which begins when its message has."""
    after = partial(_ask_ahead, following) if following >= 0 else None
    return task._replace(meet=_accept, work=_receive, after=after)


def _sent(task: Planned, rendezvous: bool, stream: str) -> Planned:
    """Return a SEND: one that meets its receiver, waits for the end, or is only posted."""
    if rendezvous:
        return task._replace(meet=_meet_receiver, work=_send)
    if not isinstance(task.stream, InlineStream):
        return task._replace(work=_send)  # CUDA's streams wait by themselves
    waiter = task.device.stream(f"{stream} gone", blocks=True)
    return task._replace(work=_post, waiter=waiter)


def expected_messages(
    graph: TaskGraph, tasks: Sequence[Planned], agreed: Sequence[Sequence[Sequence[Signature]]]
) -> dict[int, ExpectedMessage]:
    """Return each message to or from another process as it should be, by its task, in step 0.

    ``agreed`` are, for each share of the batch, the outputs of each stage and micro-batch.
    """
    found = {}
    for task in tasks:
        if task.channel is not None:
            op, stage = task.channel.route.op, int(graph.stage[task.id])
            # The stage whose outputs, or their gradients, the message holds.
            edge = stage - (graph.op[task.id] in (Op.SEND_B, Op.RECV_F))
            path = int(graph.replica[task.id])
            content = Content(0, op, edge + (op is Op.SEND_B), task.microbatch, path)
            share = task.sample // graph.n_microbatches
            signature = agreed[share][edge][task.microbatch]
            head = header(content, signature)
            found[task.id] = ExpectedMessage.make(head, signature, waits=graph.rendezvous)
    return found


def _checked(run: Run, task: Planned) -> tuple[Channel, ExpectedMessage, Values]:
    """Return what a SEND sends, which is as agreed, and where."""
    assert task.channel is not None
    message, values = run.expected[task.id], run.values[task.source] or ()
    check_values(values, message.signature, f"what {run.graph.task(task.id)} sends")
    return task.channel, message, values


def _meet_receiver(run: Run, task: Planned) -> None:
    """Wait until the receiver is ready for what comes."""
    channel, message, values = _checked(run, task)
    channel.wait(channel.offer(message, values), channel.route.target_rank)


def _send(run: Run, task: Planned) -> None:
    """Send what the receiver is ready for, and wait until it is gone."""
    channel, message, values = _checked(run, task)
    run.nbytes[task.id] = transfer.nbytes(values)
    for value in values:
        if value is not None:  # made on another stream
            task.device.adopt(value, task.stream)
    sent = (channel.send if run.graph.rendezvous else channel.post)(message, values)
    channel.finish(message, sent)
    run.take(task.source)


def _post(run: Run, task: Planned) -> None:
    """Send a message without waiting; an event passes when it is gone."""
    assert task.waiter is not None
    channel, message, values = _checked(run, task)
    run.nbytes[task.id] = transfer.nbytes(values)
    task.waiter.submit(partial(_until_gone, run, task, channel.post(message, values)))
    run.take(task.source)


def _until_gone(run: Run, task: Planned, sent: SentMessage) -> None:
    assert task.channel is not None
    try:
        task.channel.finish(run.expected[task.id], sent)
    except BaseException as error:
        run.fail(task, error)
    finally:
        run.gone[task.id].set()


def _accept(run: Run, task: Planned) -> None:
    """Wait until the message is there to be received, and check that it is the right one."""
    assert task.channel is not None
    place = task.device.torch_device
    run.asked[task.id] = task.channel.accept(run.expected[task.id], place)


def _ask_ahead(following: int, run: Run, task: Planned) -> None:
    """Ask for the message of the channel's next RECV, now that this one is delivered."""
    assert task.channel is not None
    task.channel.post_next_receive(run.expected[following], task.device.torch_device)


def _receive(run: Run, task: Planned) -> None:
    assert task.channel is not None
    values = task.channel.receive(run.expected[task.id], run.asked.pop(task.id))
    run.nbytes[task.id] = transfer.nbytes(values)
    run.values[task.id] = transfer.receive(values, task.device, task.device.stream("compute"))


def _check_streams(graph: TaskGraph, sends: Iterable[int]) -> None:
    """Raise for messages to other processes that have a stream a micro-batch."""
    for send in sends:
        stream = graph.task(send).stream
        if "/" in stream:
            raise ArgumentError(
                f"{graph.task(send)} of device {graph.device[send]} is on stream {stream!r}, of "
                "one micro-batch, and goes to another process: messages between two processes "
                'arrive in the order in which they are sent; lower with streams="per_peer", or run '
                "all devices in one process"
            )


def _routes(graph: TaskGraph, ranks: Sequence[int]) -> dict[int, ChannelRoute]:
    """Return the route of each SEND to another process; ``ranks`` are those of the devices."""
    found = {}
    for task in np.flatnonzero(graph.is_op(SENDS)).tolist():
        source, target = int(graph.device[task]), int(graph.device[graph.pair[task]])
        if ranks[source] != ranks[target]:
            op = Op(graph.op[task])
            found[task] = ChannelRoute(ranks[source], ranks[target], source, target, op)
    return found


def _blocking_streams(graph: TaskGraph, away: Mapping[int, ChannelRoute]) -> set[int]:
    """Return the streams whose messages are waited for: all but those that only send ahead."""
    waited = {
        int(graph.stream[task]) for task in away if graph.rendezvous or graph.is_op(RECVS)[task]
    }
    compute = {int(graph.stream[t]) for t in away if graph.task(t).stream == "compute"}
    return waited | compute


def _following(away: Mapping[int, ChannelRoute]) -> dict[int, int]:
    """Return the next message of the same route after each; they keep the order of the tasks."""
    found, last = {}, dict[ChannelRoute, int]()
    for task in sorted(away, reverse=True):
        if away[task] in last:
            found[task] = last[away[task]]
        last[away[task]] = task
    return found


def _reduction_groups(
    graph: TaskGraph, ranks: Sequence[int], processes: Processes | None
) -> dict[int, ProcessGroup]:
    """Return the process group of each collective that spans processes; made in one order."""
    if processes is None:
        return {}
    found = {}
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        among = sorted({ranks[graph.device[t]] for t in members})
        if len(among) > 1:  # a group for each stage, so that none waits for another's
            stage = int(graph.stage[members[0]])
            found[number] = processes.group(among, key=f"gradients {stage}")
    return found

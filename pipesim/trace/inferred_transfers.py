"""Transfers of a measured step: add those that a trace lacks, and time them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pipesim.graph.tasks import StreamKind
from pipesim.ops import COLLECTIVES, COMPUTE, TRANSFERS, Action, Op
from pipesim.trace.clock_offsets import ClockBound

__all__ = ["MeasuredTask", "add_transfers", "charge_gaps", "clock_bounds"]


class MeasuredTask(NamedTuple):
    """Start, end (s) and device of a task.

    ``on_device``: whether a GPU recorded the times. ``issue``: when it was issued, if not at its
    start. ``other_half``: the other half of an overlapped action.
    """

    device: int
    start: float
    end: float
    on_device: bool = False
    stream: int = StreamKind.COMPUTE
    issue: float | None = None
    other_half: Action | None = None

    @property
    def issue_time(self) -> float:
        """Issue time (s)."""
        return self.start if self.issue is None else self.issue

    def shifted(self, seconds: float) -> MeasuredTask:
        """Return the task on a clock that is ahead by ``seconds``."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


_TasksByAction = Mapping[Action, MeasuredTask]


class _Message(NamedTuple):
    """A message from one device to another: its producer, its two ends and its consumer."""

    producer: Action
    send: Action
    recv: Action
    consumer: Action


def clock_bounds(tasks: _TasksByAction) -> list[ClockBound]:
    """Return the messages that constrain the offsets between device clocks.

    Messages from the F and to the B of an overlapped action are left out: the times at which it
    ended the F and started the B may be guessed.
    """
    return [
        ClockBound(
            tasks[message.producer].device,
            tasks[message.consumer].device,
            tasks[message.producer].end,
            tasks[message.consumer].start,
        )
        for message in _messages(tasks)
        if _last_half(tasks, message.producer) == message.producer
        and _first_half(tasks, message.consumer) == message.consumer
    ]


def add_transfers(tasks: _TasksByAction) -> dict[Action, MeasuredTask]:
    """Return the tasks of a step with a SEND and a RECV for each message between devices.

    A recorded SEND keeps its times, but starts no earlier than the end of its producer. A missing
    SEND is placed at that end and takes no time.

    A recorded RECV shows when it was posted, seldom when the message arrived. Arrivals are:

    - recorded, for a GPU's own communication;
    - the start of the consumer, for a message whose device was idle when it left: the device
      waited for it. The median of these is how long a message usually takes;
    - else that long after the message left, or the start of the consumer, if that is sooner or if
      the device was idle by then.
    """
    moved = COLLECTIVES - {Op.GRAD_NORM}  # which is on the compute stream
    result = {
        action: task._replace(stream=StreamKind.COLLECTIVE) if action.op in moved else task
        for action, task in tasks.items()
        if action.op not in TRANSFERS
    }
    previous_end = _previous_ends(result)
    messages = [
        message._replace(consumer=_actual_consumer(tasks, message)) for message in _messages(tasks)
    ]
    messages.sort(key=lambda message: _departure(tasks, message)[0])
    usual = _usual_seconds(tasks, messages, previous_end)
    stream_ends: dict[tuple[int, int], float] = {}  # of the last task of each copy stream
    for message in messages:
        producer, consumer = tasks[message.producer], tasks[message.consumer]
        send_stream = int(StreamKind.send(np.array(consumer.device)))
        recv_stream = int(StreamKind.recv(np.array(producer.device)))
        start, sent = _departure(tasks, message)
        start = max(start, stream_ends.get((producer.device, send_stream), start))
        sent = max(start, sent)
        result[message.send] = MeasuredTask(
            producer.device, start, sent, stream=send_stream, issue=start
        )
        posted, arrival = _receive_times(
            tasks.get(message.recv),
            start,
            sent + usual,
            idle_since=previous_end[message.consumer],
            used=consumer.start,
        )
        posted = max(posted, stream_ends.get((consumer.device, recv_stream), -math.inf))
        arrival = max(posted, arrival)
        result[message.recv] = MeasuredTask(
            consumer.device, posted, arrival, stream=recv_stream, issue=start
        )
        stream_ends[producer.device, send_stream] = sent
        stream_ends[consumer.device, recv_stream] = arrival
    return result


def _receive_times(
    recv: MeasuredTask | None, start: float, arrival: float, *, idle_since: float, used: float
) -> tuple[float, float]:
    """Return when a RECV was posted, and when its message arrived (s).

    Parameters
    ----------
    recv
        The recorded RECV, if any.
    start
        When the message began to leave.
    arrival
        When it would have arrived after the usual time.
    idle_since, used
        When the device was ready for the consumer, and when the consumer started.
    """
    if recv is not None and recv.on_device:
        arrival = recv.end
    elif arrival > idle_since:
        arrival = used
    arrival = min(max(arrival, start), used)
    posted = start if recv is None else max(start, recv.start)
    return min(posted, arrival), arrival


def _usual_seconds(
    tasks: _TasksByAction, messages: list[_Message], previous_end: Mapping[Action, float]
) -> float:
    """Return the median time of the messages that devices waited for (s), or 0."""
    durations = [
        tasks[message.consumer].start - sent
        for message in messages
        if (sent := _departure(tasks, message)[1]) > previous_end[message.consumer]
    ]
    return max(0.0, statistics.median(durations)) if durations else 0.0


def charge_gaps(tasks: _TasksByAction) -> dict[Action, MeasuredTask]:
    """Start tasks where the task before them on their device ended, unless they waited.

    A task waited if a message to it left after that end. Otherwise the device was busy between the
    two: it posted and fetched messages, or ran the program between them.
    """
    previous_end = _previous_ends(tasks)
    last_sent = dict.fromkeys(tasks, -math.inf)
    for message in _messages(tasks):
        consumer = _actual_consumer(tasks, message)
        last_sent[consumer] = max(last_sent[consumer], _departure(tasks, message)[1])
    return {
        action: task._replace(start=min(task.start, previous_end[action]))
        if last_sent[action] <= previous_end.get(action, -math.inf)
        and math.isfinite(previous_end.get(action, -math.inf))
        else task
        for action, task in tasks.items()
    }


def _messages(tasks: _TasksByAction) -> Iterator[_Message]:
    """Yield the messages between devices: outputs to the next stage, gradients back, skips."""
    for action in tasks:
        stage, op, microbatch, peer, _ = action
        if peer >= 0:
            continue
        if op == Op.F:
            consumer = Action(stage + 1, Op.F, microbatch)
            kinds = (Op.SEND_F, Op.RECV_F)
        elif op in (Op.B, Op.I):
            whole = Action(stage - 1, Op.B, microbatch)
            consumer = whole if whole in tasks else Action(stage - 1, Op.I, microbatch)
            kinds = (Op.SEND_B, Op.RECV_B)
        else:
            continue
        if consumer in tasks and tasks[consumer].device != tasks[action].device:
            yield _Message(
                action,
                Action(stage, kinds[0], microbatch),
                Action(consumer.stage, kinds[1], microbatch),
                consumer,
            )
    yield from _skip_messages(tasks)


def _skip_messages(tasks: _TasksByAction) -> Iterator[_Message]:
    """Yield the messages of skips between devices, where at least one end was recorded."""
    for send, recv, ops in (
        (Op.SEND_F, Op.RECV_F, (Op.F,)),
        (Op.SEND_B, Op.RECV_B, (Op.B, Op.I)),
    ):
        ends = {(a.stage, a.peer_stage, a.microbatch) for a in tasks
                if a.op == send and a.peer_stage >= 0}  # fmt: skip
        ends |= {(a.peer_stage, a.stage, a.microbatch) for a in tasks
                 if a.op == recv and a.peer_stage >= 0}  # fmt: skip
        for source, target, microbatch in sorted(ends, key=str):
            producer, consumer = (
                next((a for op in ops if (a := Action(stage, op, microbatch)) in tasks), None)
                for stage in (source, target)
            )
            if producer and consumer and tasks[producer].device != tasks[consumer].device:
                yield _Message(
                    producer,
                    Action(source, send, microbatch, target),
                    Action(target, recv, microbatch, source),
                    consumer,
                )


def _departure(tasks: _TasksByAction, message: _Message) -> tuple[float, float]:
    """Return when a message began to leave, and when it had left (s)."""
    send = tasks.get(message.send)
    ready = tasks[_last_half(tasks, message.producer)].end
    if send is None:
        return ready, ready
    return max(ready, send.start), max(ready, send.end)


def _actual_consumer(tasks: _TasksByAction, message: _Message) -> Action:
    """Return the action that used a message.

    An overlapped action used it from its start, if the message had left by then.
    """
    first = _first_half(tasks, message.consumer)
    return first if _departure(tasks, message)[1] <= tasks[first].start else message.consumer


def _first_half(tasks: _TasksByAction, action: Action) -> Action:
    """Return the F of the overlapped action that an action is half of, or the action itself."""
    other = tasks[action].other_half
    return action if other is None or action.op == Op.F else other


def _last_half(tasks: _TasksByAction, action: Action) -> Action:
    """Return the B of the overlapped action that an action is half of, or the action itself."""
    other = tasks[action].other_half
    return action if other is None or action.op != Op.F else other


def _previous_ends(tasks: _TasksByAction) -> dict[Action, float]:
    """Return, for each compute task, the end of the task before it on its device (s), or -inf."""
    previous_end: dict[Action, float] = {}
    last_end: dict[int, float] = {}
    for action in sorted(tasks, key=lambda a: (tasks[a].start, tasks[a].end)):
        if action.op in COMPUTE:
            device = tasks[action].device
            previous_end[action] = last_end.get(device, -math.inf)
            last_end[device] = tasks[action].end
    return previous_end

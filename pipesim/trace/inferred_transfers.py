"""Transfers of a measured step: put between stages where a trace has none, and given times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pipesim.graph.tasks import StreamKind
from pipesim.ops import COLLECTIVES, COMPUTE, TRANSFERS, Action, Op
from pipesim.trace.clock_offsets import Message

__all__ = ["Placed", "add_transfers", "charge_gaps", "messages"]


class Placed(NamedTuple):
    """When a task ran, and where; seconds.

    ``on_device`` says whether the times are a GPU's own; ``key`` orders the tasks' issue;
    ``other`` is the other half of an overlapped action.
    """

    device: int
    start: float
    end: float
    on_device: bool = False
    stream: int = StreamKind.COMPUTE
    issue: float | None = None
    other: Action | None = None

    @property
    def key(self) -> float:
        """When it counts as issued."""
        return self.start if self.issue is None else self.issue

    def moved(self, seconds: float) -> Placed:
        """Return the same on another clock."""
        return self._replace(start=self.start + seconds, end=self.end + seconds)


class _Edge(NamedTuple):
    """A hand-over from one device to another, and the two ends of its message."""

    producer: Action
    send: Action
    recv: Action
    consumer: Action


def messages(placed: Mapping[Action, Placed]) -> list[Message]:
    """Return what says how the clocks of devices stand to each other.

    When an overlapped action was done with its F, and when it went on to its B, may be guessed.
    """
    return [
        Message(
            placed[edge.producer].device,
            placed[edge.consumer].device,
            placed[edge.producer].end,
            placed[edge.consumer].start,
        )
        for edge in _edges(placed)
        if _last(placed, edge.producer) == edge.producer
        and _first(placed, edge.consumer) == edge.consumer
    ]


def add_transfers(placed: Mapping[Action, Placed]) -> dict[Action, Placed]:
    """Return the tasks of a step with a SEND and a RECV for each hand-over between devices.

    A recorded SEND keeps its times, but for a start before the end of what it sends; where there
    is none, the hand-over is at that end and takes no time. What a trace shows of a RECV is that
    it was posted, seldom when the message came. A message whose device was idle when it left was
    waited for: it came when its consumer started. Their median is how long a message usually
    takes; any other came that long after it left, or when its consumer started, if that is sooner
    or if the device was idle by then. Those of a GPU's own communication are taken as they are.
    """
    result = {
        action: each._replace(stream=StreamKind.COLLECTIVE) if action.op in COLLECTIVES else each
        for action, each in placed.items()
        if action.op not in TRANSFERS
    }
    free = _free(result)
    edges = [edge._replace(consumer=_user(placed, edge)) for edge in _edges(placed)]
    edges.sort(key=lambda edge: _sent(placed, edge)[0])
    taken = [
        placed[edge.consumer].start - _sent(placed, edge)[1]
        for edge in edges
        if _sent(placed, edge)[1] > free[edge.consumer]
    ]
    usual = max(0.0, statistics.median(taken)) if taken else 0.0
    ends: dict[tuple[int, int], float] = {}  # of the last task of each copy stream
    for edge in edges:
        producer, consumer = placed[edge.producer], placed[edge.consumer]
        out = int(StreamKind.send(np.array(consumer.device)))
        into = int(StreamKind.recv(np.array(producer.device)))
        left, gone = _sent(placed, edge)
        left = max(left, ends.get((producer.device, out), left))
        gone = max(left, gone)
        result[edge.send] = Placed(producer.device, left, gone, stream=out, issue=left)
        came = gone + usual
        recv = placed.get(edge.recv)
        if recv is not None and recv.on_device:
            came = recv.end
        elif came > free[edge.consumer]:
            came = consumer.start
        came = min(max(came, left), consumer.start)
        begun = left if recv is None else max(left, recv.start)
        reached = ends.get((consumer.device, into), -math.inf)
        begun = max(min(begun, came), reached)
        came = max(begun, came)
        result[edge.recv] = Placed(consumer.device, begun, came, stream=into, issue=left)
        ends[producer.device, out], ends[consumer.device, into] = gone, came
    return result


def charge_gaps(placed: Mapping[Action, Placed]) -> dict[Action, Placed]:
    """Let tasks begin where the one before them on their device ended, unless they waited.

    A task waited if a message to it left after that end. Otherwise the device was busy between the
    two: it posted and fetched messages, or ran the program between them.
    """
    free = _free(placed)
    left = dict.fromkeys(placed, -math.inf)
    for edge in _edges(placed):
        user = _user(placed, edge)
        left[user] = max(left[user], _sent(placed, edge)[1])
    return {
        action: each._replace(start=min(each.start, free[action]))
        if left[action] <= free.get(action, -math.inf)
        and math.isfinite(free.get(action, -math.inf))
        else each
        for action, each in placed.items()
    }


def _edges(placed: Mapping[Action, Placed]) -> Iterator[_Edge]:
    """Yield the hand-overs between devices: outputs to the next stage, gradients back, skips."""
    for action in placed:
        stage, op, microbatch, peer, _ = action
        if peer >= 0:
            continue
        if op == Op.F:
            consumer = Action(stage + 1, Op.F, microbatch)
            kinds = (Op.SEND_F, Op.RECV_F)
        elif op in (Op.B, Op.I):
            whole = Action(stage - 1, Op.B, microbatch)
            consumer = whole if whole in placed else Action(stage - 1, Op.I, microbatch)
            kinds = (Op.SEND_B, Op.RECV_B)
        else:
            continue
        if consumer in placed and placed[consumer].device != placed[action].device:
            yield _Edge(
                action,
                Action(stage, kinds[0], microbatch),
                Action(consumer.stage, kinds[1], microbatch),
                consumer,
            )
    yield from _skip_edges(placed)


def _skip_edges(placed: Mapping[Action, Placed]) -> Iterator[_Edge]:
    """Yield what skips hand over between devices, as far as either end of it was recorded."""
    for send, recv, ops in (
        (Op.SEND_F, Op.RECV_F, (Op.F,)),
        (Op.SEND_B, Op.RECV_B, (Op.B, Op.I)),
    ):
        ends = {(a.stage, a.peer_stage, a.microbatch) for a in placed
                if a.op == send and a.peer_stage >= 0}  # fmt: skip
        ends |= {(a.peer_stage, a.stage, a.microbatch) for a in placed
                 if a.op == recv and a.peer_stage >= 0}  # fmt: skip
        for source, target, microbatch in sorted(ends, key=str):
            made, needed = (
                next((a for op in ops if (a := Action(stage, op, microbatch)) in placed), None)
                for stage in (source, target)
            )
            if made and needed and placed[made].device != placed[needed].device:
                yield _Edge(
                    made,
                    Action(source, send, microbatch, target),
                    Action(target, recv, microbatch, source),
                    needed,
                )


def _sent(placed: Mapping[Action, Placed], edge: _Edge) -> tuple[float, float]:
    """Return when a message began to leave, and when it was gone."""
    send = placed.get(edge.send)
    ready = placed[_last(placed, edge.producer)].end
    if send is None:
        return ready, ready
    return max(ready, send.start), max(ready, send.end)


def _user(placed: Mapping[Action, Placed], edge: _Edge) -> Action:
    """Return what used a message: an overlapped action from its start, if it had left by then."""
    first = _first(placed, edge.consumer)
    return first if _sent(placed, edge)[1] <= placed[first].start else edge.consumer


def _first(placed: Mapping[Action, Placed], action: Action) -> Action:
    """Return the F half of the overlapped action that an action is half of, or itself."""
    other = placed[action].other
    return action if other is None or action.op == Op.F else other


def _last(placed: Mapping[Action, Placed], action: Action) -> Action:
    """Return the B half of the overlapped action that an action is half of, or itself."""
    other = placed[action].other
    return action if other is None or action.op != Op.F else other


def _free(placed: Mapping[Action, Placed]) -> dict[Action, float]:
    """Return when the task before each ended on its device's compute stream."""
    free: dict[Action, float] = {}
    ended: dict[int, float] = {}
    for action in sorted(placed, key=lambda a: (placed[a].start, placed[a].end)):
        if action.op in COMPUTE:
            device = placed[action].device
            free[action] = ended.get(device, -math.inf)
            ended[device] = placed[action].end
    return free

"""Where a step stands: what each device is at, and whether anything still moves."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from pipeexec.devices.streams import Event
from pipeexec.distributed.failure import Failure, stall_failure
from pipeexec.distributed.status import Head, Status
from pipesim.graph.graph import TaskGraph
from pipesim.ops import RECVS, SENDS, Op

__all__ = ["Progress", "StepHeads"]


class StepHeads:
    """Finds what each device is at, from the events of a step.

    Parameters
    ----------
    graph
        What runs.
    began, ended
        An event a task, or None for those not issued, or of other processes.
    """

    def __init__(
        self, graph: TaskGraph, began: Sequence[Event | None], ended: Sequence[Event | None]
    ) -> None:
        self.graph, self.began, self.ended = graph, began, ended

    def _has_ended(self, task: int) -> bool:
        event = self.ended[task]
        return event is not None and event.is_set()

    def status(self, rank: int, step: int) -> Status:
        """Return how many tasks have ended, and the head of each device's streams."""
        n_ended, heads = 0, []
        nearest: dict[int, tuple[str, int]] = {}
        for number, (device, name) in enumerate(self.graph.streams):
            queue = self.graph.queues[number]
            if not len(queue) or self.began[queue[0]] is None:
                continue  # not issued yet, or of another process
            done = bisect_left(queue, True, key=lambda task: not self._has_ended(task))
            n_ended += done
            if done < len(queue) and self._is_nearer(name, int(queue[done]), nearest.get(device)):
                nearest[device] = name, int(queue[done])
        for device, (_, task) in sorted(nearest.items()):
            heads.append(self._head(device, task))
        return Status(rank, step, True, n_ended, heads)

    def _is_nearer(self, name: str, task: int, other: tuple[str, int] | None) -> bool:
        """Return whether a stream's head says more of its device than that of one before it.

        A compute task does, unless it waits while a collective runs. Streams come in the order of
        their names.
        """
        if other is None or name != "compute":
            return other is None
        return self._has_begun(task) or not self._has_begun(other[1])

    def _has_begun(self, task: int) -> bool:
        event = self.began[task]
        return event is not None and event.is_set()

    def _head(self, device: int, task: int) -> Head:
        view, running = self.graph.task(task), self._has_begun(task)
        place = f"stage {view.stage}"
        place += "" if view.microbatch is None else f", micro-batch {view.microbatch}"
        return Head(device, str(view), place, running, "" if running else self._waits_for(task))

    def _waits_for(self, task: int) -> str:
        """Return the tasks that one waits for, and where their message comes from."""
        graph = self.graph
        needed = [int(t) for t in graph.precedence[task] if not self._has_ended(int(t))]
        if graph.is_op(RECVS | SENDS)[task]:
            needed = [int(graph.pair[task])]  # the other side
        return " and ".join(self._named(t) for t in needed)

    def _named(self, task: int) -> str:
        graph = self.graph
        other = int(graph.device[graph.pair[task]]) if graph.pair[task] >= 0 else -1
        if Op(graph.op[task]) in RECVS:
            return f"{graph.task(task)} from device {other}"
        return f"{graph.task(task)} of device {int(graph.device[task])}"


class Progress:
    """Notices when nothing has moved for as long as a timeout (None: waits for ever)."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.failure: Failure | None = None
        self._last_progress = -1, time.monotonic()

    def stalled(self, status: Status) -> bool:
        """Note a status; return whether it has been the same for too long."""
        now = time.monotonic()
        if status.n_ended != self._last_progress[0]:
            self._last_progress = status.n_ended, now
        if self.timeout is not None and now - self._last_progress[1] > self.timeout:
            self.failure = stall_failure([status], self.timeout)
        return self.failure is not None

"""Progress of a step: the current task of each device, and whether the step has stalled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pipeexec.devices.running_clock import RunningTimer
from pipeexec.devices.streams import Event
from pipeexec.distributed.failure import Failure, stall_failure
from pipeexec.distributed.status import Head, Status
from pipesim.graph.graph import TaskGraph
from pipesim.ops import RECVS, SENDS, Op


class StepHeads:
    """Find the current task of each device from the events of a step.

    Parameters
    ----------
    graph
        Task graph.
    start_events, end_events
        An event a task; None if the task is not issued, or of another process.
    """

    def __init__(
        self,
        graph: TaskGraph,
        start_events: Sequence[Event | None],
        end_events: Sequence[Event | None],
    ) -> None:
        self.graph, self.start_events, self.end_events = graph, start_events, end_events

    def _has_ended(self, task: int) -> bool:
        event = self.end_events[task]
        return event is not None and event.is_set()

    def status(self, rank: int, step: int) -> Status:
        """Return how many tasks have ended, and the head of each device's streams."""
        n_ended, heads = 0, []
        head_of_device: dict[int, tuple[str, int]] = {}
        for number, (device, name) in enumerate(self.graph.streams):
            queue = self.graph.queues[number]
            if not len(queue) or self.start_events[queue[0]] is None:
                continue  # not issued yet, or of another process
            done = bisect_left(queue, True, key=lambda task: not self._has_ended(task))
            n_ended += done
            if done == len(queue):
                continue
            if self._is_preferred(name, int(queue[done]), head_of_device.get(device)):
                head_of_device[device] = name, int(queue[done])
        for device, (_, task) in sorted(head_of_device.items()):
            heads.append(self._head(device, task))
        return Status(rank, step, True, n_ended, heads)

    def _is_preferred(self, name: str, task: int, other: tuple[str, int] | None) -> bool:
        """Return whether a stream's head replaces that of an earlier stream of the same device.

        A compute task replaces another, unless it waits while the other, a collective, runs.
        Streams come in the order of their names.
        """
        if other is None or name != "compute":
            return other is None
        return self._has_started(task) or not self._has_started(other[1])

    def _has_started(self, task: int) -> bool:
        event = self.start_events[task]
        return event is not None and event.is_set()

    def _head(self, device: int, task: int) -> Head:
        view, is_running = self.graph.task(task), self._has_started(task)
        place = f"stage {view.stage}"
        place += "" if view.microbatch is None else f", micro-batch {view.microbatch}"
        blockers = "" if is_running else self._blockers_text(task)
        return Head(device, str(view), place, is_running, blockers)

    def _blockers_text(self, task: int) -> str:
        """Return the tasks that a task waits for, with their devices, as text."""
        graph = self.graph
        blockers = [int(t) for t in graph.precedence[task] if not self._has_ended(int(t))]
        if graph.is_op(RECVS | SENDS)[task]:
            blockers = [int(graph.pair[task])]  # the other end of the message
        return " and ".join(self._task_text(t) for t in blockers)

    def _task_text(self, task: int) -> str:
        """Return a task with its device; for a RECV, the device that sends."""
        graph = self.graph
        other = int(graph.device[graph.pair[task]]) if graph.pair[task] >= 0 else -1
        if Op(graph.op[task]) in RECVS:
            return f"{graph.task(task)} from device {other}"
        return f"{graph.task(task)} of device {int(graph.device[task])}"


class StallDetector:
    """Detect a stall: no task has ended for longer than a timeout (s; None for no limit).

    Time in which this process was frozen does not count; see `RunningTimer`.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.failure: Failure | None = None
        self._n_ended = -1
        self._timer = None if timeout is None else RunningTimer(timeout)

    def is_stalled(self, status: Status) -> bool:
        """Record a status; return whether no task has ended for longer than the timeout."""
        timer = self._timer
        if timer is None or self.failure is not None:
            return self.failure is not None
        if status.n_ended != self._n_ended:
            self._n_ended = status.n_ended
            timer.restart()
        elif timer.is_over:
            self.failure = stall_failure([status], timer.limit)
        return self.failure is not None

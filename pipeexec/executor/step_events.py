"""`StepEvents`: when the tasks of one step were issued, began and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pipeexec.devices import clocks
from pipeexec.devices.cpu_streams import CpuEvent
from pipeexec.devices.device import Device
from pipeexec.devices.remote import RemoteDevice
from pipeexec.devices.streams import Event
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.task_times import Milestone, Readings
from pipesim.graph.graph import TaskGraph

__all__ = ["StepEvents"]


class StepEvents:
    """Events and measurements of the tasks of one step.

    Attributes
    ----------
    clock
        Clocks of this process's devices; None before the first task is issued.
    zero
        When the step began (`time.perf_counter`, s).
    began, ended
        An event a task; None if not issued, or of other processes.
    ran
        Whether each task ran to its end.
    nbytes
        Bytes that each task moved.
    issued
        When the host issued each task, since ``zero`` (s).
    milestones
        Bucket-ready events within backwards and the functions that set them, by (task, bucket).
    sent_events
        Events that pass when posted messages are sent, by task.
    host_seconds
        Time that the host took to issue all tasks, or to launch them as one CUDA graph (s).
    took
        Time that host threads took to issue each task (s), NaN for others; None without them.
    is_replay
        Whether the host launched one CUDA graph.
    """

    def __init__(self, graph: TaskGraph, devices: Sequence[Device]) -> None:
        self.graph, self.devices = graph, devices
        local = [d for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)]
        #: Number of each local device among those of this process.
        self._numbers = {device: number for number, device in enumerate(local)}
        self.clock: clocks.Clocks | None = None
        self.zero = 0.0
        self.began: list[Event | None] = [None] * len(graph)
        self.ended: list[Event | None] = [None] * len(graph)
        self.ran = np.zeros(len(graph), dtype=bool)
        self.nbytes = np.zeros(len(graph))
        self.issued = [0.0] * len(graph)
        self.milestones: dict[tuple[int, int], tuple[Event, Callable[[], object]]] = {}
        self.sent_events: dict[int, CpuEvent] = {}
        self.host_seconds = 0.0
        self.took: NDArray[np.float64] | None = None
        self.is_replay = False

    def start(self) -> None:
        """Start the clocks."""
        self.clock = clocks.start([self.devices[d] for d in self._numbers])
        self.zero = perf_counter()

    @property
    def clock_error(self) -> float:
        """Largest error of time differences between devices of this process (s)."""
        return 0.0 if self.clock is None else self.clock.error

    def release_waiters(self, task: PlannedTask) -> None:
        """Set the events that a task was to set, as it will not run to its end."""
        if task.id in self.sent_events:
            self.sent_events[task.id].set()
        for bucket in range(0 if task.sync is None else task.sync.n_buckets_marked):
            event, set_event = self.milestones[task.id, bucket]
            if not event.is_set():  # the task may have set it before it failed
                set_event()

    def readings(self, tasks: Sequence[PlannedTask], *, may_be_running: bool) -> Readings:
        """Return the events of ``tasks``, of which some ``may_be_running``."""
        return Readings(
            graph=self.graph,
            clock=self.clock,
            numbers=[self._numbers.get(device, -1) for device in range(len(self.devices))],
            on_host=np.array([x.torch_device.type == "cpu" for x in self.devices]),
            began=self.began,
            ended=self.ended,
            ran=self.ran,
            leaders={t.id: t.sync.leader for t in tasks if t.sync and t.sync.leader >= 0},
            nbytes=self.nbytes,
            issued=self.issued,
            host_seconds=self.host_seconds,
            took=self.took,
            order=[task.id for task in tasks],
            is_replay=self.is_replay,
            milestones=list(self._awaited_milestones(tasks)) if self.milestones else (),
            may_be_running=may_be_running,
        )

    def _awaited_milestones(self, tasks: Sequence[PlannedTask]) -> Iterator[Milestone]:
        """Yield the bucket-ready events that reductions of this process waited for."""
        for task in tasks:
            for backward, bucket in () if task.sync is None else task.sync.milestones:
                began, ended = self.began[backward], self.ended[backward]
                if began is not None and ended is not None:
                    event, _ = self.milestones[backward, bucket]
                    yield Milestone(task.id, event, began, ended)

"""`StepEvents`: the start and end events and the issue times of the tasks of one step."""

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
from pipeexec.executor.results.task_times import Milestone, Readings
from pipesim.graph.graph import TaskGraph


class StepEvents:
    """Events and measurements of the tasks of one step.

    Attributes
    ----------
    clock
        Clocks of this process's devices; None before the first task is issued.
    zero
        Start of the step (`time.perf_counter`, s).
    start_events, end_events
        An event a task; None if the task is not issued, or of another process.
    ran
        Whether each task ran to its end.
    nbytes
        Bytes that each task moved.
    issued
        Time at which the host issued each task, relative to ``zero`` (s).
    milestones
        Bucket-ready events within backwards and the functions that set them, by (task, bucket).
    sent_events
        Events that are set when posted messages are sent, by task.
    host_seconds
        Time in which the host issued all tasks, or launched them as one CUDA graph (s).
    issue_seconds
        Time in which a host thread issued each task (s), NaN for others; None without them.
    is_replay
        Whether the host launched one CUDA graph.
    """

    def __init__(self, graph: TaskGraph, devices: Sequence[Device]) -> None:
        self.graph, self.devices = graph, devices
        local = [d for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)]
        #: Position of each local device among the devices of this process.
        self._local_numbers = {device: number for number, device in enumerate(local)}
        self.clock: clocks.Clocks | None = None
        self.zero = 0.0
        self.start_events: list[Event | None] = [None] * len(graph)
        self.end_events: list[Event | None] = [None] * len(graph)
        self.ran = np.zeros(len(graph), dtype=bool)
        self.nbytes = np.zeros(len(graph))
        self.issued = [0.0] * len(graph)
        self.milestones: dict[tuple[int, int], tuple[Event, Callable[[], object]]] = {}
        self.sent_events: dict[int, CpuEvent] = {}
        self.host_seconds = 0.0
        self.issue_seconds: NDArray[np.float64] | None = None
        self.is_replay = False

    def start(self) -> None:
        """Start the clocks."""
        self.clock = clocks.start([self.devices[d] for d in self._local_numbers])
        # A busy machine may suspend this thread before it asks for the time.
        zero = self.clock.host_zero
        self.zero = perf_counter() if zero is None else zero

    @property
    def clock_error(self) -> float:
        """Largest error of time differences between devices of this process (s)."""
        return 0.0 if self.clock is None else self.clock.error

    def release_waiters(self, task: PlannedTask) -> None:
        """Set the events that a task will not set itself, as it does not run to its end."""
        if task.id in self.sent_events:
            self.sent_events[task.id].set()
        for bucket in range(0 if task.sync is None else task.sync.n_buckets_marked):
            event, set_event = self.milestones[task.id, bucket]
            if not event.is_set():  # the task may have set it before its failure
                set_event()

    def readings(self, tasks: Sequence[PlannedTask], *, may_be_running: bool) -> Readings:
        """Return the events of ``tasks``; some of the tasks ``may_be_running``."""
        return Readings(
            graph=self.graph,
            clock=self.clock,
            local_numbers=[self._local_numbers.get(d, -1) for d in range(len(self.devices))],
            on_host=np.array([x.torch_device.type == "cpu" for x in self.devices]),
            start_events=self.start_events,
            end_events=self.end_events,
            ran=self.ran,
            leaders={t.id: t.sync.leader for t in tasks if t.sync and t.sync.leader >= 0},
            nbytes=self.nbytes,
            issued=self.issued,
            host_seconds=self.host_seconds,
            issue_seconds=self.issue_seconds,
            order=[task.id for task in tasks],
            is_replay=self.is_replay,
            milestones=list(self._awaited_milestones(tasks)) if self.milestones else (),
            may_be_running=may_be_running,
        )

    def _awaited_milestones(self, tasks: Sequence[PlannedTask]) -> Iterator[Milestone]:
        """Yield the bucket-ready events that reductions of this process waited for."""
        for task in tasks:
            for backward, bucket in () if task.sync is None else task.sync.milestones:
                start, end = self.start_events[backward], self.end_events[backward]
                if start is not None and end is not None:
                    event, _ = self.milestones[backward, bucket]
                    yield Milestone(task.id, event, start, end)

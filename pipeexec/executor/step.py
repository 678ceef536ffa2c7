"""`Step`: one running step. Issue its tasks, wait for the devices, record the first failure.

`StepEvents` has when its tasks started and ended, `StepHeads` and `StallDetector` where it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeexec.devices import clocks
from pipeexec.devices.device import Device, RemoteDevice, Values
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.devices.streams import CpuEvent, Event
from pipeexec.distributed.channels import ExpectedMessage, PostedReceive
from pipeexec.distributed.flight_recorder import N_BEGUN, N_ENDED
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.watchdog import Failure, Head, Status, stall_failure
from pipeexec.executor.planned_task import Handler, PlannedTask, Source
from pipeexec.executor.step_gradients import StepGradients
from pipeexec.executor.step_inputs import StepInputs
from pipeexec.executor.step_part import StepPart
from pipeexec.executor.step_result import Milestone, ProcessResult, Readings
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import RECVS, SENDS, Op

if TYPE_CHECKING:
    from pipeexec.executor.host_threads import HostThreads


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


class StepHeads:
    """Find the current task of each device from the events of a step."""

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
        n_ended = 0
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
        heads = [self._head(device, task) for device, (_, task) in sorted(head_of_device.items())]
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
        graph, view, is_running = self.graph, self.graph.task(task), self._has_started(task)
        place = f"stage {view.stage}"
        place += "" if view.microbatch is None else f", micro-batch {view.microbatch}"
        blockers: list[int] = []
        if not is_running and graph.is_op(RECVS | SENDS)[task]:
            blockers = [int(graph.pair[task])]  # the other end of the message
        elif not is_running:
            blockers = [int(t) for t in graph.precedence[task] if not self._has_ended(int(t))]
        text = " and ".join(self._task_text(t) for t in blockers)
        return Head(device, str(view), place, is_running, text)

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


#: Seconds between two checks of whether a step makes progress.
_CHECK_SECONDS = 0.1
#: Seconds that the tasks of an interrupted step of one process have to end.
_DRAIN_SECONDS = 5.0
#: The same after another thread closed the pipeline.
_CLOSE_SECONDS = 0.5


class Step:
    """One running step.

    Handlers of tasks use ``inputs``, ``gradients``, ``events`` and the results of other tasks. The
    other attributes serve the host that issues the tasks.

    Parameters
    ----------
    timeout
        Seconds without progress after which a step of one process is abandoned; None for never.
    processes
        Processes of the pipeline; None if there is one.
    hosts
        Threads that issue the tasks; None if the caller's thread does.
    frees
        Tasks for which a task waits, and whose results it drops when it is issued.
    parts
        Features of a step that trains; none of an evaluation.

    Attributes
    ----------
    state
        Values of the step that belong to a part.
    results
        Result of each task, until the tasks whose input it is have taken it.
    input_counts
        Tensors that came by each edge to a stage that takes several outputs, by slot and
        micro-batch.
    expected_messages, posted_receives
        Messages to and from other processes, and posted receives, by task.
    failure
        The first failure: task (-1 for none) and error.
    host_error
        First error of a host thread.
    abandoned
        Whether the step was abandoned; its tasks may still be running.
    """

    def __init__(
        self,
        graph: TaskGraph,
        devices: Sequence[Device],
        inputs: StepInputs | None = None,
        gradients: StepGradients | None = None,
        *,
        timeout: float | None = None,
        processes: Processes | None = None,
        hosts: HostThreads | None = None,
        frees: Mapping[int, Sequence[int]] = MappingProxyType({}),
        parts: Sequence[StepPart] = (),
    ) -> None:
        self.graph, self.devices = graph, devices
        self._inputs, self._gradients = inputs, gradients
        self.events = StepEvents(graph, devices)
        self.processes, self.hosts, self.frees = processes, hosts, frees
        self.parts, self.state = parts, dict[StepPart, Any]()
        self.results: list[Values | None] = [None] * len(graph)
        self.input_counts: dict[tuple[int, int], list[int]] = {}
        self._takers: dict[int, list[None]] = {}
        self.expected_messages: dict[int, ExpectedMessage] = {}
        self.posted_receives: dict[int, PostedReceive] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.host_error: BaseException | None = None
        self.abandoned = False
        self._issued_tasks: Sequence[PlannedTask] = ()
        self._all_issued: Sequence[CpuEvent] = ()  # one event a host thread
        self._task_slots = memoryview(b"") if processes is None else processes.recorder.own
        self._heads = StepHeads(graph, self.events.start_events, self.events.end_events)
        self._last_status: Status | None = None  # from before the first failure
        self._stall_detector = StallDetector(timeout)
        self._drain: RunningTimer | None = None  # for tasks of an interrupted step to end

    @property
    def inputs(self) -> StepInputs:
        """The inputs of the step."""
        assert self._inputs is not None
        return self._inputs

    @property
    def gradients(self) -> StepGradients:
        """The gradients of the step."""
        assert self._gradients is not None
        return self._gradients

    @property
    def number(self) -> int:
        """Number of the step; 0 without inputs."""
        return 0 if self._inputs is None else self._inputs.number

    def walk(self, tasks: Sequence[PlannedTask]) -> None:
        """Issue every task, then wait for the devices."""
        try:
            self.issue(tasks)
            self._wait(tasks)
            if self.host_error is not None:
                raise self.host_error
            if not self.abandoned:
                for device in self.devices:
                    device.synchronize()
        except BaseException as error:
            self.failure = self.failure or (-1, error)
            if self.processes is None:
                self._drain = RunningTimer(_DRAIN_SECONDS)  # a stage may hang
                self._wait(tasks)
            raise

    def issue(self, tasks: Sequence[PlannedTask]) -> None:
        """Submit every task to its stream, or start the host threads that do; do not wait."""
        events = self.events
        events.start()
        if self.processes is not None:
            self._task_slots[N_ENDED], self._task_slots[N_BEGUN] = self.number, self.number + 1
        self._issued_tasks = tasks
        if self.hosts is not None:
            events.issue_seconds = np.full(len(self.graph), np.nan)
            self._all_issued = self.hosts.start(self)
            return
        self.submit(tasks)
        events.host_seconds = perf_counter() - events.zero

    def submit(self, tasks: Iterable[PlannedTask]) -> None:
        """Submit tasks to their streams in order; those that they wait for come before them."""
        events = self.events
        start_events, end_events = events.start_events, events.end_events
        issued, zero, frees = events.issued, events.zero, self.frees
        run_handler, set_start = self._run_handler, start_events.__setitem__
        for task in tasks:
            stream, waits = task.stream, [end_events[needed] for needed in task.waits]
            if task.id in frees:
                for needed in frees[task.id]:
                    stream.wait_event(end_events[needed])  # type: ignore[arg-type]  # issued before
                    self.results[needed] = None  # not earlier: freed memory waits for this stream
            if task.sync is not None:
                for milestone in task.sync.milestones:
                    stream.wait_event(events.milestones[milestone][0])
                for bucket in range(task.sync.n_buckets_marked):
                    events.milestones[task.id, bucket] = stream.event_inside()
            issued[task.id] = perf_counter() - zero
            if task.remote is not None:
                self._submit_remote(task, waits)
                continue
            end_events[task.id] = stream.run(
                partial(run_handler, task, task.handler, True),
                waits,  # type: ignore[arg-type]  # issued before
                partial(set_start, task.id),
            )

    def _submit_remote(self, task: PlannedTask, waits: Iterable[Event | None]) -> None:
        """Submit a task with a remote part: a message, a collective, or a flight-recorder slot."""
        stream, remote, events = task.stream, task.remote, self.events
        assert remote is not None
        for event in waits:
            stream.wait_event(event)  # type: ignore[arg-type]  # issued before
        if remote.before_start is not None:
            stream.submit(partial(self._run_handler, task, remote.before_start, False))
        events.start_events[task.id] = stream.record()
        if remote.send_waiter is not None:
            events.sent_events[task.id] = CpuEvent()
        stream.submit(partial(self._run_handler, task, task.handler, True))
        if remote.send_waiter is not None:
            stream.wait_event(events.sent_events[task.id])
        events.end_events[task.id] = stream.record()
        if remote.after_end is not None:
            stream.submit(partial(self._run_handler, task, remote.after_end, True))

    def _run_handler(self, task: PlannedTask, handler: Handler, is_last: bool) -> None:
        """Run a part of a task, unless the step has stopped; the first failure stops the step."""
        if self.failure is not None or self.abandoned:
            self.events.release_waiters(task)
            return
        slot = -1 if task.remote is None else task.remote.task_slot
        if slot >= 0:
            self._task_slots[slot] = task.id + 1
        try:
            handler(self, task)
        except BaseException as error:
            self.fail(task, error)
            self.events.release_waiters(task)
        else:
            self.events.ran[task.id] = is_last
            if slot >= 0:
                self._task_slots[slot] = 0

    def pop_result(self, task: int) -> Values:
        """Pop and return the result of a task."""
        values, self.results[task] = self.results[task], None
        return values or ()

    def source_values(self, source: Source, microbatch: int) -> Values:
        """Return the values of a source."""
        values = self.results[source.task] or ()
        if source.edge < 0:
            return values
        counts = self.input_counts[source.slot, microbatch]
        first = sum(counts[: source.edge])
        return values[first : first + counts[source.edge]]

    def pop_source(self, source: Source, microbatch: int) -> Values:
        """Return the values of a source; drop the result once all its consumers have taken it."""
        values = self.source_values(source, microbatch)
        if source.n_consumers > 1:
            takers = self._takers.setdefault(source.task, [])
            takers.append(None)  # of several threads: none may count what another has not added
            if len(takers) < source.n_consumers:
                return values
        self.results[source.task] = None
        return values

    @property
    def has_stopped(self) -> bool:
        """Whether no more tasks are to be issued: a task failed, or the step was abandoned."""
        return self.failure is not None or self.abandoned

    def _wait(self, tasks: Sequence[PlannedTask]) -> None:
        """Wait until all tasks are issued and every stream has run them, or the step stalls."""
        for issued in self._all_issued:
            while not self.abandoned and not issued.wait(_CHECK_SECONDS):
                self._check_stall()
        events = self.events
        if events.issue_seconds is not None:
            events.host_seconds = float(np.nansum(events.issue_seconds))
        last = {t.stream: event for t in tasks if (event := events.end_events[t.id]) is not None}
        for event in last.values():
            while not self.abandoned and not event.wait(_CHECK_SECONDS):
                self._check_stall()

    def _check_stall(self) -> None:
        """Abandon a step that will not end."""
        if self.processes is not None:
            self.processes.watch.check_store()
            self.abandoned = self.failure is not None or self.processes.watch.failure is not None
        elif self._stall_detector.is_stalled(self.status()) or (
            self._drain is not None and self._drain.is_over
        ):
            self.abandoned = True

    @property
    def stall(self) -> Failure | None:
        """The stall, if no task has ended for ``timeout`` seconds; else None."""
        return self._stall_detector.failure

    def status(self) -> Status:
        """Return the running task of each device; in a failed step, those before the failure."""
        if self._last_status is not None:
            return self._last_status
        return self._heads.status(0 if self.processes is None else self.processes.rank, self.number)

    def fail(self, task: PlannedTask, error: BaseException) -> None:
        """Record the first failure, and the status at that time.

        A task of an abandoned step may fail later, since its step is over.
        """
        if not self.has_stopped:
            self._last_status = self.status()  # later tasks are skipped, but their events are set
            self.failure = task.id, error

    def stop(self, error: ExecutionError) -> None:
        """Stop the step with ``error``; wait at most `_CLOSE_SECONDS` for its tasks."""
        if self.failure is None:
            self._last_status = self.status()
            self.failure = -1, error
        self._drain = RunningTimer(_CLOSE_SECONDS)

    def forget_errors(self) -> None:
        """Drop the error that stopped the step, as its traceback holds the step and its tensors."""
        if self.failure is not None:
            self.failure = self.failure[0], ExecutionError("raised by the step")

    def readings(self, *, is_over: bool = True) -> Readings:
        """Return the events of the tasks; if the step ``is_over``, all events of its tasks are set.

        The tasks of a step that was abandoned or interrupted may still be running.
        """
        may_be_running = self.has_stopped or not is_over
        return self.events.readings(self._issued_tasks, may_be_running=may_be_running)

    @property
    def clock_error(self) -> float:
        """Largest error of time differences between devices, of other processes too (s)."""
        remote = 0.0 if self.processes is None else self.processes.clock.error
        return self.events.clock_error + remote

    def process_result(self, *, has_losses: bool = True) -> ProcessResult:
        """Return the measurements of this process, on rank 0's clock."""
        zero = self.events.zero
        has_losses = has_losses and not self.has_stopped  # counts may be missing
        losses = self.inputs.loss.loss_shares() if has_losses else []
        local = {m: x for m, x in enumerate(losses) if x is not None}
        dtype = str(next(iter(local.values())).dtype).removeprefix("torch.") if local else ""
        readings = self.readings()
        return ProcessResult(
            zero if self.processes is None else self.processes.clock.to_first(zero),
            readings.timeline,
            {m: float(x) for m, x in local.items()},
            self.events.host_seconds,
            loss_dtype=dtype,
            clock_error=self.clock_error,
            host_times=readings.host_times,
            metrics={
                name: x.numbers()
                for name, x in (self.inputs.loss.metric_sums() if has_losses else {}).items()
            },
        )


def task_place(graph: TaskGraph, index: int) -> str:
    """Return a task's device, stage and micro-batch, as text."""
    task = graph.task(index)
    microbatch = "" if task.microbatch is None else f", micro-batch {task.microbatch}"
    return f"device {task.device}, stage {task.stage}{microbatch}"

"""`Step`: one running step. Issue its tasks, wait for the devices, record the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pipeexec.devices.cpu_streams import CpuEvent
from pipeexec.devices.device import Device, Values
from pipeexec.devices.running_clock import RunningTimer
from pipeexec.distributed.channels import ExpectedMessage, PostedReceive
from pipeexec.distributed.failure import Failure
from pipeexec.distributed.flight_recorder import N_BEGUN, N_ENDED
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.status import Status
from pipeexec.executor.gradients.step_gradients import StepGradients
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.progress import StallDetector, StepHeads
from pipeexec.executor.results.process_results import ProcessResult
from pipeexec.executor.results.task_times import Readings
from pipeexec.executor.step_events import StepEvents
from pipeexec.executor.step_inputs import StepInputs
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph

if TYPE_CHECKING:
    from pipeexec.executor.host_threads import HostThreads


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
    graph, devices
        Those of the pipeline.
    inputs, gradients
        Batch of this step, and the gradients that it computes.
    timeout
        Seconds without progress after which a step of one process is abandoned; None for never.
    processes
        Processes of the pipeline; None if there is one.
    hosts
        Threads that issue the tasks; None if the caller's thread does.
    frees
        Tasks for which a task waits, and whose results it drops when it is issued.

    Attributes
    ----------
    events
        Events and times of the tasks.
    results
        Result of each task, until another task pops it as its input.
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
        inputs: StepInputs,
        gradients: StepGradients,
        *,
        timeout: float | None = None,
        processes: Processes | None = None,
        hosts: HostThreads | None = None,
        frees: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.graph, self.devices = graph, devices
        self.inputs, self.gradients = inputs, gradients
        self.events = StepEvents(graph, devices)
        self.processes, self.hosts, self.frees = processes, hosts, frees
        self.results: list[Values | None] = [None] * len(graph)
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
    def number(self) -> int:
        """Number of the step."""
        return self.inputs.number

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
        """Submit tasks to their streams in order; the tasks that they wait for come before them."""
        events = self.events
        start_events, end_events = events.start_events, events.end_events
        issued, zero, frees = events.issued, events.zero, self.frees
        for task in tasks:
            stream = task.stream
            for needed in task.waits:
                stream.wait_event(end_events[needed])  # type: ignore[arg-type]  # issued before
            for needed in frees.get(task.id, ()):
                stream.wait_event(end_events[needed])  # type: ignore[arg-type]  # likewise
                self.results[needed] = None
            if task.sync is not None:
                for milestone in task.sync.milestones:
                    stream.wait_event(events.milestones[milestone][0])
                for bucket in range(task.sync.n_buckets_marked):
                    events.milestones[task.id, bucket] = stream.event_inside()
            issued[task.id] = perf_counter() - zero
            if task.remote is not None:
                self._submit_remote(task)
                continue
            start_events[task.id] = stream.record()
            stream.submit(partial(self._run_handler, task, task.handler, True))
            end_events[task.id] = stream.record()

    def _submit_remote(self, task: PlannedTask) -> None:
        """Submit a task with a remote part: a message, a collective, or a flight-recorder slot."""
        stream, remote, events = task.stream, task.remote, self.events
        assert remote is not None
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
        """Pop and return the result of ``task``."""
        values, self.results[task] = self.results[task], None
        return values or ()

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

    def process_result(self) -> ProcessResult:
        """Return the measurements of this process, on rank 0's clock."""
        zero = self.events.zero
        losses = [] if self.has_stopped else self.inputs.loss.loss_shares()  # counts may be missing
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
                for name, x in ({} if self.has_stopped else self.inputs.loss.metric_sums()).items()
            },
        )


def task_place(graph: TaskGraph, index: int) -> str:
    """Return a task's device, stage and micro-batch, as text."""
    task = graph.task(index)
    microbatch = "" if task.microbatch is None else f", micro-batch {task.microbatch}"
    return f"device {task.device}, stage {task.stage}{microbatch}"

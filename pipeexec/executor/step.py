"""One step under way: what is known of each task, and the walk of the host through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.devices import clocks
from pipeexec.devices.cpu_streams import CpuEvent
from pipeexec.devices.device import Device, Values
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.devices.streams import Event
from pipeexec.distributed.channels import ExpectedMessage, PostedReceive
from pipeexec.distributed.failure import Failure
from pipeexec.distributed.flight_recorder import N_BEGUN, N_ENDED
from pipeexec.distributed.processes import Processes
from pipeexec.distributed.status import Status
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.process_results import Part
from pipeexec.executor.progress import Progress, StepHeads
from pipeexec.executor.task_times import Milestone, Readings
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.batches import Batch, split_batches, to_devices
from pipeexec.stages.earlier_gradients import EarlierGradients
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.random_numbers import task_seed
from pipeexec.stages.stage_like import StageLike
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph

__all__ = ["Run", "place"]

#: Seconds between two looks at whether a step gets on.
_SLICE = 0.1
#: Seconds that the tasks of a step of one process have to end once it was interrupted.
_DRAIN_SECONDS = 5.0
#: The same once its pipeline was closed by another thread.
_STOPPING = 0.5


class Issuer(Protocol):
    """Hosts other than the thread of the step; see `pipeexec.executor.host_threads`."""

    def start(self, run: Run) -> Sequence[CpuEvent]:
        """Let each host issue its tasks of a step; return an event a host, which passes then."""
        ...


class Run:
    """One step under way: what tasks hand to each other, their events, and the first failure."""

    def __init__(
        self,
        graph: TaskGraph,
        shares: BatchShares,
        devices: Sequence[Device],
        stages: Sequence[StageLike],
        optimizers: Sequence[torch.optim.Optimizer | None],
        inputs: Batch | None,
        targets: Batch | None,
        *,
        loss: LossFunction,
        number: int,
        timeout: float | None = None,
        processes: Processes | None = None,
        hosts: Issuer | None = None,
    ) -> None:
        m = shares.n_shares * shares.n_microbatches
        self.graph, self.devices, self.shares = graph, devices, shares
        own = [d for d, x in enumerate(devices) if not isinstance(x, RemoteDevice)]
        self.numbers = {device: number for number, device in enumerate(own)}  # of those here
        self.stages, self.modules = stages, [stage.module for stage in stages]
        self.optimizers = optimizers
        self.number, self.timeout, self.processes = number, timeout, processes
        here = shares.local_numbers()
        parts, labels, sizes = split_batches(
            inputs, targets, shares.n_microbatches, len(shares.local)
        )
        homes = graph.homes[shares.replica.ravel()[here]]
        first, last = ([devices[d].torch_device for d in homes[:, stage]] for stage in (0, -1))
        self.inputs: list[Values] = [()] * m
        labelled: list[Any] = [None] * m
        for number, part in zip(here, to_devices(parts, first), strict=True):
            self.inputs[number] = part
        for number, label in zip(here, to_devices(labels, last), strict=True):
            one = not isinstance(targets, tuple)
            labelled[number] = (label[0] if label else None) if one else label
        sizes = shares.agree(
            [] if inputs is None else sizes, [] if targets is None else sizes, processes
        )
        self.loss = StepLoss(
            loss,
            sizes,
            labelled,
            shares,
            graph.n_batches,
            [devices[d].torch_device for d in own],
            processes,
            [number for number, device in zip(here, last, strict=True) if device.type != "meta"],
            device_ranks(
                [devices[d] for d in graph.homes[:, -1]], processes.rank if processes else 0
            ),
        )
        #: Gradients from before the step.
        self.earlier_gradients: EarlierGradients | None = None
        self.values: list[Values | None] = [None] * len(graph)
        #: Gradients of micro-batches that are summed one by one; sums so far, by stage.
        self.per_microbatch_grads: dict[tuple[int, int], list[Tensor | None]] = {}
        self.reduced: dict[int, list[Tensor | None]] = {}
        #: Parameters of each stage in buckets, once they were asked for.
        self.buckets: dict[int, list[list[nn.Parameter]]] = {}
        #: Events within backwards, by task and bucket, and what lets them pass.
        self.milestones: dict[tuple[int, int], tuple[Event, Callable[[], object]]] = {}
        self.clock: clocks.Clocks | None = None
        self.zero = 0.0
        self.began: list[Event | None] = [None] * len(graph)
        self.ended: list[Event | None] = [None] * len(graph)
        self.ran = np.zeros(len(graph), dtype=bool)
        self.nbytes = np.zeros(len(graph))
        self.issued = [0.0] * len(graph)  # by perf_counter, less `zero`
        self.failure: tuple[int, BaseException] | None = None
        self.stopped: Status | None = None
        self.abandoned = False
        self._tasks: Sequence[PlannedTask] = ()  # that were issued
        self.seed = torch.initial_seed()
        self.host_seconds = 0.0
        self.is_replay = False
        #: Hosts that issue in the place of the caller; what each task took them; what failed.
        self.hosts = hosts
        self.took: NDArray[np.float64] | None = None
        self.host_error: BaseException | None = None
        self._issuing: Sequence[CpuEvent] = ()
        #: Messages between processes: as they should be, those that were asked for, and events
        #: that pass when they are gone.
        self.expected: dict[int, ExpectedMessage] = {}
        self.posted_receives: dict[int, PostedReceive] = {}
        self.sent_events: dict[int, CpuEvent] = {}
        self.task_slots = memoryview(b"") if processes is None else processes.recorder.own
        self._heads = StepHeads(graph, self.began, self.ended)
        self._progress = Progress(timeout)
        self._until = float("inf")  # when it is given up, once it was interrupted

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
                self._until = perf_counter() + _DRAIN_SECONDS  # a stage may hang
                self._wait(tasks)
            raise

    def issue(self, tasks: Sequence[PlannedTask]) -> None:
        """Give every task to its stream, or let hosts do that; wait for nothing."""
        self.clock = clocks.start([self.devices[d] for d in self.numbers])
        self.zero = perf_counter()
        if self.processes is not None:
            self.task_slots[N_ENDED], self.task_slots[N_BEGUN] = self.number, self.number + 1
        self._tasks = tasks
        if self.hosts is not None:
            self.took = np.full(len(self.graph), np.nan)
            self._issuing = self.hosts.start(self)
            return
        self.give(tasks)
        self.host_seconds = perf_counter() - self.zero

    def give(self, tasks: Iterable[PlannedTask]) -> None:
        """Give tasks to their streams, one after the other; what each waits for was given."""
        began, ended, issued, start = self.began, self.ended, self.issued, self.zero
        for task in tasks:
            stream = task.stream
            for needed in task.waits:
                stream.wait_event(ended[needed])  # type: ignore[arg-type]  # issued before
            if task.sync is not None:
                for milestone in task.sync.milestones:
                    stream.wait_event(self.milestones[milestone][0])
                for bucket in range(task.sync.n_buckets_marked):
                    self.milestones[task.id, bucket] = stream.event_inside()
            issued[task.id] = perf_counter() - start
            remote = task.remote
            if remote is None:
                began[task.id] = stream.record()
                stream.submit(partial(self._guarded, task, task.handler, True))
                ended[task.id] = stream.record()
                continue
            if remote.before_start is not None:
                stream.submit(partial(self._guarded, task, remote.before_start, False))
            began[task.id] = stream.record()
            if remote.send_waiter is not None:
                self.sent_events[task.id] = CpuEvent()
            stream.submit(partial(self._guarded, task, task.handler, True))
            if remote.send_waiter is not None:
                stream.wait_event(self.sent_events[task.id])
            ended[task.id] = stream.record()
            if remote.after_end is not None:
                stream.submit(partial(self._guarded, task, remote.after_end, True))

    @property
    def has_stopped(self) -> bool:
        """Whether no more tasks are to be issued, as something has failed or was given up."""
        return self.failure is not None or self.abandoned

    def _wait(self, tasks: Sequence[PlannedTask]) -> None:
        """Wait until all is issued, and every stream has run it, or no longer will."""
        for issued in self._issuing:
            while not self.abandoned and not issued.wait(_SLICE):
                self._check_stall()
        if self.took is not None:
            self.host_seconds = float(np.nansum(self.took))
        last = {task.stream: event for task in tasks if (event := self.ended[task.id]) is not None}
        for event in last.values():
            while not self.abandoned and not event.wait(_SLICE):
                self._check_stall()

    def _check_stall(self) -> None:
        """Give up if this step will not end."""
        if self.processes is not None:
            self.processes.watch.check_store()
            failed = self.failure is not None or self.processes.watch.failure is not None
            self.abandoned = failed
        elif self._progress.stalled(self.status()) or perf_counter() > self._until:
            self.abandoned = True

    @property
    def stall(self) -> Failure | None:
        """What holds the step up, if nothing has moved for too long."""
        return self._progress.failure

    def status(self) -> Status:
        """Return what this process's devices are at."""
        if self.stopped is not None:
            return self.stopped
        rank = 0 if self.processes is None else self.processes.rank
        return self._heads.status(rank, self.number)

    def _guarded(self, task: PlannedTask, handler: Handler, is_last: bool) -> None:
        """Run a part of a task, unless another task has failed; the first failure stops all."""
        if self.failure is not None or self.abandoned:
            self._release_waiters(task)
            return
        slot = -1 if task.remote is None else task.remote.task_slot
        if slot >= 0:
            self.task_slots[slot] = task.id + 1
        try:
            handler(self, task)
        except BaseException as error:
            self.fail(task, error)
            self._release_waiters(task)
        else:
            self.ran[task.id] = is_last
            if slot >= 0:
                self.task_slots[slot] = 0

    def fail(self, task: PlannedTask, error: BaseException) -> None:
        """Note the first failure, and where everything was."""
        if self.failure is None:
            self.stopped = self.status()  # what follows is passed over, and seems to end
            self.failure = task.id, error

    def forget_errors(self) -> None:
        """Let go of the error that stopped the step: its traceback holds the step, and more."""
        if self.failure is not None:
            self.failure = self.failure[0], ExecutionError("raised by the step")

    def divide(self, slot: int, batch: int) -> None:
        """Divide a stage's gradients of a mini-batch by its count, if the loss has counts.

        Raises
        ------
        ExecutionError
            If they are mixed with gradients from before the step.
        """
        stage = self.stages[slot]
        if not self.loss.is_counted():
            return
        is_alone = self.optimizers[slot] is not None or (
            self.earlier_gradients is not None and slot in self.earlier_gradients
        )
        if not is_alone and any(True for _ in stage.module.parameters()):
            raise ExecutionError(
                f"loss_fn returned (sum, count), whose gradients are divided at the end of a step, "
                f"but those of stage {stage.index} add up over steps; give Pipeline an optimizer, "
                "or leave out DistributedDataParallel and cuda_graph"
            )
        self.loss.divide(stage.module, batch, stage.mean_count)
        if self.earlier_gradients is not None:
            self.earlier_gradients.end_mini_batch(slot)

    def stop(self, error: ExecutionError) -> None:
        """Fail with ``error``; tasks that do not end soon are left to themselves."""
        if self.failure is None:
            self.stopped = self.status()
            self.failure = -1, error
        self._until = perf_counter() + _STOPPING

    def _release_waiters(self, task: PlannedTask) -> None:
        """Set the events that a task was to set, as it will not run to its end."""
        if task.id in self.sent_events:
            self.sent_events[task.id].set()
        for bucket in range(0 if task.sync is None else task.sync.n_buckets_marked):
            event, reach = self.milestones[task.id, bucket]
            if not event.is_set():  # the work may have got so far before it failed
                reach()

    def pop_result(self, task: int) -> Values:
        """Pop and return the result of ``task``."""
        values, self.values[task] = self.values[task], None
        return values or ()

    def seed_of(self, task: PlannedTask) -> int:
        """Return the seed of a task's random numbers."""
        if not task.stage.is_random.get(task.stage.module.training, True):
            return 0
        return task_seed(self.seed, self.number, task.stage.index, task.global_microbatch)

    def readings(self, *, is_over: bool = True) -> Readings:
        """Return the events of the tasks; those of tasks that ran have passed if it ``is_over``."""
        tasks = self._tasks
        return Readings(
            graph=self.graph,
            clock=self.clock,
            numbers=[self.numbers.get(device, -1) for device in range(len(self.devices))],
            on_host=np.array([x.torch_device.type == "cpu" for x in self.devices]),
            began=self.began,
            ended=self.ended,
            ran=self.ran,
            leaders={
                t.id: t.sync.leader for t in tasks if t.sync is not None and t.sync.leader >= 0
            },
            nbytes=self.nbytes,
            issued=self.issued,
            host_seconds=self.host_seconds,
            took=self.took,
            order=[task.id for task in tasks],
            is_replay=self.is_replay,
            milestones=list(self._reached(tasks)) if self.milestones else (),
            may_be_running=self.abandoned or not is_over,
        )

    def _reached(self, tasks: Sequence[PlannedTask]) -> Iterator[Milestone]:
        """Yield the events within backwards that reductions of this process waited for."""
        for task in tasks:
            for backward, bucket in () if task.sync is None else task.sync.milestones:
                began, ended = self.began[backward], self.ended[backward]
                if began is not None and ended is not None:
                    event, _ = self.milestones[backward, bucket]
                    yield Milestone(task.id, event, began, ended)

    @property
    def clock_error(self) -> float:
        """The most that times of devices, of other processes too, can be wrong; seconds."""
        own = 0.0 if self.clock is None else self.clock.error
        return own + (0.0 if self.processes is None else self.processes.clock.error)

    def part(self) -> Part:
        """Return what this process measured, on rank 0's clock."""
        zero = self.zero if self.processes is None else self.processes.clock.to_first(self.zero)
        has_failed = self.failure is not None or self.abandoned  # then counts may be missing
        losses_here = [] if has_failed else self.loss.loss_shares()
        found = {m: x for m, x in enumerate(losses_here) if x is not None}
        losses = {m: float(x) for m, x in found.items()}
        dtype = str(next(iter(found.values())).dtype).removeprefix("torch.") if found else ""
        readings = self.readings()
        return Part(
            zero,
            readings.timeline,
            losses,
            self.host_seconds,
            loss_dtype=dtype,
            clock_error=self.clock_error,
            host_times=readings.host_times,
        )

    def where(self, index: int) -> str:
        """Return a task's device, stage and micro-batch, as text."""
        return place(self.graph, index)


def place(graph: TaskGraph, index: int) -> str:
    """Return a task's device, stage and micro-batch, as text."""
    task = graph.task(index)
    of = "" if task.microbatch is None else f", micro-batch {task.microbatch}"
    return f"device {task.device}, stage {task.stage}{of}"

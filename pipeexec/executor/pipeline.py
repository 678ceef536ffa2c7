"""`Pipeline`: walk a task graph's issue order, put each task on its stream, and time it.

The host, or each of several, goes once through its tasks. For each it makes the stream wait for the
events of what the task needs, records an event, submits the task, and records another. Nothing here
knows a schedule by name, or what kind of device it talks to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, NoReturn
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.data_parallel.ddp_stage import check_ddp
from pipeexec.data_parallel.stage_replicas import (
    RemoteStage,
    check_hooks,
    place_replicas,
    sync_from_first,
)
from pipeexec.devices.device import DeviceLike
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.devices.thread_settings import current_autocast
from pipeexec.distributed.channels import ExpectedMessage
from pipeexec.distributed.flight_recorder import GRAPH, N_ENDED
from pipeexec.distributed.message_headers import set_step
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.distributed.status import Status
from pipeexec.embedding.stage import (
    check_embedding,
    check_keys,
)
from pipeexec.executor.agreement import (
    agree_on_graph,
    agree_on_messages,
)
from pipeexec.executor.cuda_graph.step_capture import Captured
from pipeexec.executor.failures import describe_last_task, raise_failure
from pipeexec.executor.gradient_sync import assign_reduced_gradients
from pipeexec.executor.host_threads import make_host_threads
from pipeexec.executor.memory.allocator_memory import Allocated, sampled
from pipeexec.executor.memory.step_memory import Bytes, Counted, StepMemory, activation_meters
from pipeexec.executor.microbatch_loss import MicrobatchLoss
from pipeexec.executor.pipeline_checks import (
    check_graph,
    check_stages,
    check_step_batch,
    check_timeout,
    warn_of_loss,
    warn_of_nan,
    warn_of_randomness,
)
from pipeexec.executor.pipeline_setup import (
    agree_on_pipeline,
    make_pipeline_devices,
    make_stages,
)
from pipeexec.executor.plan import plan
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.process_results import ProcessResult, merge_results
from pipeexec.executor.step import Step
from pipeexec.executor.step_inputs import StepGradients, split_inputs
from pipeexec.executor.step_result import StepResult, copy_losses, lazy_result
from pipeexec.stages.activation_bytes import ActivationCounter, ActivationMeter
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.batches import Batch
from pipeexec.stages.earlier_gradients import EarlierGradients
from pipeexec.stages.loss_function import Loss, LossFunction
from pipeexec.stages.optimizers import OptimizerFactory, make_optimizers
from pipeexec.stages.restore import restore_afterwards
from pipeexec.stages.stage import attach_meters
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_flag,
    check_list,
    check_numbers,
    check_type,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

__all__ = ["Pipeline", "StepResult"]

#: Seconds that `Pipeline.close` waits for a step of another thread to end.
_SECONDS_TO_END = 5.0


class Pipeline:
    """Stages on devices, and the graph that a step of them runs.

    Parameters
    ----------
    stages
        One module a stage. Each takes what the one before returns: a tensor or a tuple of tensors.
        With ``processes``, None for those that run in other processes.
    graph
        From `pipesim.lower`; verified first.
    devices
        One name (``"cpu"``, ``"cuda:0"``) a device of the graph; each ``"cpu"`` is a worker thread.
        With ``processes``, those of this process: the devices of rank 0 are the graph's first.
    loss_fn
        ``loss_fn(output, targets)`` of a micro-batch; runs as part of the last stage. Returns the
        loss, a tensor with one element, or the tuple ``(sum, count)``; see the notes. After the
        first step it is called twice more, with several micro-batches at once, to check that.
    optimizer
        Called with a stage's parameters, returns its `torch.optim.Optimizer`. STEP runs it, and
        each step begins without gradients. With None, STEP does nothing and gradients add up in
        ``parameter.grad`` from step to step, as always in torch.
    loss_reduction
        Whether ``loss_fn`` returns a ``"mean"`` over its samples, or a ``"sum"``.
    pin_threads
        Whether each CPU worker stays on a core of its own, where there are enough.
    timeout
        Seconds after which a step in which no task ends is given up; None waits for ever, as for
        a debugger. That of ``processes``, where they are given.
    processes
        From `pipeexec.join`, where the pipeline spans several. Every process makes the pipeline
        with the same graph, and calls its methods in the same order.
    cuda_graph
        Capture a step as one CUDA graph, and replay it: then the host's time to launch kernels is
        no part of a step. The first steps run eagerly; so does the one after anything that the
        host looks at has changed, such as a learning rate that is no tensor.
        One GPU, batches of one shape, no random numbers, capturable optimizers.

    Raises
    ------
    ArgumentError
        If there are not as many stages or devices as the graph has, stages share parameters, or
        processes do not agree. With ``cuda_graph``, see `pipeexec.executor.cuda_graph`.
    DeadlockError
        If messages between processes, whose senders wait for their receivers, would deadlock.

    Notes
    -----
    The loss and the gradients of a step are those of the whole batch at once, up to rounding:

    - of a sum, and of a mean over samples, of which micro-batches may have different numbers;
    - of a mean over anything else, if ``loss_fn`` returns ``(sum, count)``: tokens that are not
      masked or ignored, class weights. Gradients are divided by the total count, over all
      micro-batches and replicas, before the optimizer steps.

    They are not where the loss compares samples with each other (contrastive losses), or where a
    stage does, as a batch norm. A loss function whose micro-batches do not combine to its value for
    several of them at once causes a `LossWarning` in the first step.

    `torch.autocast` around `step` holds for the forwards of all stages and for the loss.

    Calls from a second thread while a step runs, from within a stage or the loss, and from a forked
    process raise `ExecutionError`. Only `close` may come from another thread: it ends the step.

    Where a stage has several replicas, or paths of a bidirectional placement, in this process, the
    first has the module that was given, and others have copies of it, made here, which follow it:
    they take its parameters, buffers and modes at the beginning of every step, and share their
    gradients. Of buffers that a step changes, such as the statistics of a batch norm, those of
    the first one's micro-batches stay. Other attributes, and hooks on modules, are as they were
    when the pipeline was made; hooks on parameters are refused. In several processes each trains
    the modules that it was given, with the same weights everywhere.

    A step of several mini-batches begins with the pipeline empty, and ends when it has drained.
    Beside the versions of weights that its schedule needs, each stage has one for the optimizer.

    Where the graph has several hosts (``lower(hosts="per_device")``, or a list), each is a thread
    that issues the tasks of its devices. It waits until another host has issued what its next task
    needs. On GPUs stages then run in these threads, which do not see settings of the caller's
    thread other than autocast. Of several processes each has one host.

    With several processes, a stage's shapes are found before the first step (see
    `pipeexec.distributed.signatures`) and hold for all steps. Messages carry a header that is
    checked.

    Random numbers (dropout) are drawn per step, stage and micro-batch, starting from
    ``torch.initial_seed()``: after the same `torch.manual_seed`, every schedule and recompute mode
    draws the same.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        graph: TaskGraph,
        devices: Sequence[DeviceLike],
        loss_fn: Loss,
        optimizer: OptimizerFactory | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
        pin_threads: bool = True,
        timeout: float | None = 60.0,
        processes: Processes | None = None,
        cuda_graph: bool = False,
    ) -> None:
        if processes is not None:
            check_type("processes", processes, Processes, "give the result of pipeexec.join")
        self.timeout, self.processes, self.cuda_graph = timeout, processes, cuda_graph
        own = 0 if processes is None else processes.rank
        with guard_processes(processes):
            check_timeout(timeout)
            check_flag("pin_threads", pin_threads)
            check_flag("cuda_graph", cuda_graph)
            check_graph(graph)
            if cuda_graph and processes is not None:
                raise ArgumentError(
                    "cuda_graph=True runs in one process: headers of messages between processes "
                    "are checked by the host; leave it out"
                )
            self._loss = LossFunction(loss_fn, loss_reduction, on_device=cuda_graph)
            stages = check_list("stages", stages, "one nn.Module a stage of the graph")
            devices = check_list("devices", devices, "one name a device of the graph")
            self.devices = make_pipeline_devices(devices, graph, pin_threads, processes)
            is_local = [not isinstance(self.devices[d], RemoteDevice) for d in graph.homes.ravel()]
            check_stages(stages, graph, is_local)
            check_ddp(stages, graph.n_replicas)
            ranks = device_ranks(self.devices, own)
            for stage in graph.sharded:
                if any(is_local[stage :: graph.n_stages]):
                    check_embedding(stages[stage], stage, [ranks[d] for d in graph.homes[:, stage]])
            # Replica after replica: the stages as they were given, and copies of them.
            self.modules = place_replicas(stages, is_local)
            self._homes: list[list[int]] = graph.homes.tolist()
            for module, device in zip(self.modules, graph.homes.ravel(), strict=True):
                if not isinstance(module, RemoteStage):
                    module.to(self.devices[device].torch_device)
            self.optimizers = make_optimizers(optimizer, self.modules, graph.n_stages)
            self.zero_grad = optimizer is not None
            self._check_batch_norms = BatchNormCheck(
                (
                    (f"{name} of stage {stage}".strip(), module)
                    for stage, whole in enumerate(self.modules[: graph.n_stages])
                    for name, module in whole.named_modules()
                ),
                "pipeexec.gpipe.batchnorm.DeferredBatchNorm makes the running statistics alone "
                "those of the mini-batch.",
            )
            self.n_steps = 0
            #: Of the pipelines that share the devices, made by `with_graph`.
            self._all_captured: WeakSet[Captured] = WeakSet()
            if processes is not None:
                agree_on_pipeline(
                    self.modules,
                    graph,
                    processes,
                    loss_reduction=self._loss.reduction,
                    has_optimizer=self.zero_grad,
                )
            self._set_graph(graph)

    def _set_graph(self, graph: TaskGraph) -> None:
        verify(graph)
        if self.processes is not None:
            self._graph_number = agree_on_graph(graph, self.processes)
        self.graph, self.shares = graph, BatchShares(graph, self.devices)
        self._has_steps = bool((graph.op == Op.STEP).any())
        self._messages: dict[int, ExpectedMessage] | None = None
        self.held = [ActivationCounter() for _ in self.devices]
        self._finish = MicrobatchLoss()
        self.stages = make_stages(self.modules, graph, self.devices, self.held, self._finish)
        self._plan = plan(graph, self.stages, self.devices, self.shares, self.processes)
        self._hosts = make_host_threads(graph, self._plan, self.processes)
        self._captured = self._make_captured()

    def _make_captured(self) -> Captured | None:
        if not self.cuda_graph:
            return None
        captured = Captured(
            self.graph,
            self.devices,
            self.modules,
            self.stages,
            self.optimizers,
            zero_grad=self.zero_grad,
        )
        self._all_captured.add(captured)
        return captured

    @property
    def loss_fn(self) -> Loss:
        """The loss function; in one process it may be set, for the steps that follow."""
        return self._loss.function

    @loss_fn.setter
    def loss_fn(self, function: Loss) -> None:
        if self.processes is not None:
            raise ExecutionError(
                "the loss_fn of a pipeline of several processes cannot be changed: the others "
                "would not know; make another Pipeline"
            )
        with self._locked("loss_fn"):
            self._loss = LossFunction(function, self._loss.reduction, on_device=self.cuda_graph)
            self._captured = self._make_captured()  # a captured step has the former one

    @property
    def loss_reduction(self) -> Literal["mean", "sum"]:
        """How ``loss_fn`` reduces the losses of samples."""
        return self._loss.reduction

    @contextmanager
    def _locked(self, call: str) -> Iterator[None]:
        """Hold the devices for a call, which no other may disturb."""
        for device in self.devices:
            device.step_lock.check_outside(call)
        with ExitStack() as stack:
            for device in self.devices:
                stack.enter_context(device.step_lock.hold(call))
            yield

    @contextmanager
    def _locked_open(self, call: str) -> Iterator[None]:
        """Hold the devices, which must not be closed, for a call."""
        with self._locked(call):
            if any(device.closed for device in self.devices):
                raise ExecutionError(
                    "the pipeline is closed, and its threads ended; make a new one"
                )
            yield

    @contextmanager
    def _steppable(self, step: Step) -> Iterator[None]:
        """Let the tasks of a step run, until `close` stops it."""
        self._finish.step = step
        try:
            with ExitStack() as stack:
                for device in self.devices:
                    stack.enter_context(device.step_lock.run_step(step))
                yield
        finally:
            self._finish.step = None

    def with_graph(self, graph: TaskGraph) -> Pipeline:
        """Return a pipeline that runs another graph with the same stages, devices, optimizers.

        Raises
        ------
        ArgumentError
            If the graph places its stages otherwise, or on paths that this one does not have.
        ExecutionError
            While a step runs.
        """
        check_graph(graph)
        homes, others = self._homes, graph.homes.tolist()
        if others != homes[: len(others)]:
            raise ArgumentError(
                f"{graph!r} places its stages on {_listed(others)}, this pipeline "
                f"on {_listed(homes)}; make a new Pipeline"
            )
        other: Pipeline = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        with self._locked_open("with_graph"), guard_processes(self.processes):
            other._set_graph(graph)
        for own, its in zip(self.stages, other.stages, strict=False):
            its.is_random, its.modifies_input = own.is_random, own.modifies_input
        return other

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ArgumentTypeError(
            "a Pipeline has threads, and can neither be copied nor pickled; with_graph runs "
            "another graph, and state_dict() of its stages is what to save"
        )

    def step(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Run one training step.

        Parameters
        ----------
        inputs, targets
            A tensor or a tuple of tensors each, whose first dimension is the batch. It is split
            into the graph's micro-batches, as evenly as it can be. With several processes, either
            may be None where neither the first nor the last stage is. Of data-parallel replicas
            each process gives the samples of those that it has a stage of, one behind the other:
            in one process, all; with a process or several a replica, a share of the batch each.

        Raises
        ------
        StageError
            If a stage, the loss or the optimizer raised. All other work stops, ``__cause__`` is
            the original, ``timeline`` what ran before; the next step begins afresh. Gradients are
            those from before, where they add up over steps, but for stages that are
            DistributedDataParallel and with ``cuda_graph``. The message names the stages whose
            optimizers have stepped.
        StallError
            If no task has ended for ``timeout`` seconds; the message says who waits for whom. The
            pipeline is closed, as the task that hangs may still be running.
        PeerError
            If something failed in another process, or that process was lost. Like any other
            failure of a step of several processes, it closes the pipeline.
        ArgumentError
            If the batch has fewer samples than there are micro-batches, not the shape of the
            batch with which a CUDA graph was captured, or with replicas in several processes not
            the samples of the first; if a key is no row of a sharded first stage; or if tensors of
            the batch require gradients, or are sparse.
        ExecutionError
            If the pipeline is closed, before the step or while it runs; its step cannot be captured
            as a CUDA graph; or the call comes from a second thread, a stage, or a forked process,
            or where gradients are switched off.
        """
        with self._locked_open("step"):
            self._check_batch_norms(self.graph.n_microbatches // self.graph.n_batches)
            captured = self._captured
            if captured is None or inputs is None:  # a captured step is of one process
                step = self._run_step(inputs, targets, Step.walk)
                return self._make_result(step, may_wait=self.processes is None)
            if (replayed := captured.take(inputs, targets)) is not None:
                self.n_steps += 1
                return self._make_result(replayed)
            return self._make_result(
                self._run_step(*captured.batch(inputs, targets), captured.walk)
            )

    def _run_step(
        self,
        inputs: Batch | None,
        targets: Any,
        walk: Callable[[Step, Sequence[PlannedTask]], None],
    ) -> Step:
        """Run a step, whose tasks ``walk`` issues."""
        step = self._start_step(inputs, targets)
        before = torch.get_rng_state()
        try:
            self._walk_tasks(step, walk)
        finally:
            step.forget_errors()
            self._report_end(step)
        warn_of_randomness(self.stages, before)
        warn_of_loss(step.inputs.loss, returns_count=self._loss.returns_count)
        return step

    def _report_end(self, step: Step) -> None:
        """Leave what processes may say of a step that has ended, but nothing that holds it."""
        if self.processes is not None:
            if step.failure is not None or step.abandoned:
                self.processes.reporter.end_step(step.status())
            readings = step.readings()
            self.processes.measured = lambda: readings.timeline

    def _walk_tasks(self, step: Step, walk: Callable[[Step, Sequence[PlannedTask]], None]) -> None:
        """Run the tasks of a step; raise what stopped it."""
        try:
            with self._steppable(step), _garbage_collection_paused():
                walk(step, self._plan)
                if step.failure is None and not step.abandoned:
                    self._complete_gradients(step)
        except BaseException as error:
            step.failure = step.failure or (-1, error)
            if self.processes is not None:
                raise_failure(step, self.processes, error)
            raise
        finally:
            self._finish_step(step)
        if step.failure is not None or step.abandoned:
            raise_failure(step, self.processes)

    def _complete_gradients(self, step: Step) -> None:
        """Complete the gradients of a step whose tasks have all run."""
        for slot in list(step.gradients.reduced):  # of graphs without STEP
            assign_reduced_gradients(step, slot)
        if not self._has_steps and step.inputs.loss.is_counted():
            if self.cuda_graph or self.graph.n_batches > 1:
                raise ExecutionError(
                    "loss_fn returned (sum, count), whose gradients are divided in STEP: the graph "
                    "has none, but several mini-batches, or is captured as a CUDA graph; lower "
                    "with step='flush'"
                )
            for slot, module in enumerate(self.modules[: len(self.stages)]):
                if not isinstance(module, RemoteStage):
                    step.gradients.divide(slot, 0, step.inputs.loss)
        if step.gradients.earlier is not None:
            step.gradients.earlier.add()

    def _make_result(self, step: Step, *, may_wait: bool = False) -> StepResult:
        """Return the result of a step; its events are read when asked for, if that ``may_wait``."""
        losses, nan = copy_losses(step.inputs.loss.loss_shares())
        warn_of_nan(nan, self.n_steps - 1)
        held = tuple(held.peak for held in self.held)
        n_losses = step.inputs.loss.n_losses
        if may_wait:
            return lazy_result(step.readings(), losses, held, step.events.host_seconds, n_losses)
        part = None if self.processes is None else replace(step.process_result(), peak_held=held)
        readings = step.readings()
        timeline = readings.timeline if part is None else part.timeline
        self._keep_timeline(timeline)
        return StepResult(
            losses=losses,
            timeline=timeline,
            peak_held=held,
            host_seconds=step.events.host_seconds,
            part=part,
            n_losses=n_losses,
            clock_error=step.clock_error,
            milestones=readings.milestone_shares,
            host_times=readings.host_times,
        )

    def _start_step(self, inputs: Batch | None, targets: Any) -> Step:
        """Return a step that can be walked; where several processes need it, a failure ends all."""
        if self.processes is None:
            return self._make_step(inputs, targets)
        try:
            with self.processes.guard():
                self.processes.check()
                return self._make_step(inputs, targets)
        except BaseException:
            for device in self.devices:
                device.abandon()
            raise

    def _make_step(self, inputs: Batch | None, targets: Any) -> Step:
        """Return a step that can be walked."""
        self.check_batch(inputs, targets)
        sharded = self.graph.sharded
        inputs_split = split_inputs(
            self.graph,
            self.shares,
            self.devices,
            inputs,
            targets,
            loss=self._loss,
            number=self.n_steps,
            processes=self.processes,
        )
        step = Step(
            self.graph,
            self.devices,
            inputs_split,
            StepGradients(self.stages, self.optimizers),
            timeout=self.timeout,
            processes=self.processes,
            hosts=self._hosts,
        )
        if 0 in sharded:  # others get their keys from the stage before
            check_keys(self.modules[:: self.graph.n_stages], step.inputs.microbatches)
        if self.processes is not None:
            if self._messages is None:
                self._messages = agree_on_messages(
                    self.graph, self._plan, self.modules, self.devices, step.inputs, self.processes
                )
            step.expected_messages = self._messages
            set_step((message.head for message in step.expected_messages.values()), step.number)
            number = self.processes.recorder.own[GRAPH] = self._graph_number
            describe = partial(describe_last_task, self.graph, number, self.processes)
            self.processes.reporter.start_step(step.status, describe)
            self.processes.measured = lambda: step.readings(is_over=False).timeline
        if len(self.stages) > self.graph.n_stages or self.graph.n_batches > 1:
            check_hooks(self.modules, self.graph.n_stages, self.graph.n_batches > 1)
        sync_from_first(self.modules, self.graph.n_stages)
        for index, module in enumerate(self.modules):
            # What copies had is in the sum that the first one has; shards have rows of their own.
            is_copy = index >= self.graph.n_stages and index % self.graph.n_stages not in sharded
            if self.zero_grad or is_copy:
                module.zero_grad(set_to_none=True)
        autocast = current_autocast()
        for stage, number in zip(self.stages, self.graph.homes.ravel().tolist(), strict=False):
            stage.begin_step(autocast)
            # Versions of weights are made on the caller's stream, and freed within the step.
            for weight in () if stage.versions is None else stage.versions.parameters():
                device = self.devices[number]
                device.adopt(weight, device.stream("compute"))
        for held in self.held:
            held.current = held.peak = 0
        if not self.zero_grad and not self.cuda_graph:
            # DistributedDataParallel takes the mean of earlier gradients too, after no_sync().
            step.gradients.earlier = EarlierGradients(
                {slot: stage.module for slot, stage in enumerate(self.stages) if not stage.is_ddp},
                is_separate=self._loss.returns_count is not False,
            )
        return step

    def _finish_step(self, step: Step) -> None:
        """End a step; gradients of one that failed are those from before, where they are kept."""
        self.n_steps += 1
        if step.gradients.earlier is not None and (step.failure is not None or step.abandoned):
            step.gradients.earlier.restore()
        if step.abandoned or (step.failure is not None and self.processes is not None):
            for device in self.devices:
                device.abandon()
            return
        if self.processes is not None and step.failure is None:
            self.processes.has_stepped = True
            status = Status(self.processes.rank, self.n_steps, False, 0, [])
            self.processes.reporter.end_step(status)
            self.processes.recorder.own[N_ENDED] = self.n_steps
        for stage in self.stages:
            stage.end_step()
        if step.failure is not None:
            for stage in self.stages:
                stage.reset()

    def check_batch(self, inputs: Batch | None, targets: Any) -> None:
        """Raise unless a step can train on a batch, and all that this process takes is given."""
        check_step_batch(inputs, targets, self.graph, self.devices)

    def align(self) -> None:
        """Compare the clocks of the processes, and leave together; all must call this."""
        if self.processes is not None:
            with self._locked("align"):
                self.processes.barrier()  # names who is late; a round trip would only wait
                self.processes.clock.sample()

    def clocks(self) -> tuple[dict[str, float], ...]:
        """Return how each process's clock stands to rank 0's; all must call this.

        See `pipeexec.distributed.process_clock.Alignment`; empty for one process.
        """
        if self.processes is None:
            return ()
        with self._locked("clocks"):
            return tuple(self.processes.share(self.processes.clock.alignment._asdict()))

    def gather(self, result: StepResult) -> StepResult:
        """Return the result of the whole pipeline, in every process; all must call this.

        Its timeline counts from when the first process began, on rank 0's clock; losses are
        without a device. In one process, ``result`` itself.
        """
        check_type("result", result, StepResult, "give what step returned")
        if self.processes is None or result.part is None:
            return result
        graph = result.timeline.graph
        with self._locked("gather"):
            packed = self.processes.gather(result.part.pack())
        part = merge_results(graph, (ProcessResult.unpack(graph, x) for x in packed))
        self._keep_timeline(part.timeline)
        dtype = getattr(torch, part.loss_dtype)
        losses = tuple(
            torch.tensor(part.losses[m], dtype=dtype) for m in range(result.n_microbatches)
        )
        return StepResult(
            losses,
            part.timeline,
            part.peak_held,
            part.host_seconds,
            part,
            result.n_losses,
            part.clock_error,
            host_times=part.host_times,
        )

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of each process's values, element by element; all must call this."""
        if self.processes is None:
            return check_numbers("values", values)
        with self._locked("total"):
            return self.processes.total(values)

    def _keep_timeline(self, timeline: Timeline) -> None:
        """Keep what was measured, for an error between steps."""
        if self.processes is not None:
            self.processes.measured = lambda: timeline

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore parameters, buffers, gradients and optimizer state at the end of a block."""
        n_steps = self.n_steps
        try:
            with self._locked_open("preserved"), restore_afterwards(self.modules, self.optimizers):
                yield
        finally:
            self.n_steps = n_steps

    def held_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes of activations that each stage holds in a step, counted in one.

        Path after path, where there are several. Weights do not count. The step leaves parameters,
        buffers, gradients and optimizers as they were.
        """
        meters = self._metered(inputs, targets, range(len(self.stages)))
        return list(map(int, self.total([meter.peak for meter in meters])))

    def left_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes that each stage holds at the end of an I, counted as above."""
        meters = self._metered(inputs, targets, range(len(self.stages)))
        return list(map(int, self.total([meter.deferred_peak for meter in meters])))

    def device_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes of activations that each device holds, counted as above."""
        devices = self.graph.homes.ravel().tolist()
        meters = self._metered(inputs, targets, devices)
        return list(map(int, self.total([meter.peak for meter in meters])))

    def memory(self, inputs: Batch, targets: Any) -> StepMemory:
        """Return the bytes of activations and gradients over a step, counted task by task.

        Beside the simulator's ``timeline.memory()``. Counting slows the host down, so this is a
        step of its own, which leaves no trace. All processes must call this.
        """
        graph = self.graph
        meters = activation_meters(self.stages, inputs, targets, graph.n_devices)
        counted = Counted(len(graph), meters)
        tasks = [counted.wrap(task) for task in self._plan]
        with (
            self._locked_open("memory"),
            self.preserved(),
            attach_meters(self.stages, [meters[device] for device in graph.homes.ravel().tolist()]),
        ):
            step = self._run_step(inputs, targets, partial(_walk_alone, tasks))
            result = self._make_result(step)
        one = [
            float(sum(p.nbytes for p in stage.module.parameters() if p.requires_grad))
            for stage in self.stages
        ]
        values = np.array(self.total([*counted.columns.ravel().tolist(), *one]))
        columns = values[: counted.columns.size].reshape(6, len(graph))
        return StepMemory(
            self.gather(result).timeline,
            Bytes(*columns[:2]),
            Bytes(*columns[2:4]),
            Bytes(*columns[4:]),
            values[counted.columns.size :].reshape(graph.homes.shape),
        )

    def _metered(self, inputs: Batch, targets: Any, place: Sequence[int]) -> list[ActivationMeter]:
        """Run a step that leaves no trace, and count what stages hold, together by their place."""
        meters = activation_meters(self.stages, inputs, targets, max(place) + 1)
        with (
            self._locked_open("held_bytes, left_bytes or device_bytes"),
            self.preserved(),
            attach_meters(self.stages, [meters[index] for index in place]),
        ):
            self._run_step(inputs, targets, Step.walk)  # eagerly: a replay takes no memory
        return meters

    def allocated(self, inputs: Batch, targets: Any) -> Allocated:
        """Return the bytes that torch's allocator holds on each GPU over a step, task by task.

        Beside the simulator's ``timeline.memory()``. Asking the allocator slows the host down, so
        this is a step of its own, which leaves no trace. Blocks that were freed, and that other
        streams may still read, count in ``most_active`` alone.

        Raises
        ------
        ArgumentError
            If the devices are CPU workers, whose memory torch does not count.
        """
        tasks, samples = sampled(self._plan, self.devices)
        with self._locked_open("allocated"), self.preserved():
            step = self._run_step(inputs, targets, partial(_walk_alone, tasks))
        return samples.placed(step.readings().timeline)

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever reads measured times should know of the devices, such as imposed links."""
        return tuple(dict.fromkeys(device.note for device in self.devices if device.note))

    def close(self) -> None:
        """End the devices' threads; the pipeline, and those that share its devices, are done.

        Captured steps are freed, with their memory. A step that runs in another thread ends with an
        `ExecutionError`.

        Raises
        ------
        ExecutionError
            From within a stage or the loss on CPU workers. On GPUs these run in the thread of the
            step, which then ends as if it was closed from another thread.
        """
        for device in self.devices:
            device.step_lock.check_outside("close", may_interrupt=True)
        until, may_run = perf_counter() + _SECONDS_TO_END, False
        for device in self.devices:
            if isinstance(device, RemoteDevice):
                device.close()
            elif device.step_lock.is_forked:  # the threads are those of another process
                device.abandon()
                may_run = True  # and so are CUDA's objects
            elif device.step_lock.stop(until):
                device.close()
            else:
                device.abandon()
                may_run = True
        if not may_run:
            for captured in self._all_captured:
                captured.drop()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        words = [", ".join(d.name for d in self.devices), *self.notes]
        words += ["as a CUDA graph"] if self.cuda_graph else []
        return f"<Pipeline of {self.graph!r} on {'; '.join(words)}>"


def _listed(homes: list[list[int]]) -> str:
    return " and ".join(map(str, homes))


def _walk_alone(tasks: Sequence[PlannedTask], step: Step, _: Sequence[PlannedTask]) -> None:
    """Issue tasks that count or sample, from this thread: other hosts have those of the plan."""
    step.hosts = None
    step.walk(tasks)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Keep Python's cycle collector out of a step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""`StepRunner`: run the training steps of one graph, from the batch to the result.

A step is prepared; the host, or each of several, issues its tasks; the devices run them; gradients
are completed; and the result is read. The code knows neither schedules by name nor kinds of
devices. The file is longer than 300 lines, since each part needs the same graph, model and stages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from pipeexec.data_parallel.stage_replicas import RemoteStage, check_hooks, sync_from_first
from pipeexec.devices.thread_settings import current_autocast
from pipeexec.embedding.stage import check_keys
from pipeexec.executor.cuda_graph.step_capture import StepCapture
from pipeexec.executor.gradient_sync import assign_reduced_gradients
from pipeexec.executor.host_threads import make_host_threads
from pipeexec.executor.microbatch_loss import MicrobatchLoss
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.plan import plan
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.process_reports import ProcessReports
from pipeexec.executor.results.step_result import StepResult, copy_losses, lazy_result
from pipeexec.executor.setup.devices_and_stages import make_stages
from pipeexec.executor.step import Step
from pipeexec.executor.step_checks import (
    check_step_batch,
    warn_of_loss,
    warn_of_nan,
    warn_of_randomness,
)
from pipeexec.executor.step_errors import raise_failure
from pipeexec.executor.step_inputs import StepGradients, split_inputs
from pipeexec.stages.activation_bytes import ActivationCounter
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.batches import Batch
from pipeexec.stages.earlier_gradients import EarlierGradients
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.restore import restore_afterwards
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import Op

__all__ = ["StepRunner", "Walk"]

#: Issues the tasks of a step, and waits for them: `Step.walk`, or a capture as a CUDA graph.
Walk = Callable[[Step, Sequence[PlannedTask]], None]


class StepRunner:
    """Runs the steps of one graph on a placed model.

    Parameters
    ----------
    graph
        Verified here.
    model
        Stages, devices and optimizers; pipelines of other graphs may share it.
    loss
        Loss function of the steps.
    n_steps
        Number of steps that have run before.

    Attributes
    ----------
    graph, model, loss, n_steps
        As given; ``n_steps`` counts the steps of this runner too.
    timeout
        Seconds without progress after which a step is given up; None for no limit.
    shares
        Division of a batch among replicas.
    held
        Counter of held activations, one a device.
    stages
        One a module of the model, those of other processes included.
    tasks
        Planned tasks of this process, in order of ids.
    reports
        Reports to other processes; None in a pipeline of one process.
    capture
        Captures steps as CUDA graphs; None for eager steps.
    """

    def __init__(
        self, graph: TaskGraph, model: PlacedModel, loss: LossFunction, n_steps: int = 0
    ) -> None:
        verify(graph)
        self.graph, self.model, self.loss, self.n_steps = graph, model, loss, n_steps
        self.timeout = model.timeout
        devices, processes = model.devices, model.processes
        self.reports = None if processes is None else ProcessReports(graph, model, processes)
        self.shares = BatchShares(graph, devices)
        self._has_optimizer_steps = bool((graph.op == Op.STEP).any())
        self.held = [ActivationCounter() for _ in devices]
        self._microbatch_loss = MicrobatchLoss()
        self.stages = make_stages(model.modules, graph, devices, self.held, self._microbatch_loss)
        self.tasks = plan(graph, self.stages, devices, self.shares, processes)
        self._hosts = make_host_threads(graph, self.tasks, processes)
        self.capture = self._make_capture()

    def _make_capture(self) -> StepCapture | None:
        model = self.model
        if not model.cuda_graph:
            return None
        capture = StepCapture(
            self.graph,
            model.devices,
            model.modules,
            self.stages,
            model.optimizers,
            zero_grad=model.zero_grad,
        )
        model.captures.add(capture)
        return capture

    def set_loss(self, loss: LossFunction) -> None:
        """Take another loss function for the next steps; captured steps are dropped."""
        self.loss = loss
        self.capture = self._make_capture()

    def step(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Run one training step; see `Pipeline.step`."""
        self.model.check_batch_norms(
            self.graph.n_microbatches // self.graph.n_batches, stacklevel=4
        )
        capture = self.capture
        if capture is None or inputs is None:  # a captured step is of one process
            step = self.run(inputs, targets, Step.walk)
            return self.result(step, may_wait=self.model.processes is None)
        if (replayed := capture.replay(inputs, targets)) is not None:
            self.n_steps += 1
            return self.result(replayed)
        return self.result(self.run(*capture.batch(inputs, targets), capture.walk))

    def run(self, inputs: Batch | None, targets: Any, walk: Walk) -> Step:
        """Run a step, whose tasks ``walk`` issues; return it when it has ended.

        Raises
        ------
        StageError, StallError, PeerError, ArgumentError, ExecutionError
            See `Pipeline.step`.
        """
        step = self._start(inputs, targets)
        random_state = torch.get_rng_state()
        try:
            self._run_tasks(step, walk)
        finally:
            step.forget_errors()
            if self.reports is not None:
                self.reports.keep_readings(step)
        warn_of_randomness(self.stages, random_state)
        warn_of_loss(step.inputs.loss, returns_count=self.loss.returns_count)
        return step

    def result(self, step: Step, *, may_wait: bool = False) -> StepResult:
        """Return the result of a step; ``may_wait`` leaves its events to be read when needed."""
        losses, nan_losses = copy_losses(step.inputs.loss.loss_shares())
        warn_of_nan(nan_losses, self.n_steps - 1)
        held = tuple(held.peak for held in self.held)
        n_losses = step.inputs.loss.n_losses
        if may_wait:
            return lazy_result(step.readings(), losses, held, step.events.host_seconds, n_losses)
        readings, part = step.readings(), None
        timeline = readings.timeline
        if self.reports is not None:
            part = replace(step.process_result(), peak_held=held)
            timeline = part.timeline
            self.reports.keep_timeline(timeline)
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

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all that steps change at the end of a block; see `Pipeline.preserved`."""
        n_steps = self.n_steps
        try:
            with restore_afterwards(self.model.modules, self.model.optimizers):
                yield
        finally:
            self.n_steps = n_steps

    def _start(self, inputs: Batch | None, targets: Any) -> Step:
        """Prepare a step; where several processes need it, a failure ends all of them."""
        processes = self.model.processes
        if processes is None:
            return self._prepare(inputs, targets)
        try:
            with processes.guard():
                processes.check()
                return self._prepare(inputs, targets)
        except BaseException:
            for device in self.model.devices:
                device.abandon()
            raise

    def _prepare(self, inputs: Batch | None, targets: Any) -> Step:
        """Return a step whose tasks can be issued, once its batch and modules are ready."""
        graph, model = self.graph, self.model
        check_step_batch(inputs, targets, graph, model.devices)
        step = Step(
            graph,
            model.devices,
            split_inputs(
                graph,
                self.shares,
                model.devices,
                inputs,
                targets,
                loss=self.loss,
                number=self.n_steps,
                processes=model.processes,
            ),
            StepGradients(self.stages, model.optimizers),
            timeout=self.timeout,
            processes=model.processes,
            hosts=self._hosts,
        )
        if 0 in graph.sharded:  # others get their keys from the stage before
            check_keys(model.modules[:: graph.n_stages], step.inputs.microbatches)
        if self.reports is not None:
            self.reports.start(step, self.tasks)
        self._prepare_modules()
        self._begin_stages()
        if not model.zero_grad and not model.cuda_graph:
            # DistributedDataParallel takes the mean of earlier gradients too, after no_sync().
            step.gradients.earlier = EarlierGradients(
                {slot: stage.module for slot, stage in enumerate(self.stages) if not stage.is_ddp},
                is_separate=self.loss.returns_count is not False,
            )
        return step

    def _prepare_modules(self) -> None:
        """Give copies of a stage the values of the first, and clear gradients."""
        graph, modules = self.graph, self.model.modules
        if len(self.stages) > graph.n_stages or graph.n_batches > 1:
            check_hooks(modules, graph.n_stages, graph.n_batches > 1)
        sync_from_first(modules, graph.n_stages)
        for slot, module in enumerate(modules):
            # The sum of the first copy has the gradients of the others; shards have separate rows.
            is_copy = slot >= graph.n_stages and slot % graph.n_stages not in graph.sharded
            if self.model.zero_grad or is_copy:
                module.zero_grad(set_to_none=True)

    def _begin_stages(self) -> None:
        """Begin a step in every stage, and count its activations from zero."""
        autocast = current_autocast()
        for stage, number in zip(self.stages, self.graph.homes.ravel().tolist(), strict=False):
            stage.begin_step(autocast)
            # Versions of weights are made on the caller's stream, and freed within the step.
            for weight in () if stage.versions is None else stage.versions.parameters():
                device = self.model.devices[number]
                device.adopt(weight, device.stream("compute"))
        for held in self.held:
            held.current = held.peak = 0

    def _run_tasks(self, step: Step, walk: Walk) -> None:
        """Run the tasks of a step, and finish it; raise the error that stopped it."""
        try:
            with self._stoppable(step), _garbage_collection_paused():
                walk(step, self.tasks)
                if step.failure is None and not step.abandoned:
                    self._complete_gradients(step)
        except BaseException as error:
            step.failure = step.failure or (-1, error)
            if self.model.processes is not None:
                raise_failure(step, self.model.processes, error)
            raise
        finally:
            self._end(step)
        if step.failure is not None or step.abandoned:
            raise_failure(step, self.model.processes)

    @contextmanager
    def _stoppable(self, step: Step) -> Iterator[None]:
        """Run the tasks of a step in a block; `Pipeline.close` of another thread stops it."""
        self._microbatch_loss.step = step
        try:
            with ExitStack() as stack:
                for device in self.model.devices:
                    stack.enter_context(device.step_lock.run_step(step))
                yield
        finally:
            self._microbatch_loss.step = None

    def _complete_gradients(self, step: Step) -> None:
        """Complete the gradients of a step whose tasks have all run."""
        for slot in list(step.gradients.reduced):  # of graphs without STEP
            assign_reduced_gradients(step, slot)
        if not self._has_optimizer_steps and step.inputs.loss.is_counted():
            if self.model.cuda_graph or self.graph.n_batches > 1:
                raise ExecutionError(
                    "loss_fn returned (sum, count), whose gradients are divided in STEP: the graph "
                    "has none, but several mini-batches, or is captured as a CUDA graph; lower "
                    "with step='flush'"
                )
            for slot, module in enumerate(self.model.modules[: len(self.stages)]):
                if not isinstance(module, RemoteStage):
                    step.gradients.divide(slot, 0, step.inputs.loss)
        if step.gradients.earlier is not None:
            step.gradients.earlier.add()

    def _end(self, step: Step) -> None:
        """End a step; after a failure, restore the gradients from before it where they are kept."""
        self.n_steps += 1
        if step.gradients.earlier is not None and (step.failure is not None or step.abandoned):
            step.gradients.earlier.restore()
        if step.abandoned or (step.failure is not None and self.reports is not None):
            for device in self.model.devices:
                device.abandon()
            return
        if self.reports is not None and step.failure is None:
            self.reports.end(self.n_steps)
        for stage in self.stages:
            stage.end_step()
        if step.failure is not None:
            for stage in self.stages:
                stage.reset()


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause Python's cycle collector in a block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

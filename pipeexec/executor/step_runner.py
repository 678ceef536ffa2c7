"""`StepRunner`: run the training steps of one graph, from the batch to the result.

A step is prepared; the host, or each of several, issues its tasks; the devices run them; gradients
are completed; and the result is read. The code knows neither schedules by name nor kinds of
devices, nor features, which are parts (`pipeexec.executor.step_part`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import RemoteStage, check_hooks, sync_from_first
from pipeexec.devices.device import RemoteDevice
from pipeexec.devices.thread_settings import current_autocast
from pipeexec.executor.gradient_sync import assign_reduced_gradients
from pipeexec.executor.host_threads import make_host_threads
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.plan import plan
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_gradients import StepGradients
from pipeexec.executor.step_inputs import (
    check_step_batch,
    split_inputs,
    warn_of_compiled,
    warn_of_loss,
    warn_of_nan,
    warn_of_randomness,
    warn_of_untrained,
)
from pipeexec.executor.step_part import StageArguments
from pipeexec.executor.step_reports import ProcessReports, raise_failure
from pipeexec.executor.step_result import StepResult, copy_losses, lazy_result
from pipeexec.nesting import Arguments
from pipeexec.stages.activations import ActivationCounter
from pipeexec.stages.batches import Batch, warn_of_squares
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.microbatches import BatchShares, are_microbatches
from pipeexec.stages.module_call import WeightVersions, own_output
from pipeexec.stages.restore import restore_afterwards
from pipeexec.stages.stage import Stage, StageLike
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.scheduling.placement import entry_stages


class MicrobatchLoss:
    """Compute the losses of the current step.

    A pipeline holds its stages. A last stage holds this, which holds the current step and never the
    pipeline. A reference cycle would keep the memory of both until Python's cycle collector runs.
    On a GPU, that may be too late.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # None between steps

    def __call__(self, replica: int, output: object, microbatch: int) -> Tensor:
        """Return the weighted loss of a micro-batch, and store it in the step."""
        step = self._running_step()
        number = step.inputs.shares.number(replica, microbatch)
        loss = step.inputs.loss.microbatch_loss(number, output)
        if torch.is_grad_enabled() and not loss.requires_grad:
            parameters = (p for stage in step.gradients.stages for p in stage.module.parameters())
            if step.processes is not None or any(p.requires_grad for p in parameters):
                raise ExecutionError(
                    "the loss does not depend on any parameter by operations that torch can "
                    "differentiate, so a step would train nothing; look for detach(), no_grad(), "
                    "item() or integers in the last stage and the loss, and for a loss that does "
                    "not use the output"
                )
        return loss

    def of_stage(
        self, stage: int, replica: int, output: object, microbatch: int
    ) -> tuple[object, Tensor | None]:
        """Return the output of a stage with a loss of its own, and that loss, weighted."""
        step = self._running_step()
        own, predictions = own_output(stage, output)
        number = step.inputs.shares.number(replica, microbatch)
        loss = step.inputs.loss.stage_loss(stage, number, predictions)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ExecutionError(
                f"the loss of stage {stage} (stage_losses) does not depend on any parameter by "
                "operations that torch can differentiate; look for detach(), no_grad() or item()"
            )
        return own, loss

    def _running_step(self) -> Step:
        if self.step is None:
            raise ExecutionError("the step of this task was abandoned, as an error says")
        return self.step


#: Issues the tasks of a step, and waits for them; `Step.walk` does.
Walk = Callable[[Step, Sequence[PlannedTask]], None]


class StepRunner:
    """Runs the steps of one graph on a placed model, which pipelines of other graphs may share.

    Attributes
    ----------
    n_steps
        Number of steps that have run, those before this runner included.
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
    """

    result_type: ClassVar[type[StepResult]] = StepResult
    stage_type: ClassVar[type[Stage]] = Stage
    loss_type: ClassVar[type[MicrobatchLoss]] = MicrobatchLoss

    #: Whether steps change gradients, and whether these are left for a later step.
    trains, leaves_gradients = True, False

    def __init__(
        self, graph: TaskGraph, model: PlacedModel, loss: LossFunction, n_steps: int = 0
    ) -> None:
        self.graph, self.model, self.loss, self.n_steps = graph, model, loss, n_steps
        self.timeout = model.timeout
        devices, processes = model.devices, model.processes
        self.reports = None if processes is None else ProcessReports(graph, model, processes)
        self.shares = BatchShares(graph, devices)
        self.has_optimizer_steps = bool((graph.op == Op.STEP).any())
        self.held = [ActivationCounter() for _ in devices]
        self._microbatch_loss = self.loss_type()
        self.stages = self._make_stages()
        self.tasks = plan(graph, self.stages, devices, self.shares, model.parts, processes)
        for part in model.parts:
            part.prepare(graph, self.stages, self.tasks)
        warn_of_compiled(graph, self.stages)
        self._hosts = make_host_threads(graph, self.tasks, processes)

    def _modules(self) -> Sequence[nn.Module]:
        """Return the modules of the stages, replica after replica."""
        return self.model.modules

    def _make_stages(self) -> list[StageLike]:
        """Return the stages of all replicas, replica after replica."""
        graph, devices, n = self.graph, self.model.devices, self.graph.n_stages
        arguments = [
            StageArguments(
                module,
                slot % n,
                devices[home].torch_device,
                self.held[home],
                partial(self._microbatch_loss, slot // n) if slot % n == n - 1 else None,
            )
            for slot, (module, home) in enumerate(
                zip(self._modules(), graph.homes.ravel().tolist(), strict=False)
            )
        ]
        special: dict[int, StageLike] = {}
        for part in self.model.parts:
            special.update(part.make_stages(graph, arguments, trains=self.trains))
        size, delayed = self.shares.batch_size, graph.weight_versions == "double_buffered"
        stages = [
            special[slot]
            if slot in special
            else self.stage_type(
                *x,
                WeightVersions(x.module, size, delayed) if graph.n_batches > 1 else None,
                size,
                graph.n_slices,
            )
            for slot, x in enumerate(arguments)
        ]
        shared = dict[tuple[int, int], StageLike]()  # by paths with the stage on one device
        for slot, home in enumerate(graph.homes.ravel().tolist()[: len(stages)]):
            stages[slot] = shared.setdefault((home, slot % n), stages[slot])
        entries = entry_stages(graph.edges, n)
        for slot, stage in enumerate(stages):
            if isinstance(stage, Stage):
                stage.needs_input_grad = stage.index not in entries
                if stage.index in self.loss.of_stages:
                    own = partial(self._microbatch_loss.of_stage, stage.index, slot // n)
                    stage.output_loss = own
        return stages

    def set_loss(self, loss: LossFunction) -> None:
        """Take another loss function for the next steps."""
        self.loss = loss

    def step(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Run one training step; see `Pipeline.step`."""
        self.model.check_batch_norms(self.shares.batch_size)
        step = self.run(inputs, targets)
        return self.result(step, may_wait=self.model.processes is None)

    def run(self, inputs: Batch | None, targets: Any, walk: Walk = Step.walk) -> Step:
        """Run a step, whose tasks ``walk`` issues; return it when it has ended."""
        step = self._start(inputs, targets)
        random_state = torch.get_rng_state()
        try:
            self._run_tasks(step, walk)
        finally:
            step.forget_errors()
            if self.reports is not None:
                self.reports.keep_readings(step)
        warn_of_randomness(self.stages, random_state)
        model = self.model
        if self.trains and not model.has_checked_gradients:
            model.has_checked_gradients = True
            if self.graph.n_batches == 1:  # else gradients are taken meanwhile
                warn_of_untrained(step.gradients)
        warn_of_loss(step.inputs.loss, returns_count=self.loss.returns_count)
        return step

    def result(self, step: Step, *, may_wait: bool = False) -> StepResult:
        """Return the result of a step; ``may_wait`` leaves its events to be read when needed."""
        losses, nan_losses = copy_losses(step.inputs.loss.loss_shares())
        warn_of_nan(nan_losses, self.n_steps - 1)
        held = tuple(held.peak for held in self.held)
        own, graph = self.loss.of_stages, self.graph
        fields: dict[str, Any] = {
            "losses": losses,
            "loss_stages": tuple(own),
            "lacks_losses": any(
                isinstance(self.model.devices[d], RemoteDevice)
                for d in graph.homes[:, [*own]].ravel()
            ),
            "peak_held": held,
            "host_seconds": step.events.host_seconds,
            "n_losses": step.inputs.loss.n_losses,
            "metric_sums": step.inputs.loss.metric_sums(),
        }
        for part in step.parts:
            fields.update(part.result(step))
        readings, process_result = step.readings(), None
        if may_wait:
            return lazy_result(self.result_type, readings, fields)
        timeline = readings.timeline
        if self.reports is not None:
            process_result = replace(step.process_result(), peak_held=held)
            timeline = process_result.timeline
            self.reports.keep_timeline(timeline)
        return self.result_type(
            timeline=timeline,
            part=process_result,
            clock_error=step.clock_error,
            milestones=readings.milestone_shares,
            host_times=readings.host_times,
            **fields,
        )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all that steps change at the end of a block; see `Pipeline.preserved`."""
        n_steps = self.n_steps
        try:
            with ExitStack() as stack:
                stack.enter_context(restore_afterwards(self.model.modules, self.model.optimizers))
                for part in self.model.parts:
                    stack.enter_context(part.preserved())
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
        self._check(inputs, targets)
        if not (model.has_checked_squares or inputs is None or are_microbatches(inputs)):
            warn_of_squares(inputs, model.batch_dims)
            model.has_checked_squares = True
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
                batch_dims=model.batch_dims,
                cut=model.cut(graph),
                is_split=model.is_split,
            ),
            StepGradients(
                self.stages,
                model.optimizers,
                graph.n_stages,
                are_left=self.leaves_gradients,
            ),
            timeout=self.timeout,
            processes=model.processes,
            hosts=self._hosts,
            parts=model.parts if self.trains else (),
        )
        if self.reports is not None:
            if self.trains:  # an evaluation has agreed on shapes before
                self.reports.shapes = self.shares.input_shapes()
            self.reports.start(step, self.tasks)
        self._prepare_modules(step)
        self._begin_stages(step.inputs.arguments)
        return step

    def _check(self, inputs: Batch | None, targets: Any) -> None:
        check_step_batch(inputs, targets, self.graph, self.model.devices, self.loss.of_stages)

    def _prepare_modules(self, step: Step) -> None:
        """Give copies of a stage the values of the first, and let parts prepare the step."""
        graph, modules = self.graph, self.model.modules
        if self.trains and (len(self.stages) > graph.n_stages or graph.n_batches > 1):
            check_hooks(modules, graph.n_stages, graph.n_batches > 1)
        for part in self.model.parts:
            part.sync(step)
        sync_from_first(modules, graph.n_stages)
        for part in step.parts:
            part.before(step)

    def _begin_stages(self, arguments: Mapping[int, Sequence[Arguments] | None]) -> None:
        """Begin a step in every stage, and count its activations from zero."""
        autocast = current_autocast()
        homes, m = self.graph.homes.ravel().tolist(), self.graph.n_microbatches
        for slot, (stage, number) in enumerate(zip(self.stages, homes, strict=False)):
            stage.begin_step(autocast)
            begin = self.shares.number(slot // self.graph.n_stages, 0)
            own = arguments.get(stage.index)
            stage.arguments = own and own[begin : begin + m]
            # Versions of weights are made on the caller's stream, and freed within the step.
            for weight in () if stage.versions is None else stage.versions.parameters():
                device = self.model.devices[number]
                device.adopt(weight, device.stream("compute"))
        for held in self.held:
            held.current = held.peak = 0

    def _run_tasks(self, step: Step, walk: Walk) -> None:
        """Run the tasks of a step, and finish it; raise the error that stopped it."""
        try:
            with self._running(step):
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
    def _running(self, step: Step) -> Iterator[None]:
        """Run the tasks of a step in a block, without pauses of Python's garbage collection.

        `Pipeline.close` of another thread stops the step.
        """
        collects = gc.isenabled()
        self._microbatch_loss.step = step
        gc.disable()
        try:
            with ExitStack() as stack:
                for device in self.model.devices:
                    stack.enter_context(device.step_lock.run_step(step))
                yield
        finally:
            self._microbatch_loss.step = None
            if collects:
                gc.enable()

    def _complete_gradients(self, step: Step) -> None:
        """Assign reduced gradients, divide them by counts, and let parts complete them."""
        for slot in list(step.gradients.reduced):  # of graphs without STEP
            assign_reduced_gradients(step, slot)
        are_divided = not self.trains or self.leaves_gradients or self.has_optimizer_steps
        if not are_divided and step.inputs.loss.is_counted():
            if step.graph.n_batches > 1:
                raise ExecutionError(
                    "loss_fn returned (sum, count), whose gradients are divided in STEP: the graph "
                    "has none, but several mini-batches; lower with step='flush'"
                )
            for slot, module in enumerate(self.model.modules[: len(self.stages)]):
                if not isinstance(module, RemoteStage):
                    step.gradients.divide(slot, 0, step.inputs.loss)
        for part in reversed(step.parts):
            part.after(step)

    def _end(self, step: Step) -> None:
        """End a step; after a failure, parts restore what was before it."""
        self.n_steps += 1
        for part in reversed(step.parts) if step.has_stopped else ():
            part.restore(step)
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

"""Capture a step as one CUDA graph, and replay it with a single call of the host.

A graph repeats the work that the host issued, at the same addresses and with the same numbers. A
replay is valid as long as the host's inputs stay as they were: the shape of the batch, addresses of
parameters, buffers and optimizer state, learning rates, training modes. `HostState` records them.
There are three kinds of steps:

- A step with a new host state runs eagerly. Optimizers make their state and libraries their
  workspaces in it, outside the graph.
- A step with the host state of the last eager step is captured, and replayed once.
- Further steps are replayed while the host state stays.

              caller's stream   copy the batch in . replay . . . . . . . . . . . use the results
    in the    the first stream  fork --+--+------------------------------------+- join
    graph:    compute, send, ..        |  +-- F -- F -- B ...                  |
                                       +----- RECV ... each stream in order ---+

One GPU only: capturing streams of several GPUs in one graph may deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import sync_from_first
from pipeexec.devices.cuda import CapturedEvent, CudaEvent, CudaStream
from pipeexec.devices.device import Device
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.executor.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.nesting import leaves, mapped, tensors_in
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.microbatches import are_microbatches
from pipeexec.stages.stage import StageLike
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, SEGMENTED, Op

#: One a module, path after path.
Optimizers = Sequence[torch.optim.Optimizer | None]


def check_can_capture(graph: TaskGraph, devices: Sequence[Device], optimizers: Optimizers) -> None:
    """Check before the first step that steps can become CUDA graphs."""
    places = sorted({str(device.torch_device) for device in devices})
    if any(device.torch_device.type != "cuda" for device in devices):
        raise ArgumentError(
            f"cuda_graph=True needs CUDA devices, got {', '.join(places)}; leave it out"
        )
    if len(places) > 1:
        raise ArgumentError(
            f"cuda_graph=True runs on one GPU, got {', '.join(places)}: capturing several in one "
            "process may deadlock; use slices of one GPU, or leave it out"
        )
    if graph.host.any():
        raise ArgumentError(
            f"cuda_graph=True captures what one host issues, the graph has {graph.host.max() + 1}: "
            "a replay is one call of one host anyway; lower with hosts='one', or leave it out"
        )
    if graph.n_batches > 1:
        raise ArgumentError(
            f"cuda_graph=True runs one mini-batch a step, the graph has {graph.n_batches}: the "
            "host changes versions of weights between them; leave it out"
        )
    if graph.n_slices > 1:
        raise ArgumentError(
            f"cuda_graph=True runs whole micro-batches, the graph has {graph.n_slices} slices a "
            "sequence, whose keys and values a capture would not share; leave it out"
        )
    if graph.is_op(COPIES).any():
        raise ArgumentError(
            "cuda_graph=True repeats the addresses of its capture, and memory of offloaded "
            "activations is new in each step; lower without offload, or leave it out"
        )
    has_segments = (graph.is_op(SEGMENTED) & (graph.part >= 0)).any()
    refused = {
        "the norm of gradients": graph.has_grad_norm,
        "sums over tied stages": (graph.op == Op.REDUCE_TIED).any(),
        "layers with experts, whose numbers of rows change": has_segments,
    }
    for what in (what for what, is_there in refused.items() if is_there):
        raise ArgumentError(
            f"cuda_graph=True does not capture {what}; leave cuda_graph out, or lower without them"
        )
    for index, optimizer in enumerate(optimizers):
        groups = () if optimizer is None else optimizer.param_groups
        if not all(group.get("capturable", True) for group in groups):
            raise _not_capturable(index % graph.n_stages, optimizer)


def check_state(optimizers: Optimizers, n_stages: int) -> None:
    """Check after a step that no optimizer keeps numbers on the host; not all have an option."""
    for index, optimizer in enumerate(optimizers):
        states = () if optimizer is None else optimizer.state.values()
        for value in (value for state in states for value in state.values()):
            on_host = value.device.type == "cpu" if isinstance(value, Tensor) else True
            if on_host and isinstance(value, (Tensor, int, float)):
                raise _not_capturable(index % n_stages, optimizer)


def _not_capturable(stage: int, optimizer: torch.optim.Optimizer | None) -> ArgumentError:
    return ArgumentError(
        f"the optimizer of stage {stage} ({type(optimizer).__name__}) keeps numbers on the host, "
        "which a CUDA graph would not change; make it with capturable=True, take one that has "
        "this option, or leave out cuda_graph"
    )


#: Addresses and settings that the host reads while it issues a step, and that may change between
#: steps.
HostState = tuple[tuple[int, ...], tuple[object, ...]]


def host_state(modules: Sequence[nn.Module], optimizers: Optimizers) -> HostState:
    """Return the present state of the host, without plain attributes of modules."""
    addresses: list[int] = []
    settings: list[object] = [(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))]
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            addresses.append(tensor.data_ptr())
            settings.append(tensor.requires_grad)
        settings.extend(part.training for part in module.modules())
    for optimizer in optimizers:
        if optimizer is None:
            continue
        for state in optimizer.state.values():
            addresses.extend(x.data_ptr() for x in state.values() if isinstance(x, Tensor))
        for group in optimizer.param_groups:
            # Numbers such as the learning rate; the graph reads tensors anew in each replay.
            settings.extend(
                (name, value)
                for name, value in group.items()
                if name != "params" and not isinstance(value, Tensor)
            )
            addresses.extend(x.data_ptr() for x in group.values() if isinstance(x, Tensor))
    return tuple(addresses), tuple(settings)


def check_not_random(stages: Sequence[StageLike]) -> None:
    """Raise `ExecutionError` if a stage draws random numbers, or has not run in this mode yet."""
    for stage in stages:
        if stage.is_random.get(stage.module.training, True):
            raise ExecutionError(
                f"stage {stage.index} draws random numbers (dropout, say), whose seeds are the "
                "host's: a CUDA graph would draw the same ones in every step; call eval() on "
                "it, set its probability to 0, or leave out cuda_graph"
            )


class Recorder:
    """Captures steps on a GPU as CUDA graphs, and launches these."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, step: Step, tasks: Sequence[PlannedTask]) -> torch.cuda.CUDAGraph:
        """Capture a step: all streams fork from the first one, and join it again."""
        graph = torch.cuda.CUDAGraph()
        every = [stream for t in tasks for stream in (t.stream, t.device.stream("compute"))]
        streams = [s for s in {id(s): s for s in every}.values() if isinstance(s, CudaStream)]
        for stream in streams:
            stream.make_event = CapturedEvent
        try:
            # The outer context restores the current stream even if the inner one fails to end.
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
                first = torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=first):
                    for stream in streams:
                        stream.stream.wait_stream(first)
                    step.issue(tasks)
                    for stream in streams:
                        first.wait_stream(stream.stream)
        finally:
            for stream in streams:
                stream.make_event = CudaEvent
        return graph

    def launch(self, graph: torch.cuda.CUDAGraph) -> float:
        """Run a graph after the work of the caller's stream; return the seconds of the call."""
        with torch.cuda.device(self.device):
            start = perf_counter()
            graph.replay()
            seconds = perf_counter() - start
            torch.cuda.current_stream().synchronize()
        return seconds


#: Eager steps before a capture: the first allocates lasting state, the second shows it complete.
WARM_UP = 2


class _CapturedStep(NamedTuple):
    """A captured step: its graph, the tensors that it reads and writes, and when it is valid.

    Attributes
    ----------
    inputs, targets
        Tensors from which the graph reads the batch.
    earlier_gradients
        Gradients to which the step adds, one a parameter.
    gradients
        Gradients that the step leaves, one a parameter.
    """

    graph: torch.cuda.CUDAGraph
    step: Step
    state: HostState
    inputs: Batch
    targets: Batch
    earlier_gradients: list[Tensor | None]
    gradients: list[Tensor | None]


class StepCapture:
    """Decides for each step whether it runs eagerly, is captured, or is replayed.

    First call `replay`. If it returns None, run a step with `batch` and `walk`. Unless steps begin
    without gradients (``zero_grad``), these add up over steps, except for those of copies.
    """

    def __init__(
        self,
        graph: TaskGraph,
        devices: Sequence[Device],
        modules: Sequence[nn.Module],
        stages: Sequence[StageLike],
        optimizers: Optimizers,
        *,
        zero_grad: bool,
    ) -> None:
        self.n_stages, self.device = graph.n_stages, devices[0].torch_device
        self._recorder = Recorder(self.device)
        self.modules, self.stages, self.optimizers = modules, stages, optimizers
        self.parameters = [p for module in modules for p in module.parameters()]
        self._adds_up = [
            not zero_grad and index < graph.n_stages
            for index, module in enumerate(modules)
            for _ in module.parameters()
        ]
        self.n_captures = 0
        self._captured: _CapturedStep | None = None
        self._n_eager = 0
        self._last: HostState | None = None  # after the last eager step
        self._had_gradient: list[bool] = []
        self._is_capturing = False
        self._inputs: Batch = ()
        self._targets: Batch = ()

    def replay(self, inputs: Batch, targets: Batch) -> Step | None:
        """Replay the captured step and wait for it; return None if there is no valid one."""
        state = host_state(self.modules, self.optimizers)
        captured = self._captured
        if captured is None or state != captured.state:
            self._captured = None
            self._is_capturing = self._n_eager >= WARM_UP and state == self._last
            return None
        _check_same_shape("inputs", captured.inputs, inputs)
        _check_same_shape("targets", captured.targets, targets)
        _copy(captured.inputs, inputs)
        _copy(captured.targets, targets)
        self._launch(captured)
        return captured.step

    def drop(self) -> None:
        """Free the graph and its memory."""
        self._captured = None
        self._is_capturing, self._inputs, self._targets = False, (), ()

    def batch(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return the batch that the next step reads; for a capture, a lasting copy."""
        if not self._is_capturing:
            return inputs, targets
        self._inputs, self._targets = (
            mapped(lambda x: x.to(self.device, copy=True) if isinstance(x, Tensor) else x, batch)
            for batch in (inputs, targets)
        )
        return self._inputs, self._targets

    def walk(self, step: Step, tasks: Sequence[PlannedTask]) -> None:
        """Run a step eagerly, or capture it and replay it once."""
        if self._is_capturing:
            self._capture(step, tasks)
            return
        step.walk(tasks)
        self._n_eager += 1
        self._had_gradient = [p.grad is not None for p in self.parameters]
        self._last = host_state(self.modules, self.optimizers)

    def _capture(self, step: Step, tasks: Sequence[PlannedTask]) -> None:
        check_not_random(self.stages)
        check_state(self.optimizers, self.n_stages)
        earlier_gradients = self._gradients_to_add_to()
        try:
            graph = self._recorder.record(step, tasks)
            if step.failure is not None:
                raise step.failure[1]
        except BaseException as error:
            self._give_up(step, earlier_gradients, error)
        # The capture has computed nothing: the new gradients have no values yet.
        gradients = [p.grad for p in self.parameters]
        self._set_gradients(earlier_gradients)
        self.n_captures += 1
        captured = _CapturedStep(
            graph=graph,
            step=step,
            state=host_state(self.modules, self.optimizers),
            inputs=self._inputs,
            targets=self._targets,
            earlier_gradients=earlier_gradients,
            gradients=gradients,
        )
        self._launch(captured)
        self._captured = captured
        self._is_capturing, self._inputs, self._targets = False, (), ()

    def _gradients_to_add_to(self) -> list[Tensor | None]:
        """Return the gradients before the step; those cleared since the last step become zeros.

        Without a tensor to add to, every replay would make a gradient anew.
        """
        for parameter, had_gradient, adds_up in zip(
            self.parameters, self._had_gradient, self._adds_up, strict=True
        ):
            if adds_up and had_gradient and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters]

    def _launch(self, captured: _CapturedStep) -> None:
        """Launch the graph after the work of the caller's stream, and wait for it."""
        sync_from_first(self.modules, self.n_stages)
        # The graph adds to static tensors, which take the present gradients of their parameters.
        for parameter, static in zip(self.parameters, captured.earlier_gradients, strict=True):
            if static is None or parameter.grad is static:
                continue
            if parameter.grad is None:
                static.zero_()
            else:
                static.copy_(parameter.grad)
        captured.step.events.is_replay = True
        captured.step.events.host_seconds = self._recorder.launch(captured.graph)
        self._set_gradients(captured.gradients)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _give_up(
        self, step: Step, earlier_gradients: list[Tensor | None], error: BaseException
    ) -> NoReturn:
        """Drop a capture that failed, with its gradients without values; raise its cause."""
        # A task's error tells more than the capture's, which follows from it.
        step.failure = step.failure or (-1, error)
        task, cause = step.failure
        where = "the step" if task < 0 else str(step.graph.task(task))
        step.events.ran[:] = False
        self._is_capturing, self._n_eager, self._last = False, 0, None
        self._set_gradients(earlier_gradients)
        if not isinstance(cause, Exception):
            raise cause
        raise ExecutionError(
            f"{where} cannot be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
            "stages and loss must not wait for the GPU (.item(), .cpu(), printing a tensor, shapes "
            "that depend on values); change them, or leave out cuda_graph"
        ) from cause


def _copy(static: Batch, batch: Batch) -> None:
    """Copy the values of a batch into the tensors that the graph reads."""
    for target, source in zip(tensors_in(static), tensors_in(batch), strict=True):
        target.copy_(source, non_blocking=True)


def _check_same_shape(name: str, static: Batch, batch: Batch) -> None:
    expected, shapes = (
        [f"{path} {_shape(x)}".removeprefix(f"{name} ") for path, x in leaves(b, name)]
        for b in (static, batch)
    )
    if expected != shapes:
        raise ArgumentError(
            f"the step was captured as a CUDA graph for {name} of {', '.join(expected)}, got "
            f"{', '.join(shapes)}; give batches of one shape (drop a last one that is smaller), or "
            "leave out cuda_graph"
        )


def _shape(x: object) -> str:
    """Return the shape of a tensor, and the value of anything else, which a graph repeats."""
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"{x!r:.60}"


class CudaGraphs(StepPart):
    """Whether steps are captured, with the captures of all graphs."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.captures: WeakSet[StepCapture] = WeakSet()

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless steps can become CUDA graphs."""
        if self.is_on:
            check_can_capture(graph, model.devices, model.optimizers)

    def close(self) -> None:
        """Free captured steps with their memory."""
        for capture in self.captures:
            capture.drop()


class CapturingRunner(StepRunner):
    """Runs the steps of one graph eagerly, captures one, and replays it."""

    def __init__(
        self, graph: TaskGraph, model: PlacedModel, loss: LossFunction, n_steps: int = 0
    ) -> None:
        super().__init__(graph, model, loss, n_steps)
        self.set_loss(loss)

    def set_loss(self, loss: LossFunction) -> None:
        """Take another loss function for the next steps; the captured step is dropped."""
        super().set_loss(loss)
        model = self.model
        self.capture = StepCapture(
            self.graph,
            model.devices,
            model.modules,
            self.stages,
            model.optimizers,
            zero_grad=model.zero_grad,
        )
        model.part(CudaGraphs).captures.add(self.capture)

    def step(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Run, capture or replay one training step; see `Pipeline.step`."""
        self.model.check_batch_norms(self.shares.batch_size)
        if inputs is None:  # an error: a captured step is of one process
            return super().step(inputs, targets)
        if are_microbatches(inputs, targets):
            raise ArgumentError(
                "inputs or targets are Microbatches, whose shapes may differ from step to step, "
                "and cuda_graph=True repeats a step of one shape; leave cuda_graph out, or give "
                "batches that are split evenly"
            )
        if (replayed := self.capture.replay(inputs, targets)) is not None:
            self.n_steps += 1
            return self.result(replayed)
        return self.result(self.run(*self.capture.batch(inputs, targets), self.capture.walk))

    def _complete_gradients(self, step: Step) -> None:
        if step.inputs.loss.is_counted() and not self.has_optimizer_steps:
            raise ExecutionError(
                "loss_fn returned (sum, count), whose gradients are divided in STEP: the graph has "
                "none, and is captured as a CUDA graph; lower with step='flush'"
            )
        super()._complete_gradients(step)

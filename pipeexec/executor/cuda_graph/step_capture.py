"""The step as one CUDA graph: captured once, then replayed by a single call of the host.

A graph repeats what the host issued, to the same addresses and with the same numbers. So a replay
is only right while everything that the host looks at is as it was: the shape of the batch, where
parameters, buffers and optimizer state lie, learning rates, training modes. The imprint of
`pipeexec.executor.cuda_graph.checks` holds that. A step whose imprint is new runs eagerly, which
also lets optimizers make their state, and libraries their workspaces, outside the graph; a step
whose imprint is that of the eager one before it is captured; from then on it is replayed while the
imprint stays.

              caller's stream   copy the batch in . replay . . . . . . . . . . . use the results
    in the    the first stream  fork --+--+------------------------------------+- join
    graph:    compute, send, ..        |  +-- F -- F -- B ...                  |
                                       +----- RECV ... each stream as ever ----+

One GPU only: capturing streams of several in one graph may deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import sync_from_first
from pipeexec.devices.cuda_streams import CapturedEvent, CudaEvent, CudaStream
from pipeexec.devices.device import Device
from pipeexec.executor.cuda_graph.checks import (
    Imprint,
    Optimizers,
    check_can_capture,
    check_not_random,
    check_state,
    imprint,
)
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
from pipeexec.stages.batches import Batch
from pipeexec.stages.stage_like import StageLike
from pipesim.errors import ArgumentError, ExecutionError
from pipesim.graph.graph import TaskGraph

__all__ = ["Captured", "Recorder"]

#: Eager steps before a capture: one makes what is made once, one shows that nothing more is made.
WARM_UP = 2


class _Replayed(NamedTuple):
    """A captured step: the graph, what it reads and writes, and when it is valid."""

    graph: torch.cuda.CUDAGraph
    step: Step
    imprint: Imprint
    inputs: Batch
    targets: Batch
    given: list[Tensor | None]
    """Gradients that the step adds to."""
    found: list[Tensor | None]
    """Gradients that the step leaves."""


class Recorder:
    """Makes CUDA graphs of steps on a GPU, and launches them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, step: Step, tasks: Sequence[PlannedTask]) -> torch.cuda.CUDAGraph:
        """Issue a step into a graph: all streams fork from the first one, and join it again."""
        graph = torch.cuda.CUDAGraph()
        every = [stream for t in tasks for stream in (t.stream, t.device.stream("compute"))]
        streams = [s for s in {id(s): s for s in every}.values() if isinstance(s, CudaStream)]
        for stream in streams:
            stream.make_event = CapturedEvent
        try:
            # The outer context has the current stream back even where the inner one fails to end.
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
        """Run a graph behind what the caller's stream has queued; return the host's seconds."""
        with torch.cuda.device(self.device):
            start = perf_counter()
            graph.replay()
            seconds = perf_counter() - start
            torch.cuda.current_stream().synchronize()
        return seconds


class Captured:
    """Decides for each step whether it runs eagerly, is captured, or is replayed.

    A step is ``take``; where that is None, a walk of `Run` over ``batch`` through ``walk``.

    Parameters
    ----------
    graph, devices, modules, stages, optimizers
        The pipeline's.
    zero_grad
        Whether each step begins without gradients; else they add up, all but those of copies.

    Raises
    ------
    ArgumentError
        See `check_can_capture`.
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
        check_can_capture(graph, devices, optimizers)
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
        self._replayed: _Replayed | None = None
        self._n_eager = 0
        self._last: Imprint | None = None  # after the last eager step
        self._had_gradient: list[bool] = []
        self._captures = False
        self._inputs: Batch = ()
        self._targets: Batch = ()

    def take(self, inputs: Batch, targets: Batch) -> Step | None:
        """Replay a step and wait for it, if one was captured that fits; return it, or None.

        Raises
        ------
        ArgumentError
            If the batch has another shape than that which was captured.
        """
        now = imprint(self.modules, self.optimizers)
        replayed = self._replayed
        if replayed is None or now != replayed.imprint:
            self._replayed = None
            self._captures = self._n_eager >= WARM_UP and now == self._last
            return None
        _check_same_shape("inputs", replayed.inputs, inputs)
        _check_same_shape("targets", replayed.targets, targets)
        _copy(replayed.inputs, inputs)
        _copy(replayed.targets, targets)
        self._replay(replayed)
        return replayed.step

    def drop(self) -> None:
        """Free the graph, and the memory that it keeps for itself."""
        self._replayed = None
        self._captures, self._inputs, self._targets = False, (), ()

    def batch(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return the batch that the step reads: for a capture, a copy at a place that stays."""
        if not self._captures:
            return inputs, targets
        self._inputs, self._targets = (_kept(x, self.device) for x in (inputs, targets))
        return self._inputs, self._targets

    def walk(self, step: Step, tasks: Sequence[PlannedTask]) -> None:
        """Run a step eagerly, or capture it and replay it once.

        Raises
        ------
        ExecutionError
            If the step cannot be captured.
        """
        if self._captures:
            self._capture(step, tasks)
            return
        step.walk(tasks)
        self._n_eager += 1
        self._had_gradient = [p.grad is not None for p in self.parameters]
        self._last = imprint(self.modules, self.optimizers)

    def _capture(self, step: Step, tasks: Sequence[PlannedTask]) -> None:
        check_not_random(self.stages)
        check_state(self.optimizers, self.n_stages)
        given = self._gradients_to_add_to()
        try:
            graph = self._recorder.record(step, tasks)
            if step.failure is not None:
                raise step.failure[1]
        except BaseException as error:
            self._give_up(step, given, error)
        # What p.grad is now holds nothing yet.
        found = [p.grad for p in self.parameters]
        self._set_gradients(given)
        self.n_captures += 1
        replayed = _Replayed(
            graph=graph,
            step=step,
            imprint=imprint(self.modules, self.optimizers),
            inputs=self._inputs,
            targets=self._targets,
            given=given,
            found=found,
        )
        self._replay(replayed)
        self._replayed = replayed
        self._captures, self._inputs, self._targets = False, (), ()

    def _gradients_to_add_to(self) -> list[Tensor | None]:
        """Return the gradients there are; one that was cleared since the last step is zeros again.

        Else the graph would make it anew in every replay, and never add up.
        """
        for parameter, had, adds_up in zip(
            self.parameters, self._had_gradient, self._adds_up, strict=True
        ):
            if adds_up and had and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters]

    def _replay(self, replayed: _Replayed) -> None:
        """Launch the graph on the caller's stream, behind what it has queued, and wait."""
        sync_from_first(self.modules, self.n_stages)
        for parameter, static in zip(self.parameters, replayed.given, strict=True):
            _restore(static, parameter.grad)
        replayed.step.events.is_replay = True
        replayed.step.events.host_seconds = self._recorder.launch(replayed.graph)
        self._set_gradients(replayed.found)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _give_up(self, step: Step, given: list[Tensor | None], error: BaseException) -> NoReturn:
        """Leave nothing behind that a graph which is no more would have filled."""
        # What a task raised says more than that the capture, therefore, did not end well.
        step.failure = step.failure or (-1, error)
        task, cause = step.failure
        where = "the step" if task < 0 else str(step.graph.task(task))
        step.events.ran[:] = False
        self._captures, self._n_eager, self._last = False, 0, None
        self._set_gradients(given)
        if not isinstance(cause, Exception):
            raise cause
        raise ExecutionError(
            f"{where} cannot be captured as a CUDA graph ({type(cause).__name__}: {cause}); "
            "stages and loss must not wait for the GPU (.item(), .cpu(), printing a tensor, shapes "
            "that depend on values); change them, or leave out cuda_graph"
        ) from cause


def _restore(static: Tensor | None, gradient: Tensor | None) -> None:
    """Give a gradient that the graph adds to the value that the caller sees."""
    if static is None or gradient is static:
        return
    if gradient is None:
        static.zero_()
    else:
        static.copy_(gradient)


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _kept(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on the GPU."""
    copies = tuple(x.to(device, copy=True) for x in _tensors(batch))
    return copies if isinstance(batch, tuple) else copies[0]


def _copy(kept: Batch, batch: Batch) -> None:
    for mine, its in zip(_tensors(kept), _tensors(batch), strict=True):
        mine.copy_(its, non_blocking=True)


def _check_same_shape(name: str, kept: Batch, batch: Batch) -> None:
    before, now = ([_shape(x) for x in _tensors(b)] for b in (kept, batch))
    if before != now:
        raise ArgumentError(
            f"the step was captured as a CUDA graph for {name} of {', '.join(before)}, got "
            f"{', '.join(now)}; give batches of one shape (drop a last one that is smaller), or "
            "leave out cuda_graph"
        )


def _shape(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

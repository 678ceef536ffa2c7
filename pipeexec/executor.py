"""`Pipeline`: walk a task graph's issue order, put each task on its stream, and time it.

The host goes once through the tasks. For each it makes the stream wait for the events of what the
task needs, records an event, submits the task, and records another. Nothing here knows a schedule
by name, or what kind of device it talks to.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.devices import DeviceLike, make_devices
from pipeexec.meter import Meter
from pipeexec.paths import check_hooks, copies, follow, paths_of_microbatches
from pipeexec.run import Batch, Run, plan
from pipeexec.stage import Held, Stage
from pipeexec.versions import Versions
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    NanLossWarning,
    RandomnessWarning,
    check_name,
)
from pipesim.graph import TaskGraph
from pipesim.timeline import Timeline
from pipesim.verify import verify

__all__ = ["Pipeline", "StepResult"]

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step brought.

    Attributes
    ----------
    loss
        Of the whole batch, or the mean of the mini-batches'; a tensor without dimensions.
    losses
        Share of each micro-batch in its mini-batch's.
    timeline
        When each task ran.
    peak_held
        Most micro-batches whose activations each device held; shape ``(n_devices,)``.
    host_seconds
        What the host took to issue all tasks.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    timeline: Timeline
    peak_held: tuple[int, ...]
    host_seconds: float


class Pipeline:
    """Stages on devices, and the graph that a step of them runs.

    Parameters
    ----------
    stages
        One module a stage. Each takes what the one before returns: a tensor or a tuple of tensors.
    graph
        From `pipesim.lower`; verified first.
    devices
        One name (``"cpu"``, ``"cuda:0"``) a device of the graph; each ``"cpu"`` is a worker thread.
    loss_fn
        ``loss_fn(output, targets)`` of a micro-batch; runs as part of the last stage.
    optimizer
        Called with a stage's parameters, returns its `torch.optim.Optimizer`. STEP runs it, and
        each step begins without gradients. With None, STEP does nothing and gradients add up in
        ``parameter.grad`` from step to step, as ever in torch.
    loss_reduction
        Whether ``loss_fn`` returns a ``"mean"`` over its samples, or a ``"sum"``. The loss and the
        gradients of a step are those of the whole batch at once: means are weighted by the sizes
        of the micro-batches, which may differ.
    pin_threads
        Whether each CPU worker stays on a core of its own, where there are enough.

    Raises
    ------
    ArgumentError
        If there are not as many stages or devices as the graph has, or stages share parameters.

    Notes
    -----
    On a bidirectional placement each further path has copies of the stages, made here, which
    follow them: they take their parameters, buffers and modes at the beginning of every step, and
    share their gradients. Of buffers that a step changes, such as the statistics of a batch norm,
    those of the first path's micro-batches stay. Other attributes, and hooks on modules, are as
    they were when the pipeline was made; hooks on parameters are refused.

    A step of several mini-batches begins with the pipeline empty, and ends when it has drained.
    Beside the versions of weights that its schedule needs, each stage has one for the optimizer.

    Random numbers (dropout) are drawn per step, stage and micro-batch, starting from
    ``torch.initial_seed()``: after the same `torch.manual_seed`, every schedule and recompute mode
    draws the same.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        graph: TaskGraph,
        devices: Sequence[DeviceLike],
        loss_fn: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
        pin_threads: bool = True,
    ) -> None:
        check_name("loss_reduction", loss_reduction, ("mean", "sum"))
        _check_stages(stages, graph)
        if len(devices) != graph.n_devices:
            raise ArgumentError(
                f"the graph has {graph.n_devices} devices, got {len(devices)}: {list(devices)!r}; "
                "give one device a device of the graph"
            )
        path = paths_of_microbatches(graph)
        self.devices = make_devices(devices, pin_threads)
        # Path after path: the stages as they were given, and copies of them.
        self.modules = [*stages, *copies(stages, graph.n_replicas - 1)]
        self._homes: list[list[int]] = graph.homes.tolist()
        self.loss_fn, self.loss_reduction = loss_fn, loss_reduction
        for module, device in zip(self.modules, graph.homes.ravel(), strict=True):
            module.to(self.devices[device].torch_device)
        self.optimizers: list[torch.optim.Optimizer | None] = [
            None if optimizer is None or not any(True for _ in m.parameters())
            else optimizer(m.parameters()) for m in self.modules
        ]  # fmt: skip
        self.zero_grad = optimizer is not None
        self.n_steps = 0
        self._run: Run | None = None
        self._set_graph(graph, path)

    def _set_graph(self, graph: TaskGraph, path: NDArray[np.int64]) -> None:
        verify(graph)
        self.graph, self._path = graph, path
        self.held = [Held() for _ in self.devices]
        last = graph.n_stages - 1
        several = graph.n_batches > 1
        size = graph.n_microbatches // graph.n_batches
        delayed = graph.weight_versions == "double_buffered"
        self.stages = [
            Stage(
                module,
                index % graph.n_stages,
                self.devices[device].torch_device,
                self.held[device],
                self._finish if index % graph.n_stages == last else None,
                Versions(module, size, delayed) if several else None,
            )
            for index, (module, device) in enumerate(
                zip(self.modules, graph.homes.ravel().tolist(), strict=False)
            )
        ]
        self._plan = plan(graph, self.stages, self.devices)

    def with_graph(self, graph: TaskGraph) -> Pipeline:
        """Return a pipeline that runs another graph with the same stages, devices, optimizers.

        Raises
        ------
        ArgumentError
            If the graph places its stages otherwise, or on paths that this one does not have.
        """
        homes, others = self._homes, graph.homes.tolist()
        if others != homes[: len(others)]:
            raise ArgumentError(
                f"{graph!r} places its stages on {_listed(others)}, this pipeline "
                f"on {_listed(homes)}; make a new Pipeline"
            )
        other = copy.copy(self)
        stages = self.stages
        other._set_graph(graph, paths_of_microbatches(graph))
        for mine, its in zip(stages, other.stages, strict=False):
            its.is_random, its.modifies_input = mine.is_random, mine.modifies_input
        return other

    def _finish(self, output: object, microbatch: int) -> Tensor:
        """Return the weighted loss of a micro-batch, and note it."""
        assert self._run is not None
        run = self._run
        loss = self.loss_fn(output, run.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ExecutionError(
                f"the loss must be a tensor with one element, got "
                f"{tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
            )
        loss = loss.reshape(()) * run.weights[microbatch]
        run.losses[microbatch] = loss.detach()
        return loss

    def step(self, inputs: Batch, targets: Any) -> StepResult:
        """Run one training step.

        Parameters
        ----------
        inputs, targets
            A tensor or a tuple of tensors each, whose first dimension is the batch. It is split
            into the graph's micro-batches, as evenly as it can be.

        Raises
        ------
        StageError
            If a stage, the loss or the optimizer raised. All other work stops, ``__cause__`` is
            the original, ``timeline`` what ran before; the next step begins afresh.
        ArgumentError
            If the batch has fewer samples than there are micro-batches.
        ExecutionError
            If the pipeline is closed.
        """
        if any(device.closed for device in self.devices):
            raise ExecutionError("the pipeline is closed, and its threads ended; make a new one")
        run = self._run = Run(
            self.graph,
            self._path,
            self.devices,
            self.modules,
            self.optimizers,
            inputs,
            targets,
            is_mean=self.loss_reduction == "mean",
            number=self.n_steps,
        )
        if len(self.stages) > self.graph.n_stages or self.graph.n_batches > 1:
            check_hooks(self.modules, self.graph.n_stages)
        follow(self.modules, self.graph.n_stages)
        for index, module in enumerate(self.modules):
            if self.zero_grad or index >= self.graph.n_stages:
                module.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.begin()
        for held in self.held:
            held.now = held.peak = 0
        before = torch.get_rng_state()
        try:
            with _garbage_collection_paused():
                run.walk(self._plan)
        finally:
            self._run = None
            self.n_steps += 1
            for stage in self.stages:
                stage.done()
            if run.failure is not None:
                for stage in self.stages:
                    stage.reset()
        if run.failure is not None:
            raise run.error()
        self._check_randomness(before)
        losses = tuple(loss for loss in run.losses if loss is not None)
        for microbatch, loss in enumerate(losses):
            if loss.isnan():
                warnings.warn(
                    f"the loss of micro-batch {microbatch} is NaN (step {self.n_steps - 1}); "
                    "look at its inputs, or lower the learning rate",
                    NanLossWarning,
                    stacklevel=2,
                )
        return StepResult(
            loss=torch.stack([loss.to(losses[0].device) for loss in losses]).sum() / run.n_losses,
            losses=losses,
            timeline=run.timeline(),
            peak_held=tuple(held.peak for held in self.held),
            host_seconds=run.host_seconds,
        )

    def _check_randomness(self, before: Tensor) -> None:
        """Warn if a stage drew from the process's generator, for which stages race."""
        if torch.equal(before, torch.get_rng_state()):
            return
        for stage in self.stages:
            stage.is_random = dict.fromkeys((True, False), True)
        warnings.warn(
            "a stage drew random numbers that it did not draw in its first forward; this step "
            "cannot be repeated, later ones can",
            RandomnessWarning,
            stacklevel=3,
        )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore parameters, buffers, gradients and optimizer state at the end of a block."""
        states = [copy.deepcopy(module.state_dict()) for module in self.modules]
        # Buffers need not be in the state.
        buffers = [[b.clone() for b in module.buffers()] for module in self.modules]
        gradients = [[None if p.grad is None else p.grad.clone() for p in module.parameters()]
                     for module in self.modules]  # fmt: skip
        optimizers = [None if o is None else copy.deepcopy(o.state_dict()) for o in self.optimizers]
        n_steps = self.n_steps
        try:
            yield
        finally:
            self.n_steps = n_steps
            for module, state, kept, grads in zip(
                self.modules, states, buffers, gradients, strict=True
            ):
                module.load_state_dict(state)
                for buffer, before in zip(module.buffers(), kept, strict=True):
                    buffer.copy_(before)
                for parameter, gradient in zip(module.parameters(), grads, strict=True):
                    parameter.grad = gradient
            for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
                if optimizer is not None and saved is not None:
                    optimizer.load_state_dict(saved)

    def held_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes of activations that each stage holds in a step, counted in one.

        Path after path, where there are several. Weights do not count. The step leaves parameters,
        buffers, gradients and optimizers as they were.
        """
        return [meter.peak for meter in self._metered(inputs, targets, range(len(self.stages)))]

    def left_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes that each stage holds at the end of an I, counted as above."""
        return [meter.left for meter in self._metered(inputs, targets, range(len(self.stages)))]

    def device_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the most bytes of activations that each device holds, counted as above."""
        devices = self.graph.homes.ravel().tolist()
        return [meter.peak for meter in self._metered(inputs, targets, devices)]

    def _metered(self, inputs: Batch, targets: Any, place: Sequence[int]) -> list[Meter]:
        """Run a step that leaves no trace, and count what stages hold, together by their place."""
        modules = [stage.module for stage in self.stages]
        weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        batch = inputs if isinstance(inputs, tuple) else (inputs,)
        meters = [Meter(weights, batch) for _ in range(max(place) + 1)]
        with self.preserved():
            try:
                for stage, at in zip(self.stages, place, strict=True):
                    stage.meter = meters[at]
                self.step(inputs, targets)
            finally:
                for stage in self.stages:
                    stage.meter = None
        return meters

    def close(self) -> None:
        """End the devices' threads; the pipeline, and those that share its devices, are done."""
        for device in self.devices:
            device.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pipeline of {self.graph!r} on {', '.join(d.name for d in self.devices)}>"


def _listed(homes: list[list[int]]) -> str:
    return " and ".join(map(str, homes))


def _check_stages(stages: Sequence[nn.Module], graph: TaskGraph) -> None:
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"Pipeline runs a TaskGraph, got {type(graph).__name__}; lower the schedule first"
        )
    if len(stages) != graph.n_stages or not all(isinstance(s, nn.Module) for s in stages):
        raise ArgumentError(
            f"the graph has {graph.n_stages} stages, got {len(stages)} "
            f"({', '.join(type(s).__name__ for s in stages)}); give one nn.Module a stage"
        )
    owner: dict[nn.Parameter, int] = {}
    for index, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if owner.setdefault(parameter, index) != index:
                raise ArgumentError(
                    f"stages {owner[parameter]} and {index} share the parameter {name!r}; stages "
                    "run at the same time, so each needs parameters of its own"
                )


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

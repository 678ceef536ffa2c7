"""`Steppable`: steps of a validation and their calibration, of a pipeline or of a `GPipe`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.gpipe.gpipe import GPipe
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.link_speed import message_costs
from pipeexec.profiling.profile import Profile
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss, combined_loss
from pipeexec.stages.microbatches import Microbatches, shapes_as_text
from pipeexec.stages.restore import TemporaryAttribute, restore_afterwards
from pipeexec.validation.accuracy import MeasuredStep
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.timeline.task_bytes import static
from pipesim.timeline.timeline import Timeline


class Steppable(Protocol):
    """Steps of one graph on real devices."""

    def step(self, inputs: Batch, targets: Any) -> MeasuredStep:
        """Run one training step that is not measured, and return its result."""
        ...

    def measure(self, inputs: Batch, targets: Any) -> MeasuredStep:
        """Run one training step and return the measurements of all processes."""
        ...

    def held_bytes(
        self, costs: Costs, inputs: Batch, targets: Any, timeline: Timeline
    ) -> NDArray[np.float64]:
        """Return the peak bytes of each device, at the times of a measured step.

        ``costs`` have the bytes of parameters and optimizers. Shape ``(n_devices,)``.
        """
        ...


class StepCalibration(Protocol):
    """Calibration steps of one repeat, and their costs."""

    def warm_up(self) -> None:
        """Run a step that is not measured."""
        ...

    def calibrate(self, inputs: Batch, targets: Any) -> None:
        """Run and measure a step, then restore weights and optimizer."""
        ...

    def result(self, inputs: Batch, targets: Any) -> tuple[Costs, Profile | None]:
        """Return the costs of the steps so far, and their profile if there is one."""
        ...


class PipelineSteps:
    """Run training steps of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def step(self, inputs: Batch, targets: Any) -> StepResult:
        """Run a step that is not measured."""
        return self.pipeline.step(inputs, targets)

    def measure(self, inputs: Batch, targets: Any) -> StepResult:
        """Run a step on aligned clocks and gather the measurements of all processes."""
        self.pipeline.align()
        return self.pipeline.gather(self.pipeline.step(inputs, targets))

    def held_bytes(
        self, costs: Costs, inputs: Batch, targets: Any, timeline: Timeline
    ) -> NDArray[np.float64]:
        """Return the peak bytes of each device; an extra step counts activations and gradients."""
        memory = self.pipeline.memory(inputs, targets)
        return np.asarray(static(self.pipeline.graph, costs) + memory.at(timeline).peak)


class PipelineCalibration:
    """Calibration steps of a pipeline, for the task graphs of all ``subjects``."""

    def __init__(
        self, pipeline: Pipeline, subjects: Sequence[PipelineSteps], inputs: Batch, targets: Any
    ) -> None:
        graphs = [subject.pipeline.graph for subject in subjects]
        self._calibration = Calibration(pipeline, inputs, targets, graphs)
        self._shapes = self._shapes_of(inputs)

    @staticmethod
    def _shapes_of(inputs: Batch) -> list[str]:
        return shapes_as_text(inputs) if isinstance(inputs, Microbatches) else []

    def warm_up(self) -> None:
        """Run a step that is not measured."""
        self._calibration.warm_up(1)

    def calibrate(self, inputs: Batch, targets: Any) -> None:
        """Measure a step on the constructor's batch; raise if this one has other shapes."""
        shapes = self._shapes_of(inputs)
        if shapes != self._shapes:
            changed = [k for k, (a, b) in enumerate(zip(shapes, self._shapes)) if a != b]  # noqa: B905
            where = f"micro-batch {changed[0]}" if changed else "the number of micro-batches"
            raise ArgumentError(
                f"batches have different shapes: {where} is not as in the first batch, which the "
                "costs are of; give Microbatches of the same shapes in every round"
            )
        self._calibration.step()

    def result(self, inputs: Batch, targets: Any) -> tuple[Costs, Profile | None]:
        """Return the costs of the profile, and the profile."""
        profile = self._calibration.result()
        return profile.costs, profile


# GPipe modules


def check_models(models: Mapping[str, object]) -> dict[str, GPipe]:
    """Return the modules by name, if one set of costs holds for all of them."""
    if not models:
        raise ArgumentError("validate needs at least one GPipe")
    gpipes: dict[str, GPipe] = {}
    for name, model in models.items():
        if not isinstance(model, GPipe):
            raise ArgumentError(
                f"stages: {name!r} is no GPipe, got {type(model).__name__}; give a GPipe, or a "
                "mapping of names to GPipes"
            )
        gpipes[name] = model
        first = next(iter(gpipes.values()))
        if (model.balance, model.chunks) != (first.balance, first.chunks):
            raise ArgumentError(
                f"{name!r} has balance {model.balance} and {model.chunks} chunks, the first "
                f"{first.balance} and {first.chunks}: costs hold for one balance and one size of "
                "micro-batch; validate modules with the same balance and chunks"
            )
    return gpipes


def check_backward(models: Mapping[str, GPipe], inputs: Batch) -> None:
    """Raise `ArgumentError` if a first partition has no backward, as its graph has one."""
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(x.requires_grad for x in tensors):
        return
    for name, model in models.items():
        if not any(p.requires_grad for p in model.partitions[0].parameters()):
            raise ArgumentError(
                f"{name!r}: partition 0 has no parameter that needs a gradient, so it has no "
                "backward, but its graph has one; give inputs that need a gradient "
                "(requires_grad_()), or a balance whose first partition has such parameters"
            )


class _GPipeStep(NamedTuple):
    """A measured step; ``host_seconds`` is 0, as a GPipe does not measure it."""

    loss: Tensor
    timeline: Timeline
    host_seconds: float = 0.0
    host_times: None = None


class GPipeSteps:
    """Run training steps of a module in training mode, one at a time.

    On CPUs each partition computes in its own thread, however short. The measured time does not
    include the optimizer's step.
    """

    def __init__(
        self,
        model: GPipe,
        loss_fn: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = None if optimizer is None else optimizer(model.parameters())

    def step(self, inputs: Batch, targets: Any) -> _GPipeStep:
        """Run forward, loss, backward and the optimizer's step; set all gradients to None."""
        if isinstance(targets, Tensor):  # first, as a copy to a GPU waits for its stream
            targets = targets.to(self.model.devices[-1])
        with TemporaryAttribute(self.model, "threads", True):
            loss = combined_loss(self.loss_fn(self.model(inputs), targets))
            loss.backward()
        timeline = self.model.timeline()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return _GPipeStep(loss.detach(), timeline)

    def calibration_step(self, inputs: Batch, targets: Any) -> Timeline:
        """Return the timeline of a step; weights and optimizer are restored after it."""
        with restore_afterwards([self.model], [self.optimizer]):
            return self.step(inputs, targets).timeline

    def costs_of(self, timelines: Sequence[Timeline]) -> Costs:
        """Return mean costs of steps, and those of all their messages together."""
        of_messages = message_costs(timelines) | {"skip_bytes": self.model.skip_bytes()}
        costs = [Costs.from_timeline(timeline, **of_messages) for timeline in timelines]
        means: dict[str, Any] = {}
        for name in ("forward", "backward", "recompute"):  # other fields are equal in all steps
            values = [getattr(step_costs, name) for step_costs in costs]
            if values[0] is not None:
                means[name] = tuple(np.mean(values, axis=0).tolist())
        return replace(costs[0], **means, **self.model.launches)

    def with_bytes(self, costs: Costs, inputs: Batch, targets: Any) -> Costs:
        """Return costs with the bytes of parameters, optimizer state and activations."""
        model = self.model
        with TemporaryAttribute(model, "checkpoint", "never"):
            peak_bytes = self.activation_bytes(inputs, targets)
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        n_microbatches = len(first.chunk(model.chunks))
        state = self.optimizer.state if self.optimizer is not None else {}
        return replace(
            costs,
            activation_bytes=tuple(nbytes / n_microbatches for nbytes in peak_bytes),
            parameter_bytes=tuple(
                float(sum(p.nbytes for p in part.parameters())) for part in model.partitions
            ),
            optimizer_bytes=tuple(
                float(
                    sum(
                        x.nbytes
                        for p in part.parameters()
                        for x in state.get(p, {}).values()
                        if isinstance(x, Tensor)
                    )
                )
                for part in model.partitions
            ),
        )

    def measure(self, inputs: Batch, targets: Any) -> _GPipeStep:
        """Run a step; every step is measured."""
        return self.step(inputs, targets)

    def held_bytes(
        self, costs: Costs, inputs: Batch, targets: Any, timeline: Timeline
    ) -> NDArray[np.float64]:
        """Return the peak bytes of each device; an extra step counts the activations."""
        activations = np.array(self.activation_bytes(inputs, targets))
        return np.asarray(static(timeline.graph, costs) + activations)

    def activation_bytes(self, inputs: Batch, targets: Any) -> list[int]:
        """Return the peak bytes of activations of each partition, counted in an extra step."""
        with restore_afterwards([self.model], [self.optimizer]), self.model.metered() as meters:
            self.step(inputs, targets)
            return [meter.peak for meter in meters]


class GPipeCalibration:
    """Calibration steps of a module."""

    def __init__(self, steps: GPipeSteps) -> None:
        self._steps = steps
        self._timelines: list[Timeline] = []

    def warm_up(self) -> None:
        """Run nothing, as the uncounted steps of the modules are the warm-up."""

    def calibrate(self, inputs: Batch, targets: Any) -> None:
        """Measure a step; weights and optimizer are restored after it."""
        self._timelines.append(self._steps.calibration_step(inputs, targets))

    def result(self, inputs: Batch, targets: Any) -> tuple[Costs, None]:
        """Return the mean costs, with the bytes of a step on a batch, and None for the profile."""
        costs = self._steps.costs_of(self._timelines)
        return self._steps.with_bytes(costs, inputs, targets), None

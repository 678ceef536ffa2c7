"""`Steppable`: steps that a validation runs; `PipelineSteps`: those of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.results.step_result import StepResult
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.profile import Profile
from pipeexec.stages.batches import Batch
from pipeexec.stages.microbatches import Microbatches, shapes_as_text
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

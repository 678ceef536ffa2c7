"""`ForwardRunner`: run one forward-only graph on a placed model."""

from __future__ import annotations

from typing import Any

from pipeexec.data_parallel.stage_replicas import sync_from_first
from pipeexec.devices.remote import RemoteDevice
from pipeexec.executor.evaluation.forward_stages import MicrobatchResult, make_forward_stages
from pipeexec.executor.results.step_result import EvaluationResult, StepResult
from pipeexec.executor.step import Step
from pipeexec.executor.step_checks import check_batch_is_here
from pipeexec.executor.step_runner import StepRunner
from pipeexec.stages.batches import Batch
from pipeexec.stages.stage_like import StageLike
from pipesim.errors import ArgumentError


class ForwardRunner(StepRunner):
    """Runs a forward-only graph as `StepRunner` runs the graph of a step.

    It keeps no gradients, and steps no optimizer. Modules must be in evaluation mode.

    Attributes
    ----------
    microbatch_result
        Takes the outputs of the last stage.
    """

    result_type = EvaluationResult
    trains = False

    def _make_capture(self) -> None:
        return None

    def _make_stages(self) -> list[StageLike]:
        self.microbatch_result = self._microbatch_loss = MicrobatchResult()
        return make_forward_stages(
            self.model.modules, self.graph, self.model.devices, self.held, self.microbatch_result
        )

    def evaluate(self, inputs: Batch | None, targets: Any, shapes: object) -> StepResult:
        """Return the loss of a batch; see `Pipeline.evaluate`.

        ``shapes`` are those of the batch, on which processes have agreed.
        """
        self._agree_anew(shapes)
        step = self.run(inputs, targets, Step.walk)
        return self.result(step, may_wait=self.model.processes is None)

    def predict(self, inputs: Batch | None, shapes: object) -> tuple[dict[int, Any], list[float]]:
        """Return the output of each micro-batch of this process by number, and all their sizes."""
        self._check_last_stages()
        self._agree_anew(shapes)
        outputs = self.microbatch_result.outputs = {}
        try:
            step = self.run(inputs, None, Step.walk)
            return outputs, list(step.inputs.loss.sizes)
        finally:
            self.microbatch_result.outputs = None

    def _agree_anew(self, shapes: object) -> None:
        """Take the messages of these shapes, and agree on samples of micro-batches anew."""
        self.shares.forget_sizes()
        if self.reports is not None:
            self.reports.shapes = shapes

    def _check_last_stages(self) -> None:
        """Raise if the last stages of the paths of a replica are in several processes."""
        ranks = [
            device.rank if isinstance(device, RemoteDevice) else -1 for device in self.model.devices
        ]
        for first in range(0, self.graph.n_replicas, self.shares.n_paths):
            devices = self.graph.homes[first : first + self.shares.n_paths, -1]
            if len({ranks[d] for d in devices}) > 1:
                raise ArgumentError(
                    "the paths of a bidirectional pipeline have their last stages in several "
                    "processes here, so that no process has the output of a whole batch; use "
                    "evaluate, whose loss is combined, or run the pipeline in one process"
                )

    def _check(self, inputs: Batch | None, targets: Any) -> None:
        predicts = self.microbatch_result.outputs is not None
        check_batch_is_here(
            inputs, targets, self.graph, self.model.devices, needs_targets=not predicts
        )

    def _prepare(self, inputs: Batch | None, targets: Any) -> Step:
        step = super()._prepare(inputs, targets)
        step.inputs.loss.check = None  # steps of training check that losses combine
        return step

    def _prepare_modules(self) -> None:
        """Give copies of a stage the values of the first."""
        if self.model.gradient_options.tied:
            self.model.tied_copies.sync()
        sync_from_first(self.model.modules, self.graph.n_stages)

    def _keep_earlier_gradients(self, step: Step) -> None:
        """Do nothing: gradients stay as they are."""

    def _complete_gradients(self, step: Step) -> None:
        """Do nothing: there are none."""

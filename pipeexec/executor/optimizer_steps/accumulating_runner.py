"""`AccumulatingRunner`: run steps whose gradients are left for a later step."""

from __future__ import annotations

from typing import Any

from pipeexec.executor.optimizer_steps.accumulation import accumulation_graph
from pipeexec.executor.results.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.stages.batches import Batch
from pipesim.errors import ArgumentError


class AccumulatingRunner(StepRunner):
    """Runs the graph of a pipeline without STEP.

    Parameters
    ----------
    last
        Runs the step that follows, with the optimizers: gives graph, model, loss and timeout.
    """

    accumulates = True

    def __init__(self, last: StepRunner) -> None:
        if not last.model.zero_grad:
            raise ArgumentError(
                "accumulate=True leaves gradients for an optimizer, which this pipeline has not: "
                "its gradients add up in any case; leave accumulate out"
            )
        if last.model.cuda_graph or any(stage.is_ddp for stage in last.stages):
            raise ArgumentError(
                "accumulate=True works neither with cuda_graph=True nor with stages that are "
                "DistributedDataParallel; leave it out, and lower a schedule of more micro-batches"
            )
        super().__init__(accumulation_graph(last.graph), last.model, last.loss, last.n_steps)
        self._last = last
        for stage, own in zip(last.stages, self.stages, strict=True):
            own.is_random, own.modifies_input = stage.is_random, stage.modifies_input

    def step(self, inputs: Batch | None, targets: Any) -> StepResult:
        """Run one step; see `Pipeline.step`."""
        last = self._last
        self.loss, self.timeout, self.n_steps = last.loss, last.timeout, last.n_steps
        try:
            return super().step(inputs, targets)
        finally:
            last.n_steps = self.n_steps

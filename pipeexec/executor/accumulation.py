"""Gradients that add up over several steps, before the optimizers step.

Gradients of a mean over samples are means over all samples so far: before a step, those from before
are multiplied by their share of the samples, and so is the loss of the step by its own. Gradients
of losses that return ``(sum, count)`` are sums, which the last step divides by all counts.

Without optimizers, the gradients of each step add to those from before it, as always in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step import Step
from pipeexec.executor.step_capture import CudaGraphs
from pipeexec.executor.step_part import StepPart
from pipeexec.executor.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.stages.batches import Batch
from pipeexec.stages.restore import EarlierGradients
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower


@dataclass
class AccumulatedSteps:
    """Steps since the optimizers have stepped, whose gradients add up.

    Attributes
    ----------
    n_steps, n_samples
        Number of steps, and of samples in them, or the sum of weights given.
    count
        Sum of the counts of their losses; 0 without counts.
    """

    n_steps: int = 0
    n_samples: float = 0
    count: float = 0.0

    @torch.no_grad()
    def weigh(self, loss: StepLoss, modules: Iterable[nn.Module]) -> None:
        """Weigh earlier gradients and those of a step that begins by their samples."""
        if not self.n_steps:
            return
        loss.check = None  # gradients at the outputs are weighed, too
        loss.earlier_count = self.count
        if loss.function.reduction == "sum" or loss.function.returns_count:
            return
        n_samples = sum(loss.sizes)
        share = n_samples / (self.n_samples + n_samples)
        loss.gradient_weight = share
        for parameter in (p for module in modules for p in module.parameters()):
            if parameter.grad is not None:
                parameter.grad.mul_(1 - share)

    def add(self, loss: StepLoss) -> None:
        """Count a step whose gradients are complete."""
        self.n_steps += 1
        self.n_samples += sum(loss.sizes)
        if loss.is_counted():
            self.count += loss.batch_count()


class Accumulation(StepPart):
    """Gradients from before a step: cleared, added to, or weighed with those of the step.

    ``steps`` are those whose gradients add up until the optimizers step.
    """

    def __init__(self) -> None:
        self.steps = AccumulatedSteps()
        self._modules: Sequence[nn.Module] = ()
        self._zero_grad = self._keeps = False

    def place(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Take the modules."""
        self._modules, self._zero_grad = model.modules, model.zero_grad
        self._keeps = not model.zero_grad and not model.part(CudaGraphs).is_on

    def before(self, step: Step) -> None:
        """Clear the gradients from before a step, or weigh them and keep them for a failure."""
        loss, gradients = step.inputs.loss, step.gradients
        for slot, module in enumerate(self._modules):
            # A stage of a path that does not run counts nowhere.
            if (self._zero_grad and not self.steps.n_steps) or slot >= len(gradients.stages):
                module.zero_grad(set_to_none=True)
                continue
            counted = {id(p) for p in gradients.counted(slot, module.parameters())}
            for parameter in module.parameters():
                if id(parameter) not in counted:  # another copy has it in its sums, too
                    parameter.grad = None
        self.steps.weigh(loss, self._modules)
        if self._keeps:
            # DistributedDataParallel takes the mean of earlier gradients too, after no_sync().
            gradients.earlier = EarlierGradients(
                {slot: x.module for slot, x in enumerate(gradients.stages) if not x.is_ddp},
                is_separate=loss.function.returns_count is not False,
            )

    def after(self, step: Step) -> None:
        """Add the gradients from before, or count a step that leaves its own for a later one."""
        if step.gradients.are_left:
            self.steps.add(step.inputs.loss)
        elif self.steps.n_steps:
            self.steps = AccumulatedSteps()
        if step.gradients.earlier is not None:
            step.gradients.earlier.add()

    def restore(self, step: Step) -> None:
        """Let gradients be those from before the step where they are kept."""
        self.steps = AccumulatedSteps()
        if step.gradients.earlier is not None:
            step.gradients.earlier.restore()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Begin without steps, and take those from before at the end of a block."""
        before, self.steps = self.steps, AccumulatedSteps()
        try:
            yield
        finally:
            self.steps = before


class AccumulatingRunner(StepRunner):
    """Runs the graph of a pipeline without STEP; ``last`` runs the step that follows, with it."""

    leaves_gradients = True

    def __init__(self, last: StepRunner) -> None:
        if not last.model.zero_grad:
            raise ArgumentError(
                "accumulate=True leaves gradients for an optimizer, which this pipeline has not: "
                "its gradients add up in any case; leave accumulate out"
            )
        if last.model.part(CudaGraphs).is_on or any(stage.is_ddp for stage in last.stages):
            raise ArgumentError(
                "accumulate=True works neither with cuda_graph=True nor with stages that are "
                "DistributedDataParallel; leave it out, and lower a schedule of more micro-batches"
            )
        super().__init__(_graph_without_steps(last.graph), last.model, last.loss, last.n_steps)
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


def _graph_without_steps(graph: TaskGraph) -> TaskGraph:
    """Return the graph of a step that leaves its gradients for a later one."""
    source = graph.options.source
    if source is None or graph.n_batches > 1:
        reason = "has several mini-batches" if source else "was not made by pipesim.lower"
        raise ArgumentError(
            f"{graph!r} {reason}, so that its gradients cannot add up over steps; leave out "
            "accumulate, or lower a schedule of one mini-batch"
        )
    # Copies of tied parameters keep their own gradients until the last step adds them.
    arguments = {**source.arguments, "step": "none", "grad_norm": False, "tied": ()}
    return lower(source.schedule, **arguments)

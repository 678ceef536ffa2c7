"""Gradients that add up over several steps, before the optimizers step.

Gradients of a mean over samples are means over all samples so far: before a step, those from before
are multiplied by their share of the samples, and so is the loss of the step by its own. Gradients
of losses that return ``(sum, count)`` are sums, which the last step divides by all counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

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
        if loss.function.reduction == "sum" or loss.is_counted_before():
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


def accumulation_graph(graph: TaskGraph) -> TaskGraph:
    """Return the graph of a step that leaves its gradients for a later one: without STEP."""
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

"""Gradients of one step that are not in ``parameter.grad``, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeexec.stages.restore import EarlierGradients
from pipeexec.stages.stage import StageLike
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import ExecutionError


@dataclass(eq=False)
class StepGradients:
    """Stages that a step trains, and its gradients that are not in ``parameter.grad``.

    Attributes
    ----------
    stages, optimizers
        One for each copy of a stage, replica after replica.
    earlier
        Gradients from before the step; None if there are none, or the step adds to them.
    per_microbatch_grads
        Gradients of groups of micro-batches, by slot and last micro-batch, until they are reduced.
    reduced
        Sums over the groups reduced so far, by slot.
    buckets
        Parameters of each stage in buckets, by slot; computed at the first use.
    are_left
        Whether the gradients are left for a later step.
    separate
        Slots whose gradients are of no other copy of the stage.
    counts
        Whether the gradients of a parameter count in its copy, by id; those of the others do in the
        first copy.
    uncounted
        Ids of parameters whose gradients are those of a parameter of another stage.
    trained
        Modules whose parameters optimizers step in place of those of stages, by slot.
    """

    stages: Sequence[StageLike]
    optimizers: Sequence[torch.optim.Optimizer | None]
    n_stages: int
    earlier: EarlierGradients | None = None
    per_microbatch_grads: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    reduced: dict[int, list[Tensor | None]] = field(default_factory=dict)
    buckets: dict[int, list[list[nn.Parameter]]] = field(default_factory=dict)
    are_left: bool = False
    separate: set[int] = field(default_factory=set)
    counts: Mapping[int, bool] = field(default_factory=dict)
    uncounted: set[int] = field(default_factory=set)
    trained: dict[int, nn.Module] = field(default_factory=dict)

    def trained_module(self, slot: int) -> nn.Module:
        """Return the module whose parameters the optimizer of a stage steps."""
        return self.trained.get(slot, self.stages[slot].module)

    def counted(self, slot: int, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield the parameters of a stage whose gradients no other copy of it counts.

        After a step every copy has the sums. A norm takes each of them from one copy, and so does a
        later step that adds to them.
        """
        is_first = slot < self.n_stages or slot in self.separate
        return (p for p in parameters if self.counts.get(id(p), is_first))

    def divide(self, slot: int, batch: int, loss: StepLoss) -> None:
        """Divide a stage's gradients of a mini-batch by the count of its loss."""
        stage, trained = self.stages[slot], self.trained_module(slot)
        if not loss.is_counted():
            return
        is_separate = self.optimizers[slot] is not None or (
            self.earlier is not None and slot in self.earlier
        )
        if not is_separate and any(p.requires_grad for p in stage.module.parameters()):
            raise ExecutionError(
                "loss_fn returned (sum, count), whose gradients are divided at the end of a step, "
                f"but gradients of stage {stage.index} accumulate over steps; give Pipeline an "
                "optimizer, or leave out DistributedDataParallel and cuda_graph"
            )
        loss.divide(trained, batch, stage.mean_count)
        if self.earlier is not None:
            self.earlier.end_mini_batch(slot)

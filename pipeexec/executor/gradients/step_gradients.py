"""`StepGradients`: the gradients of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.data_parallel.stage_shards import StageShards
from pipeexec.executor.setup.gradient_options import Clipping, GradientOptions
from pipeexec.splitting.split_facts import tied_parameter
from pipeexec.stages.earlier_gradients import EarlierGradients
from pipeexec.stages.loss.step_loss import StepLoss
from pipeexec.stages.stage_like import StageLike
from pipesim.errors import ExecutionError

if TYPE_CHECKING:
    from pipeexec.executor.gradients.grad_norm import GradNorm


@dataclass(eq=False)
class StepGradients:
    """Stages that a step trains, and its gradients that are not in ``parameter.grad``.

    Attributes
    ----------
    stages, optimizers
        One for each copy of a stage, replica after replica.
    n_stages
        Stages of a replica.
    earlier
        Gradients from before the step; None if there are none, or the step adds to them.
    per_microbatch_grads
        Gradients of groups of micro-batches, by slot and last micro-batch, until they are reduced.
    reduced
        Sums over the groups reduced so far, by slot.
    buckets
        Parameters of each stage in buckets, by slot; computed at the first use.
    scale
        Factor of the gradients, by which they are divided before they are used.
    is_skipped
        Whether no optimizer steps, since a scaled gradient is not finite.
    options
        Tied parameters and clipping.
    norm
        Norm of all gradients; None until it is computed.
    shards
        Shares of the parameters of stages, by slot, for those whose replicas share them.
    scattered
        Slots of these whose pieces have gradients of this step.
    """

    stages: Sequence[StageLike]
    optimizers: Sequence[torch.optim.Optimizer | None]
    n_stages: int
    earlier: EarlierGradients | None = None
    per_microbatch_grads: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    reduced: dict[int, list[Tensor | None]] = field(default_factory=dict)
    buckets: dict[int, list[list[nn.Parameter]]] = field(default_factory=dict)
    scale: float = 1.0
    is_skipped: bool = False
    options: GradientOptions = field(default_factory=GradientOptions)
    norm: GradNorm | None = None
    shards: Mapping[int, StageShards] = field(default_factory=dict)
    scattered: set[int] = field(default_factory=set)

    def trained(self, slot: int) -> nn.Module:
        """Return the module whose parameters the optimizer of a stage steps: its share, if any."""
        shards = self.shards.get(slot)
        return self.stages[slot].module if shards is None else shards.pieces

    @property
    def clipping(self) -> Clipping:
        """Clipping by the norm."""
        return self.options.clipping

    @cached_property
    def later_copies(self) -> frozenset[int]:
        """Ids of the local copies of tied parameters after the first of each group."""
        later = (pair for group in self.options.tied for pair in group[1:])
        return frozenset(
            id(tied_parameter(self.stages[stage].module, name))
            for stage, name in later
            if not isinstance(self.stages[stage].module, RemoteStage)
        )

    def tied_parameters(self, slot: int, stages: Sequence[int]) -> list[nn.Parameter]:
        """Return the parameters of a stage that all of some stages have, and no others."""
        stage, members = slot % self.n_stages, sorted(stages)
        return [
            tied_parameter(self.stages[slot].module, dict(group)[stage])
            for group in self.options.tied
            if [k for k, _ in group] == members
        ]

    def divide(self, slot: int, batch: int, loss: StepLoss) -> None:
        """Divide a stage's gradients of a mini-batch by the scale, and the count of its loss.

        Raises
        ------
        ExecutionError
            If the gradients include those from before the step.
        """
        stage, trained = self.stages[slot], self.trained(slot)
        if self.scale != 1:
            _unscale(trained, self.scale)
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


@torch.no_grad()
def _unscale(module: nn.Module, scale: float) -> None:
    """Divide the gradients of a module by a scale."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / scale)

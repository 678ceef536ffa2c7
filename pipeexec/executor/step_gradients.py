"""Options of `Pipeline` for the gradients of a step, and the gradients of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.data_parallel.stage_shards import StageShards
from pipeexec.splitting.split_facts import TiedGroup, tied_parameter
from pipeexec.stages.restore import EarlierGradients
from pipeexec.stages.stage import StageLike
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import ArgumentError, ExecutionError, check_flag, check_type, number
from pipesim.graph.graph import TaskGraph

if TYPE_CHECKING:
    from pipeexec.executor.grad_norm import GradNorm


def make_scaling(scaler: GradScaler | None) -> GradScaling | None:
    """Return the gradient scaling of a pipeline; None without a scaler, or if it is disabled."""
    if scaler is None:
        return None
    check_type("grad_scaler", scaler, GradScaler, 'such as torch.amp.GradScaler("cuda")')
    return GradScaling(scaler) if scaler.is_enabled() else None


class GradScaling:
    """The gradient scaler of a pipeline; ``scaler`` is enabled, and belongs to the user.

    It holds the scale of the loss, so that gradients of 16 bits do not vanish, and the rule by
    which it changes. Backwards start from the scale instead of 1. Before gradients are used, they
    are divided by it. If one of them is not finite, neither is the norm of all, which every device
    has from GRAD_NORM: so all stages, replicas and processes skip the step together, and all
    scalers get the same scale.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        # The scaler sees the norm of all gradients, as the gradient of a parameter.
        self._parameter = nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._parameter], lr=0.0)

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return float(self.scaler.get_scale())

    def update(self, norm: float) -> bool:
        """Change the scale after a step; return whether the step was skipped.

        ``norm`` is that of all gradients of the step, divided by the scale.
        """
        self.scaler.scale(torch.zeros(()))  # makes the tensor of the scale before the first step
        self._parameter.grad = torch.tensor(float(norm))
        self.scaler.unscale_(self._optimizer)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return not math.isfinite(norm)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the scale at the end of a block."""
        state = self.scaler.state_dict()
        try:
            yield
        finally:
            self.scaler.load_state_dict(state)


class Clipping(NamedTuple):
    """Clipping of gradients by their norm."""

    max_norm: float | None = None  # None for no clipping
    error_if_nonfinite: bool = True

    @classmethod
    def checked(cls, max_norm: object, error_if_nonfinite: object) -> Clipping:
        """Return the options of `Pipeline`, checked."""
        value = None if max_norm is None else number(max_norm)
        if max_norm is not None and (value is None or not value > 0):
            raise ArgumentError(
                "max_grad_norm must be a positive number, the largest norm of all gradients with "
                f"which optimizers step, or None, got {max_norm!r}"
            )
        return cls(value, check_flag("error_if_nonfinite", error_if_nonfinite))


class GradientOptions(NamedTuple):
    """Options for the gradients of a step."""

    tied: tuple[TiedGroup, ...] = ()  # pairs of stage, and name in the stage's module
    clipping: Clipping = Clipping()
    scaling: GradScaling | None = None


def check_gradient_options(
    options: GradientOptions, graph: TaskGraph, *, has_optimizer: bool, cuda_graph: bool
) -> None:
    """Raise `ArgumentError` unless a graph has the norm that clipping and scaling need."""
    if graph.forward_only:
        return
    max_norm = options.clipping.max_norm
    if max_norm is not None and not graph.has_grad_norm:
        raise ArgumentError(
            f"max_grad_norm={max_norm:g}, but graph {graph.name!r} computes no norm of its "
            "gradients; lower the schedule with grad_norm=True"
        )
    if options.scaling is not None and not graph.has_grad_norm:
        raise ArgumentError(
            f"grad_scaler is given, but graph {graph.name!r} computes no norm of its gradients, "
            "which tells whether one is not finite; lower the schedule with grad_norm=True"
        )
    if graph.has_grad_norm and not has_optimizer:
        raise ArgumentError(
            f"graph {graph.name!r} computes the norm of the gradients of a step (grad_norm=True), "
            "but without an optimizer gradients add up over steps; give Pipeline an optimizer, or "
            "lower without grad_norm"
        )
    if cuda_graph and (graph.has_grad_norm or graph.tied):
        raise ArgumentError(
            "cuda_graph=True does not capture sums over tied stages, nor the norm of gradients; "
            "leave cuda_graph out, or lower without tied and grad_norm"
        )


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
    scale
        Factor of the gradients, by which they are divided before they are used.
    is_skipped
        Whether no optimizer steps, since a scaled gradient is not finite.
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
        """Divide a stage's gradients of a mini-batch by the scale, and the count of its loss."""
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
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / scale)

"""Options of `Pipeline` for the gradients of a step, and the gradients of one step.

A `torch.amp.GradScaler` holds the scale of the loss, so that gradients of 16 bits do not vanish,
and the rule by which it changes. Backwards start from the scale instead of 1. Before gradients are
used, they are divided by it. If one of them is not finite, neither is the norm of all, which every
device has from GRAD_NORM: so all stages, replicas and processes skip the step together, and all
scalers get the same scale.
"""

from __future__ import annotations

import hashlib
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
from pipeexec.distributed.processes import Processes
from pipeexec.splitting.split_facts import TiedGroup, first_tied_stage, split_facts, tied_parameter
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
    """The gradient scaler of a pipeline.

    Parameters
    ----------
    scaler
        Enabled; belongs to the user.
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

        Parameters
        ----------
        norm
            Norm of all gradients of the step, divided by the scale.
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


#: A group of tied parameters, for messages.
_EXAMPLE = "[(0, 'embedding.weight'), (3, 'head.weight')]"


class Clipping(NamedTuple):
    """Clipping of gradients by their norm.

    Attributes
    ----------
    max_norm
        Largest norm with which optimizers step; None for any.
    error_if_nonfinite
        Whether a norm that is not finite raises an error.
    """

    max_norm: float | None = None
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
    """Options for the gradients of a step.

    Attributes
    ----------
    tied
        Copies of each tied parameter: pairs of stage, and name in the stage's module.
    clipping
        Clipping by the norm.
    scaling
        Gradient scaling; None without.
    """

    tied: tuple[TiedGroup, ...] = ()
    clipping: Clipping = Clipping()
    scaling: GradScaling | None = None


def checked_tied_parameters(
    tied: Sequence[Sequence[tuple[int, str]]] | None, stages: Sequence[nn.Module | None]
) -> tuple[TiedGroup, ...]:
    """Return the groups of tied parameters: those of split stages, or those that are given."""
    facts = split_facts(stages)
    if facts is not None:
        if tied is not None:
            raise ArgumentError("tied is for stages cut by hand; those of pipeexec.split know it")
        return facts.tied
    if tied is None and (index := first_tied_stage(stages)) is not None:
        raise ArgumentError(
            f"stage {index} has a stage of pipeexec.split inside, with a copy of a tied parameter, "
            "which other stages have too; give the stages of pipeexec.split themselves, which may "
            "be compiled or DistributedDataParallel, or name the copies in Pipeline(tied=...)"
        )
    groups = []
    for group in () if tied is None else _listed(tied):
        pairs = [_pair(pair, stages) for pair in _listed(group)]
        if len(pairs) < 2 or len({stage for stage, _ in pairs}) < len(pairs):
            raise ArgumentError(
                f"tied has the group {group!r:.80}; a group has the copies of one parameter in two "
                f"or more different stages, such as {_EXAMPLE}"
            )
        groups.append(tuple(sorted(pairs)))
    return tuple(groups)


def _listed(values: object) -> list[object]:
    if isinstance(values, (list, tuple)):
        return list(values)
    raise ArgumentError(f"tied must be groups such as [{_EXAMPLE}], got {values!r:.80}")


def _pair(pair: object, stages: Sequence[nn.Module | None]) -> tuple[int, str]:
    """Return stage and name of one copy."""
    match pair:
        case (int(stage), str(name)) if not isinstance(stage, bool):
            pass
        case _:
            raise ArgumentError(
                f"tied names {pair!r:.80}; give a stage and a parameter's name in it: {_EXAMPLE}"
            )
    if not 0 <= stage < len(stages):
        raise ArgumentError(f"tied names stage {stage}; there are stages 0..{len(stages) - 1}")
    module = stages[stage]
    names = None if module is None else [x for x, _ in module.named_parameters()]
    if names is not None and name not in names:
        raise ArgumentError(
            f"tied names {name!r} of stage {stage}, which has no such parameter, but "
            f"{', '.join(names[:10]) or 'none'}"
        )
    return stage, name


def check_gradient_options(
    options: GradientOptions, graph: TaskGraph, *, has_optimizer: bool, cuda_graph: bool
) -> None:
    """Raise `ArgumentError` unless a graph sums the tied gradients, and has the norm to clip by."""
    if graph.forward_only:
        return
    summed = set(graph.tied)
    needed = {tuple(sorted(stage for stage, _ in group)) for group in options.tied}
    if needed != summed:
        _raise_untied(sorted(needed), sorted(summed))
    if len(summed) < len(graph.tied):
        raise ArgumentError(
            f"the graph adds gradients of the same stages twice (tied={list(graph.tied)!r}); one "
            f"group is for all parameters that they share: lower with tied={sorted(summed)!r}"
        )
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


def _raise_untied(needed: list[tuple[int, ...]], summed: list[tuple[int, ...]]) -> None:
    """Raise for parameters whose gradients a graph does not add, or for groups without any."""
    missing = [group for group in needed if group not in summed]
    if missing:
        stages = " and ".join(map(str, missing[0]))
        raise ArgumentError(
            f"stages {stages} have copies of one parameter (a tied embedding, for example), whose "
            f"gradients the graph does not add; lower the schedule with tied={needed!r}"
        )
    extra = next(group for group in summed if group not in needed)
    raise ArgumentError(
        f"the graph adds gradients of stages {' and '.join(map(str, extra))} (tied={summed!r}), "
        f"but no parameter of theirs is tied; lower with tied={needed!r}, or name the parameters, "
        f"such as Pipeline(..., tied=[{_EXAMPLE}])"
    )


def check_copies(
    tied: Sequence[TiedGroup], modules: Sequence[nn.Module], processes: Processes | None
) -> None:
    """Check that the copies of a tied parameter are equal when a pipeline is made."""
    rows = [
        ["" if isinstance(modules[s], RemoteStage) else _summary(modules[s], name)
         for s, name in group]
        for group in tied
    ]  # fmt: skip
    if not tied:
        return
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        present = {text for table in tables for text in table[index] if text}
        texts = {text.partition(" ")[0] for text in present}, present
        for kind, different in zip(("shapes, types or flags", "values"), texts, strict=True):
            if len(different) > 1:
                names = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
                raise ArgumentError(
                    f"{names} are tied, but have different {kind}; copies of one parameter begin "
                    "equal: copy the values of the first one to the others"
                )


def _summary(module: nn.Module, name: str) -> str:
    """Return shape, type and flag of a parameter, and a checksum of its values."""
    parameter = tied_parameter(module, name)
    shape = "x".join(map(str, parameter.shape))
    values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(values.tobytes()).hexdigest()[:16]
    return f"{shape}/{parameter.dtype}/{parameter.requires_grad} {digest}"


def check_optimizers_of_copies(
    tied: Sequence[TiedGroup],
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer | None],
    processes: Processes | None,
) -> None:
    """Check that the copies of a tied parameter are trained alike, so that they stay equal."""
    if not tied:
        return
    rows = [
        [None if isinstance(modules[s], RemoteStage)
         else _training(optimizers[s], tied_parameter(modules[s], name)) for s, name in group]
        for group in tied
    ]  # fmt: skip
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        columns = zip(*(table[index] for table in tables), strict=True)
        texts = [next(x for x in column if x is not None) for column in columns]
        different = next((k for k, text in enumerate(texts) if text != texts[0]), None)
        if different is not None:
            (first, name), (stage, other) = group[0], group[different]
            raise ArgumentError(
                f"{name!r} of stage {first} and {other!r} of stage {stage} are tied, but trained "
                f"differently, so that they would not stay equal: {texts[0]}, and "
                f"{texts[different]}; put all copies in groups of equal options"
            )


def _training(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> str:
    """Return an optimizer's class, and the options of the group that has a parameter."""
    for group in () if optimizer is None else optimizer.param_groups:
        if any(x is parameter for x in group["params"]):
            options = (
                f"{key}={x.tolist() if isinstance(x, torch.Tensor) else x}"
                for key, x in sorted(group.items())
                if key not in ("params", "param_names", "foreach", "fused", "capturable")
            )
            return f"{type(optimizer).__name__}({', '.join(options)})"
    return "no optimizer"


def clear_later_copies(tied: Sequence[TiedGroup], modules: Sequence[nn.Module]) -> None:
    """Clear the gradients of the copies of tied parameters after the first of each group."""
    for stage, name in (pair for group in tied for pair in group[1:]):
        if not isinstance(modules[stage], RemoteStage):
            tied_parameter(modules[stage], name).grad = None


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

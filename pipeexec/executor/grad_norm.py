"""Norm of all gradients between backward and optimizer step: clipping by it, scaling of the loss.

Each stage counts once (GRAD_NORM): replicas have the same sums of gradients, and copies of a tied
parameter too. The rows of a sharded embedding, experts, and shares of gradients are different in
each replica, and all count.

A `torch.amp.GradScaler` holds the scale of the loss, so that gradients of 16 bits do not vanish,
and the rule by which it changes. Backwards start from the scale instead of 1. Before gradients are
used, they are divided by it. If one of them is not finite, neither is the norm of all, which every
device has: so all stages, replicas and processes skip the step together, and all scalers get the
same scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import assign_reduced_gradients
from pipeexec.executor.op_handlers import for_all_members
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.stages.stage import Stage
from pipesim.costs.pricing import NORM_BYTES
from pipesim.errors import ArgumentError, ExecutionError, check_flag, check_type, number
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

#: Added to the norm that divides, as in torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


@dataclass
class _StepNorm:
    """Scale of a step, the norm of its gradients before clipping, and the factor of clipping.

    The factor is at most 1, or None if gradients are not clipped.
    """

    scale: float
    norm: Tensor | None = None
    factor: Tensor | None = None
    is_skipped: bool = False


class GradNorm(StepPart):
    """Norm of all gradients, clipping by it, and scaling of the loss; options as of `Pipeline`."""

    def __init__(
        self, max_norm: float | None, error_if_nonfinite: bool, scaler: GradScaler | None
    ) -> None:
        self.max_norm = None if max_norm is None else number(max_norm)
        if max_norm is not None and (self.max_norm is None or not self.max_norm > 0):
            raise ArgumentError(
                "max_grad_norm must be a positive number, the largest norm of all gradients with "
                f"which optimizers step, or None, got {max_norm!r}"
            )
        self.error_if_nonfinite = check_flag("error_if_nonfinite", error_if_nonfinite)
        if scaler is not None:
            check_type("grad_scaler", scaler, GradScaler, 'such as torch.amp.GradScaler("cuda")')
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        # The scaler sees the norm of all gradients, as the gradient of a parameter.
        self._parameter = nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._parameter], lr=0.0)

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handler of GRAD_NORM."""
        return {Op.GRAD_NORM: for_all_members(self._compute)}

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` unless a graph has the norm that clipping and scaling need."""
        if graph.forward_only:
            return
        if self.max_norm is not None and not graph.has_grad_norm:
            raise ArgumentError(
                f"max_grad_norm={self.max_norm:g}, but graph {graph.name!r} computes no norm of "
                "its gradients; lower the schedule with grad_norm=True"
            )
        if self.scaler is not None and not graph.has_grad_norm:
            raise ArgumentError(
                f"grad_scaler is given, but graph {graph.name!r} computes no norm of its "
                "gradients, which tells whether one is not finite; lower the schedule with "
                "grad_norm=True"
            )
        if graph.has_grad_norm and not model.zero_grad:
            raise ArgumentError(
                f"graph {graph.name!r} computes the norm of the gradients of a step "
                "(grad_norm=True), but without an optimizer gradients add up over steps; give "
                "Pipeline an optimizer, or lower without grad_norm"
            )

    def agree(self, model: PlacedModel, processes: Processes) -> None:
        """Check that every process clips and scales alike."""
        options = self.max_norm, self.error_if_nonfinite
        processes.agree("max_grad_norm and error_if_nonfinite", repr(options))
        state = None if self.scaler is None else repr(self.scaler.state_dict())
        processes.agree("the state of grad_scaler", state)

    def place(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise if gradients are to be clipped, and no stage of any process is trained.

        Without any gradient in a step, the norm is 0, as in torch.
        """
        if self.max_norm is None:
            return
        trains = any(p.requires_grad for module in model.modules for p in module.parameters())
        if not any([trains] if model.processes is None else model.processes.share(trains)):
            raise ArgumentError(
                f"max_grad_norm={self.max_norm:g}, but no parameter of any stage is trained, so "
                "that there are no gradients to clip; leave it out, or set requires_grad of some"
            )

    def before(self, step: Step) -> None:
        """Let backwards start from the scale."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        step.state[self] = _StepNorm(scale)
        for stage in step.gradients.stages if self.scaler is not None else ():
            if isinstance(stage, Stage):
                stage.loss_scale = scale
        if step.inputs.loss.check is not None:
            step.inputs.loss.check.scale = scale

    @torch.no_grad()
    def _compute(self, step: Step, task: PlannedTask) -> None:
        """Compute the norm for all devices of this process, with those of other processes."""
        torch_device, state = task.device.torch_device, step.state[self]
        squares = [torch.zeros((), dtype=torch.float64, device=torch_device)] * step.graph.n_stages
        is_double = False
        for slot in task.copies:
            stage = slot % step.graph.n_stages
            assign_reduced_gradients(step, slot)
            gradients = [
                p.grad
                for p in step.gradients.counted(
                    slot, step.gradients.trained_module(slot).parameters()
                )
                if p.grad is not None and id(p) not in step.gradients.uncounted
            ]
            if any(x.dtype in (torch.float64, torch.complex128) for x in gradients):
                is_double = True
            squares[stage] = squares[stage] + _squares(step, slot, gradients, torch_device)
        by_stage = torch.stack(squares)
        if task.group is not None:
            # A process may have no gradient that counts: it learns here of others of 64 bits.
            is_64 = torch.tensor([float(is_double)], dtype=torch.float64)
            sums = torch.cat([by_stage.cpu(), is_64])
            dist.all_reduce(sums, group=task.group)
            by_stage, is_double = sums[:-1], bool(sums[-1] > 0)
        norm = by_stage.sum().sqrt()
        if self.scaler is not None:
            norm = norm / state.scale
            state.is_skipped = not torch.isfinite(norm)
        elif self.error_if_nonfinite and not torch.isfinite(norm):
            raise _nonfinite(norm, by_stage)
        if self.max_norm is not None:
            state.factor = (self.max_norm / (norm + _EPSILON)).clamp(max=1.0)
        state.norm = norm.to(torch.float64 if is_double else torch.float32)
        members = step.graph.collectives[int(step.graph.group[task.id])]
        step.events.nbytes[members] = NORM_BYTES if len(members) > 1 else 0

    @torch.no_grad()
    def before_optimizer(self, step: Step, task: PlannedTask) -> bool:
        """Divide the gradients of a stage by the scale, and clip them."""
        state = step.state[self]
        if state.scale == 1 and state.factor is None:
            return True
        factors: dict[torch.device, Tensor] = {}
        for parameter in step.gradients.trained_module(task.slot).parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if state.scale != 1:
                gradient.mul_(1 / state.scale)
            if state.factor is None:
                continue
            if gradient.device not in factors:
                factors[gradient.device] = state.factor.to(gradient.device)
                task.device.adopt(factors[gradient.device], task.stream)
            gradient.mul_(factors[gradient.device])
        return not state.is_skipped

    def after(self, step: Step) -> None:
        """Change the scale by the norm, which is divided by it."""
        norm = step.state[self].norm
        if self.scaler is None or norm is None:
            return
        self.scaler.scale(torch.zeros(()))  # makes the tensor of the scale before the first step
        self._parameter.grad = torch.tensor(float(norm))
        self.scaler.unscale_(self._optimizer)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def result(self, step: Step) -> Mapping[str, Any]:
        """Return the norm, and whether the step was skipped."""
        state = step.state[self]
        return {"grad_norm": state.norm, "skipped": state.is_skipped}

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the scale at the end of a block."""
        state = None if self.scaler is None else self.scaler.state_dict()
        try:
            yield
        finally:
            if self.scaler is not None and state is not None:
                self.scaler.load_state_dict(state)


def _squares(step: Step, slot: int, gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of gradients, divided by the count of the loss, on a device."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if not gradients:
        return total
    for own, parts in _by_device(gradients).items():
        if own != device and own.type == "cuda" and device.type == "cuda":
            # Dependencies hold for the stream of this task, not for those of other GPUs.
            torch.cuda.current_stream(own).wait_stream(torch.cuda.current_stream(device))
        types = [torch.float64 if x.dtype == torch.float64 else torch.float32 for x in parts]
        norms = torch.stack([
            torch.linalg.vector_norm(x, dtype=t).double() for x, t in zip(parts, types, strict=True)
        ])  # fmt: skip
        total = total + norms.square().sum().to(device)
    loss = step.inputs.loss
    if loss.is_counted():
        count = loss.total_count(0, gradients[0].device, step.gradients.stages[slot].mean_count)
        divisor = count.to(device) if isinstance(count, Tensor) else count
        total = total / divisor**2
    return total


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the dense values of gradients by device; sparse ones are summed by row first."""
    parts: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        value = gradient.coalesce().values() if gradient.is_sparse else gradient
        parts[value.device].append(torch.view_as_real(value) if value.is_complex() else value)
    return parts


def _nonfinite(norm: Tensor, by_stage: Tensor) -> ExecutionError:
    stages = torch.nonzero(~torch.isfinite(by_stage)).flatten().tolist()
    what = (
        f"gradients of stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} are not finite"
        if stages
        else "its square exceeds the largest number"
    )
    return ExecutionError(
        f"the norm of the gradients is {float(norm)}: {what}; no optimizer has stepped. Look for "
        "the cause in loss, batch or learning rate, or give Pipeline error_if_nonfinite=False to "
        "step all the same, as torch.nn.utils.clip_grad_norm_ does"
    )

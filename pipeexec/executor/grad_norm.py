"""Norm of all gradients between backward and optimizer step, and clipping by it (GRAD_NORM).

Each stage counts once: replicas have the same sums of gradients, and copies of a tied parameter
too. The rows of a sharded embedding, experts, and shares of gradients are different in each
replica, and all count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeexec.executor.gradient_sync import assign_reduced_gradients
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.experts.expert_shares import counted_parameters
from pipeexec.experts.stage import ExpertStage
from pipesim.costs.collective_costs import NORM_BYTES
from pipesim.errors import ExecutionError

if TYPE_CHECKING:
    from pipeexec.executor.step import Step


#: Added to the norm that divides, as in torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


class GradNorm(NamedTuple):
    """Norm of all gradients of a step before clipping, and the factor by which they are clipped.

    The factor is at most 1, or None if gradients are not clipped.
    """

    norm: Tensor
    factor: Tensor | None


@torch.no_grad()
def compute_grad_norm(step: Step, task: PlannedTask) -> None:
    """Compute the norm for all devices of this process, with those of other processes."""
    torch_device, clipping = task.device.torch_device, step.gradients.options.clipping
    squares = [torch.zeros((), dtype=torch.float64, device=torch_device)] * step.graph.n_stages
    is_double = False
    counted_stages: set[int] = set()
    for slot in task.copies:
        stage = slot % step.graph.n_stages
        assign_reduced_gradients(step, slot)
        gradients = list(_gradients(step, slot, is_first_here=stage not in counted_stages))
        counted_stages.add(stage)
        if any(x.dtype in (torch.float64, torch.complex128) for x in gradients):
            is_double = True
        squares[stage] = squares[stage] + _squares(step, slot, gradients, torch_device)
    by_stage = torch.stack(squares)
    if task.group is not None:
        # A process may have no gradient that counts: it learns here whether others are of 64 bits.
        sums = torch.cat([by_stage.cpu(), torch.tensor([float(is_double)], dtype=torch.float64)])
        dist.all_reduce(sums, group=task.group)
        by_stage, is_double = sums[:-1], bool(sums[-1] > 0)
    norm = by_stage.sum().sqrt()
    if step.gradients.options.scaling is not None:
        norm = norm / step.gradients.scale
        step.gradients.is_skipped = not torch.isfinite(norm)
    elif clipping.error_if_nonfinite and not torch.isfinite(norm):
        raise _nonfinite(norm, by_stage)
    factor = None
    if clipping.max_norm is not None:
        factor = (clipping.max_norm / (norm + _EPSILON)).clamp(max=1.0)
    step.gradients.norm = GradNorm(norm.to(torch.float64 if is_double else torch.float32), factor)
    members = step.graph.collectives[int(step.graph.group[task.id])]
    step.events.nbytes[members] = NORM_BYTES if len(members) > 1 else 0


def _gradients(step: Step, slot: int, *, is_first_here: bool) -> Iterable[Tensor]:
    """Yield the gradients of a local copy that no other copy counts.

    These are the sums of the first replica; the rows of each replica of a sharded stage; and
    experts in the first process that has them. Later copies of tied parameters do not count.
    """
    stage = step.gradients.stages[slot]
    group = stage.expert_group if isinstance(stage, ExpertStage) else None
    is_first = slot < step.graph.n_stages or stage.index in step.graph.sharded
    is_first = is_first or slot in step.gradients.shards
    copies = step.gradients.later_copies
    trained = step.gradients.trained(slot).parameters()
    for parameter in counted_parameters(
        stage.module, trained, group, is_first=is_first, is_first_here=is_first_here
    ):
        if parameter.grad is not None and id(parameter) not in copies:
            yield parameter.grad


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


@torch.no_grad()
def clip_gradients(step: Step, task: PlannedTask) -> None:
    """Multiply the gradients of a stage by the factor of the step, if there is one."""
    norm = step.gradients.norm
    if norm is None or norm.factor is None:
        return
    factors: dict[torch.device, Tensor] = {}
    for parameter in step.gradients.trained(task.slot).parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.device not in factors:
            factors[gradient.device] = norm.factor.to(gradient.device)
            task.device.adopt(factors[gradient.device], task.stream)
        gradient.mul_(factors[gradient.device])

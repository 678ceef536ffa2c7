"""Stages in DistributedDataParallel, whose gradients are reduced once a mini-batch.

DDP expects a backward after each forward: a forward prepares its reducer, and the next backward
reduces gradients. In a pipeline several forwards come before the first backward. So forwards run
within ``no_sync()``, and the reducer is prepared before the last backward::

      F0 F1 F2 B0 F3 B1 B2 | B3     prepared at the bar: the all-reduce overlaps B3
      F0 F1 I0 W0 I1 W1 |           no hook of autograd sees W: the all-reduce comes after it

The all-reduce includes the gradients of earlier micro-batches, which have accumulated by then. It
comes after the last backward in two more cases:

- The schedule has versions of the weights, which are not the parameters that the reducer knows.
- DDP has ``find_unused_parameters``: earlier micro-batches may have used a parameter that the last
  one does not use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesim.errors import ArgumentError


def ddp_of(module: nn.Module, name: str) -> DistributedDataParallel | None:
    """Return the module if it is a DistributedDataParallel, None if no module in it is."""
    inside = [k for k, m in module.named_modules() if isinstance(m, DistributedDataParallel)]
    if not inside:
        return None
    if inside != [""] or not isinstance(module, DistributedDataParallel):
        raise ArgumentError(
            f"{name} has DistributedDataParallel around a part of it ({inside[-1]!r}), which would "
            "add up gradients at the wrong backward; put it around the whole"
        )
    unfit = {
        "static_graph=True": module.static_graph,
        "mixed_precision": module.mixed_precision is not None,
        "delay_all_reduce_named_params": module._delay_all_reduce_all_params,
        "torch's Python reducer": module._use_python_reducer,
    }
    for option in (option for option, is_set in unfit.items() if is_set):
        raise ArgumentError(
            f"{name} is DistributedDataParallel with {option}, which counts on one forward before "
            "each backward; leave that out"
        )
    return module


def synchronize(ddp: DistributedDataParallel) -> None:
    """Replace accumulated gradients by their mean over the replicas.

    The reducer does it, with its buckets and communication hooks. A backward that adds nothing
    reaches every parameter; the reducer watches for that, and takes the gradients that have
    accumulated. A parameter without a gradient counts as zero. With ``find_unused_parameters``, one
    that has no gradient in any replica keeps none.
    """
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    if ddp.find_unused_parameters:  # the others are marked as unused; a backward needs one
        parameters = [p for p in parameters if p.grad is not None] or parameters[:1]
    with torch.enable_grad():
        output: Tensor = _NoGradient.apply(*parameters)  # type: ignore[no-untyped-call]
    ddp.reducer.prepare_for_backward([output])
    output.backward()


def is_synchronizing(tensors: object) -> bool:
    """Return whether a backward from a tensor is that of `synchronize`, without gradients."""
    node = getattr(tensors, "grad_fn", None)
    return isinstance(node, _NoGradient._backward_cls)


class _NoGradient(torch.autograd.Function):
    """Zero that depends on parameters, and has no gradient for them."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.n = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.n)


def check_ddp(stages: Sequence[nn.Module | None], n_paths: int) -> None:
    """Check that DDP stages can run in one pipeline of this process."""
    owner: dict[object, int] = {}
    for index, stage in enumerate(stages):
        ddp = None if stage is None else ddp_of(stage, f"stage {index}")
        if ddp is None:
            continue
        if n_paths > 1:
            raise ArgumentError(
                f"stage {index} is DistributedDataParallel, and the graph has {n_paths} copies of "
                "each stage, which would need process groups of their own; run a placement with "
                "one, and let DDP alone do the rest"
            )
        first = owner.setdefault(ddp.process_group, index)
        if first != index:
            raise ArgumentError(
                f"stages {first} and {index} are DistributedDataParallel over one process group; "
                "stages run at the same time, and their messages would be mixed up: give each its "
                "own group, process_group=torch.distributed.new_group()"
            )


def ddp_stage(
    module: nn.Module, index: int, batch_size: int | None, has_versions: bool
) -> DdpStage | None:
    """Return the `DdpStage` of a stage in DDP, None for other stages."""
    ddp = ddp_of(module, f"stage {index}")
    if ddp is None:
        return None
    if batch_size is None:
        raise ArgumentError(
            f"stage {index} is DistributedDataParallel, which only pipeexec.Pipeline can run"
        )
    return DdpStage(ddp, batch_size, has_versions)


class DdpStage:
    """Prepares DDP's reducer for a stage's last backward of each mini-batch.

    A step within the user's ``ddp.no_sync()`` reduces nothing. After a step that reduced gradients,
    the next step's first forward broadcasts buffers, as DDP does. ``batch_size`` is the
    micro-batches of a mini-batch. With ``has_versions``, forwards use versions of the weights in
    place of the parameters.
    """

    def __init__(self, ddp: DistributedDataParallel, batch_size: int, has_versions: bool) -> None:
        self.ddp, self.batch_size = ddp, batch_size
        self.overlaps = not has_versions and not ddp.find_unused_parameters
        self._n_ended: Counter[int] = Counter()  # of each mini-batch
        self._is_prepared = False
        self._was_synchronized = False

    def begin(self) -> None:
        """Start a step."""
        self._n_ended.clear()
        if self._was_synchronized:  # DDP sets this in a forward outside no_sync()
            self.ddp.require_forward_param_sync = True
        self._was_synchronized = False

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context of a forward or recompute, which must not prepare the reducer."""
        return self.ddp.no_sync()

    def sync_buffers(self) -> None:
        """Broadcast the buffers now, if DDP would broadcast them in the next forward."""
        if self.ddp._check_sync_bufs_pre_fwd():
            self.ddp._sync_buffers()
            self.ddp.require_forward_param_sync = False  # as DDP does in a forward in no_sync()

    def before_backward(self, microbatch: int) -> None:
        """Prepare the reducer if this backward is the last of its mini-batch."""
        if self.overlaps and self._synchronizes_after(microbatch):
            self.ddp.reducer.prepare_for_backward([])
            self._is_prepared = True

    def finish_microbatch(self, microbatch: int) -> None:
        """Note that a micro-batch has its gradients; after the last, reduce them over replicas.

        DDP raises RuntimeError if the last backward has not reached all parameters.
        """
        if self._is_prepared:
            self.ddp.reducer._check_reducer_finalized()
            self._is_prepared = False
            self._was_synchronized = True
        elif self._synchronizes_after(microbatch):
            synchronize(self.ddp)
            self._was_synchronized = True
        self._n_ended[microbatch // self.batch_size] += 1

    def mean_count(self, count: Tensor | float) -> Tensor | float:
        """Return the mean of a count over the replicas whose gradients were reduced."""
        if not self._was_synchronized:
            return count
        device = next(self.ddp.parameters()).device
        total = torch.as_tensor(count, dtype=torch.float64, device=device).clone()
        dist.all_reduce(total, group=self.ddp.process_group)
        mean = total / dist.get_world_size(self.ddp.process_group)
        return mean if device.type == "cuda" else float(mean)

    def reset(self) -> None:
        """Reset the reducer after a step that failed."""
        if self._is_prepared:
            self.ddp.reducer._reset_state()
            self._is_prepared = False

    def _synchronizes_after(self, microbatch: int) -> bool:
        is_last = self._n_ended[microbatch // self.batch_size] == self.batch_size - 1
        return is_last and self.ddp.require_backward_grad_sync

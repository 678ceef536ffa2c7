"""Replicas of `GradientAccumulation`: those of DistributedDataParallel, or a model by itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeexec.data_parallel.ddp import ddp_of, synchronize

__all__ = ["Replicas", "scale_gradients"]


class Replicas:
    """The replicas of a model, of which one is in this process.

    Parameters
    ----------
    model
        A module, which is then the only replica, or one in DistributedDataParallel.

    Raises
    ------
    ArgumentError
        If DDP is around a part of the model, or has an option that counts on a backward that adds
        up gradients after each forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ddp = ddp_of(model, "the model")
        #: The model itself, whose names of parameters do not depend on DDP.
        self.module: nn.Module = model if self.ddp is None else self.ddp.module

    @property
    def rank(self) -> int:
        """Number of this replica."""
        return 0 if self.ddp is None else dist.get_rank(self.ddp.process_group)

    @property
    def n(self) -> int:
        """Number of replicas."""
        return 1 if self.ddp is None else dist.get_world_size(self.ddp.process_group)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether the next forward begins with the buffers of rank 0, if DDP broadcasts them."""
        return self.ddp is None or bool(self.ddp.require_forward_param_sync)

    @broadcasts_buffers.setter
    def broadcasts_buffers(self, value: bool) -> None:
        if self.ddp is not None:
            self.ddp.require_forward_param_sync = value

    def microbatch(self, *, watched: bool) -> AbstractContextManager[None]:
        """Return the context of a forward and its backward, in which DDP adds up or does not."""
        return nullcontext() if self.ddp is None or watched else self.ddp.no_sync()

    def synchronize(self) -> None:
        """Add up the gradients that there are, after backwards that DDP did not watch."""
        if self.ddp is not None:
            synchronize(self.ddp)
            self.broadcasts_buffers = True  # as after a backward that DDP watches

    def reset(self) -> None:
        """Forget gradients that DDP's reducer may still wait for: they will not come."""
        if self.ddp is not None:
            self.ddp.reducer._reset_state()

    def total(self, count: float) -> float:
        """Return the sum of a count over all replicas."""
        if self.ddp is None:
            return count
        device = next(self.ddp.parameters()).device
        whole = torch.tensor(count, device=device)
        dist.all_reduce(whole, group=self.ddp.process_group)
        return float(whole)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients that there are."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)

"""`Replicas` of a model in `GradientAccumulation`: those of DDP, or the model alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from pipeexec.data_parallel.ddp import ddp_of, synchronize


class Replicas:
    """Replicas of a model, one of which is in this process.

    Parameters
    ----------
    model
        A module in DistributedDataParallel; any other module is the only replica.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ddp = ddp_of(model, "the model")
        #: The model without DDP, which would change the names of its parameters.
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
        """Whether the next forward starts by broadcasting rank 0's buffers, if DDP does that."""
        return self.ddp is None or bool(self.ddp.require_forward_param_sync)

    @broadcasts_buffers.setter
    def broadcasts_buffers(self, value: bool) -> None:
        if self.ddp is not None:
            self.ddp.require_forward_param_sync = value

    def microbatch(self, *, synchronizes: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch; ``synchronizes``: DDP reduces in its backward."""
        return nullcontext() if self.ddp is None or synchronizes else self.ddp.no_sync()

    def synchronize(self) -> None:
        """Reduce accumulated gradients, after backwards in which DDP did not."""
        if self.ddp is not None:
            synchronize(self.ddp)
            self.broadcasts_buffers = True  # as after a backward in which DDP reduces

    def reset(self) -> None:
        """Reset DDP's reducer, which may wait for gradients that will not come."""
        if self.ddp is not None:
            self.ddp.reducer._reset_state()

    def total(self, count: float) -> float:
        """Return the sum of a count over all replicas."""
        if self.ddp is None:
            return count
        device = next(self.ddp.parameters()).device
        total = torch.tensor(count, device=device)
        dist.all_reduce(total, group=self.ddp.process_group)
        return float(total)

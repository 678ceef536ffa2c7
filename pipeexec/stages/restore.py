"""Steps that leave no trace in what they ran."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipeexec.stages.optimizer_state import put_back

__all__ = ["preserved"]


@contextmanager
def preserved(
    modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | None] = ()
) -> Iterator[None]:
    """Restore parameters, buffers, gradients and optimizer state at the end of a block."""
    states = [copy.deepcopy(module.state_dict()) for module in modules]
    # Buffers need not be in the state.
    buffers = [[b.clone() for b in module.buffers()] for module in modules]
    gradients = [[None if p.grad is None else p.grad.clone() for p in module.parameters()]
                 for module in modules]  # fmt: skip
    kept = [None if o is None else copy.deepcopy(o.state_dict()) for o in optimizers]
    try:
        yield
    finally:
        for module, state, values, grads in zip(modules, states, buffers, gradients, strict=True):
            module.load_state_dict(state)
            for buffer, before in zip(module.buffers(), values, strict=True):
                buffer.copy_(before)
            for parameter, gradient in zip(module.parameters(), grads, strict=True):
                parameter.grad = gradient
        for optimizer, saved in zip(optimizers, kept, strict=True):
            if optimizer is not None and saved is not None:
                put_back(optimizer, saved)

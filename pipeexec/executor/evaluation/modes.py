"""Run modules in evaluation mode, and leave no trace in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set evaluation mode in a block; then restore modes, buffers and the random state.

    Each submodule gets back the mode that it had. Buffers are copied before the block.
    """
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    modes = [part.training for part in parts]
    buffers = [_Buffer(part, name) for part in parts for name, x in part._buffers.items()
               if x is not None]  # fmt: skip
    random_state = torch.get_rng_state()
    try:
        for module in parts:
            if module.training:
                module.eval()
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        with torch.inference_mode(False), torch.no_grad():
            for buffer in buffers:
                buffer.restore()
        if not torch.equal(torch.get_rng_state(), random_state):
            torch.set_rng_state(random_state)


class _Buffer:
    """A buffer of a module, and its values."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        buffer = module._buffers[name]
        assert buffer is not None
        self.tensor: Tensor = buffer
        self.version = -1 if buffer.is_inference() else buffer._version
        self.values = buffer.detach().clone()

    def restore(self) -> None:
        """Restore the tensor, and its values if they may have changed."""
        if self.module._buffers.get(self.name) is not self.tensor:
            self.module._buffers[self.name] = self.tensor
        if self.version < 0 or self.tensor._version != self.version:
            self.tensor.copy_(self.values)

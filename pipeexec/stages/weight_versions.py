"""Versions of a stage's weights, where it steps while micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["Versions"]


class Versions:
    """Gives each micro-batch the weights that its schedule says, from its F to its backward.

    Version ``v`` is the weights after ``v`` optimizer steps, kept as parameters of its own: the
    optimizer changes the stage's in place, and a backward needs what its forward has seen. It is
    kept as long as a micro-batch in flight has it, or one is still to get it; the newest is there
    twice, once for the optimizer.

    Parameters
    ----------
    module
        The stage's.
    batch_size
        Micro-batches of a mini-batch.
    double_buffered
        Whether a forward sees the weights of the step before the last mini-batch's, or else the
        newest; see `pipesim.Schedule`.
    """

    def __init__(self, module: nn.Module, batch_size: int, double_buffered: bool) -> None:
        self.module, self.batch_size, self.double_buffered = module, batch_size, double_buffered
        self.newest = 0
        self.kept: dict[int, dict[str, nn.Parameter]] = {}
        self.in_flight: dict[int, int] = {}

    def reset(self) -> None:
        """Begin a step with the weights as they are."""
        self.clear()
        self._keep()

    def clear(self) -> None:
        """Let go of all versions."""
        self.newest = 0
        self.kept.clear()
        self.in_flight.clear()

    def weights(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all versions."""
        return (parameter for weights in self.kept.values() for parameter in weights.values())

    def _keep(self) -> None:
        self.kept[self.newest] = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for name, p in self.module.named_parameters()
        }

    def begin(self, microbatch: int) -> None:
        """Choose the weights that F of a micro-batch sees."""
        version = self.newest
        if self.double_buffered:
            # Without optimizer steps the first version is the only one.
            version = min(self.newest, max(0, microbatch // self.batch_size - 1))
        self.in_flight[microbatch] = version

    def of(self, microbatch: int) -> dict[str, nn.Parameter]:
        """Return the weights that its F has seen."""
        return self.kept[self.in_flight[microbatch]]

    def end(self, microbatch: int) -> None:
        """Add the gradients of a micro-batch to the stage's own parameters."""
        weights = self.of(microbatch)
        del self.in_flight[microbatch]
        for name, parameter in self.module.named_parameters():
            gradient, weights[name].grad = weights[name].grad, None
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        self._drop()

    @torch.no_grad()
    def stepped(self) -> None:
        """Note an optimizer step, and keep the new weights."""
        self.newest += 1
        self._drop()
        self._keep()

    def _drop(self) -> None:
        """Let go of versions that nobody will ask for."""
        oldest = self.newest - 1 if self.double_buffered else self.newest
        needed = {*range(max(0, oldest), self.newest + 1), *self.in_flight.values()}
        for version in [v for v in self.kept if v not in needed]:
            del self.kept[version]

"""Versions of the weights of a stage that steps while micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class WeightVersions:
    """Gives each micro-batch, from its F to its backward, the weights that its schedule prescribes.

    Version ``v`` is the weights after ``v`` optimizer steps. It is a copy with its own parameters:
    the optimizer changes the stage's in place, and a backward needs the weights of its forward. A
    version is kept while a micro-batch in flight uses it, or a later one will. The newest exists
    twice, once for the optimizer.

    Parameters
    ----------
    module
        Module of the stage.
    batch_size
        Micro-batches of a mini-batch.
    double_buffered
        Whether a forward uses the weights of the step before the last mini-batch's, or else the
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
        """Free all versions."""
        self.newest = 0
        self.kept.clear()
        self.in_flight.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all versions."""
        return (parameter for weights in self.kept.values() for parameter in weights.values())

    def _keep(self) -> None:
        self.kept[self.newest] = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for name, p in self.module.named_parameters()
        }

    def begin_microbatch(self, microbatch: int) -> None:
        """Choose the weights for F of a micro-batch."""
        version = self.newest
        if self.double_buffered:
            # Without optimizer steps the first version is the only one.
            version = min(self.newest, max(0, microbatch // self.batch_size - 1))
        self.in_flight[microbatch] = version

    def weights(self, microbatch: int) -> dict[str, nn.Parameter]:
        """Return the weights of the forward of a micro-batch."""
        return self.kept[self.in_flight[microbatch]]

    def end_microbatch(self, microbatch: int) -> None:
        """Add the gradients of a micro-batch to the stage's own parameters."""
        weights = self.weights(microbatch)
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
    def add_version(self) -> None:
        """Keep the weights after an optimizer step as the newest version."""
        self.newest += 1
        self._drop()
        self._keep()

    def _drop(self) -> None:
        """Free the versions that no micro-batch will use."""
        oldest = self.newest - 1 if self.double_buffered else self.newest
        needed = {*range(max(0, oldest), self.newest + 1), *self.in_flight.values()}
        for version in [v for v in self.kept if v not in needed]:
            del self.kept[version]

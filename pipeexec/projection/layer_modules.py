"""Modules around layers that run without the layers before or after them.

A pipeline of some layers takes a dummy batch. Its first module returns the values that the layers
before have passed on, and the last one returns a loss. So values of any form pass, and each
micro-batch is the profiled one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.nesting import tensors_in
from pipesim.errors import ExecutionError

#: Loss of the output of the last layer.
LayerLoss = Callable[[Any], Tensor]


class FirstLayer(nn.Module):
    """Calls the first layer with the sample.

    Parameters
    ----------
    layer
        The layer.
    sample
        Its tensors, on its device.
    """

    def __init__(self, layer: nn.Module, sample: Sequence[Tensor]) -> None:
        super().__init__()
        self.layer, self._sample = layer, tuple(sample)

    def forward(self, _: Tensor) -> Any:
        """Return the output of the layer."""
        return self.layer(*self._sample)


class Values(nn.Module):
    """Returns the values that the layers before have passed on, on the device of the layers."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self._values = tuple(values)

    def forward(self, _: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        return self._values


class LastLayer(nn.Module):
    """Calls the last layer, and then the loss."""

    def __init__(self, layer: nn.Module, loss: LayerLoss) -> None:
        super().__init__()
        self.layer, self._loss = layer, loss

    def forward(self, *values: Tensor) -> Tensor:
        """Return the loss, as a tensor of shape ``(1,)``."""
        return self._loss(self.layer(*values)).reshape(1)


class SquareSum(nn.Module):
    """Takes the place of the layers after some others, so that these get gradients."""

    def forward(self, *values: Tensor) -> Tensor:
        """Return the sum of the squares of all floating-point values, of shape ``(1,)``."""
        return square_sum(values).reshape(1)


def square_sum(output: Any) -> Tensor:
    """Return the sum of the squares of all floating-point values of an output.

    Raises
    ------
    ExecutionError
        If there are none.
    """
    values = [x for x in tensors_in(output) if x.is_floating_point()]
    if not values:
        raise ExecutionError(
            f"the output, {type(output).__name__}, has no tensor of floating-point numbers, of "
            "which a loss could be the sum of squares; give loss_fn="
        )
    return torch.stack([x.float().square().sum() for x in values]).sum()


def layer_loss(loss_fn: Callable[[Any, Any], Any] | None, targets: Any) -> LayerLoss:
    """Return the loss of the last layer's output."""
    if loss_fn is None:
        return square_sum

    def loss(output: Any) -> Tensor:
        value = loss_fn(output, targets)
        value = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ExecutionError(
                "loss_fn must return a tensor of one element, or a tuple that begins with it, got "
                f"{value!r:.60}"
            )
        return value

    return loss


def dummy_loss(losses: Tensor, _: Tensor) -> Tensor:
    """Return the sum of the losses that a pipeline of layers returns."""
    return losses.sum()

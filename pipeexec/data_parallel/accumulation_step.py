"""Steps of `GradientAccumulation`: the weight of a loss, scaled gradients, the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesim.errors import ArgumentTypeError, check_function, check_type


def check_arguments(model: object, optimizer: object, scaler: object, before_step: object) -> None:
    """Raise `ArgumentTypeError` for arguments of the wrong type."""
    check_type("model", model, nn.Module)
    check_type("optimizer", optimizer, torch.optim.Optimizer, "make it from the model's parameters")
    if scaler is not None and not all(
        callable(getattr(scaler, name, None)) for name in ("scale", "step", "update", "unscale_")
    ):
        raise ArgumentTypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r:.60}")
    if before_step is not None:
        check_function("before_step", before_step, "before_step()")


def weighted_loss(loss: Tensor, n_samples: Sequence[int], n_steps: int, scaler: Any) -> Tensor:
    """Return the loss of the latest micro-batch, weighted by its share of the batch, and scaled.

    Parameters
    ----------
    loss
        Mean over the micro-batch.
    n_samples
        Samples of the micro-batches so far, if the user gives them. The number of all samples is
        known after the last micro-batch: gradients are divided by it then.
    n_steps
        Micro-batches of a batch, which have equal weights if ``n_samples`` is empty.
    scaler
        A gradient scaler, or None.
    """
    weighted = loss * n_samples[-1] if n_samples else loss / n_steps
    return weighted if scaler is None else scaler.scale(weighted)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of parameters; those without a gradient are left out."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def step_optimizer(
    optimizer: torch.optim.Optimizer, scaler: Any, before_step: Callable[[], object] | None
) -> None:
    """Step an optimizer, with a scaler if any; ``before_step`` is called on unscaled gradients."""
    if scaler is None:
        if before_step is not None:
            before_step()
        optimizer.step()
        return
    if before_step is not None:
        scaler.unscale_(optimizer)
        before_step()
    scaler.step(optimizer)
    scaler.update()

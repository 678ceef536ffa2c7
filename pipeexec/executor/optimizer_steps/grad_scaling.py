"""Scale the loss, so that gradients of 16 bits do not vanish, and skip steps that overflow.

A `torch.amp.GradScaler` holds the scale, and the rule by which it changes. Backwards start from the
scale instead of 1. Before gradients are used, they are divided by it. If one of them is not finite,
neither is the norm of all, which every device has from GRAD_NORM: so all stages, replicas and
processes skip the step together, and all scalers get the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.amp import GradScaler

from pipesim.errors import check_type


def make_scaling(scaler: GradScaler | None) -> GradScaling | None:
    """Return the gradient scaling of a pipeline; None without a scaler, or if it is disabled."""
    if scaler is None:
        return None
    check_type("grad_scaler", scaler, GradScaler, 'such as torch.amp.GradScaler("cuda")')
    return GradScaling(scaler) if scaler.is_enabled() else None


class GradScaling:
    """The gradient scaler of a pipeline.

    Parameters
    ----------
    scaler
        Enabled; belongs to the user.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        # The scaler sees the norm of all gradients, as the gradient of a parameter.
        self._parameter = nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([self._parameter], lr=0.0)

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return float(self.scaler.get_scale())

    def update(self, norm: float) -> bool:
        """Change the scale after a step; return whether the step was skipped.

        Parameters
        ----------
        norm
            Norm of all gradients of the step, divided by the scale.
        """
        self.scaler.scale(torch.zeros(()))  # makes the tensor of the scale before the first step
        self._parameter.grad = torch.tensor(float(norm))
        self.scaler.unscale_(self._optimizer)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return not math.isfinite(norm)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the scale at the end of a block."""
        state = self.scaler.state_dict()
        try:
            yield
        finally:
            self.scaler.load_state_dict(state)

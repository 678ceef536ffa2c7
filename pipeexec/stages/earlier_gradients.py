"""Gradients from before a step, for steps that add to them: kept apart until the step is complete.

So a step that fails leaves them as they were, and a step whose gradients are divided at its end
divides only its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


def add_gradients(
    gradients: Sequence[Tensor | None], more: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return sums of gradients, where None is nothing; dense tensors of ``gradients`` change."""
    return [
        y if x is None else x if y is None else y + x if x.is_sparse else x.add_(y)
        for x, y in zip(gradients, more, strict=True)
    ]


class EarlierGradients:
    """Keeps the gradients of modules from before a step.

    Parameters
    ----------
    modules
        Modules by their index in the pipeline.
    is_separate
        Whether the step begins without gradients, and those from before are added at its end.
        Otherwise it adds to them as autograd does, and a copy is kept.
    """

    def __init__(self, modules: Mapping[int, nn.Module], *, is_separate: bool) -> None:
        self.is_separate = is_separate
        self._parameters = {slot: list(module.parameters()) for slot, module in modules.items()}
        self._earlier = {slot: [p.grad for p in row] for slot, row in self._parameters.items()}
        self._step_gradients: dict[int, list[Tensor | None]] = {}
        self._copies: dict[int, list[Tensor | None]] = {}
        if is_separate:
            for row in self._parameters.values():
                _detach_gradients(row)
        else:
            self._copies = {
                slot: [None if x is None else x.clone() for x in row]
                for slot, row in self._earlier.items()
            }

    def __contains__(self, slot: int) -> bool:
        return self.is_separate and slot in self._parameters

    def end_mini_batch(self, slot: int) -> None:
        """Set apart the gradients of a mini-batch of the step; the next one begins without."""
        if slot not in self:
            return
        gradients = _detach_gradients(self._parameters[slot])
        if slot in self._step_gradients:
            gradients = add_gradients(self._step_gradients[slot], gradients)
        self._step_gradients[slot] = gradients

    @torch.no_grad()
    def add(self) -> None:
        """End a step: each gradient is the sum of the one from before and the step's."""
        for slot in self._parameters if self.is_separate else ():
            self.end_mini_batch(slot)
            self._set(slot, add_gradients(self._earlier[slot], self._step_gradients[slot]))

    @torch.no_grad()
    def restore(self) -> None:
        """Undo a step: gradients are those from before."""
        for slot, row in self._copies.items():
            for gradient, copied in zip(self._earlier[slot], row, strict=True):
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        for slot, gradients in self._earlier.items():
            self._set(slot, gradients)

    def _set(self, slot: int, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters[slot], gradients, strict=True):
            parameter.grad = gradient


def _detach_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients of parameters, and take them from the parameters."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients

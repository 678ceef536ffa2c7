"""Gradients from before a step, for steps that add to them: kept apart until the step is complete.

So a step that fails leaves them as they were, and one whose gradients are divided at its end
divides its own alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["EarlierGradients", "added"]


def added(before: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return sums of gradients, where None is nothing; dense tensors of ``before`` change."""
    return [
        y if x is None else x if y is None else y + x if x.is_sparse else x.add_(y)
        for x, y in zip(before, more, strict=True)
    ]


class EarlierGradients:
    """Keeps the gradients of modules from before a step.

    Parameters
    ----------
    modules
        By their place in the pipeline.
    is_separate
        Whether the step begins without gradients, and those from before are added at its end; else
        it adds to them as autograd does, and a copy is kept.
    """

    def __init__(self, modules: Mapping[int, nn.Module], *, is_separate: bool) -> None:
        self.is_separate = is_separate
        self._parameters = {slot: list(module.parameters()) for slot, module in modules.items()}
        self._before = {slot: [p.grad for p in row] for slot, row in self._parameters.items()}
        self._made: dict[int, list[Tensor | None]] = {}
        self._copies: dict[int, list[Tensor | None]] = {}
        if is_separate:
            for row in self._parameters.values():
                _detach_gradients(row)
        else:
            self._copies = {
                slot: [None if x is None else x.clone() for x in row]
                for slot, row in self._before.items()
            }

    def __contains__(self, slot: int) -> bool:
        return self.is_separate and slot in self._parameters

    def end_mini_batch(self, slot: int) -> None:
        """Set apart what a mini-batch of the step has made; the next one begins without."""
        if slot not in self:
            return
        made = _detach_gradients(self._parameters[slot])
        self._made[slot] = added(self._made[slot], made) if slot in self._made else made

    @torch.no_grad()
    def add(self) -> None:
        """End a step: each gradient is the one from before and what the step has made."""
        for slot in self._parameters if self.is_separate else ():
            self.end_mini_batch(slot)
            self._set(slot, added(self._before[slot], self._made[slot]))

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo a step: gradients are those from before."""
        for slot, row in self._copies.items():
            for gradient, copied in zip(self._before[slot], row, strict=True):
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        for slot, gradients in self._before.items():
            self._set(slot, gradients)

    def _set(self, slot: int, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters[slot], gradients, strict=True):
            parameter.grad = gradient


def _detach_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return gradients; their parameters have none then."""
    found = []
    for parameter in parameters:
        found.append(parameter.grad)
        parameter.grad = None
    return found

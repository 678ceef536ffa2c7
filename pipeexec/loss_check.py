"""Compare the combined loss of micro-batches with the loss of all of them at once.

A mean over unmasked tokens, say, is no mean over samples: weighted by samples, the micro-batches
give another loss, and other gradients, than the batch at once. In the first step, outputs of the
last stage and their gradients are kept, up to `MOST_BYTES` but of two micro-batches at least.
After the step the loss function is called once on all of them. Gradients show a difference even
where all losses are equal, as they may be before training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Difference", "LossCheck"]

#: Outputs that the check keeps, where those of two micro-batches are not more.
MOST_BYTES = 64 << 20
#: Relative difference that rounding does not explain, in single precision and better.
_TOLERANCE = 1e-3
#: The same in units of the last place, for half precision.
_ULPS = 4


class Difference(NamedTuple):
    """Two losses of the same micro-batches, and the relative difference of their gradients.

    Attributes
    ----------
    combined, whole
        Sum of the weighted losses of the micro-batches; loss of all of them at once.
    gradients
        Norm of the difference of the gradients at the output, relative to those of ``whole``.
    n_microbatches
        Number of micro-batches that were compared.
    """

    combined: float
    whole: float
    gradients: float
    n_microbatches: int


class LossCheck:
    """Keeps outputs of the last stage and their gradients in one step, and compares."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._versions: dict[int, list[int]] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._is_tuple = False
        self._nbytes = 0

    def note(self, microbatch: int, output: object) -> None:
        """Keep an output, and its gradient once the backward has made it."""
        tensors = output if isinstance(output, tuple) else (output,)
        if microbatch in self._outputs or not _splits(tensors) or not self._has_room(tensors):
            return
        self._is_tuple = isinstance(output, tuple)
        self._outputs[microbatch] = tuple(x.detach() for x in tensors)
        self._versions[microbatch] = _versions(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(partial(self._keep, microbatch, index))

    def _has_room(self, tensors: tuple[Tensor, ...]) -> bool:
        self._nbytes += sum(x.nbytes for x in tensors)
        first = next(iter(self._outputs.values()), tensors)
        if any(x.device != y.device for x, y in zip(first, tensors, strict=False)):
            return False
        return len(self._outputs) < 2 or self._nbytes <= MOST_BYTES

    def _keep(self, microbatch: int, index: int, gradient: Tensor) -> None:
        self._gradients[microbatch, index] = gradient.detach().clone()

    def difference(
        self,
        function: Callable[[object, object], Tensor],
        targets: Sequence[Any],
        losses: Sequence[Tensor | None],
        factors: Callable[[Sequence[int]], Sequence[float]],
    ) -> Difference | None:
        """Return the difference; None without one, or where nothing can be compared.

        Parameters
        ----------
        function
            Returns the loss of an output and its targets.
        targets, losses
            Of each micro-batch, losses as the step has weighted them.
        factors
            Returns factors that turn these weights into those of a batch of some micro-batches.
        """
        kept = sorted({number for number, _ in self._gradients})
        if len(kept) < 2 or any(self._versions[k] != _versions(self._outputs[k]) for k in kept):
            return None  # too few, or changed in place by the loss function
        scales = factors(kept)
        try:
            outputs, gradients = self._joined(kept, scales)
            labels = _joined_targets([targets[number] for number in kept])
            with torch.random.fork_rng(_gpus(outputs)), torch.enable_grad():
                loss = function(outputs if self._is_tuple else outputs[0], labels)
                whole = torch.autograd.grad(loss, outputs, allow_unused=True)
        except Exception:  # a loss that takes one size of micro-batch: there is nothing to compare
            return None
        pairs = [(x, y) for x, y in zip(gradients, whole, strict=True) if y is not None]
        apart = torch.stack([(x - y).float().norm() for x, y in pairs]).norm()
        size = torch.stack([y.float().norm() for _, y in pairs]).norm()
        weighted = [
            float(x) * scale
            for number, scale in zip(kept, scales, strict=True)
            if (x := losses[number]) is not None
        ]
        found = Difference(sum(weighted), float(loss.detach()), float(apart / size), len(kept))
        epsilon = max(torch.finfo(x.dtype).eps for x in (*outputs, loss))
        return found if found.gradients > max(_TOLERANCE, _ULPS * epsilon) else None

    def _joined(
        self, kept: Sequence[int], factors: Sequence[float]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs of all micro-batches, as leaves, and their gradients."""
        columns = zip(*(self._outputs[number] for number in kept), strict=True)
        outputs = tuple(torch.cat(column).requires_grad_() for column in columns)
        gradients = [
            torch.cat([self._gradients[number, index] * factor
                       for number, factor in zip(kept, factors, strict=True)])
            for index in range(len(outputs))
        ]  # fmt: skip
        return outputs, gradients


def _splits(tensors: tuple[object, ...]) -> bool:
    """Return whether these are tensors of samples that get gradients."""
    return all(isinstance(x, Tensor) and x.dim() > 0 and x.requires_grad for x in tensors)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [x._version for x in tensors]


def _joined_targets(targets: list[Any]) -> Any:
    if isinstance(targets[0], tuple):
        return tuple(torch.cat(column) for column in zip(*targets, strict=True))
    return torch.cat(targets)


def _gpus(tensors: tuple[Tensor, ...]) -> list[int]:
    return sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})

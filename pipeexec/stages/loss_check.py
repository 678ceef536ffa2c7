"""Compare the combined loss of micro-batches with the loss of all of them at once.

A mean over unmasked tokens, for example, is no mean over samples. Weighted by samples, the
micro-batches give another loss, and other gradients, than the batch at once. So the first step
keeps outputs of the last stage and their gradients: up to `MOST_BYTES`, but of two micro-batches at
least. Outputs beyond `LARGEST` are not kept. After the step the loss function is called on all of
them. It is called twice: a loss that draws random numbers has two values. Gradients show a
difference even if all losses are equal, as they may be before training.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Difference", "LossCheck"]

#: Bytes of outputs that the check keeps, unless two micro-batches have more.
MOST_BYTES = 64 << 20
#: Bytes of an output beyond which nothing is checked: the check copies two outputs several times.
LARGEST = 256 << 20
#: Relative difference that rounding does not explain, in single precision and better.
_TOLERANCE = 1e-3
#: The same in units of the last place, for half precision.
_ULPS = 4

#: Returns the loss of an output and its targets, and its count if it has one.
LossAndCount = Callable[[object, object], tuple[Tensor, Tensor | float | None]]


class Difference(NamedTuple):
    """Loss and count summed over micro-batches, and the same of these micro-batches at once.

    Attributes
    ----------
    combined, whole
        The two losses, divided by their counts if they have any.
    gradients
        Norm of the difference of the gradients at the output, relative to those at once.
    combined_count, whole_count
        The two counts; 1 without counts.
    n_microbatches
        Number of micro-batches that were compared.
    """

    combined: float
    whole: float
    gradients: float
    combined_count: float
    whole_count: float
    n_microbatches: int


class LossCheck:
    """Keeps outputs of the last stage and their gradients in one step, and compares."""

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._is_tuple = False
        self._nbytes = 0
        self._lock = threading.Lock()  # last stages of several paths or replicas call `note`

    def note(self, microbatch: int, output: object) -> None:
        """Keep an output, and its gradient once the backward has computed it."""
        tensors = output if isinstance(output, tuple) else (output,)
        with self._lock:
            if (
                microbatch in self._outputs
                or not _are_samples(tensors)
                or not self._has_room(tensors)
            ):
                return
            self._is_tuple = isinstance(output, tuple)
            self._outputs[microbatch] = tuple(x.detach() for x in tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(partial(self._keep, microbatch, index))

    def _has_room(self, tensors: tuple[Tensor, ...]) -> bool:
        nbytes = sum(x.nbytes for x in tensors)
        self._nbytes += nbytes
        first = next(iter(self._outputs.values()), tensors)
        if any(x.device != y.device for x, y in zip(first, tensors, strict=False)):
            return False
        return nbytes <= LARGEST and (len(self._outputs) < 2 or self._nbytes <= MOST_BYTES)

    def _keep(self, microbatch: int, index: int, gradient: Tensor) -> None:
        self._gradients[microbatch, index] = gradient.detach().clone()

    def difference(
        self,
        function: LossAndCount,
        targets: Sequence[Any],
        losses: Sequence[Tensor | None],
        factors: Callable[[Sequence[int]], tuple[list[float], float]],
    ) -> Difference | None:
        """Return the difference; None if there is none, or if nothing can be compared.

        Parameters
        ----------
        function
            Returns the loss of an output and its targets, and its count if it has one.
        targets, losses
            Targets and losses of each micro-batch; losses are weighted as in the step.
        factors
            Returns factors that turn these weights into those of a batch of some micro-batches,
            and their total count.
        """
        kept = sorted({number for number, _ in self._gradients})
        if len(kept) < 2:
            return None
        scales, combined_count = factors(kept)
        try:
            outputs, gradients = self._join_outputs(kept, scales)
            labels = _join_targets([targets[number] for number in kept])
            argument = outputs if self._is_tuple else outputs[0]
            with torch.random.fork_rng(_gpu_indices(outputs)), torch.enable_grad():
                loss, count = function(argument, labels)
                whole = torch.autograd.grad(loss, outputs, allow_unused=True)
                again, _ = function(argument, labels)
        except Exception:  # the loss takes micro-batches of one size only: nothing to compare
            return None
        weighted = [
            float(x) * scale
            for number, scale in zip(kept, scales, strict=True)
            if (x := losses[number]) is not None
        ]
        difference = Difference(
            sum(weighted) / (combined_count or math.nan),
            float(loss.detach()) / (float(1 if count is None else count) or math.nan),
            _relative(gradients, whole),
            combined_count,
            float(1 if count is None else count),
            len(kept),
        )
        limit = max(_TOLERANCE, _ULPS * max(torch.finfo(x.dtype).eps for x in (*outputs, loss)))
        draws = abs(float(again.detach() - loss.detach())) > limit * abs(float(loss.detach()))
        counts_differ = abs(difference.whole_count - combined_count) > limit * combined_count
        return difference if not draws and (difference.gradients > limit or counts_differ) else None

    def _join_outputs(
        self, kept: Sequence[int], factors: Sequence[float]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs of all micro-batches, as leaves, and their gradients."""
        columns = zip(*(self._outputs[number] for number in kept), strict=True)
        outputs = tuple(torch.cat(column).requires_grad_() for column in columns)
        gradients = [
            torch.cat(
                [
                    self._gradients[number, index] * factor
                    for number, factor in zip(kept, factors, strict=True)
                ]
            )
            for index in range(len(outputs))
        ]
        return outputs, gradients


def _relative(gradients: Sequence[Tensor], whole: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference of gradients, relative to that of ``whole``."""
    pairs = [(x, y) for x, y in zip(gradients, whole, strict=True) if y is not None]
    difference = torch.stack([(x - y).float().norm() for x, y in pairs]).norm()
    return float(difference / torch.stack([y.float().norm() for _, y in pairs]).norm())


def _are_samples(tensors: tuple[object, ...]) -> bool:
    """Return whether all are tensors of samples that get gradients."""
    return all(isinstance(x, Tensor) and x.dim() > 0 and x.requires_grad for x in tensors)


def _join_targets(targets: list[Any]) -> Any:
    if isinstance(targets[0], tuple):
        return tuple(torch.cat(column) for column in zip(*targets, strict=True))
    return torch.cat(targets)


def _gpu_indices(tensors: tuple[Tensor, ...]) -> list[int]:
    return sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})

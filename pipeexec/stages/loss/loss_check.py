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

from pipeexec.nesting import leaves, tensors_in, with_tensors

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
    """Keeps outputs of the last stage and their gradients in one step, and compares.

    Attributes
    ----------
    scale
        Factor of the gradients: that of a gradient scaler.
    number
        Path of a tensor without dimensions in the output, such as a loss that the model computes,
        through which gradients flow: several of them cannot be joined. None without one.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.number: str | None = None
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._first: Any = None  # nested as all outputs are
        self._nbytes = 0
        self._lock = threading.Lock()  # last stages of several paths or replicas call `note`

    def note(self, microbatch: int, output: object) -> None:
        """Keep an output, and its gradient once the backward has computed it."""
        tensors = tensors_in(output)
        for path, value in leaves(output, "output"):
            if isinstance(value, Tensor) and value.requires_grad and value.dim() == 0:
                value.register_hook(partial(self._keep_path, path))
        with self._lock:
            if (
                microbatch in self._outputs
                or not any(_is_of_samples(x) for x in tensors)
                or not self._has_room(tensors)
            ):
                return
            self._outputs[microbatch] = tuple(x.detach() for x in tensors)
            if self._first is None:
                self._first = with_tensors(output, self._outputs[microbatch])
        for index, tensor in enumerate(tensors):
            if _is_of_samples(tensor):
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

    def _keep_path(self, path: str, _: Tensor) -> None:
        self.number = path

    def overflows(self) -> bool:
        """Return whether gradients are not finite because of the scale."""
        return self.scale != 1 and not all(x.isfinite().all() for x in self._gradients.values())

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
            joined = self._join_outputs(kept)
            gradients = self._join_gradients(kept, scales)
            outputs = [joined[index].requires_grad_() for index in gradients]
            labels = _join_targets([targets[number] for number in kept])
            argument = with_tensors(self._first, joined)
            with torch.random.fork_rng(_gpu_indices(joined)), torch.enable_grad():
                loss, count = function(argument, labels)
                whole = torch.autograd.grad(loss * self.scale, outputs, allow_unused=True)
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
            _relative(list(gradients.values()), whole),
            combined_count,
            float(1 if count is None else count),
            len(kept),
        )
        limit = max(_TOLERANCE, _ULPS * max(torch.finfo(x.dtype).eps for x in (*outputs, loss)))
        draws = abs(float(again.detach() - loss.detach())) > limit * abs(float(loss.detach()))
        counts_differ = abs(difference.whole_count - combined_count) > limit * combined_count
        return difference if not draws and (difference.gradients > limit or counts_differ) else None

    def _join_outputs(self, kept: Sequence[int]) -> list[Tensor]:
        """Return the tensors of the outputs of all micro-batches."""
        columns = zip(*(self._outputs[number] for number in kept), strict=True)
        return [_joined(column) for column in columns]

    def _join_gradients(self, kept: Sequence[int], factors: Sequence[float]) -> dict[int, Tensor]:
        """Return the gradients of all micro-batches, by the tensor's number in the output."""
        return {
            index: torch.cat(
                [
                    self._gradients[number, index] * factor
                    if (number, index) in self._gradients
                    else torch.zeros_like(self._outputs[number][index])
                    for number, factor in zip(kept, factors, strict=True)
                ]
            )
            for index in sorted({index for _, index in self._gradients})
        }


def _relative(gradients: Sequence[Tensor], whole: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference of gradients, relative to that of ``whole``."""
    pairs = [(x, y) for x, y in zip(gradients, whole, strict=True) if y is not None]
    difference = torch.stack([(x - y).float().norm() for x, y in pairs]).norm()
    return float(difference / torch.stack([y.float().norm() for _, y in pairs]).norm())


def _is_of_samples(tensor: Tensor) -> bool:
    """Return whether a tensor gets a gradient, and is no single number."""
    return tensor.requires_grad and tensor.dim() > 0


def _joined(column: Sequence[Tensor]) -> Tensor:
    """Return a value of all micro-batches; NaN for numbers that differ, which nothing equals."""
    if column[0].dim() > 0:
        return torch.cat(list(column))
    is_equal = all(torch.equal(x, column[0]) for x in column)
    return column[0] if is_equal else torch.tensor(math.nan, device=column[0].device)


def _join_targets(targets: list[Any]) -> Any:
    """Return the targets of all micro-batches; they share tensors that are not split."""
    columns = zip(*(tensors_in(x) for x in targets), strict=True)
    joined = [
        column[0] if all(x is column[0] for x in column) else torch.cat(column)
        for column in columns
    ]
    return with_tensors(targets[0], joined)


def _gpu_indices(tensors: Sequence[Tensor]) -> list[int]:
    return sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})

"""Bytes that a stage really holds for its backward, counted tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Meter"]


class Meter:
    """Counts the storages that activations hold, each once however many tensors share it.

    Slows a step down, so steps with a meter are not timed. Used from one thread.

    Parameters
    ----------
    ignored
        Tensors that are held anyway: parameters and buffers.
    batch
        Tensors whose parts count by themselves: a micro-batch is a part of the batch.

    Attributes
    ----------
    now, peak
        Bytes held, and the most that ever were.
    left
        The most bytes held at the end of an I.
    high
        The most bytes held since it was last set to ``now``.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), batch: Iterable[Tensor] = ()) -> None:
        self.now = 0
        self.peak = 0
        self.left = 0
        self.high = 0
        self._ignored = _storages(ignored)
        self._batch = _storages(batch)
        self._weights: dict[int, set[int]] = {}
        self._holders: Counter[int] = Counter()

    def ignore_weights(self, stage: int, weights: Iterable[Tensor]) -> None:
        """Leave out the versions of weights that a stage has now, in place of those it had."""
        self._weights[stage] = _storages(weights)

    def take(self, tensor: Tensor) -> tuple[int, int]:
        """Count a tensor as held; return the receipt that `give` takes."""
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key in self._batch:
            key, nbytes = tensor.data_ptr(), tensor.nbytes
        if not nbytes or key in self._ignored or any(key in w for w in self._weights.values()):
            return 0, 0
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.now += nbytes
            self.peak, self.high = max(self.peak, self.now), max(self.high, self.now)
        return key, nbytes

    def give(self, receipt: tuple[int, int]) -> None:
        """Count a tensor as let go."""
        key, nbytes = receipt
        if not nbytes:
            return
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= nbytes

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which whatever autograd saves is counted until it is let go."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Receipt(self, tensor), lambda receipt: receipt.tensor
        )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Receipt:
    """Holds a tensor's values, counted by a meter for as long as this object lives.

    Not the tensor itself: autograd also saves outputs, which would hold the graph that holds them.
    """

    __slots__ = ("_meter", "_receipt", "tensor")

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._meter = meter
        self._receipt = meter.take(tensor)

    def __del__(self) -> None:
        self._meter.give(self._receipt)

"""Count the activations held for backwards: micro-batches of a device, bytes of a stage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class ActivationCounter:
    """Counts the micro-batches whose activations a device holds, over all its stages.

    Attributes
    ----------
    current, peak
        Number of micro-batches held now, and the largest number so far.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def acquire(self) -> None:
        """Count one more."""
        self.current += 1
        self.peak = max(self.peak, self.current)

    def release(self) -> None:
        """Count one less."""
        self.current -= 1


class ActivationMeter:
    """Counts the bytes that a stage holds for its backward, tensor by tensor.

    A storage counts once, however many tensors share it.

    A meter slows a step down, so steps with one are not timed. Threads may share it.

    Parameters
    ----------
    ignored
        Tensors that are held anyway: parameters and buffers.
    batch
        Tensors whose parts are counted one by one: a micro-batch is a part of the batch.

    Attributes
    ----------
    current, peak
        Bytes held now, and the most bytes held so far.
    deferred_peak
        The most bytes held at the end of an I.
    window_peak
        The most bytes held since the caller last set it to ``current``.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), batch: Iterable[Tensor] = ()) -> None:
        self.current = 0
        self.peak = 0
        self.deferred_peak = 0
        self.window_peak = 0
        self._ignored = _storages(ignored)
        self._batch = _storages(batch)
        self._weights: dict[int, set[int]] = {}
        self._holders: Counter[int] = Counter()
        self._lock = threading.RLock()  # the collector may free a tensor within `acquire`

    def ignore_weights(self, stage: int, weights: Iterable[Tensor]) -> None:
        """Ignore the versions of weights that a stage has now; count its former ones again."""
        self._weights[stage] = _storages(weights)

    def acquire(self, tensor: Tensor) -> tuple[int, int]:
        """Count a tensor as held; return the key and bytes that `release` takes."""
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key in self._batch:
            key, nbytes = tensor.data_ptr(), tensor.nbytes
        if not nbytes or key in self._ignored or any(key in w for w in self._weights.values()):
            return 0, 0
        with self._lock:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self.current += nbytes
                self.peak = max(self.peak, self.current)
                self.window_peak = max(self.window_peak, self.current)
        return key, nbytes

    def release(self, key: int, nbytes: int) -> None:
        """Count a tensor as freed."""
        if not nbytes:
            return
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.current -= nbytes

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which each tensor saved by autograd counts until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: CountedTensor(self, tensor), lambda counted: counted.tensor
        )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class CountedTensor:
    """Holds a tensor's values; a meter counts them as long as this object lives.

    It does not hold the tensor itself: autograd also saves outputs, which would hold the graph
    that holds them.
    """

    __slots__ = ("_key", "_meter", "_nbytes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._meter = meter
        self._key, self._nbytes = meter.acquire(tensor)

    def __del__(self) -> None:
        self._meter.release(self._key, self._nbytes)

"""Activations held for backwards: their number and bytes, and those that wait in other memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesim.errors import ExecutionError


class ActivationCounter:
    """Counts the micro-batches whose activations a device holds, over all its stages."""

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
    """Counts the bytes that a stage holds for its backward: each storage once.

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


def counted_tensors(
    meter: ActivationMeter | None, tensors: Iterable[Tensor]
) -> tuple[CountedTensor, ...]:
    """Count tensors with a meter; none without."""
    return () if meter is None else tuple(CountedTensor(meter, x) for x in tensors)


# Activations of a micro-batch that wait on the host or on a peer, from OFFLOAD to RELOAD.
#
# Autograd saves tensors for the backward. In a forward that will be offloaded, saved-tensor hooks
# put each of them into a `_Slot`. OFFLOAD copies whole storages of slots and inputs there, and
# RELOAD copies them back::
#
#     F        autograd -> slot -> tensor                storage on the device
#     OFFLOAD  autograd -> slot                          copy in other memory
#     RELOAD   autograd -> slot -> tensor                a new storage with the same bytes
#
# So backwards read the same bits, with the same shapes and strides. Parameters, buffers, tensors
# that are attributes of modules, and tensors of the batch stay on the device.

_PLAIN = (Tensor, nn.Parameter)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {x.untyped_storage().data_ptr() for x in tensors if x.layout == torch.strided}


def module_storages(module: nn.Module) -> set[int]:
    """Return the addresses of parameters, buffers and other tensors that a module has."""
    held = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        held += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return storages(held)


class _Slot:
    """Place of one saved tensor, which may be in other memory.

    The tensor has no graph; it is None while it is there, and so is what counts its bytes.
    """

    __slots__ = ("__weakref__", "counted", "tensor", "version")

    def __init__(self, tensor: Tensor, meter: ActivationMeter | None) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.counted = None if meter is None else CountedTensor(meter, tensor)


def _unpack(slot: _Slot) -> Tensor:
    """Return a saved tensor to the backward."""
    if slot.tensor is None:
        raise ExecutionError("a backward needs activations that were offloaded: no RELOAD ran")
    if slot.tensor._version != slot.version:
        raise ExecutionError(
            "a tensor that a backward needs was changed in place after its forward had saved it; "
            "let the module clone it first"
        )
    return slot.tensor


class _View(NamedTuple):
    """Place of a tensor in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self, data: Tensor) -> Tensor:
        """Return a tensor at this place in the storage of ``data``, all of whose bytes it has."""
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), self.offset, self.size, self.stride)


class _Moved(NamedTuple):
    """The slots and leaves that need a storage which was moved."""

    slots: tuple[tuple[weakref.ref[_Slot], _View], ...]
    leaves: tuple[tuple[int, _View], ...]


#: Copies tensors to or from other memory.
Copy = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class SavedActivations:
    """Tensors that the forward of one micro-batch saved, some of which may be in other memory.

    ``leaves`` are the inputs of the stage. Their storages may be moved too, but none at an address
    in ``kept``. The meter counts the bytes on the device.
    """

    def __init__(
        self, leaves: Sequence[Tensor], meter: ActivationMeter | None, kept: set[int]
    ) -> None:
        self.leaves, self.meter, self.kept = leaves, meter, kept
        self._counted_leaves = [None if meter is None else CountedTensor(meter, x) for x in leaves]
        self._slots: list[weakref.ref[_Slot]] = []
        self._moved: list[_Moved] = []
        self._copies: Sequence[Tensor] = ()
        self._counted_copies: tuple[CountedTensor, ...] = ()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which saved tensors go to slots."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(tensor, self.meter)
        self._slots.append(weakref.ref(slot))
        return slot

    def offload(
        self, share: float, copy: Copy, meter: ActivationMeter | None = None
    ) -> tuple[Tensor, ...]:
        """Copy whole storages, largest first; return them, which nothing else holds.

        At most ``share`` of the bytes that can be moved are. The caller holds the result until the
        current stream has copied it. ``meter`` counts the copies.
        """
        holders = self._holders()
        sizes = {key: held[0].untyped_storage().nbytes() for key, (held, *_) in holders.items()}
        most, total, moved = share * sum(sizes.values()), 0, []
        for key in sorted(sizes, key=lambda key: -sizes[key]):  # of equal ones, the first saved
            if total + sizes[key] <= most:
                moved.append(key)
                total += sizes[key]
        data = tuple(_whole(holders[key][0][0]) for key in moved)
        self._copies = copy(data)
        self._counted_copies = counted_tensors(meter, self._copies)
        for key in moved:
            self._drop(*holders[key])
        return data

    def reload(self, copy: Copy) -> int:
        """Copy all storages back; return their bytes."""
        copies, total = copy(self._copies), 0
        for moved, data in zip(self._moved, copies, strict=True):
            for reference, view in moved.slots:
                if (slot := reference()) is not None:
                    slot.tensor = view.tensor(data)
                    slot.version = slot.tensor._version
                    if self.meter is not None:
                        slot.counted = CountedTensor(self.meter, slot.tensor)
            for number, view in moved.leaves:
                self.leaves[number].data = view.tensor(data)
                if self.meter is not None:
                    self._counted_leaves[number] = CountedTensor(self.meter, self.leaves[number])
            total += data.nbytes
        self._moved.clear()
        self._copies = self._counted_copies = ()
        return total

    def _holders(self) -> dict[int, tuple[list[Tensor], list[_Slot], list[int]]]:
        """Return tensors, slots and leaves of each storage that can be moved, by its address."""
        holders: dict[int, tuple[list[Tensor], list[_Slot], list[int]]] = {}
        kept = set(self.kept)
        slots = [slot for reference in self._slots if (slot := reference()) is not None]
        tensors = [
            *((x.tensor, x, -1) for x in slots),
            *((x, None, k) for k, x in enumerate(self.leaves)),
        ]
        for tensor, slot, number in tensors:
            if tensor is None or tensor.layout != torch.strided:
                continue
            key = tensor.untyped_storage().data_ptr()
            is_plain = type(tensor) in _PLAIN and not (tensor.is_conj() or tensor.is_neg())
            is_plain = is_plain and tensor.untyped_storage().nbytes() % tensor.itemsize == 0
            if not is_plain or tensor.is_quantized or (slot and tensor._version != slot.version):
                kept.add(key)
            held, of_slots, of_leaves = holders.setdefault(key, ([], [], []))
            held.append(tensor)
            if slot is not None:
                of_slots.append(slot)
            else:
                of_leaves.append(number)
        return {key: held for key, held in holders.items() if key and key not in kept}

    def _drop(self, tensors: list[Tensor], slots: list[_Slot], leaves: list[int]) -> None:
        """Drop all references to a storage that was copied."""
        of_slots = [
            (weakref.ref(x), _View.from_tensor(x.tensor)) for x in slots if x.tensor is not None
        ]
        of_leaves = [(number, _View.from_tensor(self.leaves[number])) for number in leaves]
        for slot in slots:
            slot.tensor = slot.counted = None
        for number in leaves:
            leaf = self.leaves[number]
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            self._counted_leaves[number] = None
        self._moved.append(_Moved(tuple(of_slots), tuple(of_leaves)))


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, without a graph."""
    one = tensor.detach()
    return one.as_strided((one.untyped_storage().nbytes() // one.itemsize,), (1,), 0)

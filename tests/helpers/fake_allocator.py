"""A stand-in for torch's allocator of a GPU, beside the stand-in for its streams."""

from __future__ import annotations

from typing import Any

import torch
from fake_cuda import FakeCuda, FakeGpu, FakeStream
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class FakeAllocator(TorchDispatchMode):
    """Bytes taken from torch's allocator by a host that is a whole step ahead of the GPU.

    Freed memory is free at once, but for memory that `torch.Tensor.record_stream` keeps for another
    stream: the allocator would find no such stream at the end of its work. Only what the calling
    thread takes while the mode is on counts.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.cuda = cuda
        self._memory: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._kept: set[int] = set()
        cuda.observers.append(self)

    def allocated(self, device: torch.device | None = None) -> int:
        """Return the bytes of tensors; of all GPUs, which are one."""
        return sum(nbytes for held, nbytes, _ in self._memory.values() if not held.expired())

    def active(self, device: torch.device | None = None) -> int:
        """Return the same, and the bytes that are kept for other streams."""
        self._memory = {
            key: memory
            for key, memory in self._memory.items()
            if key in self._kept or not memory[0].expired()
        }
        return sum(nbytes for _, nbytes, _ in self._memory.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            # The weak reference keeps the key of a storage from being used again.
            if storage is not None and storage._cdata not in self._memory:
                reference = StorageWeakRef(storage)
                number = self.cuda.current_stream().number
                self._memory[storage._cdata] = (reference, storage.nbytes(), number)
        return output

    def kept(self, tensor: Tensor, stream: FakeStream) -> None:
        """Note memory that is kept for a stream other than its own."""
        key = tensor.untyped_storage()._cdata
        if key in self._memory and self._memory[key][2] != stream.number:
            self._kept.add(key)

    def recorded(self, event: Any, stream: Any) -> None:
        """Do nothing, as in the next two."""

    def waited(self, stream: Any, event: Any) -> None: ...

    def synchronized(self, stream: Any) -> None: ...


class CountedGpu(FakeGpu):
    """A stand-in whose copies on the host do not count."""

    def to_host(self, data: Tensor) -> Tensor:
        with _disable_current_modes():
            return super().to_host(data)

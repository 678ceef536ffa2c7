"""`OperationLog`: operations on tensors without data, and the values that they give.

Tensors change their shape, their storage and their values while a constructor runs. So the log
keeps a `View` of each argument and result, as it is when the operation runs.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from pipeexec.nesting import tensors_in
from pipesim.errors import ExecutionError

#: Bytes of tensors after which freed memory goes back to the operating system.
_TRIMMED_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class View:
    """A tensor without data at one time: its storage, which stays alive, and its place in it."""

    storage: UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def at_present(cls, tensor: Tensor) -> View:
        """Return the view that a tensor is now."""
        return cls(
            tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(),
            int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    @property
    def key(self) -> int:
        """Number of the storage."""
        number: int = self.storage._cdata
        return number

    @property
    def is_whole(self) -> bool:
        """Whether the storage has no other elements."""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor that is this view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype)
        tensor = tensor.set_(storage, self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    def has_layout(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same place in its storage."""
        other = View.at_present(tensor)
        return (self.dtype, self.shape, self.stride, self.offset, self.is_conj, self.is_neg) == (
            other.dtype, other.shape, other.stride, other.offset, other.is_conj, other.is_neg,
        )  # fmt: skip


class Draw(NamedTuple):
    """A generator of random numbers, and its state before an operation draws from it."""

    generator: Generator
    state: Tensor

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the generator draw the same numbers again; it is as before at the end."""
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(present)


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes
    ----------
    function, args, kwargs
        The function and its arguments; views in place of tensors without data.
    read, written, results
        Views: arguments, those of them that the operation changes, and the results.
    dtype
        The default dtype at that time.
    draw
        The generator that it draws from; None if it draws no random numbers.
    dependence
        Values of its results depend on ``"values"`` of arguments, or on their ``"shapes"`` alone.
        ``"nothing"`` defines the values of `torch.empty`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: tuple[View, ...]
    written: tuple[View, ...]
    results: tuple[View, ...]
    dtype: torch.dtype
    draw: Draw | None
    dependence: Literal["nothing", "shapes", "values"]

    @property
    def keys(self) -> set[int]:
        """Storages of arguments and results."""
        return {view.key for view in (*self.read, *self.results)}

    @property
    def changed(self) -> set[int]:
        """Storages that the operation makes or changes; those of views of arguments, too."""
        return {view.key for view in (*self.written, *self.results)}

    @property
    def is_fill(self) -> bool:
        """Whether random numbers replace all values of the only storage."""
        has_one = self.draw is not None and len(self.read) == len(self.written) == 1
        return has_one and self.read[0].is_whole

    def run(self, real: dict[int, UntypedStorage]) -> None:
        """Run the operation on storages with data, and add those of its results."""
        args, kwargs = pytree.tree_map_only(
            View, lambda view: view.tensor(real[view.key]), (self.args, self.kwargs)
        )
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.no_grad():
                results = tensors_in(self.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)
        for view, result in zip(self.results, results, strict=True):
            if view.key in real:
                continue
            if view.has_layout(result):
                real[view.key] = result.untyped_storage()
            else:  # later views of it have the layout that it has without data
                real[view.key] = UntypedStorage(view.storage.nbytes())
                view.tensor(real[view.key]).copy_(result)


class OperationLog:
    """Operations in order, and the values of storages after them.

    Storages that the last values depend on stay in memory while tensors have them, until the second
    operation that draws. So a loop that draws until all values are inside limits runs each
    operation twice: once in the constructor, and once at the end.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._changes: defaultdict[int, list[int]] = defaultdict(list)  # operations, by storage
        self._defined: set[int] = set()  # storages that have values
        self._real: dict[int, UntypedStorage] = {}  # as they are after the first `_end` operations
        self._end = 0
        self._stays = False  # whether the next operation that draws leaves them in memory
        self._n_bytes = 0  # of tensors of operations that ran since memory was trimmed

    def append(self, operation: Operation) -> None:
        """Add an operation. If it draws, run it once, so that its generator goes on."""
        if operation.draw is not None:
            wanted = set() if operation.is_fill else {view.key for view in operation.read}
            self._advance(wanted | (set(self._real) if self._stays else set()))
            self._stays = False
            missing = [view for view in operation.read if view.key not in self._real]
            real = self._real | {x.key: UntypedStorage(x.storage.nbytes()) for x in missing}
            self._run_one(operation, real)
            self._real = real  # unless it fails
        self.append_done(operation)
        if operation.draw is not None:
            self._end = len(self._operations)

    def append_done(self, operation: Operation) -> None:
        """Add an operation that does not need to run now."""
        for key in operation.changed:
            self._changes[key].append(len(self._operations))
        self._operations.append(operation)
        written = {view.key for view in operation.written}
        sources = {view.key for view in operation.read} - written
        is_defined = operation.dependence == "shapes" or operation.draw or sources <= self._defined
        if operation.dependence != "nothing" and is_defined:
            self._defined |= written | (operation.changed - sources)

    def has(self, view: View) -> bool:
        """Return whether an operation made the storage of a view."""
        return view.key in self._changes

    def is_defined(self, view: View) -> bool:
        """Return whether an operation gave values to the storage of a view."""
        return view.key in self._defined

    def values(self, views: Sequence[View]) -> list[Tensor]:
        """Return copies of the present values of some views."""
        self._advance({view.key for view in views})
        self._stays = True
        return [view.tensor(self._real[view.key]).clone() for view in views]

    def last_values(self, views: Sequence[View]) -> list[Tensor]:
        """Return the values of some views at the end; those of one storage share memory."""
        wanted = {view.key for view in views}
        self._real = {}
        numbers, _ = self._needed(wanted, 0)
        real: dict[int, UntypedStorage] = {}
        self._run(numbers, real, lambda key: key in wanted)
        return [view.tensor(real[view.key]) for view in views]

    def _advance(self, wanted: set[int]) -> None:
        """Bring some storages, and those that they depend on, into memory as they are now."""
        numbers, keys = self._needed(wanted, self._end)
        if any(self._changes[key][0] < self._end and key not in self._real for key in keys):
            self._real = {}
            numbers, keys = self._needed(wanted, 0)
        self._real = {key: x for key, x in self._real.items() if key in keys}
        self._run(numbers, self._real, lambda key: key in wanted or _has_tensors(key))
        self._end = len(self._operations)

    def _run(
        self, numbers: list[int], real: dict[int, UntypedStorage], stays: Callable[[int], bool]
    ) -> None:
        """Run operations again, and free each storage after the last of them unless it stays."""
        last = {key: number for number in numbers for key in self._operations[number].keys}
        for number in numbers:
            operation = self._operations[number]
            with operation.draw.again() if operation.draw is not None else nullcontext():
                self._run_one(operation, real)
            for key in operation.keys:
                if last[key] == number and not stays(key):
                    del real[key]

    def _run_one(self, operation: Operation, real: dict[int, UntypedStorage]) -> None:
        """Run an operation, and at times give memory back to the operating system."""
        operation.run(real)
        self._n_bytes += sum(
            view.storage.nbytes() for view in (*operation.read, *operation.results)
        )
        if self._n_bytes > _TRIMMED_BYTES:
            self._n_bytes = 0
            _trim_memory()

    def _needed(self, wanted: Iterable[int], start: int) -> tuple[list[int], set[int]]:
        """Return operations from a start that some storages need, and all storages of these.

        Raises
        ------
        ExecutionError
            If no operation makes one of the storages.
        """
        numbers: set[int] = set()
        keys: set[int] = set()
        pending = list(wanted)
        while pending:
            key = pending.pop()
            if key in keys:
                continue
            keys.add(key)
            changes = self._changes.get(key)
            if changes is None:
                raise ExecutionError(
                    "the constructor takes a tensor without data that it did not make; make the "
                    "model and give it itself"
                )
            for number in changes[bisect_left(changes, start) :]:
                if number not in numbers:
                    numbers.add(number)
                    pending.extend(self._operations[number].keys)
        return sorted(numbers), keys


def _has_tensors(key: int) -> bool:
    """Return whether tensors have a storage of the log."""
    return torch._C._storage_Use_Count(key) > 1


def _trim_memory() -> None:
    """Give freed memory back to the operating system, if the C library can.

    Parts of the log lie between tensors that were freed, and keep `malloc` from using it again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)

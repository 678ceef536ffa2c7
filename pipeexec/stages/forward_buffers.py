"""`ForwardBuffers`: the buffers that a forward saw, kept for its recompute.

A recompute repeats the forward of its micro-batch. Forwards of other micro-batches come between
them, and may change buffers: counters, running statistics, vectors of spectral norm. So a forward
keeps the old values of what it changes, and the recompute runs on them::

    F0  counter 0 -> 1, keeps 0
    F1  counter 1 -> 2, keeps 1
    R0  runs on the kept 0; the module's counter stays 2

Most buffers never change. A module is watched in its first step: each forward copies all buffers,
and compares them afterwards. Kernels of batch norm change running statistics without counting a
version, so values are compared too. Later forwards copy only buffers that changed in place before,
and read the version counters of the others. A buffer that is replaced (``self.n = self.n + 1``)
needs no copy: the old tensor is kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from pipesim.errors import ExecutionError


class _Missing(enum.Enum):
    MISSING = 0


_NO_CONTEXT = nullcontext()
_MISSING: Literal[_Missing.MISSING] = _Missing.MISSING
#: A buffer; None where it has no tensor, missing before the forward that registers it.
Buffer = Tensor | None | Literal[_Missing.MISSING]


class Slot:
    """A name under which a module has, or will have, a buffer.

    Attributes
    ----------
    module, key
        The module, and the name of the buffer there.
    path
        Name of the buffer in the stage.
    """

    __slots__ = ("key", "module", "path")

    def __init__(self, module: nn.Module, key: str, path: str) -> None:
        self.module, self.key, self.path = module, key, path

    def get(self) -> Buffer:
        """Return the present buffer."""
        return self.module._buffers.get(self.key, _MISSING)

    def set(self, buffer: Buffer) -> None:
        """Replace the present buffer, without the module's own checks."""
        if buffer is _MISSING:
            self.module._buffers.pop(self.key, None)
        else:
            self.module._buffers[self.key] = buffer


#: Buffers by their place.
Buffers = dict[Slot, Buffer]


@contextmanager
def use_buffers(buffers: Buffers) -> Iterator[None]:
    """Let modules have other buffers in a block; ``buffers`` then has what the block made of them.

    `torch.func.functional_call` does the same, but leaves its tensors in a module that is used
    twice.
    """
    own = [(slot, slot.get()) for slot in buffers]
    for slot, buffer in buffers.items():
        slot.set(buffer)
    try:
        yield
    finally:
        for slot, buffer in own:
            buffers[slot] = slot.get()
            slot.set(buffer)


class ForwardBuffers:
    """Keeps the buffers of a stage that forwards change, as each micro-batch's F saw them.

    Kept buffers do not count as activations: they are small, and the simulator does not know them.

    Parameters
    ----------
    module, index
        Module and number of the stage.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.index = module, index
        self._slots: list[Slot] = []
        self._slot_keys: set[tuple[int, str]] = set()
        self._owners: list[nn.Module] = []
        self._find_slots()
        # Changed in place by a forward before, so that each forward copies them.
        self._copied: set[Slot] = set()
        # Training modes of modules: those in which no step has ended yet are watched.
        self._learned: set[tuple[bool, ...]] = set()
        self._modes: set[tuple[bool, ...]] = set()
        self._has_grown = False  # since the last step ended, a buffer got its first tensor
        self._kept: dict[int, Buffers] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a recompute is to come, so that no forward may change a buffer unnoticed."""
        return bool(self._kept)

    def watch(self, microbatch: int | None) -> AbstractContextManager[None]:
        """Keep the buffers that a forward changes in a block, for R of ``microbatch``.

        None for a forward without R, which may change buffers that other micro-batches need.

        Raises
        ------
        ExecutionError
            If the forward changes a buffer in place that no forward of the first step did: its
            values are lost. They are copied from then on.
        """
        has_none = not self._slots and self._learned
        return _NO_CONTEXT if has_none else self._watch(microbatch)

    @contextmanager
    def _watch(self, microbatch: int | None) -> Iterator[None]:
        mode = tuple([owner.training for owner in self._owners])
        learns = mode not in self._learned
        if learns:
            self._modes.add(mode)
            self._find_slots()
        before = [(slot, x := slot.get(), tensor_version(x)) for slot in self._slots]
        copied = () if microbatch is None else self._copied
        copies = {
            slot: x.detach().clone()
            for slot, x, _ in before
            if (learns or slot in copied) and isinstance(x, Tensor)
        }
        yield
        if learns:
            before += [(slot, _MISSING, 0) for slot in self._find_slots()]
        kept: Buffers = {}
        for slot, old, version in before:
            copy = copies.get(slot)
            if slot in self._copied:
                if microbatch is not None:
                    kept[slot] = old if copy is None else copy
            elif is_changed_in_place(old, version, copy if slot.get() is old else None):
                self._copied.add(slot)
                if copy is None:
                    raise self._lost_values(slot)
                self._keep_for_others(slot, copy.clone())
                kept[slot] = copy
            elif slot.get() is not old:
                self._keep_for_others(slot, old)
                kept[slot] = old
                self._has_grown |= not isinstance(old, Tensor)
        if microbatch is not None:
            self._kept[microbatch] = kept

    def _keep_for_others(self, slot: Slot, buffer: Buffer) -> None:
        """Keep a buffer for micro-batches whose F left it alone: it was the same then."""
        for kept in list(self._kept.values()):
            kept.setdefault(slot, buffer)

    def _lost_values(self, slot: Slot) -> ExecutionError:
        return ExecutionError(
            f"stage {self.index} is recomputed, and changed its buffer {slot.path!r} in place, "
            "which no forward of its first step did: a recompute needs the old values, which are "
            "lost. They are kept from the next step on; to run this one, let the module assign a "
            "new tensor to the buffer instead"
        )

    def recompute(self, microbatch: int) -> Buffers:
        """Return the changed buffers as F of a micro-batch saw them, and forget them."""
        return self._kept.pop(microbatch, {})

    def copies(self, microbatch: int) -> Buffers:
        """Return copies of the buffers kept for a micro-batch."""
        return {
            slot: x.clone() if isinstance(x, Tensor) else x
            for slot, x in self._kept.get(microbatch, {}).items()
        }

    def earliest(self, microbatches: Sequence[int]) -> Buffers:
        """Return the changed buffers as they were before the forwards of several micro-batches."""
        buffers: Buffers = {}
        for microbatch in microbatches:
            for slot, buffer in self._kept.get(microbatch, {}).items():
                buffers.setdefault(slot, buffer)
        return buffers

    def present(self) -> Buffers:
        """Return copies of all buffers as they are now."""
        return {
            slot: x.clone() if isinstance(x := slot.get(), Tensor) else x for slot in self._slots
        }

    def end_step(self) -> None:
        """End a step: buffers that have not changed in it are not expected to.

        A buffer that got its first tensor in the step is watched in the next one too.
        """
        if not self._has_grown:
            self._learned.update(tuple(self._modes))
        self._modes.clear()
        self._has_grown = False

    def forget(self, microbatch: int) -> None:
        """Drop the buffers of a micro-batch, if there are any."""
        self._kept.pop(microbatch, None)

    def clear(self) -> None:
        """Drop the buffers of all micro-batches, after a failure; the next step is watched."""
        self._kept.clear()
        self._learned.clear()

    def _find_slots(self) -> list[Slot]:
        """Note buffers that were registered since the last call, and return them."""
        new = [
            Slot(part, key, f"{name}.{key}" if name else key)
            for name, part in self.module.named_modules()
            for key in part._buffers
            if (id(part), key) not in self._slot_keys
        ]
        if new:
            self._slots += new
            self._slot_keys |= {(id(slot.module), slot.key) for slot in new}
            self._owners = [
                part for part in self.module.modules() if any(x._buffers for x in part.modules())
            ]
        return new


def tensor_version(value: object) -> int:
    """Return the version counter of a tensor; 0 for a value that cannot change in place."""
    return 0 if not isinstance(value, Tensor) or value.is_inference() else value._version


def is_changed_in_place(buffer: Buffer, version: int, copy: Tensor | None) -> bool:
    """Return whether a buffer has another version, or other values than an earlier copy."""
    if not isinstance(buffer, Tensor):
        return False
    if tensor_version(buffer) != version:
        return True
    return copy is not None and buffer.layout == torch.strided and not torch.equal(copy, buffer)

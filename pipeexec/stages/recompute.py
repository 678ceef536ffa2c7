"""Let a recompute repeat its forward: on the same buffers, and on unchanged other state."""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipesim.errors import ExecutionError

# `ForwardBuffers`: the buffers that a forward saw, kept for its recompute.
#
# A recompute repeats the forward of its micro-batch. Forwards of other micro-batches come between
# them, and may change buffers: counters, running statistics, vectors of spectral norm. So a
# forward keeps the old values of what it changes, and the recompute runs on them::
#
#     F0  counter 0 -> 1, keeps 0
#     F1  counter 1 -> 2, keeps 1
#     R0  runs on the kept 0; the module's counter stays 2
#
# Most buffers never change. A module is watched in its first step: each forward copies all
# buffers, and compares them afterwards. Kernels of batch norm change running statistics without
# counting a version, so values are compared too. Later forwards copy only buffers that changed in
# place before, and read the version counters of the others. A buffer that is replaced (``self.n =
# self.n + 1``) needs no copy: the old tensor is kept.


class _Missing(enum.Enum):
    MISSING = 0


#: Context of a call that needs none.
NO_CONTEXT = nullcontext()
_MISSING: Literal[_Missing.MISSING] = _Missing.MISSING
#: A buffer; None where it has no tensor, missing before the forward that registers it.
Buffer = Tensor | None | Literal[_Missing.MISSING]


class Slot:
    """A name under which a module has, or will have, a buffer; ``path`` is that in the stage."""

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


def use_buffers(buffers: Buffers) -> AbstractContextManager[None]:
    """Let modules have other buffers in a block; ``buffers`` then has what the block made of them.

    `torch.func.functional_call` does the same, but leaves its tensors in a module that is used
    twice.
    """
    return _exchanged(buffers) if buffers else NO_CONTEXT


@contextmanager
def _exchanged(buffers: Buffers) -> Iterator[None]:
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

        None for a forward without R, which may change buffers that other micro-batches need. A
        buffer that is changed in place, and was by no forward of the first step, raises
        `ExecutionError`: its values are lost. They are copied from then on.
        """
        has_none = not self._slots and self._learned
        return NO_CONTEXT if has_none else self._watch(microbatch)

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


# `ModuleState`: state of a module outside its buffers, which a recompute cannot restore.
#
# A recompute runs a forward again, on the buffers that the forward saw. Attributes of Python and
# parameters stay as other forwards have left them. The first forward of a stage that is recomputed
# shows whether this matters::
#
#     state 0   F   state 1   F of the same input   state 2
#
# - A forward that leaves its state as it was is repeatable.
# - State 1 differs from state 0, but not from state 2: a cache that is filled once, or a result
#   that each forward computes anew. The forward is repeatable if both outputs are equal.
# - State 2 differs from state 1: a counter, a list that grows. The forward is not repeatable.
#
# Not every state is seen: objects of torch, numpy and the standard library count as unchanged,
# apart from tensors, arrays, generators and containers.

#: Attributes that all modules have: tables of parameters, modules and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "pipeexec"}
_MAX_DEPTH = 4  # of containers and objects in an attribute
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class StateChange(NamedTuple):
    """An attribute or a parameter that a forward has changed, and its module in the stage."""

    path: str
    module: nn.Module
    name: str
    value: object


class _TensorState(NamedTuple):
    tensor: Tensor
    version: int


class ModuleState:
    """Attributes and parameters of a module and its parts, at one moment.

    ``weights`` are parameters by name in place of the module's own.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        self._changes: list[StateChange] = []
        self._states: dict[tuple[int, str], object] = {}
        modules = dict(module.named_modules())
        for path, part in modules.items():
            for name, value in list(vars(part).items()):
                if name not in MODULE_ATTRIBUTES:
                    self._add(StateChange(path, part, name, value), _state(value, set()))
        for name, parameter in (weights or dict(module.named_parameters())).items():
            path, _, key = name.rpartition(".")
            owner = modules[path]
            # Forwards limit norms of rows in place, which a second one leaves alone.
            if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None:
                continue
            state = (id(parameter), tensor_version(parameter))
            self._add(StateChange(path, owner, key, parameter), state)

    def _add(self, entry: StateChange, state: object) -> None:
        self._changes.append(entry)
        self._states[id(entry.module), entry.name] = state

    def changes(self, before: ModuleState) -> list[StateChange]:
        """Return what differs from an earlier state of the same module."""
        missing = object()
        return [
            entry
            for entry in self._changes
            if not _is_same(
                before._states.get((id(entry.module), entry.name), missing),
                self._states[id(entry.module), entry.name],
            )
        ]


def not_repeatable(index: int, change: StateChange, lasts: bool, remedy: str) -> ExecutionError:
    """Return the error of a stage that is recomputed, and not repeatable.

    ``lasts`` tells whether the second forward has changed the state too, or else has given another
    output; ``remedy`` how to keep activations instead, such as ``recompute='never'``.
    """
    place = f"its module {change.path!r}" if change.path else "its module"
    where = f"{place} ({type(change.module).__name__})"
    reason = (
        "in every forward, so a recompute would start from another value than its forward"
        if lasts
        else "in a forward, and a second forward of the same input gave another output"
    )
    if isinstance(change.value, nn.Parameter):
        kind, advice = "parameter", "let the forward compute a new tensor from it"
    elif isinstance(change.value, torch.Generator):
        kind, advice = "generator", "let it draw from torch's generator (generator=None)"
    else:
        kind, advice = "attribute", "make it a buffer (register_buffer)"
    return ExecutionError(
        f"stage {index} is recomputed, and {where} changes its {kind} {change.name!r} {reason}: "
        f"{advice}, or choose {remedy}"
    )


def same_tensors(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether two forwards gave the same tensors, up to rounding by atomic sums of GPUs."""
    return len(first) == len(second) and all(map(_is_close, first, second))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if not a.numel() or a.layout != torch.strided:
        return True
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    tolerance = 64 * torch.finfo(a.dtype).eps
    largest = float(a.detach().abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)


def _state(value: object, visited: set[int], depth: int = 0) -> object:
    """Return a copy of a value that `_is_same` compares; of opaque objects, the type."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Tensor):
        return _TensorState(value, tensor_version(value))
    if isinstance(value, torch.Generator):
        return _TensorState(value.get_state(), 0)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if id(value) in visited or depth > _MAX_DEPTH:
        return type(value)
    visited.add(id(value))
    if isinstance(value, Mapping):
        return _state_of_items(value, value, visited, depth)
    if isinstance(value, (list, tuple, deque)):
        return [type(value), *(_state(x, visited, depth + 1) for x in list(value))]
    if isinstance(value, (set, frozenset)):
        return set(value)
    is_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    is_own = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))
    if isinstance(value, SimpleNamespace) or (is_own and not is_library):
        return _state_of_items(value, vars(value), visited, depth)
    return type(value)


def _state_of_items(
    value: object, items: Mapping[Any, Any], visited: set[int], depth: int
) -> dict[object, object]:
    states = {key: _state(x, visited, depth + 1) for key, x in list(items.items())}
    return {type: type(value), **states}


def _is_same(a: object, b: object) -> bool:
    """Return whether two copies of a value are equal."""
    if isinstance(a, _TensorState) and isinstance(b, _TensorState):
        if a.tensor is b.tensor:
            return a.version == b.version
        return _is_close(a.tensor, b.tensor)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        assert isinstance(b, (list, tuple))
        return _are_same(a, b)
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return a.keys() == b.keys() and _are_same(a.values(), b.values())
    return bool(a == b) or (a != a and b != b)  # NaN is no change


def _are_same(a: Iterable[object], b: Iterable[object]) -> bool:
    first, second = list(a), list(b)
    return len(first) == len(second) and all(map(_is_same, first, second))

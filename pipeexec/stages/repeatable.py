"""`ModuleState`: state of a module outside its buffers, which a recompute cannot restore.

A recompute runs a forward again, on the buffers that the forward saw. Attributes of Python and
parameters stay as other forwards have left them. The first forward of a stage that is recomputed
shows whether this matters::

    state 0   F   state 1   F of the same input   state 2

- A forward that leaves its state as it was is repeatable.
- State 1 differs from state 0, but not from state 2: a cache that is filled once, or a result that
  each forward computes anew. The forward is repeatable if both outputs are equal.
- State 2 differs from state 1: a counter, a list that grows. The forward is not repeatable.

Not every state is seen: objects of torch, numpy and the standard library count as unchanged, apart
from tensors, arrays, generators and containers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.stages.forward_buffers import tensor_version
from pipesim.errors import ExecutionError

#: Attributes that all modules have: tables of parameters, modules and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "pipeexec"}
_MAX_DEPTH = 4  # of containers and objects in an attribute
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class StateChange(NamedTuple):
    """An attribute or a parameter that a forward has changed.

    Attributes
    ----------
    path, module
        Name of the module in the stage, and the module.
    name
        Name of the attribute or parameter.
    value
        Its present value.
    """

    path: str
    module: nn.Module
    name: str
    value: object


class _TensorState(NamedTuple):
    tensor: Tensor
    version: int


class ModuleState:
    """Attributes and parameters of a module and its parts, at one moment.

    Parameters
    ----------
    module
        The module.
    weights
        Parameters by name in place of the module's own.
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
            if _limits_norms(modules[path]):
                continue
            state = (id(parameter), tensor_version(parameter))
            self._add(StateChange(path, modules[path], key, parameter), state)

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

    Parameters
    ----------
    index
        Number of the stage.
    change
        State that its forward changes.
    lasts
        Whether the second forward has changed it too, or else has given another output.
    remedy
        How to keep activations instead, such as ``recompute='never'``.
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
    if isinstance(value, SimpleNamespace) or _is_own_object(value):
        return _state_of_items(value, vars(value), visited, depth)
    return type(value)


def _state_of_items(
    value: object, items: Mapping[Any, Any], visited: set[int], depth: int
) -> dict[object, object]:
    states = {key: _state(x, visited, depth + 1) for key, x in list(items.items())}
    return {type: type(value), **states}


def _is_own_object(value: object) -> bool:
    """Return whether a value is an object of a class of the user's, but no module."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and library not in _LIBRARIES and not _is_module(value)


def _limits_norms(module: nn.Module) -> bool:
    """Return whether forwards limit norms of rows in place, which a second one leaves alone."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _is_module(value: object) -> bool:
    return isinstance(value, (nn.Module, type))


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

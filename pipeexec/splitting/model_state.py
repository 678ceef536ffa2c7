"""State of modules beside their parameters: buffers, attributes, containers, and random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["ModelState", "attributes", "unchanged"]

_CONTAINERS = (list, dict, set, deque)
#: Attributes that torch keeps in every module.
_OF_TORCH = frozenset(nn.Module().__dict__)


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are not torch's, and its buffers."""
    for key, value in (*module.__dict__.items(), *module._buffers.items()):
        if key not in _OF_TORCH:
            yield key, value


class _Kept(NamedTuple):
    """A module as it was.

    Attributes
    ----------
    module
        The module.
    attributes
        Its attributes, with those of torch.
    contents
        Its containers, and torch's dicts, each with a copy.
    """

    module: nn.Module
    attributes: dict[str, Any]
    contents: list[tuple[Any, Any]]


class ModelState:
    """State of models at one time.

    Parameters
    ----------
    models
        The models. Tensors are copied, but for parameters.
    """

    def __init__(self, *models: nn.Module) -> None:
        modules = {id(x): x for model in models for x in model.modules()}
        self._kept = [
            _Kept(x, dict(x.__dict__), [(v, _copy(v)) for v in x.__dict__.values() if _holds(v)])
            for x in modules.values()
        ]
        tensors = {
            id(value): value
            for module in modules.values()
            for _, value in attributes(module)
            if isinstance(value, Tensor)
        }
        self._tensors = [
            (x, x._version, x.detach().clone()) for x in tensors.values() if not x.is_meta
        ]
        self._values = {id(x): copy for x, _, copy in self._tensors}
        parameters = (x for module in modules.values() for x in module._parameters.values())
        self._versions = {
            id(x): x._version for x in (*tensors.values(), *parameters) if x is not None
        }

    def changed(self) -> dict[int, tuple[str, ...]]:
        """Return the attributes of each module, by its id, that are others now."""
        result = {}
        for module, before, contents in self._kept:
            copies = {id(x): copy for x, copy in contents}
            buffers = copies[id(before["_buffers"])]
            old = before | buffers
            names = [
                key
                for key, value in attributes(module)
                if key not in old or _differs(old[key], value, copies) or self._is_written(value)
            ]
            names += [key for key, x in module._parameters.items() if self._is_written(x)]
            if module.training and getattr(module, "track_running_stats", False):
                names += [key for key in buffers if key not in names]  # without data, too
            if names:
                result[id(module)] = tuple(names)
        return result

    def _is_written(self, value: Any) -> bool:
        """Return whether a value is a tensor that has other values now.

        Batch norms do not count the versions of their running statistics.
        """
        if not isinstance(value, Tensor) or id(value) not in self._versions:
            return False
        copy = self._values.get(id(value))
        if copy is None or value._version != self._versions[id(value)]:
            return value._version != self._versions[id(value)]
        return not _same(value, copy)

    def restore(self) -> None:
        """Let everything be as it was, but for parameters."""
        for module, before, contents in self._kept:
            for container, copy in contents:
                if len(container) != len(copy) or any(
                    a is not b for a, b in zip(_items(container), _items(copy), strict=True)
                ):
                    _refill(container, copy)
            module.__dict__.clear()
            module.__dict__.update(before)
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if tensor._version != version or not _same(tensor, value):
                    tensor.copy_(value)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one form have equal values; NaN is equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _holds(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _copy(container: Any) -> Any:
    """Return a shallow copy of a container, of a plain type."""
    if isinstance(container, dict):
        return dict(container)
    return list(container)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(copy)


def _differs(before: Any, now: Any, copies: dict[int, Any]) -> bool:
    """Return whether an attribute is another one, or a container of others."""
    if before is now:
        copy = copies.get(id(now))
        return copy is not None and (
            len(copy) != len(now)
            or any(a is not b for a, b in zip(_items(copy), _items(now), strict=True))
        )
    plain = (bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device, tuple)
    return not (isinstance(now, plain) and type(before) is type(now) and bool(before == now))


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and the state of random numbers at the end."""
    state = ModelState(*models)
    devices = {x.get_device() for model in models for x in model.parameters() if x.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            state.restore()

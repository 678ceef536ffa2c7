"""State of modules beside their parameters: buffers, attributes, containers, and random numbers."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeexec.splitting.operations import storage_of, written_tensors
from pipeexec.splitting.stand_in import is_missing
from pipeexec.stages.recompute import MODULE_ATTRIBUTES

#: Types whose contents are state.
CONTAINERS = (list, dict, set, deque)


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are not torch's, and its buffers."""
    for key, value in (*module.__dict__.items(), *module._buffers.items()):
        if key not in MODULE_ATTRIBUTES:
            yield key, value


class _Kept(NamedTuple):
    """A module as it was."""

    module: nn.Module
    attributes: dict[str, Any]  # with those of torch
    containers: list[tuple[Any, Any]]  # lists, dicts and sets, each with a copy


class ModelState:
    """State of models at one time; tensors are copied, but for parameters."""

    def __init__(self, *models: nn.Module) -> None:
        modules = {id(x): x for model in models for x in model.modules()}
        self._kept = [
            _Kept(
                x,
                dict(x.__dict__),
                [
                    (v, dict(v) if isinstance(v, dict) else list(v))
                    for v in x.__dict__.values()
                    if isinstance(v, CONTAINERS)
                ],
            )
            for x in modules.values()
        ]
        values = [value for module in modules.values() for _, value in attributes(module)]
        tensors = {id(x): x for x in values if isinstance(x, Tensor) and not is_missing(x)}
        self._tensors = [
            (x, x._version, x.detach().clone()) for x in tensors.values() if not x.is_meta
        ]
        self._generators = {
            id(x): (x, state) for x in values if (state := _generator_state(x)) is not None
        }
        self._values = {id(x): copy for x, _, copy in self._tensors}
        parameters = (x for module in modules.values() for x in module._parameters.values())
        self._versions = {
            id(x): x._version for x in (*tensors.values(), *parameters) if x is not None
        }

    def changed(self) -> dict[int, tuple[str, ...]]:
        """Return the attributes of each module, by its id, that are others now."""
        result = {}
        for module, before, containers in self._kept:
            copies = {id(x): copy for x, copy in containers}
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

    def is_equal(self, module: nn.Module, key: str, used: Container[int]) -> bool:
        """Return whether an attribute is another tensor now, of the same values.

        Not if the storage of the one before is ``used``: other batches may give other values then.
        """
        before = next(x.attributes.get(key) for x in self._kept if x.module is module)
        now = module.__dict__.get(key)
        if before is now or not isinstance(before, Tensor) or not isinstance(now, Tensor):
            return False
        if before.is_meta or now.is_meta or before.dtype != now.dtype:
            return False
        if storage_of(before) in used:
            return False
        return before.shape == now.shape and _same(before, now)

    def _is_written(self, value: Any) -> bool:
        """Return whether a value is a tensor that has other values now, or a generator that drew.

        Batch norms do not count the versions of their running statistics.
        """
        if id(value) in self._generators:
            generator, state = self._generators[id(value)]
            return bool(_generator_state(generator) != state)
        if not isinstance(value, Tensor) or id(value) not in self._versions:
            return False
        copy = self._values.get(id(value))
        if copy is None or value._version != self._versions[id(value)]:
            return value._version != self._versions[id(value)]
        return not _same(value, copy)

    def restore(self) -> None:
        """Let everything be as it was, but for parameters."""
        for module, before, containers in self._kept:
            for container, copy in containers:
                if (container or copy) and (  # most are empty
                    len(container) != len(copy)
                    or any(map(operator.is_not, contents(container), contents(copy)))
                ):
                    refill(container, copy)
            module.__dict__.clear()
            module.__dict__.update(before)
        for generator, state in self._generators.values():
            _set_generator_state(generator, state)
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if tensor._version != version or not _same(tensor, value):
                    tensor.copy_(value)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one form have equal values; NaN is equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for other values."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else None


def _set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.setstate(state)


def contents(value: Any) -> list[Any]:
    """Return the keys and values in a list, dict, set or deque; none of other values."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, CONTAINERS) else []


def refill(container: Any, copy: Any) -> None:
    """Let a list, dict, set or deque have the contents of another one."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(copy)


def _differs(before: Any, now: Any, copies: dict[int, Any]) -> bool:
    """Return whether an attribute is another one, or a container of others."""
    if before is now:
        copy = copies.get(id(now))
        return copy is not None and (
            len(copy) != len(now)
            or any(a is not b for a, b in zip(contents(copy), contents(now), strict=True))
        )
    plain = (bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device, tuple)
    return not (isinstance(now, plain) and type(before) is type(now) and bool(before == now))


class _ParameterGuard(TorchDispatchMode):
    """Keeps the values of parameters before an operation writes to them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._parameters.setdefault(storage_of(parameter), []).append(parameter)
        self._copies: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            for parameter in self._parameters.get(storage_of(tensor), ()):
                if id(parameter) not in self._copies:
                    self._copies[id(parameter)] = parameter, parameter.detach().clone()
        return func(*args, **kwargs)

    def restore(self) -> None:
        """Let parameters have their values again."""
        with torch.no_grad():
            for parameter, value in self._copies.values():
                parameter.copy_(value)


@contextmanager
def unchanged(*models: nn.Module, guard: bool = True) -> Iterator[None]:
    """Restore buffers, attributes, parameters and the state of random numbers at the end.

    Without the ``guard``, which takes time in each operation, parameters must not change.
    """
    state = ModelState(*models)
    parameters = {id(x): x for model in models for x in model.parameters()}
    devices = {x.get_device() for x in parameters.values() if x.is_cuda}
    mode = _ParameterGuard(parameters.values())
    with same_python_draws(), torch.random.fork_rng(sorted(devices)):
        try:
            with mode if guard else nullcontext():
                yield
        finally:
            state.restore()
            mode.restore()


@contextmanager
def same_python_draws() -> Iterator[None]:
    """Let the generators of Python and numpy be at the end as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - of the user's code
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002

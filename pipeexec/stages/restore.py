"""Restore what a block or a failed step changes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import is_expanded
from pipeexec.stages.recompute import Buffer, Slot, is_changed_in_place, tensor_version


def add_gradients(
    gradients: Sequence[Tensor | None], more: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return sums of gradients, where None is nothing; dense tensors of ``gradients`` change."""
    return [
        y if x is None else x if y is None else y + x if x.is_sparse else x.add_(y)
        for x, y in zip(gradients, more, strict=True)
    ]


class EarlierGradients:
    """Keeps the gradients of modules from before a step, for steps that add to them.

    A step that fails leaves them as they were. With ``is_separate``, the step begins without
    gradients, and those from before are added at its end: a step whose gradients are divided at its
    end divides only its own. Otherwise it adds to them as autograd does, and a copy is kept.
    """

    def __init__(self, modules: Mapping[int, nn.Module], *, is_separate: bool) -> None:
        self.is_separate = is_separate
        self._parameters = {slot: list(module.parameters()) for slot, module in modules.items()}
        self._earlier = {slot: [p.grad for p in row] for slot, row in self._parameters.items()}
        self._step_gradients: dict[int, list[Tensor | None]] = {}
        self._copies: dict[int, list[Tensor | None]] = {}
        if is_separate:
            for row in self._parameters.values():
                _detach_gradients(row)
        else:
            self._copies = {
                slot: [None if x is None else x.clone() for x in row]
                for slot, row in self._earlier.items()
            }

    def __contains__(self, slot: int) -> bool:
        return self.is_separate and slot in self._parameters

    def end_mini_batch(self, slot: int) -> None:
        """Set apart the gradients of a mini-batch of the step; the next one begins without."""
        if slot not in self:
            return
        gradients = _detach_gradients(self._parameters[slot])
        if slot in self._step_gradients:
            gradients = add_gradients(self._step_gradients[slot], gradients)
        self._step_gradients[slot] = gradients

    @torch.no_grad()
    def add(self) -> None:
        """End a step: each gradient is the sum of the one from before and the step's."""
        for slot in self._parameters if self.is_separate else ():
            self.end_mini_batch(slot)
            self._set(slot, add_gradients(self._earlier[slot], self._step_gradients[slot]))

    @torch.no_grad()
    def restore(self) -> None:
        """Undo a step: gradients are those from before."""
        for slot, row in self._copies.items():
            for gradient, copied in zip(self._earlier[slot], row, strict=True):
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        for slot, gradients in self._earlier.items():
            self._set(slot, gradients)

    def _set(self, slot: int, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters[slot], gradients, strict=True):
            parameter.grad = gradient


def _detach_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients of parameters, and take them from the parameters."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


@contextmanager
def restore_afterwards(
    modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | None] = ()
) -> Iterator[None]:
    """Restore parameters, buffers, gradients and optimizer state at the end of a block."""
    # Parameters without memory, whose stand-ins are expanded, have nothing to restore.
    states = [
        copy.deepcopy({
            name: x for name, x in module.state_dict().items()
            if not (isinstance(x, Tensor) and is_expanded(x))
        })
        for module in modules
    ]  # fmt: skip
    gradients = [[None if p.grad is None else p.grad.clone() for p in module.parameters()]
                 for module in modules]  # fmt: skip
    optimizer_states = [None if o is None else copy.deepcopy(o.state_dict()) for o in optimizers]
    try:
        with preserved_buffers(modules):
            yield
    finally:
        for module, state, grads in zip(modules, states, gradients, strict=True):
            module.load_state_dict(state, strict=False)
            for parameter, gradient in zip(module.parameters(), grads, strict=True):
                parameter.grad = gradient
        for optimizer, saved in zip(optimizers, optimizer_states, strict=True):
            if optimizer is not None and saved is not None:
                restore_optimizer(optimizer, saved)


@contextmanager
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers at the end of a block: the tensors themselves, and their values."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    slots = [Slot(part, key, key) for part in parts for key in part._buffers]
    before = [(slot, x := slot.get(), tensor_version(x), _copied(x)) for slot in slots]
    try:
        yield
    finally:
        with torch.no_grad():
            for slot, buffer, version, values in before:
                slot.set(buffer)
                if values is not None and is_changed_in_place(buffer, version, values):
                    assert isinstance(buffer, Tensor)
                    buffer.copy_(values)


def _copied(buffer: Buffer) -> Tensor | None:
    """Return a copy of a buffer; None if no operation can write to it."""
    if not isinstance(buffer, Tensor) or buffer.is_meta or is_expanded(buffer):
        return None
    return buffer.detach().clone()


class TemporaryAttribute:
    """Give an attribute another value in a block. A generator's context would take longer."""

    __slots__ = ("_name", "_owner", "_value")

    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        value = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)
        self._value = value


@torch.no_grad()
def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore an optimizer's state, in its present tensors wherever they fit.

    `torch.optim.Optimizer.load_state_dict` puts new tensors in the place of old ones. A CUDA graph
    reads and writes at fixed addresses, and would have to be captured anew.

    ``saved`` is a deep copy of its ``state_dict()``.
    """
    state = optimizer.state_dict()["state"]  # the dictionaries are the optimizer's own
    if not _fits(state, saved["state"]):
        optimizer.load_state_dict(saved)
        return
    for key, values in saved["state"].items():
        _copy(state[key], values)
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        _copy(group, {name: value for name, value in values.items() if name != "params"})


def _fits(present: Mapping[Any, Any], saved: Mapping[Any, Any]) -> bool:
    """Return whether both have tensors of the same shapes for the same parameters."""
    return present.keys() == saved.keys() and all(
        isinstance(values, dict)
        and present[key].keys() == values.keys()
        and all(_signature(present[key][name]) == _signature(x) for name, x in values.items())
        for key, values in saved.items()
    )


def _signature(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


def _copy(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set entries; a tensor is copied into a present one of its shape, type and device."""
    for name, value in values.items():
        present = target.get(name)
        if isinstance(present, Tensor) and _signature(present) == _signature(value):
            present.copy_(value)
        else:
            target[name] = value

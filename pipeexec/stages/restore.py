"""Restore what a block changes: parameters, buffers, gradients, optimizer state, an attribute.

`torch.optim.Optimizer.load_state_dict` puts new tensors in the place of an optimizer's old ones. A
CUDA graph reads and writes at fixed addresses and would have to be captured anew. So the values are
copied into the old tensors wherever they fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["changed", "preserved", "put_back"]


@contextmanager
def preserved(
    modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | None] = ()
) -> Iterator[None]:
    """Restore parameters, buffers, gradients and optimizer state at the end of a block."""
    states = [copy.deepcopy(module.state_dict()) for module in modules]
    # Buffers need not be in the state.
    buffers = [[b.clone() for b in module.buffers()] for module in modules]
    gradients = [[None if p.grad is None else p.grad.clone() for p in module.parameters()]
                 for module in modules]  # fmt: skip
    kept = [None if o is None else copy.deepcopy(o.state_dict()) for o in optimizers]
    try:
        yield
    finally:
        for module, state, values, grads in zip(modules, states, buffers, gradients, strict=True):
            module.load_state_dict(state)
            for buffer, before in zip(module.buffers(), values, strict=True):
                buffer.copy_(before)
            for parameter, gradient in zip(module.parameters(), grads, strict=True):
                parameter.grad = gradient
        for optimizer, saved in zip(optimizers, kept, strict=True):
            if optimizer is not None and saved is not None:
                put_back(optimizer, saved)


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value in a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@torch.no_grad()
def put_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer back what it kept, in its own tensors where they still fit.

    Parameters
    ----------
    saved
        A deep copy of its ``state_dict()``.
    """
    state = optimizer.state_dict()["state"]  # the dictionaries are the optimizer's own
    if not _fits(state, saved["state"]):
        optimizer.load_state_dict(saved)
        return
    for key, values in saved["state"].items():
        _copy(state[key], values)
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        _copy(group, {name: value for name, value in values.items() if name != "params"})


def _fits(now: Mapping[Any, Any], saved: Mapping[Any, Any]) -> bool:
    """Whether both have tensors of the same shapes for the same parameters."""
    return now.keys() == saved.keys() and all(
        isinstance(values, dict)
        and now[key].keys() == values.keys()
        and all(_signature(now[key][name]) == _signature(x) for name, x in values.items())
        for key, values in saved.items()
    )


def _signature(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


def _copy(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set entries; tensors are copied into those of the same kind."""
    for name, value in values.items():
        mine = into.get(name)
        if isinstance(mine, Tensor) and _signature(mine) == _signature(value):
            mine.copy_(value)
        else:
            into[name] = value

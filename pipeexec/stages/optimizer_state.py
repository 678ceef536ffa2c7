"""What an optimizer keeps, put back where it lies.

`torch.optim.Optimizer.load_state_dict` puts other tensors in the place of those that there are. A
CUDA graph reads and writes at addresses, so that it would have to be captured anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["put_back"]


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

"""Tensors of nested arguments and results, of models and of operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["call_arguments", "storage_of", "tensors_of", "written_tensors"]


def tensors_of(values: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a nested structure, in order."""
    return tuple(x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments: a dict has keywords."""
    if isinstance(batch, dict):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def written_tensors(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the arguments that an operation changes."""
    arguments = function._schema.arguments
    values = dict(zip((x.name for x in arguments), args, strict=False)) | kwargs
    changed = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return tensors_of([values.get(name) for name in changed])


def storage_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, which all its views share."""
    number: int = tensor.untyped_storage()._cdata
    return number

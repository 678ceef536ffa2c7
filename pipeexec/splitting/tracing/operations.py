"""Tensors that operations read and change, and their storages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Methods of tensors that read their values without an operation.
READERS = frozenset({
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr,
    Tensor.__repr__, Tensor.__format__, Tensor.storage, Tensor.untyped_storage,
    Tensor.__reduce_ex__, Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset,
})  # fmt: skip
#: Arguments of operations whose values must be in a range, such as those of `embedding`.
_INDICES = frozenset({"index", "indices", "offsets", "target"})
_DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class _Facts(NamedTuple):
    """What the schema of an operation tells.

    Attributes
    ----------
    names
        Names of all arguments.
    read
        Names of those whose values it reads, but for its results' values.
    written
        Names of those that it changes.
    """

    names: tuple[str, ...]
    read: tuple[str, ...]
    written: tuple[str, ...]


@cache
def _facts(function: Any) -> _Facts:
    schema, is_dynamic = function._schema, not _DYNAMIC.isdisjoint(function.tags)
    names = tuple(x.name for x in schema.arguments)
    indices = _INDICES | {"mask"} if is_dynamic else _INDICES
    read = tuple(x for x in names if x in indices)
    aliases = ((x.name, x.alias_info) for x in schema.arguments)
    written = tuple(name for name, alias in aliases if alias is not None and alias.is_write)
    returns_tensors = any("Tensor" in str(x.type) for x in schema.returns)
    if (is_dynamic and not read) or not (returns_tensors or written):  # a shape, or a number
        read = names
    return _Facts(names, read, written)


def argument_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in the arguments of an operation."""
    result = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, (list, tuple)):
            result += [x for x in value if isinstance(x, Tensor)]
    return result


def _tensors(
    names: Sequence[str], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors in arguments with some names."""
    if not names:
        return []
    values = dict(zip(_facts(function).names, args, strict=False)) | kwargs
    return argument_tensors(tuple(values.get(name) for name in names), {})


def read_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments whose values an operation reads, but for its results' values."""
    return _tensors(_facts(function).read, function, args, kwargs)


def written_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    if function is torch.ops.aten.native_batch_norm.default and args[5]:  # training
        return argument_tensors(args[3:5], {})  # running statistics; the schema lacks it
    return _tensors(_facts(function).written, function, args, kwargs)


def storage_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, which all its views share."""
    number: int = tensor.untyped_storage()._cdata
    return number

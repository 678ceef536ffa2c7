"""Operations of a forward: the tensors that they read and change, and the lines that call them."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Folders whose code is not the model's: torch, and this package.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STANDARD_LIBRARY = Path(linecache.__file__).parent


def present_line() -> str:
    """Return the line of the model's code that runs now, and its file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return _line_text(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """Return the last line of the model's code that an error has passed; empty if there is none.

    Callers of this package are not in a traceback, so that its first lines are of this package.
    """
    rows = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [
        (file, line)
        for file, line in rows
        if not file.startswith(_LIBRARIES) and Path(file).parent != _STANDARD_LIBRARY
    ]
    return f", at {_line_text(*own[-1])}" if own else ""


def _line_text(file: str, line: int) -> str:
    return f"`{linecache.getline(file, line).strip():.80}` ({Path(file).name}, line {line})"


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
    """Names of an operation's arguments, from its schema."""

    names: tuple[str, ...]
    read: tuple[str, ...]  # for more than its results' values
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

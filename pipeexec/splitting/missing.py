"""`missing`: tensors in place of values that a stage does not have, which cannot be read."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeexec.nesting import tensors_in
from pipeexec.splitting.tracing.code_lines import present_line
from pipeexec.splitting.tracing.operations import (
    READERS,
    argument_tensors,
    read_tensors,
    written_tensors,
)
from pipesim.errors import ExecutionError

#: Remedy where the forward of a batch takes another way than that of the sample.
ONE_WAY = "stages take one way: let all batches take it, or split with a sample that does"

_PACKAGE = str(Path(__file__).parents[1])
#: Operations that write all elements of their first argument, and read none of them.
_OVERWRITES = frozenset({
    torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
})  # fmt: skip
#: Names of functions that take a tensor for itself.
_OF_OBJECT = frozenset({"__set__", "__setitem__", "__reduce_ex__", "as_subclass"})


def missing(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_written: bool = False
) -> Tensor:
    """Return a tensor in place of one that a stage does not have: no result may depend on it.

    It is of NaN, or of the least integer; a boolean is False. It has the memory of one element, if
    nothing writes to it. A read of it, or of a tensor that is computed from it, raises
    `ExecutionError`.
    """
    if is_written or math.prod(shape) < 2:
        return _unread(torch.full(tuple(shape), _value(dtype), dtype=dtype, device=device))
    return _unread(_expanded(tuple(shape), dtype, device))


@lru_cache(maxsize=1024)
def _expanded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a missing value of many elements, which have one memory: no operation writes to it."""
    return torch.full((), _value(dtype), dtype=dtype, device=device).expand(shape)


def _value(dtype: torch.dtype) -> float | bool:
    """Return the elements of missing values of a type."""
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def is_missing(tensor: Tensor) -> bool:
    """Return whether a tensor is missing, is computed from a missing one, or has its values."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided:  # without a storage
            return False
        return getattr(tensor.untyped_storage(), "is_missing", False)


class _Unread(Tensor):
    """A missing value, or one that is computed from it.

    Its storage has the attribute ``is_missing``, until other values are written to all of it. So
    has that of a tensor to which missing values were written.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> _Unread:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__":  # of an attribute, such as the shape
                return func(*args)
            if func in READERS and any(map(is_missing, tensors_in((args, kwargs)))):
                if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                    _refuse_read()  # else it counts bytes of saved tensors
            elif not _is_of_object(func):
                args, kwargs = _mapped(_as_unread, args), _mapped(_as_unread, kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = argument_tensors(args, kwargs)
        lacks = any(map(is_missing, arguments))
        if lacks and any(map(is_missing, read_tensors(func, args, kwargs))):
            _refuse_read()
        with torch._C._DisableTorchDispatch():
            output = func(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            _note_written(tensor, func, lacks and any(map(is_missing, arguments[1:])))
        if not lacks:
            return output
        own = set(map(id, arguments))
        return _mapped(lambda x: x if id(x) in own else _unread(x), output)


class _Overwritten(Tensor):
    """A tensor of the model's code to which missing values were written.

    It has this class from then on. What is computed from it is missing.
    """

    __torch_function__ = _Unread.__torch_function__

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        result: Tensor = copy.deepcopy(self.as_subclass(Tensor), memo)
        if is_missing(self):
            _set_missing(result, True)
        return result


def _is_of_object(function: Any) -> bool:
    """Return whether a function is of a tensor itself: it writes to it, or is of an attribute."""
    name = function.__name__
    return name in _OF_OBJECT or (name.endswith("_") and not name.endswith("__"))


def _as_unread(tensor: Tensor) -> Tensor:
    return _unread(tensor) if isinstance(tensor, _Overwritten) and is_missing(tensor) else tensor


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an argument or the output of an operation with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        rows = [_mapped(function, x) for x in value]
        return tuple(rows) if isinstance(value, tuple) else rows
    if isinstance(value, dict):
        return {key: _mapped(function, x) for key, x in value.items()}
    return value


def _unread(tensor: Tensor) -> Tensor:
    """Return a tensor as one of missing values; one that has no memory is returned as it is."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return tensor
    _set_missing(tensor, True)
    return Tensor._make_subclass(_Unread, tensor)


def _set_missing(tensor: Tensor, value: bool) -> None:
    tensor.untyped_storage().is_missing = value  # type: ignore[attr-defined]


def _note_written(tensor: Tensor, function: Any, is_missing: bool) -> None:
    """Note that an operation has written to a tensor, with missing values or others."""
    with torch._C.DisableTorchFunctionSubclass():
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        if is_missing or (function in _OVERWRITES and is_whole):
            _set_missing(tensor, is_missing)
        if is_missing:
            for owner in (tensor, tensor._base):
                if type(owner) is Tensor:
                    owner.__class__ = _Overwritten


def _refuse_read() -> NoReturn:
    """Raise for a read of a missing value."""
    raise ExecutionError(
        f"the forward reads, at {present_line()}, a value that its stage did not receive; {ONE_WAY}"
    )

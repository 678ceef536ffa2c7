"""Stand-ins on a stage: `StandIn` for a module of another stage, `missing` for a value.

Missing values are tensors that cannot be read.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeexec.nesting import mapped, tensors_in
from pipeexec.splitting.operations import (
    READERS,
    argument_tensors,
    present_line,
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
#: Names of functions that take a tensor for itself, beside those that write to it (``add_``).
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
            name = func.__name__
            if name == "__get__":  # of an attribute, such as the shape
                return func(*args)
            if func in READERS and any(map(is_missing, tensors_in((args, kwargs)))):
                if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                    _refuse_read()  # else it counts bytes of saved tensors
            elif name not in _OF_OBJECT and (not name.endswith("_") or name.endswith("__")):
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
    with torch._C.DisableTorchFunctionSubclass():
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        if is_missing or (function in _OVERWRITES and is_whole):
            _set_missing(tensor, is_missing)
        if is_missing:
            for owner in (tensor, tensor._base):
                if type(owner) is Tensor:
                    owner.__class__ = _Overwritten


def _refuse_read() -> NoReturn:
    raise ExecutionError(
        f"the forward reads, at {present_line()}, a value that its stage did not receive; {ONE_WAY}"
    )


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers have no data.

    Graphs in it make tensors without data, too, and so draw no random numbers.
    """
    result = _with_tensors(module, lambda x: torch.empty_like(x, device="meta"))
    for part in result.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if "device" in node.kwargs:
                    node.update_kwarg("device", torch.device("meta"))
            part.recompile()
    return result


def with_zeros(module: nn.Module) -> nn.Module:
    """Return a copy of a module with zeros in place of parameters without data.

    Each has the memory of one element. Buffers with data stay.
    """
    return _with_tensors(
        module, lambda x: torch.zeros((), dtype=x.dtype).expand(x.shape) if x.is_meta else x
    )


def _with_tensors(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module with other parameters and buffers."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = replace(parameter.detach())
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = replace(buffer)
    for part in module.modules():
        for value in vars(part).values():  # such as the weight of `nn.utils.weight_norm`
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = replace(value.detach())
    return copy.deepcopy(module, memo)


def to_meta(values: Any) -> Any:
    """Return nested values whose tensors have neither data nor a graph of autograd."""
    return mapped(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, values)


def is_recorder(hook: Any) -> bool:
    """Return whether a forward hook is one by which transformers records what layers return."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def without_recorders(module: nn.Module) -> nn.Module:
    """Remove the hooks that record, so that a run without data adds nothing to their records."""
    for part in module.modules():
        for key, hook in list(part._forward_hooks.items()):
            if is_recorder(hook):
                del part._forward_hooks[key]
    return module


class _AnyType(TorchDispatchMode):
    """Runs operations in bfloat16 that refuse other types without data.

    Some take these types with data, such as `torch.nn.functional.grouped_mm`.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            dtypes = [x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()]
            if not dtypes or func._schema.is_mutable:
                raise
            args, kwargs = _with_type((args, kwargs), torch.bfloat16)
            dtype = reduce(torch.promote_types, dtypes)
            return _with_type(func(*args, **kwargs), kwargs.get("out_dtype") or dtype)


def _with_type(values: Any, dtype: torch.dtype) -> Any:
    """Return nested values with floating-point tensors of a type."""
    return mapped(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values
    )


def run_without_data(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the result of a module and arguments that have no data."""
    with torch.no_grad(), _disable_current_modes():
        try:
            return module(*args, **kwargs)
        except RuntimeError:
            with _AnyType():  # type: ignore[no-untyped-call]
                return module(*args, **kwargs)


class StandIn(nn.Module):
    """Takes the place of a module of another stage, and returns received or empty values.

    It has no parameters. Other attributes are those of the module that it stands for. So is its
    class while the stage runs: the model's code may ask for it by ``isinstance``. Other code, such
    as `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, must not take it for that module.

    ``module`` is the result of `on_meta` for the module; ``answer`` returns the result of a call.
    """

    def __init__(
        self, module: nn.Module, answer: Callable[..., Any], is_running: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.__dict__["_module_without_data"] = module
        self.__dict__["_answer"] = answer
        self.__dict__["_is_running"] = is_running

    @property
    def __class__(self) -> Any:
        """The class of the module that it stands for, while the stage runs."""
        is_running = self.__dict__.get("_is_running")
        if is_running is None or not is_running():
            return type(self)
        return type(self.__dict__["_module_without_data"])

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a stand-in keeps its class")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # such as __deepcopy__: not that of the other module
                raise
            value = getattr(self.__dict__["_module_without_data"], name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                return missing(value.shape, value.dtype, torch.device("cpu"))  # of the last call
            if not isinstance(value, (Tensor, nn.Module)):
                return value
            return getattr(self._module_of_missing(), name)

    def __getitem__(self, key: Any) -> Any:
        module: Any = self._module_of_missing()
        return module[key]

    def _module_of_missing(self) -> nn.Module:
        """Return the module with missing values, which the model's code may use in vain."""
        if "_missing" not in self.__dict__:
            module = self.__dict__["_module_without_data"]
            self.__dict__["_missing"] = _with_tensors(
                module, lambda x: missing(x.shape, x.dtype, torch.device("cpu"))
            )
        result: nn.Module = self.__dict__["_missing"]
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values that the module would return; those of others are empty."""
        return self._answer(*args, **kwargs)

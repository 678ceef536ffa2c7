"""`StandIn`: takes the place of a module that runs on another stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeexec.nesting import mapped, tensors_in
from pipeexec.splitting.missing import missing


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

    Parameters
    ----------
    module
        Result of `on_meta` for the module.
    answer
        Called with the arguments of the call; returns its result.
    is_running
        Returns whether the stage runs its forward.
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

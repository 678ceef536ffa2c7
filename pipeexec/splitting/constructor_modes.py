"""`ConstructorMode`: run a constructor without data.

New tensors are on torch's meta device, and an `OperationLog` has the operations on them. The
constructor goes the way that it goes with data:

- Each operation that draws random numbers runs with data too, so that generators go on. The memory
  of its result is freed soon after.
- Numbers that are read from tensors, as by ``item()``, are computed from the log.
- Tensors without data say that they are on the CPU.

Ranges of numbers have data, since constructors compute Python numbers from them. So have tensors of
lists and of NumPy's arrays. The default device stays as it is: some packages skip initial values
under ``torch.device("meta")``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeexec.nesting import mapped, tensors_in
from pipeexec.splitting.operation_log import Draw, Operation, OperationLog, View
from pipeexec.splitting.tracing.operations import written_tensors
from pipesim.errors import ExecutionError

_RANGES = frozenset({"arange", "range", "linspace", "logspace", "scalar_tensor"})
#: Methods that give a tensor's memory: what others write there would not be in the log.
_MEMORY = ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage")
_CPU, _META = torch.device("cpu"), torch.device("meta")


class ConstructorMode(TorchDispatchMode):
    """Makes new tensors without data, and keeps a log of all operations on them."""

    def __init__(self, log: OperationLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def is_logged(self, value: Any) -> bool:
        """Return whether a value is a tensor without data that stands for one with data.

        It is not if the constructor itself makes it on the meta device.
        """
        if not isinstance(value, Tensor) or not value.is_meta or is_lazy(value):
            return False
        return self.log.has(View.at_present(value))

    def values(self, nested: Any) -> Any:
        """Return nested values with copies that have data in place of logged tensors."""
        views = [View.at_present(x) for x in self._logged(nested)]
        with _disable_current_modes():
            values = iter(self.log.values(views))
        return pytree.tree_map_only(
            self.is_logged, lambda _: next(values), _on_device(nested, _CPU)
        )

    def _logged(self, nested: Any) -> list[Tensor]:
        return [x for x in tensors_in(nested) if self.is_logged(x)]

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        tensors = tensors_in((args, kwargs))
        _check_devices(func, (args, kwargs))
        if not tensors and any(x.name == "device" for x in func._schema.arguments):
            if _short_name(func) in _RANGES:
                return func(*args, **kwargs | {"device": _CPU})
            return self._log(func, args, kwargs | {"device": _META})
        if not self._logged(tensors):
            if not any(x.is_meta for x in tensors):  # nor is the device that of a logged tensor
                args, kwargs = _on_device((args, kwargs), _CPU)
            elif kwargs.get("device") == _CPU:
                return self._log(func, args, kwargs)
            return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        if _returns_no_tensor(func) or len(self._logged(written)) < len(written):
            if self._logged(written):
                raise _refused(f"writes with {func} into tensors with data and without")
            args, kwargs = self.values((args, kwargs))
            return func(*args, **kwargs)
        return self._log(func, args, kwargs)

    def _log(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation without data, and add it to the log."""
        nested = (args, kwargs)
        views, view_kwargs = pytree.tree_map_only(
            Tensor,
            lambda x: View.at_present(x) if self.is_logged(x) else x.detach().clone(),
            _on_device(nested, _CPU),
        )
        read = tuple(View.at_present(x) for x in self._logged(nested))
        written = tuple(View.at_present(x) for x in written_tensors(func, args, kwargs))
        draw = _draw(func, nested)
        empty_args, empty_kwargs = pytree.tree_map_only(
            Generator,
            lambda _: None,
            pytree.tree_map_only(Tensor, lambda x: x.to(_META), _on_device(nested, _META)),
        )
        has_run = False
        try:
            output = func(*empty_args, **empty_kwargs)
        except Exception as error:  # of operations whose results depend on values
            if func._schema.is_mutable:
                raise _refused(
                    f"calls {func}, which fails without data ({error!s:.100})"
                ) from error
            args, kwargs = self.values(nested)
            output = mapped(_without_data, func(*args, **kwargs))
            has_run = True
        operation = Operation(
            func, views, view_kwargs, read, () if torch.Tag.inplace_view in func.tags else written,
            tuple(View.at_present(x) for x in tensors_in(output)),
            torch.get_default_dtype(), draw, _dependence(func),
        )  # fmt: skip
        if has_run:
            self.log.append_done(operation)
        else:
            self.log.append(operation)
        return output


class AsOnCpu(TorchFunctionMode):
    """Lets tensors without data answer as tensors on the CPU do."""

    def __init__(self, mode: ConstructorMode) -> None:
        super().__init__()
        self._mode = mode
        properties: Any = Tensor  # its properties are those of C++
        self._set_data = properties.data.__set__
        self._answers: dict[Any, Callable[..., Any]] = {
            properties.device.__get__: lambda *_: _CPU,
            properties.is_cpu.__get__: lambda *_: True,
            properties.is_meta.__get__: lambda *_: False,
            Tensor.cpu: lambda tensor, **_: tensor,
            Tensor.new_tensor: lambda *args, **kwargs: Tensor.new_tensor(
                *args, **{"device": _CPU} | kwargs
            ),
            Tensor.to: lambda tensor, *args, **kwargs: Tensor.to(
                tensor, *(_on_meta(x) for x in args), **{k: _on_meta(x) for k, x in kwargs.items()}
            ),
        }
        for name in ("__format__", "tolist"):
            self._answers[getattr(Tensor, name)] = partial(_read, mode, name)
        for name in _MEMORY:
            self._answers[getattr(Tensor, name)] = partial(_refuse_memory, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == self._set_data and args[0].is_meta != args[1].is_meta:
            return _exchange_data(*args)
        if any(_is_device(x, "meta") for x in (*args[1:], *kwargs.values())):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if args and self._mode.is_logged(args[0]) and func in self._answers:
            func = self._answers[func]
        return func(*args, **kwargs)


def _refused(action: str) -> ExecutionError:
    return ExecutionError(f"the constructor {action}; make the model and give it itself")


def _read(mode: ConstructorMode, name: str, tensor: Tensor, *args: Any) -> Any:
    """Return the result of a method on the values of a tensor."""
    return getattr(mode.values(tensor), name)(*args)


def _refuse_memory(name: str, *_: Any, **__: Any) -> Any:
    raise _refused(f"takes the memory of a tensor (Tensor.{name}), and may write into it")


def _exchange_data(tensor: Tensor, value: Tensor) -> None:
    """Set ``tensor.data``, where one of the tensors has data and the other none."""
    other = value.detach()
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, tensor.requires_grad)
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)


def _on_meta(argument: Any) -> Any:
    """Return an argument of `Tensor.to` that keeps a tensor on the meta device."""
    if isinstance(argument, Tensor):
        with _disable_current_modes():
            return argument.to(_META)
    return _META if _is_device(argument, "cpu") else argument


def _is_device(argument: Any, kind: str) -> bool:
    """Return whether an argument names a device of a kind."""
    return isinstance(argument, (str, torch.device)) and str(argument) == kind


def _short_name(func: Any) -> str:
    """Return the name of an operation without that of its library and overload."""
    name: str = func._schema.name
    return name.partition("::")[2]


def _returns_no_tensor(func: Any) -> bool:
    """Return whether an operation returns numbers alone."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(x.type) for x in returns)


def _check_devices(func: Any, nested: Any) -> None:
    """Raise unless an operation makes tensors on the CPU, or without data."""
    for device in pytree.tree_leaves(nested):
        if isinstance(device, torch.device) and device.type not in ("cpu", "meta"):
            raise _refused(f"makes tensors on {device} ({func}), not on the CPU")


def _on_device(nested: Any, device: torch.device) -> Any:
    """Return nested arguments of an operation with another device."""
    return pytree.tree_map_only(torch.device, lambda _: device, nested)


def _dependence(func: Any) -> Literal["nothing", "shapes", "values"]:
    """Return `Operation.dependence` for a function."""
    name = _short_name(func)
    if name.startswith(("empty", "new_empty")):
        return "nothing"
    return "shapes" if name.startswith("new_") or name.endswith("_like") else "values"


def _draw(func: Any, nested: Any) -> Draw | None:
    """Return the generator that an operation draws from, and its present state."""
    has_generator = any(x.name == "generator" for x in func._schema.arguments)
    if not has_generator and torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generators = (x for x in pytree.tree_leaves(nested) if isinstance(x, Generator))
    generator = next(generators, torch.default_generator)
    return Draw(generator, generator.get_state())


def _without_data(value: Any) -> Any:
    """Return a tensor of the same layout without data."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)

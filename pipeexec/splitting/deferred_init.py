"""`DeferredModel`: construct a model without data, and later give some parameters their values.

`deferred` runs a constructor under a `ConstructorMode`, which keeps a log of operations.
`DeferredModel.values` runs those again on which some parameters and buffers depend. So the values
are those that the constructor would have given, after the same `torch.manual_seed`, and the tensors
of one other module at a time are in memory.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Generator, Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeexec.nesting import mapped, tensors_in
from pipeexec.splitting.operations import written_tensors
from pipeexec.splitting.split_stage import SplitStage
from pipesim.errors import ExecutionError, PipeError

#: Bytes of tensors after which freed memory goes back to the operating system.
_TRIMMED_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class View:
    """A tensor without data at one time: its storage, which stays alive, and its place in it."""

    storage: UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def at_present(cls, tensor: Tensor) -> View:
        """Return the view that a tensor is now."""
        return cls(
            tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(),
            int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    @property
    def key(self) -> int:
        """Number of the storage."""
        number: int = self.storage._cdata
        return number

    @property
    def is_whole(self) -> bool:
        """Whether the storage has no other elements."""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor that is this view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype)
        tensor = tensor.set_(storage, self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    def has_layout(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same place in its storage."""
        return replace(View.at_present(tensor), storage=self.storage) == self


class Draw(NamedTuple):
    """A generator of random numbers, and its state before an operation draws from it."""

    generator: Generator
    state: Tensor

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the generator draw the same numbers again; it is as before at the end."""
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(present)


@dataclass(frozen=True)
class Operation:
    """One operation, with views in place of tensors without data."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: tuple[View, ...]  # arguments
    written: tuple[View, ...]  # those of them that it changes
    results: tuple[View, ...]
    dtype: torch.dtype  # the default one at that time
    draw: Draw | None  # None if it draws no random numbers
    #: Values of its results depend on ``"values"`` of arguments, or on their ``"shapes"`` alone.
    #: ``"nothing"`` defines the values of `torch.empty`.
    dependence: Literal["nothing", "shapes", "values"]

    @property
    def keys(self) -> set[int]:
        """Storages of arguments and results."""
        return {view.key for view in (*self.read, *self.results)}

    @property
    def changed(self) -> set[int]:
        """Storages that the operation makes or changes; those of views of arguments, too."""
        return {view.key for view in (*self.written, *self.results)}

    @property
    def is_fill(self) -> bool:
        """Whether random numbers replace all values of the only storage."""
        has_one = self.draw is not None and len(self.read) == len(self.written) == 1
        return has_one and self.read[0].is_whole

    def run(self, real: dict[int, UntypedStorage]) -> None:
        """Run the operation on storages with data, and add those of its results."""
        args, kwargs = pytree.tree_map_only(
            View, lambda view: view.tensor(real[view.key]), (self.args, self.kwargs)
        )
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.no_grad():
                results = tensors_in(self.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)
        for view, result in zip(self.results, results, strict=True):
            if view.key in real:
                continue
            if view.has_layout(result):
                real[view.key] = result.untyped_storage()
            else:  # later views of it have the layout that it has without data
                real[view.key] = UntypedStorage(view.storage.nbytes())
                view.tensor(real[view.key]).copy_(result)


class OperationLog:
    """Operations in order, and the values of storages after them.

    Tensors change their shape, their storage and their values while a constructor runs. So the log
    keeps a `View` of each argument and result, as it is when the operation runs.

    Storages that the last values depend on stay in memory while tensors have them, until the second
    operation that draws. So a loop that draws until all values are inside limits runs each
    operation twice: once in the constructor, and once at the end.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._changes: defaultdict[int, list[int]] = defaultdict(list)  # operations, by storage
        self._defined: set[int] = set()  # storages that have values
        self._real: dict[int, UntypedStorage] = {}  # as they are after the first `_end` operations
        self._end = 0
        self._stays = False  # whether the next operation that draws leaves them in memory
        self._n_bytes = 0  # of tensors of operations that ran since memory was trimmed

    def append(self, operation: Operation) -> None:
        """Add an operation. If it draws, run it once, so that its generator goes on."""
        if operation.draw is not None:
            wanted = set() if operation.is_fill else {view.key for view in operation.read}
            self._advance(wanted | (set(self._real) if self._stays else set()))
            self._stays = False
            missing = [view for view in operation.read if view.key not in self._real]
            real = self._real | {x.key: UntypedStorage(x.storage.nbytes()) for x in missing}
            self._run_one(operation, real)
            self._real = real  # unless it fails
        self.append_done(operation)
        if operation.draw is not None:
            self._end = len(self._operations)

    def append_done(self, operation: Operation) -> None:
        """Add an operation that does not need to run now."""
        for key in operation.changed:
            self._changes[key].append(len(self._operations))
        self._operations.append(operation)
        written = {view.key for view in operation.written}
        sources = {view.key for view in operation.read} - written
        is_defined = operation.dependence == "shapes" or operation.draw or sources <= self._defined
        if operation.dependence != "nothing" and is_defined:
            self._defined |= written | (operation.changed - sources)

    def has(self, view: View) -> bool:
        """Return whether an operation made the storage of a view."""
        return view.key in self._changes

    def is_defined(self, view: View) -> bool:
        """Return whether an operation gave values to the storage of a view."""
        return view.key in self._defined

    def values(self, views: Sequence[View]) -> list[Tensor]:
        """Return copies of the present values of some views."""
        self._advance({view.key for view in views})
        self._stays = True
        return [view.tensor(self._real[view.key]).clone() for view in views]

    def last_values(self, views: Sequence[View]) -> list[Tensor]:
        """Return the values of some views at the end; those of one storage share memory."""
        wanted = {view.key for view in views}
        self._real = {}
        numbers, _ = self._needed(wanted, 0)
        real: dict[int, UntypedStorage] = {}
        self._run(numbers, real, lambda key: key in wanted)
        return [view.tensor(real[view.key]) for view in views]

    def _advance(self, wanted: set[int]) -> None:
        """Bring some storages, and those that they depend on, into memory as they are now."""
        numbers, keys = self._needed(wanted, self._end)
        if any(self._changes[key][0] < self._end and key not in self._real for key in keys):
            self._real = {}
            numbers, keys = self._needed(wanted, 0)
        self._real = {key: x for key, x in self._real.items() if key in keys}
        self._run(
            numbers,
            self._real,
            lambda key: key in wanted or torch._C._storage_Use_Count(key) > 1,  # tensors have it
        )
        self._end = len(self._operations)

    def _run(
        self, numbers: list[int], real: dict[int, UntypedStorage], stays: Callable[[int], bool]
    ) -> None:
        """Run operations again, and free each storage after the last of them unless it stays."""
        last = {key: number for number in numbers for key in self._operations[number].keys}
        for number in numbers:
            operation = self._operations[number]
            with operation.draw.again() if operation.draw is not None else nullcontext():
                self._run_one(operation, real)
            for key in operation.keys:
                if last[key] == number and not stays(key):
                    del real[key]

    def _run_one(self, operation: Operation, real: dict[int, UntypedStorage]) -> None:
        """Run an operation, and at times give memory back to the operating system."""
        operation.run(real)
        self._n_bytes += sum(
            view.storage.nbytes() for view in (*operation.read, *operation.results)
        )
        if self._n_bytes > _TRIMMED_BYTES:
            self._n_bytes = 0
            # Parts of the log lie between freed tensors, and keep `malloc` from using these again.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
            if trim is not None:
                trim(0)

    def _needed(self, wanted: Iterable[int], start: int) -> tuple[list[int], set[int]]:
        """Return operations from a start that some storages need, and all storages of these."""
        numbers: set[int] = set()
        keys: set[int] = set()
        pending = list(wanted)
        while pending:
            key = pending.pop()
            if key in keys:
                continue
            keys.add(key)
            changes = self._changes.get(key)
            if changes is None:
                raise ExecutionError(
                    "the constructor takes a tensor without data that it did not make; make the "
                    "model and give it itself"
                )
            for number in changes[bisect_left(changes, start) :]:
                if number not in numbers:
                    numbers.add(number)
                    pending.extend(self._operations[number].keys)
        return sorted(numbers), keys


_RANGES = frozenset({"arange", "range", "linspace", "logspace", "scalar_tensor"})
#: Methods that give a tensor's memory: what others write there would not be in the log.
_MEMORY = ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage")
_CPU, _META = torch.device("cpu"), torch.device("meta")


class ConstructorMode(TorchDispatchMode):
    """Makes new tensors on torch's meta device, and keeps a log of all operations on them.

    The constructor goes the way that it goes with data:

    - Each operation that draws random numbers runs with data too, so that generators go on. The
      memory of its result is freed soon after.
    - Numbers that are read from tensors, as by ``item()``, are computed from the log.
    - Tensors without data say that they are on the CPU.

    Ranges of numbers have data, since constructors compute Python numbers from them. So have
    tensors of lists and of NumPy's arrays. The default device stays as it is: some packages skip
    initial values under ``torch.device("meta")``.
    """

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
        returned = [str(x.type) for x in func._schema.returns]
        returns_numbers = bool(returned) and not any("Tensor" in x for x in returned)
        if returns_numbers or len(self._logged(written)) < len(written):
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


class DeferredModel:
    """A model whose parameters are on the meta device, and the operations that made it."""

    def __init__(self, model: nn.Module, log: OperationLog) -> None:
        self.model, self._log = model, log

    def has_values(self, tensor: Tensor) -> bool:
        """Return whether the constructor gives values to a tensor."""
        return tensor.is_meta and self._log.is_defined(View.at_present(tensor))

    def values(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of parameters and buffers of the model, on the CPU.

        Random numbers are left as the constructor left them.
        """
        views = [View.at_present(x) for x in tensors.values()]
        for name, view in zip(tensors, views, strict=True):
            if not self._log.is_defined(view) and view.shape.numel():
                raise ExecutionError(
                    f"the constructor gives no values to {name}: its memory is as of torch.empty; "
                    "initialize it, or make the model and give it itself"
                )
        try:
            return [x.detach() for x in self._log.last_values(views)]
        except PipeError:
            raise
        except Exception as error:  # of an operation that fails on data, not without
            raise _failed(error) from error


def deferred(make: Callable[[], nn.Module]) -> DeferredModel:
    """Return the model that a function makes, without data."""
    log = OperationLog()
    mode = ConstructorMode(log)
    try:
        with AsOnCpu(mode), mode:
            model = make()
    except PipeError:
        raise
    except Exception as error:  # of the user's code
        raise _failed(error) from error
    return DeferredModel(model, log)


def _failed(error: Exception) -> ExecutionError:
    return ExecutionError(
        f"the constructor fails where px.split runs it without data: {type(error).__name__}: "
        f"{error!s:.300}; make the model and give it itself"
    )


def give_values(stages: Sequence[SplitStage | None], source: DeferredModel) -> None:
    """Replace tensors of stages that have no data, in the model of the stages too.

    These are parameters, buffers, and tensors in other attributes of modules, such as the list of
    weights of an `nn.LSTM`. Stages share tensors with ``source.model``, or have copies of them.
    """
    parts = [stage for stage in stages if stage is not None]
    modules = [module for stage in parts for module in stage.model.modules()]
    originals = dict(_named_tensors(source.model))
    shared = {id(x) for x in originals.values()}
    empty = {
        id(x): (stage.model_name(name), x)
        for stage in parts
        for name, x in _named_tensors(stage)
        if x.is_meta
    }
    wanted = {name: originals[name] for name, _ in empty.values()}
    others = [x for m in modules for value in _attributes(m).values() for x in tensors_in(value)]
    for x in others:
        if id(x) not in empty and source.has_values(x):
            name = f"another attribute ({len(wanted)})"
            empty[id(x)], wanted[name] = (name, x), x
            shared.add(id(x))
    values = dict(zip(wanted, source.values(wanted), strict=True))
    filled: dict[int, Tensor] = {}
    for key, (name, tensor) in empty.items():
        value = values[name] if key in shared else values[name].clone()
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        filled[key] = value
    for module in (*modules, *source.model.modules()):
        for tensors in (cast("dict[str, Any]", module._parameters), module._buffers):
            tensors.update({key: filled[id(x)] for key, x in tensors.items() if id(x) in filled})
        for attribute, nested in _attributes(module).items():
            module.__dict__[attribute] = mapped(lambda x: filled.get(id(x), x), nested)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return attributes that hold tensors without data, but for parameters and buffers."""
    return {
        key: value
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
        and isinstance(value, (Tensor, list, tuple, dict))
        and any(x.is_meta for x in tensors_in(value))
    }

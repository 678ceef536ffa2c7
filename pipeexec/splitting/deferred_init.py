"""`DeferredModel`: construct a model without data, and later give some parameters their values.

`deferred` runs a constructor with tensors of torch's meta device, and keeps a log of operations.
`DeferredModel.values` runs those again on which some parameters and buffers depend. Of the
other operations, those that draw random numbers run on tensors that are freed at once. So the
values are those that the constructor would have given, after the same `torch.manual_seed`, and at
most one tensor of another module is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeexec.nesting import tensors_in
from pipeexec.splitting.tracing.written_tensors import storage_of, written_tensors

__all__ = ["DeferredModel", "deferred", "give_values"]


class _Logged(NamedTuple):
    """One operation: its function, arguments and results.

    Attributes
    ----------
    function, args, kwargs, results
        The function, its arguments, and the tensors that it returned.
    written
        Arguments that the operation changes.
    is_random
        Whether it draws random numbers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    is_random: bool

    def storages(self) -> set[int]:
        """Return the storages that the operation makes or changes."""
        return {storage_of(x) for x in (*self.results, *self.written)}


class _Log(TorchDispatchMode):
    """Makes new tensors without data, and keeps all operations on them.

    Ranges of numbers keep their data, since constructors compute Python numbers from them. The
    default device stays as it is: some packages skip initial values under ``torch.device("meta")``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Logged] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_new = not tensors_in((args, kwargs)) and _takes_device(func)
        output = func(*args, **(kwargs | {"device": "meta"} if is_new else kwargs))
        results = tensors_in(output)
        if any(x.is_meta for x in (*tensors_in((args, kwargs)), *results)):
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            written = written_tensors(func, args, kwargs)
            self.operations.append(_Logged(func, args, kwargs, results, written, is_random))
        return output

    @contextmanager
    def truncated_normal(self) -> Iterator[None]:
        """Log `torch.nn.init.trunc_normal_` as one operation.

        It draws until all values are inside its limits, and so reads values.
        """
        original = init._no_grad_trunc_normal_

        def logged(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)
            call = _Logged(original, (tensor, *args), kwargs, (), (tensor,), is_random=True)
            self.operations.append(call)
            return tensor

        init._no_grad_trunc_normal_ = logged
        try:
            yield
        finally:
            init._no_grad_trunc_normal_ = original


def _takes_device(function: Any) -> bool:
    """Return whether a function makes tensors of any device, and no range of numbers."""
    name = function.name().removeprefix("aten::").partition(".")[0]
    is_range = name in {"arange", "range", "linspace", "logspace", "scalar_tensor"}
    return not is_range and any(x.name == "device" for x in function._schema.arguments)


class DeferredModel:
    """A model without data, and the operations that made it.

    Attributes
    ----------
    model
        The model; its parameters are on the meta device.
    """

    def __init__(self, model: nn.Module, operations: Iterable[_Logged]) -> None:
        self.model, self._operations = model, tuple(operations)

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of some parameters and buffers of the model, on the CPU.

        Random numbers come from torch's generator, which is left as the constructor leaves it.
        """
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        chosen = {name: state[name] for name in names}
        needed = {storage_of(x) for x in chosen.values()}
        for operation in reversed(self._operations):
            if operation.storages() & needed:
                arguments = tensors_in((operation.args, operation.kwargs))
                needed |= {storage_of(x) for x in (*operation.results, *arguments)}
        real: dict[int, Tensor] = {}
        for operation in self._operations:
            if operation.storages() & needed:
                _run(operation, real)
            elif operation.is_random:
                _run(operation, {})
        return {name: _real(x, real).detach() for name, x in chosen.items()}


def _run(operation: _Logged, real: dict[int, Tensor]) -> None:
    """Run an operation on real tensors, and keep the storages of its results."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda x: _real(x, real), (operation.args, operation.kwargs)
    )
    with torch.no_grad():
        results = tensors_in(operation.function(*args, **kwargs))
    for empty, result in zip(operation.results, results, strict=False):
        real.setdefault(storage_of(empty), result)


def _real(tensor: Tensor, real: dict[int, Tensor]) -> Tensor:
    """Return the tensor with data in place of one without; ``real`` has one of each storage."""
    if not tensor.is_meta:
        return tensor
    if storage_of(tensor) not in real:
        n_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        real[storage_of(tensor)] = torch.empty(n_elements, dtype=tensor.dtype)
    base = real[storage_of(tensor)]
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def deferred(make: Callable[[], nn.Module]) -> DeferredModel:
    """Return the model that a function makes, without data."""
    log = _Log()
    with log, log.truncated_normal():
        model = make()
    return DeferredModel(model, log.operations)


def give_values(
    stages: Sequence[nn.Module | None],
    source: DeferredModel,
    copies: Sequence[Mapping[int, nn.Parameter]],
) -> None:
    """Replace parameters and buffers of stages that have no data, in the model of the stages too.

    The parameters of stages are those of ``source.model``, and ``copies`` of some of them: for each
    stage, by the ids of these.
    """
    model = source.model
    names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
    names |= {id(copy): names[key] for own in copies for key, copy in own.items()}
    repeated = {id(copy) for own in copies for copy in own.values()}
    modules = [module for stage in stages if stage is not None for module in stage.modules()]
    empty = {
        id(x): x
        for module in modules
        for x in (*module._parameters.values(), *module._buffers.values())
        if x is not None and x.is_meta
    }
    values = source.values(names[key] for key in empty)
    filled: dict[int, Tensor] = {}
    for key, tensor in empty.items():
        value = values[names[key]].clone() if key in repeated else values[names[key]]
        is_parameter = isinstance(tensor, nn.Parameter)
        filled[key] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    for module in (*modules, *model.modules()):
        for tensors in (cast("dict[str, Any]", module._parameters), module._buffers):
            tensors.update({key: filled[id(x)] for key, x in tensors.items() if id(x) in filled})

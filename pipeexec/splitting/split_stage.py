"""`SplitStage`: a stage that runs a model's own forward, with stand-ins for other stages' modules.

The model's Python code between its modules runs on every stage. It runs until the last module of
the stage has returned. What it computes from stand-ins' empty values is of no use, and no module of
the stage takes it: `pipeexec.splitting.data_flow` tells which values a stage needs.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipeexec.splitting.data_flow import Source
from pipeexec.splitting.nested_values import tensors_of
from pipeexec.splitting.stand_in import StandIn, on_meta, to_meta, zeros

__all__ = ["Border", "Skeleton", "SplitStage"]


class _StageEnd(Exception):  # no error
    """Ends a forward after the last module of a stage."""


class Border(NamedTuple):
    """Values that pass from one stage to the next.

    Attributes
    ----------
    whole
        Origins of the tensors, in order.
    shapes
        Numbers of the model's inputs of which the shape alone passes: as tensors of these shapes
        and a last dimension of 0.
    """

    whole: tuple[Source, ...]
    shapes: tuple[int, ...] = ()


class Skeleton:
    """Facts about a model that all its stages share.

    Parameters
    ----------
    model
        The model.
    names
        Module of each call.
    uncut
        Modules that are not cut.
    arguments
        Positional and keyword arguments of the sample.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        uncut: frozenset[str],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self.model, self.names, self.uncut, self.arguments = model, names, uncut, arguments
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        self.dtypes = tuple(x.dtype for x in tensors_of(arguments))
        self.numbers: dict[str, list[int]] = defaultdict(list)
        for number, name in enumerate(names):
            self.numbers[name].append(number)
        self._empty: dict[str, nn.Module] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> Skeleton:
        return self  # nothing changes; copies of stages do not copy the model

    @property
    def n_inputs(self) -> int:
        """Tensors of the arguments."""
        return len(self.dtypes)

    def empty(self, name: str) -> nn.Module:
        """Return a module without data; see `on_meta`."""
        if name not in self._empty:
            self._empty[name] = on_meta(self.model.get_submodule(name))
        return self._empty[name]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class SplitStage(nn.Module):
    """One stage of a model; names of its parameters begin with ``model.``.

    Parameters
    ----------
    skeleton
        The model, its calls and its arguments.
    own
        Numbers of the calls of this stage.
    receives, sends
        Borders before and after the stage; ``sends`` is None for the last one, which returns the
        model's output.
    parameters
        Parameters outside of uncut modules that this stage needs.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        own: range,
        receives: Border,
        sends: Border | None,
        parameters: frozenset[str],
    ) -> None:
        super().__init__()
        self._skeleton, self._own = skeleton, own
        self._receives, self._sends = receives, sends
        self._calls: Counter[str] = Counter()
        self._values: dict[Source, Tensor] = {}
        self._shapes: tuple[torch.Size, ...] = ()
        # Results of stand-ins by call and shapes of inputs: leaves without data, and their nesting.
        self._results: dict[tuple[int, tuple[torch.Size, ...]], tuple[list[Any], Any]] = {}
        self.model = _Copies(self, parameters).copied("", skeleton.model)

    @cached_property
    def own_modules(self) -> frozenset[str]:
        """Names of the modules of this stage."""
        return frozenset(self._skeleton.names[k] for k in self._own)

    def forward(self, *values: Tensor) -> Any:
        """Return the values that the next stage receives; of the last stage, the model's output."""
        self._calls.clear()
        self._receive(values)
        inputs = [self._values[Source("input", k)] for k in range(self._skeleton.n_inputs)]
        args, kwargs = self._skeleton.with_tensors(inputs)
        try:
            return self.model(*args, **kwargs)
        except _StageEnd:
            return self._sent()
        finally:
            self._values = {}

    def _receive(self, values: Sequence[Tensor]) -> None:
        """Take the values of the stage before."""
        whole, shapes = self._receives
        self._shapes = tuple(x.shape for x in values)
        self._values = dict(zip(whole, values, strict=False))
        for number, empty in zip(shapes, values[len(whole) :], strict=True):
            dtype = self._skeleton.dtypes[number]
            self._values[Source("input", number)] = zeros(empty.shape[:-1], dtype, empty.device)

    def _sent(self) -> tuple[Tensor, ...]:
        """Return the values for the next stage."""
        assert self._sends is not None, "only the last stage sends nothing"
        whole = [self._values[source] for source in self._sends.whole]
        inputs = [self._values[Source("input", number)] for number in self._sends.shapes]
        return (*whole, *(x.new_empty((*x.shape, 0)) for x in inputs))

    def _next_number(self, name: str) -> int:
        """Return the number of the next call of a module."""
        number = self._skeleton.numbers[name][self._calls[name]]
        self._calls[name] += 1
        return number

    def note(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Keep the tensors that a call returns; a hook of the stage's modules.

        A module may be called on several stages. For a call of another one, return its result.
        """
        number = self._next_number(name)
        if number not in self._own:
            return self._filled(number, name, args, kwargs)
        for position, tensor in enumerate(tensors_of(output)):
            self._values[Source("output", number, position)] = tensor
        if number == self._own[-1] and self._sends is not None:
            raise _StageEnd
        return output

    def answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of a module that this stage does not have."""
        return self._filled(self._next_number(name), name, args, kwargs)

    def _filled(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of another stage: values that were received, and zeros."""
        leaves, spec = self._result(number, name, args, kwargs)
        device = next(iter(self._values.values())).device
        filled, position = list(leaves), 0
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = self._values.get(Source("output", number, position))
                filled[k] = zeros(leaf.shape, leaf.dtype, device) if value is None else value
                position += 1
        return pytree.tree_unflatten(filled, spec)

    def _result(self, number: int, name: str, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Return the result of a call without data, flat, and its nesting."""
        key = number, self._shapes
        if key not in self._results:
            with torch.no_grad(), _disable_current_modes():
                args, kwargs = to_meta((args, kwargs))
                output = self._skeleton.empty(name)(*args, **kwargs)
            self._results[key] = pytree.tree_flatten(output)
        return self._results[key]


class _Copies:
    """Copies the modules of a model for one stage.

    Modules around uncut ones are copied, with the parameters that the stage needs. Uncut modules of
    the stage are copied at their top, so that hooks are those of the stage. Others are stand-ins.
    """

    def __init__(self, stage: SplitStage, parameters: frozenset[str]) -> None:
        self.stage, self.skeleton, self.parameters = stage, stage._skeleton, parameters
        self.copies: dict[int, nn.Module] = {}

    def copied(self, name: str, module: nn.Module) -> nn.Module:
        """Return the copy of a module, which may have several names."""
        if id(module) not in self.copies:
            self.copies[id(module)] = self._copy(name, module)
        return self.copies[id(module)]

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        is_called = name in self.skeleton.numbers
        if name in self.skeleton.uncut and not is_called:
            return copy.deepcopy(module)  # without parameters: each stage runs it
        if is_called and name not in self.stage.own_modules:
            return StandIn(self.skeleton.empty(name), partial(self.stage.answer, name))
        result = copy.copy(module)
        for attribute, value in module.__dict__.items():
            if attribute.startswith("_") and isinstance(value, dict):
                result.__dict__[attribute] = copy.copy(value)
        if is_called:
            result.register_forward_hook(partial(self.stage.note, name), with_kwargs=True)
            return result
        prefix = f"{name}." if name else ""
        for key, child in module._modules.items():
            result._modules[key] = child and self.copied(prefix + key, child)
        for key, parameter in module._parameters.items():
            if parameter is not None and prefix + key not in self.parameters:
                del result._parameters[key]
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                empty = zeros(parameter.shape, parameter.dtype, device)
                result.register_buffer(key, empty, persistent=False)
        return result

"""`SplitStage`: a stage that runs a model's own forward, with stand-ins for other stages' modules.

The model's Python code between its modules runs on every stage. It runs until the last module of
the stage has returned. What it computes from stand-ins' empty values is of no use, and no module of
the stage takes it: `pipeexec.splitting.tracing.data_flow` tells which values a stage needs.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipeexec.nesting import tensors_in, with_tensors
from pipeexec.splitting.skeleton import Border, Skeleton
from pipeexec.splitting.stand_in import StandIn, to_meta, zeros
from pipeexec.splitting.tracing.data_flow import Source
from pipeexec.splitting.tracing.exported_model import ExportedModel

if TYPE_CHECKING:
    from pipeexec.splitting.split_facts import SplitFacts

__all__ = ["SplitStage"]


class _StageEnd(Exception):  # no error
    """Ends a forward after the last module of a stage."""


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
        Parameters that this stage needs outside of calls.
    copies
        Copies of parameters of earlier stages, by the ids of these.

    Attributes
    ----------
    number
        Number of the stage.
    facts
        Facts about the split for a pipeline; None until it is complete.
    compile_options
        Arguments of `compile`; None if it was not called.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        own: range,
        receives: Border,
        sends: Border | None,
        parameters: frozenset[str],
        copies: Mapping[int, nn.Parameter],
    ) -> None:
        super().__init__()
        self.number = 0
        self.facts: SplitFacts | None = None
        self.compile_options: dict[str, Any] | None = None
        self._skeleton, self._own = skeleton, own
        self._receives, self._sends = receives, sends
        self._calls: Counter[str] = Counter()
        self._values: dict[Source, Tensor] = {}
        self._shapes: tuple[torch.Size, ...] = ()
        # Results of stand-ins by call and shapes of inputs: leaves without data, and their nesting.
        self._results: dict[tuple[int, tuple[torch.Size, ...]], tuple[list[Any], Any]] = {}
        self.model = _Copies(self, parameters, copies).copied("", skeleton.model)

    @cached_property
    def own_modules(self) -> frozenset[str]:
        """Names of the modules of this stage."""
        return frozenset(self.call_names)

    @property
    def call_names(self) -> tuple[str, ...]:
        """Module of each call of this stage, in order."""
        return tuple(self._skeleton.names[k] for k in self._own)

    def compile(self, **options: Any) -> None:
        """Compile each block of the stage in place, with the options of `torch.compile`.

        The model's code between blocks is not compiled. Blocks of one class are compiled once.
        """
        self.compile_options = options
        for name in sorted(self.own_modules):
            for module in _without_containers(self.model.get_submodule(name)):
                module.compile(**options)

    @property
    def whole(self) -> nn.Module:
        """The model that was split."""
        model = self._skeleton.model
        return model.source if isinstance(model, ExportedModel) else model

    def model_name(self, name: str) -> str:
        """Return the name in the model of a parameter or buffer of this stage."""
        name, model = name.removeprefix("model."), self._skeleton.model
        return model.original_name(name) if isinstance(model, ExportedModel) else name

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
        """Keep the tensors that a call returns; a hook of the stage's modules."""
        number = self._next_number(name)
        if number not in self._own:
            return output
        for position, tensor in enumerate(tensors_in(output)):
            self._values[Source("output", number, position)] = tensor
        if number == self._own[-1] and self._sends is not None:
            raise _StageEnd
        return output

    def call_shared(
        self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a shared module, or return the result of a call of another stage."""
        number = self._skeleton.numbers[name][self._calls[name]]
        if number in self._own:
            return forward(*args, **kwargs)
        return self._filled(number, name, args, kwargs)

    def answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of a module that this stage does not have."""
        return self._filled(self._next_number(name), name, args, kwargs)

    def _filled(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of another stage: values that were received, and zeros."""
        result = self._result(number, name, args, kwargs)
        device = next(iter(self._values.values())).device
        values = (
            (self._values.get(Source("output", number, position)), empty)
            for position, empty in enumerate(tensors_in(result))
        )
        return with_tensors(
            result,
            [zeros(y.shape, y.dtype, device) if x is None else x for x, y in values],
        )

    def _result(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a call without data."""
        key = number, self._shapes
        if key not in self._results:
            with torch.no_grad(), _disable_current_modes():
                args, kwargs = to_meta((args, kwargs))
                self._results[key] = self._skeleton.empty(name)(*args, **kwargs)
        return self._results[key]


def _without_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or the parts of a container: torch leaves the code of containers as it is."""
    if not isinstance(module, nn.Sequential):
        yield module
        return
    for child in module:
        yield from _without_containers(child)


class _Copies:
    """Copies the modules of a model for one stage.

    Modules around uncut ones are copied, with the parameters that the stage needs. Uncut modules of
    the stage are copied at their top, so that hooks are those of the stage, and down to parameters
    of earlier stages. Others are stand-ins.
    """

    def __init__(
        self,
        stage: SplitStage,
        parameters: frozenset[str],
        tied: Mapping[int, nn.Parameter],
    ) -> None:
        self.stage, self.skeleton = stage, stage._skeleton
        self.tied = tied
        self.needed = {id(self.skeleton.model.get_parameter(name)) for name in parameters}
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
            return self._stand_in(name)
        if is_called:
            result = self._untied(module)
            if any(k not in self.stage._own for k in self.skeleton.numbers[name]):
                result.forward = partial(self.stage.call_shared, name, result.forward)
            result.register_forward_hook(partial(self.stage.note, name), with_kwargs=True)
            return result
        result = _copied_top(module)
        prefix = f"{name}." if name else ""
        for key, child in module._modules.items():
            result._modules[key] = child and self.copied(prefix + key, child)
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in self.needed:
                result._parameters[key] = self.tied.get(id(parameter), parameter)
            elif parameter is not None:
                del result._parameters[key]
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                empty = zeros(parameter.shape, parameter.dtype, device)
                result.register_buffer(key, empty, persistent=False)
        return result

    def _stand_in(self, name: str) -> StandIn:
        """Return a stand-in, with the parameters that the forward itself reads."""
        result = StandIn(self.skeleton.empty(name), partial(self.stage.answer, name))
        for key, parameter in self.skeleton.model.get_submodule(name)._parameters.items():
            if parameter is not None and id(parameter) in self.needed:
                result._parameters[key] = self.tied.get(id(parameter), parameter)
        return result

    def _untied(self, module: nn.Module) -> nn.Module:
        """Return a copy of an uncut module, with copies of parameters of earlier stages."""
        result = _copied_top(module)
        for key, parameter in module._parameters.items():
            result._parameters[key] = self.tied.get(id(parameter), parameter)
        for key, child in module._modules.items():
            if child is not None and any(id(p) in self.tied for p in child.parameters()):
                if id(child) not in self.copies:
                    self.copies[id(child)] = self._untied(child)
                result._modules[key] = self.copies[id(child)]
        return result


def _copied_top(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares parameters, buffers and children with it."""
    result = copy.copy(module)
    for attribute, value in module.__dict__.items():
        if attribute.startswith("_") and isinstance(value, dict):
            result.__dict__[attribute] = copy.copy(value)
    return result

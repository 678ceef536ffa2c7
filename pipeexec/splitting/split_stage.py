"""`SplitStage`: a stage that runs a model's own forward, with stand-ins for other stages' modules.

The model's Python code between its modules runs on every stage, until the last module of the stage
has returned. It takes values as the modules of earlier stages returned them, so that writes in
place happen on every stage as in the model. Values that a stage does not need are missing: they
are NaN, and no result depends on them. `pipeexec.splitting.data_flow` tells which values a stage
needs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.nesting import Arguments, tensors_in, with_tensors
from pipeexec.splitting.borders import Route, Skeleton, shape_alone
from pipeexec.splitting.data_flow import Mode, Source
from pipeexec.splitting.exported_model import ExportedModel
from pipeexec.splitting.model_state import CONTAINERS, attributes, refill
from pipeexec.splitting.operations import argument_tensors, present_line
from pipeexec.splitting.stand_in import ONE_WAY, StandIn, is_missing, is_recorder, missing
from pipeexec.stages.recompute import tensor_version
from pipesim.errors import ArgumentError, ExecutionError

if TYPE_CHECKING:
    from pipeexec.splitting.split_facts import SplitFacts


#: Parts of torch's errors of operations in place: on a value that was received, or is missing.
_REFUSED_WRITES = "leaf Variable", "single memory location"


class _StageEnd(BaseException):  # no error, and no handler of the model's code takes it for one
    """Ends a forward after the last module of a stage."""


class _Value:
    """A value that a stage has received or will send, and its version counter at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor_version(tensor)


class _Origins:
    """Modules of the model that a stage has copies of, to which the attributes of these return.

    A copy of the stage, for another replica, has none.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._n_hooks: dict[str, int] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> _Origins:
        return _Origins()

    def add(self, name: str, module: nn.Module) -> None:
        """Add a module of the model that the stage calls."""
        self.modules[name] = module
        self._n_hooks[name] = _n_hooks(module)

    def return_attributes(self, name: str, module: nn.Module) -> None:
        """Give the model's module the attributes of its copy, with which it shares buffers."""
        if (original := self.modules.get(name)) is None:
            return
        for key, value in attributes(module):
            if key not in module._buffers and key != "forward":  # that of `call_shared`
                original.__dict__[key] = value

    def set(self, name: str, key: str, value: Any) -> None:
        """Set an attribute of a module of the model."""
        if name in self.modules:
            self.modules[name].__dict__[key] = value

    def check_hooks(self, name: str) -> None:
        """Raise if a module of the model has got hooks that its copy does not have."""
        if name in self._n_hooks and _n_hooks(self.modules[name]) != self._n_hooks[name]:
            raise ExecutionError(
                f"{name!r} of the model has got or lost hooks since pipeexec.split, which its copy "
                f"in the stage has not; change those of stage.model.get_submodule({name!r}) instead"
            )


class _Attribute(NamedTuple):
    """Value of an attribute, and its contents if it is a container."""

    value: Any
    contents: Any


def _attribute(module: nn.Module, key: str) -> _Attribute | None:
    """Return an attribute; None if there is none."""
    if key not in module.__dict__:
        return None
    value = module.__dict__[key]
    return _Attribute(value, copy.copy(value) if isinstance(value, CONTAINERS) else None)


def _restore_attribute(module: nn.Module, key: str, before: _Attribute | None) -> None:
    if before is None:
        module.__dict__.pop(key, None)
        return
    module.__dict__[key] = before.value
    if before.contents is not None:
        refill(before.value, before.contents)


def _refuse_call(name: str, *_: Any, **__: Any) -> None:
    """Raise for the call of a module that the sample did not call."""
    raise ExecutionError(
        f"the forward calls {name!r}, at {present_line()}, which that of the sample did not; "
        + ONE_WAY
    )


def _n_hooks(module: nn.Module) -> int:
    """Return the number of hooks, but for those that every stage runs."""
    hooks = module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    recorders = map(is_recorder, module._forward_hooks.values())
    return sum(map(len, (*hooks, module._forward_hooks))) - sum(recorders)


class SplitStage(nn.Module):
    """One stage of a model; names of its parameters begin with ``model.``.

    Parameters
    ----------
    own
        Numbers of the calls of this stage.
    route
        Values that the stage receives and sends. The last one sends none: it returns the model's
        output.
    parameters
        Parameters that this stage needs outside of calls.
    copies
        Copies of parameters of earlier stages, by the ids of these.
    changed
        Modules outside of calls whose buffers the forward changes, and whether this stage does.
    stateful
        Modules that change attributes or buffers of theirs.
    once
        Modules outside of calls, and attributes that the first forward alone sets.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        own: range,
        route: Route,
        parameters: frozenset[str],
        copies: Mapping[int, nn.Parameter],
        changed: Mapping[str, bool],
        stateful: frozenset[str],
        once: frozenset[tuple[str, str]],
    ) -> None:
        super().__init__()
        self.number = 0
        self.facts: SplitFacts | None = None  # None until the split is complete
        self.compile_options: dict[str, Any] | None = None  # None if `compile` was not called
        self.training = skeleton.model.training
        self._skeleton, self._own = skeleton, own
        self._receives, self._sends = route
        self._kept = frozenset(() if self._sends is None else self._sends.whole)
        self._written, self._stateful = skeleton.flow.written, stateful
        self._n_calls, self._is_foreign = 0, False
        self._values: dict[Source, _Value] = {}
        self._origins = _Origins()
        # Parameters of other stages outside of calls: their module, key, shape and type.
        self._missing: list[tuple[nn.Module, str, torch.Size, torch.dtype]] = []
        # Modules, and attributes of theirs: those that a forward sets for a time, and those that
        # stay from the first one on, which the last stage gives to the model.
        self._transient: list[tuple[nn.Module, str]] = []
        self._once: list[tuple[nn.Module, str, str]] = []
        self._device = torch.device("cpu")
        self.model = _Copies(self, parameters, copies, changed).copied("", skeleton.model)
        self._set_missing(self._device)
        self._names = frozenset(name for name, _ in self.model.named_parameters())
        # Parameters outside of calls, whose requires_grad a forward may set for a time.
        self._outer = [p for key, p in self.model.named_parameters() if key in parameters]
        modules = dict(self.model.named_modules())
        for name, key in sorted(skeleton.flow.transient - once):
            if name in modules:
                self._transient.append((modules[name], key))
        for name, key in sorted(once):
            if self._sends is None:
                self._origins.modules[name] = skeleton.model.get_submodule(name)
            self._once.append((modules[name], name, key))

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

    @property
    def returns_gradients(self) -> bool:
        """Whether the stages return gradients of all inputs of the model that may have one."""
        trained, dtypes = self._skeleton.trained, self._skeleton.dtypes
        floating = {k for k, x in enumerate(dtypes) if x.is_floating_point or x.is_complex}
        return bool(trained) and trained >= floating

    def model_name(self, name: str) -> str:
        """Return the name in the model of a parameter or buffer of this stage."""
        name, model = name.removeprefix("model."), self._skeleton.model
        return model.original_name(name) if isinstance(model, ExportedModel) else name

    def forward(self, *values: Tensor) -> Any:
        """Return the values that later stages receive; of the last stage, the model's output."""
        mode = Mode(self.training, torch.is_grad_enabled())
        if mode in self._skeleton.refused:
            raise ExecutionError(
                f"stage {self.number} cannot run in {mode}: {self._skeleton.refused[mode]}"
            )
        before = [(module, key, _attribute(module, key)) for module, key in self._transient]
        once = [_attribute(module, key) for module, _, key in self._once]
        trained = [p.requires_grad for p in self._outer]
        try:
            args, kwargs = self._begin(values)
            output = self.model(*args, **kwargs)
            self._check_end()
            self._check_received("the forward returns", tensors_in(output))
            self._end_once(once)
            return output
        except _StageEnd:
            for module, key, value in before:
                _restore_attribute(module, key, value)
            for parameter, is_trained in zip(self._outer, trained, strict=True):
                if parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)
            self._end_once(once)
            return self._sent()
        except RuntimeError as error:
            if not any(text in str(error) for text in _REFUSED_WRITES):
                raise
            raise ExecutionError(
                f"stage {self.number} writes in place to a value of another stage, unlike the "
                "sample's forward; write to a clone(), or split with a sample that takes this way"
            ) from error
        finally:
            self._values, self._n_calls = {}, 0

    def _end_once(self, before: Sequence[_Attribute | None]) -> None:
        """Give attributes that forwards set to the model, if the last stage has them.

        A stage does not keep one that is computed from missing values.
        """
        for (module, name, key), old in zip(self._once, before, strict=True):
            value = module.__dict__.get(key)
            if isinstance(value, Tensor) and is_missing(value):
                _restore_attribute(module, key, old)
            elif self._sends is None:
                self._origins.set(name, key, value)

    def is_running(self) -> bool:
        """Return whether the forward of the stage runs."""
        return bool(self._values)

    def _begin(self, values: Sequence[Tensor]) -> Arguments:
        """Take the values of the stages before, and return the arguments of the model."""
        device = values[0].device
        if device != self._device:
            self._set_missing(device)
        rest, shapes = iter(values), dict[int, Tensor]()
        for whole, numbers in self._receives:
            for source, value in zip(whole, rest, strict=False):
                is_constant = source in self._skeleton.constant and value.requires_grad
                self._values.setdefault(source, _Value(value.detach() if is_constant else value))
            shapes |= zip(numbers, rest, strict=False)
        for number, empty in shapes.items():
            source, dtype = Source("input", number), self._skeleton.dtypes[number]
            if source not in self._values:
                is_written = source in self._written
                value = missing(empty.shape[:-1], dtype, empty.device, is_written=is_written)
                self._values[source] = _Value(value)
        return self._skeleton.with_tensors(
            [self._for_code(Source("input", k)) for k in range(self._skeleton.n_inputs)]
        )

    def _set_missing(self, device: torch.device) -> None:
        """Let parameters of other stages be missing on a device."""
        self._device = device
        for module, key, shape, dtype in self._missing:
            module.__dict__[key] = missing(shape, dtype, device)

    def parameters_of(self, name: str, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the parameters of a module around calls; to the model's code, those of all stages.

        So the code may ask for their type and device, and whether they are trained. The values of
        those of other stages are missing.
        """
        prefix = f"{name}." if name else ""
        for key, value in self._skeleton.model.get_submodule(name).named_parameters("", recurse):
            if prefix + key in self._names:
                yield self.model.get_parameter(prefix + key)
            elif self.is_running():
                empty = missing(value.shape, value.dtype, self._device)
                yield empty.requires_grad_(value.requires_grad)

    def _for_code(self, source: Source) -> Tensor:
        """Return a value for the model's code: a copy, if the code writes to it."""
        value = self._values[source].tensor
        is_input = source.kind == "input"
        if is_input and value.requires_grad and source.number not in self._skeleton.trained:
            value = value.detach()
        return value.clone() if source in self._written else value

    def _sent(self) -> tuple[Tensor, ...]:
        """Return the values for later stages."""
        assert self._sends is not None, "only the last stage sends nothing"
        inputs = (self._values[Source("input", number)].tensor for number in self._sends.shapes)
        return (
            *(self._unchanged(source) for source in self._sends.whole),
            *map(shape_alone, inputs),
        )

    def _unchanged(self, source: Source) -> Tensor:
        """Return a value as it was; raise if its memory has been written to."""
        value = self._values[source]
        if value.tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ExecutionError(
                f"stage {self.number} cannot send {self._described(source)}: it is a tensor of "
                "torch.inference_mode; let the forward use torch.no_grad in its place"
            )
        if tensor_version(value.tensor) != value.version:
            raise ExecutionError(
                f"stage {self.number} cannot send {self._described(source)}: it was changed in "
                "place after that, which the forward of the sample did not; let the forward write "
                "to a clone(), or split with a sample for which it writes"
            )
        return value.tensor

    def _described(self, source: Source) -> str:
        if source.kind == "input":
            return f"argument {source.number} of the model"
        name = self._skeleton.names[source.number]
        return f"what {name!r} {'returned' if source.kind == 'output' else 'took'}"

    def _next_number(self, name: str) -> int:
        """Return the number of the next call; raise if it is none of the sample's."""
        number, names = self._n_calls, self._skeleton.names
        if not self._values:
            raise ExecutionError(
                f"the backward calls {name!r} again, as the model's forward has a checkpoint of "
                "several modules; let it checkpoint each of them alone"
            )
        if number >= len(names) or names[number] != name:
            expected = f"called {names[number]!r}" if number < len(names) else "ended"
            raise ExecutionError(
                f"the forward calls {name!r}, at {present_line()}, where that of the sample "
                f"{expected}; {ONE_WAY}"
            )
        self._n_calls += 1
        return number

    def _check_end(self) -> None:
        """Raise if the model has returned without some calls."""
        if self._n_calls < len(self._skeleton.names):
            raise ExecutionError(
                f"the forward returns without calling {self._skeleton.names[self._n_calls]!r}, "
                f"which that of the sample called; {ONE_WAY}"
            )

    def note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Keep the tensors that a call returns; a hook of the stage's modules."""
        if self._is_foreign:  # a call of another stage, whose result is a stand-in's
            self._is_foreign = False
            return output
        number = self._next_number(name)
        self._origins.check_hooks(name)
        if name in self._stateful:
            self._origins.return_attributes(name, module)
        outputs = tensors_in(output)
        self._check_received(f"{name!r} takes", (*argument_tensors(args, kwargs), *outputs))
        for position, tensor in enumerate(outputs):
            self._keep(Source("output", number, position), tensor)
        if changed := self._skeleton.flow.calls[number].changed:
            arguments = tensors_in((args, kwargs))
            for position in changed:
                self._keep(Source("argument", number, position), arguments[position])
        if self._sends is not None and number == self._own[-1]:
            raise _StageEnd
        return output

    def _check_received(self, what: str, values: Iterable[Tensor]) -> None:
        """Raise if a value is missing."""
        if any(map(is_missing, values)):
            raise ExecutionError(
                f"{what} a value that stage {self.number} did not receive, as the forward of the "
                f"sample did not need it there; {ONE_WAY}"
            )

    def _keep(self, source: Source, tensor: Tensor) -> None:
        """Keep a value that the next stage receives."""
        if source in self._kept:
            if source in self._skeleton.constant and tensor.requires_grad:
                raise ExecutionError(
                    f"{self._described(source)} needs a gradient, which the sample's did not; let "
                    "the model return it with a gradient for all batches, or split with such a "
                    "sample"
                )
            self._values[source] = _Value(tensor.clone() if source in self._written else tensor)

    def call_shared(
        self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a shared module, or return the result of a call of another stage."""
        if self._n_calls in self._own or self._n_calls >= len(self._skeleton.names):
            return forward(*args, **kwargs)
        self._is_foreign = True
        return self.answer(name, *args, **kwargs)

    def answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of another stage: values that were received, others missing.

        Arguments that the call changes are changed.
        """
        number = self._next_number(name)
        call = self._skeleton.flow.calls[number]
        result = self._skeleton.empty_result(number, self.training, args, kwargs)
        arguments = tensors_in((args, kwargs)) if call.changed or call.same else ()
        same, repeated, tensors = dict(call.same), dict(call.repeated), []
        for position, empty in enumerate(tensors_in(result)):
            source = Source("output", number, position)
            if position in same:
                tensors.append(arguments[same[position]])
                if source in self._values:
                    tensors[-1].copy_(self._values[source].tensor)
            elif position in repeated:
                tensors.append(tensors[repeated[position]])
            elif source in self._values:
                tensors.append(self._for_code(source))
            else:
                is_written = source in self._written
                tensors.append(
                    missing(empty.shape, empty.dtype, self._device, is_written=is_written)
                )
        for position in sorted(call.changed):
            source = Source("argument", number, position)
            if source in self._values:
                arguments[position].copy_(self._values[source].tensor)
        return with_tensors(result, tensors)


def check_hooks(model: nn.Module, names: Sequence[str], calls: Sequence[range]) -> None:
    """Raise if hooks would run on several stages, or on none.

    ``names`` are the modules that are called, ``calls`` the calls of each stage.
    """
    inner = {id(x) for name in set(names) for x in model.get_submodule(name).modules()}
    for name, module in model.named_modules():
        if _n_hooks(module) and id(module) not in inner:
            raise ArgumentError(
                f"{name or type(model).__name__!r} has hooks, and stages would each run them; "
                "add them to its blocks, which run on one stage, or remove them"
            )
    for stage, own in enumerate(calls[:-1]):
        module = model.get_submodule(names[own[-1]])
        if module._backward_hooks or module._backward_pre_hooks:
            raise ArgumentError(
                f"{names[own[-1]]!r} has a backward hook and ends stage {stage}, where torch does "
                "not run it; cut behind another module, or give its parts the hook"
            )


def _without_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or the parts of a container: torch leaves the code of containers as it is."""
    if not isinstance(module, nn.Sequential):
        yield module
        return
    for child in module:
        yield from _without_containers(child)


class _Method:
    """Method of a module for a part of it, which does not keep the module in memory.

    That of a copied part is of the module's copy.
    """

    def __init__(self, method: Any) -> None:
        self._owner, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._owner(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        owner = self._owner()
        return _Method(MethodType(self._function, memo.get(id(owner), owner)))


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
        changed: Mapping[str, bool],
    ) -> None:
        self.stage, self.skeleton = stage, stage._skeleton
        self.tied, self.changed, self.called = tied, changed, set(stage._skeleton.names)
        self.needed = {id(self.skeleton.model.get_parameter(name)) for name in parameters}
        self.copies: dict[int, nn.Module] = {}

    def copied(self, name: str, module: nn.Module) -> nn.Module:
        """Return the copy of a module, which may have several names."""
        if id(module) not in self.copies:
            self.copies[id(module)] = self._copy(name, module)
        return self.copies[id(module)]

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        is_called = name in self.called
        is_unused = name in self.skeleton.uncut and not is_called
        if is_unused and not any(True for _ in module.parameters()):
            return copy.deepcopy(module)  # each stage runs it
        if is_called and name not in self.stage.own_modules:
            return self._stand_in(name)
        if is_called:
            result = self._untied(module)
            self.stage._origins.add(name, module)
            calls = (k for k, x in enumerate(self.skeleton.names) if x == name)
            if any(k not in self.stage._own for k in calls):
                forward = result.forward
                if isinstance(forward, MethodType) and forward.__self__ is result:
                    forward = _Method(forward)
                result.forward = partial(_Method(self.stage.call_shared), name, forward)
            note = partial(_Method(self.stage.note), name)
            result.register_forward_hook(note, with_kwargs=True)
            return result
        result = _copied_top(module)
        if name not in self.skeleton.flow.ran:
            result.forward = partial(_refuse_call, name)
        result.__dict__["parameters"] = partial(_Method(self.stage.parameters_of), name)
        for key, value in attributes(module):
            if isinstance(value, CONTAINERS) and key not in module._buffers:
                result.__dict__[key] = copy.copy(value)
        prefix = f"{name}." if name else ""
        for key, child in module._modules.items():
            result._modules[key] = child and self.copied(prefix + key, child)
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in self.needed:
                result._parameters[key] = self.tied.get(id(parameter), parameter)
            elif parameter is not None:
                del result._parameters[key]
                self.stage._missing.append((result, key, parameter.shape, parameter.dtype))
        if self.changed.get(name):
            result._buffers = module._buffers
        elif name in self.changed:  # of another stage; the code changes copies here
            for key, buffer in module._buffers.items():
                copied = None if buffer is None else buffer.clone()
                result.register_buffer(key, copied, persistent=False)
        return result

    def _stand_in(self, name: str) -> StandIn:
        """Return a stand-in, with hooks that record, and parameters that the forward reads."""
        answer = partial(_Method(self.stage.answer), name)
        result = StandIn(self.skeleton.empty[name], answer, _Method(self.stage.is_running))
        module = self.skeleton.model.get_submodule(name)
        for number, hook in module._forward_hooks.items():
            if is_recorder(hook):
                result._forward_hooks[number] = hook
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in self.needed:
                result._parameters[key] = self.tied.get(id(parameter), parameter)
        return result

    def _untied(self, module: nn.Module) -> nn.Module:
        """Return a copy of an uncut module, with copies of parameters of earlier stages."""
        result = _copied_top(module)
        if not any(id(p) in self.tied for p in module.parameters()):  # no earlier stage calls it
            result._buffers = module._buffers
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
    result = object.__new__(type(module))  # classes may refuse `copy.copy`
    result.__dict__.update(module.__dict__)
    for attribute, value in module.__dict__.items():
        if attribute.startswith("_") and isinstance(value, (dict, set)):
            result.__dict__[attribute] = copy.copy(value)
    return result

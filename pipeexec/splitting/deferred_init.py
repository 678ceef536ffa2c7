"""`DeferredModel`: construct a model without data, and later give some parameters their values.

`deferred` runs a constructor under a `ConstructorMode`, which keeps a log of operations.
`DeferredModel.values` runs those again on which some parameters and buffers depend. So the values
are those that the constructor would have given, after the same `torch.manual_seed`, and the tensors
of one other module at a time are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from pipeexec.nesting import mapped, tensors_in
from pipeexec.splitting.constructor_modes import AsOnCpu, ConstructorMode
from pipeexec.splitting.operation_log import OperationLog, View
from pipeexec.splitting.split_stage import SplitStage
from pipesim.errors import ExecutionError, PipeError


class DeferredModel:
    """A model without data, and the operations that made it.

    Attributes
    ----------
    model
        The model; its parameters are on the meta device.
    """

    def __init__(self, model: nn.Module, log: OperationLog) -> None:
        self.model, self._log = model, log

    def has_values(self, tensor: Tensor) -> bool:
        """Return whether the constructor gives values to a tensor."""
        return tensor.is_meta and self._log.is_defined(View.at_present(tensor))

    def values(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of parameters and buffers of the model, on the CPU.

        Random numbers are left as the constructor left them.

        Raises
        ------
        ExecutionError
            If the constructor gives no values to a tensor, or in a way that the log does not have.
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
    """Return the model that a function makes, without data.

    Raises
    ------
    ExecutionError
        If the constructor fails, or does what cannot be done without data.
    """
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

"""`Skeleton`: facts about a model that its stages share; `Border`: values between stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.nesting import Arguments, leaves, tensors_in, with_tensors
from pipeexec.splitting.model_state import same_python_draws
from pipeexec.splitting.stand_in import run_without_data
from pipeexec.splitting.tracing.data_flow import DataFlow, Mode, Source
from pipesim.errors import ExecutionError


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


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return shapes of the tensors in arguments, and the other values."""
    values = (*args, *kwargs.values())
    if not all(x is None or isinstance(x, (Tensor, bool, int, float, str)) for x in values):
        values = tuple(leaf.value for leaf in leaves((args, kwargs)))
    return tuple(x.shape if isinstance(x, Tensor) else x for x in values)


class Skeleton:
    """Facts about a model that all its stages share.

    Parameters
    ----------
    model
        The model.
    uncut
        Modules that are not cut.
    flow
        Data flow between their calls.
    empty
        Each module that is called, without data.
    carried
        Numbers of the calls whose results only tell their own shapes.
    refused
        Modes in which stages cannot run, and why.
    arguments
        Positional and keyword arguments of the sample.
    """

    def __init__(
        self,
        model: nn.Module,
        uncut: frozenset[str],
        flow: DataFlow,
        empty: Mapping[str, nn.Module],
        carried: frozenset[int],
        refused: Mapping[Mode, str],
        arguments: Arguments,
    ) -> None:
        self.model, self.uncut, self.flow, self.carried = model, uncut, flow, carried
        self.refused, self.arguments = refused, arguments
        self.names = tuple(call.name for call in flow.calls)
        self.dtypes = tuple(x.dtype for x in tensors_in(arguments))
        self.empty, self._is_training = empty, model.training
        # Values that need no gradient, whichever parameters are trained later.
        trains = not torch.is_inference_mode_enabled() and all(
            x.requires_grad for x in model.parameters() if x.is_floating_point()
        )
        self.constant = frozenset(
            Source("output", number, position)
            for number, call in enumerate(flow.calls if trains else ())
            for position in call.constant
        )
        self._other_mode: dict[str, nn.Module] = {}
        # Results of calls by number, mode and form of the arguments; all stages may add some.
        self._results: dict[Any, Any] = {}
        for number, (arguments_before, result) in enumerate(flow.records):
            with suppress(TypeError):  # an argument that has no hash
                self._results[number, model.training, _form(*arguments_before)] = result

    def __deepcopy__(self, _: dict[int, Any]) -> Skeleton:
        return self  # nothing changes; copies of stages do not copy the model

    @property
    def n_inputs(self) -> int:
        """Tensors of the arguments."""
        return len(self.dtypes)

    def empty_result(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        """Return the result of a call without data; for arguments of one form, computed once."""
        if number in self.carried:
            return self.flow.records[number].result
        form = _form(args, kwargs)
        key = number, training, form
        try:
            return self._results[key]
        except KeyError:
            self._results[key] = self._empty_result(number, training, args, kwargs)
            return self._results[key]
        except TypeError:  # an argument that has no hash
            return self._empty_result(number, training, args, kwargs)

    def _empty_result(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        """Compute the result of a call without data.

        Floating-point arguments have the types that they had in the sample: without data, autocast
        has no effect.
        """
        types = [x.dtype for x in tensors_in(self.flow.records[number].arguments)]
        tensors = [
            x.to("meta", dtype if x.is_floating_point() else x.dtype)
            for x, dtype in zip(tensors_in((args, kwargs)), types, strict=True)
        ]
        args, kwargs = with_tensors((args, kwargs), tensors)
        try:
            with same_python_draws():
                return run_without_data(self._module(self.names[number], training), args, kwargs)
        except Exception as error:  # of the user's code
            raise ExecutionError(
                f"the shape of what {self.names[number]!r} of another stage returns is not known: "
                f"without data, its forward fails ({type(error).__name__}: "
                f"{str(error).strip():.200}), which that of the sample did not; split with such a "
                "sample"
            ) from error

    def _module(self, name: str, training: bool) -> nn.Module:
        """Return a module without data in a mode."""
        if training == self._is_training:
            return self.empty[name]
        if name not in self._other_mode:
            self._other_mode[name] = copy.deepcopy(self.empty[name]).train(training)
        return self._other_mode[name]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """Return the arguments with other tensors."""
        arguments: Arguments = with_tensors(self.arguments, tensors)
        return arguments

"""`Skeleton`: facts about a model that its stages share; `Border`: values between stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pipeexec.nesting import Arguments, tensors_in, with_tensors
from pipeexec.splitting.tracing.data_flow import DataFlow, Source

if TYPE_CHECKING:
    from pipeexec.splitting.sample_forward import Mode

__all__ = ["Border", "Skeleton"]


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
        self._other_mode: dict[str, nn.Module] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> Skeleton:
        return self  # nothing changes; copies of stages do not copy the model

    @property
    def n_inputs(self) -> int:
        """Tensors of the arguments."""
        return len(self.dtypes)

    def empty_result(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        """Return the result of a call without data.

        Floating-point arguments have the types that they had in the sample: without data, autocast
        has no effect.
        """
        name, record = self.names[number], self.flow.records[number]
        if number in self.carried:
            return record.result
        types = [x.dtype for x in tensors_in(record.arguments)]
        tensors = [
            x.to("meta", dtype if x.is_floating_point() else x.dtype)
            for x, dtype in zip(tensors_in((args, kwargs)), types, strict=True)
        ]
        args, kwargs = with_tensors((args, kwargs), tensors)
        with torch.no_grad(), _disable_current_modes():
            return self._module(name, training)(*args, **kwargs)

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

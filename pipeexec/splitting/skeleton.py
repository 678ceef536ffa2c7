"""`Skeleton`: facts about a model that its stages share; `Border`: values between stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeexec.nesting import Arguments, tensors_in, with_tensors
from pipeexec.splitting.stand_in import on_meta
from pipeexec.splitting.tracing.data_flow import Source

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
        arguments: Arguments,
    ) -> None:
        self.model, self.names, self.uncut, self.arguments = model, names, uncut, arguments
        self.dtypes = tuple(x.dtype for x in tensors_in(arguments))
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

    def with_tensors(self, tensors: Sequence[Tensor]) -> Arguments:
        """Return the arguments with other tensors."""
        arguments: Arguments = with_tensors(self.arguments, tensors)
        return arguments

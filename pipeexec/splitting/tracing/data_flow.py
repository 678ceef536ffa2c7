"""Which calls of uncut modules need which values: follow tensors through one forward.

Every operation outside of uncut modules is seen by a dispatch mode. A tensor has the origins of all
tensors that it was computed from. Numbers that are read from tensors, such as ``int(mask.sum())``,
are not followed further: any stage may depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pipeexec.nesting import tensors_in
from pipeexec.splitting.tracing.written_tensors import storage_of, written_tensors

__all__ = ["Call", "DataFlow", "Source", "follow"]


class Source(NamedTuple):
    """Origin of a value.

    Attributes
    ----------
    kind
        ``"input"``: a tensor of the model's arguments; ``"output"``: of a call; ``"parameter"``: a
        parameter that the model reads outside of calls; ``"inside"``: a tensor that a call
        made and did not return; ``"random"``: random numbers outside of uncut modules.
    number
        Number of the input, of the call, or of the random operation.
    position
        Position of the tensor in the call's output.
    name
        Name of the parameter, or of the random operation.
    """

    kind: str
    number: int = 0
    position: int = 0
    name: str = ""


Sources = frozenset[Source]
_NONE: Sources = frozenset()


class Call(NamedTuple):
    """One call of an uncut module.

    Attributes
    ----------
    name
        Qualified name of the module.
    needs
        Origins of the tensors that it takes.
    """

    name: str
    needs: Sources


class DataFlow(NamedTuple):
    """Data flow of one forward.

    Attributes
    ----------
    calls
        Calls of uncut modules, in order.
    output
        Origins of the model's output.
    read
        Origins of the tensors from which the forward reads numbers, outside of uncut modules.
    """

    calls: tuple[Call, ...]
    output: Sources
    read: Sources


class _Follow(TorchDispatchMode):
    """Keeps the sources of each tensor while operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = WeakIdKeyDictionary()
        self.inside: Source | None = None
        self.read: Sources = frozenset()
        self.draws = count()
        # Storages that were written to, each with a tensor that keeps it, and what was written.
        self.written: dict[int, tuple[Tensor, Sources]] = {}

    def sources_of(self, values: Iterable[Tensor]) -> Sources:
        """Return the sources of tensors."""
        return frozenset().union(*(self._sources_of_one(x) for x in values))

    def _sources_of_one(self, tensor: Tensor) -> Sources:
        own: Sources = self.sources.get(tensor, _NONE)
        if not self.written:
            return own
        return own | self.written.get(storage_of(tensor), (tensor, _NONE))[1]

    def set_sources(self, tensor: Tensor, sources: Sources) -> None:
        """Set the sources of a tensor that a call returns, whatever was written to it before."""
        self.sources[tensor] = sources
        self.written.pop(storage_of(tensor), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.inside is not None:
            sources = frozenset({self.inside})
        else:
            sources = self.sources_of(tensors_in((args, kwargs)))
            if torch.Tag.nondeterministic_seeded in func.tags:
                name = func.name().removeprefix("aten::")
                sources |= {Source("random", next(self.draws), name=name)}
            if not tensors_in(output):  # a number
                self.read |= sources
            for tensor in written_tensors(func, args, kwargs):  # may be a view of others
                before = self.written.get(storage_of(tensor), (tensor, _NONE))[1]
                self.written[storage_of(tensor)] = tensor, before | sources
        for tensor in tensors_in(output):
            self.sources[tensor] = sources
        return output


def follow(
    model: nn.Module, uncut: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> DataFlow:
    """Return the data flow of one forward.

    Modules of ``uncut`` that have no parameters and draw no random numbers are not calls: each
    stage runs them itself.
    """
    mode = _Follow()
    for index, tensor in enumerate(tensors_in((args, kwargs))):
        mode.sources[tensor] = frozenset({Source("input", index)})
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        mode.sources[parameter] = frozenset({Source("parameter", name=name)})
    calls: list[Call] = []
    handles = []
    for name in uncut:
        module = modules[name]
        if any(True for _ in module.parameters()) or _may_draw(module):
            enter, leave = _hooks(name, calls, mode)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad(), mode:
            output = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return DataFlow(tuple(calls), mode.sources_of(tensors_in(output)), mode.read)


def _hooks(name: str, calls: list[Call], mode: _Follow) -> tuple[Any, Any]:
    """Return the hooks before and after a call of a module, which add it to the calls."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(Call(name, mode.sources_of(tensors_in((args, kwargs)))))
        mode.inside = Source("inside", len(calls) - 1)

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        mode.inside = None
        for position, tensor in enumerate(tensors_in(output)):
            mode.set_sources(tensor, frozenset({Source("output", len(calls) - 1, position)}))

    return enter, leave


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module without parameters may draw random numbers."""
    return any(isinstance(x, nn.modules.dropout._DropoutNd) for x in module.modules())

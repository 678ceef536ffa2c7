"""Find the modules of a model that a split does not cut, from the calls of one forward.

A *chain* is a list of modules of which each takes an output of the one before, such as the blocks
of a transformer. Its elements are not cut, unless one is itself little more than a chain, as the
stages of a ResNet are. Beside chains, the largest modules without a chain are not cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.splitting.data_flow import follow
from pipeexec.splitting.nested_values import tensors_of

__all__ = ["UncutModules", "uncut_modules"]

#: Share of a module's parameters in a chain from which on the module itself is cut.
_DOMINANT = 0.9


class _ModuleCall(NamedTuple):
    """One call of a module.

    Attributes
    ----------
    name
        Qualified name of the module.
    inputs, outputs
        Tensors of the arguments and of the result.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class UncutModules(NamedTuple):
    """Modules that a split does not cut.

    Attributes
    ----------
    names
        Their qualified names, in the order of the model's modules.
    blocks
        Those that are elements of chains.
    """

    names: tuple[str, ...]
    blocks: frozenset[str]


def _module_calls(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[_ModuleCall]:
    """Return the calls of all modules in one forward, in the order in which they end."""
    calls: list[_ModuleCall] = []
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.append(_ModuleCall(name, tensors_of((args, kwargs)), tensors_of(output)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@dataclass
class _Finder:
    """Finds chains and modules that are not cut."""

    model: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    calls: dict[str, list[_ModuleCall]]
    names: dict[int, str]
    chains: dict[str, bool] = field(default_factory=dict)

    def is_chain(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a list whose elements pass tensors on, one to the next."""
        if name not in self.chains:
            self.chains[name] = self._is_chain(module)
        return self.chains[name]

    def _is_chain(self, module: nn.Module) -> bool:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            return False
        elements = [self.calls.get(self.names[id(child)], []) for child in module]
        if any(len(calls) != 1 for calls in elements):
            return False
        if not all(any(True for _ in child.parameters()) for child in module):
            return False
        firsts = [calls[0] for calls in elements]
        return all(
            {id(x) for x in a.outputs} & {id(x) for x in b.inputs} for a, b in pairwise(firsts)
        ) or self._passes_on([call.name for call in firsts])

    def _passes_on(self, names: Sequence[str]) -> bool:
        """Return whether each module takes what is computed from an output of the one before."""
        calls = follow(self.model, names, *self.arguments).calls
        return [call.name for call in calls] == list(names) and all(
            any(x.kind == "output" and x.number == number for x in call.needs)
            for number, call in enumerate(calls[1:])
        )

    def has_chain(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a chain or has one inside."""
        prefix = f"{name}." if name else ""
        return any(
            self.is_chain(f"{prefix}{inner}".rstrip("."), child)
            for inner, child in module.named_modules()
        )

    def uncut(self, name: str, module: nn.Module) -> Iterator[tuple[str, bool]]:
        """Yield the modules inside one that are not cut, and whether they are of a chain."""
        is_chain = self.is_chain(name, module)
        for key, child in module.named_children():
            inner = f"{name}.{key}" if name else key
            is_called = self.names[id(child)] in self.calls
            if not is_called or (self._is_dominated if is_chain else self.has_chain)(inner, child):
                yield from self.uncut(inner, child)
            else:
                yield inner, is_chain

    def _is_dominated(self, name: str, module: nn.Module) -> bool:
        """Return whether a module only passes its input through a chain of equal modules."""
        total = sum(p.numel() for p in module.parameters())
        for inner, child in module.named_modules():
            if not inner or not self.is_chain(f"{name}.{inner}", child):
                continue
            kinds = {type(element) for element in child}
            size = sum(p.numel() for p in child.parameters())
            if len(kinds) == 1 and size >= _DOMINANT * total and self._passes(name, child):
                return True
        return False

    def _passes(self, name: str, chain: Any) -> bool:
        """Return whether a module returns what the last element of a chain in it returns."""
        last = self.calls[self.names[id(chain[-1])]][0].outputs
        return bool({id(x) for x in last} & {id(x) for x in self.calls[name][0].outputs})


def uncut_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UncutModules:
    """Return the modules of a model that a split does not cut, by a forward of some arguments."""
    by_name = defaultdict(list)
    for call in _module_calls(model, args, kwargs):
        by_name[call.name].append(call)
    names = {id(module): name for name, module in model.named_modules()}
    rows = list(_Finder(model, (args, kwargs), by_name, names).uncut("", model))
    return UncutModules(
        tuple(name for name, _ in rows), frozenset(name for name, is_block in rows if is_block)
    )

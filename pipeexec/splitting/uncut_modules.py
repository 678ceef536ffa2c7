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

from pipeexec.nesting import tensors_in
from pipeexec.splitting.data_flow import follow

#: Share of a module's parameters in a chain from which on the module itself is cut.
_DOMINANT = 0.9


class ModuleCall(NamedTuple):
    """One call of a module: tensors of its arguments and of its result."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def module_calls(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[ModuleCall]:
    """Return the calls of all modules in one forward, in the order in which they end."""
    calls: list[ModuleCall] = []
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.append(ModuleCall(name, tensors_in((args, kwargs)), tensors_in(output)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _are_chained(calls: Sequence[ModuleCall]) -> bool:
    """Return whether each call takes a tensor that the one before returns."""
    return all({id(x) for x in a.outputs} & {id(x) for x in b.inputs} for a, b in pairwise(calls))


@dataclass
class Finder:
    """Finds chains and modules that are not cut."""

    model: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    calls: dict[str, list[ModuleCall]]
    names: dict[int, str]  # of modules, by their ids
    #: Modules that are not cut in any case, and whether they are blocks.
    chosen: dict[str, bool] = field(default_factory=dict)
    chains: dict[str, bool] = field(default_factory=dict)  # whether a module is one

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
        return _are_chained(firsts) or self._passes_on([call.name for call in firsts])

    def _passes_on(self, names: Sequence[str]) -> bool:
        """Return whether each module takes what is computed from an output of the one before."""
        with torch.no_grad():
            calls = follow(self.model, names, *self.arguments)[0].calls
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
            if inner in self.chosen:
                yield inner, self.chosen[inner]
            elif self.names[id(child)] not in self.calls or self._is_cut(inner, child, is_chain):
                yield from self.uncut(inner, child)
            else:
                yield inner, is_chain

    def _is_cut(self, name: str, module: nn.Module, in_chain: bool) -> bool:
        """Return whether a module that is called is cut."""
        if any(x.startswith(f"{name}.") for x in self.chosen):
            return True
        return (self._is_dominated if in_chain else self.has_chain)(name, module)

    def _is_dominated(self, name: str, module: nn.Module) -> bool:
        """Return whether a module only passes its input through a chain of equal modules."""
        total = sum(p.numel() for p in module.parameters())
        for inner, child in module.named_modules():
            if not inner or len({type(element) for element in child.children()}) != 1:
                continue
            if sum(p.numel() for p in child.parameters()) < _DOMINANT * total:
                continue  # `is_chain` may take a forward
            if self.is_chain(f"{name}.{inner}", child) and self._passes(name, child):
                return True
        return False

    def _passes(self, name: str, chain: Any) -> bool:
        """Return whether a module returns what the last element of a chain in it returns."""
        last = self.calls[self.names[id(chain[-1])]][0].outputs
        return bool({id(x) for x in last} & {id(x) for x in self.calls[name][0].outputs})


_SEQUENTIAL, _PLAN = "nn.Sequential", "base_model_pp_plan"
_NO_CHAIN = (
    "the model has no list of two or more modules with parameters, each of which is called once "
    "and takes an output of the one before"
)


class UncutModules(NamedTuple):
    """Modules that a split does not cut, in the order of the model's modules."""

    names: tuple[str, ...]
    blocks: frozenset[str]  # between which a split into a number of stages cuts
    way: str  # by which they were found
    ways_failed: tuple[tuple[str, str], ...]  # tried before, and why not taken


def uncut_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UncutModules:
    """Return the modules of a model that a split does not cut, by a forward of some arguments."""
    calls = defaultdict(list)
    for call in module_calls(model, args, kwargs):
        calls[call.name].append(call)
    finder = Finder(model, (args, kwargs), calls, {id(x): n for n, x in model.named_modules()})
    rows = list(finder.uncut("", model))
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name, is_block in rows if is_block))
    is_sequential = isinstance(model, nn.Sequential)
    if is_sequential and lists in ([], [""]):
        return _result(rows, _SEQUENTIAL, ())
    kind = type(model).__name__
    reason = "a module of it is cut further" if is_sequential else f"{kind} is none"
    failed: tuple[tuple[str, str], ...] = ((_SEQUENTIAL, reason),)
    if lists:
        return _result(rows, f"blocks of {_listed(lists)}", failed)
    failed = (*failed, ("blocks of a list", _NO_CHAIN))
    chosen, reason = _plan_modules(model, calls)
    if chosen:
        finder.chosen = chosen
        return _result(list(finder.uncut("", model)), f"{_PLAN} of the configuration", failed)
    failed = (*failed, (_PLAN, reason))
    repeated = _repeated_modules(model, calls)
    if repeated:
        finder.chosen = dict.fromkeys(repeated, True)
        return _result(list(finder.uncut("", model)), f"calls of {_listed(repeated)}", failed)
    reason = "no module with parameters is called several times, each time with its last output"
    failed = (*failed, ("calls of one module", reason))
    return _result(rows, "modules that the forward calls", failed)


def _result(
    rows: Sequence[tuple[str, bool]], way: str, failed: tuple[tuple[str, str], ...]
) -> UncutModules:
    names = tuple(name for name, _ in rows)
    return UncutModules(names, frozenset(x for x, is_block in rows if is_block), way, failed)


def _listed(names: Sequence[str]) -> str:
    """Return names as text; of many, the first and the last."""
    shown = names if len(names) <= 3 else [names[0], "...", names[-1]]
    return " and ".join(", ".join(x or "the model" for x in shown).rsplit(", ", 1))


def _plan_modules(
    model: nn.Module, calls: dict[str, list[ModuleCall]]
) -> tuple[dict[str, bool], str]:
    """Return the modules of a configuration's plan for pipelines, and why there are none.

    Hugging Face's plan has modules of the base model, with names of their inputs and outputs. The
    elements of lists among them are blocks; if these are fewer than two, all modules are.
    """
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    if not isinstance(plan, dict) or not plan:
        return {}, "the model has no config.base_model_pp_plan"
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    modules = dict(model.named_modules())
    chosen: dict[str, bool] = {}
    for key in plan:
        module = modules.get(prefix + key)
        if isinstance(module, nn.ModuleList):
            chosen |= {f"{prefix}{key}.{k}": True for k, _ in module.named_children()}
        else:
            chosen[prefix + key] = False
    for name in chosen:
        if name not in calls:
            return {}, f"it has {name!r}, which the forward does not call"
    if sum(chosen.values()) < 2:
        chosen = dict.fromkeys(chosen, True)
    return chosen, ""


def _repeated_modules(model: nn.Module, calls: dict[str, list[ModuleCall]]) -> list[str]:
    """Return the outermost modules that are called again with an output of their last call."""
    repeated: list[str] = []
    for name, module in model.named_modules():
        if len(calls.get(name, ())) < 2 or any(name.startswith(f"{x}.") for x in repeated):
            continue
        if _are_chained(calls[name]) and any(True for _ in module.parameters()):
            repeated.append(name)
    return repeated

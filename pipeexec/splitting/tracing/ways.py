"""Ways to find the modules that a split does not cut, in the order in which they are tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from pipeexec.splitting.tracing.module_calls import Finder, ModuleCall, module_calls

_SEQUENTIAL, _BLOCKS, _PLAN = "nn.Sequential", "blocks of a list", "base_model_pp_plan"
_REPEATED, _MODULES = "calls of one module", "modules that the forward calls"
_NO_CHAIN = (
    "the model has no list of two or more modules with parameters, each of which is called once "
    "and takes an output of the one before"
)


class UncutModules(NamedTuple):
    """Modules that a split does not cut.

    Attributes
    ----------
    names
        Their qualified names, in the order of the model's modules.
    blocks
        Those between which a split into a number of stages cuts.
    way
        Way by which they were found.
    ways_failed
        Ways that were tried before, and why each was not taken.
    """

    names: tuple[str, ...]
    blocks: frozenset[str]
    way: str
    ways_failed: tuple[tuple[str, str], ...]


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
    failed = (*failed, (_BLOCKS, _NO_CHAIN))
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
    return _result(rows, _MODULES, (*failed, (_REPEATED, reason)))


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
        passes = all(
            {id(x) for x in a.outputs} & {id(x) for x in b.inputs} for a, b in pairwise(calls[name])
        )
        if passes and any(True for _ in module.parameters()):
            repeated.append(name)
    return repeated

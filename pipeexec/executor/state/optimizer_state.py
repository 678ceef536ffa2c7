"""State of a pipeline's optimizers by names of parameters, and back.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`::

    {"state": {"0.weight": {"exp_avg": tensor, ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["0.weight", ...]}, ...]}

It does not depend on the number of stages. Groups of several stages are one if their options are
equal. Groups of one stage stay separate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.data_parallel.sharded_optimizer import WholeOptimizer
from pipeexec.executor.state.names import StateNames
from pipeexec.stages.restore import restore_optimizer
from pipesim.errors import ArgumentError, PipeError

#: Options that say how a step is computed, not what: each optimizer keeps its own.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: An optimizer, or one of shares as one of whole parameters.
AnyOptimizer = torch.optim.Optimizer | WholeOptimizer
#: An optimizer, and the state that its ``load_state_dict`` takes.
Prepared = tuple[AnyOptimizer, dict[str, Any]]


def optimizer_state(names: StateNames, optimizers: Sequence[AnyOptimizer | None]) -> dict[str, Any]:
    """Return the state of the local stages' optimizers; tensors share memory with it."""
    state: dict[str, dict[str, Any]] = {}
    groups_by_stage: list[list[dict[str, Any]]] = []
    named: set[str] = set()
    for slot in names.first_slots:
        optimizer, keys = optimizers[slot], names.parameter_keys(slot)
        if optimizer is None:
            continue
        groups = []
        for group in optimizer.param_groups:
            # A later copy of a tied parameter has the state of the first.
            own = [p for p in group["params"] if keys[p] not in named]
            named.update(keys[p] for p in own)
            state |= {keys[p]: dict(optimizer.state[p]) for p in own if p in optimizer.state}
            groups.append({**_options(group), "params": [keys[p] for p in own]})
        groups_by_stage.append(groups)
    return {"state": state, "param_groups": merged_groups(groups_by_stage)}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in group.items() if key not in ("params", "param_names")}


def _same_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    a, b = _options(a), _options(b)
    return a.keys() == b.keys() and all(_plain(a[key]) == _plain(b[key]) for key in a)


def _plain(value: Any) -> Any:
    """Return a value that can be compared."""
    return value.tolist() if isinstance(value, Tensor) else value


def merged_groups(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the groups of several stages or processes, as few as their options allow.

    Two groups of one part are never merged. A parameter that several parts have counts once.
    """
    merged: list[dict[str, Any]] = []
    for part in parts:
        used: set[int] = set()
        for group in part:
            named = {name for other in merged for name in other["params"]}
            params = [name for name in group["params"] if name not in named]
            if not params and group["params"]:
                continue
            for number, other in enumerate(merged):
                if number not in used and _same_options(group, other):
                    other["params"] += params
                    used.add(number)
                    break
            else:
                used.add(len(merged))
                merged.append({**group, "params": params})
    filled = [group for group in merged if group["params"]]
    return filled or merged[:1]


def prepared_states(
    names: StateNames,
    optimizers: Sequence[AnyOptimizer | None],
    state: Mapping[str, Any],
    *,
    error: type[PipeError] = ArgumentError,
) -> list[Prepared]:
    """Return the part of a state that each local optimizer loads; nothing is changed yet.

    Raises
    ------
    error
        If a parameter is missing, one is unexpected, a shape differs, options of one group differ
        between its parameters, two groups of other options have one group in the state, or the
        state is that of another kind of optimizer.
    """
    groups, values = _checked_form(state, error)
    group_by_name = {name: group for group in groups for name in group["params"]}
    allowed = names.allowed_keys()
    unexpected = [name for name in (*group_by_name, *values) if name not in allowed]
    if unexpected:
        raise error(
            f"the optimizer state has {unexpected[0]!r}, which the model lacks; give the state of "
            "this model's optimizer"
        )
    prepared = []
    for slot, _ in names.local_slots():
        optimizer = optimizers[slot]
        if optimizer is not None:
            keys = names.parameter_keys(slot)
            prepared.append((optimizer, _part(optimizer, keys, group_by_name, values, error)))
    return prepared


def _checked_form(
    state: Mapping[str, Any], error: type[PipeError]
) -> tuple[list[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]:
    """Return the groups and values of a state; raise unless it has the form of this module."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    values = state.get("state") if isinstance(state, Mapping) else None
    if (
        not isinstance(groups, list)
        or not all(isinstance(group, Mapping) and "params" in group for group in groups)
        or not isinstance(values, Mapping)
        or not all(isinstance(name, str) for group in groups for name in group["params"])
        or not all(isinstance(value, Mapping) for value in values.values())
    ):
        raise error(
            "an optimizer state is a dict of 'state' and 'param_groups', both by names of "
            f"parameters, got {state!r:.60}; give what optimizer_state_dict returns, or "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    return groups, values


def _part(
    optimizer: AnyOptimizer,
    keys: Mapping[nn.Parameter, str],
    groups: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Mapping[str, Any]],
    error: type[PipeError],
) -> dict[str, Any]:
    """Return the state dictionary for one optimizer."""
    state: dict[int, dict[str, Any]] = {}
    new_groups, n = [], 0
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []  # loaded and own groups
    for own in optimizer.param_groups:
        loaded = None
        for parameter in own["params"]:
            name = keys[parameter]
            if name not in groups:
                raise error(
                    f"the optimizer state lacks {name!r} of the model; give the state of this "
                    "model's optimizer"
                )
            if loaded is not None and not _same_options(loaded, groups[name]):
                raise error(
                    f"{name!r} is in a group of an optimizer with "
                    f"{_first_difference(loaded, groups[name])} in the state; make the optimizer "
                    "of the pipeline with the same groups"
                )
            loaded = groups[name]
            if name in values:
                present = optimizer.state.get(parameter, {})
                state[n] = _checked_values(name, parameter, values[name], present, error)
            n += 1
        for _, other in (pair for pair in pairs if pair[0] is loaded):
            if not _same_options(_what(own), _what(other)):
                raise error(
                    f"{keys[own['params'][0]]!r} is in a group of an optimizer with "
                    f"{_first_difference(_what(other), _what(own))}, and both are in one group of "
                    "the state, whose options would replace those of both; make the optimizer of "
                    "the pipeline with the groups of the state, and change options afterwards"
                )
        if loaded is not None:
            pairs.append((loaded, own))
        indices = list(range(n - len(own["params"]), n))
        new_groups.append({**_merged_options(own, loaded or {}, error), "params": indices})
    return {"state": state, "param_groups": new_groups}


def _what(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that say what a step computes."""
    return {key: x for key, x in _options(group).items() if key not in _HOW}


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the first option that differs between two groups, as text."""
    key = next(k for k in {**a, **b} if k != "params" and _plain(a.get(k)) != _plain(b.get(k)))
    value, other = _plain(b.get(key)), _plain(a.get(key))
    return f"{key}={value!r}, another parameter with {other!r}"


def _merged_options(
    own: Mapping[str, Any], loaded: Mapping[str, Any], error: type[PipeError]
) -> dict[str, Any]:
    """Return the loaded options of a group, as the kinds of values that it has."""
    own, loaded = {k: x for k, x in own.items() if k != "params"}, _options(loaded)
    lacks, extra = own.keys() - loaded.keys() - {"param_names"}, loaded.keys() - own.keys()
    lacks, extra = lacks - {"initial_lr"}, extra - {"initial_lr"}
    if loaded and lacks and extra:
        raise error(
            f"the state is that of another optimizer: its groups have {sorted(extra)[0]!r}, and "
            f"lack {sorted(lacks)[0]!r}; make the pipeline with the same optimizer"
        )
    options = dict(own)
    for key, value in loaded.items():
        present = own.get(key)
        if key in _HOW and key in own:
            continue
        if not _is_alike(value, present):
            raise error(
                f"the state has {key}={value!r:.60} for a group of an optimizer whose {key} is "
                f"{present!r:.60}; give the state of this model's optimizer"
            )
        if isinstance(present, Tensor):
            value = torch.as_tensor(value, dtype=present.dtype, device=present.device).clone()
        elif isinstance(value, Tensor):
            value = value.tolist()
        options[key] = tuple(value) if isinstance(present, tuple) else value
    return options


def _is_alike(value: Any, present: Any) -> bool:
    """Return whether a loaded option can take the place of an optimizer's own one."""
    value, present = _plain(value), _plain(present)
    if isinstance(present, bool):
        return isinstance(value, bool)
    if isinstance(present, int | float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(present, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(present)
            and all(map(_is_alike, value, present))
        )
    return True


def _checked_values(
    name: str,
    parameter: nn.Parameter,
    values: Mapping[str, Any],
    present: Mapping[str, Any],
    error: type[PipeError],
) -> dict[str, Any]:
    """Return copies of the state of a parameter; a tensor of its rank must have its shape.

    A dimension may be 1, as in factored second moments.
    """
    for key, value in values.items():
        if isinstance(value, Tensor) and value.dim() == parameter.dim() and any(
            size not in (1, own) for size, own in zip(value.shape, parameter.shape, strict=True)
        ):  # fmt: skip
            raise error(
                f"{key!r} of {name!r} has shape {tuple(value.shape)} in the optimizer state, and "
                f"{tuple(parameter.shape)} in the model; give the state of this model's optimizer"
            )
    return {key: _copied(value, present.get(key)) for key, value in values.items()}


def _copied(value: Any, present: Any) -> Any:
    """Return a value with copies of its tensors; a tensor is on the device of the present one."""
    if isinstance(value, Tensor) and isinstance(present, Tensor):
        return value.detach().to(present.device, copy=True)
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), value)


def apply_optimizer_states(prepared: Iterable[Prepared]) -> None:
    """Load prepared states into their optimizers."""
    for optimizer, state in prepared:
        if isinstance(optimizer, torch.optim.Optimizer):
            restore_optimizer(optimizer, state)
        else:  # one of shares, which takes the state of whole parameters
            optimizer.load_state_dict(state)

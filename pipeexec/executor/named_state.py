"""State of a pipeline's model and optimizers, by the names of the original model.

`pipeexec.Pipeline.state_dict` says what the keys are. `DistributedDataParallel` and `torch.compile`
around a stage add nothing to them.

The state of optimizers has the form of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`::

    {"state": {"0.weight": {"exp_avg": tensor, ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["0.weight", ...]}, ...]}

It does not depend on the number of stages. Groups of several stages are one if their options are
equal. Groups of one stage stay separate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.data_parallel.compiled_modules import unwrapped
from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.data_parallel.stage_shards import WholeOptimizer
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.sharded_embedding import ShardedEmbedding
from pipeexec.splitting.split_facts import first_names
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.stages.restore import restore_optimizer
from pipesim.errors import ArgumentError, PipeError


class StateNames:
    """Keys of the parameters and buffers of all stages.

    All processes make this object at the same time.

    Attributes
    ----------
    modules
        The stages, without DistributedDataParallel and compiled wrappers.
    first_slots
        Number of the first copy of each local stage, in order of stages.
    """

    def __init__(
        self, modules: Sequence[nn.Module], n_stages: int, processes: Processes | None
    ) -> None:
        self.modules, self.n_stages = [unwrapped(module) for module in modules], n_stages
        local = [k for k, m in enumerate(self.modules) if not isinstance(m, RemoteStage)]
        first = {slot % n_stages: slot for slot in reversed(local)}
        self.first_slots = [first[stage] for stage in sorted(first)]
        self._local_slots = local
        children = {
            str(slot % n_stages): list(m._modules) if isinstance(m, nn.Sequential) else None
            for slot in local
            for m in [self.modules[slot]]
        }
        everyone = [children] if processes is None else processes.share(children)
        by_stage = {stage: names for part in everyone for stage, names in part.items()}
        names = [name for group in by_stage.values() for name in group or ()]
        self._are_slices = None not in by_stage.values() and len(set(names)) == len(names)
        own = [key for slot in self.first_slots for key in self.state(slot)]
        #: Keys of the stages of all processes.
        self.stage_keys = frozenset(
            key for keys in ([own] if processes is None else processes.share(own)) for key in keys
        )

    def key(self, slot: int, name: str) -> str:
        """Return the key of an entry of a stage."""
        module = self.modules[slot]
        if isinstance(module, SplitStage):
            return module.model_name(name)
        return name if self._are_slices else f"{slot % self.n_stages}.{name}"

    @cached_property
    def whole(self) -> nn.Module | None:
        """The model that was split; None for stages that were cut by hand."""
        split = (m for m in self.modules if isinstance(m, SplitStage))
        return next((stage.whole for stage in split), None)

    def state(self, slot: int) -> dict[str, Any]:
        """Return the entries of one stage by their keys; tensors share memory with the stage."""
        entries = self.modules[slot].state_dict()
        return {self.key(slot, name): value for name, value in entries.items()}

    def unused(self) -> dict[str, Any]:
        """Return the entries of the split model that no stage needs, but those without data."""
        if self.whole is None:
            return {}
        return {
            key: value
            for key, value in self.whole.state_dict().items()
            if key not in self.stage_keys and not (isinstance(value, Tensor) and value.is_meta)
        }

    def local_state(self) -> dict[str, Any]:
        """Return the entries of the local stages in their order, and unused ones of the model."""
        entries: dict[str, Any] = {}
        for slot in self.first_slots:
            for key, value in self.state(slot).items():
                entries.setdefault(key, value)
        return entries | self.unused()

    @cached_property
    def first_names(self) -> dict[str, str]:
        """First key of each parameter of the split model that has several, such as a tied one."""
        return {} if self.whole is None else first_names(self.whole)

    @cached_property
    def same(self) -> dict[str, list[str]]:
        """All keys of each parameter of the split model, by its first key."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name, first in self.first_names.items():
            groups[first].append(name)
        return groups

    def allowed_keys(self) -> frozenset[str]:
        """Return the keys that a state may have."""
        return self.stage_keys if self.whole is None else self.stage_keys | {
            *self.whole.state_dict()}  # fmt: skip

    def find(self, state: Mapping[str, Any], key: str) -> str | None:
        """Return the key under which a state has an entry: its own, or that of a tied parameter."""
        if key in state:
            return key
        first = self.first_names.get(key, key)
        return next((name for name in self.same.get(first, ()) if name in state), None)

    def parameter_keys(self, slot: int) -> dict[nn.Parameter, str]:
        """Return the key of each parameter of a stage: of a tied one the first in the model."""
        keys: dict[nn.Parameter, str] = {}
        for name, parameter in self.modules[slot].named_parameters():
            key = self.key(slot, name)
            keys[parameter] = self.first_names.get(key, key)
        return keys

    def local_slots(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield all local copies of stages, with their numbers."""
        for slot in self._local_slots:
            yield slot, self.modules[slot]

    def embeddings(self) -> dict[str, ShardedEmbedding]:
        """Return the local embeddings whose rows are spread over processes, by prefix of keys."""
        return {
            self.key(slot, f"{name}." if name else ""): module
            for slot in self.first_slots
            for name, module in self.modules[slot].named_modules()
            if isinstance(module, ShardedEmbedding)
        }


# The model: check all of a state, then copy it into the stages


def check_model_state(
    names: StateNames,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    error: type[PipeError] = ArgumentError,
    label: str = "the state",
) -> None:
    """Raise unless a state has the entries of all local stages, in their shapes.

    With ``strict``, missing and unexpected keys are refused, too. Parameters that no stage of a
    split model needs may be missing. ``label`` is the name of the state in messages.
    """
    own = names.local_state()
    keys = {key: names.find(state, key) for key in own}
    missing = [key for key in own if keys[key] is None and key in names.stage_keys]
    unexpected = sorted(set(state) - names.allowed_keys())
    if strict and missing:
        hint = f"; it has {unexpected[0]!r}, which the model lacks" if unexpected else ""
        raise error(
            f"{label} lacks {missing[0]!r} of the model{_others(len(missing) - 1)}{hint}; give "
            f"{label} of this model"
        )
    for key, present in keys.items():
        entry = own[key]
        if present is None or not isinstance(entry, Tensor):
            continue
        shape = getattr(state[present], "shape", None)
        if shape is None or tuple(shape) != tuple(entry.shape):
            kind = type(state[present]).__name__
            got = f"is a {kind}" if shape is None else f"has shape {tuple(shape)}"
            raise error(
                f"{key!r} {got} in {label}, and has shape {tuple(entry.shape)} in the model; give "
                f"{label} of this model"
            )
    for prefix, embedding in names.embeddings().items():
        if (extra := state.get(f"{prefix}_extra_state")) is not None:
            embedding.set_extra_state(extra)  # it only checks
    if strict and unexpected:
        raise error(
            f"{label} has {unexpected[0]!r}, which the model lacks{_others(len(unexpected) - 1)}; "
            f"give {label} of this model"
        )


def _others(n: int) -> str:
    return f", and {n} other keys" if n > 1 else f", and {n} other key" if n else ""


def load_model_state(names: StateNames, state: Mapping[str, Any]) -> None:
    """Copy a state that `check_model_state` has accepted into all local copies of stages.

    Entries that the state lacks stay.
    """
    for slot, module in names.local_slots():
        entries = {}
        for name in module.state_dict():
            key = names.find(state, names.key(slot, name))
            if key is not None:
                entries[name] = state[key]
        module.load_state_dict(entries, strict=False)
    if names.whole is not None:
        unused = {key: state[key] for key in names.unused() if key in state}
        names.whole.load_state_dict(unused, strict=False)


# The optimizers

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
    """Return the part of a state that each local optimizer loads; nothing is changed yet."""
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

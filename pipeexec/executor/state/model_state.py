"""Load the state of a model into the stages of a pipeline: check all of it, then copy it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeexec.executor.state.names import StateNames
from pipesim.errors import ArgumentError, PipeError


def check_model_state(
    names: StateNames,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    error: type[PipeError] = ArgumentError,
    label: str = "the state",
) -> None:
    """Raise unless a state has the entries of all local stages, in their shapes.

    Parameters
    ----------
    state
        Tensors, or anything with a ``shape``, by key; other values are not checked.
    strict
        Whether missing and unexpected keys are refused. Parameters that no stage of a split model
        needs may be missing.
    error
        Error to raise; names the first entry that does not fit.
    label
        Name of the state in messages.
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
        if present is not None:
            _check_shape(key, own[key], state[present], error, label)
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


def _check_shape(key: str, own: Any, value: Any, error: type[PipeError], label: str) -> None:
    """Raise unless a value has the shape of the model's own entry."""
    shape = getattr(value, "shape", None)
    if isinstance(own, Tensor) and (shape is None or tuple(shape) != tuple(own.shape)):
        got = f"is a {type(value).__name__}" if shape is None else f"has shape {tuple(shape)}"
        raise error(
            f"{key!r} {got} in {label}, and has shape {tuple(own.shape)} in the model; give "
            f"{label} of this model"
        )


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

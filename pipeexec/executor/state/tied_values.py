"""Check that a state has one value for all copies of a tied parameter, before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.stage_replicas import RemoteStage
from pipeexec.distributed.processes import Processes
from pipeexec.executor.state.names import StateNames
from pipeexec.splitting.split_facts import tied_parameter
from pipeexec.splitting.tied import TiedGroup
from pipesim.errors import ArgumentError, PipeError

#: Key and checksum of each local copy, by group; the key is empty for a value that stays.
TiedValues = list[list[tuple[str, str]]]


def tied_values(
    names: StateNames,
    tied: Sequence[TiedGroup],
    modules: Sequence[nn.Module],
    state: Mapping[str, Any],
) -> TiedValues:
    """Return keys and checksums of the values that local copies have after a state is loaded."""
    rows: TiedValues = []
    for group in tied:
        rows.append([])
        for stage, name in group:
            if not isinstance(modules[stage], RemoteStage):
                parameter = tied_parameter(modules[stage], name)
                key = names.find(state, _key(names, stage, parameter)) or ""
                value = state[key] if key else parameter
                rows[-1].append((key, _checksum(value, parameter.dtype)))
    return rows


def _key(names: StateNames, stage: int, parameter: nn.Parameter) -> str:
    """Return the key of a parameter of a stage."""
    parameters = names.modules[stage].named_parameters()
    return next(names.key(stage, name) for name, own in parameters if own is parameter)


def _checksum(value: Tensor, dtype: torch.dtype) -> str:
    """Return a checksum of a tensor that is loaded into one of a type."""
    flat = value.detach().to("cpu", dtype).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def check_tied_values(
    tied: Sequence[TiedGroup],
    rows: TiedValues,
    processes: Processes | None,
    *,
    error: type[PipeError] = ArgumentError,
    label: str = "the state",
) -> None:
    """Raise unless copies of each tied parameter get the same value; all processes must call this.

    Raises
    ------
    error
        Names the copies and their keys.
    """
    if not tied:
        return
    tables = [rows] if processes is None else processes.share(rows)
    for index, group in enumerate(tied):
        pairs = [(key, checksum) for table in tables for key, checksum in table[index]]
        if len({checksum for _, checksum in pairs}) > 1:
            copies = " and ".join(f"{name!r} of stage {stage}" for stage, name in group)
            keys = " and ".join(dict.fromkeys(repr(key) for key, _ in pairs if key))
            raise error(
                f"{copies} are tied, but {label} has different values for them ({keys}): it is "
                "that of a model without tied parameters; make its values equal, or split such a "
                "model"
            )

"""Checks of the arguments of `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from pipesim.errors import ArgumentError, number
from pipesim.graph.graph import TaskGraph


def check_timeout(timeout: float | None) -> None:
    """Raise unless a timeout is a positive number of seconds, or None."""
    seconds = number(timeout)
    if timeout is not None and (seconds is None or not 0 < seconds < float("inf")):
        raise ArgumentError(
            "timeout must be a positive number of seconds, or None to wait for ever, got "
            f"{timeout!r}"
        )


def check_graph(graph: TaskGraph) -> None:
    """Raise unless a graph is a `TaskGraph`."""
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"Pipeline runs a TaskGraph, got {type(graph).__name__}; lower the schedule first"
        )


def check_stages(
    stages: Sequence[nn.Module | None], graph: TaskGraph, is_local: Sequence[bool]
) -> None:
    """Raise unless each stage has one module, and no two modules share parameters.

    ``is_local`` marks the copies of stages that run in this process, which need a module.
    """
    n = graph.n_stages
    if len(stages) != n or not all(
        isinstance(stage, nn.Module) or (stage is None and len(set(is_local)) > 1)
        for stage in stages
    ):
        raise ArgumentError(
            f"the graph has {graph.n_stages} stages, got {len(stages)} "
            f"({', '.join(type(s).__name__ for s in stages)}); give one nn.Module a stage"
        )
    for slot in np.flatnonzero(is_local).tolist():
        if stages[slot % n] is None:
            replica = f" of replica {slot // n}" if graph.n_replicas > 1 else ""
            device = graph.homes.ravel()[slot]
            raise ArgumentError(
                f"stage {slot % n}{replica} is on device {device} of this process, but its module "
                "is None; give its nn.Module"
            )
    owner: dict[nn.Parameter, int] = {}
    for index, module in enumerate(stages):
        for name, parameter in () if module is None else module.named_parameters():
            if owner.setdefault(parameter, index) != index:
                raise ArgumentError(
                    f"stages {owner[parameter]} and {index} share the parameter {name!r}; stages "
                    "run at the same time, so each needs separate parameters: give each stage a "
                    "copy, name the copies in Pipeline(..., tied=[[(0, 'name'), (3, 'name')]]), "
                    f"and lower with tied=[({owner[parameter]}, {index})]; pipeexec.split does so"
                )

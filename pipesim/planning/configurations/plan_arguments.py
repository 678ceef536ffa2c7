"""Checks of the arguments of `pipesim.plan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipesim.errors import (
    ArgumentError,
    check_count,
    check_flag,
    check_name,
    check_type,
    number,
)
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.planning.cluster import Cluster
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.planning.configurations.search import Workers
from pipesim.scheduling.placement import LAYOUTS
from pipesim.timeline.memory_limit import checked_memory_limit, memory_limit_bytes

#: Most sequences of a step.
_MOST_SEQUENCES = 10**9


def checked_problem(
    model: Any, cluster: Any, global_batch: Any, memory_limit: Any, memory_reserve: Any,
    layout: Any, is_even: bool, *flags: bool,
) -> PlanProblem:  # fmt: skip
    """Return the problem of checked arguments."""
    if not isinstance(model, (Transformer, Layers)):
        raise ArgumentError(
            f"model must be a pipesim.Transformer or pipesim.Layers, got {model!r:.60}; give such "
            'as pipesim.Transformer.preset("llama3_70b")'
        )
    check_type("cluster", cluster, Cluster, 'give such as pipesim.Cluster("dgx_h100", n_gpus=64)')
    if check_count("global_batch", global_batch) > _MOST_SEQUENCES:
        raise ArgumentError(f"global_batch must be at most {_MOST_SEQUENCES}, got {global_batch}")
    names = ("flash_attention", "scatter_gather", "fused_loss")
    options = {name: check_flag(name, flag) for name, flag in zip(names, flags, strict=True)}
    limit = memory_limit_bytes(memory_limit)
    if isinstance(limit, Iterable):
        raise ArgumentError(
            f"memory_limit of a plan must be one value for all devices, got {memory_limit!r:.60}; "
            "give the GPUs of each node their memory in the cluster"
        )
    reserve = number(memory_reserve)
    if reserve is None or not 0 <= reserve < float("inf"):
        raise ArgumentError(
            f"memory_reserve must be a finite share >= 0, got {memory_reserve!r:.60}"
        )
    return PlanProblem(
        model, cluster, global_batch,
        None if limit is None else float(checked_memory_limit(limit, 1)[0]),
        layout=check_name("layout", layout, LAYOUTS),  # type: ignore[arg-type]  # one of them
        memory_reserve=reserve, is_even=is_even, **options,
    )  # fmt: skip


def checked_percentile(value: object) -> float:
    """Return a percentile above 0 and at most 100."""
    share = number(value)
    if share is None or not 0 < share <= 100:
        raise ArgumentError(f"percentile must be above 0 and at most 100, got {value!r:.60}")
    return share


def checked_workers(n_jobs: object, backend: object) -> Workers:
    """Return the checked number of processes and backend."""
    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ArgumentError(
            f"n_jobs must be a whole number but 0 (-1: all cores), got {n_jobs!r:.60}"
        )
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(f"backend must be the name of a backend of joblib, got {backend!r:.60}")
    return Workers(n_jobs, backend)

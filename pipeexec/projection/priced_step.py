"""The graph of a projected step, and the costs of its stages."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split
from pipesim.errors import AccuracyWarning, ArgumentError, check_count, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.scheduling.registry import schedule as named_schedule
from pipesim.scheduling.registry import schedule_info
from pipesim.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from pipeexec.projection.projection import Projection


#: Seconds of F and B of a stage below which predictions for CPU workers are poor.
_SHORTEST = 1e-3


def priced_step(
    projection: Projection,
    schedule: Schedule | str,
    n_devices: int | None,
    n_microbatches: int | None,
    split: Split,
    n_chunks: int | None,
    lowering: dict[str, Any],
) -> tuple[TaskGraph, Costs]:
    """Return the graph of a schedule, and the costs of its stages."""
    options = {} if n_chunks is None else {"n_chunks": check_count("n_chunks", n_chunks)}
    counts = {"n_devices": n_devices, "n_microbatches": n_microbatches} | options
    if isinstance(schedule, str):
        checked = [check_count(name, counts[name]) for name in ("n_devices", "n_microbatches")]
        order = named_schedule(schedule, *checked, **options)
        costs, tied = _stage_costs(projection, order, split)
        if "costs" in schedule_info(schedule).options:
            order = named_schedule(schedule, *checked, **options, costs=costs)
    else:
        order = check_type("schedule", schedule, Schedule, 'give such as "1f1b"')
        doubled = [name for name, value in counts.items() if value is not None]
        if doubled:
            raise ArgumentError(
                f"{doubled[0]} is given, but the schedule has its own; leave it out, or give "
                "the name of a schedule"
            )
        costs, tied = _stage_costs(projection, order, split)
    graph = lower(order, **({"tied": tied} | lowering))
    if graph.n_devices > projection.cluster.n_gpus:
        raise ArgumentError(
            f"the graph has {graph.n_devices} devices, but the cluster {projection.cluster.n_gpus} "
            "GPUs; give fewer devices or replicas, or a larger cluster"
        )
    return graph, costs


def _stage_costs(
    projection: Projection, order: Schedule, split: Split
) -> tuple[Costs, tuple[tuple[int, ...], ...]]:
    """Return the costs of the stages of a schedule, and the groups of tied ones."""
    if order.n_slices > 1:
        raise ArgumentError(
            f"schedule {order.name!r} runs slices of sequences, but layers were profiled with "
            "whole micro-batches; give a schedule of these, or measure the slices of the stages "
            "with pipeexec.profile"
        )
    n_stages = order.placement.n_stages
    if n_stages > len(projection.layers):
        raise ArgumentError(
            f"the schedule has {n_stages} stages, but the model {len(projection.layers)} layers; "
            "give fewer devices or chunks"
        )
    placement = order.placement if isinstance(split, str) else None
    sizes = projection.layers.split(split, placement=placement)
    costs = projection.costs(sizes)
    costs.per_stage("forward", n_stages)  # refuses a split into another number of stages
    return costs, tuple(projection.tied_stages(sizes))


def warn_of_short_tasks(device: str, costs: Costs, n_stages: int, stacklevel: int) -> None:
    """Warn of the shortest task of CPU workers, if it is below 1 ms."""
    seconds, op, stage = min(
        (float(x), op, stage)
        for op, name in (("F", "forward"), ("B", "backward"))
        for stage, x in enumerate(costs.per_stage(name, n_stages))
    )
    if device.startswith("cpu") and seconds < _SHORTEST:
        warnings.warn(
            f"{op} of stage {stage} takes {seconds * 1e3:.3f} ms: below {_SHORTEST * 1e3:g} ms "
            "a task the prediction will be poor (hand-over and interpreter take as long); use "
            "larger micro-batches or stages",
            AccuracyWarning,
            stacklevel=stacklevel + 1,
        )


def schedule_name(schedule: Schedule | str) -> str:
    """Return the name of a schedule."""
    return schedule if isinstance(schedule, str) else schedule.name

"""What a calibration finds of replicas: how long their collectives last, and how buckets fill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.gradient_sync import buckets
from pipeexec.shares import Shares
from pipesim.collective_costs import Buckets
from pipesim.graph import TaskGraph
from pipesim.lower import lower
from pipesim.measured_collectives import measured_collectives
from pipesim.network import Network
from pipesim.ops import Op
from pipesim.placement import Placement, replica_devices
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

if TYPE_CHECKING:
    from pipeexec.executor import Pipeline, StepResult

__all__ = ["base_placement", "collective_seconds", "lowered_like", "measured_buckets", "n_buckets"]


def base_placement(graph: TaskGraph) -> Placement:
    """Return the placement of a graph's first replica, on devices numbered without gaps."""
    return Placement(np.unique(graph.device_of_stage, return_inverse=True)[1].tolist())


def lowered_like(graph: TaskGraph, schedule: Schedule, shares: Shares, **options: Any) -> TaskGraph:
    """Lower a schedule for the replicas of a graph, on their devices.

    Of a bidirectional pipeline, for the first path of the first replica alone.
    """
    if shares.n == 1:
        return lower(schedule, sharded=graph.sharded, **options)
    major = replica_devices(shares.n, schedule.n_devices, "replica_major")
    first = np.array(schedule.placement.device_of)
    is_major = (major[:, first] == graph.homes[:: shares.n_paths]).all()
    return lower(
        schedule,
        n_replicas=shares.n,
        layout="replica_major" if is_major else "stage_major",
        sharded=graph.sharded,
        **options,
    )


def collective_seconds(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the mean seconds of each collective that there is, as fields of `Costs`."""
    found = [measured_collectives(timeline, Network(), np.mean) for timeline in timelines]
    return {
        name: tuple(np.mean([each[name] for each in found], axis=0).tolist()) for name in found[0]
    }


def n_buckets(graphs: Iterable[TaskGraph]) -> int:
    """Return the most buckets that a stage has; 0 where gradients are not bucketed."""
    return max((int(g.part[g.op == Op.REDUCE_GRAD].max(initial=-1)) + 1 for g in graphs), default=0)


def measured_buckets(pipeline: Pipeline, steps: Sequence[StepResult], n: int) -> Buckets:
    """Return the buckets of each stage; all processes must call this.

    ``steps`` are of this process alone. A stage without gradients has its bytes evenly.
    """
    graph = pipeline.graph
    shape = graph.n_stages, n
    sizes, shares, counts = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for stage, module in enumerate(pipeline.modules[: graph.n_stages]):
        for bucket, parameters in enumerate(buckets(module, n)):
            sizes[stage, bucket] = sum(p.nbytes for p in parameters)
    for step in steps:
        for task, share in step.milestones.items():
            at = int(step.timeline.graph.stage[task]), int(step.timeline.graph.part[task])
            shares[at] += share
            counts[at] += 1
    sizes, shares, counts = (
        np.array(pipeline.total(table.ravel().tolist())).reshape(shape)
        for table in (sizes, shares, counts)
    )
    whole = sizes.sum(axis=1, keepdims=True)
    parts = np.divide(sizes, whole, out=np.full(shape, 1 / n), where=whole > 0)
    done = np.divide(shares, counts, out=np.ones(shape), where=counts > 0).clip(0, 1)
    return tuple(
        tuple(zip(row.tolist(), ends.tolist(), strict=True))
        for row, ends in zip(parts, done, strict=True)
    )

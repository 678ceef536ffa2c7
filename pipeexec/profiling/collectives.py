"""What a calibration finds of replicas: how long their collectives last, and how buckets fill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.stages.batch_shares import BatchShares
from pipesim.analysis.measured_collectives import measured_collectives
from pipesim.costs.collective_costs import Buckets
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.network.network import Network
from pipesim.ops import EXCHANGES, Op
from pipesim.scheduling.placement import Placement, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    from pipeexec.executor.pipeline import Pipeline, StepResult

__all__ = [
    "base_placement",
    "check_exchanges",
    "collective_seconds",
    "lower_for_replicas",
    "max_buckets",
    "measured_buckets",
]


def base_placement(graph: TaskGraph) -> Placement:
    """Return the placement of a graph's first replica, on devices numbered without gaps."""
    return Placement(np.unique(graph.device_of_stage, return_inverse=True)[1].tolist())


def lower_for_replicas(
    graph: TaskGraph, schedule: Schedule, shares: BatchShares, **options: Any
) -> TaskGraph:
    """Lower a schedule for the replicas of a graph, on their devices.

    Of a bidirectional pipeline, for the first path of the first replica alone. The hosts are those
    of the graph, where they have the same devices.
    """
    if shares.n_shares * schedule.n_devices == graph.n_devices:
        options |= {"hosts": graph.host, "host_threads": graph.host_threads}
    if shares.n_shares == 1:
        return lower(schedule, **_exchanges(graph), **options)
    major = replica_devices(shares.n_shares, schedule.n_devices, "replica_major")
    first = np.array(schedule.placement.device_of)
    is_major = (major[:, first] == graph.homes[:: shares.n_paths]).all()
    return lower(
        schedule,
        n_replicas=shares.n_shares,
        layout="replica_major" if is_major else "stage_major",
        **_exchanges(graph),
        **options,
    )


def check_exchanges(graph: TaskGraph, others: Iterable[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs whose exchanges do other work than a graph's.

    Their seconds are not those that its exchanges take.
    """
    own = _exchanges(graph)
    for other in others:
        for name, value in _exchanges(other).items() if graph.sharded and other.sharded else ():
            if value != own[name]:
                raise ArgumentError(
                    f"graph {other.name!r} was lowered with {name}={value!r}, that of the pipeline "
                    f"with {own[name]!r}: their exchanges take different seconds, which one Costs "
                    "cannot have; measure each with a pipeline of its own"
                )


def _exchanges(graph: TaskGraph) -> dict[str, Any]:
    """Return how a graph's sharded stages exchange, as options of `lower`."""
    works = bool((graph.op == Op.DISPATCH).any())
    parts = graph.part[graph.op == Op.ALL_TO_ALL]
    once = EXCHANGES.index("accumulated") in parts
    return {
        "sharded": graph.sharded,
        "exchange_work": "compute" if works else "collective",
        "sparse_grad_sync": "last" if once else "every",
    }


def collective_seconds(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the mean seconds of each collective that there is, as fields of `Costs`."""
    found = [measured_collectives(timeline, Network(), np.mean) for timeline in timelines]
    return {
        name: tuple(np.mean([each[name] for each in found], axis=0).tolist()) for name in found[0]
    }


def max_buckets(graphs: Iterable[TaskGraph]) -> int:
    """Return the most buckets that a stage has; 0 where gradients are not bucketed."""
    return max((int(g.part[g.op == Op.REDUCE_GRAD].max(initial=-1)) + 1 for g in graphs), default=0)


def measured_buckets(
    pipeline: Pipeline,
    own: Sequence[StepResult],
    whole: Sequence[StepResult],
    seconds: Sequence[float],
    network: Network,
    n: int,
) -> Buckets:
    """Return the buckets of each stage; all processes must call this.

    Parameters
    ----------
    own, whole
        Steps with bucketed gradients: what this process measured, and gathered from all.
    seconds
        Of REDUCE_GRAD of all gradients of each stage.
    network, n
        Whose latency each bucket has, and how many there are.
    """
    graph = whole[0].timeline.graph
    shape = graph.n_stages, n
    shares, counts, lasted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for step in own:
        for task, share in step.milestones.items():
            at = int(graph.stage[task]), int(graph.part[task])
            shares[at] += share
            counts[at] += 1
    shares, counts = (
        np.array(pipeline.total(table.ravel().tolist())).reshape(shape)
        for table in (shares, counts)
    )
    done = np.divide(shares, counts, out=np.ones(shape), where=counts > 0).clip(0, 1)
    tasks = np.flatnonzero(graph.op == Op.REDUCE_GRAD)
    at_tasks = graph.stage[tasks], graph.part[tasks]
    np.add.at(lasted, at_tasks, np.mean([each.timeline.duration[tasks] for each in whole], axis=0))
    n_members = np.zeros(shape)
    np.add.at(n_members, at_tasks, 1)
    lasted = np.divide(lasted, n_members, out=np.zeros(shape), where=n_members > 0)
    found = []
    for stage, (of_stage, ends) in enumerate(zip(lasted, done, strict=True)):
        least = network.all_reduce(0.0, np.unique(graph.homes[:, stage]))
        parts = np.full(n, 1 / n)
        if seconds[stage] > least:
            beyond = np.maximum(of_stage - least, 0.0) / (seconds[stage] - least)
            parts = beyond / min(1.0, beyond.sum()) if beyond.sum() > 0 else parts
        found.append(tuple(zip(parts.tolist(), ends.tolist(), strict=True)))
    return tuple(found)

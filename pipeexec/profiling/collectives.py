"""Measured costs of replicas: seconds of collectives, and sizes and ready times of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeexec.experts.expert_shares import layers_of_graph, n_members
from pipeexec.stages.microbatches import BatchShares
from pipesim.analysis.measured_costs import (
    grad_norm_seconds,
    measured_collectives,
    measured_segments,
)
from pipesim.costs.cost_fields import Buckets
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.network.network import Network
from pipesim.ops import EXCHANGES, Op
from pipesim.scheduling.placement import Placement, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    from pipeexec.executor.pipeline import Pipeline
    from pipeexec.executor.step_result import StepResult


def base_placement(graph: TaskGraph) -> Placement:
    """Return the placement of a graph's first replica, on devices numbered without gaps."""
    devices = np.unique(graph.device_of_stage, return_inverse=True)[1].tolist()
    return Placement(devices, edges=graph.edges)


def lower_for_replicas(
    graph: TaskGraph, schedule: Schedule, shares: BatchShares, **options: Any
) -> TaskGraph:
    """Lower a schedule for the replicas of a graph, on their devices.

    A bidirectional pipeline is lowered for the first path of the first replica alone. The hosts
    are those of the graph if both have the same devices.
    """
    options |= {"tied": graph.tied, "grad_norm": graph.has_grad_norm}
    layers = layers_of_graph(graph)
    options |= {"expert_layers": layers}
    if any(layers):
        options["recompute"] = "never"  # stages with experts have no R
    if shares.n_shares * schedule.n_devices == graph.n_devices:
        options |= {"hosts": graph.host, "host_threads": graph.host_threads}
    if shares.n_shares == 1:
        return lower(schedule, **_exchanges(graph), **options)
    major = replica_devices(shares.n_shares, schedule.n_devices, "replica_major")
    shared: dict[str, Any] = {"shard_optimizer": bool((graph.optimizer_shares > 1).any())}
    if (graph.parameter_shares > 1).any():
        shared = {"shard_parameters": "every"}
    first = np.array(schedule.placement.device_of)
    is_major = (major[:, first] == graph.homes[:: shares.n_paths]).all()
    return lower(
        schedule,
        n_replicas=shares.n_shares,
        layout="replica_major" if is_major else "stage_major",
        expert_replicas=graph.expert_replicas or None,
        **_exchanges(graph),
        **shared,
        **options,
    )


def check_exchanges(graph: TaskGraph, others: Iterable[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs whose exchanges do other work than those of ``graph``.

    Such exchanges take other seconds than the measured ones.
    """
    own = _exchanges(graph)
    for other in others:
        for name, value in _exchanges(other).items() if graph.sharded and other.sharded else ():
            if value != own[name]:
                raise ArgumentError(
                    f"graph {other.name!r} was lowered with {name}={value!r}, that of the pipeline "
                    f"with {own[name]!r}: their exchanges take different seconds, which one Costs "
                    "cannot have; measure each with its own pipeline"
                )


def _exchanges(graph: TaskGraph) -> dict[str, Any]:
    """Return the options of `lower` for the exchanges of a graph's sharded stages."""
    has_dispatch = bool((graph.op == Op.DISPATCH).any())
    parts = graph.part[graph.op == Op.ALL_TO_ALL]
    is_accumulated = EXCHANGES.index("accumulated") in parts
    return {
        "sharded": graph.sharded,
        "exchange_work": "compute" if has_dispatch else "collective",
        "sparse_grad_sync": "last" if is_accumulated else "every",
    }


def collective_seconds(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the mean seconds of each collective in the timelines, as fields of `Costs`."""
    return _means([measured_collectives(timeline, Network(), np.mean) for timeline in timelines])


def expert_values(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the fields of `Costs` about experts: layers, shares of segments, and replicas.

    Shares are means over the timelines. Empty without layers with experts.
    """
    measured = [measured_segments(timeline, np.mean) for timeline in timelines]
    if not measured[0]:
        return {}
    stages = zip(*(values["segments"] for values in measured), strict=True)
    segments = [
        [np.mean(shares, axis=0).tolist() for shares in zip(*stage, strict=True)]
        for stage in stages
    ]
    return {
        "expert_layers": tuple(measured[0]["expert_layers"]),
        "segments": segments,
        "expert_replicas": n_members(timelines[0].graph),
    }


def norm_seconds(timelines: Sequence[Timeline], network: Network) -> dict[str, Any]:
    """Return ``grad_norm`` of `Costs`, on average over timelines; empty without GRAD_NORM."""
    return _means([grad_norm_seconds(timeline, network, np.mean) for timeline in timelines])


def _means(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each field of `Costs`, with a value a stage."""
    return {
        name: tuple(np.mean([seconds[name] for seconds in measured], axis=0).tolist())
        for name in measured[0]
    }


def max_buckets(graphs: Iterable[TaskGraph]) -> int:
    """Return the largest number of buckets of a stage; 0 if gradients are not bucketed."""
    return max((int(g.part[g.op == Op.REDUCE_GRAD].max(initial=-1)) + 1 for g in graphs), default=0)


def measured_buckets(
    pipeline: Pipeline,
    own: Sequence[StepResult],
    merged: Sequence[StepResult],
    seconds: Sequence[float],
    network: Network,
    n: int,
) -> Buckets:
    """Return the ``n`` buckets of each stage; all processes must call this.

    ``own`` and ``merged`` are steps with bucketed gradients: the results of this process, and those
    of all processes. ``seconds`` are those of one REDUCE_GRAD of all gradients, for each stage.
    Each bucket has the all-reduce latency of ``network``.
    """
    graph = merged[0].timeline.graph
    shape = graph.n_stages, n
    ready, bucket_seconds = _ready_shares(pipeline, own, shape), _mean_seconds(merged, shape)
    buckets = []
    for stage, (stage_seconds, ends) in enumerate(zip(bucket_seconds, ready, strict=True)):
        latency = network.all_reduce(0.0, np.unique(graph.homes[:, stage]))
        parts = np.full(n, 1 / n)
        if seconds[stage] > latency:
            ratios = np.maximum(stage_seconds - latency, 0.0) / (seconds[stage] - latency)
            parts = ratios / min(1.0, ratios.sum()) if ratios.sum() > 0 else parts
        buckets.append(tuple(zip(parts.tolist(), ends.tolist(), strict=True)))
    return tuple(buckets)


def _ready_shares(
    pipeline: Pipeline, own: Sequence[StepResult], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the share of the backward after which each bucket is ready; 1 if not measured."""
    graph = own[0].timeline.graph
    shares, counts = np.zeros(shape), np.zeros(shape)
    for step in own:
        for task, share in step.milestones.items():
            bucket = int(graph.stage[task]), int(graph.part[task])
            shares[bucket] += share
            counts[bucket] += 1
    shares, counts = (
        np.array(pipeline.total(table.ravel().tolist())).reshape(shape)
        for table in (shares, counts)
    )
    return np.divide(shares, counts, out=np.ones(shape), where=counts > 0).clip(0, 1)


def _mean_seconds(merged: Sequence[StepResult], shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return the mean seconds of the REDUCE_GRAD of each bucket, over members and steps."""
    graph = merged[0].timeline.graph
    tasks = np.flatnonzero(graph.op == Op.REDUCE_GRAD)
    buckets = graph.stage[tasks], graph.part[tasks]
    sums, n_members = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, buckets, np.mean([step.timeline.duration[tasks] for step in merged], axis=0))
    np.add.at(n_members, buckets, 1)
    return np.divide(sums, n_members, out=np.zeros(shape), where=n_members > 0)

"""Measure the seconds of collectives in a timeline, as fields of `Costs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import measured_shares
from pipesim.costs.collective_costs import MEASURED_COLLECTIVES, NORM_BYTES, exchange_name
from pipesim.costs.expert_pricing import optimizer_parts
from pipesim.network.network import Network
from pipesim.ops import OF_DEVICES, Op
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: Mean or median.
Average = Callable[[Floats], Any]


def measured_collectives(timeline: Timeline, network: Network, average: Average) -> dict[str, Any]:
    """Return the seconds of each kind of collective by stage, and the buckets.

    A collective lasts from the start of its last member. The reductions of all buckets together
    have the seconds of one REDUCE_GRAD, which has the latency of ``network`` once.
    """
    graph = timeline.graph
    seconds = _seconds(timeline, average)
    values: dict[str, Any] = _tied_sums(timeline, average)
    exchanges: dict[str, list[Floats]] = {}
    for (op, part), of_stage in seconds.items():
        if op == Op.ALL_TO_ALL:
            exchanges.setdefault(exchange_name(part), []).append(of_stage)
        elif part < 0:
            values[MEASURED_COLLECTIVES[op.name]] = _filled(of_stage)
    for name, of_stages in exchanges.items():  # several layers of experts have one name
        counts = (~np.isnan(of_stages)).sum(axis=0)
        mean = np.nansum(of_stages, axis=0) / np.where(counts, counts, np.nan)
        values[MEASURED_COLLECTIVES[name]] = _filled(mean)
    n_buckets = 1 + max((part for op, part in seconds if op == Op.REDUCE_GRAD), default=-1)
    if n_buckets == 0:
        return values
    parts = np.stack([seconds[Op.REDUCE_GRAD, part] for part in range(n_buckets)])
    algorithm = "ring" if timeline.costs is None else timeline.costs.all_reduce
    least = np.array(
        [
            network.all_reduce(0.0, np.unique(graph.homes[:, stage]), algorithm)
            for stage in range(graph.n_stages)
        ]
    )
    bytes_only = np.maximum(parts - least, 0.0)
    values["reduce_grad"] = _filled(np.minimum(least, parts.max(axis=0)) + bytes_only.sum(axis=0))
    if timeline.costs is None:
        values["buckets"] = _buckets(timeline, bytes_only)
    else:
        values["buckets"] = timeline.costs.buckets
    return values


def _seconds(timeline: Timeline, average: Average) -> dict[tuple[Op, int], Floats]:
    """Return average seconds of each kind of collective; shape ``(n_stages,)``, NaN if absent.

    Those with one member a device are not among them.
    """
    graph = timeline.graph
    first, lasted = _lasted(timeline)
    of_stage = ~graph.is_op(OF_DEVICES)[first]
    first, lasted = first[of_stage], lasted[of_stage]
    seconds: dict[tuple[Op, int], Floats] = {}
    parts = np.where(graph.op[first] == Op.UNSHARD, -1, graph.part[first])  # both gather the same
    kinds = np.unique(np.stack([graph.op[first], parts, graph.stage[first]]), axis=1)
    for op, part, stage in kinds.T.tolist():
        selected = (graph.op[first] == op) & (parts == part) & (graph.stage[first] == stage)
        values = seconds.setdefault((Op(op), part), np.full(graph.n_stages, np.nan))
        values[stage] = average(lasted[selected])
    return seconds


def _lasted(timeline: Timeline) -> tuple[Ints, Floats]:
    """Return the first member of each collective, and the time from its last start to its end."""
    graph = timeline.graph
    number, members = graph.collectives.rows, graph.collectives.values
    last, end = (np.full(len(graph.collectives), -np.inf) for _ in range(2))
    np.maximum.at(last, number, timeline.start[members])
    np.maximum.at(end, number, timeline.end[members])
    return members[graph.collectives.ptr[:-1]], np.maximum(end - last, 0.0)


def _tied_sums(timeline: Timeline, average: Average) -> dict[str, Any]:
    """Return ``reduce_tied``: the lowest stage of each group of tied stages has its seconds.

    Groups with one lowest stage are averaged. Empty without tied stages.
    """
    graph = timeline.graph
    first, lasted = _lasted(timeline)
    sums = graph.op[first] == Op.REDUCE_TIED
    if not sums.any():
        return {}
    lowest = np.array([group[0] for group in graph.tied])[graph.part[first[sums]]]
    seconds = np.zeros(graph.n_stages)
    for stage in np.unique(lowest).tolist():
        seconds[stage] = average(lasted[sums][lowest == stage])
    return {MEASURED_COLLECTIVES[Op.REDUCE_TIED.name]: tuple(seconds.tolist())}


def grad_norm_seconds(timeline: Timeline, network: Network, average: Average) -> dict[str, Any]:
    """Return ``grad_norm``: the seconds of GRAD_NORM beyond its all-reduce on ``network``.

    A timeline does not show which device was the slowest. Stages of a device share the seconds
    evenly. Empty without GRAD_NORM.
    """
    graph = timeline.graph
    first, lasted = _lasted(timeline)
    norms = graph.op[first] == Op.GRAD_NORM
    if not norms.any():
        return {}
    members = np.flatnonzero(graph.op == Op.GRAD_NORM)
    devices = np.unique(graph.device[members])
    all_reduce = network.all_reduce(NORM_BYTES, devices, "fastest") if len(devices) > 1 else 0.0
    local = max(0.0, float(average(lasted[norms])) - all_reduce)
    is_own = graph.homes[graph.replica[members]] == graph.device[members][:, None]
    member, stage = np.nonzero(is_own)
    seconds = np.zeros(graph.n_stages)
    seconds[stage] = local / is_own.sum(axis=1)[member]
    return {"grad_norm": tuple((seconds * parts_of_steps(timeline)).tolist())}


def parts_of_steps(timeline: Timeline) -> Floats:
    """Return the number by which the seconds of STEP, and of norms, of each stage were divided."""
    graph, costs = timeline.graph, timeline.costs
    return np.asarray(graph.optimizer_shares if costs is None else optimizer_parts(costs, graph))


def _buckets(timeline: Timeline, seconds: Floats) -> list[list[tuple[float, float]]]:
    """Return shares of bytes (by seconds beyond latency) and of the backward of each bucket.

    ``seconds`` has one row a bucket and one column a stage, NaN for a stage without buckets.
    """
    graph, shares = timeline.graph, measured_shares(timeline)
    buckets: list[list[tuple[float, float]]] = []
    for stage, of_stage in enumerate(seconds.T):
        parts = of_stage[~np.isnan(of_stage)]
        even = np.full(len(parts), 1 / max(len(parts), 1))
        sizes = parts / parts.sum() if parts.sum() > 0 else even
        tasks_of_part = [
            (graph.stage == stage) & (graph.part == part) for part in range(len(parts))
        ]
        ready = [shares[tasks & (graph.op == Op.REDUCE_GRAD)].mean() for tasks in tasks_of_part]
        buckets.append(list(zip(sizes.tolist(), map(float, ready), strict=True)))
    return buckets


def _filled(values: Floats) -> tuple[float, ...]:
    return tuple(np.nan_to_num(values).tolist())

"""Take costs from timelines: the seconds of each operation.

The simulator needs durations of tasks that ran beside others, as in a step. Durations of stages
that were measured alone are too short.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.measured_collectives import (
    grad_norm_seconds,
    measured_collectives,
    parts_of_steps,
)
from pipesim.analysis.measured_copies import measured_copies
from pipesim.analysis.measured_network import measured_network
from pipesim.analysis.measured_segments import measured_segments
from pipesim.analysis.microbatch_seconds import microbatch_values, n_measured
from pipesim.analysis.replay import replay_costs
from pipesim.costs.collective_costs import MEASURED_COLLECTIVES
from pipesim.costs.costs import OTHER_FIELDS, VALUE_FIELDS, Costs
from pipesim.costs.expert_pricing import add_expert_exchanges
from pipesim.costs.kind_routes import KindRoutes
from pipesim.costs.microbatch_costs import repeated
from pipesim.costs.pricing import DURATION_OF
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    TimelineError,
    check_flag,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import SkipBytes, border_crossings, skip_text
from pipesim.network.network import Network
from pipesim.ops import EXCHANGES, SEGMENTED, SENDS, Op
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline

#: Smallest share of a timeline for which time missing in the costs is worth a warning.
_MUCH = 0.01

_AVERAGES: dict[str, Callable[[NDArray[np.float64]], Any]] = {"mean": np.mean, "median": np.median}


def costs_from_timeline(
    timeline: Timeline,
    *,
    average: str = "mean",
    network: Network | None = None,
    per_microbatch: bool = False,
    **fields: Any,
) -> Costs:
    """Return the costs that a timeline shows; see `Costs.from_timeline`."""
    check_name("average", average, _AVERAGES)
    check_flag("per_microbatch", per_microbatch)
    if not isinstance(timeline, Timeline):
        raise ArgumentError(f"costs come from a Timeline, got {type(timeline).__name__}")
    for name in fields:
        check_name("cost", name, (*VALUE_FIELDS, *OTHER_FIELDS))
    timeline.check_complete("take costs from")
    values: dict[str, Any] = {}
    old_costs = timeline.costs
    if old_costs is not None:  # costs that a timeline does not show
        if per_microbatch:
            old_costs = repeated(old_costs, n_measured(timeline.graph))
        values = {name: getattr(old_costs, name) for name in (*_BYTES, *_KEPT)}
        if timeline.graph.tied:  # otherwise it is part of STEP
            values["tied_bytes"] = old_costs.tied_bytes
        if network is None:
            values["output_seconds"] = old_costs.output_seconds
    values["output_bytes"] = tuple(output_bytes(timeline).tolist())
    if timeline.graph.skips and "skip_bytes" not in fields:
        values["skip_bytes"] = _skip_bytes(timeline)
    values |= _durations(timeline, average)
    values |= measured_segments(timeline, _AVERAGES[average])
    if per_microbatch:
        values |= microbatch_values(timeline, values)
    if getattr(network, "host", None) is None:
        has_activations = "activation_bytes" in fields
        values |= measured_copies(timeline, _AVERAGES[average], has_activations=has_activations)
    if network is None:
        network = measured_network(timeline, _AVERAGES[average])
        values |= measured_collectives(timeline, network, _AVERAGES[average])
        for size, seconds in _SECONDS_OF_BYTES.items():
            values = {k: v for k, v in values.items() if size not in fields or k not in seconds}
    values |= grad_norm_seconds(timeline, network, _AVERAGES[average])
    costs = Costs(**{**values, **fields}, network=network)
    if "recompute" not in fields:
        costs = _without_exchanges(costs, timeline.graph)
    if "parameter_bytes" not in fields and costs.reduce_grad is None:
        _warn_of_free_reductions(timeline, costs)
    if "launch" not in fields and timeline.issue_times.any():
        _warn_of_free_launches(timeline)
    return costs


def _without_exchanges(costs: Costs, graph: TaskGraph) -> Costs:
    """Return costs whose recomputes leave out the exchanges of experts that an R contains."""
    if not graph.kinds.has_segments or Op.R not in graph.kinds.ops:
        return costs
    duration = np.zeros(len(graph.kinds))
    add_expert_exchanges(costs, KindRoutes(graph, costs.network, costs.all_reduce), duration)
    exchanges = np.zeros(graph.n_stages)
    recomputes = graph.kinds.op == Op.R
    np.maximum.at(exchanges, graph.kinds.stage[recomputes], duration[recomputes])
    measured = np.atleast_1d(np.array(costs.recompute, dtype=float))
    changed: dict[str, Any] = {"recompute": np.maximum(0.0, (measured.T - exchanges).T)}
    return replace(costs, **changed)


def _warn_of_free_reductions(timeline: Timeline, costs: Costs) -> None:
    """Warn if reductions of gradients took time and the costs have no bytes for them."""
    graph = timeline.graph
    reductions = graph.op == Op.REDUCE_GRAD
    if not reductions.any() or costs.per_stage("gradient_bytes", graph.n_stages).any():
        return
    weights = np.where(reductions, timeline.duration, 0.0)
    longest = float(np.bincount(graph.device, weights).max())
    if longest > _MUCH * timeline.makespan:
        warnings.warn(
            f"reductions of gradients took up to {longest:.2e} s of a device in timeline "
            f"{timeline.name!r}, and cost nothing on the network that was given; give "
            "parameter_bytes=, from which the network says how long the replicas of a graph reduce "
            "them, or parameter_bytes=0 if they are to cost nothing",
            AccuracyWarning,
            stacklevel=4,
        )


def _warn_of_free_launches(timeline: Timeline) -> None:
    """Warn if a timeline would be much shorter with every task issued in time."""
    graph, costs = timeline.graph, replay_costs(timeline)
    late, in_time = (
        predict_timeline(graph, replace(costs, issued=moments)).makespan
        for moments in (costs.issued, np.zeros(len(graph)))
    )
    if in_time < (1.0 - _MUCH) * late:
        host = graph.host[graph.device]
        last = np.zeros(host.max() + 1)
        np.maximum.at(last, host, timeline.issue_times)
        warnings.warn(
            f"tasks of timeline {timeline.name!r} waited until their host had issued them, for "
            f"{1 - in_time / late:.0%} of its makespan, and these costs leave that out: launch is "
            f"0; give launch, such as the mean of this timeline: {last.sum() / len(graph):.3g}",
            AccuracyWarning,
            stacklevel=4,
        )


#: Seconds that come from bytes, not from the timeline, if bytes are given.
_SECONDS_OF_BYTES = {
    "parameter_bytes": ("reduce_grad", "unshard", "buckets"),
    "gradient_bytes": ("reduce_grad", "buckets"),
    "tied_bytes": ("reduce_tied",),
    "key_bytes": ("exchange_counts", "exchange_keys"),
    "vector_bytes": ("exchange_vectors", "exchange_gradients", "exchange_accumulated"),
    "dispatch_bytes": ("exchange_dispatch",),
    "combine_bytes": ("exchange_combine",),
    "exchange_bytes": tuple(MEASURED_COLLECTIVES[name] for name in EXCHANGES),
}
#: Fields of costs that a timeline does not show.
_BYTES = tuple(name for name in VALUE_FIELDS if name.endswith("bytes"))
#: For each operation with parts, the part whose seconds count.
_PART_OF = {Op.REORDER: EXCHANGES.index("vectors")}
_KEPT = (
    *("all_reduce", "exchange_bytes", "workload", "memory_reserve", "expert_replicas"),
    *("expert_parameter_bytes", "expert_gradient_bytes", "expert_optimizer_bytes", "reduced_share"),
)


def _durations(timeline: Timeline, average: str) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each operation that every stage has."""
    graph = timeline.graph
    seconds = {
        op: stage_seconds(timeline, op, average, part=_PART_OF.get(op)) for op in DURATION_OF
    }
    if np.isnan(seconds[Op.B]).any():
        halves = seconds[Op.I] + seconds[Op.W]
        seconds[Op.B] = np.where(np.isnan(seconds[Op.B]), halves, seconds[Op.B])
    both = _overlaps(timeline, seconds, average) if graph.kinds.overlapped.any() else {}
    if (graph.op == Op.R).any():
        seconds[Op.R] = np.where(np.isnan(seconds[Op.R]), seconds[Op.F], seconds[Op.R])
    seconds[Op.STEP] = np.nan_to_num(seconds[Op.STEP], nan=0.0) * parts_of_steps(timeline)
    for op in (Op.DISPATCH, Op.REORDER):
        seconds[op] = np.nan_to_num(seconds[op], nan=0.0)
    durations = {DURATION_OF[op]: values for op, values in seconds.items()} | both
    sums = stage_seconds(timeline, Op.REORDER, average, part=EXCHANGES.index("gradients"))
    if not np.isnan(sums).all():
        durations["reorder_gradients"] = np.nan_to_num(sums, nan=0.0)
    return {
        name: tuple(values.tolist())
        for name, values in durations.items()
        if not np.isnan(values).any()
    }


def _overlaps(
    timeline: Timeline, seconds: dict[Op, NDArray[np.float64]], average: str
) -> dict[str, NDArray[np.float64]]:
    """Return seconds of overlapped actions, from which `Costs.of` restores their halves.

    - A stage with both halves has the sum of their seconds.
    - If one half is never overlapped, the seconds are such that the other half gets its share.
    - Without overlapped halves, they are the sum of F and B.

    The first F and the last backward of a stage overlap with no task, so that ``seconds`` has both.
    """
    halves = {op: stage_seconds(timeline, op, average, overlapped=True) for op in (Op.F, Op.B)}
    both = halves[Op.F] + halves[Op.B]
    alone = seconds[Op.F] + seconds[Op.B]
    for op, of_halves in halves.items():
        share = np.divide(seconds[op], alone, out=np.ones_like(alone), where=seconds[op] > 0)
        both = np.where(np.isnan(both), of_halves / share, both)
    return {"overlapped": np.where(np.isnan(both), alone, both)}


def stage_seconds(
    timeline: Timeline,
    op: Op,
    average: str = "mean",
    *,
    overlapped: bool = False,
    part: int | None = None,
) -> NDArray[np.float64]:
    """Return mean or median seconds of an operation in each stage, NaN for stages without it.

    Shape ``(n_stages,)``. Halves of overlapped actions do not count; with ``overlapped`` only they
    do. With ``part``, only tasks of that part count.
    """
    graph = timeline.graph
    half = (graph.kinds.overlapped > 0)[graph.kind]
    wanted = (graph.op == op) & (half == overlapped)
    tasks = np.flatnonzero(wanted if part is None else wanted & (graph.part == part))
    stage, duration = graph.stage[tasks], timeline.duration[tasks]
    segment = np.where(graph.is_op(SEGMENTED), graph.part, -1)[tasks]
    means = np.full(graph.n_stages, np.nan)
    for index in np.unique(stage):
        own, of_stage = segment[stage == index], duration[stage == index]
        means[index] = sum(_AVERAGES[average](of_stage[own == part]) for part in np.unique(own))
    return means


def output_bytes(timeline: Timeline) -> NDArray[np.float64]:
    """Return the largest message that each stage sends or is sent back; shape ``(n_stages,)``."""
    graph = timeline.graph
    largest = np.zeros(graph.n_stages)
    for op, offset in ((Op.SEND_F, 0), (Op.SEND_B, -1)):
        sends = (graph.op == op) & (graph.peer_stage < 0)
        np.maximum.at(largest, graph.stage[sends] + offset, timeline.nbytes[sends])
    return largest


def _skip_bytes(timeline: Timeline) -> SkipBytes | None:
    """Return the bytes of each skip: those of the timeline's costs, or of its largest messages."""
    graph = timeline.graph
    if timeline.costs is not None:
        return timeline.costs.skip_sizes
    largest = dict.fromkeys(border_crossings(graph.skips, graph.portals), 0.0)
    for task in np.flatnonzero(graph.is_op(SENDS) & (graph.peer_stage >= 0)).tolist():
        ends = sorted((int(graph.stage[task]), int(graph.peer_stage[task])))
        message = ends[0], ends[1]
        largest[message] = max(largest[message], float(timeline.nbytes[task]))
    sizes = {}
    messages = border_crossings(graph.skips, graph.portals).items()
    for k, skip in enumerate(graph.skips):
        alone = [largest[message] for message, members in messages if members == [k]]
        if not alone:
            raise TimelineError(
                f"timeline {timeline.name!r} does not show the bytes of skip {skip_text(skip)}, "
                "which shares all of its messages with others; give skip_bytes="
            )
        sizes[skip] = max(alone)
    return tuple(sizes.items())

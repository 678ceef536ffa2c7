"""Take costs from timelines: seconds of each operation, message and collective.

The simulator needs durations of tasks that ran beside others, as in a step. Durations of stages
that were measured alone are too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pipesim.analysis.blocking import Floats, measured_shares
from pipesim.analysis.replay import message_times, replay_costs
from pipesim.costs.costs import Costs
from pipesim.costs.kind_routes import KindRoutes
from pipesim.costs.microbatch_costs import repeated
from pipesim.costs.pricing import (
    NORM_BYTES,
    add_expert_exchanges,
    exchange_name,
    message_bytes,
    optimizer_parts,
)
from pipesim.costs.rows import COMPUTED, LAYER_SECONDS, MEASURED, ROWS
from pipesim.errors import AccuracyWarning, ArgumentError, TimelineError, check_flag, check_name
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.graph.skips import SkipBytes, border_crossings, skip_text
from pipesim.network.network import Network
from pipesim.ops import COPIES, OF_DEVICES, PART_NAMES, SEGMENTED, SENDS, Op
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.csr import Ints

#: Mean or median.
Average = Callable[[Floats], Any]

#: Smallest share of a timeline for which time missing in the costs is worth a warning.
_MUCH = 0.01

#: Fields that are not seconds and that a timeline shows, or hides in other tasks.
_SHOWN = ("network", "buckets", "segments", "expert_layers", "skip_bytes", "tied_bytes")
#: Fields that a timeline does not show.
_KEPT = [k for k, row in ROWS.items() if row.unit != "seconds" and k not in _SHOWN]
_AVERAGES: dict[str, Average] = {"mean": np.mean, "median": np.median}


def costs_from_timeline(
    timeline: Timeline,
    *,
    average: str = "mean",
    network: Network | None = None,
    per_microbatch: bool = False,
    **fields: Any,
) -> Costs:
    """Return the costs of a timeline, such as to simulate it with something changed.

    - Compute: seconds of F, B, I, W, R and STEP are averages over the tasks of each stage. If
      some stage has no I and W, both are left out, since the shares of its B are unknown.
    - Overlapped actions: their halves do not count as F and B. ``overlapped`` is the average
      of a stage's F halves plus that of its B halves, if any.
    - Messages: bytes are those of the timeline, and bandwidth is that of its SENDs. Latency is
      the rest of a message's time, on average over the messages that were waited for and whose
      RECV did not wait for its own stream or host. Without such messages, latency is the least
      rest of all messages, which is an upper bound.
    - Skip connections: ``skip_bytes`` are those of the timeline's costs, or else of its
      messages that carry one skip connection alone.
    - Collectives: seconds from the start of the last member (``reduce_grad``, ``unshard``,
      ``exchange_...``; ``buckets`` for gradients in buckets). They hold for as many replicas
      on such links. If ``network`` or their bytes are given, seconds follow from these.
    - Hosts: ``launch`` is 0 unless given. It has no effect where hosts were in time, and a
      trace of another framework does not show it.

    Parameters
    ----------
    timeline
        Measured or simulated, and complete. Its own costs, if any, give the other bytes.
    average
        ``"mean"``, which keeps sums and so predicts makespans best, or ``"median"``.
    network
        Used instead of the network that the messages show; ``Network()`` makes messages free.
    per_microbatch
        Whether F, B, I, W and R of each stage have the seconds of each micro-batch, and
        messages their bytes, instead of averages. Replicas then have their own values. Halves
        of overlapped actions still have averages.
    **fields
        Other fields of `Costs`, used instead of the timeline's.

    Returns
    -------
    Costs
        One value a stage, or one a stage and micro-batch.

    Raises
    ------
    TimelineError
        If tasks of the timeline did not run, or if it does not show the bytes of a skip
        connection.

    Warns
    -----
    AccuracyWarning
        - If reductions took more than 1 % of the timeline, ``network`` is given, and neither
          the timeline's costs nor ``fields`` have ``parameter_bytes``.
        - If tasks waited for their host for more than 1 % of the timeline, and ``launch`` is
          not given.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", n_devices=2, n_microbatches=2))
    >>> measured = ps.simulate(graph, ps.Costs(forward=(1, 3), backward=2))
    >>> ps.Costs.from_timeline(measured).forward
    (1.0, 3.0)
    """
    mean = _AVERAGES[check_name("average", average, _AVERAGES)]
    check_flag("per_microbatch", per_microbatch)
    if not isinstance(timeline, Timeline):
        raise ArgumentError(f"costs come from a Timeline, got {type(timeline).__name__}")
    for name in fields:
        check_name("cost", name, [name for name in ROWS if name != "network"])
    timeline.check_complete("take costs from")
    values: dict[str, Any] = {}
    old_costs = timeline.costs
    if old_costs is not None:  # costs that a timeline does not show
        if per_microbatch:
            old_costs = repeated(old_costs, n_measured(timeline.graph))
        values = {name: getattr(old_costs, name) for name in _KEPT}
        if timeline.graph.tied:  # otherwise it is part of STEP
            values["tied_bytes"] = old_costs.tied_bytes
        if network is None:
            values["output_seconds"] = old_costs.output_seconds
    values["output_bytes"] = tuple(output_bytes(timeline).tolist())
    if timeline.graph.skips and "skip_bytes" not in fields:
        values["skip_bytes"] = _skip_bytes(timeline)
    values |= _durations(timeline, average)
    values |= measured_segments(timeline, mean)
    if per_microbatch:
        values |= microbatch_values(timeline, values)
    if getattr(network, "host", None) is None:
        has_activations = "activation_bytes" in fields
        values |= measured_copies(timeline, mean, has_activations=has_activations)
    if network is None:
        network = measured_network(timeline, mean)
        values |= measured_collectives(timeline, network, mean)
        values = {k: v for k, v in values.items() if fields.keys().isdisjoint(ROWS[k].sizes)}
    values |= grad_norm_seconds(timeline, network, mean)
    costs = Costs(**{**values, **fields}, network=network)
    if "recompute" not in fields:
        costs = _without_exchanges(costs, timeline.graph)
    if "parameter_bytes" not in fields and costs.reduce_grad is None:
        _warn_of_free_reductions(timeline, costs)
    if fields.keys().isdisjoint(("launch", "launch_by_op")) and timeline.issue_times.any():
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
        warn_caller(
            f"reductions of gradients took up to {longest:.2e} s of a device in timeline "
            f"{timeline.name!r}, and cost nothing on the network that was given; give "
            "parameter_bytes=, from which the network says how long the replicas of a graph reduce "
            "them, or parameter_bytes=0 if they are to cost nothing",
            AccuracyWarning,
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
        warn_caller(
            f"tasks of timeline {timeline.name!r} waited until their host had issued them, for "
            f"{1 - in_time / late:.0%} of its makespan, and these costs leave that out: launch is "
            f"0; give launch, such as the mean of this timeline: {last.sum() / len(graph):.3g}",
            AccuracyWarning,
        )


def _durations(timeline: Timeline, average: str) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each operation that every stage has."""
    graph = timeline.graph
    seconds = {
        name: stage_seconds(
            timeline, op, average, part=PART_NAMES[op].index(part) if part else None
        )
        for (op, part), name in COMPUTED.items()
    }
    halves = seconds["input_grad"] + seconds["weight_grad"]
    seconds["backward"] = np.where(np.isnan(seconds["backward"]), halves, seconds["backward"])
    if graph.kinds.overlapped.any():
        seconds["overlapped"] = _overlaps(timeline, seconds, average)
    if (graph.op == Op.R).any():
        own, forward = seconds["recompute"], seconds["forward"]
        seconds["recompute"] = np.where(np.isnan(own), forward, own)
    for name, own in seconds.items():
        if ROWS[name].default == 0 or (name == "reorder_gradients" and not np.isnan(own).all()):
            seconds[name] = np.nan_to_num(own, nan=0.0)
    seconds["optimizer_step"] *= parts_of_steps(timeline)
    return {
        name: tuple(values.tolist())
        for name, values in seconds.items()
        if not np.isnan(values).any()
    }


def _overlaps(timeline: Timeline, seconds: dict[str, Floats], average: str) -> Floats:
    """Return seconds of overlapped actions, from which `Costs.of` restores their halves.

    - A stage with both halves has the sum of their seconds.
    - If one half is never overlapped, the seconds are such that the other half gets its share.
    - Without overlapped halves, they are the sum of F and B.

    The first F and the last backward of a stage overlap with no task, so that ``seconds`` has both.
    """
    halves = {
        LAYER_SECONDS[op]: stage_seconds(timeline, op, average, overlapped=True)
        for op in (Op.F, Op.B)
    }
    whole, part = seconds["backward"], seconds["input_grad"]
    of_inputs = stage_seconds(timeline, Op.I, average, overlapped=True)  # in place of B
    of_inputs *= np.divide(whole, part, out=np.ones_like(whole), where=part > 0)
    halves["backward"] = np.fmax(halves["backward"], of_inputs)
    both = halves["forward"] + halves["backward"]
    alone = seconds["forward"] + seconds["backward"]
    for name, of_halves in halves.items():
        own = seconds[name]
        share = np.divide(own, alone, out=np.ones_like(alone), where=own > 0)
        both = np.where(np.isnan(both), of_halves / share, both)
    return np.where(np.isnan(both), alone, both)


def stage_seconds(
    timeline: Timeline,
    op: Op,
    average: str = "mean",
    *,
    overlapped: bool = False,
    part: int | None = None,
) -> Floats:
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


def output_bytes(timeline: Timeline) -> Floats:
    """Return the largest message that each stage sends or is sent back; shape ``(n_stages,)``."""
    graph = timeline.graph
    largest = np.zeros(graph.n_stages)
    of_outputs = (graph.peer_stage < 0) | bool(graph.edges)  # edges have outputs, skips have not
    previous = np.where(graph.peer_stage < 0, graph.stage - 1, graph.peer_stage)
    for op, source in ((Op.SEND_F, graph.stage), (Op.SEND_B, previous)):
        sends = (graph.op == op) & of_outputs
        np.maximum.at(largest, source[sends], timeline.nbytes[sends])
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


# Collectives.


def measured_collectives(timeline: Timeline, network: Network, average: Average) -> dict[str, Any]:
    """Return the seconds of each kind of collective by stage, and the buckets.

    A collective lasts from the start of its last member. The reductions of all buckets together
    have the seconds of one REDUCE_GRAD, which has the latency of ``network`` once.
    """
    graph = timeline.graph
    seconds = _collective_seconds(timeline, average)
    values: dict[str, Any] = _tied_sums(timeline, average)
    exchanges: dict[str, list[Floats]] = {}
    for (op, part), of_stage in seconds.items():
        if op == Op.ALL_TO_ALL:
            exchanges.setdefault(exchange_name(part), []).append(of_stage)
        elif part < 0:
            values[MEASURED[op, ""]] = _as_tuple(of_stage)
    for name, of_stages in exchanges.items():  # several layers of experts have one name
        counts = (~np.isnan(of_stages)).sum(axis=0)
        mean = np.nansum(of_stages, axis=0) / np.where(counts, counts, np.nan)
        values[MEASURED[Op.ALL_TO_ALL, name]] = _as_tuple(mean)
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
    values["reduce_grad"] = _as_tuple(np.minimum(least, parts.max(axis=0)) + bytes_only.sum(axis=0))
    if timeline.costs is None:
        values["buckets"] = _measured_buckets(timeline, bytes_only)
    else:
        values["buckets"] = timeline.costs.buckets
    return values


def _collective_seconds(timeline: Timeline, average: Average) -> dict[tuple[Op, int], Floats]:
    """Return average seconds of each kind of collective; shape ``(n_stages,)``, NaN if absent.

    Those with one member a device are not among them.
    """
    graph = timeline.graph
    first, lasted = _collective_durations(timeline)
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


def _collective_durations(timeline: Timeline) -> tuple[Ints, Floats]:
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
    first, lasted = _collective_durations(timeline)
    sums = graph.op[first] == Op.REDUCE_TIED
    if not sums.any():
        return {}
    lowest = np.array([group[0] for group in graph.tied])[graph.part[first[sums]]]
    seconds = np.zeros(graph.n_stages)
    for stage in np.unique(lowest).tolist():
        seconds[stage] = average(lasted[sums][lowest == stage])
    return {MEASURED[Op.REDUCE_TIED, ""]: tuple(seconds.tolist())}


def grad_norm_seconds(timeline: Timeline, network: Network, average: Average) -> dict[str, Any]:
    """Return ``grad_norm``: the seconds of GRAD_NORM beyond its all-reduce on ``network``.

    A timeline does not show which device was the slowest. Stages of a device share the seconds
    evenly. Empty without GRAD_NORM.
    """
    graph = timeline.graph
    first, lasted = _collective_durations(timeline)
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


def _measured_buckets(timeline: Timeline, seconds: Floats) -> list[list[tuple[float, float]]]:
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


def _as_tuple(values: Floats) -> tuple[float, ...]:
    return tuple(np.nan_to_num(values).tolist())


# Values of each micro-batch.


def n_measured(graph: TaskGraph) -> int:
    """Return the number of micro-batches of all data-parallel replicas."""
    return (1 + int(copy_of_replicas(graph.homes).max())) * graph.n_microbatches


def microbatch_values(timeline: Timeline, averages: dict[str, Any]) -> dict[str, Floats]:
    """Return the fields that differ between micro-batches; shape ``(n_stages, n_microbatches)``.

    The micro-batches of data-parallel replicas come one after the other. ``averages`` has one value
    a stage of each field. They stand for micro-batches without a task of the operation, and for
    halves of overlapped actions.
    """
    values = {}
    for op, name in LAYER_SECONDS.items():
        if name in averages:
            seconds = _of_microbatches(timeline, op, timeline.duration)
            if name == "backward":
                halves = sum(_of_microbatches(timeline, x, timeline.duration) for x in (Op.I, Op.W))
                seconds = np.where(np.isnan(seconds), halves, seconds)
            values[name] = _with_averages(seconds, averages[name])
    forward = _of_microbatches(timeline, Op.SEND_F, timeline.nbytes)
    gradient = np.roll(_of_microbatches(timeline, Op.SEND_B, timeline.nbytes), -1, axis=0)
    values["output_bytes"] = _with_averages(np.fmax(forward, gradient), averages["output_bytes"])
    return values


def _with_averages(values: Floats, averages: Any) -> Floats:
    """Return values with the average of their stage in place of NaN."""
    of_stage = np.broadcast_to(np.asarray(averages, dtype=np.float64), len(values))
    return np.where(np.isnan(values), of_stage[:, None], values)


def _of_microbatches(timeline: Timeline, op: Op, values: Floats) -> Floats:
    """Return the value of an operation's task of each stage and micro-batch; NaN without one.

    Values of its segments are added up.
    """
    graph = timeline.graph
    half = (graph.kinds.overlapped > 0) | (graph.kinds.peer_stage >= 0)
    tasks = np.flatnonzero((graph.op == op) & ~half[graph.kind] & (graph.microbatch >= 0))
    copy = copy_of_replicas(graph.homes)
    values_of = np.full((graph.n_stages, n_measured(graph)), np.nan)
    column = copy[graph.replica[tasks]] * graph.n_microbatches + graph.microbatch[tasks]
    place = graph.stage[tasks], column
    values_of[place] = 0.0
    np.add.at(values_of, place, values[tasks])
    return values_of


# Segments: shares of F, B and I between exchanges of experts.


def measured_segments(timeline: Timeline, average: Average) -> dict[str, Any]:
    """Return ``expert_layers`` and ``segments`` of `pipesim.Costs`; empty without segments.

    Operations that a stage does not run have even shares.
    """
    graph = timeline.graph
    if not (graph.kinds.is_op(SEGMENTED) & (graph.kinds.part >= 0)).any():
        return {}
    parts = np.where(graph.kinds.is_op(SEGMENTED), graph.kinds.part, 0)
    n_segments = [
        1 + int(parts[graph.kinds.stage == stage].max(initial=0)) for stage in range(graph.n_stages)
    ]
    segments = [
        tuple(_segment_shares(timeline, op, stage, n, average) for op in (Op.F, Op.B, Op.I))
        for stage, n in enumerate(n_segments)
    ]
    return {"expert_layers": [(n - 1) // 2 for n in n_segments], "segments": segments}


def _segment_shares(
    timeline: Timeline, op: Op, stage: int, n: int, average: Average
) -> tuple[float, ...]:
    """Return the share of each of an operation's n segments in a stage."""
    graph = timeline.graph
    tasks = (graph.op == op) & (graph.stage == stage)
    if n == 1 or not tasks.any():
        return (1 / n,) * n
    parts = [tasks & (graph.part == part) for part in range(n)]
    seconds = np.array([average(timeline.duration[part]) for part in parts])
    return tuple((seconds / seconds.sum()).tolist()) if seconds.sum() else (1 / n,) * n


# Copies: OFFLOAD and RELOAD.


def measured_copies(
    timeline: Timeline, average: Average, *, has_activations: bool
) -> dict[str, Any]:
    """Return the seconds of copies by stage, and bytes if the timeline has no costs.

    They are the bytes moved, or, unless the caller ``has_activations``, those of activations, of
    which an OFFLOAD moves a known share; 0 for stages without one.

    Copies of whole activations count, or those of inputs for a stage that has no others. A stage
    without any has the mean of the others. Empty without copies.
    """
    graph, values = timeline.graph, dict[str, Any]()
    for op in sorted(COPIES):
        name, tasks = MEASURED[op, ""], np.flatnonzero(graph.op == op)
        seconds = np.full(graph.n_stages, np.nan)
        for stage in np.unique(graph.stage[tasks]).tolist():
            own = tasks[graph.stage[tasks] == stage]
            whole = own[graph.part[own] < 0]
            seconds[stage] = average(timeline.duration[whole if len(whole) else own])
        if len(tasks):
            mean = float(np.nanmean(seconds))
            values[name] = tuple(np.where(np.isnan(seconds), mean, seconds).tolist())
    whole = (graph.op == Op.OFFLOAD) & (graph.part < 0)
    if timeline.costs is None and whole.any():
        nbytes = np.zeros(graph.n_stages)
        np.maximum.at(nbytes, graph.stage[whole], timeline.nbytes[whole])
        if has_activations:
            values["offload_bytes"] = tuple(nbytes.tolist())
        else:
            values["activation_bytes"] = tuple((nbytes / graph.offload_shares).tolist())
    return values


# Messages.


def message_waits(timelines: Iterable[Timeline]) -> Floats:
    """Return the seconds from SEND to use of each message that delayed its consumer."""
    seconds = [message_times(values, waited_only=True) for values in timelines]
    return np.concatenate([values[~np.isnan(values)] for values in seconds])


def measured_network(timeline: Timeline, average: Average) -> Network:
    """Return latency and bandwidth of the messages, the same for all pairs."""
    graph = timeline.graph
    sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
    if not len(sends):
        return Network()
    recvs = graph.pair[sends]
    nbytes, fixed = timeline.nbytes[sends], np.zeros(len(sends))  # seconds without bytes
    if timeline.costs is not None:
        of_stages = timeline.costs.averaged().per_stage("output_seconds", graph.n_stages)
        fixed = message_bytes(graph.kinds, of_stages)[graph.kind[sends]]
    # Without a size, the time of a SEND cannot be bandwidth: it counts as latency.
    held = np.where(nbytes > 0, np.maximum(0.0, timeline.duration[sends] - fixed), 0.0)
    # A RECV that its stream and host had reached before its message came shows the message's time.
    before, issued = graph.queue_predecessor[recvs], timeline.issue_times[recvs]
    free = np.where(before < 0, -math.inf, timeline.end[before])
    ready = np.where(issued > 0, np.maximum(free, issued), free) < timeline.end[recvs]
    rest = message_times(timeline, waited_only=True)[recvs] - held - fixed
    counted = ready & ~np.isnan(rest)
    if not counted.any():  # no consumer waited
        rest, counted = message_times(timeline)[recvs] - held - fixed, ready
    latency = float(average(rest[counted]) if counted.any() else rest.min())
    bandwidth = float(nbytes.sum() / held.sum()) if held.any() else math.inf
    return Network(latency=max(latency, 0.0), bandwidth=bandwidth)

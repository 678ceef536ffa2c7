"""Columns of timelines in a page: times, waits, idle gaps, memory, inputs of its simulator."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import collective_latency
from pipesim.analysis.critical_path import last_waits
from pipesim.analysis.idle import CAUSES, causes_of_gaps, exact_sums
from pipesim.analysis.replay import replay_costs
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COMPUTE, COPIES, SENDS, Op
from pipesim.plot.page.columns import ColumnWriter, Spec, decimal_digits, float_planes, ticks_of
from pipesim.simulation.engines.plan import shared_links
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import costs_of
from pipesim.timeline.task_bytes import changes, row_bytes, static
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

# Times, waits, idle gaps and memory

Floats = NDArray[np.float64]
#: Compressed bytes that exact doubles may take in a page.
EXACT_BYTES = 7_500
#: Compressed bytes that rounded times may take: in any page, and for each task.
ROUNDED_BYTES, ROUNDED_BYTES_PER_TASK = 3_000, 3.2
#: Most digits after the point of rounded times (s).
_FINEST = 9


def timeline_columns(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add the times of a timeline and what explains them; return their places."""
    inputs = simulation_inputs(timeline)
    waits = last_waits(timeline)
    ids = np.arange(len(timeline))
    spec: Spec = {
        "name": timeline.name,
        "unit": "s",
        "times": _times(writer, timeline, inputs),
        "inputs": input_columns(writer, inputs),
        "waits": {
            "back": writer.integers(np.where(waits.task < 0, 0, ids - waits.task)),
            "reason": writer.flags(waits.reason),
        },
    }
    if timeline.nbytes.any():
        spec["nbytes"] = writer.floats(timeline.nbytes)
    if timeline.complete and len(timeline):
        spec["gaps"] = _gaps(writer, timeline)
    if timeline.costs is not None:
        spec["memory"] = _memory(writer, timeline)
    return spec


def _times(writer: ColumnWriter, timeline: Timeline, inputs: SimulationInputs) -> Spec:
    """Add starts and ends; return their places.

    Times that the page's simulator gives are left out. Others are exact if they take few bytes,
    or else rounded. A stream's times are stored as the gap before each task, and its duration.
    """
    if inputs.is_exact:
        return {"type": "simulated"}
    order = timeline.graph.queues.values
    start, end = timeline.start[order], timeline.end[order]
    not_started, not_ended = np.flatnonzero(np.isnan(start)), np.flatnonzero(np.isnan(end))
    missing = {
        name: writer.integers(rows)
        for name, rows in (("not_started", not_started), ("not_ended", not_ended))
        if len(rows)
    }
    start = np.nan_to_num(start, nan=0.0)
    end = np.where(np.isnan(end), start, end)
    digits = decimal_digits(np.concatenate([start, end]))
    if digits is None:
        doubles = np.ascontiguousarray(float_planes(np.concatenate([start, end])))
        if len(zlib.compress(doubles.tobytes(), 6)) <= EXACT_BYTES:
            both = {"start": writer.floats(start), "end": writer.floats(end)}
            return {"type": "exact", "resolution": 0, **both, **missing}
        room = ROUNDED_BYTES + ROUNDED_BYTES_PER_TASK * len(start)
        digits = _digits_that_fit(start, end, room)
    ticks = ticks_of(start, digits), ticks_of(end, digits)
    exact = all((t / 10.0**digits == x).all() for t, x in zip(ticks, (start, end), strict=True))
    gap, seconds = _gaps_and_durations(*ticks)
    return {
        "type": "ticks",
        "digits": digits,
        "resolution": 0 if exact else 10.0**-digits,
        "gap": writer.integers(gap),
        "duration": writer.integers(seconds),
        **missing,
    }


def _gaps_and_durations(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the time before each task since the end of the task before it, and its duration."""
    return start - np.concatenate([[0], end[:-1]]), end - start


def _digits_that_fit(start: Floats, end: Floats, room: float) -> int:
    """Return the most digits after the point with which compressed times take ``room`` bytes."""
    for digits in range(_FINEST, -10, -1):
        ticks = _gaps_and_durations(ticks_of(start, digits), ticks_of(end, digits))
        trial = ColumnWriter()
        for column in ticks:
            trial.integers(column)
        if len(trial.packed()) <= room:
            break
    return digits


def _gaps(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add the causes of idle gaps: seconds of each device, and shares of each gap in 255ths."""
    gaps, seconds = causes_of_gaps(timeline)
    table = exact_sums(timeline, gaps, seconds)
    shares = np.rint(255 * seconds / (gaps.until - gaps.since)[:, None])
    return {
        "n": len(gaps.task),
        "seconds": writer.floats(table.ravel()),
        "shares": [writer.flags(shares[:, cause].clip(0, 255)) for cause in range(len(CAUSES))],
    }


def _memory(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add bytes that tasks allocate and release, and bytes that devices hold throughout."""
    graph, costs = timeline.graph, costs_of(timeline)
    allocated, released = changes(graph, costs)
    rows = row_bytes(graph, costs)
    always, workspace = static(graph, costs), rows.workspace[rows.row]
    if not (allocated.any() or always.any() or workspace.any()):
        return {}
    spec: Spec = {
        "allocated": writer.floats(allocated),
        "released": writer.floats(released),
        "workspace": writer.floats(workspace),
        "static": writer.floats(always),
        "computes": writer.flags(graph.kinds.is_op(COMPUTE)),
    }
    if graph.offload_to == "peer":
        peers, op = graph.offload_peers[graph.kinds.device], graph.kinds.op
        spec["offloads_to"] = writer.integers(np.where(op == Op.OFFLOAD, peers, -1))
        spec["reloads_from"] = writer.integers(np.where(op == Op.RELOAD, peers, -1))
    limit = timeline.memory.limit
    if limit is not None and np.isfinite(limit).all():
        spec["limit"] = writer.floats(limit)
    return spec


# Inputs of the page's own simulator: seconds of tasks, latencies, issue times
#
# The simulator in `program/data/simulator.js` keeps the rules of docs/time.md, but for links that
# several streams share and for hosts that are threads of one process.

#: Tasks of a timeline up to which a page replays measured durations.
MAX_REPLAYED = 20_000
_LINKS = "several streams share links, and this page simulates no queues for links"


class SimulationInputs(NamedTuple):
    """Costs that the page simulates a timeline with.

    - ``costs``: seconds of each kind of task, or of each task with ``is_per_task``: in a replay,
      and if micro-batches differ. None if the page cannot simulate.
    - ``held``: seconds of each row of ``costs`` that do not depend on the bandwidth: of a SEND
      those of ``Costs.output_seconds``, of a collective its latency; 0 for others.
    - ``is_exact``: whether the simulation gives the times of the timeline, to the last bit.
    - ``is_replay``: whether durations are those of the tasks, as `pipesim.replay` takes them.
    - ``refusal``: why the page does not simulate changes; "" if it does.
    """

    costs: TaskCosts | None
    held: Floats
    is_exact: bool
    is_per_task: bool
    is_replay: bool
    refusal: str


def simulation_inputs(timeline: Timeline) -> SimulationInputs:
    """Return the inputs with which the page simulates a timeline."""
    graph = timeline.graph
    if not timeline.complete:
        return _refused("tasks of this timeline did not run")
    if graph.host_threads:
        return _refused("hosts are threads of one process, which this page does not simulate")
    if timeline.costs is not None and timeline.issued is None:
        costs = timeline.costs.of(graph)
        if costs.row is not graph.kind:  # micro-batches differ
            costs = costs.per_task()
        refusal = _LINKS if _shares_links(graph, costs) else ""
        if _reproduces(timeline, costs):
            is_per_task = costs.row is not graph.kind
            return SimulationInputs(
                costs, _held(timeline, costs), True, is_per_task, False, refusal
            )
        if refusal:
            return _refused(refusal)
    if len(timeline) > MAX_REPLAYED:
        return _refused(
            "these times do not follow from costs alone, and a page replays at most "
            f"{MAX_REPLAYED:,} tasks"
        )
    costs = replay_costs(timeline)
    if _shares_links(graph, costs):
        return _refused(_LINKS)
    return SimulationInputs(costs, np.zeros(len(timeline)), False, True, True, "")


def unit_costs(graph: TaskGraph, computing: NDArray[np.bool_]) -> TaskCosts:
    """Return costs of 1 for each kind of task that ``computing`` marks, and 0 for others."""
    zeros = np.zeros(len(graph.kinds))
    links = np.full((len(zeros), 1), -1, dtype=np.int64)
    return TaskCosts(CostTable(computing.astype(float), zeros, zeros, zeros, links), graph.kind)


def _refused(reason: str) -> SimulationInputs:
    return SimulationInputs(None, np.empty(0), False, False, False, reason)


def _shares_links(graph: TaskGraph, costs: TaskCosts) -> bool:
    return bool((shared_links(graph, costs) >= 0).any())


def _reproduces(timeline: Timeline, costs: TaskCosts) -> bool:
    """Return whether a simulation without links and cost of overlap gives a timeline's times."""
    no_links = np.full((len(costs.table.duration), 1), -1, dtype=np.int64)
    free = replace(costs, table=costs.table._replace(links=no_links, overlap_cost=None))
    again = predict_timeline(timeline.graph, free)
    return bool((again.start == timeline.start).all() and (again.end == timeline.end).all())


def _held(timeline: Timeline, costs: TaskCosts) -> Floats:
    """Return ``held`` of `SimulationInputs`, one value a row of ``costs``: a kind, or a task.

    Seconds of a SEND beyond bytes over bandwidth are found from a network of half the bandwidth.
    """
    graph, kinds = timeline.graph, timeline.graph.kinds
    is_per_task = costs.row is not graph.kind
    kind = graph.kind if is_per_task else np.arange(len(kinds))
    held, duration = np.zeros(len(kind)), costs.table.duration
    sends = kinds.is_op(SENDS)[kind] & (duration > 0)
    base = timeline.costs
    if base is not None and sends.any():
        slower = replace(base, network=base.network.scaled(bandwidth=0.5)).of(graph)
        slow = slower.duration if is_per_task else slower.table.duration
        seconds = slow - duration
        held[sends] = np.maximum(0.0, duration - seconds)[sends]
        held[held < 1e-12 * duration] = 0.0  # rounding
    collectives = kinds.is_op(COLLECTIVES | COPIES)[kind]
    if collectives.any():
        latency = collective_latency(timeline)
        if not is_per_task:
            of_kind = np.zeros(len(kinds))
            of_kind[graph.kind] = latency
            latency = of_kind
        held[collectives] = np.minimum(latency, duration)[collectives]
        work = kinds.is_op(frozenset({Op.GRAD_NORM}))[kind]
        held[work] = duration[work]
    return held


def input_columns(writer: ColumnWriter, inputs: SimulationInputs) -> Spec:
    """Add the inputs of the simulator; return their places.

    Durations of a replay are left out: the page has them from the times of the tasks.
    """
    spec: Spec = {
        "exact": inputs.is_exact,
        "replay": inputs.is_replay,
        "refusal": inputs.refusal,
    }
    if inputs.costs is None:
        return spec
    table = inputs.costs.table
    spec["per_task"] = inputs.is_per_task
    spec |= {"latency": writer.floats(table.latency), "held": writer.floats(inputs.held)}
    if not inputs.is_replay:
        spec["duration"] = writer.floats(table.duration)
    if table.share is not None and (table.share != 1).any():
        spec["share"] = writer.floats(table.share)
    if inputs.costs.issued is not None:
        spec["issued"] = writer.floats(inputs.costs.issued)
    elif table.launch.any():
        spec["launch"] = writer.floats(table.launch)
    return spec

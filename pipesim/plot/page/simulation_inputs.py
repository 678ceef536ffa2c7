"""Inputs of the page's own simulator: seconds of tasks, latencies, issue times.

The simulator in `program/data/simulator.js` keeps the rules of docs/time.md, but for links that
several streams share and for hosts that are threads of one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import collective_latency
from pipesim.analysis.replay import replay_costs
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COLLECTIVES, COPIES, SENDS, Op
from pipesim.plot.page.columns import ColumnWriter, Spec
from pipesim.simulation.engines.plan import shared_links
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline

Floats = NDArray[np.float64]
#: Tasks of a timeline up to which a page replays measured durations.
MAX_REPLAYED = 20_000
_LINKS = "several streams share links, and this page simulates no queues for links"
_THREADS = "hosts are threads of one process, which this page does not simulate"


class SimulationInputs(NamedTuple):
    """Costs that the page simulates a timeline with.

    Attributes
    ----------
    costs
        Seconds of each kind of task, or of each task; None if the page cannot simulate.
    held
        Seconds of each row of ``costs`` that do not depend on the bandwidth: of a SEND those of
        ``Costs.output_seconds``, of a collective its latency; 0 for others.
    is_exact
        Whether the simulation gives the times of the timeline, to the last bit.
    is_per_task
        Whether ``costs`` and ``held`` have a row a task: in a replay, and if micro-batches differ.
    is_replay
        Whether durations are those of the timeline's tasks, as `pipesim.replay` takes them.
    refusal
        Why the page does not simulate changes; "" if it does.
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
        return _refused(_THREADS)
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
    """Return inputs that say why the page does not simulate."""
    return SimulationInputs(None, np.empty(0), False, False, False, reason)


def _shares_links(graph: TaskGraph, costs: TaskCosts) -> bool:
    """Return whether several streams share a link."""
    return bool((shared_links(graph, costs) >= 0).any())


def _reproduces(timeline: Timeline, costs: TaskCosts) -> bool:
    """Return whether a simulation without links gives the times of a timeline."""
    no_links = np.full((len(costs.table.duration), 1), -1, dtype=np.int64)
    free = replace(costs, table=costs.table._replace(links=no_links))
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

"""Attribute a prediction's error, predicted minus measured makespan, to its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import (
    Floats,
    bucket_shares,
    joint_issue_times,
    measured_shares,
    message_latency,
    release_times,
)
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.errors import ArgumentError, number
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.issue_order import issue_times
from pipesim.ops import COMPUTE, RECVS
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


#: Fields of `_TaskValues` of each part.
_FIELDS = {
    "durations": ("mean",),
    "spread": ("shape",),
    "transfers": ("held", "latency", "links", "share"),
    "host": ("issued",),
    "hand_over": ("late",),
}
#: Index of `error_parts`.
PARTS = (*_FIELDS, "unexplained")


def error_parts(
    predicted: Timeline, measured: Timeline, *, launch: float | None = None
) -> pd.Series[float]:
    """Return predicted minus measured makespan, in parts that sum to it (s).

    The prediction is simulated again with some of its values replaced by measured values, kind by
    kind. The part of a kind is the decrease of the makespan by its replacement: it is above 0 if
    the predicted values made the makespan longer.

    =========== ===================================================================================
    part        values that differ between prediction and measurement
    =========== ===================================================================================
    durations   mean seconds of each operation, in each stage: costs that changed, as under load
    spread      deviation of single tasks from this mean, which costs of a stage do not contain
    transfers   seconds from the start of a SEND to its use by a consumer that waited for it (else
                to its arrival), and those of collectives; the share of a backward after which
                its gradients are reduced
    host        issue times of tasks
    hand_over   seconds from the end of a dependency on another stream to the start of the task;
                the hand-over of a message is part of its latency instead, as in costs
    unexplained the rest: tasks that started late although their own stream was the last to be
                free, overlaps that the graph forbids, and links that were shared differently
    =========== ===================================================================================

    The order of replacement matters: a late message costs nothing while its receiver is busy for
    longer than predicted. No order is preferred, so each part is the mean of its changes over all
    orders (Shapley 1953, "A value for n-person games"). Kinds share evenly the changes that they
    make together. So the parts of a sum of causes are right in sum. A part can be 0 although its
    values were wrong, if no task waited for them.

    Parameters
    ----------
    predicted, measured
        Timelines of the same tasks, all of which ran.
    launch
        Measured seconds of the host to issue a task, such as ``result.host_seconds /
        len(graph)``. By default issue times are those that the measured timeline recorded, or
        those by its costs, or else those of the prediction. In the last case, the delay of a late
        host is within the other parts.

    Returns
    -------
    pandas.Series
        Indexed by `PARTS`. The sum is ``predicted.makespan - measured.makespan``, up to rounding.

    Notes
    -----
    Values that a measurement does not show are those of the prediction: the latency of a message
    whose predicted arrival is before its RECV was reached.
    """
    from pipesim.utils.packages import pandas as pd

    for timeline in (predicted, measured):
        timeline.check_complete("the parts of an error need")
    seconds = None if launch is None else number(launch)
    if launch is not None and (seconds is None or not 0 <= seconds < math.inf):
        raise ArgumentError(f"launch must be finite seconds >= 0 a task, got {launch!r}")
    if seconds is not None and not math.isfinite(seconds * len(measured)):
        raise ArgumentError(
            f"launch={launch!r} s of each of {len(measured)} tasks is beyond the largest number; "
            "give seconds"
        )
    values = _MixedSimulation(predicted, measured, seconds)
    parts = _shapley(values.makespan, [values.differs(names) for names in _FIELDS.values()])
    total = predicted.makespan - measured.makespan
    return pd.Series([*parts, math.fsum([total, *(-part for part in parts)])], list(PARTS))


def _shapley(value: Callable[[int], float], plays: list[bool]) -> list[float]:
    """Return the mean decrease of ``value(set)`` by each bit of the set, over all orders."""
    players = [bit for bit, does in enumerate(plays) if does]
    n = len(players)
    sets = [sum(1 << players[k] for k in range(n) if mask >> k & 1) for mask in range(1 << n)]
    value_of_set = {members: value(members) for members in sets}
    parts = [0.0] * len(plays)
    for bit in players:
        for members in sets:
            if not members >> bit & 1:
                size = members.bit_count()
                weight = 1.0 / (n * math.comb(n - 1, size))
                parts[bit] += weight * (value_of_set[members] - value_of_set[members | 1 << bit])
    return parts


class _TaskValues(NamedTuple):
    """Values of each task in one timeline: an array of each kind, shape ``(len(graph),)``."""

    mean: Floats  # times ``shape``: seconds of a compute task
    shape: Floats
    held: Floats  # like the next two, of messages and collectives
    latency: Floats
    links: NDArray[np.int64]
    share: Floats  # part of its last backward that a bucket of gradients needs
    issued: Floats
    late: Floats


class _MixedSimulation:
    """Simulation of the graph with predicted or measured values of each kind."""

    def __init__(self, predicted: Timeline, measured: Timeline, launch: float | None) -> None:
        self.graph = graph = predicted.graph
        self.computes = graph.is_op(COMPUTE)
        usual = message_latency(predicted)
        own, real = predicted.issue_times, measured.issue_times
        if launch is not None:
            real = issue_times(graph, np.full(len(graph), launch))
        elif measured.issued is not None:
            real = np.minimum(real, measured.start)  # clocks may differ by a little
        elif measured.costs is None:
            real = own
        self.predicted = _TaskValues(
            *_mean_and_shape(graph, predicted.duration),
            np.where(graph.is_op(RECVS), 0.0, predicted.duration),
            np.where(graph.pair >= 0, np.maximum(usual, usual[graph.pair]), 0.0),
            _links(predicted),
            bucket_shares(predicted),
            own,
            np.zeros(len(graph)),
        )
        share = measured_shares(measured, self.predicted.share)
        held, latency, late = _waits(graph, measured, usual, real, share)
        mean, shape = _mean_and_shape(graph, measured.duration)
        self.measured = _TaskValues(mean, shape, held, latency, _links(measured), share, real, late)

    def differs(self, names: tuple[str, ...]) -> bool:
        """Return whether the timelines differ in some fields."""
        return any(
            not np.array_equal(getattr(self.predicted, name), getattr(self.measured, name))
            for name in names
        )

    def makespan(self, kinds_measured: int) -> float:
        """Return the makespan (s) with measured values of the parts whose bits are set."""
        chosen = {
            name: getattr(self.measured if kinds_measured >> kind & 1 else self.predicted, name)
            for kind, names in enumerate(_FIELDS.values())
            for name in names
        }
        tasks = _TaskValues(**chosen)
        busy = np.where(self.computes, tasks.mean * tasks.shape, tasks.held)
        table = CostTable(
            duration=busy + tasks.late,
            latency=tasks.latency,
            launch=np.zeros(len(busy)),
            nbytes=np.zeros(len(busy)),
            links=tasks.links,
            share=tasks.share,
        )
        return predict_timeline(self.graph, TaskCosts.of_tasks(table, issued=tasks.issued)).makespan


def _mean_and_shape(graph: TaskGraph, duration: Floats) -> tuple[Floats, Floats]:
    """Return the mean seconds of the kind of each task, and the ratio of its own seconds to it."""
    kind, n_kinds = graph.kind, len(graph.kinds)
    means = np.bincount(kind, duration, n_kinds) / np.maximum(np.bincount(kind, None, n_kinds), 1)
    mean = means[kind]
    return mean, np.divide(duration, mean, out=np.ones(len(mean)), where=mean > 0)


def _links(timeline: Timeline) -> NDArray[np.int64]:
    """Return the links that each task holds; without costs, a link of its own for each task."""
    if timeline.costs is None:
        return np.arange(len(timeline))[:, None]
    return timeline.costs.of(timeline.graph).links


def _waits(
    graph: TaskGraph, timeline: Timeline, usual: Floats, issued: Floats, share: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds that each task held its links, its latency, and its late start (s).

    The simulation makes a late task longer instead, by its late start. The end of the task, for
    which other tasks wait, is then the measured one.
    """
    start, end = timeline.start, timeline.end
    is_recv, member = graph.is_op(RECVS), graph.group >= 0
    ready, last, before = _needs(graph, release_times(timeline, share))
    reached = np.maximum(ready, joint_issue_times(graph, issued))
    late = np.maximum(0.0, start - reached)
    # Tasks of one stream need no hand-over; a late start there is unexplained.
    is_handed_over = (last >= 0) & (graph.stream[last] != graph.stream) & ~is_recv & ~member
    late = np.where(is_handed_over, late, 0.0)
    held = np.where(is_recv, 0.0, end - start)
    held[member] = np.maximum(0.0, end - reached)[member]

    recvs = np.flatnonzero(is_recv & (graph.pair >= 0))
    sends = graph.pair[recvs]
    stream_ready = np.maximum(before, issued)[recvs]  # when the RECV's own stream reached it
    expected = end[sends] + usual[recvs]
    shown = (expected > stream_ready) | (end[recvs] - stream_ready > usual[recvs])
    woken = np.full(len(graph), np.inf)
    waited = np.flatnonzero(is_handed_over & is_recv[last])
    np.minimum.at(woken, last[waited], late[waited])
    wake = np.where(shown & np.isfinite(woken[recvs]), woken[recvs], 0.0)
    arrived = end[recvs] + wake
    latency = np.zeros(len(graph))
    seconds = np.maximum(0.0, arrived - end[sends])
    latency[recvs] = np.where(shown, seconds, np.minimum(usual[recvs], seconds))
    latency[sends] = latency[recvs]
    in_latency = np.zeros(len(graph))
    in_latency[recvs] = wake
    late[waited] -= in_latency[last[waited]]
    return held, latency, late


def _needs(graph: TaskGraph, free: Floats) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Return the latest end of the predecessors of each task (s), which one, and without the pair.

    0 s and -1 for tasks without predecessors. ``free`` is the time at which each entry of the
    graph's precedence stops blocking its successor (s).
    """
    rows, values = graph.precedence.rows, graph.precedence.values
    ready, before = np.zeros(len(graph)), np.zeros(len(graph))
    np.maximum.at(ready, rows, free)
    apart = values != graph.pair[rows]
    np.maximum.at(before, rows[apart], free[apart])
    last = np.full(len(graph), -1, dtype=np.int64)
    # If two end at the same time, the task of the own stream counts: no hand-over delayed it.
    order = np.lexsort((graph.stream[values] == graph.stream[rows], free, rows))
    last[rows[order]] = values[order]
    return ready, last, before

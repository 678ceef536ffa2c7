"""`replay`: simulate a timeline from its own durations."""

from __future__ import annotations

import numpy as np

from pipesim.analysis.blocking import (
    Floats,
    exact_seconds,
    joint_issue_times,
    last_link_holder,
    measured_shares,
)
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.ops import RECVS
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked


@checked
def replay(timeline: Timeline, *, engine: str = "compiled") -> Timeline:
    """Simulate a timeline from its own durations: a check of the graph, no prediction.

    - Each task keeps its duration and its issue time.
    - A message lasts from the start of its SEND to the start of the task that waited for it. This
      includes the wake-up of a waiting device. Without such a task, it lasts to its arrival.
    - A bucket of gradients needs the part of its backward that had passed when the bucket started.
    - Links are those of the timeline's costs, if it has costs.

    The replay of a timeline from `simulate` has equal starts and ends, up to rounding. The replay
    of a measured timeline is shorter by the seconds that the graph does not explain, such as those
    from the end of a task's dependencies to its start.

    Issue times are `Timeline.issue_times`: those that the executor recorded, or those by the
    ``launch`` of the timeline's costs, but not later than the start of the task. A timeline with
    neither, such as one from another framework's trace, is replayed as if all its tasks were issued
    before the step. Delays by its host are then left out.

    Parameters
    ----------
    timeline
        Timeline, simulated or measured, all of whose tasks ran.
    engine
        ``"compiled"`` or ``"simpy"``, as for `pipesim.simulate`.

    Returns
    -------
    Timeline
        Simulated times of the same graph, named after the timeline.

    See Also
    --------
    pipesim.Comparison : A prediction beside a measurement of the same tasks.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    >>> ps.replay(timeline)
    <Timeline gpipe replayed: 18 tasks, makespan 9 s, bubble 33.3%>
    """
    timeline.check_complete("replay")
    again = predict_timeline(timeline.graph, replay_costs(timeline), engine=engine)
    return again.with_name(f"{timeline.name} replayed")


def replay_costs(timeline: Timeline) -> TaskCosts:
    """Return the costs of each task of a complete timeline; `replay` describes them."""
    graph = timeline.graph
    own = np.arange(len(graph))[:, None]
    links = own if timeline.costs is None else timeline.costs.of(graph).links
    seconds = exact_seconds(timeline.start, timeline.end)
    table = CostTable(
        duration=np.where(graph.is_op(RECVS), 0.0, seconds),
        latency=_latencies(timeline),
        launch=np.zeros(len(graph)),
        nbytes=timeline.nbytes,
        links=links,
        share=measured_shares(timeline),
    )
    issued = np.minimum(timeline.issue_times, timeline.start)  # clocks may differ by a little
    return TaskCosts.of_tasks(table, timeline.costs, np.maximum(issued, 0.0))


def _latencies(timeline: Timeline) -> Floats:
    """Return the latency of each transfer, 0 for other tasks; seconds.

    A SEND holds its stream and links for its duration; the rest is latency. If one latency gives
    both the start and the end of a RECV exactly, it is the result.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    latency = np.zeros(len(graph))
    recvs = np.flatnonzero(graph.is_op(RECVS))
    sends = graph.pair[recvs]
    arrived = _use_times(timeline)[recvs]
    by_end = exact_seconds(end[sends], arrived)
    by_start = exact_seconds(start[sends], start[recvs])
    # Both are one latency, rounded in two different sums; it lies in both intervals.
    margin, margin_by_end = np.spacing(start[recvs]) / 2, np.spacing(arrived) / 2
    least = np.maximum(by_start - margin, by_end - margin_by_end)
    most = np.minimum(by_start + margin, by_end + margin_by_end)
    best = by_end
    for either in (least / 2 + most / 2, by_start):
        right = (start[sends] + either == start[recvs]) & (end[sends] + either == arrived)
        best = np.where(right, either, best)
    latency[recvs] = np.maximum(0.0, best)
    latency[sends] = latency[recvs]
    return latency


def message_times(timeline: Timeline, *, waited_only: bool = False) -> Floats:
    """Return the seconds from each message's SEND to its use; NaN for tasks that are no RECV."""
    graph = timeline.graph
    seconds = np.full(len(graph), np.nan)
    recvs = np.flatnonzero(graph.is_op(RECVS))
    seconds[recvs] = _use_times(timeline, waited_only=waited_only)[recvs]
    seconds[recvs] -= timeline.start[graph.pair[recvs]]
    return seconds


def _use_times(timeline: Timeline, *, waited_only: bool = False) -> Floats:
    """Return the time of use of each RECV's message (s); NaN for other tasks.

    It is the start of its consumer if the consumer waited for no other task, host or link. Else it
    is the arrival of the message, or NaN if ``waited_only``.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    consumers = graph.dependencies.transpose()
    held = last_link_holder(timeline)
    free = np.maximum(
        joint_issue_times(graph, timeline.issue_times), np.where(held >= 0, end[held], 0.0)
    )
    free[free <= 0] = -np.inf  # no wait
    moments = np.full(len(graph), np.nan)
    for recv in np.flatnonzero(graph.is_op(RECVS)).tolist():
        if not waited_only:
            moments[recv] = end[recv]
        for consumer in consumers[recv].tolist():
            others = graph.precedence[consumer]
            others = others[others != recv]
            if max(end[others].max(initial=-np.inf), free[consumer]) < end[recv]:
                moments[recv] = start[consumer]
    return moments

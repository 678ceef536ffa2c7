"""`simulate`: a task graph and its costs to a timeline, by the engine of your choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipesim.costs import Costs, TaskCosts
from pipesim.engines import simpy_engine
from pipesim.errors import ArgumentError, CostsError, TimelineError, check_name
from pipesim.graph import TaskGraph
from pipesim.ops import RECVS
from pipesim.timeline import Timeline
from pipesim.verify import verify

__all__ = ["replay", "simulate"]

Engine = Callable[[TaskGraph, TaskCosts], tuple[NDArray[np.float64], NDArray[np.float64]]]
_ENGINES: dict[str, Engine] = {"simpy": simpy_engine.run}


def simulate(graph: TaskGraph, costs: Costs | TaskCosts, *, engine: str = "simpy") -> Timeline:
    """Predict when each task of ``graph`` runs.

    Parameters
    ----------
    graph
        From `pipesim.lower`; verified first.
    costs
        Of each stage, or, to replay a run, of each task.
    engine
        ``"simpy"``, the reference.

    Raises
    ------
    CostsError
        If the costs lack an operation of the graph, or are of another number of stages.
    DeadlockError
        If tasks would wait for each other for ever; nothing is run then.
    """
    run = _ENGINES[check_name("engine", engine, _ENGINES)]
    if not isinstance(graph, TaskGraph):
        raise ArgumentError(
            f"simulate takes a TaskGraph, got {type(graph).__name__}; lower the schedule first: "
            "ps.simulate(ps.lower(schedule), costs)"
        )
    if not isinstance(costs, (Costs, TaskCosts)):
        raise ArgumentError(f"costs must be a pipesim.Costs, got {costs!r}")
    verify(graph)
    tasks = costs.of(graph) if isinstance(costs, Costs) else costs
    _check(graph, tasks)
    start, end = run(graph, tasks)
    return Timeline(graph, start, end, tasks.nbytes, tasks.costs)


def _check(graph: TaskGraph, costs: TaskCosts) -> None:
    """Raise unless each task has finite costs of at least 0; engines take them as they are."""
    for name in ("duration", "latency", "launch", "nbytes", "link"):
        values = getattr(costs, name)
        if len(values) != len(graph):
            raise CostsError(f"{name} has {len(values)} values for {len(graph)} tasks")
        good = (np.isfinite(values) & (values >= 0)) | (name == "link")
        if not good.all():
            task = graph.task(int(np.argmin(good)))
            raise CostsError(
                f"{name} of {task} (task {task.id}) must be finite and >= 0, got {values[task.id]}"
            )


def replay(timeline: Timeline, *, engine: str = "simpy") -> Timeline:
    """Simulate a measured timeline from its own durations: a check of the graph, no prediction.

    Each task takes as long as it did. Each message takes from the start of its SEND to that of
    the task that waited for it, which includes waking up a waiting device, or else to its arrival.

    Raises
    ------
    TimelineError
        If tasks of the timeline did not run.
    """
    graph = timeline.graph
    if not timeline.complete:
        raise TimelineError(
            f"timeline {timeline.name!r} is partial: {int((~timeline.ran).sum())} of {len(graph)} "
            "tasks did not run; replay a whole one"
        )
    latency = np.zeros(len(graph))
    recvs = np.flatnonzero(graph.is_op(RECVS))
    sends = graph.pair[recvs]
    # A SEND holds its stream as long as it did, on a link of its own; the rest is latency.
    latency[recvs] = np.maximum(0.0, hand_over(timeline)[recvs] - timeline.duration[sends])
    latency[sends] = latency[recvs]
    costs = TaskCosts(
        duration=np.where(graph.is_op(RECVS), 0.0, timeline.duration),
        latency=latency,
        link=np.arange(len(graph)),
        launch=np.zeros(len(graph)),
        nbytes=timeline.nbytes,
        costs=timeline.costs,
    )
    return simulate(graph, costs, engine=engine).with_name(f"{timeline.name} replayed")


def hand_over(timeline: Timeline, *, waited_only: bool = False) -> NDArray[np.float64]:
    """Return the seconds that each message took to be of use; NaN for tasks that are no RECV.

    From the start of its SEND to that of its consumer, where the consumer's stream waited for it;
    else to its arrival, or NaN if ``waited_only``.
    """
    graph = timeline.graph
    consumers = graph.dependencies.transposed()
    seconds = np.full(len(graph), np.nan)
    for recv in np.flatnonzero(graph.is_op(RECVS)).tolist():
        sent = timeline.start[graph.pair[recv]]
        if not waited_only:
            seconds[recv] = timeline.end[recv] - sent
        for consumer in consumers[recv].tolist():
            others = graph.precedence[consumer]
            others = others[others != recv]
            if len(others) == 0 or timeline.end[others].max() < timeline.end[recv]:
                seconds[recv] = timeline.start[consumer] - sent
    return seconds

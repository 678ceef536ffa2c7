"""`simulate`: a task graph and its costs to a timeline, by the engine of your choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipesim import jit
from pipesim.costs import Costs
from pipesim.engines import compiled, simpy_engine
from pipesim.errors import (
    ArgumentError,
    CostsError,
    EngineWarning,
    check_count,
    check_name,
)
from pipesim.graph import TaskGraph
from pipesim.issue import issue_times
from pipesim.noise import Noise
from pipesim.ops import RECVS
from pipesim.task_costs import CostTable, TaskCosts
from pipesim.timeline import LONGEST, Timeline
from pipesim.verify import verify
from pipesim.waits import exact_seconds, held_links, issued_together, measured_shares

__all__ = ["replay", "simulate"]

Engine = Callable[[TaskGraph, TaskCosts], tuple[NDArray[np.float64], NDArray[np.float64]]]
#: Columns of costs that must be numbers of at least 0.
_CHECKED = ("duration", "latency", "launch", "nbytes")
ENGINES: dict[str, Engine] = {"compiled": compiled.run, "simpy": simpy_engine.run}


def simulate(
    graph: TaskGraph,
    costs: Costs | TaskCosts,
    *,
    engine: str = "compiled",
    noise: Noise | None = None,
    scenario: int = 0,
) -> Timeline:
    """Predict when each task of ``graph`` runs.

    Parameters
    ----------
    graph
        From `pipesim.lower`; verified first.
    costs
        Of each stage, or, to replay a run, of each task.
    engine
        ``"compiled"``, or ``"simpy"``, the readable reference. The answers are equal; without
        numba, or where it is switched off, SimPy's serves for both, with an `EngineWarning`.
    noise, scenario
        Vary the durations as this noise does in this one of its scenarios, counted from 0; see
        `pipesim.simulate_many` for many at once. Without noise there is scenario 0 alone.

    Raises
    ------
    CostsError
        If the costs lack an operation of the graph, or are of another number of stages; or if they
        are so large that a task would end after more than 1e150 s.
    GraphError
        If the graph breaks an invariant; `DeadlockError` if tasks would wait for each other for
        ever. Nothing is run then.
    NetworkError
        If a link names a device that the graph does not have.
    ArgumentError
        For an unknown engine, noise that does not suit the graph, a scenario that is no whole
        number from 0 or is not 0 without noise, or arguments of another type.
    """
    check_name("engine", engine, ENGINES)
    scenario = check_count("scenario", scenario, minimum=0)
    tasks = checked_costs(graph, costs)
    if noise is not None:
        tasks = checked_noise(noise).applied(graph, tasks, scenario)
    elif scenario:
        raise ArgumentError(
            f"scenario={scenario} without noise: nothing varies, so that there is scenario 0 "
            "alone; give noise=ps.Noise(...), or leave scenario out"
        )
    run = _engine(engine)
    with np.errstate(over="ignore"):
        start, end = run(graph, tasks)
    _check_times(graph, end)
    if tasks.row is graph.kind and tasks.costs and tasks.issued is None:
        return Timeline(graph, start, end, None, tasks.costs)  # which say the rest
    issued = issue_times(graph, tasks.launch) if tasks.issued is None else tasks.issued
    return Timeline(graph, start, end, tasks.nbytes, tasks.costs, issued=issued)


def checked_costs(graph: TaskGraph, costs: Costs | TaskCosts) -> TaskCosts:
    """Verify a graph and return its costs, verified."""
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
    return tasks


def checked_noise(noise: object) -> Noise:
    """Return ``noise`` if it is one."""
    if not isinstance(noise, Noise):
        raise ArgumentError(
            f"noise must be a pipesim.Noise, such as "
            f"ps.Noise(task=ps.LogNormal(0.02), seed=0), got {noise!r}"
        )
    return noise


def _engine(name: str) -> Engine:
    if name == "compiled" and not jit.available():
        warnings.warn(
            "numba is missing or switched off; SimPy's engine serves instead of the compiled one, "
            "with the same answer some hundred times more slowly",
            EngineWarning,
            stacklevel=3,
        )
        name = "simpy"
    return ENGINES[name]


def _check(graph: TaskGraph, costs: TaskCosts) -> None:
    """Raise unless each task has finite costs of at least 0; engines take them as they are."""
    if len(costs.row) != len(graph):
        raise CostsError(f"got the costs of {len(costs.row)} tasks for a graph of {len(graph)}")
    columns = [(name, getattr(costs.table, name)) for name in _CHECKED]
    if costs.table.share is not None:
        _check_shares(graph, costs)
    of_tasks = [("duration", costs.drawn), ("issued", costs.issued)]
    for name, values in (*columns, *of_tasks):
        if values is None:
            continue
        good = np.isfinite(values) & (values >= 0)
        if good.all():
            continue
        if values is not costs.drawn and values is not costs.issued:
            good, values = good[costs.row], values[costs.row]
        task = graph.task(int(np.argmin(good)))
        raise CostsError(
            f"{name} of {task} (task {task.id}) must be finite and >= 0, got {values[task.id]}"
        )


def _check_times(graph: TaskGraph, end: NDArray[np.float64]) -> None:
    """Raise unless times are such that their sums and squares are finite."""
    if end.max(initial=0.0) <= LONGEST:  # not so where one is NaN
        return
    task = graph.task(int(np.argmin(end <= LONGEST)))
    raise CostsError(
        f"{task} (task {task.id}) would end at {end[task.id]:g} s, beyond {LONGEST:g}: too late to "
        "calculate with; costs are in seconds, so check them, and bandwidths and noise"
    )


def _check_shares(graph: TaskGraph, costs: TaskCosts) -> None:
    """Raise unless what buckets need of their backward is a share of it."""
    good = (costs.share >= 0) & (costs.share <= 1)
    if not good.all():
        task = graph.task(int(np.argmin(good)))
        raise CostsError(
            f"share of {task} (task {task.id}) must be 0 to 1, got {costs.share[task.id]}"
        )


def replay(timeline: Timeline, *, engine: str = "compiled") -> Timeline:
    """Simulate a timeline from its own durations: a check of the graph, no prediction.

    Each task takes as long as it did, and is issued when it was. Each message takes from the start
    of its SEND to that of the task that waited for it, which includes waking up a waiting device,
    or else to its arrival. Buckets of gradients need as much of their backward as had passed when
    they started. Links are shared as the timeline's costs say, if it has any.

    A timeline from `simulate` is replayed to itself: every start and end is the same, up to
    rounding. A measured one comes out shorter by what the graph does not explain, such as the
    seconds between the end of what a task needed and its start.

    When tasks were issued is `Timeline.issue_times`: as the executor recorded it, or as the
    ``launch`` of the timeline's costs has it, but no later than the task started. A timeline with
    neither, such as one read from another framework's trace, is replayed as if all its tasks were
    issued before the step: what its host was late for is then left out.

    Raises
    ------
    ArgumentError
        For an unknown engine, or something that is no timeline.
    TimelineError
        If tasks of the timeline did not run.
    """
    if not isinstance(timeline, Timeline):
        raise ArgumentError(
            f"replay takes a Timeline, got {type(timeline).__name__}; give what was measured or "
            "loaded, such as ps.Timeline.load(path)"
        )
    timeline.check_complete("replay")
    again = simulate(timeline.graph, replay_costs(timeline), engine=engine)
    return again.with_name(f"{timeline.name} replayed")


def replay_costs(timeline: Timeline) -> TaskCosts:
    """Return the costs of each task of a whole timeline; `replay` says which."""
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


def _latencies(timeline: Timeline) -> NDArray[np.float64]:
    """Return the latency of each transfer, 0 for other tasks; seconds.

    A SEND holds its stream and links as long as it did; the rest is latency. Where one latency
    gives both the start and the end of a RECV, bit by bit, it is that one.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    latency = np.zeros(len(graph))
    recvs = np.flatnonzero(graph.is_op(RECVS))
    sends = graph.pair[recvs]
    arrived = _of_use(timeline)[recvs]
    by_end = exact_seconds(end[sends], arrived)
    by_start = exact_seconds(start[sends], start[recvs])
    # The two are one number, each with the rounding of another sum; it is in both intervals.
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


def hand_over(timeline: Timeline, *, waited_only: bool = False) -> NDArray[np.float64]:
    """Return the seconds that each message took to be of use; NaN for tasks that are no RECV.

    From the start of its SEND to that of its consumer, where the consumer's stream waited for it;
    else to its arrival, or NaN if ``waited_only``.
    """
    graph = timeline.graph
    seconds = np.full(len(graph), np.nan)
    recvs = np.flatnonzero(graph.is_op(RECVS))
    seconds[recvs] = _of_use(timeline, waited_only=waited_only)[recvs]
    seconds[recvs] -= timeline.start[graph.pair[recvs]]
    return seconds


def _of_use(timeline: Timeline, *, waited_only: bool = False) -> NDArray[np.float64]:
    """Return when each RECV's message was of use; NaN for other tasks.

    At the start of its consumer, where that waited for nothing else that is known: no other task,
    host or link. Else at its arrival, or NaN if ``waited_only``.
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    consumers = graph.dependencies.transposed()
    held = held_links(timeline)
    free = np.maximum(
        issued_together(graph, timeline.issue_times), np.where(held >= 0, end[held], 0.0)
    )
    free[free <= 0] = -np.inf  # nothing was waited for
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

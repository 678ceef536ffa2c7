"""Read the traces of a run, one a rank, as a `Timeline`: when each action ran, on one clock."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.pricing import message_bytes
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    PipeError,
    TimelineError,
    check_count,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Tasks
from pipesim.graph.verify import verify
from pipesim.ops import TRANSFERS, Action, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import load as read_trace
from pipesim.trace.clock_offsets import align_clocks
from pipesim.trace.event_fields import RangeRules
from pipesim.trace.inferred_transfers import (
    MeasuredTask,
    add_transfers,
    charge_gaps,
    clock_bounds,
)
from pipesim.trace.profiler_ranges import Trace
from pipesim.trace.saved_timelines import saved_timelines
from pipesim.trace.steps import ONE_PIPELINE, RankStep, check_complete, count_steps, cut_steps
from pipesim.trace.trace_files import list_files, read_ranks

__all__ = ["ImportedStep", "load"]

#: Largest residual, relative to the makespan, without a warning that the clocks disagree.
_LARGE_RESIDUAL = 0.01


@dataclass(frozen=True, eq=False)
class ImportedStep:
    """One step read from traces, and how well the clocks of its ranks agree.

    Attributes
    ----------
    timeline
        One step.
    offsets
        Seconds that were added to each rank's clock, shape ``(n_devices,)``.
    residual
        Seconds by which the worst message is still used before it was sent; see
        `pipesim.trace.clock_offsets.align_clocks`.
    n_steps
        Whole steps in the traces.
    """

    timeline: Timeline
    offsets: NDArray[np.float64]
    residual: float
    n_steps: int


def load(
    paths: Path | str | Iterable[Path | str],
    *,
    pattern: str | None = None,
    fields: Mapping[str, str | tuple[str, str]] | None = None,
    ops: Mapping[str, str | None] | None = None,
    only: Mapping[str, str | int] | None = None,
    step: int = -1,
    n_ranks: int | None = None,
    output_bytes: float | Sequence[float] = 0.0,
    gaps: str = "keep",
    name: str = "",
) -> ImportedStep:
    """Read the traces of a run; see `Timeline.from_chrome` for the arguments.

    A trace that `pipesim.trace.save` wrote has its timelines, which need no reconstruction. Else
    the steps are: read the files; cut each rank's trace into steps; place one step's tasks on the
    ranks; align the clocks; infer the transfers; build the timeline.
    """
    check_name("way with gaps", gaps, ("keep", "charge"))
    if isinstance(step, bool) or not isinstance(step, numbers.Integral):
        raise ArgumentError(f"step must be a whole number, got {step!r}; -1 is the last one")
    files = list_files(paths)
    if n_ranks is not None:
        check_count("n_ranks", n_ranks, 0)
    rules = RangeRules.checked(pattern, fields, ops, only)
    content = read_trace(files[0]) if len(files) == 1 else None
    by_default = (pattern, fields, ops, only, n_ranks) == (None,) * 5 and (step, gaps) == (
        -1,
        "keep",
    )
    has_no_bytes = type(output_bytes) in (int, float) and not output_bytes
    if content is not None and by_default and has_no_bytes:
        timelines = saved_timelines(files[0], content)
        if timelines:
            timeline = _selected(files[0], timelines, name)
            return ImportedStep(timeline, np.zeros(timeline.n_devices), 0.0, 1)
    traces = read_ranks(files, rules, n_ranks, content)
    steps = [cut_steps(trace) for trace in traces]
    n_steps = count_steps(files, steps, int(step))
    tasks = _place_tasks(traces, [rank_steps[step] for rank_steps in steps])
    check_complete(tasks, len(traces))
    offsets, residual = align_clocks(clock_bounds(tasks), len(traces))
    tasks = {action: task.shifted(float(offsets[task.device])) for action, task in tasks.items()}
    if gaps == "charge":
        tasks = charge_gaps(tasks)
    tasks = add_transfers(tasks)
    timeline = _build_timeline(tasks, output_bytes, name or files[0].name.split(".")[0])
    if residual > _LARGE_RESIDUAL * timeline.makespan:
        warnings.warn(
            f"after joining the clocks of the ranks, a message is still used {residual:.2e} s "
            "before it was sent: clocks drift, or ranges do not cover their work; times between "
            "ranks are no better than that",
            AccuracyWarning,
            stacklevel=3,
        )
    return ImportedStep(timeline, offsets, residual, n_steps)


def _selected(path: Path, timelines: Mapping[str, Timeline], name: str) -> Timeline:
    """Return the timeline of a name; a single one gets the name."""
    if len(timelines) == 1:
        (timeline,) = timelines.values()
        return timeline.with_name(name) if name else timeline
    if not name:
        raise ArgumentError(
            f"{path} has several timelines; give name=, one of {', '.join(map(repr, timelines))}"
        )
    return timelines[check_name("timeline", name, timelines)]


def _place_tasks(traces: Sequence[Trace], steps: Sequence[RankStep]) -> dict[Action, MeasuredTask]:
    """Return when each action of a step ran and on which rank, all from the first trace's origin.

    Raises
    ------
    TimelineError
        For an action on several ranks.
    """
    origin = traces[0].origin
    tasks: dict[Action, MeasuredTask] = {}
    for device, (trace, step) in enumerate(zip(traces, steps, strict=True)):
        shift = (trace.origin - origin) * 1e-9
        for action, (item, (start, end, on_device)) in step.items():
            if action in tasks:
                raise TimelineError(
                    f"{action} is on ranks {tasks[action].device} and {device}; {ONE_PIPELINE}"
                )
            half = next((x for x in item.overlapped or () if x != action and x in step), None)
            tasks[action] = MeasuredTask(
                device, start + shift, end + shift, on_device, other_half=half
            )
    return tasks


def _build_timeline(
    measured: Mapping[Action, MeasuredTask], output_bytes: float | Sequence[float], name: str
) -> Timeline:
    """Build the graph of a step, and return the timeline of its tasks."""
    graph = _build_graph(measured, name)
    tasks = [measured[graph.task(task).action] for task in range(len(graph))]
    start = np.array([task.start for task in tasks], np.float64)
    end = np.array([task.end for task in tasks], np.float64)
    begin = start.min()
    by_stage = tuple(output_bytes) if isinstance(output_bytes, Sequence) else output_bytes
    sizes = Costs(0.0, output_bytes=by_stage).per_stage("output_bytes", graph.n_stages)
    nbytes = message_bytes(graph.kinds, sizes)[graph.kind]
    return Timeline(graph, start - begin, end - begin, nbytes)


def _build_graph(measured: Mapping[Action, MeasuredTask], name: str) -> TaskGraph:
    """Return the verified graph of a step, its tasks in the order in which they were issued."""

    # A message is issued right after the task whose result it carries, and received in the order
    # of the senders. Of two tasks that start at the same time, the one without duration is first.
    def issue_order(action: Action) -> tuple[float, bool, bool, Op, float]:
        task = measured[action]
        moves = action.op in TRANSFERS
        return task.issue_time, moves, not moves and task.end > task.start, action.op, task.end

    actions = sorted(measured, key=issue_order)
    rows = [(a.op, measured[a].device, a.stage, -1 if a.microbatch is None else a.microbatch,
             measured[a].stream, measured[a].other_half is not None, a.peer_stage)
            for a in actions]  # fmt: skip
    op, device, stage, microbatch, stream, overlapped, peer = np.array(rows, dtype=np.int64).T
    recompute = "some" if (op == Op.R).any() else "never"
    try:
        columns = op, device, stage, microbatch, stream
        tasks = Tasks(*columns, overlapped=overlapped, peer_stage=peer)
        graph = TaskGraph.build(tasks, name=name, hosts="per_device", recompute=recompute)
        verify(graph)
    except PipeError as error:
        raise TimelineError(f"the traces are of no step that could run: {error}") from error
    return graph

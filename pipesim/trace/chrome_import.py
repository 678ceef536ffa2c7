"""Read the traces of a run, one a rank, as a `Timeline`: when each action ran, on one clock."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    TimelineError,
    check_count,
    check_name,
)
from pipesim.ops import Action
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import load as read_trace
from pipesim.trace.event_fields import RangeRules
from pipesim.trace.measured_tasks import MeasuredTasks, timeline_of, with_parts
from pipesim.trace.profiler_ranges import Trace
from pipesim.trace.saved_timelines import saved_timelines
from pipesim.trace.steps import (
    ONE_PIPELINE,
    PlacedTask,
    RankStep,
    check_complete,
    count_steps,
    cut_steps,
)
from pipesim.trace.trace_files import list_files, read_ranks


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
    step_of_tasks = timeline_of(
        with_parts(_columns(tasks)),
        n_devices=len(traces),
        output_bytes=output_bytes,
        gaps=gaps,
        name=name or files[0].name.split(".")[0],
        stacklevel=4,
    )
    return ImportedStep(*step_of_tasks, n_steps)


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


def _place_tasks(traces: Sequence[Trace], steps: Sequence[RankStep]) -> dict[Action, PlacedTask]:
    """Return when each action of a step ran and on which rank, all from the first trace's origin.

    Raises
    ------
    TimelineError
        For an action on several ranks.
    """
    origin = traces[0].origin
    tasks: dict[Action, PlacedTask] = {}
    for device, (trace, step) in enumerate(zip(traces, steps, strict=True)):
        shift = (trace.origin - origin) * 1e-9
        for action, (item, (start, end, on_device)) in step.items():
            if action in tasks:
                raise TimelineError(
                    f"{action} is on ranks {tasks[action].device} and {device}; {ONE_PIPELINE}"
                )
            half = next((x for x in item.overlapped or () if x != action and x in step), None)
            tasks[action] = PlacedTask(
                device, start + shift, end + shift, on_device, other_half=half
            )
    return tasks


def _columns(placed: Mapping[Action, PlacedTask]) -> MeasuredTasks:
    """Return the tasks of a step as columns."""
    row = {action: number for number, action in enumerate(placed)}
    ints = np.array(
        [
            (a.op, task.device, a.stage, -1 if a.microbatch is None else a.microbatch,
             a.peer_stage, -1 if task.other_half is None else row[task.other_half])
            for a, task in placed.items()
        ], dtype=np.int64,
    ).T  # fmt: skip
    times = np.array([(task.start, task.end) for task in placed.values()], np.float64).T
    return MeasuredTasks.make(
        *ints[:4],
        *times,
        peer_stage=ints[4],
        other_half=ints[5],
        on_device=np.array([task.on_device for task in placed.values()]),
    )

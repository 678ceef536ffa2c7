"""Read the traces of a run, one a rank, as a `Timeline`: when each action ran, on one clock.

A trace of several steps is cut where a step ends, and each step is checked to be complete.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, TimelineError, check_count, check_name, check_text
from pipesim.ops import COMPUTE, Action, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_export import saved_timelines
from pipesim.trace.chrome_json import load as read_trace
from pipesim.trace.measured_tasks import MeasuredTasks, timeline_of, with_parts
from pipesim.trace.profiler_ranges import Range, Span, Trace
from pipesim.trace.range_names import RangeRules
from pipesim.trace.trace_files import check_threads, list_files, read_ranks, stem
from pipesim.trace.working_times import split_overlapped, working_times
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import Bytes

# Steps of a trace

_ONE_PIPELINE = (
    "give the traces of one pipeline, not of its replicas (only={...} chooses one in a file); "
    "bidirectional schedules, with a stage on several ranks, cannot be imported"
)

#: One step of one rank: the range of each action, and when it worked.
RankStep = dict[Action, tuple[Range, Span]]


class PlacedTask(NamedTuple):
    """Device, start and end (s) of an action.

    ``on_device``: whether a GPU recorded the times. ``other_half``: the other half of an overlapped
    action.
    """

    device: int
    start: float
    end: float
    on_device: bool = False
    other_half: Action | None = None


def cut_steps(trace: Trace) -> list[RankStep]:
    """Return the steps of a trace that have all its actions, each F before its backward.

    The trace is first cut also where the F of the lowest micro-batch begins. If that gives no such
    step, since the micro-batches are in another order, it is cut only where an action comes again.
    """
    # Of two that start at the same time, the one that takes no time comes first.
    times = sorted(
        split_overlapped(working_times(trace)),
        key=lambda x: (x[0].start, x[0].end > x[0].start),
    )
    check_threads(trace, times)
    actions = {item.action for item, _ in times if item.action.op in COMPUTE}
    for by_first in (True, False):
        steps = _cut(trace, times, by_first)
        whole = [step for step in steps if actions <= step.keys()]
        early = {_early_backward(step) for step in whole}
        if None in early:
            return [step for step in whole if _early_backward(step) is None]
    if whole:
        raise TimelineError(f"{trace.path}: {early.pop()} begins before the F that it needs")
    rarest = min(actions, key=lambda action: sum(action in step for step in steps))
    raise TimelineError(
        f"{trace.path} has no whole step: none of {len(steps)} has all actions, as {rarest} is in "
        "few; profile from before a step to after it"
    )


def _cut(trace: Trace, times: Iterable[tuple[Range, Span]], by_first: bool) -> list[RankStep]:
    """Cut a trace into steps. The first and the last may be part of one.

    A step ends where an action comes again. With ``by_first`` it also ends at the F of the lowest
    micro-batch after other compute actions of that stage.
    """
    lowest = min(r.action.microbatch or 0 for r in trace.ranges)
    steps: list[RankStep] = [{}]
    for item, span in times:
        action = item.action
        starts_step = (
            by_first
            and action.op == Op.F
            and action.microbatch == lowest
            and any(a.stage == action.stage and a.op in COMPUTE for a in steps[-1])
        )
        if action in steps[-1] or starts_step:
            _check_first_action(trace, steps[-1], action, lowest)
            steps.append({})
        steps[-1][action] = item, span
    return steps


def _early_backward(step: RankStep) -> Action | None:
    """Return a backward that begins before the F of its stage and micro-batch, if any."""
    for action, (_, span) in step.items():
        forward = step.get(Action(action.stage, Op.F, action.microbatch))
        if action.op in (Op.B, Op.I, Op.W) and forward and span.start < forward[1].start:
            return action
    return None


def _check_first_action(trace: Trace, step: RankStep, action: Action, lowest: int) -> None:
    """Raise unless ``action``, which follows ``step``, may be the first of the next step."""
    may_be_first = action.op not in COMPUTE or (action.op == Op.F and action.microbatch == lowest)
    first = next((a for a in step if a.op in COMPUTE), None)
    if not may_be_first and action != first:
        raise TimelineError(
            f"{trace.path}: {action} is there twice in a step; a range has to cover the whole call "
            "of one action, and no other range may have its name"
        )


def count_steps(files: Sequence[Path], steps: Sequence[Sequence[RankStep]], step: int) -> int:
    """Return the number of whole steps. Raise unless all ranks have as many, and step ``step``."""
    counts = [len(rank_steps) for rank_steps in steps]
    if len(set(counts)) > 1:
        raise TimelineError(
            f"the ranks have {', '.join(map(str, counts))} whole steps; profile the same steps on "
            "all ranks"
        )
    if not -counts[0] <= step < counts[0]:
        raise TimelineError(
            f"there is no step {step}: {files[0]} has {counts[0]} whole steps, counted from 0, or "
            "from -1 backwards"
        )
    return counts[0]


def check_complete(tasks: Mapping[Action, PlacedTask], n_devices: int) -> None:
    """Raise if a step lacks an action that every step has, or a rank has no stage."""
    device_of: dict[int, int] = {}
    for action, task in tasks.items():
        if device_of.setdefault(action.stage, task.device) != task.device:
            raise TimelineError(
                f"stage {action.stage} is on ranks {device_of[action.stage]} and {task.device}; "
                + _ONE_PIPELINE
            )
    n_stages = max(device_of) + 1
    n_microbatches = max(action.microbatch or 0 for action in tasks) + 1
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            missing = _missing_op({op for op in Op if Action(stage, op, microbatch) in tasks})
            if missing is None:
                continue
            where = f"rank {device_of[stage]}" if stage in device_of else "any rank"
            raise TimelineError(
                f"{Action(stage, missing, microbatch)} is missing on {where}: the traces have "
                f"{n_stages} stages and {n_microbatches} micro-batches, each with an F and a B "
                "(or an I and a W); annotate them all, and give all ranks"
            )
    idle = set(range(n_devices)) - set(device_of.values())
    if idle:
        raise TimelineError(f"rank {min(idle)} has no stage of the pipeline; leave out its trace")


def _missing_op(ops: set[Op]) -> Op | None:
    """Return the first operation that a micro-batch of a stage lacks: F and B, or F, I and W."""
    if Op.F not in ops:
        return Op.F
    if Op.B in ops:
        return None
    if not ops & {Op.I, Op.W}:
        return Op.B
    if Op.I not in ops:
        return Op.I
    return None if Op.W in ops else Op.W


# Timelines of steps


@dataclass(frozen=True, eq=False)
class ImportedStep:
    """One step read from traces, and how well the clocks of its ranks agree.

    ``offsets`` (s, shape ``(n_devices,)``) and ``residual`` (s) are those of
    `pipesim.trace.clock_offsets.align_clocks`, ``n_steps`` is the number of whole steps.
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
    output_bytes: Bytes | Sequence[Bytes] = 0.0,
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
    files, is_path = list_files(paths), isinstance(paths, str | os.PathLike)
    if n_ranks is not None:
        check_count("n_ranks", n_ranks, 0)
    rules = RangeRules.checked(pattern, fields, ops, only)
    content = read_trace(files[0]) if len(files) == 1 else None
    has_no_bytes = type(output_bytes) in (int, float) and not output_bytes
    by_default = all(x is None for x in (pattern, fields, ops, only, n_ranks)) and has_no_bytes
    if content is not None and by_default and step == -1 and gaps == "keep":
        timelines = saved_timelines(files[0], content)
        if timelines:
            timeline = _selected(files[0], timelines, name)
            return ImportedStep(timeline, np.zeros(timeline.n_devices), 0.0, 1)
    path = Path(paths) if is_path else files[0].parent if files[1:] else files[0]
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
        name=name or stem(path),
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
    """Return the rank, start and end of each action of a step, from the first trace's origin."""
    origin = traces[0].origin
    tasks: dict[Action, PlacedTask] = {}
    for device, (trace, step) in enumerate(zip(traces, steps, strict=True)):
        shift = (trace.origin - origin) * 1e-9
        for action, (item, (start, end, on_device)) in step.items():
            if action in tasks:
                raise TimelineError(
                    f"{action} is on ranks {tasks[action].device} and {device}; {_ONE_PIPELINE}"
                )
            half = next((x for x in item.overlapped or () if x != action and x in step), None)
            tasks[action] = PlacedTask(
                device, start + shift, end + shift, on_device, other_half=half
            )
    return tasks


def _columns(placed: Mapping[Action, PlacedTask]) -> MeasuredTasks:
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


@checked_names
def timeline_from_chrome(
    paths: Path | str | Iterable[Path | str],
    *,
    pattern: str | None = None,
    fields: Mapping[str, str | tuple[str, str]] | None = None,
    ops: Mapping[str, str | None] | None = None,
    only: Mapping[str, str | int] | None = None,
    step: int = -1,
    n_ranks: int | None = None,
    output_bytes: Bytes | Sequence[Bytes] = 0.0,
    gaps: str = "keep",
    name: str = "",
) -> Timeline:
    r"""Read one step of a run of another framework from Chrome traces, as torch.profiler's.

    A file that `to_chrome` wrote is read back exactly, without costs. If an argument other than
    ``name`` is given, its events are read instead, as those of another program.

    Each range of a trace's CPU, such as ``PP:1F3``, names the action of a call, or its event
    has the action in other fields (``fields``).

    - Ranges are complete events, or begin and end events.
    - An event with the correlation of a kernel launched it, whatever its category.
    - Kernels communicate if their names, the calls that launched them, or their ranges do.
    - Times of an action: from the first to the last of its kernels, including kernels that the
      autograd thread launched meanwhile. Without a GPU: those of its call, without the time of
      waiting for a message. See `pipesim.trace.working_times.working_times`.
    - A range of two overlapped actions, such as ``PP:(0F2;3B0)OVERLAP_F_B``, gives two tasks.
      Their times are those of ranges of single actions within it. Without such ranges, the B
      begins where the operations show it; without operations, at half of the range. See
      `pipesim.trace.working_times`.
    - Clocks of ranks are aligned by messages; see `pipesim.trace.clock_offsets.align_clocks`.
    - Transfers without a range get the times at which their data moved; see
      `pipesim.trace.measured_tasks.timeline_of`.

    ``pipesim.trace.chrome_import.load`` returns the clock offsets and the residual error, too.

    Parameters
    ----------
    paths
        One file a rank, ``.json`` or ``.json.gz``, or their directory. Each file is a device,
        in order of the ranks that files name, or else of the files. Or one file in which each
        process with ranges is a rank, by its number, as `to_chrome` writes it.
    pattern
        A regular expression for the whole name of a range, with the groups ``op``,
        ``microbatch`` and, unless each rank has one stage, ``stage``. By default torch's
        names, or else those of `to_chrome` (`pipesim.trace.range_names.PATTERNS`). Operations
        are those of `pipesim.Op`, or names such as ``forward``.
        Each name is matched once. Avoid patterns that backtrack without end, such as
        ``(a+)+b``.
    fields
        Places of ``op``, ``microbatch`` and, if events have them, ``stage`` and ``rank``, where
        names do not tell them. A place is ``name``, ``cat``, ``pid``, ``tid``,
        ``process_name``, ``thread_name`` or ``args.KEY``, where dots nest. Or a place and a
        regular expression with one group for the part of its text:
        ``("thread_name", r"PP rank (\d+)")``. Without ``rank``, each process is a rank;
        without ``stage``, the rank is the stage. Events without these fields are left out; an
        event without a micro-batch counts if ``ops`` has its word. Not with ``pattern``.
    ops
        Operations by the words of the file, such as ``{"forward-compute": "F"}``; None for
        words whose events to leave out.
    only
        Values that events must have at places, such as ``{"pid": 0}`` for one of several
        replicas in a file.
    step
        Number of the step among the whole steps in the traces; negative numbers count from
        the end. By default the last step.
    n_ranks
        Expected number of ranks; by default the number that the traces show.
    output_bytes
        Bytes of each message, as in `Costs`.
    gaps
        Treatment of time between tasks in which a device waited for no message, because it
        posted or fetched one, or ran other code: ``"keep"`` leaves it idle, ``"charge"`` adds
        it to the next task, so that costs and replays include it.
    name
        Name of the timeline; by default that of the file without its ending, of the folder of
        several, or the saved name. Of a file with several timelines: the name of the one to read.

    Returns
    -------
    Timeline
        One step. Of a file that `to_chrome` wrote: the timeline as it was saved.

    Raises
    ------
    TimelineError
        - For a file that cannot be read or was cut, or a file of `to_chrome` that was changed.
        - For compute ranges of one rank that ran at the same time on several threads.
        - For ranks that are missing or occur twice.
        - For impossible times.
        - For a pattern that cannot be used, and for files without a range.
        - For actions that are missing, unknown or occur twice in a step.

    Warns
    -----
    AccuracyWarning
        If clocks cannot be aligned well: a message is still used before it was sent, by more
        than 1 % of the makespan.

    Examples
    --------
    >>> import tempfile
    >>> import pipesim as ps
    >>> timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), ps.Costs(1 / 3, 2 / 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     timeline.to_chrome(f"{folder}/run.json")
    ...     again = ps.Timeline.from_chrome(f"{folder}/run.json")
    >>> again.makespan == timeline.makespan
    True
    """
    check_text("name", name)
    return load(
        paths,
        pattern=pattern,
        fields=fields,
        ops=ops,
        only=only,
        step=step,
        n_ranks=n_ranks,
        output_bytes=output_bytes,
        gaps=gaps,
        name=name,
    ).timeline

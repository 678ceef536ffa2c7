"""From the traces of a run, one a rank, to a `Timeline`: which action ran when, on one clock."""

from __future__ import annotations

import numbers
import os
import re
import warnings
from collections import Counter
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
from pipesim.ops import COMPUTE, TRANSFERS, Action, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.clock_offsets import join
from pipesim.trace.inferred_transfers import Placed, add_transfers, charge_gaps, messages
from pipesim.trace.overlapped_ranges import halved, with_halves
from pipesim.trace.profiler_ranges import Range, Span, Trace
from pipesim.trace.range_names import PATTERNS, action_of, checked_pattern
from pipesim.trace.ranks import check_threads, read_traces
from pipesim.utils.atomic_write import check_path, is_folder

__all__ = ["Imported", "load"]

#: Residual over makespan beyond which the clocks are not to be trusted.
_POOR = 0.01
_ONE_PIPELINE = (
    "give the traces of one pipeline, not of its replicas; bidirectional schedules, with a stage "
    "on several ranks, cannot be imported"
)


@dataclass(frozen=True, eq=False)
class Imported:
    """What was read.

    Attributes
    ----------
    timeline
        One step.
    offsets
        Seconds that were added to each rank's clock, shape ``(n_devices,)``.
    residual
        Seconds by which the worst message is still used before it was sent; see
        `pipesim.trace.clock_offsets.join`.
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
    step: int = -1,
    n_ranks: int | None = None,
    output_bytes: float | Sequence[float] = 0.0,
    gaps: str = "keep",
    name: str = "",
) -> Imported:
    """Read the traces of a run; `Timeline.from_chrome` has the arguments."""
    check_name("way with gaps", gaps, ("keep", "charge"))
    if isinstance(step, bool) or not isinstance(step, numbers.Integral):
        raise ArgumentError(f"step must be a whole number, got {step!r}; -1 is the last one")
    files = _files(paths)
    if n_ranks is not None:
        check_count("n_ranks", n_ranks, 0)
    patterns = PATTERNS if pattern is None else (checked_pattern(pattern),)
    read = [_read(path, patterns, rank) for rank, path in enumerate(files)]
    for path, of in zip(files, read, strict=True):
        if len(files) > 1 and len(of) > 1:
            raise TimelineError(
                f"{path} has ranges of {len(of)} processes, and is one of {len(files)} files; give "
                "one file a rank, or one file with a process a rank"
            )
    traces = _ranked([trace for of in read for trace in of], n_ranks)
    steps = [_steps(trace) for trace in traces]
    counts = [len(of) for of in steps]
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
    placed = _placed(traces, [of[step] for of in steps])
    _check_whole(placed, len(traces))
    offsets, residual = join(messages(placed), len(traces))
    placed = {action: each.moved(float(offsets[each.device])) for action, each in placed.items()}
    if gaps == "charge":
        placed = charge_gaps(placed)
    timeline = _timeline(add_transfers(placed), output_bytes, name or files[0].name.split(".")[0])
    if residual > _POOR * timeline.makespan:
        warnings.warn(
            f"after joining the clocks of the ranks, a message is still used {residual:.2e} s "
            "before it was sent: clocks drift, or ranges do not cover their work; times between "
            "ranks are no better than that",
            AccuracyWarning,
            stacklevel=3,
        )
    return Imported(timeline, offsets, residual, counts[0])


def _files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    """Return the files given, or those in the directory given, in order of name."""
    if isinstance(paths, str | os.PathLike):
        path = check_path("paths", paths)
        if not is_folder(path):
            return [path]
        try:
            files = [p for p in path.iterdir() if p.name.endswith((".json", ".json.gz"))]
        except OSError as error:
            raise TimelineError(f"cannot read the folder {path}: {error.strerror}") from error
        if not files:
            raise TimelineError(f"there is no trace in {path}: no file ends in .json or .json.gz")
        return sorted(files)
    listed = list(paths) if isinstance(paths, Iterable) else [None]
    if not all(isinstance(path, str | os.PathLike) for path in listed):
        raise ArgumentError(
            f"traces are given by a path, or several, got {paths!r}; give one file a rank, or "
            "their directory"
        )
    files = [check_path(f"paths[{k}]", path) for k, path in enumerate(listed)]
    if not files:
        raise TimelineError("got no traces; give one file a rank, or their directory")
    return files


def _read(path: Path, patterns: Sequence[str], place: int) -> list[Trace]:
    """Read a file's traces by the first of several patterns that any of its ranges has."""
    for pattern in patterns:
        unranked = "stage" not in re.compile(pattern).groupindex
        traces = read_traces(path, action_of(path, pattern))
        for rank, trace in enumerate(traces, start=place):
            found = with_halves(trace)
            if trace.rank is None:
                trace.rank = rank
            if unranked:
                found = [r._replace(action=r.action._replace(stage=trace.rank)) for r in found]
            trace.ranges = found
        if traces[0].ranges:
            return traces
    shown = ", ".join(map(repr, traces[0].names[:5])) or "none at all"
    raise TimelineError(
        f"{path} has no range whose whole name matches {' or '.join(map(repr, patterns))}; its "
        f"ranges are {shown}; annotate stages with torch.profiler.record_function('PP:0F0'), or "
        "give the pattern of your names"
    )


def _ranked(traces: list[Trace], n_ranks: int | None) -> list[Trace]:
    """Return traces in order of rank; all of them have to be there."""
    said = {trace.world_size for trace in traces if trace.world_size is not None}
    expected = max(said, default=len(traces)) if n_ranks is None else n_ranks
    if len(traces) != expected:
        raise TimelineError(
            f"got the traces of {len(traces)} ranks ({traces[0].path}, ...) of a run of "
            f"{expected}; give one file a rank, or n_ranks={len(traces)} if the others are no part "
            "of this pipeline"
        )
    ranks = Counter(trace.rank for trace in traces)
    for rank, count in ranks.items():
        if count > 1:
            twice = [str(trace.path) for trace in traces if trace.rank == rank]
            raise TimelineError(f"{' and '.join(twice)} are both of rank {rank}")
    return sorted(traces, key=lambda trace: trace.rank or 0)


Step = dict[Action, tuple[Range, Span]]


def _steps(trace: Trace) -> list[Step]:
    """Return the steps of a trace that have every action that it has, each F before its backward.

    Where the first way of cutting finds none, as the micro-batches are in another order, a step
    ends nowhere but where an action comes again.
    """
    # Of two that start at one moment, the one that takes no time comes first.
    worked = sorted(halved(trace.worked()), key=lambda x: (x[0].start, x[0].end > x[0].start))
    check_threads(trace, worked)
    every = {each.action for each, _ in worked if each.action.op in COMPUTE}
    for by_first in (True, False):
        steps = _cut(trace, worked, by_first)
        whole = [step for step in steps if every <= step.keys()]
        early = {_early(step) for step in whole}
        if None in early:
            return [step for step in whole if _early(step) is None]
    if whole:
        raise TimelineError(f"{trace.path}: {early.pop()} begins before the F that it needs")
    rarest = min(every, key=lambda action: sum(action in step for step in steps))
    raise TimelineError(
        f"{trace.path} has no whole step: none of {len(steps)} has all actions, as {rarest} is in "
        "few; profile from before a step to after it"
    )


def _cut(trace: Trace, worked: Iterable[tuple[Range, Span]], by_first: bool) -> list[Step]:
    """Cut a trace into steps, which may be part of one at its ends.

    A step ends where an action comes again, or ``by_first`` the F of the lowest micro-batch after
    other compute actions of that stage.
    """
    lowest = min(r.action.microbatch or 0 for r in trace.ranges)
    steps: list[Step] = [{}]
    for each, span in worked:
        action = each.action
        begun = (
            by_first
            and action.op == Op.F
            and action.microbatch == lowest
            and any(a.stage == action.stage and a.op in COMPUTE for a in steps[-1])
        )
        if action in steps[-1] or begun:
            _check_begins(trace, steps[-1], action, lowest)
            steps.append({})
        steps[-1][action] = each, span
    return steps


def _early(step: Step) -> Action | None:
    """Return a backward that begins before the F of its stage and micro-batch, if there is one."""
    for action, (_, span) in step.items():
        forward = step.get(Action(action.stage, Op.F, action.microbatch))
        if action.op in (Op.B, Op.I, Op.W) and forward and span.start < forward[1].start:
            return action
    return None


def _check_begins(trace: Trace, step: Step, action: Action, lowest: int) -> None:
    """Raise unless ``action``, which comes after ``step``, may begin another one."""
    begins = action.op not in COMPUTE or (action.op == Op.F and action.microbatch == lowest)
    first = next((a for a in step if a.op in COMPUTE), None)
    if not begins and action != first:
        raise TimelineError(
            f"{trace.path}: {action} is there twice in a step; a range has to cover the whole call "
            "of one action, and no other range may have its name"
        )


def _placed(traces: Sequence[Trace], steps: Sequence[Step]) -> dict[Action, Placed]:
    """Return when each action of a step ran and on which rank, all from one origin."""
    origin = traces[0].origin
    placed: dict[Action, Placed] = {}
    for device, (trace, of) in enumerate(zip(traces, steps, strict=True)):
        late = (trace.origin - origin) * 1e-9
        for action, (each, (start, end, on_device)) in of.items():
            if action in placed:
                raise TimelineError(
                    f"{action} is on ranks {placed[action].device} and {device}; {_ONE_PIPELINE}"
                )
            other = next((x for x in each.overlapped or () if x != action and x in of), None)
            placed[action] = Placed(device, start + late, end + late, on_device, other=other)
    return placed


def _check_whole(placed: Mapping[Action, Placed], n_devices: int) -> None:
    """Raise if an action that every step has is missing, or a rank has none."""
    device_of: dict[int, int] = {}
    for action, each in placed.items():
        if device_of.setdefault(action.stage, each.device) != each.device:
            raise TimelineError(
                f"stage {action.stage} is on ranks {device_of[action.stage]} and {each.device}; "
                + _ONE_PIPELINE
            )
    n_stages = max(device_of) + 1
    n_microbatches = max(action.microbatch or 0 for action in placed) + 1
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            there = {op for op in Op if Action(stage, op, microbatch) in placed}
            for needed in (Op.F, Op.B if not there & {Op.I, Op.W} else Op.I, Op.W):
                if needed in there or (needed in (Op.I, Op.W) and Op.B in there):
                    continue
                if needed == Op.W and Op.I not in there:
                    continue
                where = f"rank {device_of[stage]}" if stage in device_of else "any rank"
                raise TimelineError(
                    f"{Action(stage, needed, microbatch)} is missing on {where}: the traces have "
                    f"{n_stages} stages and {n_microbatches} micro-batches, each with an F and a B "
                    "(or an I and a W); annotate them all, and give all ranks"
                )
    idle = set(range(n_devices)) - set(device_of.values())
    if idle:
        raise TimelineError(f"rank {min(idle)} has no stage of the pipeline; leave out its trace")


def _timeline(
    placed: Mapping[Action, Placed], output_bytes: float | Sequence[float], name: str
) -> Timeline:
    """Wire the graph of a step and put times to its tasks."""

    # Messages are issued right after what they carry, and received in the order of their senders;
    # of two tasks that start at one moment, the one that takes no time comes first.
    def key(action: Action) -> tuple[float, bool, bool, Op, float]:
        each = placed[action]
        moves = action.op in TRANSFERS
        return each.key, moves, not moves and each.end > each.start, action.op, each.end

    issued = sorted(placed, key=key)
    rows = [(a.op, placed[a].device, a.stage, -1 if a.microbatch is None else a.microbatch,
             placed[a].stream, placed[a].other is not None, a.peer_stage)
            for a in issued]  # fmt: skip
    op, device, stage, microbatch, stream, overlapped, peer = np.array(rows, dtype=np.int64).T
    recompute = "some" if (op == Op.R).any() else "never"
    try:
        columns = op, device, stage, microbatch, stream
        tasks = Tasks(*columns, overlapped=overlapped, peer_stage=peer)
        graph = TaskGraph.build(tasks, name=name, hosts="per_device", recompute=recompute)
        verify(graph)
    except PipeError as error:
        raise TimelineError(f"the traces are of no step that could run: {error}") from error
    times = [placed[graph.task(task).action] for task in range(len(graph))]
    start, end = (np.array([getattr(t, x) for t in times], np.float64) for x in ("start", "end"))
    begin = start.min()
    each_stage = tuple(output_bytes) if isinstance(output_bytes, Sequence) else output_bytes
    sizes = Costs(0.0, output_bytes=each_stage).per_stage("output_bytes", graph.n_stages)
    nbytes = message_bytes(graph.kinds, sizes)[graph.kind]
    return Timeline(graph, start - begin, end - begin, nbytes)

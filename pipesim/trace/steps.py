"""Steps of a trace: cut a trace where a step ends, and check that a step is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE, Action, Op
from pipesim.trace.overlapped_ranges import split_overlapped
from pipesim.trace.profiler_ranges import Range, Trace
from pipesim.trace.ranks import check_threads
from pipesim.trace.spans import Span
from pipesim.trace.working_times import working_times

ONE_PIPELINE = (
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

    Raises
    ------
    TimelineError
        For a trace without a whole step, for a backward before its F, for an action that is in a
        step twice, and for compute actions at the same time on several threads.
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
    device_of = _stage_devices(tasks)
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


def _stage_devices(tasks: Mapping[Action, PlacedTask]) -> dict[int, int]:
    """Return the device of each stage. Raise if a stage is on several."""
    device_of: dict[int, int] = {}
    for action, task in tasks.items():
        if device_of.setdefault(action.stage, task.device) != task.device:
            raise TimelineError(
                f"stage {action.stage} is on ranks {device_of[action.stage]} and {task.device}; "
                + ONE_PIPELINE
            )
    return device_of


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

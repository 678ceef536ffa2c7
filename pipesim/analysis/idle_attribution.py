"""Attribute idle seconds of devices to causes: the loop behind `idle`.

Two chains of tasks and waits lead up to each gap, one to its end and one to its beginning. The
difference of the two is the gap's causes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle_gaps import (
    COMPUTE_ROLE,
    RECV_ROLE,
    SEND_ROLE,
    Cause,
    Chain,
    Durations,
    Gaps,
    find_gaps,
    make_chain,
    make_durations,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.jit import kernel

__all__ = ["Cause", "seconds_of_causes"]

Floats = NDArray[np.float64]
# Indices of columns, as plain numbers for compiled loops.
_WARM_UP, _COOL_DOWN, _IMBALANCE, _LATENCY = map(int, list(Cause)[:4])
_CONTENTION, _HOST, _STRAGGLER = map(int, (Cause.CONTENTION, Cause.HOST, Cause.STRAGGLER))


def seconds_of_causes(timeline: Timeline) -> Floats:
    """Return the seconds of each cause on each device, up to rounding.

    Shape ``(n_devices, len(Cause))``. All tasks of the timeline must have run.
    """
    seconds = np.zeros((timeline.n_devices, len(Cause)))
    gaps = find_gaps(timeline)
    if len(gaps.task):
        space = _GapSpace(np.empty(len(Cause)), np.empty(2), np.empty(2))
        chain, durations = make_chain(timeline), make_durations(timeline)
        _attribute_gaps(gaps, chain, durations, space, seconds)
    return seconds


class _GapSpace(NamedTuple):
    """Space for one gap: seconds of each cause; sums and lengths of each group of causes."""

    parts: Floats
    net: Floats
    longer: Floats


def _scale_to_gap(space: _GapSpace, rounding: float, lasts: float, seconds: Floats) -> None:
    """Add a gap's parts to ``seconds``, scaled so that their sum is its length ``lasts``.

    Negative parts are subtracted proportionally from the other causes of the same group (tasks, or
    between tasks), then from all causes.
    """
    parts, net, longer = space.parts, space.net, space.longer
    for group in range(2):
        net[group] = longer[group] = 0.0
    for cause in range(len(parts)):
        group = int(_LATENCY <= cause <= _HOST)
        if abs(parts[cause]) > rounding:
            net[group] += parts[cause]
            longer[group] += max(parts[cause], 0.0)
    total = max(net[0], 0.0) + max(net[1], 0.0)
    for cause in range(len(parts)):
        group = int(_LATENCY <= cause <= _HOST)
        if parts[cause] > rounding and net[group] > 0.0:
            part = parts[cause] * net[group] / longer[group]
            seconds[cause] += part * lasts / total
    if total == 0.0:
        seconds[_HOST] += lasts


def _add_task(
    chain: Chain,
    durations: Durations,
    parts: Floats,
    task: int,
    now: float,
    counts: bool,
    sign: int,
) -> float:
    """Add the time of a task until ``now`` on its chain; return its start.

    The task after a gap has yet to start there: ``counts`` is False for it.
    """
    then = min(now, chain.transfer_end[task])
    parts[_LATENCY] += sign * (now - then)
    begin = min(then, chain.start[task])
    rest = then - begin
    if rest > 0 or counts:
        share = 1.0  # the part of the task that is on the chain
        lasted = chain.end[task] - chain.start[task]
        if chain.role[task] == COMPUTE_ROLE and rest < lasted:
            share = rest / lasted
        parts[_STRAGGLER] += sign * share * durations.straggles[task]
        parts[_IMBALANCE] += sign * share * durations.uneven[task]
        rest -= share * (durations.straggles[task] + durations.uneven[task])
    parts[chain.task_cause[task]] += sign * rest
    return float(begin)


def _add_waits(chain: Chain, parts: Floats, task: int, now: float, sign: int) -> float:
    """Add the waits of a task until ``now``, latest first; return the start of its wait."""
    blocker = chain.blocker[task]
    earlier = max(chain.ready[task], chain.issued[task])
    latest = max(earlier, chain.queued[task])
    in_flight = chain.role[task] == RECV_ROLE and blocker >= 0 and chain.role[blocker] == SEND_ROLE
    then = min(now, latest)
    cause = _LATENCY if in_flight and chain.ready[task] >= latest else _HOST
    parts[cause] += sign * (now - then)
    now = min(then, earlier)
    parts[_CONTENTION] += sign * (then - now)
    then = min(now, chain.ready[task])
    parts[_HOST] += sign * (now - then)
    return float(then)


@kernel(_scale_to_gap, _add_task, _add_waits, allocates=False)
def _attribute_gaps(
    gaps: Gaps, chain: Chain, durations: Durations, space: _GapSpace, seconds: Floats
) -> None:
    """Add the causes of each gap to its device's ``seconds``.

    Walk both chains backwards until they meet, always advancing the one at the larger task id: a
    task only waits for tasks of smaller ids. The chain of the task after the gap counts, and that
    of the task before it counts off.
    """
    parts = space.parts
    for gap in range(len(gaps.task)):
        for cause in range(len(parts)):
            parts[cause] = 0.0
        task, other = gaps.task[gap], gaps.previous[gap]
        now, other_now, sign = gaps.until[gap], gaps.since[gap], 1
        while task != other:
            if other > task:
                task, other, now, other_now, sign = other, task, other_now, now, -sign
            counts = task != gaps.task[gap]
            now = _add_task(chain, durations, parts, task, now, counts, sign)
            now = _add_waits(chain, parts, task, now, sign)
            task = chain.blocker[task]
        if task >= 0:  # one may have a message later than the end of its SEND, or a part of it
            cause = _LATENCY if chain.role[task] == SEND_ROLE else _HOST
            if chain.role[task] == COMPUTE_ROLE and max(now, other_now) <= chain.end[task]:
                cause = chain.task_cause[task]
            parts[cause] += sign * (now - other_now)
        # The cycle of the pipeline has its name from the phase.
        if gaps.phase[gap] >= 0:
            cycle = parts[_WARM_UP] + parts[_COOL_DOWN]
            parts[_WARM_UP] = parts[_COOL_DOWN] = 0.0
            parts[gaps.phase[gap]] = cycle
        lasts = gaps.until[gap] - gaps.since[gap]
        _scale_to_gap(space, durations.rounding, lasts, seconds[gaps.device[gap]])

"""Attribute the seconds of each idle gap of devices to causes: the loop behind `idle`.

Two chains of tasks and waits lead up to each gap, one to its end and one to its beginning. The
difference of the two is the gap's causes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle_chains import (
    CHAIN_HELPERS,
    Jumps,
    add_chain,
    add_task,
    add_waits,
    make_jumps,
    meeting_task,
)
from pipesim.analysis.idle_gaps import (
    COMPUTE_ROLE,
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

Floats = NDArray[np.float64]
# Indices of columns, as plain numbers for compiled loops.
_WARM_UP, _COOL_DOWN = int(Cause.WARM_UP), int(Cause.COOL_DOWN)
_LATENCY, _HOST = int(Cause.LATENCY), int(Cause.HOST)
#: Most steps of both chains of a gap, together, that are walked without jumps.
_FEW_STEPS = 64


def causes_of_gaps(timeline: Timeline) -> tuple[Gaps, Floats]:
    """Return the idle gaps of all devices, and the seconds of each cause of each gap.

    The seconds have shape ``(n_gaps, len(Cause))``. A row sums to the length of its gap, up to
    rounding. All tasks of the timeline must have run.
    """
    gaps = find_gaps(timeline)
    seconds = np.zeros((len(gaps.task), len(Cause)))
    if len(gaps.task):
        space = _GapSpace(np.empty(len(Cause)), np.empty(2), np.empty(2))
        chain, durations = make_chain(timeline), make_durations(timeline)
        jumps = make_jumps(chain, durations)
        _attribute_gaps(gaps, chain, durations, jumps, space, seconds)
    return gaps, seconds


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


@kernel(_scale_to_gap, *CHAIN_HELPERS, allocates=False)
def _attribute_gaps(
    gaps: Gaps,
    chain: Chain,
    durations: Durations,
    jumps: Jumps,
    space: _GapSpace,
    seconds: Floats,
) -> None:
    """Fill row ``gap`` of ``seconds`` with the causes of each gap; rows come in as zeros.

    The chain of the task after the gap counts, and that of the task before it counts off, each up
    to the task at which they meet. There are two ways, with the same sums up to rounding:

    - Up to `_FEW_STEPS` are walked one by one in the order of time, on both chains together. Equal
      seconds of both cancel before larger sums round them, so that small examples have round
      numbers.
    - More steps are walked in jumps, one chain after the other.
    """
    parts = space.parts
    for gap in range(len(gaps.task)):
        for cause in range(len(parts)):
            parts[cause] = 0.0
        task, other, waiting = gaps.task[gap], gaps.previous[gap], gaps.task[gap]
        now, other_now, sign = gaps.until[gap], gaps.since[gap], 1
        meeting = meeting_task(chain, jumps, task, other)
        depth = jumps.blocker_depth
        if depth[task] + depth[other] - 2 * depth[meeting] > _FEW_STEPS:
            now = add_chain(chain, durations, jumps, parts, task, now, meeting, sign)
            other_now = add_chain(chain, durations, jumps, parts, other, other_now, meeting, -sign)
            task = other = meeting
        while task != other:  # advance the larger id: a task only waits for smaller ids
            if other > task:
                task, other, now, other_now, sign = other, task, other_now, now, -sign
            now = add_task(chain, durations, parts, task, now, task != waiting, sign)
            now = add_waits(chain, parts, task, now, sign)
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
        _scale_to_gap(space, durations.rounding, lasts, seconds[gap])

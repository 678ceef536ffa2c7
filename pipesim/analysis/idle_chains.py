"""Walk the chains of tasks and waits that lead up to idle gaps, in jumps.

A chain goes backwards: from a task to its blocker, the task that it waited for last, and so on.
The chains of a gap may meet only after thousands of tasks. So each task has a jump along its chain,
with the sum of the seconds that it jumps over. The jump goes to the next task, or combines the jump
of that task and the jump after it, where both are equally long (Myers, "An applicative
random-access stack", 1983). A walk to any earlier task takes ``O(log n)`` steps and jumps.

Sums of jumps equal those of single steps, up to the rounding of another order. They are no
differences of larger sums, and so need no compensation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle_gaps import COMPUTE_ROLE, RECV_ROLE, SEND_ROLE, Cause, Chain, Durations
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]
# Indices of columns, as plain numbers for compiled loops.
_IMBALANCE, _LATENCY, _CONTENTION = map(int, (Cause.IMBALANCE, Cause.LATENCY, Cause.CONTENTION))
_HOST, _STRAGGLER = int(Cause.HOST), int(Cause.STRAGGLER)
#: Causes before this one occur on chains. The last, SCHEDULE_ORDER, comes from the phase of a gap.
_N_CHAIN_CAUSES = int(Cause.SCHEDULE_ORDER)


class Jumps(NamedTuple):
    """Jumps along the chains of all tasks, one from each task to an earlier one.

    A chain normally contains the start of each of its tasks. Where clocks are inexact, it may reach
    a task at a time before that start, and contains none of its time. From a start that it contains
    on, a chain does not depend on the task where it began. So seconds are from start to start.

    Depths and ends of jumps have shape ``(n_tasks + 1,)``: row -1, the last, is the end of chains.

    Attributes
    ----------
    blocker_jump, blocker_depth
        End of a jump from blocker to blocker, and number of blockers to the end of the chain.
    start_jump, start_depth
        The same from start to start: tasks whose start the chain does not contain are left out.
    seconds
        Seconds of each cause from the start of a task to the start of its ``start_jump``, if this
        is a task; shape ``(n_tasks, len(Cause) - 1)``, without `Cause.SCHEDULE_ORDER`.
    """

    blocker_jump: NDArray[np.int32]
    blocker_depth: NDArray[np.int32]
    start_jump: NDArray[np.int32]
    start_depth: NDArray[np.int32]
    seconds: Floats


def make_jumps(chain: Chain, durations: Durations) -> Jumps:
    """Return the jumps of all tasks; about 80 bytes a task."""
    n_tasks = len(chain.blocker)
    blocker_jump, blocker_depth, start_jump, start_depth = np.empty((4, n_tasks + 1), np.int32)
    seconds = np.empty((n_tasks, _N_CHAIN_CAUSES))
    jumps = Jumps(blocker_jump, blocker_depth, start_jump, start_depth, seconds)
    _fill_jumps(chain, durations, np.empty(len(Cause)), jumps)
    return jumps


def add_task(
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


def add_waits(chain: Chain, parts: Floats, task: int, now: float, sign: int) -> float:
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


def _add_to_next_start(chain: Chain, durations: Durations, parts: Floats, task: int) -> int:
    """Add the time between a task's start and the next start on its chain; return its task or -1.

    This is one step, or more where clocks are inexact (`Jumps`): one for each task of the chain
    within their error.
    """
    now = chain.start[task]
    while True:
        now = add_waits(chain, parts, task, now, 1)
        task = chain.blocker[task]
        if task < 0:
            return -1
        now = add_task(chain, durations, parts, task, now, True, 1)
        if now == chain.start[task]:
            return task


def _jump_end(jump: NDArray[np.int32], depth: NDArray[np.int32], following: int) -> int:
    """Return the end of the jump of a task, from the jumps of the task that follows it."""
    middle = jump[following]
    if depth[following] - depth[middle] == depth[middle] - depth[jump[middle]]:
        return int(jump[middle])
    return following


@kernel(add_task, add_waits, _add_to_next_start, _jump_end, allocates=False)
def _fill_jumps(chain: Chain, durations: Durations, parts: Floats, jumps: Jumps) -> None:
    """Fill ``jumps``; ``parts`` is space for the seconds of each cause."""
    jumps.blocker_jump[-1] = jumps.start_jump[-1] = -1
    jumps.blocker_depth[-1] = jumps.start_depth[-1] = 0
    for task in range(len(chain.blocker)):
        blocker = chain.blocker[task]
        jumps.blocker_jump[task] = _jump_end(jumps.blocker_jump, jumps.blocker_depth, blocker)
        jumps.blocker_depth[task] = jumps.blocker_depth[blocker] + 1
        for cause in range(len(parts)):
            parts[cause] = 0.0
        following = _add_to_next_start(chain, durations, parts, task)
        end = _jump_end(jumps.start_jump, jumps.start_depth, following)
        jumps.start_jump[task] = end
        jumps.start_depth[task] = jumps.start_depth[following] + 1
        for cause in range(jumps.seconds.shape[1]):
            jumps.seconds[task, cause] = parts[cause]
            if end != following:
                middle = jumps.start_jump[following]
                jumps.seconds[task, cause] += (
                    jumps.seconds[following, cause] + jumps.seconds[middle, cause]
                )


def meeting_task(chain: Chain, jumps: Jumps, task: int, other: int) -> int:
    """Return the task at which the chains of two tasks meet, -1 if only at their end."""
    jump, depth = jumps.blocker_jump, jumps.blocker_depth
    if depth[task] < depth[other]:
        task, other = other, task
    while depth[task] > depth[other]:
        task = jump[task] if depth[jump[task]] >= depth[other] else chain.blocker[task]
    while task != other:  # at equal depths, jumps are equally long
        if jump[task] != jump[other]:
            task, other = jump[task], jump[other]
        else:
            task, other = chain.blocker[task], chain.blocker[other]
    return task


def add_chain(
    chain: Chain,
    durations: Durations,
    jumps: Jumps,
    parts: Floats,
    task: int,
    now: float,
    meeting: int,
    sign: int,
) -> float:
    """Add the chain of a task until ``now``; return the time at which it reaches ``meeting``.

    The chain with sign 1 is that of the task after a gap, which has yet to start.
    """
    counts = sign < 0
    while task != meeting:
        now = add_task(chain, durations, parts, task, now, counts, sign)
        counts = True
        while now == chain.start[task] and jumps.start_jump[task] > meeting:
            for cause in range(jumps.seconds.shape[1]):
                parts[cause] += sign * jumps.seconds[task, cause]
            task = jumps.start_jump[task]
            now = chain.start[task]
        now = add_waits(chain, parts, task, now, sign)
        task = chain.blocker[task]
    return now


CHAIN_HELPERS = (add_task, add_waits, meeting_task, add_chain)

"""Idle time by cause: attribute every idle second of every device to one cause.

Two chains of tasks and waits lead up to each idle gap, one to its end and one to its beginning. The
difference of the two is the gap's causes.

A chain goes backwards: from a task to its blocker, the task that it waited for last, and so on.
The chains of a gap may meet only after thousands of tasks. So each task has a jump along its chain,
with the sum of the seconds that it jumps over. The jump goes to the next task, or combines the jump
of that task and the jump after it, where both are equally long (Myers, "An applicative
random-access stack", 1983). A walk to any earlier task takes ``O(log n)`` steps and jumps.

Sums of jumps equal those of single steps, up to the rounding of another order. They are no
differences of larger sums, and so need no compensation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import Floats
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
from pipesim.utils.csr import bincount
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd


#: Columns of `idle_by_cause`.
CAUSES = tuple(cause.name.lower() for cause in Cause)


def idle_by_cause(timeline: Timeline) -> pd.DataFrame:
    """Return the idle seconds of each device by cause: a row a device, a column a cause.

    A device is idle between two of its compute tasks, before the first and after the last. The
    predecessor of a task is the last of the tasks and waits that it waited for. So two chains of
    tasks and waits lead up to a gap: one to its end and one to its beginning. From their common
    ancestor on, the chain to the end is longer by the gap. The seconds on this chain that are not
    on the other are the cause, kind by kind:

    ============== =============================================================================
    column         seconds on the chain in which
    ============== =============================================================================
    bandwidth      a message's bytes, or a collective's, are under way
    latency        a message or a collective is under way beyond its bytes
    contention     a message that could leave waits: for another on its stream or on a link, or
                   for its rendezvous partner; or a collective waits for a link
    host           a task is not issued yet (by the recorded issue times, or by the launch costs),
                   or nothing happens
    straggler      a task runs beyond the usual time of its stage, or, on the chain to the
                   beginning, below it: the lower median of the durations of its operation on
                   this stage, over micro-batches and replicas; each segment has its own
    imbalance      the usual time of a stage is beyond the mean of all stages, or below it
    warm_up        tasks run for this mean time, before the device's first backward
    cool_down      the same, after its last forward; where a gap is both, F and R are warm_up,
                   and B, I, W and STEP cool_down
    schedule_order the same, in the steady state between
    ============== =============================================================================

    Kinds with more seconds on the chain to the beginning made the gap shorter. These seconds are
    subtracted from the other kinds of their sort (the first four rows, the last five), in
    proportion, and then from all kinds. So:

    - Seconds on both chains are no cause, such as the latency of each of two consecutive messages.
    - A slow stage is the cause of gaps on devices that never wait for it directly.
    - No task waits for the gap at the end of the step; its chain is that of the step's last task.

    Measured timelines are treated alike:

    - A device that is always slow looks like a stage with more work, unless replicas of the stage
      show its usual time.
    - Without costs, links are unknown, and contention for links counts as host.
    - Without costs, issue times are unknown unless they were recorded.
    - Without costs, latency is the shortest time of a message of the same kind.
    - The time of a message beyond its latency is bandwidth, ``Costs.output_seconds`` included, if
      the message has bytes; without bytes all of it is latency.
    - A collective with measured seconds is bandwidth.

    Returns
    -------
    pandas.DataFrame
        Columns `CAUSES`, indexed by ``device``. Rows sum exactly to ``timeline.idle``, added in
        any order. No value is below 0, unless ``idle`` itself is, by rounding.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2))
    >>> print(timeline.why.idle_by_cause()[["warm_up", "cool_down", "latency"]])
            warm_up  cool_down  latency
    device
    0           1.0        2.0      0.0
    1           1.0        2.0      0.0
    """
    from pipesim.utils.packages import pandas as pd

    timeline.check_complete("the causes of idle time need")
    exact = exact_sums(timeline, *causes_of_gaps(timeline))
    index = pd.RangeIndex(timeline.n_devices, name="device")
    return pd.DataFrame(exact, index=index, columns=list(CAUSES))


def exact_sums(timeline: Timeline, gaps: Gaps, seconds: Floats) -> Floats:
    """Return the seconds of each cause on each device, from the results of `causes_of_gaps`.

    Rows sum exactly to ``timeline.idle``, as in `idle_by_cause`. Shape ``(n_devices, len(Cause))``.
    """
    columns = [bincount(gaps.device, column, timeline.n_devices) for column in seconds.T]
    sums = np.stack(columns, axis=1)
    return np.stack([_summing_to(*row) for row in zip(timeline.idle, sums, strict=True)])


def idle_shares(timelines: Mapping[str, Timeline]) -> pd.DataFrame:
    """Return the share of each cause in the time of all devices, 0..1: a row a timeline.

    Columns `CAUSES`, indexed by ``schedule``. Rows sum to ``bubble_fraction``, up to rounding.
    """
    from pipesim.utils.packages import pandas as pd

    rows = {
        name: idle_by_cause(timeline).sum() / (timeline.n_devices * timeline.makespan or 1.0)
        for name, timeline in timelines.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(CAUSES))
    return table.rename_axis("schedule")


def _summing_to(total: float, parts: Floats) -> Floats:
    """Return ``parts`` changed by rounding alone, so that they sum to ``total`` in any order.

    The results are multiples of the unit in the last place of ``total``, so that every partial sum
    is an exact double. Where tasks of a device overlap by inexact clocks, ``parts`` may sum to more
    than ``total``; they are then scaled down.
    """
    if total <= 0:
        parts = np.zeros_like(parts)
    elif parts.sum() > total:
        parts = parts * (total / parts.sum())
    unit = float(np.spacing(abs(total)))
    whole = np.rint(parts / unit) * unit
    missing = math.fsum([total, *(-whole).tolist()])
    for k in np.argsort(-whole, kind="stable"):
        change = max(missing, -float(whole[k])) if total >= 0 else missing
        whole[k] += change
        missing -= change
        if not missing:
            break
    return whole


# Chains of tasks and waits, walked in jumps.

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
    """

    blocker_jump: NDArray[np.int32]  # end of a jump from blocker to blocker
    blocker_depth: NDArray[np.int32]  # number of blockers to the end of the chain
    # The same from start to start: tasks whose start the chain does not contain are left out.
    start_jump: NDArray[np.int32]
    start_depth: NDArray[np.int32]
    # Of each cause, from the start of a task to that of its ``start_jump``, if this is a task;
    # shape ``(n_tasks, len(Cause) - 1)``, without `Cause.SCHEDULE_ORDER`.
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

    This is one step, or more where clocks are inexact (`Jumps`).
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


# The loop over gaps.

# Indices of columns, as plain numbers for compiled loops.
_WARM_UP, _COOL_DOWN = int(Cause.WARM_UP), int(Cause.COOL_DOWN)
#: Most steps of both chains of a gap, together, that are walked without jumps.
_FEW_STEPS = 64


def causes_of_gaps(timeline: Timeline) -> tuple[Gaps, Floats]:
    """Return the idle gaps of all devices, and the seconds of each cause of each gap.

    The seconds have shape ``(n_gaps, len(Cause))``. A row sums to the length of its gap, up to
    rounding.
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


@kernel(_scale_to_gap, add_task, add_waits, meeting_task, add_chain, allocates=False)
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

"""Gaps of devices, and the two chains of waits that lead up to each: what `idle` is made of."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import (
    collective_latency,
    held_links,
    issued_together,
    let_go,
    message_latency,
)
from pipesim.ops import COLLECTIVES, COMPUTE, EXCHANGES, RECVS, SENDS, TRANSFERS, Op
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["Cause", "seconds_of_causes"]

Floats = NDArray[np.float64]


class Cause(IntEnum):
    """Cause of idle time of a device. The value is the place of its column.

    ``str`` gives what tables and legends call it.
    """

    WARM_UP = 0
    COOL_DOWN = 1
    IMBALANCE = 2
    LATENCY = 3
    BANDWIDTH = 4
    CONTENTION = 5
    HOST = 6
    STRAGGLER = 7
    SCHEDULE_ORDER = 8

    def __str__(self) -> str:
        joint = "-" if self <= Cause.COOL_DOWN else " "
        return self.name.lower().replace("_", joint)


# As compiled loops take them.
_WARM_UP, _COOL_DOWN, _IMBALANCE, _LATENCY, _BANDWIDTH, _CONTENTION, _HOST, _STRAGGLER, _ORDER = (
    map(int, Cause)
)
_COMPUTES, _COLLECTIVE, _SEND, _RECV = range(4)
#: Differences of durations below this share of the makespan are rounding of times.
_ROUNDING = 1e-12


def seconds_of_causes(timeline: Timeline) -> Floats:
    """Return the seconds of each cause on each device, up to rounding.

    Shape ``(n_devices, len(Cause))``, of a whole timeline.
    """
    seconds = np.zeros((timeline.n_devices, len(Cause)))
    gaps = _gaps(timeline)
    if len(gaps.task):
        columns = (*gaps, *_chain(timeline), *_durations(timeline), seconds)
        _follow(*columns)
    return seconds


class _Gaps(NamedTuple):
    """Gaps of devices: from when, until when, the tasks after and before, the phase.

    ``previous`` is -1 before a device's first task. ``phase`` is the cause that the pipeline's own
    cycle has there, or -1 for that of each task.
    """

    device: Ints
    since: Floats
    until: Floats
    task: Ints
    previous: Ints
    phase: NDArray[np.int8]


def _gaps(timeline: Timeline) -> _Gaps:
    """Return the gaps between compute tasks of each device, and before the end of the step."""
    import pandas as pd

    graph, start, end = timeline.graph, timeline.start, timeline.end
    n_devices, makespan = graph.n_devices, timeline.makespan
    computes = np.flatnonzero(graph.is_op(COMPUTE))
    computes = computes[np.lexsort((end[computes], start[computes], graph.device[computes]))]
    # The end of the step is like a task on each device, which begins with it.
    last = int(np.argmax(end)) if len(graph) else 0
    device = np.concatenate([graph.device[computes], np.arange(n_devices)])
    task = np.concatenate([computes, np.full(n_devices, last)])
    until = np.concatenate([start[computes], np.full(n_devices, makespan)])
    free = np.concatenate([end[computes], np.full(n_devices, makespan)])
    order = np.argsort(device, kind="stable")
    device, task, until = device[order], task[order], until[order]
    free = pd.Series(free[order]).groupby(device).cummax().to_numpy()
    since = np.zeros(len(device))
    previous = np.full(len(device), -1, dtype=np.int64)
    same = np.flatnonzero(device[1:] == device[:-1]) + 1
    previous[same] = task[same - 1]
    since[same] = np.maximum(free[same - 1], 0.0)  # clocks may differ by a little

    backward = np.flatnonzero(graph.is_op(frozenset({Op.B, Op.I})))
    forward = np.flatnonzero(graph.is_op(frozenset({Op.F})))
    first_backward, last_forward = np.full(n_devices, np.inf), np.zeros(n_devices)
    np.minimum.at(first_backward, graph.device[backward], start[backward])
    np.maximum.at(last_forward, graph.device[forward], end[forward])
    fills, drains = until <= first_backward[device], since >= last_forward[device]
    phase = np.select([fills & drains, fills, drains], [-1, _WARM_UP, _COOL_DOWN], _ORDER)
    gap = until > since
    columns = device[gap], since[gap], until[gap], task[gap], previous[gap]
    return _Gaps(*columns, phase[gap].astype(np.int8))


class _Chain(NamedTuple):
    """When each task was on the chain, for which cause, and what it waited for before that.

    A RECV that ends with its message is there from the end of its SEND. ``landed`` is where the
    bytes of a message or a collective end and its latency begins, ``ready`` when the task
    ``before`` let go, ``queued`` when the last message ended that it waited behind.
    """

    start: Floats
    end: Floats
    landed: Floats
    role: NDArray[np.int8]
    of_task: NDArray[np.int8]
    before: Ints
    ready: Floats
    issued: Floats
    queued: Floats


def _chain(timeline: Timeline) -> _Chain:
    graph, start, end = timeline.graph, timeline.start.copy(), timeline.end
    role, of_task = _roles(timeline)
    before, ready = np.full(len(graph), -1, dtype=np.int64), np.zeros(len(graph))
    queued, latency = np.zeros(len(graph)), message_latency(timeline)
    waits = graph.precedence
    free = let_go(timeline)
    _release(waits.ptr, waits.values, free, role, graph.pair, end, latency, before, ready, queued)
    issued, held = issued_together(graph, timeline.issue_times), held_links(timeline)
    late = (start > np.maximum(np.maximum(ready, queued), issued)) & (held >= 0)
    queued[late] = np.maximum(queued[late], end[held[late]])

    landed = np.maximum(start, end - collective_latency(timeline))
    recv = np.flatnonzero((role == _RECV) & (graph.pair >= 0))
    recv = recv[end[graph.pair[recv]] + latency[recv] > start[recv]]
    sent, tail = end[graph.pair[recv]], end[recv] - latency[recv]
    slower = (of_task[recv] == _BANDWIDTH) & (tail > sent + _ROUNDING * timeline.makespan)
    landed[recv] = np.where(slower, tail, sent)
    start[recv] = ready[recv] = sent
    before[recv] = graph.pair[recv]
    issued[recv] = queued[recv] = 0.0
    return _Chain(start, end, landed, role, of_task, before, ready, issued, queued)


def _roles(timeline: Timeline) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return the role of each task, and the cause that its time is, but for the steady state."""
    graph = timeline.graph
    role = np.full(len(graph), _COMPUTES, dtype=np.int8)
    for code, ops in ((_COLLECTIVE, COLLECTIVES), (_SEND, SENDS), (_RECV, RECVS)):
        role[graph.is_op(ops)] = code
    of_task = np.full(len(graph), _COOL_DOWN, dtype=np.int8)
    of_task[graph.is_op(frozenset({Op.F, Op.R}))] = _WARM_UP
    of_task[role != _COMPUTES] = _BANDWIDTH
    of_task[graph.is_op(TRANSFERS) & (timeline.nbytes <= 0)] = _LATENCY
    return role, of_task


class _Durations(NamedTuple):
    """What each task took beyond its stage's usual time, and that beyond the mean of stages."""

    straggles: Floats
    uneven: Floats
    rounding: float


def _durations(timeline: Timeline) -> _Durations:
    graph, usual, rounding = timeline.graph, _usual(timeline), _ROUNDING * timeline.makespan
    uneven = np.zeros_like(usual)
    for row, known in enumerate(~np.isnan(usual)):
        if known.any():
            uneven[row, known] = usual[row, known] - math.fsum(usual[row, known]) / known.sum()
    place = _rows(timeline), graph.stage
    straggles = np.nan_to_num(timeline.duration - usual[place])
    of_tasks = np.nan_to_num(uneven[place])
    for column in (straggles, of_tasks):
        column[np.abs(column) <= rounding] = 0.0
    return _Durations(straggles, of_tasks, rounding)


def _rows(timeline: Timeline) -> Ints:
    """Return each task's row of `_usual`: halves of overlapped actions are apart.

    So are the two parts of REORDER, which are never such halves.
    """
    kinds = timeline.graph.kinds
    sums = (kinds.op == Op.REORDER) & (kinds.part == EXCHANGES.index("gradients"))
    rows: Ints = (2 * kinds.op + (kinds.overlapped | sums))[timeline.graph.kind]
    return rows


def _usual(timeline: Timeline) -> Floats:
    """Return the lower median of each operation's durations on each stage, NaN where it has none.

    Shape ``(2 * len(Op), n_stages)``; `_rows` says which row is whose.
    """
    graph, duration = timeline.graph, timeline.duration
    usual = np.full((2 * len(Op), graph.n_stages), np.nan)
    tasks = np.flatnonzero(graph.is_op(COMPUTE))
    cell = _rows(timeline)[tasks] * graph.n_stages + graph.stage[tasks]
    order = np.lexsort((duration[tasks], cell))
    cells, first, count = np.unique(cell[order], return_index=True, return_counts=True)
    usual.flat[cells] = duration[tasks][order][first + (count - 1) // 2]
    return usual


@kernel()
def _release(
    ptr: Ints,
    values: Ints,
    free: Floats,
    role: NDArray[np.int8],
    pair: Ints,
    end: Floats,
    latency: Floats,
    before: Ints,
    ready: Floats,
    queued: Floats,
) -> None:
    """Fill the columns of `_Chain` that come from other tasks; they come in as -1, 0 and 0.

    ``free`` is when each of ``values`` lets go. A message waits behind other messages
    (``queued``); whatever else a task waits for may be ``before`` it. Of several that let go at one
    moment, the largest id.
    """
    for task in range(len(role)):
        for k in range(ptr[task], ptr[task + 1]):
            other = values[k]
            if role[task] == _RECV and other == pair[task]:
                continue
            if role[task] >= _SEND and role[other] >= _SEND:
                queued[task] = max(queued[task], free[k])
            elif (
                before[task] < 0
                or free[k] > ready[task]
                or (free[k] == ready[task] and other > before[task])
            ):
                before[task], ready[task] = other, free[k]
        if role[task] == _RECV and pair[task] >= 0:
            came = end[pair[task]] + latency[task]
            if before[task] < 0 or came > ready[task]:
                before[task], ready[task] = pair[task], came


def _share(parts: Floats, rounding: float, lasts: float, seconds: Floats) -> None:
    """Add a gap's parts to ``seconds``, so that they add up to what it ``lasts``.

    What is below 0 is taken from the rest of its sort, tasks or between tasks, then from all.
    """
    net, longer = np.zeros(2), np.zeros(2)
    for cause in range(len(parts)):
        sort = int(_LATENCY <= cause <= _HOST)
        if abs(parts[cause]) > rounding:
            net[sort] += parts[cause]
            longer[sort] += max(parts[cause], 0.0)
    total = max(net[0], 0.0) + max(net[1], 0.0)
    for cause in range(len(parts)):
        sort = int(_LATENCY <= cause <= _HOST)
        if parts[cause] > rounding and net[sort] > 0.0:
            part = parts[cause] * net[sort] / longer[sort]
            seconds[cause] += part * lasts / total
    if total == 0.0:
        seconds[_HOST] += lasts


@kernel(_share)
def _follow(
    device: Ints,
    since: Floats,
    until: Floats,
    first: Ints,
    previous: Ints,
    phase: NDArray[np.int8],
    start: Floats,
    end: Floats,
    landed: Floats,
    role: NDArray[np.int8],
    of_task: NDArray[np.int8],
    before: Ints,
    ready: Floats,
    issued: Floats,
    queued: Floats,
    straggles: Floats,
    uneven: Floats,
    rounding: float,
    seconds: Floats,
) -> None:
    """Add the causes of each gap to its device's ``seconds``.

    Both chains are walked back to the task where they meet: the one with the larger id goes on,
    since whatever a task waited for has a smaller one. One loop, since a kernel's helpers cannot
    be given all the columns that it reads.
    """
    for gap in range(len(first)):
        parts = np.zeros(seconds.shape[1])
        # The chain of the task after the gap, which counts, and of that before, which counts off.
        task, other = first[gap], previous[gap]
        now, other_now, sign = until[gap], since[gap], 1.0
        while task != other:
            if other > task:
                task, other, now, other_now, sign = other, task, other_now, now, -sign
            # What it did.
            then = min(now, landed[task])
            parts[_LATENCY] += sign * (now - then)
            now = min(then, start[task])
            rest = then - now
            if rest > 0 or task != first[gap]:  # not the one that is yet to start
                did = 1.0  # the part of it that is on the chain
                if role[task] == _COMPUTES and rest < end[task] - start[task]:
                    did = rest / (end[task] - start[task])
                parts[_STRAGGLER] += sign * did * straggles[task]
                parts[_IMBALANCE] += sign * did * uneven[task]
                rest -= did * (straggles[task] + uneven[task])
            parts[of_task[task]] += sign * rest
            # What it waited for, latest first.
            earlier = max(ready[task], issued[task])
            latest = max(earlier, queued[task])
            flies = role[task] == _RECV and before[task] >= 0 and role[before[task]] == _SEND
            then = min(now, latest)
            parts[_LATENCY if flies and ready[task] >= latest else _HOST] += sign * (now - then)
            now = min(then, earlier)
            parts[_CONTENTION] += sign * (then - now)
            then = min(now, ready[task])
            parts[_HOST] += sign * (now - then)
            now, task = then, before[task]
        if task >= 0:  # one may have a message later than the end of its SEND, or a part of it
            cause = _LATENCY if role[task] == _SEND else _HOST
            if role[task] == _COMPUTES and max(now, other_now) <= end[task]:
                cause = of_task[task]
            parts[cause] += sign * (now - other_now)
        # The cycle of the pipeline has its name from the phase.
        if phase[gap] >= 0:
            cycle = parts[_WARM_UP] + parts[_COOL_DOWN]
            parts[_WARM_UP] = parts[_COOL_DOWN] = 0.0
            parts[phase[gap]] = cycle
        _share(parts, rounding, until[gap] - since[gap], seconds[device[gap]])

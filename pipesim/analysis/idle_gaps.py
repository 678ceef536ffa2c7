"""Columns of the idle gaps of devices and of the waits before each task, for `idle`."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import (
    ROUNDING,
    Floats,
    collective_latency,
    joint_issue_times,
    last_link_holder,
    message_latency,
    release_times,
)
from pipesim.ops import (
    COLLECTIVES,
    COMPUTE,
    COPIES,
    EXCHANGES,
    INPUT_GRADS,
    RECVS,
    SEGMENTED,
    SENDS,
    TRANSFERS,
    Op,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel


class Cause(IntEnum):
    """Cause of idle time of a device. The value is the index of its column.

    ``str`` gives its name in tables and legends.
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


# Indices of columns, and roles of tasks, as plain numbers for compiled loops.
_WARM_UP, _COOL_DOWN, _LATENCY = int(Cause.WARM_UP), int(Cause.COOL_DOWN), int(Cause.LATENCY)
_BANDWIDTH, _ORDER = int(Cause.BANDWIDTH), int(Cause.SCHEDULE_ORDER)
COMPUTE_ROLE, COLLECTIVE_ROLE, SEND_ROLE, RECV_ROLE = range(4)


class Gaps(NamedTuple):
    """Idle gaps of devices; times in seconds."""

    device: Ints
    since: Floats
    until: Floats
    task: Ints  # after the gap
    previous: Ints  # task before the gap; -1 before a device's first task
    phase: NDArray[np.int8]  # cause of the pipeline's cycle in the gap; -1: that of each task


def find_gaps(timeline: Timeline) -> Gaps:
    """Return the gaps between compute tasks of each device, and before the end of the step."""
    from pipesim.utils.packages import pandas as pd

    graph, start, end = timeline.graph, timeline.start, timeline.end
    n_devices, makespan = graph.n_devices, timeline.makespan
    computes = np.flatnonzero(graph.is_op(COMPUTE))
    computes = computes[np.lexsort((end[computes], start[computes], graph.device[computes]))]
    # The end of the step counts as a task on each device that starts there.
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

    backward = np.flatnonzero(graph.is_op(INPUT_GRADS))
    forward = np.flatnonzero(graph.is_op(frozenset({Op.F})))
    first_backward, last_forward = np.full(n_devices, np.inf), np.zeros(n_devices)
    np.minimum.at(first_backward, graph.device[backward], start[backward])
    np.maximum.at(last_forward, graph.device[forward], end[forward])
    if not len(backward):  # an evaluation fills until a device's first F, and drains after its last
        np.minimum.at(first_backward, graph.device[forward], start[forward])
    fills, drains = until <= first_backward[device], since >= last_forward[device]
    phase = np.select([fills & drains, fills, drains], [-1, _WARM_UP, _COOL_DOWN], _ORDER)
    gap = until > since
    columns = device[gap], since[gap], until[gap], task[gap], previous[gap]
    return Gaps(*columns, phase[gap].astype(np.int8))


class Chain(NamedTuple):
    """Time of each task on a chain of waits, and the task that it waited for.

    Times are in seconds, shapes ``(len(graph),)``. A RECV that ends with its message is on the
    chain from the end of its SEND.
    """

    start: Floats
    end: Floats
    transfer_end: Floats  # where the latency of a message, copy or collective begins; else ``end``
    role: NDArray[np.int8]
    task_cause: NDArray[np.int8]  # `Cause` of its own time, outside the steady state
    blocker: Ints  # task that it waited for last, -1 if none
    ready: Floats  # when ``blocker`` stopped blocking it
    issued: Floats
    queued: Floats  # end of the last message that it waited behind


def make_chain(timeline: Timeline) -> Chain:
    """Return the columns of the chains of waits; seconds, shape ``(len(graph),)``."""
    graph, start, end = timeline.graph, timeline.start.copy(), timeline.end
    role, task_cause = _roles(timeline)
    blocker, ready = np.full(len(graph), -1, dtype=np.int64), np.zeros(len(graph))
    queued, latency = np.zeros(len(graph)), message_latency(timeline)
    waits = graph.precedence
    free = release_times(timeline)
    _fill_waits(
        waits.ptr, waits.values, free, role, graph.pair, end, latency, blocker, ready, queued
    )
    issued, held = joint_issue_times(graph, timeline.issue_times), last_link_holder(timeline)
    late = (start > np.maximum(np.maximum(ready, queued), issued)) & (held >= 0)
    queued[late] = np.maximum(queued[late], end[held[late]])

    transfer_end = np.maximum(start, end - collective_latency(timeline))
    recv = np.flatnonzero((role == RECV_ROLE) & (graph.pair >= 0))
    recv = recv[end[graph.pair[recv]] + latency[recv] > start[recv]]
    sent, tail = end[graph.pair[recv]], end[recv] - latency[recv]
    slower = (task_cause[recv] == _BANDWIDTH) & (tail > sent + ROUNDING * timeline.makespan)
    transfer_end[recv] = np.where(slower, tail, sent)
    start[recv] = ready[recv] = sent
    blocker[recv] = graph.pair[recv]
    issued[recv] = queued[recv] = 0.0
    return Chain(start, end, transfer_end, role, task_cause, blocker, ready, issued, queued)


def _roles(timeline: Timeline) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return the role of each task, and the cause of its time outside the steady state."""
    graph = timeline.graph
    role = np.full(len(graph), COMPUTE_ROLE, dtype=np.int8)
    # Most of the time of a GRAD_NORM is work of its device.
    collectives = (COLLECTIVES - {Op.GRAD_NORM}) | COPIES
    for code, ops in ((COLLECTIVE_ROLE, collectives), (SEND_ROLE, SENDS), (RECV_ROLE, RECVS)):
        role[graph.is_op(ops)] = code
    task_cause = np.full(len(graph), _COOL_DOWN, dtype=np.int8)
    task_cause[graph.is_op(frozenset({Op.F, Op.R}))] = _WARM_UP
    task_cause[role != COMPUTE_ROLE] = _BANDWIDTH
    task_cause[graph.is_op(TRANSFERS | COPIES) & (timeline.nbytes <= 0)] = _LATENCY
    return role, task_cause


class Durations(NamedTuple):
    """Seconds of each task beyond its stage's usual time, and of that beyond the mean of stages."""

    straggles: Floats
    uneven: Floats
    rounding: float


def make_durations(timeline: Timeline) -> Durations:
    """Return the excess of each task over its usual time, and of its stage over the mean (s)."""
    graph, rounding = timeline.graph, ROUNDING * timeline.makespan
    usual = _typical_durations(timeline)
    whole = usual[..., 0].copy()  # of all segments
    for segment in range(1, usual.shape[2]):
        whole += np.nan_to_num(usual[..., segment])
    uneven = np.zeros_like(whole)
    for row, present in enumerate(~np.isnan(whole)):
        if present.any():
            uneven[row, present] = (
                whole[row, present] - math.fsum(whole[row, present]) / present.sum()
            )
    place = _rows(timeline), graph.stage
    own = usual[(*place, _segments(timeline))]
    n_segments = (~np.isnan(usual)).sum(axis=2)[place]
    share = np.where(n_segments > 1, 1 / np.maximum(n_segments, 1), 1.0)
    np.divide(own, whole[place], out=share, where=(n_segments > 1) & (whole[place] > 0))
    straggles = np.nan_to_num(timeline.duration - own)
    of_tasks = np.nan_to_num(uneven[place] * share)
    for column in (straggles, of_tasks):
        column[np.abs(column) <= rounding] = 0.0
    return Durations(straggles, of_tasks, rounding)


def _rows(timeline: Timeline) -> Ints:
    """Return each task's row of `_typical_durations`.

    Halves of overlapped actions are apart, and so are the two parts of REORDER.
    """
    kinds = timeline.graph.kinds
    sums = (kinds.op == Op.REORDER) & (kinds.part == EXCHANGES.index("gradients"))
    rows: Ints = (2 * kinds.op + (kinds.overlapped | sums))[timeline.graph.kind]
    return rows


def _segments(timeline: Timeline) -> Ints:
    """Return the segment of each task of a stage with experts, 0 for others."""
    kinds = timeline.graph.kinds
    segment = np.where(kinds.is_op(SEGMENTED), np.maximum(kinds.part, 0), 0)
    segments: Ints = segment[timeline.graph.kind]
    return segments


def _typical_durations(timeline: Timeline) -> Floats:
    """Return the lower median of each operation's durations on each stage, NaN where it has none.

    Shape ``(2 * len(Op), n_stages, n_segments)``; `_rows` has the row of each task, and `_segments`
    its segment. Tasks without segments are the first.
    """
    graph, duration, segment = timeline.graph, timeline.duration, _segments(timeline)
    usual = np.full((2 * len(Op), graph.n_stages, 1 + int(segment.max(initial=0))), np.nan)
    tasks = np.flatnonzero(graph.is_op(COMPUTE))
    place = _rows(timeline)[tasks], graph.stage[tasks], segment[tasks]
    cell = np.ravel_multi_index(place, usual.shape)
    order = np.lexsort((duration[tasks], cell))
    cells, first, count = np.unique(cell[order], return_index=True, return_counts=True)
    usual.flat[cells] = duration[tasks][order][first + (count - 1) // 2]
    return usual


@kernel()
def _fill_waits(
    ptr: Ints,
    values: Ints,
    free: Floats,
    role: NDArray[np.int8],
    pair: Ints,
    end: Floats,
    latency: Floats,
    blocker: Ints,
    ready: Floats,
    queued: Floats,
) -> None:
    """Fill the columns of `Chain` that come from other tasks; they come in as -1, 0 and 0.

    ``free`` is the time at which each of ``values`` stopped blocking its successor (s). A message
    waits behind other messages (``queued``). Every other task that it waits for may be its
    ``blocker``. If several stopped blocking at the same time, the largest id counts.
    """
    for task in range(len(role)):
        for k in range(ptr[task], ptr[task + 1]):
            other = values[k]
            if role[task] == RECV_ROLE and other == pair[task]:
                continue
            if role[task] >= SEND_ROLE and role[other] >= SEND_ROLE:
                queued[task] = max(queued[task], free[k])
            elif (
                blocker[task] < 0
                or free[k] > ready[task]
                or (free[k] == ready[task] and other > blocker[task])
            ):
                blocker[task], ready[task] = other, free[k]
        if role[task] == RECV_ROLE and pair[task] >= 0:
            came = end[pair[task]] + latency[task]
            if blocker[task] < 0 or came > ready[task]:
                blocker[task], ready[task] = pair[task], came

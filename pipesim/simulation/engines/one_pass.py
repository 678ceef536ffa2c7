"""The compiled engine's pass in order of ids.

It is for graphs in which the requests for each link come in order of ids, too: there, each time
depends only on times of smaller ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.simulation.engines.plan import (
    HOLDS,
    RECV,
    SEND,
    Plan,
    Progress,
    part_done,
    receive_times,
    task_seconds,
)
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]


def _stream_ready(plan: Plan, progress: Progress, task: int) -> float:
    """Return the time at which the task's stream is free and its host has issued it (s)."""
    ready = float(progress.stream_free[plan.stream[plan.kind[task]]])
    if len(plan.issued):
        ready = max(ready, plan.issued[task])
    return ready


def _ready(plan: Plan, progress: Progress, task: int, start: Floats, end: Floats) -> float:
    """Return the earliest start of a task by its stream, host and dependencies (s)."""
    ready = _stream_ready(plan, progress, task)
    for k in range(plan.needs_ptr[task], plan.needs_ptr[task + 1]):
        ready = max(ready, end[plan.needs[k]])
    if len(plan.partial) and plan.partial[task] >= 0:
        ready = max(ready, part_done(plan, task, start))
    return ready


def _group_ready(plan: Plan, progress: Progress, group: int, start: Floats, end: Floats) -> float:
    """Return the time at which all members of a collective are ready (s; rule 9)."""
    ready = 0.0
    for j in range(plan.members_ptr[group], plan.members_ptr[group + 1]):
        ready = max(ready, _ready(plan, progress, plan.members[j], start, end))
    return ready


def _hold_links(plan: Plan, progress: Progress, task: int, ready: float, seconds: float) -> float:
    """Hold the links of a SEND or a copy once all are free; return its start (s).

    Return -1 if a smaller id asked for one of them later: rule 8 then grants that one later.
    """
    row, begin = plan.row[task], ready
    for k in range(plan.links.shape[1]):
        link = plan.links[row, k]
        if link >= 0:
            if ready < progress.link_asked[link]:
                return -1.0
            begin = max(begin, progress.link_free[link])
    for k in range(plan.links.shape[1]):
        link = plan.links[row, k]
        if link >= 0:
            progress.link_asked[link] = ready
            progress.link_free[link] = begin + seconds
    return begin


def _hold_group_links(plan: Plan, progress: Progress, group: int, ready: float) -> float:
    """Hold the links of a collective once all are free; return its start (s), or -1 likewise.

    A collective with a member of 0 s holds none.
    """
    first, last = plan.members_ptr[group], plan.members_ptr[group + 1]
    begin = ready
    for j in range(first, last):
        if task_seconds(plan, plan.members[j]) <= 0.0:
            return ready
    for j in range(first, last):
        for k in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], k]
            if link >= 0:
                if ready < progress.link_asked[link]:
                    return -1.0
                begin = max(begin, progress.link_free[link])
    for j in range(first, last):
        finish = begin + task_seconds(plan, plan.members[j])
        for k in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], k]
            if link >= 0:
                progress.link_asked[link] = ready
                progress.link_free[link] = max(progress.link_free[link], finish)
    return begin


@kernel(
    task_seconds, part_done, receive_times, _stream_ready, _ready, _group_ready, _hold_links,
    _hold_group_links, allocates=False,
)  # fmt: skip
def one_pass(plan: Plan, progress: Progress, start: Floats, end: Floats) -> bool:
    """Fill start and end in order of ids; return False if requests for a link come in another."""
    stream_free, group_start = progress.stream_free, progress.group_start
    for task in range(len(plan.kind)):
        role, stream = plan.role[plan.kind[task]], plan.stream[plan.kind[task]]
        ready = _ready(plan, progress, task, start, end)
        if role == RECV:
            start[task], end[task] = receive_times(plan, task, ready, start, end)
            stream_free[stream] = end[task]
            continue
        if role == SEND and plan.rendezvous:
            ready = max(ready, _stream_ready(plan, progress, plan.pair[task]))
        if len(plan.group) and plan.group[task] >= 0:
            group = plan.group[task]
            if group_start[group] < 0.0:  # the first member: dependencies of all have run
                ready = _group_ready(plan, progress, group, start, end)
                group_start[group] = _hold_group_links(plan, progress, group, ready)
            ready = group_start[group]
        seconds = task_seconds(plan, task)
        if role & HOLDS and plan.asks[plan.row[task]] and seconds > 0.0:
            ready = _hold_links(plan, progress, task, ready, seconds)
        if ready < 0.0:
            return False
        start[task] = ready
        end[task] = stream_free[stream] = ready + seconds
    return True

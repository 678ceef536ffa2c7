"""The compiled engine's pass in order of ids, alone and for several scenarios at once.

It is for graphs in which the requests for each link come in order of ids, too: there, each time
depends only on times of smaller ids.
"""

from __future__ import annotations

from typing import NamedTuple

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
from pipesim.simulation.noise import Draws
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel
from pipesim.utils.random_draws import (
    FAILURE_DRAWS,
    TASK_DRAWS,
    random_bits,
    table_quantile,
    uniform,
)

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


# Several scenarios at once


@kernel()
def prune(plan: Plan, kept_ptr: Ints, kept: Ints) -> int:
    """Keep the last need on each other stream; the order of that stream implies the rest.

    The backward of which a bucket needs a part (``partial``) is not among the needs.

    Return the largest distance of ids between a task and its needs.
    """
    total, reach = 0, 1
    for task in range(len(plan.kind)):
        own = last = plan.stream[plan.kind[task]]
        first = total
        for k in range(plan.needs_ptr[task], plan.needs_ptr[task + 1]):
            other = plan.stream[plan.kind[plan.needs[k]]]
            if other == last and total > first:  # on the same stream the later need counts
                kept[total - 1] = max(kept[total - 1], plan.needs[k])
            elif other != own:
                kept[total] = plan.needs[k]
                total += 1
                last = other
        kept_ptr[task + 1] = total
        for k in range(first, total):
            reach = max(reach, task - kept[k])
        if plan.role[plan.kind[task]] == RECV:
            reach = max(reach, task - plan.pair[task])
        if len(plan.partial) and plan.partial[task] >= 0:
            reach = max(reach, task - plan.partial[task])
    return reach


class ScenarioBatch(NamedTuple):
    """Scenarios of one call: their random numbers, times and results."""

    #: Factor of each device, shape ``(n, n_devices)``; keys of draws, shape ``(n, 3)``.
    device_factor: Floats
    keys: NDArray[np.uint64]
    #: Start, end and duration of the latest tasks, in seconds; shape ``(window, n)``. A task has
    #: the row of its id modulo ``window``, a power of two. ``start`` has values of SENDs only;
    #: with buckets, of all tasks. Without buckets, ``lasted`` has no row.
    start: Floats
    end: Floats
    lasted: Floats
    #: Seconds of each scenario's step, and seconds that all devices compute; 0 at first.
    makespan: Floats
    busy: Floats
    #: Whether two tasks compete for a link; then the scenario's other results are wrong.
    competes: NDArray[np.bool_]
    #: Space for times of one task, in seconds.
    ready: Floats
    seconds: Floats
    finish: Floats


def _draw_seconds(
    plan: Plan, draws: Draws, batch: ScenarioBatch, task: int, seconds: Floats
) -> None:
    """Fill the seconds of a task in each scenario; add compute tasks to ``busy``."""
    kind, base, n = plan.kind[task], plan.duration[plan.row[task]], len(seconds)
    if draws.computes[kind]:
        for k in range(n):
            seconds[k] = base * batch.device_factor[k, draws.device[kind]]
    else:
        for k in range(n):
            seconds[k] = base
    if draws.table_of_kind[kind] >= 0:
        table, index = draws.tables[draws.table_of_kind[kind]], np.uint64(task)
        if len(plan.group) and plan.group[task] >= 0:  # members of a collective last equally long
            index = np.uint64(plan.members[plan.members_ptr[plan.group[task]]])
        for k in range(n):
            seconds[k] = seconds[k] * table_quantile(
                table, random_bits(batch.keys[k, TASK_DRAWS], index)
            )
    if draws.computes[kind]:
        if draws.hit_every > 0.0:
            for k in range(n):
                level = uniform(random_bits(batch.keys[k, FAILURE_DRAWS], np.uint64(task)))
                pause = draws.pause if level * draws.hit_every < seconds[k] else 0.0
                seconds[k] = seconds[k] + pause
        for k in range(n):
            batch.busy[k] += seconds[k]


def _stream_ready_in_scenarios(plan: Plan, progress: Progress, task: int, ready: Floats) -> None:
    """Fill ``ready`` with the time at which the task's stream is free and it is issued (s)."""
    stream = plan.stream[plan.kind[task]]
    issued = plan.issued[task] if len(plan.issued) else 0.0
    for k in range(len(ready)):
        ready[k] = max(progress.stream_free[stream, k], issued)


def _wait_for_stream(plan: Plan, progress: Progress, task: int, ready: Floats) -> None:
    """Raise ``ready`` to the time at which another task's stream is free and it is issued (s)."""
    stream = plan.stream[plan.kind[task]]
    issued = plan.issued[task] if len(plan.issued) else 0.0
    for k in range(len(ready)):
        ready[k] = max(max(ready[k], progress.stream_free[stream, k]), issued)


def _wait_for_needs(plan: Plan, batch: ScenarioBatch, task: int, ready: Floats) -> None:
    """Raise ``ready`` to the end of the last dependency of a task (s)."""
    last = len(batch.end) - 1  # a power of two, less 1
    for j in range(plan.needs_ptr[task], plan.needs_ptr[task + 1]):
        needed = plan.needs[j] & last
        for k in range(len(ready)):
            ready[k] = max(ready[k], batch.end[needed, k])
    if len(plan.partial) and plan.partial[task] >= 0:
        needed, part = plan.partial[task] & last, plan.share[plan.row[task]]
        for k in range(len(ready)):
            ready[k] = max(ready[k], batch.start[needed, k] + part * batch.lasted[needed, k])


def _group_end(
    plan: Plan, draws: Draws, batch: ScenarioBatch, group: int, begin: Floats, finish: Floats
) -> None:
    """Fill the end of a collective in each scenario, by its longest member (s)."""
    first, last = plan.members_ptr[group], plan.members_ptr[group + 1]
    member, longest = plan.members[first], 0.0
    for i in range(first, last):
        longest = max(longest, plan.duration[plan.row[plan.members[i]]])
    for k in range(len(begin)):
        finish[k] = longest
    number = draws.table_of_kind[plan.kind[member]]
    if number >= 0:
        for k in range(len(begin)):
            bits = random_bits(batch.keys[k, TASK_DRAWS], np.uint64(member))
            finish[k] = longest * table_quantile(draws.tables[number], bits)
    for k in range(len(begin)):
        finish[k] = begin[k] + finish[k]


def _hold_group_links_of_scenarios(
    plan: Plan, batch: ScenarioBatch, progress: Progress, group: int, begin: Floats, finish: Floats
) -> None:
    """Hold the links of a collective in each scenario; mark those in which one is not free."""
    first, last = plan.members_ptr[group], plan.members_ptr[group + 1]
    for j in range(first, last):
        for i in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], i]
            for k in range(len(begin) if link >= 0 else 0):
                if begin[k] < finish[k] and begin[k] < progress.link_free[link, k]:
                    batch.competes[k] = True
    for j in range(first, last):
        for i in range(plan.links.shape[1]):
            link = plan.links[plan.row[plan.members[j]], i]
            for k in range(len(begin) if link >= 0 else 0):
                if begin[k] < finish[k]:
                    progress.link_free[link, k] = finish[k]


def _hold_links_of_scenarios(
    plan: Plan, batch: ScenarioBatch, progress: Progress, task: int, begin: Floats, seconds: Floats
) -> None:
    """Hold the links of a SEND or a copy in each scenario; mark those in which one is not free."""
    for j in range(plan.links.shape[1]):
        link = plan.links[plan.row[task], j]
        for k in range(len(begin) if link >= 0 else 0):
            if seconds[k] > 0.0:
                if begin[k] < progress.link_free[link, k]:
                    batch.competes[k] = True
                progress.link_free[link, k] = begin[k] + seconds[k]


def _receive(
    plan: Plan, batch: ScenarioBatch, progress: Progress, task: int, ready: Floats
) -> None:
    """Fill the end of a RECV: head and tail arrive a latency after they leave (rule 4)."""
    last = len(batch.end) - 1
    stream, send = plan.stream[plan.kind[task]], plan.pair[task] & last
    latency = plan.latency[plan.row[task]]
    for k in range(len(ready)):
        head = max(ready[k], batch.start[send, k] + latency)
        batch.end[task & last, k] = max(head, batch.end[send, k] + latency)
        progress.stream_free[stream, k] = batch.end[task & last, k]


def _copy(values: Floats, target: Floats) -> None:
    """Copy one value a scenario."""
    for k in range(len(values)):
        target[k] = values[k]


@kernel(
    random_bits, table_quantile, uniform, _draw_seconds, _stream_ready_in_scenarios,
    _wait_for_stream, _wait_for_needs, _group_end, _hold_group_links_of_scenarios,
    _hold_links_of_scenarios, _receive, _copy, allocates=False,
)  # fmt: skip
def one_pass_batched(plan: Plan, draws: Draws, batch: ScenarioBatch, progress: Progress) -> None:
    """Fill the results of ``batch``, drawing the seconds of each task."""
    last = len(batch.end) - 1  # a power of two, less 1
    n = len(batch.makespan)
    ready, seconds, finish = batch.ready, batch.seconds, batch.finish
    stream_free, group_start = progress.stream_free, progress.group_start
    for task in range(len(plan.kind)):
        role, stream = plan.role[plan.kind[task]], plan.stream[plan.kind[task]]
        _stream_ready_in_scenarios(plan, progress, task, ready)
        _wait_for_needs(plan, batch, task, ready)
        if role == RECV:
            _receive(plan, batch, progress, task, ready)
            continue
        _draw_seconds(plan, draws, batch, task, seconds)
        if role == SEND and plan.rendezvous:
            _wait_for_stream(plan, progress, plan.pair[task], ready)
        if len(plan.group) and plan.group[task] >= 0:
            group = plan.group[task]
            if group_start[group, 0] < 0.0:  # the first member
                for i in range(plan.members_ptr[group], plan.members_ptr[group + 1]):
                    _wait_for_stream(plan, progress, plan.members[i], ready)
                    _wait_for_needs(plan, batch, plan.members[i], ready)
                _copy(ready, group_start[group])
                if len(progress.link_free):
                    _group_end(plan, draws, batch, group, ready, finish)
                    _hold_group_links_of_scenarios(plan, batch, progress, group, ready, finish)
            _copy(group_start[group], ready)
        if role == SEND or len(batch.lasted):
            _copy(ready, batch.start[task & last])
        if len(batch.lasted):
            _copy(seconds, batch.lasted[task & last])
        for k in range(n):
            batch.end[task & last, k] = ready[k] + seconds[k]
            stream_free[stream, k] = batch.end[task & last, k]
        if role & HOLDS and plan.asks[plan.row[task]]:
            _hold_links_of_scenarios(plan, batch, progress, task, ready, seconds)
    for stream in range(plan.n_streams):
        for k in range(n):
            batch.makespan[k] = max(batch.makespan[k], stream_free[stream, k])

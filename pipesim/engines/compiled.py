"""The fast engine: the rules of docs/time.md as loops over arrays, compiled by numba.

Where no transfer waits for a link, every time follows from times of smaller ids: one pass in order
of ids suffices (`_pass`), which gives up when two transfers meet on a link. Then transfers ask for
their links in order of time: `_events` lets each stream walk until it meets a shared link, and
serves the earliest request of all when none can walk on. Times are made by ``max`` and ``+``
alone, so that engines agree exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs import TaskCosts
from pipesim.csr import Ints
from pipesim.draws import look_up, mixed, shares
from pipesim.graph import TaskGraph
from pipesim.jit import kernel
from pipesim.noise import Noise
from pipesim.ops import RECVS, SENDS

__all__ = ["Many", "run"]

Floats = NDArray[np.float64]
_SEND, _RECV = 1, 2
#: Scenarios that are simulated side by side.
LANES = 32


class Plan(NamedTuple):
    """What the loops read of a graph and its costs, whatever the durations.

    Attributes
    ----------
    kind, stream, role
        Kind of each task; stream of each kind, and whether it is a SEND (1), a RECV (2) or not.
    row, latency
        Row of costs of each task; latency of each row.
    needs_ptr, needs, pair
        Dependencies and partners.
    issued
        When each task has been issued (rule 7); empty where that costs nothing.
    group, members_ptr, members
        Collective of each task, empty where there is none; and the members of each.
    rendezvous
        Rule 6.
    n_streams
        Number of streams.
    links, asks
        Links of each row that several streams share, numbered from 0, or -1; and whether it has
        any.
    """

    kind: Ints
    stream: Ints
    role: Ints
    row: Ints
    latency: Floats
    needs_ptr: Ints
    needs: Ints
    pair: Ints
    issued: Floats
    group: Ints
    members_ptr: Ints
    members: Ints
    rendezvous: bool
    n_streams: int
    links: Ints
    asks: NDArray[np.bool_]

    @property
    def n_links(self) -> int:
        """Number of links that several streams share."""
        return int(self.links.max(initial=-1)) + 1


def run(graph: TaskGraph, costs: TaskCosts) -> tuple[Floats, Floats]:
    """Return start and end of each task, in seconds."""
    start, end = np.empty(len(graph)), np.empty(len(graph))
    plan = planned(graph, costs)
    drawn = np.empty(0) if costs.drawn is None else costs.drawn
    if not _pass(*plan, costs.table.duration, drawn, np.zeros(plan.n_links), start, end):
        run_events(graph, plan, costs.table.duration, drawn, start, end)
    return start, end


class Many:
    """Scenarios of noise on one graph, ready to run in any number and on any thread.

    ``costs`` have the constant factors of `Noise.slowed` in them already.
    """

    def __init__(self, graph: TaskGraph, costs: TaskCosts, noise: Noise) -> None:
        self.graph, self.costs, self.noise = graph, costs, noise
        self.prepared = noise.prepare(graph)
        self.plan = planned(graph, costs)
        ptr, needs = np.zeros_like(self.plan.needs_ptr), np.empty_like(self.plan.needs)
        reach = _prune(*self.plan, ptr, needs)
        self.pruned = self.plan._replace(needs_ptr=ptr, needs=needs)
        self.window = 1 << int(reach).bit_length()
        _pass_many.compile()  # its 64-bit arithmetic wraps round, which Python's does not

    def nbytes(self, n_scenarios: int) -> int:
        """Return bytes of the times that a call with so many scenarios holds at once."""
        one_by_one = 24 * len(self.graph) if self.plan.n_links else 0  # where transfers met
        return 16 * self.window * n_scenarios + one_by_one

    def __call__(self, scenarios: Sequence[int]) -> tuple[Floats, Floats]:
        """Return makespan (s), and seconds that all devices compute, of each scenario."""
        n, seconds = len(scenarios), self.costs.table.duration
        makespan, busy, met = np.zeros(n), np.zeros(n), np.zeros(n, dtype=bool)
        times = np.empty((2, self.window, n))
        _pass_many(
            *self.pruned,
            seconds,
            *self.prepared,
            self.noise.device_factors(self.graph.n_devices, scenarios),
            self.noise.keys(scenarios),
            times[0],
            times[1],
            makespan,
            busy,
            met,
        )
        for k in np.flatnonzero(met).tolist():
            drawn = self.noise.draw(self.graph, self.costs, scenarios[k])
            start, end = np.empty(len(self.graph)), np.empty(len(self.graph))
            run_events(self.graph, self.plan, seconds, drawn, start, end)
            makespan[k] = end.max()
        return makespan, busy


def planned(graph: TaskGraph, costs: TaskCosts) -> Plan:
    """Return the arrays that the loops read."""
    role = _SEND * graph.kinds.is_op(SENDS) + _RECV * graph.kinds.is_op(RECVS)
    collectives, links = graph.collectives, shared_links(graph, costs)
    issued = np.empty(0)
    if costs.table.launch.any():
        issued = np.empty(len(graph))
        host = graph.host[graph.kinds.device]
        _issue(graph.kind, host, costs.row, costs.table.launch, np.zeros(host.max() + 1), issued)
    return Plan(
        kind=graph.kind,
        stream=graph.stream_of_kind,
        role=role.astype(np.int8),
        row=costs.row,
        latency=costs.table.latency,
        needs_ptr=graph.dependencies.ptr,
        needs=graph.dependencies.values,
        pair=graph.pair,
        issued=issued,
        group=graph.group if len(collectives) else np.empty(0, np.int32),
        members_ptr=collectives.ptr.astype(np.int64),
        members=collectives.values.astype(np.int64),
        rendezvous=graph.rendezvous,
        n_streams=len(graph.streams),
        links=links,
        asks=links.max(axis=1) >= 0,
    )


def shared_links(graph: TaskGraph, costs: TaskCosts) -> Ints:
    """Return the links of each row that several streams share, numbered from 0; -1 for none.

    A stream's own transfers never meet on a link, because they hold their stream as long.
    """
    none = np.full((len(costs.table.duration), 1), -1, dtype=np.int64)
    sends = np.flatnonzero(graph.kinds.is_op(SENDS))
    if costs.row is graph.kind:
        rows, streams = sends, graph.stream_of_kind[sends]
    else:
        of = np.flatnonzero(graph.is_op(SENDS))
        rows, streams = costs.row[of], graph.stream_of_kind[graph.kind[of]]
    links = costs.table.links[rows]
    if not (links >= 0).any():
        return none
    rows, streams = (np.repeat(x, links.shape[1])[links.ravel() >= 0] for x in (rows, streams))
    used, number = np.unique(links[links >= 0], return_inverse=True)
    users = np.unique(np.stack([number, streams]), axis=1)[0]
    is_shared = np.bincount(users, minlength=len(used)) > 1
    if not is_shared.any():
        return none
    place = np.minimum(np.searchsorted(used, costs.table.links), len(used) - 1)
    found = (used[place] == costs.table.links) & is_shared[place]
    return np.where(found, (np.cumsum(is_shared) - 1)[place], -1)


def run_events(
    graph: TaskGraph, plan: Plan, duration: Floats, drawn: Floats, start: Floats, end: Floats
) -> None:
    """Fill start and end where transfers wait for links."""
    end.fill(-1.0)
    queues = graph.queues
    free = np.zeros(plan.n_links)
    _events(*plan, duration, drawn, queues.ptr, queues.values, free, start, end)


@kernel()
def _issue(
    kind: Ints, host: Ints, row: Ints, launch: Floats, clock: Floats, issued: Floats
) -> None:
    """Fill ``issued``: each host issues its tasks in order of ids (rule 7)."""
    for task in range(len(kind)):
        by = host[kind[task]]
        clock[by] += launch[row[task]]
        issued[task] = clock[by]


@kernel()
def _pass(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    issued: Floats,
    group: Ints,
    members_ptr: Ints,
    members: Ints,
    rendezvous: bool,
    n_streams: int,
    links: Ints,
    asks: NDArray[np.bool_],
    duration: Floats,
    drawn: Floats,
    link_free: Floats,
    start: Floats,
    end: Floats,
) -> bool:
    """Fill start and end in order of ids; return False if two transfers met on a link."""
    free = np.zeros(n_streams)  # when each stream has ended its last task
    together = np.full(len(members_ptr) - 1, -1.0)  # when each collective starts
    for task in range(len(kind)):
        of = kind[task]
        on = stream[of]
        reached = free[on]
        if len(issued):
            reached = max(reached, issued[task])
        for k in range(needs_ptr[task], needs_ptr[task + 1]):
            reached = max(reached, end[needs[k]])
        seconds = drawn[task] if len(drawn) else duration[row[task]]
        if role[of] == 2:  # RECV: head and tail arrive a latency after they leave (rule 4)
            late = latency[row[task]]
            start[task] = max(reached, start[pair[task]] + late)
            end[task] = max(start[task], end[pair[task]] + late)
            free[on] = end[task]
            continue
        if role[of] == 1 and rendezvous:
            other = pair[task]
            reached = max(reached, free[stream[kind[other]]])
            if len(issued):
                reached = max(reached, issued[other])
        if len(group) and group[task] >= 0:
            number = group[task]
            if together[number] < 0.0:  # the first member: what all wait for has run
                for j in range(members_ptr[number], members_ptr[number + 1]):
                    member = members[j]
                    reached = max(reached, free[stream[kind[member]]])
                    if len(issued):
                        reached = max(reached, issued[member])
                    for k in range(needs_ptr[member], needs_ptr[member + 1]):
                        reached = max(reached, end[needs[k]])
                together[number] = reached
            reached = together[number]
        start[task] = reached
        end[task] = reached + seconds
        free[on] = end[task]
        if role[of] == 1 and asks[row[task]] and seconds > 0.0:
            for k in range(links.shape[1]):
                link = links[row[task], k]
                if link >= 0 and reached < link_free[link]:
                    return False
                if link >= 0:
                    link_free[link] = end[task]
    return True


def _push(times: Floats, tasks: Ints, size: int, time: float, task: int) -> None:
    """Add a request to a binary heap of ``size`` entries, ordered by time, then task."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if times[above] < time or (times[above] == time and tasks[above] < task):
            break
        times[at], tasks[at] = times[above], tasks[above]
        at = above
    times[at], tasks[at] = time, task


def _pop(times: Floats, tasks: Ints, size: int) -> None:
    """Take the first of ``size`` requests off the heap."""
    size -= 1
    time, task = times[size], tasks[size]
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        right = below + 1
        if right < size and (
            times[right] < times[below]
            or (times[right] == times[below] and tasks[right] < tasks[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and task < tasks[below]):
            break
        times[at], tasks[at] = times[below], tasks[below]
        at = below
    times[at], tasks[at] = time, task


def _wake(waiting: Ints, next_waiting: Ints, of: int, todo: Ints, n_todo: int) -> int:
    """Move the streams that wait for ``of`` to ``todo``; return how many are there now."""
    stream = waiting[of]
    waiting[of] = -1
    while stream >= 0:
        todo[n_todo] = stream
        n_todo += 1
        stream = next_waiting[stream]
    return n_todo


@kernel(_push, _pop, _wake)
def _events(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    issued: Floats,
    group: Ints,
    members_ptr: Ints,
    members: Ints,
    rendezvous: bool,
    n_streams: int,
    links: Ints,
    asks: NDArray[np.bool_],
    duration: Floats,
    drawn: Floats,
    queue_ptr: Ints,
    queue: Ints,
    link_free: Floats,
    start: Floats,
    end: Floats,
) -> None:
    """Fill start and end (comes in as -1), streams walking and links serving in turn.

    A stream that meets an unfinished task is listed with it, and walks on when it is finished. A
    stream that meets a shared link (``asks``) puts its request on a heap. When no stream can walk,
    no request earlier than the first on the heap can come any more, so that one is served (rule
    8). Long, because calls would cost as much as what they do.
    """
    n_tasks, n_groups = len(kind), len(members_ptr) - 1
    cursor = queue_ptr[:-1].copy()
    free = np.zeros(n_streams)
    waiting = np.full(n_tasks + n_groups, -1, np.int32)  # first stream that waits for a task
    next_waiting = np.full(n_streams, -1, np.int32)
    arrived, together = np.zeros(n_groups, np.int64), np.zeros(n_groups)
    joined = np.zeros(n_streams, np.bool_)  # whether the stream's head is among the arrived
    times, requests, n_requests = np.empty(n_streams), np.empty(n_streams, np.int64), 0
    todo, n_todo = np.arange(n_streams), n_streams
    while n_todo > 0 or n_requests > 0:
        served = -1
        begin = 0.0
        if n_todo > 0:
            n_todo -= 1
            on = todo[n_todo]
        else:
            served, begin = requests[0], times[0]
            _pop(times, requests, n_requests)
            n_requests -= 1
            on = stream[kind[served]]
        while cursor[on] < queue_ptr[on + 1]:
            task = queue[cursor[on]]
            of, at, blocker = kind[task], row[task], -1
            if task != served:
                begin = free[on]
                for k in range(needs_ptr[task], needs_ptr[task + 1]):
                    ended = end[needs[k]]
                    if ended < 0.0:
                        blocker = needs[k]
                        break
                    begin = max(begin, ended)
                if blocker < 0 and role[of] == 2 and end[pair[task]] < 0.0:
                    blocker = pair[task]
                if blocker < 0 and role[of] == 1 and rendezvous:
                    other = pair[task]
                    there = stream[kind[other]]
                    if cursor[there] >= queue_ptr[there + 1] or queue[cursor[there]] != other:
                        blocker = other
                    begin = max(begin, free[there])
                    if len(issued):
                        begin = max(begin, issued[other])
                if blocker >= 0:
                    next_waiting[on] = waiting[blocker]
                    waiting[blocker] = on
                    break
                if len(issued):
                    begin = max(begin, issued[task])
            seconds = drawn[task] if len(drawn) else duration[at]
            finish = 0.0
            if role[of] == 2:  # RECV: head and tail arrive a latency after they leave (rule 4)
                begin = max(begin, start[pair[task]] + latency[at])
                finish = max(begin, end[pair[task]] + latency[at])
            elif role[of] == 1 and asks[at] and seconds > 0.0:
                if task != served:
                    _push(times, requests, n_requests, begin, task)
                    n_requests += 1
                    break
                for k in range(links.shape[1]):
                    if links[at, k] >= 0:
                        begin = max(begin, link_free[links[at, k]])
                finish = begin + seconds
                for k in range(links.shape[1]):
                    if links[at, k] >= 0:
                        link_free[links[at, k]] = finish
            else:
                if len(group) and group[task] >= 0:
                    number = group[task]
                    together[number] = max(together[number], begin)
                    begin = together[number]
                    if not joined[on]:
                        joined[on] = True
                        arrived[number] += 1
                    if arrived[number] < members_ptr[number + 1] - members_ptr[number]:
                        next_waiting[on] = waiting[n_tasks + number]
                        waiting[n_tasks + number] = on
                        break
                finish = begin + seconds
            start[task] = begin
            end[task] = free[on] = finish
            cursor[on] += 1
            if waiting[task] >= 0:
                n_todo = _wake(waiting, next_waiting, task, todo, n_todo)
            if len(group) and group[task] >= 0:
                joined[on] = False
                n_todo = _wake(waiting, next_waiting, n_tasks + group[task], todo, n_todo)
            if rendezvous and cursor[on] < queue_ptr[on + 1]:  # who waits for the next head
                n_todo = _wake(waiting, next_waiting, queue[cursor[on]], todo, n_todo)


@kernel()
def _prune(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    issued: Floats,
    group: Ints,
    members_ptr: Ints,
    members: Ints,
    rendezvous: bool,
    n_streams: int,
    links: Ints,
    asks: NDArray[np.bool_],
    kept_ptr: Ints,
    kept: Ints,
) -> int:
    """Keep the last need on each other stream, since the streams' own order says the rest.

    Returns how many ids a task looks back at most.
    """
    total, reach = 0, 1
    for task in range(len(kind)):
        last = stream[kind[task]]
        first = total
        for k in range(needs_ptr[task], needs_ptr[task + 1]):
            other = stream[kind[needs[k]]]
            if other == last and total > first:  # another of the same stream: the later one counts
                kept[total - 1] = max(kept[total - 1], needs[k])
            elif other != stream[kind[task]]:
                kept[total] = needs[k]
                total += 1
                last = other
        kept_ptr[task + 1] = total
        for k in range(first, total):
            reach = max(reach, task - kept[k])
        if role[kind[task]] == 2:
            reach = max(reach, task - pair[task])
    return reach


@kernel(mixed, look_up, shares)
def _pass_many(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    issued: Floats,
    group: Ints,
    members_ptr: Ints,
    members: Ints,
    rendezvous: bool,
    n_streams: int,
    links: Ints,
    asks: NDArray[np.bool_],
    duration: Floats,
    tables: Floats,
    which: Ints,
    computes: NDArray[np.bool_],
    device: Ints,
    hit_every: float,
    pause: float,
    of_device: Floats,
    keys: NDArray[np.uint64],
    start: Floats,
    end: Floats,
    makespan: Floats,
    busy: Floats,
    met: NDArray[np.bool_],
) -> None:
    """Do what `_pass` does for several scenarios at once, drawing each task's seconds.

    ``start`` (used for SENDs) and ``end`` have a column a scenario, and as many rows as ids that
    a task may have to look back: each row serves in turn. Adds to ``makespan`` and ``busy``
    (seconds that all devices compute), which come in as zeros. Marks the scenarios in which two
    transfers ``met`` on a link, where the other results are wrong.
    """
    last = len(end) - 1  # a power of two, less 1
    n = len(makespan)
    free = np.zeros((n_streams, n))
    link_free = np.zeros((links.max() + 1, n))
    together = np.full((len(members_ptr) - 1, n), -1.0)
    reached, seconds = np.empty(n), np.empty(n)
    for task in range(len(kind)):
        of = kind[task]
        on = stream[of]
        base = duration[row[task]]
        if computes[of]:
            for k in range(n):
                seconds[k] = base * of_device[k, device[of]]
        else:
            for k in range(n):
                seconds[k] = base
        if which[of] >= 0:
            table, draw = tables[which[of]], np.uint64(task)
            if len(group) and group[task] >= 0:  # members of a collective last equally long
                draw = np.uint64(members[members_ptr[group[task]]])
            for k in range(n):
                seconds[k] = seconds[k] * look_up(table, mixed(keys[k, 0], draw))
        if computes[of]:
            if hit_every > 0.0:
                for k in range(n):
                    share = shares(mixed(keys[k, 2], np.uint64(task)))
                    if share * hit_every < seconds[k]:
                        seconds[k] = seconds[k] + pause
            for k in range(n):
                busy[k] += seconds[k]
        at = issued[task] if len(issued) else 0.0
        for k in range(n):
            reached[k] = max(free[on, k], at)
        for j in range(needs_ptr[task], needs_ptr[task + 1]):
            needed = needs[j] & last
            for k in range(n):
                reached[k] = max(reached[k], end[needed, k])
        if role[of] == 2:
            late, other = latency[row[task]], pair[task] & last
            for k in range(n):
                first = max(reached[k], start[other, k] + late)
                end[task & last, k] = max(first, end[other, k] + late)
                free[on, k] = end[task & last, k]
            continue
        if role[of] == 1 and rendezvous:
            there = stream[kind[pair[task]]]
            at = issued[pair[task]] if len(issued) else 0.0
            for k in range(n):
                reached[k] = max(max(reached[k], free[there, k]), at)
        if len(group) and group[task] >= 0:
            number = group[task]
            if together[number, 0] < 0.0:
                for i in range(members_ptr[number], members_ptr[number + 1]):
                    member = members[i]
                    there = stream[kind[member]]
                    at = issued[member] if len(issued) else 0.0
                    for k in range(n):
                        reached[k] = max(max(reached[k], free[there, k]), at)
                    for j in range(needs_ptr[member], needs_ptr[member + 1]):
                        needed = needs[j] & last
                        for k in range(n):
                            reached[k] = max(reached[k], end[needed, k])
                for k in range(n):
                    together[number, k] = reached[k]
            for k in range(n):
                reached[k] = together[number, k]
        if role[of] == 1:
            for k in range(n):
                start[task & last, k] = reached[k]
        for k in range(n):
            end[task & last, k] = reached[k] + seconds[k]
            free[on, k] = end[task & last, k]
        if role[of] == 1 and asks[row[task]]:
            for j in range(links.shape[1]):
                link = links[row[task], j]
                if link < 0:
                    continue
                for k in range(n):
                    if seconds[k] > 0.0:
                        if reached[k] < link_free[link, k]:
                            met[k] = True
                        link_free[link, k] = free[on, k]
    for on in range(n_streams):
        for k in range(n):
            makespan[k] = max(makespan[k], free[on, k])

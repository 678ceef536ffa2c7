"""The compiled engine's pass in order of ids for several scenarios at once.

It does for each what `by_ids.one_pass` does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.simulation.engines import RECV, SEND
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel
from pipesim.utils.random_draws import OF_FAILURES, OF_TASKS, look_up, mixed, shares

__all__ = ["pass_many", "prune"]

Floats = NDArray[np.float64]


@kernel()
def prune(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    during: Ints,
    share: Floats,
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

    What a task needs a part of (``during``) is not among them.

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
        if role[kind[task]] == RECV:
            reach = max(reach, task - pair[task])
        if len(during) and during[task] >= 0:
            reach = max(reach, task - during[task])
    return reach


def _hold(
    first: int,
    last: int,
    members: Ints,
    row: Ints,
    links: Ints,
    begin: Floats,
    until: Floats,
    link_free: Floats,
    met: NDArray[np.bool_],
) -> None:
    """Let a collective hold its links in each scenario; mark those in which one is not free."""
    for j in range(first, last):
        for i in range(links.shape[1]):
            link = links[row[members[j]], i]
            for k in range(len(begin) if link >= 0 else 0):
                if begin[k] < until[k] and begin[k] < link_free[link, k]:
                    met[k] = True
    for j in range(first, last):
        for i in range(links.shape[1]):
            link = links[row[members[j]], i]
            for k in range(len(begin) if link >= 0 else 0):
                if begin[k] < until[k]:
                    link_free[link, k] = until[k]


@kernel(mixed, look_up, shares, _hold)
def pass_many(
    kind: Ints,
    stream: Ints,
    role: Ints,
    row: Ints,
    latency: Floats,
    needs_ptr: Ints,
    needs: Ints,
    pair: Ints,
    during: Ints,
    share: Floats,
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
    lasted: Floats,
    makespan: Floats,
    busy: Floats,
    met: NDArray[np.bool_],
) -> None:
    """Do what `one_pass` does for several scenarios at once, drawing each task's seconds.

    ``start`` (used for SENDs) and ``end`` have a column a scenario, and as many rows as ids that
    a task may have to look back: each row serves in turn. So has ``lasted``, the seconds of tasks,
    where some need a part of another (then ``start`` is used for all); else it is empty. Adds to
    ``makespan`` and ``busy`` (seconds that all devices compute), which come in as zeros. Marks the
    scenarios in which two ``met`` on a link, where the other results are wrong.
    """
    last = len(end) - 1  # a power of two, less 1
    n = len(makespan)
    free = np.zeros((n_streams, n))
    link_free = np.zeros((links.max() + 1, n))
    together = np.full((len(members_ptr) - 1, n), -1.0)
    reached, seconds, until = np.empty(n), np.empty(n), np.empty(n)
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
                seconds[k] = seconds[k] * look_up(table, mixed(keys[k, OF_TASKS], draw))
        if computes[of]:
            if hit_every > 0.0:
                for k in range(n):
                    level = shares(mixed(keys[k, OF_FAILURES], np.uint64(task)))
                    if level * hit_every < seconds[k]:
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
        if len(during) and during[task] >= 0:
            needed, part = during[task] & last, share[row[task]]
            for k in range(n):
                reached[k] = max(reached[k], start[needed, k] + part * lasted[needed, k])
        if role[of] == RECV:
            late, other = latency[row[task]], pair[task] & last
            for k in range(n):
                head = max(reached[k], start[other, k] + late)
                end[task & last, k] = max(head, end[other, k] + late)
                free[on, k] = end[task & last, k]
            continue
        if role[of] == SEND and rendezvous:
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
                    if len(during) and during[member] >= 0:
                        needed, part = during[member] & last, share[row[member]]
                        for k in range(n):
                            made = start[needed, k] + part * lasted[needed, k]
                            reached[k] = max(reached[k], made)
                for k in range(n):
                    together[number, k] = reached[k]
                if len(link_free):
                    first, past = members_ptr[number], members_ptr[number + 1]
                    base = 0.0  # of the member that lasts longest
                    for i in range(first, past):
                        base = max(base, duration[row[members[i]]])
                    for k in range(n):
                        until[k] = base
                    if which[of] >= 0:
                        table, draw = tables[which[of]], np.uint64(members[first])
                        for k in range(n):
                            until[k] = base * look_up(table, mixed(keys[k, OF_TASKS], draw))
                    for k in range(n):
                        until[k] = reached[k] + until[k]
                    _hold(first, past, members, row, links, reached, until, link_free, met)
            for k in range(n):
                reached[k] = together[number, k]
        if role[of] == SEND or len(lasted):
            for k in range(n):
                start[task & last, k] = reached[k]
        for k in range(n if len(lasted) else 0):
            lasted[task & last, k] = seconds[k]
        for k in range(n):
            end[task & last, k] = reached[k] + seconds[k]
            free[on, k] = end[task & last, k]
        if role[of] == SEND and asks[row[task]]:
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

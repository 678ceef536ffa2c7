"""Loops of the compiled engine: one pass in order of ids, for one scenario or several at once.

Where no transfer waits for a link, every time follows from times of smaller ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.csr import Ints
from pipesim.draws import OF_FAILURES, OF_TASKS, look_up, mixed, shares
from pipesim.engines import RECV, SEND
from pipesim.jit import kernel

__all__ = ["issue", "one_pass", "pass_many", "prune"]

Floats = NDArray[np.float64]


@kernel()
def issue(kind: Ints, host: Ints, row: Ints, launch: Floats, clock: Floats, issued: Floats) -> None:
    """Fill ``issued``: each host issues its tasks in order of ids (rule 7)."""
    for task in range(len(kind)):
        by = host[kind[task]]
        clock[by] += launch[row[task]]
        issued[task] = clock[by]


@kernel()
def one_pass(
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
        if role[of] == RECV:  # RECV: head and tail arrive a latency after they leave (rule 4)
            late = latency[row[task]]
            start[task] = max(reached, start[pair[task]] + late)
            end[task] = max(start[task], end[pair[task]] + late)
            free[on] = end[task]
            continue
        if role[of] == SEND and rendezvous:
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
        if role[of] == SEND and asks[row[task]] and seconds > 0.0:
            for k in range(links.shape[1]):
                link = links[row[task], k]
                if link >= 0 and reached < link_free[link]:
                    return False
                if link >= 0:
                    link_free[link] = end[task]
    return True


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
        if role[kind[task]] == RECV:
            reach = max(reach, task - pair[task])
    return reach


@kernel(mixed, look_up, shares)
def pass_many(
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
    """Do what `one_pass` does for several scenarios at once, drawing each task's seconds.

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
                seconds[k] = seconds[k] * look_up(table, mixed(keys[k, OF_TASKS], draw))
        if computes[of]:
            if hit_every > 0.0:
                for k in range(n):
                    share = shares(mixed(keys[k, OF_FAILURES], np.uint64(task)))
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
        if role[of] == RECV:
            late, other = latency[row[task]], pair[task] & last
            for k in range(n):
                first = max(reached[k], start[other, k] + late)
                end[task & last, k] = max(first, end[other, k] + late)
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
                for k in range(n):
                    together[number, k] = reached[k]
            for k in range(n):
                reached[k] = together[number, k]
        if role[of] == SEND:
            for k in range(n):
                start[task & last, k] = reached[k]
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

"""The compiled engine's pass in order of ids.

Where nobody waits for a link, every time follows from times of smaller ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.simulation.engines import RECV, SEND
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["issue", "made", "one_pass"]

Floats = NDArray[np.float64]


@kernel()
def issue(
    kind: Ints,
    host: Ints,
    row: Ints,
    launch: Floats,
    first_ptr: Ints,
    first: Ints,
    clock: Floats,
    issued: Floats,
) -> None:
    """Fill ``issued``: each host issues its tasks in order of ids (rule 7).

    ``first`` are those that other hosts have to issue before each; none where ``first_ptr`` is
    empty.
    """
    for task in range(len(kind)):
        by = host[kind[task]]
        for k in range(first_ptr[task], first_ptr[task + 1]) if len(first_ptr) else range(0):
            clock[by] = max(clock[by], issued[first[k]])
        clock[by] += launch[row[task]]
        issued[task] = clock[by]


def _hold(
    first: int,
    last: int,
    members: Ints,
    row: Ints,
    links: Ints,
    duration: Floats,
    drawn: Floats,
    begin: float,
    link_free: Floats,
) -> bool:
    """Let a collective hold its links, ``members[first:last]``; return False if one is not free."""
    longest = 0.0
    for j in range(first, last):
        member = members[j]
        longest = max(longest, drawn[member] if len(drawn) else duration[row[member]])
    if longest == 0.0:
        return True
    for j in range(first, last):
        for k in range(links.shape[1]):
            link = links[row[members[j]], k]
            if link >= 0 and begin < link_free[link]:
                return False
    for j in range(first, last):
        for k in range(links.shape[1]):
            link = links[row[members[j]], k]
            if link >= 0:
                link_free[link] = begin + longest
    return True


def made(
    task: int,
    during: Ints,
    share: Floats,
    row: Ints,
    duration: Floats,
    drawn: Floats,
    start: Floats,
) -> float:
    """Return when the backward that ``task`` needs a part of has got so far."""
    before = during[task]
    seconds = drawn[before] if len(drawn) else duration[row[before]]
    return float(start[before] + share[row[task]] * seconds)


@kernel(_hold, made)
def one_pass(
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
    drawn: Floats,
    link_free: Floats,
    start: Floats,
    end: Floats,
) -> bool:
    """Fill start and end in order of ids; return False if two met on a link."""
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
        if len(during) and during[task] >= 0:
            reached = max(reached, made(task, during, share, row, duration, drawn, start))
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
                    if len(during) and during[member] >= 0:
                        done = made(member, during, share, row, duration, drawn, start)
                        reached = max(reached, done)
                together[number] = reached
                held = members_ptr[number], members_ptr[number + 1], members, row, links
                if not _hold(*held, duration, drawn, reached, link_free):
                    return False
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

"""How many more bytes a device may take, so that no micro-batch gets stuck.

Devices that wait for each other's room could wait forever. So a device takes bytes only if it
could then still finish its micro-batches one after the other, in their order, each with all bytes
that it needs here (the banker's algorithm: Dijkstra, EWD 108). Thus the oldest micro-batch that has
not passed the whole pipeline finds room on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.problem import Problem
from pipesim.utils.csr import Ints

__all__ = ["HeldBytes", "could_have_room", "count_backward", "count_forward", "has_room",
           "is_safe", "new_held_bytes"]  # fmt: skip

Floats = NDArray[np.float64]
#: Share of a limit by which sums of bytes may exceed it, since sums of floats are rounded.
_ROUNDING = 1e-9


class HeldBytes(NamedTuple):
    """Bytes that devices hold. A row is a micro-batch on a device: ``device * n + microbatch``.

    Attributes
    ----------
    limit
        Bytes that each device may hold.
    needed, n_chunks
        Bytes that a micro-batch needs on a device at the same time, and number of its stages
        there. One number for each device and path: entry ``device * n_paths + path``.
    most_needed
        Largest entry of ``needed`` of each device.
    held, held_for_w
        Bytes that each device holds until I or B, and until W. A W can run whenever its room is
        needed.
    row_held, to_come
        Bytes that each micro-batch holds until I or B, and bytes that it will still take.
    backwards
        Backwards that each micro-batch has still to run on the device; -1 before its first F.
    next_to_start, started_end, oldest
        Numbers of micro-batches on a path: the first one that has not started on a device; one
        more than the last one that has; no more than the first one in progress. Entries as in
        ``needed``.
    """

    limit: Floats
    needed: Floats
    n_chunks: Ints
    most_needed: Floats
    held: Floats
    held_for_w: Floats
    row_held: Floats
    to_come: Floats
    backwards: Ints
    next_to_start: Ints
    started_end: Ints
    oldest: Ints


def new_held_bytes(problem: Problem) -> HeldBytes:
    """Return the bytes of devices that have not started."""
    shape = problem.n_devices, problem.n_paths
    n_rows = problem.n_devices * problem.n_microbatches
    needed, n_chunks = np.zeros(shape), np.zeros(shape, int)
    stage, path = np.divmod(np.arange(len(problem.home)), problem.n_paths)
    np.add.at(needed, (problem.home, path), problem.f_bytes[stage])
    np.add.at(n_chunks, (problem.home, path), 1)
    return HeldBytes(
        limit=problem.limits * (1 + _ROUNDING),
        needed=needed.ravel(),
        n_chunks=n_chunks.ravel(),
        most_needed=needed.max(axis=1),
        held=np.zeros(problem.n_devices),
        held_for_w=np.zeros(problem.n_devices),
        row_held=np.zeros(n_rows),
        to_come=np.repeat(needed, problem.n_of_path, axis=1).ravel(),
        backwards=np.full(n_rows, -1),
        next_to_start=np.zeros(needed.size, int),
        started_end=np.zeros(needed.size, int),
        oldest=np.zeros(needed.size, int),
    )


def has_room(memory: HeldBytes, device: int, nbytes: float) -> bool:
    """Return whether there is room now."""
    return bool(memory.held[device] + memory.held_for_w[device] + nbytes <= memory.limit[device])


def could_have_room(memory: HeldBytes, device: int, nbytes: float) -> bool:
    """Return whether there is room once every W that can run has run."""
    return bool(memory.held[device] + nbytes <= memory.limit[device])


def is_safe(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float
) -> bool:
    """Return whether all micro-batches can still finish after this one takes ``nbytes``."""
    limit = memory.limit[device]
    if memory.held[device] + nbytes + memory.most_needed[device] <= limit:
        return True
    held_by_later = 0.0
    for other in range(problem.n_paths - 1, -1, -1):
        entry = device * problem.n_paths + other
        row = device * problem.n_microbatches + problem.first[other]
        end = problem.n_of_path[other]
        taker = microbatch if other == path else -1
        following = memory.next_to_start[entry]
        while following < end and (
            following == taker or memory.backwards[row + following] >= 0
        ):  # fmt: skip
            following += 1
        last = max(memory.started_end[entry] - 1, taker, following if following < end else -1)
        for number in range(last, memory.oldest[entry] - 1, -1):
            in_progress = memory.backwards[row + number] > 0
            if not (in_progress or number in (taker, following)):
                continue
            held, to_come = memory.row_held[row + number], memory.to_come[row + number]
            if number == taker:
                held, to_come = held + nbytes, to_come - nbytes
            held_by_later += held
            if held_by_later + to_come > limit:
                return False
    return True


def count_forward(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float
) -> None:
    """Count an F, which takes ``nbytes``."""
    entry = device * problem.n_paths + path
    first = device * problem.n_microbatches + problem.first[path]
    row = first + microbatch
    memory.held[device] += nbytes
    memory.row_held[row] += nbytes
    memory.to_come[row] -= nbytes
    if memory.backwards[row] >= 0:
        return
    memory.backwards[row] = memory.n_chunks[entry]
    memory.started_end[entry] = max(memory.started_end[entry], microbatch + 1)
    following = memory.next_to_start[entry]
    while following < problem.n_of_path[path] and memory.backwards[first + following] >= 0:
        following += 1
    memory.next_to_start[entry] = following


def count_backward(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float,
    w_bytes: float,
) -> None:  # fmt: skip
    """Count an I or a B, which releases ``nbytes``, except ``w_bytes`` that W needs."""
    entry = device * problem.n_paths + path
    first = device * problem.n_microbatches + problem.first[path]
    memory.held[device] -= nbytes
    memory.held_for_w[device] += w_bytes
    memory.row_held[first + microbatch] -= nbytes
    memory.backwards[first + microbatch] -= 1
    oldest, started_end = memory.oldest[entry], memory.started_end[entry]
    while oldest < started_end and memory.backwards[first + oldest] == 0:
        oldest += 1
    memory.oldest[entry] = oldest

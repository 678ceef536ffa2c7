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

Floats = NDArray[np.float64]
#: Share of a limit by which sums of bytes may exceed it, since sums of floats are rounded.
_ROUNDING = 1e-9


class HeldBytes(NamedTuple):
    """Bytes that devices hold. A row is a micro-batch on a device: ``device * n + microbatch``.

    Attributes
    ----------
    limit
        Bytes that each device may hold.
    n_chunks
        Number of stages of a path on a device: entry ``device * n_paths + path``.
    most_needed
        Most bytes that a micro-batch needs on each device at the same time.
    most_later
        Most bytes that one of a row's micro-batch and the later ones of its path needs there.
    held, held_for_w
        Bytes that each device holds until I or B, and until W. A W can run whenever its room is
        needed.
    row_held, to_come
        Bytes that each micro-batch holds until I or B, and bytes that it will still take.
    backwards
        Backwards that each micro-batch has still to run on the device; -1 before its first F.
    started_end, oldest
        Numbers of micro-batches on a path: one more than the last one that has started on a
        device; no more than the first one that has not ended there. Entries as in ``n_chunks``.
    """

    limit: Floats
    n_chunks: Ints
    most_needed: Floats
    most_later: Floats
    held: Floats
    held_for_w: Floats
    row_held: Floats
    to_come: Floats
    backwards: Ints
    started_end: Ints
    oldest: Ints


def new_held_bytes(problem: Problem) -> HeldBytes:
    """Return the bytes of devices that have not started."""
    shape = problem.n_devices, problem.n_paths
    n_rows = problem.n_devices * problem.n_microbatches
    needed, n_chunks = np.zeros((problem.n_devices, problem.n_microbatches)), np.zeros(shape, int)
    most_later = np.empty_like(needed)
    path = np.arange(len(problem.home)) % problem.n_paths
    for copy, (home, own) in enumerate(zip(problem.home, path, strict=True)):
        first = problem.first[own]
        nbytes = problem.f_bytes[problem.lane_ptr[copy] : problem.lane_ptr[copy + 1]]
        needed[home, first : first + problem.n_of_path[own]] += nbytes
    np.add.at(n_chunks, (problem.home, path), 1)
    for first, count in zip(problem.first, problem.n_of_path, strict=True):
        columns = slice(first, first + count)
        backwards = needed[:, columns][:, ::-1]
        most_later[:, columns] = np.maximum.accumulate(backwards, axis=1)[:, ::-1]
    return HeldBytes(
        limit=problem.limits * (1 + _ROUNDING),
        n_chunks=n_chunks.ravel(),
        most_needed=needed.max(axis=1),
        most_later=most_later.ravel(),
        held=np.zeros(problem.n_devices),
        held_for_w=np.zeros(problem.n_devices),
        row_held=np.zeros(n_rows),
        to_come=needed.ravel(),
        backwards=np.full(n_rows, -1),
        started_end=np.zeros(n_chunks.size, int),
        oldest=np.zeros(n_chunks.size, int),
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
        taker = microbatch if other == path else -1
        end = max(memory.started_end[entry], taker + 1)
        # Of those that have not started, behind all others: the largest one.
        if end < problem.n_of_path[other] and held_by_later + memory.most_later[row + end] > limit:
            return False
        for number in range(end - 1, memory.oldest[entry] - 1, -1):
            if memory.backwards[row + number] == 0:
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
    row = device * problem.n_microbatches + problem.first[path] + microbatch
    memory.held[device] += nbytes
    memory.row_held[row] += nbytes
    memory.to_come[row] -= nbytes
    if memory.backwards[row] >= 0:
        return
    memory.backwards[row] = memory.n_chunks[entry]
    memory.started_end[entry] = max(memory.started_end[entry], microbatch + 1)


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

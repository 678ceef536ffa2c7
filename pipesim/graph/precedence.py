"""Find the tasks that must have begun, ended or been issued before each task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.ops import RECVS, SENDS
from pipesim.scheduling.memory_checks import FEWER_TASKS
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.host_memory import check_memory

if TYPE_CHECKING:
    from pipesim.graph.graph import TaskGraph


def precedence(graph: TaskGraph) -> CSR:
    """Return `TaskGraph.precedence`."""
    rows, values = zip(*earlier_by_kind(graph).values(), strict=True)
    return CSR.from_pairs(np.concatenate(rows), np.concatenate(values), len(graph))


def earlier_by_kind(graph: TaskGraph) -> dict[str, tuple[Ints, Ints]]:
    """Return the entries of `TaskGraph.precedence` by kind.

    Each kind has two arrays: tasks, and the task that each of them waits for. Kinds are
    ``"dependency"``, ``"stream"`` (the task before it on its stream), ``"message"`` (the SEND of a
    RECV), ``"rendezvous"`` and ``"group"`` (a task that another member of its collective waits
    for).
    """
    before = graph.queue_predecessor
    queued = np.flatnonzero(before >= 0)
    recvs = np.flatnonzero(graph.is_op(RECVS) & (graph.pair >= 0))
    entries: dict[str, tuple[Ints, Ints]] = {
        "dependency": (graph.dependencies.rows, graph.dependencies.values),
        "stream": (queued, before[queued]),
        "message": (recvs, graph.pair[recvs]),
    }
    if graph.rendezvous:
        sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
        sends = sends[before[graph.pair[sends]] >= 0]
        entries["rendezvous"] = sends, before[graph.pair[sends]]
    if len(graph.collectives):
        entries["group"] = _earlier_of_groups(graph, entries)
    return entries


def _earlier_of_groups(
    graph: TaskGraph, entries: dict[str, tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Return the members of collectives, and the tasks that the other members wait for."""
    rows, values = (np.concatenate(part) for part in zip(*entries.values(), strict=True))
    own = CSR.from_pairs(rows, values, len(graph))
    sizes = np.diff(graph.collectives.ptr).astype(np.float64)
    nbytes = int(32 * (sizes**2).sum())
    check_memory("what members of collectives wait for", nbytes, FEWER_TASKS)
    later, earlier = [], []
    for number in range(len(graph.collectives)):
        members = graph.collectives[number]
        # The last task of each stream suffices, as the others are before it.
        needed = np.sort(own.gather(members))[::-1]
        needed = needed[np.unique(graph.stream[needed], return_index=True)[1]]
        later.append(np.repeat(members, len(needed)))
        earlier.append(np.tile(needed, len(members)))
    return np.concatenate(later), np.concatenate(earlier)


def issued_first(graph: TaskGraph) -> CSR:
    """Return `TaskGraph.issued_first`."""
    waits, members = graph.precedence, graph.collectives
    rows, values = [waits.rows], [waits.values]
    for number in range(len(members)):
        later, earlier = np.tril_indices(len(members[number]), -1)
        rows.append(members[number][later])
        values.append(members[number][earlier].astype(waits.values.dtype))
    row, value = np.concatenate(rows), np.concatenate(values)
    host = graph.host[graph.device]
    foreign = (host[row] != host[value]) & (value < row)  # ids of files may be in any order
    return CSR.from_pairs(row[foreign], value[foreign], len(graph))

"""The data-parallel copies of a pipeline in a graph, and the collectives that connect them.

A copy has all tasks on a set of devices that no other copy uses: those of one replica, or those of
all paths of one pipeline. `lower(n_replicas=2)` of the tasks on the left makes copies
0 and 1, which only collectives (C) connect:

    device 0 | F0 B0 C ST        device 0 | F0 B0 C ST      copy 0
                                 device 1 | F0 B0 C ST      copy 1
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.tasks import Kinds
from pipesim.ops import COLLECTIVES, IN_REPLICA, OF_DEVICES, Op, is_expert_exchange
from pipesim.utils.csr import CSR, Ints, ids_dtype

if TYPE_CHECKING:
    from pipesim.graph.graph import TaskGraph


class FirstCopy(NamedTuple):
    """The first of several copies, alone.

    Tasks keep their order; collectives have the members of this copy alone. Devices and hosts keep
    their numbers.
    """

    graph: TaskGraph
    #: The task in ``graph`` that each task of the whole graph is a copy of.
    twin: Ints


def copy_of_replicas(homes: Ints) -> Ints:
    """Return the number of the copy of each replica, in the order of replicas.

    ``homes`` are those of `TaskGraph`. Replicas with a device in common, such as the paths of a
    bidirectional pipeline, are in one copy.
    """
    own, lowest = homes.min(axis=1), np.arange(int(homes.max()) + 1)
    while (lowest[homes] != own[:, None]).any():  # devices that replicas connect get one number
        np.minimum.at(lowest, homes, own[:, None])
        own = lowest[homes].min(axis=1)
    _, first, copy = np.unique(own, return_index=True, return_inverse=True)
    order: Ints = np.argsort(np.argsort(first))
    return order[copy.ravel()]


def are_copies(labels: Ints) -> bool:
    """Return whether rows are equal except for the names of labels, and share no label.

    Labels are numbers from 0; shape ``(n_copies, n)``.

    >>> import numpy as np
    >>> are_copies(np.array([[0, 0, 1], [3, 3, 2]]))
    True
    >>> are_copies(np.array([[0, 0, 1], [3, 3, 1]]))
    False
    """
    flat = labels.ravel()
    first = np.zeros(int(flat.max(initial=-1)) + 1, dtype=np.int64)
    first[flat[::-1]] = np.arange(len(flat))[::-1]  # of equal indices, the last counts
    row, column = np.divmod(first[labels], max(1, labels.shape[1]))
    same: bool = (row == np.arange(len(labels))[:, None]).all() and (column == column[0]).all()
    return bool(same)


def copies_of_kinds(graph: TaskGraph) -> Ints | None:
    """Return the kinds of each copy in one order, shape ``(n_copies, n)``; None without copies.

    Kinds in a column differ in device, replica and stream alone. No copies share a stream.
    """
    kinds = graph.kinds
    lowest = np.full(graph.n_devices, graph.n_replicas)  # replica on each device
    np.minimum.at(lowest, kinds.device, kinds.replica)
    copy = lowest[kinds.device]
    sizes = np.bincount(copy)
    sizes = sizes[sizes > 0]
    if len(sizes) < 2 or (sizes != sizes[0]).any():
        return None
    rows = np.argsort(copy, kind="stable").reshape(len(sizes), -1)
    for column in (kinds.op, kinds.stage, kinds.overlapped, kinds.peer_stage, kinds.part):
        if (column[rows] != column[rows[0]]).any():
            return None
    replica = kinds.replica[rows] - kinds.replica[rows[0]]
    if (replica != replica[:, :1]).any() or not are_copies(graph.stream_of_kind[rows]):
        return None
    return rows


def first_copy(graph: TaskGraph) -> FirstCopy | None:
    """Return the first copy alone, or None if copies differ in their tasks.

    Copies have the same tasks in the same order. Their dependencies are then the same too, as
    `TaskGraph.of_kinds` derives them from kinds and order; a graph made in another way has no
    copies here. A collective has the same members of each copy, and in each copy the same tasks
    come before its id.
    """
    kinds = graph.copies
    if kinds is None or not graph.wired:
        return None
    n_copies = len(kinds)
    copy, column = np.empty((2, len(graph.kinds)), dtype=np.int32)
    copy[kinds], column[kinds] = np.arange(n_copies)[:, None], np.arange(kinds.shape[1])
    tasks = CSR.group(graph.kind, n_copies, copy)
    if (np.diff(tasks.ptr) != tasks.ptr[1]).any():
        return None
    ids = tasks.values.reshape(n_copies, -1)
    for values in (column[graph.kind], graph.microbatch):
        of_copies = values[ids]
        if (of_copies != of_copies[0]).any():
            return None
    twin = np.empty(len(graph), dtype=ids_dtype(len(graph)))
    twin[ids] = np.arange(ids.shape[1])
    if not _collectives_are_copies(graph, copy, ids, twin):
        return None
    return FirstCopy(_alone(graph, kinds[0], column, ids[0], twin), twin)


def _collectives_are_copies(graph: TaskGraph, copy: Ints, ids: Ints, twin: Ints) -> bool:
    """Return whether the collectives of copies are alike.

    A collective either has the same members of each copy, at the same place in it, or it is in one
    copy, and has a twin in each other copy. ``copy`` has the copy of each kind, ``ids`` the tasks
    of each copy.
    """
    members, number = graph.collectives.values, graph.collectives.rows
    of_copy = copy[graph.kind[members]]
    group = np.full(ids.shape[1], -1)
    group[twin[members[of_copy == 0]]] = number[of_copy == 0]
    in_first = group[twin[members]]  # the collective of each member's twin in the first copy
    if (in_first < 0).any() or len(members) != len(ids) * (group >= 0).sum():
        return False
    if len(members):
        begins = graph.collectives.ptr[:-1]
        alone = np.maximum.reduceat(of_copy, begins) == np.minimum.reduceat(of_copy, begins)
        is_alone = alone[number]
        if (in_first != in_first[begins][number]).any() or (is_alone != alone[in_first]).any():
            return False
        if (in_first[~is_alone] != number[~is_alone]).any():
            return False
    first = members[graph.collectives.ptr[number]]  # its id is that of the collective
    leads = (twin[members] == twin[first]) & (twin[members] > 0)
    before = ids[of_copy[leads], twin[members[leads]] - 1]
    return bool((before < first[leads]).all())


def _alone(graph: TaskGraph, kinds: Ints, column: Ints, tasks: Ints, twin: Ints) -> TaskGraph:
    """Return the graph of one copy, given its kinds and tasks."""
    streams, stream_of_kind = np.unique(graph.stream_of_kind[kinds], return_inverse=True)
    needs, members = graph.dependencies, graph.collectives
    own = np.zeros(len(graph), dtype=bool)
    own[tasks] = True
    joined = own[members.values]
    number = np.unique(members.rows[joined], return_inverse=True)[1]
    counts = (needs.ptr[tasks + 1] - needs.ptr[tasks]).astype(np.int64)
    rows = np.repeat(np.arange(len(tasks)), counts)
    pair, partial = graph.pair[tasks], graph.partial_dependency
    if len(partial):
        partial = np.where(partial[tasks] >= 0, twin[partial[tasks]], -1).astype(partial.dtype)
    return replace(
        graph,
        n_replicas=int(graph.kinds.replica[kinds].max()) + 1,
        kinds=Kinds(**{f.name: getattr(graph.kinds, f.name)[kinds] for f in fields(Kinds)}),
        kind=column[graph.kind[tasks]],
        microbatch=graph.microbatch[tasks],
        streams=tuple(graph.streams[stream] for stream in streams.tolist()),
        stream_of_kind=stream_of_kind.astype(np.int32),
        dependencies=CSR.from_pairs(rows, twin[needs.gather(tasks)], len(tasks)),
        partial_dependency=partial,
        pair=np.where(pair >= 0, twin[pair], -1).astype(pair.dtype),
        collectives=CSR.from_pairs(
            number, twin[members.values[joined]], int(number.max(initial=-1)) + 1
        ),
    )


def default_collectives(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32], expert_replicas: int = 0
) -> CSR:
    """Return the members of each collective: one for each operation, part and micro-batch.

    - Operations of devices (`OF_DEVICES`) have one for all stages, others one for each stage.
    - Operations in a replica (`IN_REPLICA`) have one for each replica, others one for all replicas.
    - Exchanges of experts have one for each ``expert_replicas`` data-parallel replicas, if these
      are not 0. The paths of a bidirectional pipeline have other micro-batches.
    """
    collective = kinds.is_op(COLLECTIVES)
    if not collective.any():
        return _numbered_members(*np.empty((2, 0), dtype=np.int64))
    members = np.flatnonzero(collective[kind])
    own = kind[members]
    number = kinds.op[own]
    stage = np.where(kinds.is_op(OF_DEVICES), 0, kinds.stage)[own]
    replica = np.where(kinds.is_op(IN_REPLICA), kinds.replica, 0)[own]
    if expert_replicas:
        of_experts = is_expert_exchange(number, kinds.part[own])
        copy = copy_of_replicas(kinds.homes)[kinds.replica[own]]
        replica = np.where(of_experts, copy // expert_replicas, replica)
    part, of_microbatch = kinds.part[own] + 1, microbatch[members].astype(np.int64) + 1
    for column in (stage, replica, part, of_microbatch):
        number = number * (int(column.max(initial=0)) + 1) + column
    return _numbered_members(members, number)


def group_members(group: Ints) -> CSR:
    """Return the members of each group, -1 for none; groups are numbered anew, in order."""
    members = np.flatnonzero(group >= 0)
    return _numbered_members(members, group[members])


def _numbered_members(members: Ints, number: Ints) -> CSR:
    """Return the members of each group, given the number of the group of each."""
    if not len(members):
        return CSR(np.zeros(1, np.int64), np.empty(0, np.int64))
    unique, number = np.unique(number, return_inverse=True)
    return CSR.from_pairs(number, members, len(unique))


def partial_dependencies(kinds: Kinds, kind: Ints, needs: CSR) -> Ints:
    """Return the last backward that each bucket of gradients needs, -1 for other tasks.

    Empty without buckets.
    """
    is_bucket = (kinds.op == Op.REDUCE_GRAD) & (kinds.part >= 0)
    if not is_bucket.any():
        return np.empty(0, dtype=np.int64)
    backward = np.full(len(kind), -1, dtype=np.int64)
    rows = needs.rows
    of_buckets = np.flatnonzero(is_bucket[kind[rows]])
    np.maximum.at(backward, rows[of_buckets], needs.values[of_buckets])
    return backward

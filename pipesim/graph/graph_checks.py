"""Check the invariants of a task graph: tasks, overlaps, collectives, messages and ids.

Each invariant is a function. `pipesim.verify` also finds tasks that wait for each other in a
circle.
"""

from __future__ import annotations

import numpy as np

from pipesim.errors import GraphError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.graph.overlaps import overlapped_pairs
from pipesim.graph.wiring import duplicate_task
from pipesim.ops import COLLECTIVES, COMPUTE, OF_DEVICES, RECVS, SENDS, Op, is_expert_exchange
from pipesim.utils.csr import Ints


def check_tasks(graph: TaskGraph) -> None:
    """Check all invariants of a graph except its ids and deadlocks.

    Raises
    ------
    GraphError
        For a wrong graph; the message has the wrong tasks.
    """
    n, kinds = len(graph), graph.kinds
    if ((graph.dependencies.values < 0) | (graph.dependencies.values >= n)).any():
        raise GraphError(f"a dependency names a task outside 0..{n - 1}")
    duplicate = duplicate_task(kinds, graph.kind, graph.microbatch, graph.n_microbatches)
    if duplicate >= 0:
        raise GraphError(f"{graph.task(duplicate)} is in the graph twice")
    homes = graph.homes[kinds.replica, kinds.stage]
    for task in np.flatnonzero((homes != kinds.device)[graph.kind]):
        raise GraphError(
            f"task {task} ({graph.task(int(task))}) is on device {graph.device[task]}, but stage "
            f"{graph.stage[task]} lies on device {homes[graph.kind[task]]} as well; a stage lies "
            "on one"
        )
    for task in np.flatnonzero(graph.is_op(COMPUTE) & ~graph.on_compute):
        raise GraphError(
            f"task {task} ({graph.task(int(task))}) is on stream "
            f"{graph.task(int(task)).stream!r}; it belongs on 'compute'"
        )
    members = graph.collectives.values
    for task in members[~graph.is_op(COLLECTIVES)[members]]:
        raise GraphError(
            f"task {task} ({graph.task(int(task))}) is in a group; only collectives "
            f"({', '.join(op.name for op in sorted(COLLECTIVES))}) have members"
        )
    _check_halves(graph)
    _check_members(graph)
    _check_messages(graph)


def check_ids(graph: TaskGraph) -> None:
    """Check that ids are a topological order.

    Raises
    ------
    GraphError
        For another order; the message has a task and a predecessor that is issued later.
    """
    waits = graph.precedence
    late = np.flatnonzero(waits.values >= waits.rows)
    if len(late):
        first_late = graph.task(int(waits.rows[late[0]]))
        needed = graph.task(int(waits.values[late[0]]))
        raise GraphError(
            f"task {first_late.id} ({first_late}) waits for task {needed.id} ({needed}), "
            "which is issued later; ids must be a topological order: build the graph with "
            "TaskGraph.build"
        )


def _check_halves(graph: TaskGraph) -> None:
    """Check that overlapped tasks are an F and the B right after it on its stream."""
    halves = np.flatnonzero((graph.kinds.overlapped > 0)[graph.kind])
    forward, backward = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    whole = graph.queue_predecessor[backward] == forward
    for half in np.setdiff1d(halves, np.concatenate([forward[whole], backward[whole]])):
        raise GraphError(
            f"task {half} ({graph.task(int(half))}) is overlapped with nothing: an F overlaps "
            "with the B right after it on its stream"
        )


def _check_members(graph: TaskGraph) -> None:
    """Check that a collective has one operation, and the members that its operation asks for.

    A collective of a stage has one member of each replica that trains.
    """
    members, number = graph.collectives.values, graph.collectives.rows
    first = members[graph.collectives.ptr[number]]
    for unlike in np.flatnonzero(graph.op[members] != graph.op[first])[:1].tolist():
        one, other = (graph.task(int(task[unlike])) for task in (first, members))
        raise GraphError(
            f"task {one.id} ({one}) and task {other.id} ({other}) are members of one collective; "
            "give tasks of different operations different groups"
        )
    of_devices = graph.is_op(OF_DEVICES)[members]
    _check_device_members(graph, members[of_devices], number[of_devices])
    members, number = members[~of_devices], number[~of_devices]
    of_experts = is_expert_exchange(graph.op[members], graph.part[members])
    _check_expert_members(graph, members[of_experts], number[of_experts])
    members, number = members[~of_experts], number[~of_experts]
    cells, cell_of_member = np.unique(
        number * graph.n_stages + graph.stage[members], return_inverse=True
    )
    n_members = np.zeros((len(cells), graph.n_replicas), dtype=np.int64)
    np.add.at(n_members, (cell_of_member, graph.replica[members]), 1)
    trains = np.zeros(graph.n_replicas, dtype=bool)
    trains[graph.replica[graph.is_op(frozenset({Op.B, Op.W}))]] = True
    for cell, replica in np.argwhere((n_members > 1) | (trains & (n_members == 0)))[:1].tolist():
        task = graph.task(int(members[cell_of_member == cell][0]))
        n = n_members[cell, replica]
        has = "lacks it" if n == 0 else f"has {n} of it"
        raise GraphError(
            f"task {task.id} ({task}) is of replica {task.replica} on device {task.device}, but "
            f"replica {replica} {has}: a collective of stage {task.stage} has one member of each "
            f"of the {graph.n_replicas} replicas; give each replica the same tasks of the stage"
        )


def _check_expert_members(graph: TaskGraph, members: Ints, number: Ints) -> None:
    """Check that each exchange of experts has a member of each replica of its group, and no others.

    Groups are consecutive data-parallel replicas, as many as `TaskGraph.expert_replicas`.
    """
    if not len(members):
        return
    copies = copy_of_replicas(graph.homes)
    size = graph.expert_replicas or 1 + int(copies.max())
    _, first, collective = np.unique(number, return_index=True, return_inverse=True)
    copy = copies[graph.replica[members]]
    group = copy // size
    wrong = (np.bincount(collective) != size)[collective] | (group != group[first][collective])
    _, row, count = np.unique(
        collective * (1 + copies.max()) + copy, return_index=True, return_counts=True
    )
    wrong[row] |= count > 1
    for task in map(graph.task, members[np.flatnonzero(wrong)[:1]].tolist()):
        raise GraphError(
            f"task {task.id} ({task}) is of replica {task.replica}, in an exchange of experts with "
            f"other members: experts are on {size} consecutive replicas, and each has one member; "
            "give all of them the same exchanges"
        )


def _check_device_members(graph: TaskGraph, members: Ints, number: Ints) -> None:
    """Check that each collective has one member on each of its devices, and no others.

    The devices of a REDUCE_TIED are those of its group's stages, in its replica. GRAD_NORM has all.
    """
    used = np.unique(graph.kinds.device)
    for group in np.unique(number).tolist():
        own = members[number == group]
        first = graph.task(int(own[0]))
        devices = used
        if first.op == Op.REDUCE_TIED:
            devices = np.unique(graph.homes[first.replica, list(graph.tied[first.part])])
        if not np.array_equal(np.sort(graph.device[own]), devices):
            raise GraphError(
                f"task {first.id} ({first}) is a member of a collective on devices "
                f"{np.sort(graph.device[own]).tolist()}; a {first.op} has one member on each of "
                f"devices {devices.tolist()}"
            )


def _check_messages(graph: TaskGraph) -> None:
    """Check that transfers pair up and that each channel keeps its sender's order."""
    for lone in np.flatnonzero(graph.is_op(SENDS | RECVS) & (graph.pair < 0)):
        raise GraphError(
            f"task {lone} ({graph.task(int(lone))}) has no counterpart at the other end; every "
            "SEND needs its RECV"
        )
    recvs = np.flatnonzero(graph.is_op(RECVS))
    sends = graph.pair[recvs]
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.queues.values] = np.arange(len(graph))
    channel = graph.device[sends].astype(np.int64) * graph.n_devices + graph.device[recvs]
    order = np.lexsort((position[sends], channel))
    same = channel[order][1:] == channel[order][:-1]
    swapped = same & (position[recvs][order][1:] < position[recvs][order][:-1])
    same_streams = (graph.stream[sends][order][1:] == graph.stream[sends][order][:-1]) & (
        graph.stream[recvs][order][1:] == graph.stream[recvs][order][:-1]
    )
    for index in np.flatnonzero(swapped & same_streams):
        early, late = (graph.task(int(recvs[order[index + k]])) for k in range(2))
        sent = graph.task(int(graph.pair[early.id]))
        raise GraphError(
            f"device {early.device} receives {late} before {early}, but device {sent.device} "
            f"sends {sent} first; messages of one channel keep their sender's order"
        )

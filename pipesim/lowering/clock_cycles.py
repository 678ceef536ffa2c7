"""Issue order of tasks by clock cycle, with messages, exchanges and reductions.

`pipesim.lowering.cycle_loop` has the loop over cycles.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.overlaps import overlapped_pairs
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.lowering.cycle_loop import LoopInputs, LoopOutput, LoopState, issue_tasks
from pipesim.scheduling.memory_checks import check_graph
from pipesim.utils.csr import CSR, Ints, count


class Partners(NamedTuple):
    """Kinds of task that accompany each kind of compute task.

    Attributes
    ----------
    send, recv
        Kinds of the two ends of each message.
    channel
        Number of each message's pair of devices, from 0 without gaps.
    out, into
        CSR: row ``k`` has the messages of the result of kind ``k``, and those that kind ``k``
        needs.
    adds_to
        Row of ``reduce`` that waits for all tasks of a kind, -1 for none.
    reduce
        ``reduce[s, b]`` are the kinds that sum bucket ``b`` of the gradients of stage ``s`` over
        all paths. If replicas share the optimizer steps, ``reduce[n_stages + s, 0]`` are the kinds
        that gather the parameters of stage ``s``. -1 where a stage has fewer buckets.
    before, after
        CSR: row ``k`` has the exchanges that come before a task of kind ``k``, and after it.
    """

    send: Ints
    recv: Ints
    channel: Ints
    out: CSR
    into: CSR
    adds_to: Ints
    reduce: Ints
    before: CSR
    after: CSR


class Issued(NamedTuple):
    """Tasks in issue order.

    Attributes
    ----------
    kind, microbatch
        One entry a task.
    ends
        Position at which each phase ends: the phases of each clock cycle, and each collective.
    """

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints


def issue(
    compute: TaskGraph,
    cycle: Ints,
    partners: Partners,
    overlap: bool,
    n_replicas: int,
    groups: tuple[int, ...],
) -> Issued:
    """Return one replica's tasks in issue order: cycle by cycle, and in a cycle by device.

    - With overlap, transfers are issued after the compute tasks of their producers' cycle, each
      SEND followed by its RECV. All devices have one order of messages, in which no messages can
      wait for each other in a circle. Likewise the members of a collective are issued together.
    - Without overlap, a SEND follows its producer. A RECV comes right before its consumer, or
      before the consumer of a message that its sender sends later.

    Parameters
    ----------
    compute
        The compute tasks.
    cycle
        Clock cycle of each.
    partners
        Kinds of the tasks to add.
    overlap
        Whether transfers overlap compute.
    n_replicas
        Number of replicas, for which the tasks must fit in memory.
    groups
        Micro-batches after which each stage reduces its gradients, 0 for those of a mini-batch.

    Raises
    ------
    CapacityError
        If the tasks of all replicas would not fit in memory.
    """
    counts = count(compute.kind, len(partners.adds_to))
    sent = np.zeros(len(partners.send), dtype=np.int64)  # how often each message is sent
    np.add.at(sent, partners.out.values, counts[partners.out.rows])
    left, row_size, numbered, n_reductions = _reduction_rows(
        compute, partners, counts, np.array(groups)
    )
    n_exchanges = sum(
        int((counts * np.diff(rows.ptr)).sum()) for rows in (partners.before, partners.after)
    )
    n_tasks = len(compute) + 2 * int(sent.sum()) + n_reductions + n_exchanges
    check_graph(n_tasks * n_replicas)
    starts, runs, finishes = _cycles(compute, cycle)
    output = _new_output(n_tasks, len(runs), n_reductions + 2 * n_exchanges)
    issue_tasks(
        LoopInputs(
            *(starts.ptr, starts.values, runs.ptr, runs.values, finishes.ptr, finishes.values),
            *(compute.kind, compute.microbatch),
            *(partners.out.ptr, partners.out.values, partners.into.ptr, partners.into.values),
            *(partners.before.ptr, partners.before.values),
            *(partners.after.ptr, partners.after.values),
            *(partners.send, partners.recv, partners.channel, partners.adds_to, partners.reduce),
            row_size,
            numbered,
            overlap,
        ),
        _new_state(left, partners.channel, sent, 0 if overlap else compute.n_microbatches),
        output,
    )
    ends = np.sort(np.concatenate([output.ends.ravel(), output.joined]))
    return Issued(output.kind, output.microbatch, ends)


def _new_output(n_tasks: int, n_cycles: int, n_joined: int) -> LoopOutput:
    """Return empty columns for the loop over cycles."""
    return LoopOutput(
        np.empty(n_tasks, np.int32),
        np.empty(n_tasks, np.int32),
        np.empty((n_cycles, 3), dtype=np.int64),
        np.zeros(n_joined, dtype=np.int64),
    )


def _new_state(left: Ints, channel: Ints, sent: Ints, n_microbatches: int) -> LoopState:
    """Return the state at the start of the loop over cycles.

    ``sent`` is the number of times that each message is sent. ``n_microbatches`` is 0 if transfers
    overlap compute.
    """
    begins = np.zeros(int(channel.max(initial=-1)) + 2, dtype=np.int64)  # first message by channel
    np.add.at(begins, channel + 1, sent)
    begins = np.cumsum(begins)[:-1]
    n_messages, n_kinds = (int(sent.sum()), len(sent)) if n_microbatches else (0, 0)
    return LoopState(
        left,
        begins.copy(),
        begins.copy(),
        np.empty((n_messages, 2), np.int32),
        np.empty((n_kinds, n_microbatches), np.int64),
    )


def _reduction_rows(
    compute: TaskGraph, partners: Partners, counts: Ints, groups: Ints
) -> tuple[Ints, Ints, NDArray[np.bool_], int]:
    """Return ``left``, ``row_size`` and ``numbered`` of the loop, and the number of reductions.

    ``counts`` is the number of tasks of each kind. A reduction has the gradients of a group or of a
    mini-batch. Replicas share steps only in schedules of one mini-batch.
    """
    n_batches, size = compute.n_batches, compute.n_microbatches // compute.n_batches
    adds = partners.adds_to >= 0
    gradients = np.zeros(len(partners.reduce), dtype=np.int64)
    np.add.at(gradients, partners.adds_to[adds], counts[adds])
    row_size = np.full(len(gradients), compute.n_microbatches)
    row_size[: compute.n_stages] = np.where(groups > 0, groups, size)[: len(gradients)]
    numbered = np.zeros(len(gradients), dtype=bool)
    numbered[: compute.n_stages] = (groups > 0)[: len(gradients)] | (n_batches > 1)
    rounds = compute.n_microbatches // row_size
    left = np.repeat((gradients // rounds)[:, None], rounds.max(initial=1), axis=1)
    sizes = (partners.reduce >= 0).sum(axis=(1, 2))
    return left, row_size, numbered, int((rounds * sizes)[gradients > 0].sum())


def _cycles(compute: TaskGraph, cycle: Ints) -> tuple[CSR, CSR, CSR]:
    """Return the tasks of each cycle: those that start in it, run in it, and end in it.

    They differ for overlapped actions. Such an action starts when both halves can start, and its
    results are ready at its end: messages to both halves come before the first half, and messages
    from both halves follow the second.
    """
    n_cycles = int(cycle.max()) + 1
    runs = CSR.group(cycle, n_cycles)
    if not compute.kinds.overlapped.any():
        return runs, runs, runs
    forward, backward = overlapped_pairs(compute.kinds, compute.kind, compute.stream_of_kind)
    start, end = cycle.copy(), cycle.copy()
    start[backward], end[forward] = cycle[forward], cycle[backward]
    return CSR.group(start, n_cycles), runs, CSR.group(end, n_cycles)


def replicated_kinds(own: Kinds, devices: Ints) -> Kinds:
    """Return copies of kinds: row ``c`` of ``devices`` has the devices of copy ``c``.

    Kind ``k`` of copy ``c`` is number ``c * len(own) + k``; its replica is ``c * n + r`` if it was
    replica ``r`` of ``n``.
    """
    copy = np.repeat(np.arange(len(devices)), len(own))
    columns = {f.name: np.tile(getattr(own, f.name), len(devices)) for f in fields(own)}
    stream = columns["stream"]
    peer = devices[copy, np.maximum(stream - 1, 0) // 2]
    moved = np.where(stream % 2 == 1, StreamKind.send(peer), StreamKind.recv(peer))
    columns["stream"] = np.where(stream > 0, moved, stream)
    columns["device"] = devices[copy, columns["device"]]
    columns["replica"] += copy * len(own.homes)
    return Kinds(**columns)


def replicated(issued: Issued, n_replicas: int, n_kinds: int) -> Issued:
    """Repeat each phase of each cycle for each replica.

    Kinds of replica ``r`` are those of replica 0 plus ``r * n_kinds``.
    """
    starts = np.concatenate([[0], issued.ends[:-1]])
    sizes = issued.ends - starts
    phase = np.repeat(np.arange(len(sizes)), sizes)
    offset = np.arange(len(issued.kind)) - starts[phase]
    kind = np.empty(n_replicas * len(issued.kind), dtype=np.int32)
    microbatch = np.empty_like(kind)
    for replica in range(n_replicas):
        position = n_replicas * starts[phase] + replica * sizes[phase] + offset
        kind[position] = issued.kind + replica * n_kinds
        microbatch[position] = issued.microbatch
    return Issued(kind, microbatch, n_replicas * issued.ends)

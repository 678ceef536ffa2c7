"""The order in which a host issues tasks, by clock cycle, and when it has issued each.

Messages and reductions have one order.

Longer than most functions here: one loop has to see compute tasks, messages and reductions of a
cycle in turn, and a kernel's helpers cannot be given all the columns that it reads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.overlaps import overlapped_pairs
from pipesim.utils.csr import CSR, Ints, count
from pipesim.utils.host_memory import check_graph
from pipesim.utils.jit import kernel

__all__ = ["Issued", "Partners", "issue", "issue_times", "replicated"]


class Partners(NamedTuple):
    """Kinds of task that come with each kind of compute task.

    ``send`` and ``recv`` are the kinds of the two ends of each message, ``channel`` numbers its
    pair of devices. Row ``k`` of ``out`` are the messages of what kind ``k`` makes, of ``into``
    those that it needs. ``adds_to`` is the row of ``reduce`` that waits for all tasks of a kind, -1
    for none: ``reduce[s, b]`` are the kinds that sum bucket ``b`` of the gradients of stage ``s``
    over all paths, and ``reduce[n_stages + s, 0]``, where replicas share the steps, those that
    gather its parameters; -1 for fewer buckets. Row ``k`` of ``before`` and ``after`` are the
    exchanges that come before a task of kind ``k``, and after it.
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
    """Tasks in issue order, and where the phases of each clock cycle end, and each collective."""

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints


def issue(
    compute: TaskGraph,
    cycle: Ints,
    partners: Partners,
    overlap: bool,
    n_replicas: int,
    groups: Ints,
) -> Issued:
    """Return one replica's tasks in issue order: cycle by cycle, and in a cycle by device.

    Overlapped transfers are issued after the compute tasks of the cycle that produces them, each
    SEND followed by its RECV: one order of messages for all devices, in which none can wait for
    another in a circle. Likewise the members of a collective are issued together. Otherwise a SEND
    follows its producer, and a RECV comes right before its consumer, or before that of a message
    which its sender sends later. Stages reduce gradients after as many micro-batches as ``groups``
    has, 0 for those of a mini-batch.
    """
    counts = count(compute.kind, len(partners.adds_to))
    sent = np.zeros(len(partners.send), dtype=np.int64)  # how often each message is sent
    np.add.at(sent, partners.out.values, counts[partners.out.rows])
    n_messages = int(sent.sum())
    n_batches, size = compute.n_batches, compute.n_microbatches // compute.n_batches
    adds = partners.adds_to >= 0
    gradients = np.zeros(len(partners.reduce), dtype=np.int64)
    np.add.at(gradients, partners.adds_to[adds], counts[adds])
    # Gradients are of a group or a mini-batch; steps are shared where there is one mini-batch.
    row_size = np.full(len(gradients), compute.n_microbatches)
    row_size[: compute.n_stages] = np.where(groups > 0, groups, size)[: len(gradients)]
    numbered = np.zeros(len(gradients), dtype=bool)
    numbered[: compute.n_stages] = (groups > 0)[: len(gradients)] | (n_batches > 1)
    rounds = compute.n_microbatches // row_size
    left = np.repeat((gradients // rounds)[:, None], rounds.max(initial=1), axis=1)
    sizes = (partners.reduce >= 0).sum(axis=(1, 2))
    n_reductions = int((rounds * sizes)[gradients > 0].sum())
    n_exchanges = sum(
        int((counts * np.diff(rows.ptr)).sum()) for rows in (partners.before, partners.after)
    )
    n_tasks = len(compute) + 2 * n_messages + n_reductions + n_exchanges
    check_graph(n_tasks * n_replicas)
    kind, microbatch = np.empty(n_tasks, np.int32), np.empty(n_tasks, np.int32)
    starts, turns, finishes = _cycles(compute, cycle)
    ends = np.empty((len(turns), 3), dtype=np.int64)
    joined = np.zeros(n_reductions + 2 * n_exchanges, dtype=np.int64)
    channels, channel = np.unique(partners.channel, return_inverse=True)
    begins = np.zeros(len(channels) + 1, dtype=np.int64)  # each channel's messages
    np.add.at(begins, channel + 1, sent)
    begins = np.cumsum(begins)[:-1]
    of_order = 0 if overlap else n_messages  # what only tells which RECV comes next
    _issue_tasks(
        starts.ptr,
        starts.values,
        turns.ptr,
        turns.values,
        finishes.ptr,
        finishes.values,
        compute.kind,
        compute.microbatch,
        partners.out.ptr,
        partners.out.values,
        partners.into.ptr,
        partners.into.values,
        partners.before.ptr,
        partners.before.values,
        partners.after.ptr,
        partners.after.values,
        partners.send,
        partners.recv,
        channel,
        partners.adds_to,
        partners.reduce,
        left,
        row_size,
        numbered,
        begins.copy(),
        begins.copy(),
        np.empty((of_order, 2), np.int32),
        np.empty((0 if overlap else len(sent), compute.n_microbatches), np.int64),
        overlap,
        kind,
        microbatch,
        ends,
        joined,
    )
    return Issued(kind, microbatch, np.sort(np.concatenate([ends.ravel(), joined])))


def _cycles(compute: TaskGraph, cycle: Ints) -> tuple[CSR, CSR, CSR]:
    """Return the tasks of each cycle: whose action starts in it, that run in it, whose ends.

    An overlapped action starts with what both halves need, and what it computes is there at its
    end, so that the messages to both come before the first half, and those of both follow the
    second.
    """
    n_cycles = int(cycle.max()) + 1
    turns = CSR.group(cycle, n_cycles)
    if not compute.kinds.overlapped.any():
        return turns, turns, turns
    forward, backward = overlapped_pairs(compute.kinds, compute.kind, compute.stream_of_kind)
    start, end = cycle.copy(), cycle.copy()
    start[backward], end[forward] = cycle[forward], cycle[backward]
    return CSR.group(start, n_cycles), turns, CSR.group(end, n_cycles)


@kernel()
def _issue_tasks(
    starts_ptr: Ints,
    starts: Ints,
    turns_ptr: Ints,
    turns: Ints,
    finishes_ptr: Ints,
    finishes: Ints,
    kind: Ints,
    microbatch: Ints,
    out_ptr: Ints,
    out: Ints,
    into_ptr: Ints,
    into: Ints,
    before_ptr: Ints,
    before: Ints,
    after_ptr: Ints,
    after: Ints,
    send: Ints,
    recv: Ints,
    channel: Ints,
    adds_to: Ints,
    reduce: Ints,
    left: Ints,
    row_size: Ints,
    numbered: NDArray[np.bool_],
    sent: Ints,
    received: Ints,
    messages: Ints,
    place: Ints,
    overlap: bool,
    issued_kind: Ints,
    issued_microbatch: Ints,
    ends: Ints,
    joined: Ints,
) -> None:
    """Fill the last four; see `issue`.

    ``messages`` holds number and micro-batch of those sent, channel by channel, and ``place``
    where in it each is. ``joined`` gets where collectives end, and where they begin unless another
    does: each of their members is a phase of its own.
    """
    n, n_joined = 0, 0
    for cycle in range(len(turns_ptr) - 1):
        for k in range(starts_ptr[cycle], starts_ptr[cycle + 1]):
            task, m = kind[starts[k]], microbatch[starts[k]]
            for j in range(into_ptr[task], into_ptr[task + 1]) if not overlap else range(0):
                line = channel[into[j]]
                at = received[line]
                while at <= place[into[j], m]:
                    issued_kind[n], issued_microbatch[n] = recv[messages[at, 0]], messages[at, 1]
                    at += 1
                    n += 1
                received[line] = at
            for j in range(before_ptr[task], before_ptr[task + 1]):
                joined[n_joined] = n
                issued_kind[n], issued_microbatch[n] = before[j], m
                n += 1
                joined[n_joined + 1] = n
                n_joined += 2
        ends[cycle, 0] = n
        for k in range(turns_ptr[cycle], turns_ptr[cycle + 1]):
            issued_kind[n] = kind[turns[k]]
            issued_microbatch[n] = microbatch[turns[k]]
            n += 1
        ends[cycle, 1] = n
        for k in range(finishes_ptr[cycle], finishes_ptr[cycle + 1]):
            task, m = kind[finishes[k]], microbatch[finishes[k]]
            for j in range(after_ptr[task], after_ptr[task + 1]):
                joined[n_joined] = n
                issued_kind[n], issued_microbatch[n] = after[j], m
                n += 1
                joined[n_joined + 1] = n
                n_joined += 2
            for j in range(out_ptr[task], out_ptr[task + 1]):
                of = out[j]
                issued_kind[n], issued_microbatch[n] = send[of], m
                n += 1
                if overlap:
                    issued_kind[n], issued_microbatch[n] = recv[of], m
                    n += 1
                else:
                    line = channel[of]
                    at = sent[line]
                    place[of, m], messages[at, 0], messages[at, 1] = at, of, m
                    sent[line] = at + 1
        ends[cycle, 2] = n
        for k in range(turns_ptr[cycle], turns_ptr[cycle + 1]) if len(reduce) else range(0):
            of = adds_to[kind[turns[k]]]
            if of < 0:
                continue
            batch = max(microbatch[turns[k]], 0) // row_size[of]
            left[of, batch] -= 1
            for bucket in range(reduce.shape[1]) if left[of, batch] == 0 else range(0):
                if reduce[of, bucket, 0] < 0:
                    continue
                for path in range(reduce.shape[2]):
                    issued_kind[n] = reduce[of, bucket, path]
                    issued_microbatch[n] = -1
                    if numbered[of]:
                        issued_microbatch[n] = (batch + 1) * row_size[of] - 1
                    n += 1
                joined[n_joined] = n
                n_joined += 1


def replicated(issued: Issued, n_replicas: int, n_kinds: int) -> Issued:
    """Repeat each phase of each cycle for each replica."""
    starts = np.concatenate([[0], issued.ends[:-1]])
    sizes = issued.ends - starts
    phase = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(issued.kind)) - starts[phase]
    kind = np.empty(n_replicas * len(issued.kind), dtype=np.int32)
    microbatch = np.empty_like(kind)
    for replica in range(n_replicas):
        position = n_replicas * starts[phase] + replica * sizes[phase] + within
        kind[position] = issued.kind + replica * n_kinds
        microbatch[position] = issued.microbatch
    return Issued(kind, microbatch, n_replicas * issued.ends)


def issue_times(graph: TaskGraph, launch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when each host has issued each of its tasks, in order of ids (rule 7).

    ``launch`` are the seconds that issuing each task takes; both have shape ``(len(graph),)``.
    """
    issued = np.zeros(len(graph))
    host = graph.host[graph.device]
    if graph.host_threads and graph.host.any():
        first = graph.issued_first
        _issue_in_threads(host, launch, first.ptr, first.values, np.zeros(len(graph.host)), issued)
        return issued
    tasks_of = CSR.group(host, graph.n_devices)
    for number in np.unique(host):
        issued[tasks_of[number]] = np.cumsum(launch[tasks_of[number]])
    return issued


@kernel()
def _issue_in_threads(
    host: Ints,
    launch: NDArray[np.float64],
    ptr: Ints,
    first: Ints,
    clock: NDArray[np.float64],
    issued: NDArray[np.float64],
) -> None:
    """Fill ``issued``, where a host waits for tasks that others have to issue first."""
    for task in range(len(host)):
        by = host[task]
        for k in range(ptr[task], ptr[task + 1]):
            clock[by] = max(clock[by], issued[first[k]])
        clock[by] += launch[task]
        issued[task] = clock[by]

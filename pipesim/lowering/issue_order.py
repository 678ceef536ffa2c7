"""The order in which hosts issue tasks, and when.

By default tasks are issued by clock cycle, with messages, exchanges and reductions. Other orders
change only the ids of tasks: each stream keeps its order, which is the schedule's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.dependencies import overlapped_pairs
from pipesim.graph.graph import TaskGraph, reordered
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.ops import COMPUTE, EXCHANGES, PASSES, Op
from pipesim.scheduling.memory_checks import check_graph
from pipesim.utils.csr import CSR, Ints, count
from pipesim.utils.jit import kernel


class LoopInputs(NamedTuple):
    """The columns that the loop over cycles reads."""

    #: CSR: the compute tasks of each cycle, those that start in it, run in it, and end in it.
    starts_ptr: Ints
    starts: Ints
    runs_ptr: Ints
    runs: Ints
    finishes_ptr: Ints
    finishes: Ints
    #: One entry a compute task.
    kind: Ints
    microbatch: Ints
    #: The columns of `Partners`.
    out_ptr: Ints
    out: Ints
    into_ptr: Ints
    into: Ints
    before_ptr: Ints
    before: Ints
    after_ptr: Ints
    after: Ints
    send: Ints
    recv: Ints
    channel: Ints
    adds_to: Ints
    reduce: Ints
    #: Number of micro-batches of a reduction, for each row of ``reduce``.
    row_size: Ints
    #: Whether the reductions of a row have the number of their last micro-batch; else -1.
    numbered: NDArray[np.bool_]
    overlap: bool


class LoopState(NamedTuple):
    """State of the loop over cycles."""

    #: Number of tasks that each row of ``reduce`` and mini-batch, or group, still waits for.
    left: Ints
    #: Positions in ``messages`` of the next message that each channel sends, and receives.
    sent: Ints
    received: Ints
    #: Number and micro-batch of each message sent, channel after channel; empty with overlap.
    messages: Ints
    #: Position in ``messages`` of each message and micro-batch; empty with overlap.
    position: Ints


class LoopOutput(NamedTuple):
    """The columns that the loop over cycles fills: tasks in issue order, and their phases."""

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    #: Positions at which the three phases of each cycle end: receives, compute tasks, sends.
    ends: Ints
    #: Positions at which collectives end, and at which exchanges begin: each member is a phase.
    joined: Ints


@kernel()
def issue_tasks(inputs: LoopInputs, state: LoopState, output: LoopOutput) -> None:
    """Fill ``output``; see `issue`.

    One loop over cycles: receives, exchanges and compute tasks, then exchanges and sends, then
    reductions. Compiled code counts references to each column that a helper gets, task by task, so
    that helpers for these phases would take several times as long.
    """
    starts_ptr, starts, runs_ptr, runs, finishes_ptr, finishes, kind, microbatch = inputs[:8]
    out_ptr, out, into_ptr, into, before_ptr, before, after_ptr, after = inputs[8:16]
    send, recv, channel, adds_to, reduce, row_size, numbered, overlap = inputs[16:]
    left, sent, received, messages, position = state
    issued_kind, issued_microbatch, ends, joined = output
    n, n_joined = 0, 0
    for cycle in range(len(runs_ptr) - 1):
        for k in range(starts_ptr[cycle], starts_ptr[cycle + 1]):
            own, m = kind[starts[k]], microbatch[starts[k]]
            for j in range(into_ptr[own], into_ptr[own + 1]) if not overlap else range(0):
                line = channel[into[j]]
                slot = received[line]
                while slot <= position[into[j], m]:
                    issued_kind[n] = recv[messages[slot, 0]]
                    issued_microbatch[n] = messages[slot, 1]
                    slot += 1
                    n += 1
                received[line] = slot
            for j in range(before_ptr[own], before_ptr[own + 1]):
                joined[n_joined] = n
                issued_kind[n], issued_microbatch[n] = before[j], m
                n += 1
                joined[n_joined + 1] = n
                n_joined += 2
        ends[cycle, 0] = n
        for k in range(runs_ptr[cycle], runs_ptr[cycle + 1]):
            issued_kind[n], issued_microbatch[n] = kind[runs[k]], microbatch[runs[k]]
            n += 1
        ends[cycle, 1] = n
        for k in range(finishes_ptr[cycle], finishes_ptr[cycle + 1]):
            own, m = kind[finishes[k]], microbatch[finishes[k]]
            for j in range(after_ptr[own], after_ptr[own + 1]):
                joined[n_joined] = n
                issued_kind[n], issued_microbatch[n] = after[j], m
                n += 1
                joined[n_joined + 1] = n
                n_joined += 2
            for j in range(out_ptr[own], out_ptr[own + 1]):
                message = out[j]
                issued_kind[n], issued_microbatch[n] = send[message], m
                n += 1
                if overlap:
                    issued_kind[n], issued_microbatch[n] = recv[message], m
                    n += 1
                else:
                    line = channel[message]
                    slot = sent[line]
                    position[message, m] = slot
                    messages[slot, 0], messages[slot, 1] = message, m
                    sent[line] = slot + 1
        ends[cycle, 2] = n
        for k in range(runs_ptr[cycle], runs_ptr[cycle + 1]) if len(reduce) else range(0):
            row = adds_to[kind[runs[k]]]
            if row < 0:
                continue
            batch = max(microbatch[runs[k]], 0) // row_size[row]
            left[row, batch] -= 1
            for bucket in range(reduce.shape[1]) if left[row, batch] == 0 else range(0):
                if reduce[row, bucket, 0] < 0:
                    continue
                for path in range(reduce.shape[2]):
                    if reduce[row, bucket, path] < 0:
                        continue
                    issued_kind[n] = reduce[row, bucket, path]
                    issued_microbatch[n] = -1
                    if numbered[row]:
                        issued_microbatch[n] = (batch + 1) * row_size[row] - 1
                    n += 1
                joined[n_joined] = n
                n_joined += 1


class Partners(NamedTuple):
    """Kinds of task that accompany each kind of compute task."""

    #: Kinds of the two ends of each message.
    send: Ints
    recv: Ints
    #: Number of each message's pair of devices, from 0 without gaps.
    channel: Ints
    #: Row ``k`` has the messages of the result of kind ``k``, and those that kind ``k`` needs.
    out: CSR
    into: CSR
    #: Row of ``reduce`` that waits for all tasks of a kind, -1 for none.
    adds_to: Ints
    #: ``reduce[s, b]`` are the kinds that sum bucket ``b`` of the gradients of stage ``s`` over
    #: all paths. If replicas share the optimizer steps, ``reduce[n_stages + s, 0]`` are the kinds
    #: that gather the parameters of stage ``s``. -1 where a stage has fewer buckets, or is that of
    #: a lower path on its device.
    reduce: Ints
    #: Row ``k`` has the exchanges that come before a task of kind ``k``, and after it.
    before: CSR
    after: CSR


class Issued(NamedTuple):
    """Tasks in issue order, and the position at which each phase ends.

    Phases are those of each clock cycle, and the members of each collective.
    """

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints

    @classmethod
    def of_phases(
        cls, kind: NDArray[np.int32], microbatch: NDArray[np.int32], phase: Ints
    ) -> Issued:
        """Return tasks of which consecutive ones with one number are a phase."""
        ends = 1 + np.flatnonzero(np.append(phase[1:] != phase[:-1], True))
        return cls(kind, microbatch, ends)

    @property
    def phase(self) -> Ints:
        """Number of the phase of each task."""
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))


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

    ``cycle`` is the clock cycle of each compute task, and ``groups`` the number of micro-batches
    after which each stage reduces its gradients, 0 for those of a mini-batch. The tasks of all
    replicas must fit in memory.
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
    output = LoopOutput(
        np.empty(n_tasks, np.int32),
        np.empty(n_tasks, np.int32),
        ends=np.empty((len(runs), 3), dtype=np.int64),
        joined=np.zeros(n_reductions + 2 * n_exchanges, dtype=np.int64),
    )
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
    starts, phase = np.concatenate([[0], issued.ends[:-1]]), issued.phase
    sizes = issued.ends - starts
    offset = np.arange(len(issued.kind)) - starts[phase]
    kind = np.empty(n_replicas * len(issued.kind), dtype=np.int32)
    microbatch = np.empty_like(kind)
    for replica in range(n_replicas):
        position = n_replicas * starts[phase] + replica * sizes[phase] + offset
        kind[position] = issued.kind + replica * n_kinds
        microbatch[position] = issued.microbatch
    return Issued(kind, microbatch, n_replicas * issued.ends)


IssueOrder = Literal["clock_cycle", "microbatch_major", "stage_major"]
ISSUE_ORDERS: tuple[IssueOrder, ...] = get_args(IssueOrder)


def in_issue_order(graph: TaskGraph, issue_order: IssueOrder) -> TaskGraph:
    """Return a graph in clock-cycle order with its tasks issued in another order.

    The next task is always one that can be issued: all its predecessors are issued, including the
    task before it on its stream. Messages and collectives come right after the task that produces
    them. Compute tasks are sorted by

    - ``"microbatch_major"``: pass, then position;
    - ``"stage_major"``: position.

    A pass is the forward of a micro-batch through all stages (F and its RESHARD, DISPATCH, REORDER
    of vectors), or its backward (R, B, I, W, REORDER of gradients), or the STEPs of a mini-batch.
    Passes come in the order in which their first F, B or I, or STEP is issued by clock cycle. The
    position is that on the way forward and back through ``n`` stages: ``s`` for the forward of
    stage ``s``, ``2 * n - 1 - s`` for all others. Ties keep the order by clock cycle, in which
    replicas alternate, task by task.

    The complexity is O(n log n) for n tasks and dependencies.
    """
    if issue_order == "clock_cycle":
        return graph
    is_compute = graph.is_op(COMPUTE)
    position = np.where(_is_forward(graph), graph.stage, 2 * graph.n_stages - 1 - graph.stage)
    keys = [position, _passes(graph)] if issue_order == "microbatch_major" else [position]
    # lexsort takes the last key first. Ties keep the order of ids, which alone sorts messages.
    by_rank = np.lexsort([*(np.where(is_compute, key, -1) for key in keys), is_compute])
    rank = np.empty(len(graph), dtype=np.int64)
    rank[by_rank] = np.arange(len(graph))
    followers = graph.precedence.transpose()
    remaining = np.diff(graph.precedence.ptr).astype(np.int64)
    order, heap = np.empty((2, len(graph)), dtype=np.int64)
    _fill_order(remaining, followers.ptr, followers.values, rank, by_rank, heap, order)
    return reordered(graph, order)


def _is_forward(graph: TaskGraph) -> NDArray[np.bool_]:
    """Return whether each task is F, its RESHARD, or DISPATCH or REORDER of vectors."""
    puts_vectors = (graph.op == Op.REORDER) & (graph.part == EXCHANGES.index("vectors"))
    frees = (graph.op == Op.RESHARD) & (graph.part == PASSES.index("forward"))
    marked: NDArray[np.bool_] = graph.is_op(frozenset({Op.F, Op.DISPATCH})) | puts_vectors | frees
    return marked


def _passes(graph: TaskGraph) -> Ints:
    """Return the first task of the pass of each compute task; any number for other tasks."""
    number = np.where(_is_forward(graph), 0, np.where(graph.op == Op.STEP, 2, 1))
    number = number * (graph.n_microbatches + 1) + graph.microbatch + 1
    first = np.full(3 * (graph.n_microbatches + 1), len(graph))
    begins = np.flatnonzero(graph.is_op(frozenset({Op.F, Op.B, Op.I, Op.STEP})))
    np.minimum.at(first, number[begins], begins)
    passes: Ints = first[number]
    return passes


@kernel()
def _fill_order(
    remaining: Ints,
    ptr: Ints,
    followers: Ints,
    rank: Ints,
    by_rank: Ints,
    heap: Ints,
    order: Ints,
) -> None:
    """Fill ``order``, topological, with the smallest rank among ready tasks first.

    ``heap`` holds the ranks of the tasks that can be issued, as a binary heap.
    """
    size, n_issued = 0, 0
    for k in range(len(rank)):  # ranks in order are a heap
        if remaining[by_rank[k]] == 0:
            heap[size] = k
            size += 1
    while size > 0:
        task = by_rank[heap[0]]
        order[n_issued] = task
        n_issued += 1
        size -= 1
        last, hole = heap[size], 0
        while 2 * hole + 1 < size:  # the smaller child moves up
            child = 2 * hole + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= last:
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = last
        for k in range(ptr[task], ptr[task + 1]):
            follower = followers[k]
            remaining[follower] -= 1
            if remaining[follower] > 0:
                continue
            hole = size
            size += 1
            while hole > 0 and heap[(hole - 1) // 2] > rank[follower]:
                heap[hole] = heap[(hole - 1) // 2]
                hole = (hole - 1) // 2
            heap[hole] = rank[follower]


def issue_times(
    graph: TaskGraph, launch: NDArray[np.float64], row: Ints | None = None
) -> NDArray[np.float64]:
    """Return the time at which the host has issued each task, in seconds (rule 7).

    A host issues its tasks in the order of their ids. ``launch`` are the seconds to issue each
    task, or a task of each ``row``.
    """
    issued = np.empty(len(graph))
    host, n_hosts = graph.host[graph.kinds.device], int(graph.host.max()) + 1
    none = CSR(np.empty(0, np.int32), np.empty(0, np.int32))
    first = graph.issued_first if graph.host_threads and n_hosts > 1 else none
    rows = np.arange(len(graph), dtype=graph.kind.dtype) if row is None else row
    clock = np.zeros(n_hosts)
    fill_issue_times(graph.kind, host, rows, launch, first.ptr, first.values, clock, issued)
    return issued


@kernel()
def fill_issue_times(
    kind: Ints,
    host: Ints,
    row: Ints,
    launch: NDArray[np.float64],
    first_ptr: Ints,
    first: Ints,
    clock: NDArray[np.float64],
    issued: NDArray[np.float64],
) -> None:
    """Fill ``issued``: each host issues its tasks in order of ids.

    ``first`` lists the tasks that other hosts have to issue before each task. Without such tasks,
    ``first_ptr`` is empty. ``clock`` is the time of each host (s), and comes in as 0.
    """
    for task in range(len(kind)):
        own = host[kind[task]]
        for k in range(first_ptr[task], first_ptr[task + 1]) if len(first_ptr) else range(0):
            clock[own] = max(clock[own], issued[first[k]])
        clock[own] += launch[row[task]]
        issued[task] = clock[own]

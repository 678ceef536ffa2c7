"""The order in which a host issues tasks: by clock cycle, messages and reductions in one order.

Longer than most functions here: one loop has to see compute tasks, messages and reductions of a
cycle in turn, and a kernel's helpers cannot be given all the columns that it reads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.capacity import check_graph
from pipesim.csr import CSR, Ints, count
from pipesim.graph import TaskGraph, overlapped_pairs, wired
from pipesim.jit import kernel

__all__ = ["Issued", "Partners", "issue", "replicated"]


class Partners(NamedTuple):
    """Kinds of task that come with each kind of compute task; -1 for none.

    ``send`` and ``recv`` are the two ends of the message that carries its output, ``channel``
    numbers the pair of devices. ``adds_to`` is the stage to whose gradients it adds, and row ``s``
    of ``reduce`` the kinds that sum those of stage ``s`` over all paths.
    """

    send: Ints
    recv: Ints
    channel: Ints
    adds_to: Ints
    reduce: Ints


class Issued(NamedTuple):
    """Tasks in issue order, and where the phases of each clock cycle end, and each reduction."""

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints


def issue(
    compute: TaskGraph, cycles: CSR, partners: Partners, overlap: bool, n_replicas: int
) -> Issued:
    """Return one replica's tasks in issue order: cycle by cycle, and in a cycle by device.

    Overlapped transfers are issued after the compute tasks of the cycle that produces them, each
    SEND followed by its RECV: one order of messages for all devices, in which none can wait for
    another in a circle. Likewise the members of a reduction are issued together. Otherwise a SEND
    follows its producer, and a RECV comes right before its consumer, or before that of a message
    which its sender sends later.
    """
    counts = count(compute.kind, len(partners.send))
    n_messages = int(counts[partners.send >= 0].sum())
    n_batches, size = compute.n_batches, compute.n_microbatches // compute.n_batches
    adds = partners.adds_to >= 0
    gradients = np.zeros(len(partners.reduce), dtype=np.int64)
    np.add.at(gradients, partners.adds_to[adds], counts[adds])
    left = np.repeat(gradients[:, None] // n_batches, n_batches, axis=1)  # of each mini-batch
    n_tasks = len(compute) + 2 * n_messages + n_batches * partners.reduce.size
    check_graph(n_tasks * n_replicas)
    kind, microbatch = np.empty(n_tasks, np.int32), np.empty(n_tasks, np.int32)
    ends, reduced = np.empty((len(cycles), 3), dtype=np.int64), np.zeros_like(left)
    needs = compute.dependencies
    if compute.kinds.overlapped.any() and not overlap:  # just the data, whose messages are sought
        columns = compute.kinds, compute.kind, compute.microbatch
        needs, _ = wired(*columns, size, compute.stream_of_kind)
    channels, channel = np.unique(partners.channel, return_inverse=True)
    sent = np.zeros(len(channels) + 1, dtype=np.int64)  # where each channel's messages begin
    np.add.at(sent, channel + 1, np.where(partners.send >= 0, counts, 0))
    sent = np.cumsum(sent)
    _issue_tasks(
        cycles.ptr,
        cycles.values,
        compute.kind,
        compute.microbatch,
        needs.ptr,
        needs.values,
        _sent_with(compute),
        partners.send,
        partners.recv,
        channel,
        compute.kinds.device,
        partners.adds_to,
        partners.reduce,
        left,
        size,
        sent[:-1].copy(),
        sent[:-1].copy(),
        np.empty(0 if overlap else n_messages, compute.pair.dtype),
        np.empty(0 if overlap else len(compute), np.int64),
        overlap,
        kind,
        microbatch,
        ends,
        reduced,
    )
    return Issued(kind, microbatch, np.sort(np.concatenate([ends.ravel(), reduced.ravel()])))


def _sent_with(compute: TaskGraph) -> Ints:
    """Return the F whose output is sent with each task's, -1 for none; empty if there are none.

    What an overlapped action computes is there at its end, so that the messages of both halves
    follow the second.
    """
    if not compute.kinds.overlapped.any():
        return np.empty(0, dtype=np.int64)
    forward, backward = overlapped_pairs(compute.kinds, compute.kind, compute.stream_of_kind)
    sent_with = np.full(len(compute), -1, dtype=np.int64)
    sent_with[backward], sent_with[forward] = forward, -2
    return sent_with


@kernel()
def _issue_tasks(
    cycles_ptr: Ints,
    cycles: Ints,
    kind: Ints,
    microbatch: Ints,
    needs_ptr: Ints,
    needs: Ints,
    sent_with: Ints,
    send: Ints,
    recv: Ints,
    channel: Ints,
    device: Ints,
    adds_to: Ints,
    reduce: Ints,
    left: Ints,
    batch_size: int,
    sent: Ints,
    received: Ints,
    messages: Ints,
    place: Ints,
    overlap: bool,
    issued_kind: Ints,
    issued_microbatch: Ints,
    ends: Ints,
    reduced: Ints,
) -> None:
    """Fill the last four; see `issue`. ``messages`` are the producers, channel by channel."""
    n = 0
    several = left.shape[1] > 1
    for cycle in range(len(cycles_ptr) - 1):
        first, last = cycles_ptr[cycle], cycles_ptr[cycle + 1]
        for k in range(first, last) if not overlap else range(0):
            task = cycles[k]
            for j in range(needs_ptr[task], needs_ptr[task + 1]):
                producer = needs[j]
                if device[kind[producer]] == device[kind[task]]:
                    continue
                of = channel[kind[producer]]
                while received[of] <= place[producer]:
                    message = messages[received[of]]
                    issued_kind[n] = recv[kind[message]]
                    issued_microbatch[n] = microbatch[message]
                    received[of] += 1
                    n += 1
        ends[cycle, 0] = n
        for k in range(first, last):
            issued_kind[n] = kind[cycles[k]]
            issued_microbatch[n] = microbatch[cycles[k]]
            n += 1
        ends[cycle, 1] = n
        for k in range(first, last):
            held_back = sent_with[cycles[k]] if len(sent_with) else -1
            for half in range(2):  # what an overlapped forward sends, then what the task does
                task = held_back if half == 0 else cycles[k]
                if task < 0 or held_back == -2 or send[kind[task]] < 0:
                    continue
                of = kind[task]
                issued_kind[n], issued_microbatch[n] = send[of], microbatch[task]
                n += 1
                if overlap:
                    issued_kind[n], issued_microbatch[n] = recv[of], microbatch[task]
                    n += 1
                else:
                    place[task] = sent[channel[of]]
                    messages[place[task]] = task
                    sent[channel[of]] += 1
        ends[cycle, 2] = n
        for k in range(first, last):
            of = adds_to[kind[cycles[k]]]
            if of < 0 or len(reduce) == 0:
                continue
            batch = microbatch[cycles[k]] // batch_size
            left[of, batch] -= 1
            for path in range(reduce.shape[1]) if left[of, batch] == 0 else range(0):
                issued_kind[n] = reduce[of, path]
                issued_microbatch[n] = (batch + 1) * batch_size - 1 if several else -1
                n += 1
            if left[of, batch] == 0:
                reduced[of, batch] = n


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

"""The compiled loop that issues tasks clock cycle by clock cycle, and the columns that it needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel


class LoopInputs(NamedTuple):
    """The columns that the loop over cycles reads.

    Attributes
    ----------
    starts_ptr, starts, runs_ptr, runs, finishes_ptr, finishes
        CSR: the compute tasks of each cycle, those that start in it, run in it, and end in it.
    kind, microbatch
        One entry a compute task.
    out_ptr, out, into_ptr, into, before_ptr, before, after_ptr, after
        CSR: those of `pipesim.lowering.clock_cycles.Partners`.
    send, recv, channel, adds_to, reduce
        Those of `Partners` too; channels are numbered from 0 without gaps.
    row_size
        Number of micro-batches of a reduction, for each row of ``reduce``.
    numbered
        Whether the reductions of a row have the number of their last micro-batch; else -1.
    overlap
        Whether transfers overlap compute.
    """

    starts_ptr: Ints
    starts: Ints
    runs_ptr: Ints
    runs: Ints
    finishes_ptr: Ints
    finishes: Ints
    kind: Ints
    microbatch: Ints
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
    row_size: Ints
    numbered: NDArray[np.bool_]
    overlap: bool


class LoopState(NamedTuple):
    """State of the loop over cycles.

    Attributes
    ----------
    left
        Number of tasks that each row of ``reduce`` and mini-batch, or group, still waits for.
    sent, received
        Positions in ``messages`` of the next message that each channel sends, and receives.
    messages
        Number and micro-batch of each message sent, channel after channel; empty with overlap.
    position
        Position in ``messages`` of each message and micro-batch; empty with overlap.
    """

    left: Ints
    sent: Ints
    received: Ints
    messages: Ints
    position: Ints


class LoopOutput(NamedTuple):
    """The columns that the loop over cycles fills.

    Attributes
    ----------
    kind, microbatch
        One entry a task, in issue order.
    ends
        Positions at which the three phases of each cycle end: receives, compute tasks, sends.
    joined
        Positions at which collectives end, and at which exchanges begin: each member is a phase.
    """

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints
    joined: Ints


@kernel()
def issue_tasks(inputs: LoopInputs, state: LoopState, output: LoopOutput) -> None:
    """Fill ``output``; see `pipesim.lowering.clock_cycles.issue`.

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
                    issued_kind[n] = reduce[row, bucket, path]
                    issued_microbatch[n] = -1
                    if numbered[row]:
                        issued_microbatch[n] = (batch + 1) * row_size[row] - 1
                    n += 1
                joined[n_joined] = n
                n_joined += 1

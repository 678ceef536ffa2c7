"""From a schedule to a task graph, in named passes that each take and return tasks."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_name
from pipesim.graph import PAIRS, StreamKind, TaskGraph, Tasks
from pipesim.ops import Op
from pipesim.schedule import Schedule
from pipesim.verify import compute_tasks, verify

__all__ = ["lower"]

Recompute = Literal["never", "always", "except_last"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "always", "except_last")


def lower(
    schedule: Schedule,
    *,
    recompute: Recompute = "never",
    overlap: bool = True,
    streams: Literal["per_peer", "single"] = "per_peer",
    rendezvous: bool = False,
    hosts: Literal["one", "per_device"] = "one",
    step: Literal["flush", "none"] = "flush",
) -> TaskGraph:
    """Lower a schedule to the tasks that the simulator and the executor run.

    Parameters
    ----------
    schedule
        Verified first.
    recompute
        Which micro-batches drop their activations after F and run R before their backward:
        ``"never"``, ``"always"``, or all ``"except_last"`` (GPipe, arXiv 1811.06965, section 2.3,
        and torchgpipe). R does not wait for the gradient.
    overlap
        Whether transfers run on copy streams beside the compute stream. Without it a device sends
        right after it has computed and receives right before it computes, on ``compute`` (rule 5).
    streams
        ``"per_peer"``: a copy stream a peer and direction. ``"single"``: one a device, which shows
        head-of-line blocking (rule 1).
    rendezvous
        Whether a SEND waits until its RECV is reached (rule 6).
    hosts
        ``"one"`` host issues for all devices, or one ``"per_device"`` (rule 7).
    step
        ``"flush"`` ends with one optimizer step a stage, after all its gradients; ``"none"`` ends
        with the gradients.

    Returns
    -------
    TaskGraph
        Issued in clock-cycle order: by distance from the first task, counted in compute tasks.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; see `pipesim.verify`.
    DeadlockError
        If the transfers, so ordered, would wait for each other for ever.
    """
    check_name("recompute mode", recompute, RECOMPUTE)
    check_name("streams", streams, ("per_peer", "single"))
    check_name("hosts", hosts, ("one", "per_device"))
    check_name("step", step, ("flush", "none"))
    for name, flag in (("overlap", overlap), ("rendezvous", rendezvous)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"{name} must be True or False, got {flag!r}")
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"lower takes a Schedule, got {type(schedule).__name__}")
    verify(schedule)
    tasks = compute_tasks(schedule)
    tasks = _add_recompute(tasks, recompute, schedule.n_microbatches)
    tasks = _add_steps(tasks) if step == "flush" else tasks
    tasks = _add_transfers(tasks, overlap, streams)
    graph = TaskGraph.build(
        tasks,
        name=schedule.name,
        hosts=hosts,
        rendezvous=rendezvous,
        recompute=recompute,
        overlap=overlap,
    )
    verify(graph)
    return graph


def _add_recompute(tasks: Tasks, recompute: Recompute, n_microbatches: int) -> Tasks:
    """Put R right before each backward whose forward kept no activations."""
    if recompute == "never":
        return tasks
    recomputed = np.isin(tasks.op, (Op.B, Op.I))
    if recompute == "except_last":
        recomputed &= tasks.microbatch != n_microbatches - 1
    backward = np.flatnonzero(recomputed)
    added = tasks.take(backward)
    added = Tasks(np.full_like(added.op, Op.R), *added.columns()[1:])
    position = np.concatenate([np.arange(len(tasks)), backward - 0.5])
    return Tasks.joined(tasks, added).take(np.argsort(position, kind="stable"))


def _add_steps(tasks: Tasks) -> Tasks:
    """End each device's order with the optimizer steps of its stages."""
    stages, first = np.unique(tasks.stage, return_index=True)
    steps = Tasks(
        op=np.full_like(stages, Op.STEP),
        device=tasks.device[first],
        stage=stages,
        microbatch=np.full_like(stages, -1),
        stream=np.full_like(stages, StreamKind.COMPUTE),
    )
    joined = Tasks.joined(tasks, steps)
    return joined.take(np.argsort(joined.device, kind="stable"))


def _add_transfers(tasks: Tasks, overlap: bool, streams: str) -> Tasks:
    """Add SEND and RECV wherever a neighbour is elsewhere; return all tasks in issue order.

    The clock cycle of a task is its distance from the first. Overlapped transfers are issued
    after the compute tasks of the cycle that produces them, each SEND followed by its RECV: one
    order of messages for all devices, in which none can wait for another in a circle. Otherwise
    a SEND follows its producer, and a RECV comes right before its consumer, or before that of a
    message which its sender sends later.
    """
    cycle = TaskGraph.wire(tasks).levels
    sends, recvs, producer, consumer = _messages(tasks, overlap, streams)
    if overlap:
        recv_cycle, phases = cycle[producer], (0, 1, 1)
    else:
        recv_cycle = _no_later_than_successors(sends, recvs, cycle[producer], cycle[consumer])
        phases = (1, 2, 0)
    everything = Tasks.joined(tasks, sends, recvs)
    order = np.lexsort(
        (
            np.repeat([0, 0, 1], [len(tasks), len(sends), len(recvs)]),
            np.concatenate([tasks.device, sends.device, cycle[producer] if not overlap
                            else sends.device]),
            np.repeat(phases, [len(tasks), len(sends), len(recvs)]),
            np.concatenate([cycle, cycle[producer], recv_cycle]),
        )
    )  # fmt: skip
    return everything.take(order)


def _messages(
    tasks: Tasks, overlap: bool, streams: str
) -> tuple[Tasks, Tasks, NDArray[np.int64], NDArray[np.int64]]:
    """Return the SENDs and RECVs, message by message, and each one's producer and consumer."""
    n_stages, n_microbatches = tasks.stage.max() + 1, tasks.microbatch.max() + 1
    device_of = np.zeros(n_stages, dtype=np.int64)
    device_of[tasks.stage] = tasks.device
    parts = []
    for recv, (send, offset) in PAIRS.items():
        carried = (Op.F,) if send == Op.SEND_F else (Op.B, Op.I)
        ids = np.flatnonzero(np.isin(tasks.op, carried))
        index = np.full((n_stages, n_microbatches), -1, dtype=np.int64)
        index[tasks.stage[ids], tasks.microbatch[ids]] = ids
        to = tasks.stage[ids] - offset
        ids, to = ids[(to >= 0) & (to < n_stages)], to[(to >= 0) & (to < n_stages)]
        crosses = device_of[to] != tasks.device[ids]
        ids, to = ids[crosses], to[crosses]
        source, target, microbatch = tasks.device[ids], device_of[to], tasks.microbatch[ids]
        if not overlap:
            codes = [np.full_like(ids, StreamKind.COMPUTE)] * 2
        elif streams == "single":
            codes = [np.full_like(ids, StreamKind.COPY)] * 2
        else:
            codes = [StreamKind.send(target), StreamKind.recv(source)]
        parts.append(
            (
                Tasks(np.full_like(ids, send), source, tasks.stage[ids], microbatch, codes[0]),
                Tasks(np.full_like(ids, recv), target, to, microbatch, codes[1]),
                ids,
                index[to, microbatch],
            )
        )
    sends, recvs, producers, consumers = zip(*parts, strict=True)
    return (
        Tasks.joined(*sends),
        Tasks.joined(*recvs),
        np.concatenate(producers),
        np.concatenate(consumers),
    )


def _no_later_than_successors(
    sends: Tasks, recvs: Tasks, sent: NDArray[np.int64], consumed: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the cycle of each RECV: its consumer's, or that of a message sent after it."""
    channel = sends.device * (recvs.device.max(initial=0) + 1) + recvs.device
    cycle = consumed.copy()
    for number in np.unique(channel):
        members = np.flatnonzero(channel == number)
        members = members[np.argsort(sent[members])[::-1]]
        cycle[members] = np.minimum.accumulate(consumed[members])
    return cycle

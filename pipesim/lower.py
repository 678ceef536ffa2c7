"""From a schedule to a task graph: in named passes over the kinds of task, and two loops."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.capacity import check_graph, check_tasks
from pipesim.csr import CSR, Ints, count
from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.graph import PAIRS, TaskGraph, overlapped_pairs, wired
from pipesim.jit import kernel
from pipesim.ops import Op
from pipesim.schedule import Schedule
from pipesim.tasks import Kinds, StreamKind
from pipesim.verify import compute_listing, verify, verify_listing

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
    n_replicas: int = 1,
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
        ``"flush"`` ends with one optimizer step a stage, after all its gradients, or after those
        of each mini-batch; ``"none"`` ends with the gradients.
    n_replicas
        Data-parallel replicas of the pipeline, each on devices of its own. Where there are
        several, a stage's gradients are reduced over all of them, on a stream of its own if
        transfers overlap, as soon as its last one is there; its optimizer step waits for that.
        The paths of a bidirectional placement are replicas too, on the same devices.

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
    CapacityError
        If the graph and its times would not fit in memory.
    """
    check_name("recompute mode", recompute, RECOMPUTE)
    check_name("streams", streams, ("per_peer", "single"))
    check_name("hosts", hosts, ("one", "per_device"))
    check_name("step", step, ("flush", "none"))
    for name, flag in (("overlap", overlap), ("rendezvous", rendezvous)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"{name} must be True or False, got {flag!r}")
    n_replicas = check_count("n_replicas", n_replicas)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"lower takes a Schedule, got {type(schedule).__name__}")
    verify_listing(schedule)
    check_tasks(len(schedule) * n_replicas)
    kinds, kind, microbatch = _with_recompute_and_steps(schedule, recompute, step)
    n_batches = schedule.n_batches
    compute = TaskGraph.of_kinds(kinds, kind, microbatch, n_batches=n_batches)
    cycles = compute.levels
    if cycles.min() < 0:
        verify(schedule)  # says who waits for whom
    if schedule.placement.n_paths > 1:
        cycles = _with_late_steps(compute, cycles)
    reduces = n_replicas * schedule.placement.n_paths > 1
    kinds, partners = _add_partners(compute, overlap, streams, reduces)
    issued = _issue(
        compute, CSR.group(cycles, int(cycles.max()) + 1), partners, overlap, n_replicas
    )
    del compute, cycles, kind, microbatch
    if n_replicas > 1:
        issued = _replicate(issued, n_replicas, len(kinds))
        kinds = kinds.replicated(n_replicas, schedule.n_devices)
    graph = TaskGraph.of_kinds(
        kinds,
        issued.kind,
        issued.microbatch,
        name=schedule.name,
        hosts=hosts,
        rendezvous=rendezvous,
        recompute=recompute,
        overlap=overlap,
        n_batches=n_batches,
        weight_versions=schedule.weight_versions,
    )
    if rendezvous and not overlap:  # only these may have to be reordered, or deadlock
        graph = graph.in_topological_order()
        verify(graph)
    return graph.as_verified()


def _with_recompute_and_steps(
    schedule: Schedule, recompute: str, step: str
) -> tuple[Kinds, NDArray[np.int32], NDArray[np.int32]]:
    """Put R right before each backward whose forward kept no activations, and STEPs last.

    Of several mini-batches each has its STEPs, after the last backward of the stage.
    """
    kinds, kind = compute_listing(schedule)
    microbatch = schedule.microbatch
    recomputed = frozenset({Op.B, Op.I}) if recompute != "never" else frozenset()
    backward = np.flatnonzero(kinds.is_op(recomputed))
    homes = np.asarray(schedule.placement.paths)
    path, stage = (
        x.ravel() if step == "flush" else np.empty(0, dtype=np.int64)
        for x in np.indices(homes.shape)
    )
    n_added = len(backward) + len(stage)
    added = Kinds(
        op=np.repeat([Op.R, Op.STEP], [len(backward), len(stage)]),
        device=np.concatenate([kinds.device[backward], homes[path, stage]]),
        stage=np.concatenate([kinds.stage[backward], stage]),
        replica=np.concatenate([kinds.replica[backward], path]),
        stream=np.full(n_added, StreamKind.COMPUTE),
    )
    r_of = np.full(len(kinds), -1, dtype=np.int32)
    r_of[backward] = len(kinds) + np.arange(len(backward))
    before = np.flatnonzero(r_of[kind] >= 0) if len(backward) else np.empty(0, dtype=np.int64)
    if recompute == "except_last":
        before = before[microbatch[before] != schedule.n_microbatches - 1]
    places = before - kinds.overlapped[kind[before]]  # not between the halves of one action
    steps, step_microbatch, step_places = _steps(schedule, path, stage)
    position = np.concatenate([step_places, places])
    kind, microbatch = (
        np.insert(column, position, np.concatenate(new))
        for column, new in (
            (kind, [(len(kinds) + len(backward) + steps).astype(np.int32), r_of[kind[before]]]),
            (microbatch, [step_microbatch, microbatch[before]]),
        )
    )
    return kinds.joined(added), kind, microbatch


def _steps(schedule: Schedule, path: Ints, stage: Ints) -> tuple[Ints, Ints, Ints]:
    """Return, of each STEP, which of the given stages it is of, its micro-batch, and its place."""
    homes, n_batches = np.asarray(schedule.placement.paths), schedule.n_batches
    of = np.arange(len(stage))
    if n_batches == 1:
        return of, np.full(len(of), -1, np.int32), schedule.ptr[homes[path, stage] + 1]
    size = schedule.n_microbatches // n_batches
    backward = np.flatnonzero((schedule.op == Op.B) | (schedule.op == Op.W))
    last = np.zeros((*homes.shape, n_batches), dtype=np.int64)
    place = (schedule.path, schedule.stage, schedule.microbatch // size)
    np.maximum.at(last, tuple(column[backward] for column in place), backward + 1)
    of, batch = np.repeat(of, n_batches), np.tile(np.arange(n_batches), len(of))
    microbatch = ((batch + 1) * size - 1).astype(np.int32)
    return of, microbatch, last[path[of], stage[of], batch]


def _with_late_steps(compute: TaskGraph, cycles: Ints) -> Ints:
    """Return the cycles with each STEP after the gradients of its stage on all paths."""
    cycles, stage = cycles.copy(), compute.stage
    gradients = np.flatnonzero(compute.is_op(frozenset({Op.B, Op.W})))
    done = np.zeros(compute.n_stages, dtype=cycles.dtype)
    np.maximum.at(done, stage[gradients], cycles[gradients])
    for step in np.flatnonzero(compute.is_op(frozenset({Op.STEP}))).tolist():
        before = cycles[compute.queue_predecessor[step]]
        cycles[step] = 1 + max(before, done[stage[step]])
    return cycles


class _Partners(NamedTuple):
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


def _add_partners(
    compute: TaskGraph, overlap: bool, streams: str, reduces: bool
) -> tuple[Kinds, _Partners]:
    """Add the kinds of messages, wherever a neighbour is elsewhere, and of reductions."""
    kinds, n_stages = compute.kinds, compute.n_stages
    homes = compute.homes
    n_devices = int(homes.max()) + 1
    none = np.full((4, len(kinds)), -1, dtype=np.int32)
    partners = _Partners(none[0], none[1], none[2], none[3], np.empty((0, len(homes)), np.int32))
    for recv, (send, offset) in PAIRS.items():
        carried = frozenset({Op.F} if send == Op.SEND_F else {Op.B, Op.I})
        of = np.flatnonzero(kinds.is_op(carried))
        to = kinds.stage[of] - offset
        of, to = of[(to >= 0) & (to < n_stages)], to[(to >= 0) & (to < n_stages)]
        of, to = (x[homes[kinds.replica[of], to] != kinds.device[of]] for x in (of, to))
        # B and I of a stage share the kinds of their message.
        place, first, shared = np.unique(
            kinds.replica[of] * n_stages + kinds.stage[of], return_index=True, return_inverse=True
        )
        replica, stage = np.divmod(place, n_stages)
        source, target = homes[replica, stage], homes[replica, to[first]]
        if not overlap:
            codes = [np.full_like(stage, StreamKind.COMPUTE)] * 2
        elif streams == "single":
            codes = [np.full_like(stage, StreamKind.COPY)] * 2
        else:
            codes = [StreamKind.send(target), StreamKind.recv(source)]
        partners.send[of] = len(kinds) + shared
        partners.recv[of] = len(kinds) + len(stage) + shared
        partners.channel[of] = (source * n_devices + target)[shared]
        kinds = kinds.joined(
            Kinds(np.full_like(stage, send), source, stage, replica, codes[0]),
            Kinds(np.full_like(stage, recv), target, to[first], replica, codes[1]),
        )
    if reduces:
        of = np.flatnonzero(kinds.is_op(frozenset({Op.B, Op.W})))
        partners.adds_to[of] = kinds.stage[of]
        stage, replica = (x.ravel() for x in np.indices(homes.T.shape))
        reduce = len(kinds) + np.arange(len(stage), dtype=np.int32).reshape(homes.T.shape)
        partners = partners._replace(reduce=reduce)
        stream = StreamKind.COLLECTIVE if overlap else StreamKind.COMPUTE
        op, code = np.full_like(stage, Op.REDUCE_GRAD), np.full_like(stage, stream)
        kinds = kinds.joined(Kinds(op, homes[replica, stage], stage, replica, code))
    return kinds, partners


class _Issued(NamedTuple):
    """Tasks in issue order, and where the phases of each clock cycle end, and each reduction."""

    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    ends: Ints


def _issue(
    compute: TaskGraph, cycles: CSR, partners: _Partners, overlap: bool, n_replicas: int
) -> _Issued:
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
    return _Issued(kind, microbatch, np.sort(np.concatenate([ends.ravel(), reduced.ravel()])))


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
    """Fill the last four; see `_issue`. ``messages`` are the producers, channel by channel."""
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


def _replicate(issued: _Issued, n_replicas: int, n_kinds: int) -> _Issued:
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
    return _Issued(kind, microbatch, n_replicas * issued.ends)

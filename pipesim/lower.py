"""From a schedule to a task graph: in named passes over the kinds of task, and two loops."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.capacity import check_tasks
from pipesim.csr import CSR, Ints
from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.graph import PAIRS, TaskGraph
from pipesim.issue import Partners, issue, replicated
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
    issued = issue(compute, CSR.group(cycles, int(cycles.max()) + 1), partners, overlap, n_replicas)
    del compute, cycles, kind, microbatch
    if n_replicas > 1:
        issued = replicated(issued, n_replicas, len(kinds))
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


def _add_partners(
    compute: TaskGraph, overlap: bool, streams: str, reduces: bool
) -> tuple[Kinds, Partners]:
    """Add the kinds of messages, wherever a neighbour is elsewhere, and of reductions."""
    kinds, n_stages = compute.kinds, compute.n_stages
    homes = compute.homes
    n_devices = int(homes.max()) + 1
    none = np.full((4, len(kinds)), -1, dtype=np.int32)
    partners = Partners(none[0], none[1], none[2], none[3], np.empty((0, len(homes)), np.int32))
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

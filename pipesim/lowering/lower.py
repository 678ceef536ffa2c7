"""From a schedule to a task graph: in named passes over the kinds of task, and two loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_flag, check_name
from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.grad_sync import (
    GradSyncArgument,
    checked_grad_sync,
    group_sizes,
    of_stages,
    to_text,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.hosts import Hosts, host_of_devices
from pipesim.graph.options import LoweringOptions
from pipesim.graph.schedule_checks import verify_listing
from pipesim.graph.skips import carried, checked_skips
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.graph.verify import verify
from pipesim.lowering.clock_cycles import issue, replicated
from pipesim.lowering.communication import Collectives, add_partners
from pipesim.lowering.exchanges import (
    ExchangeWork,
    SparseGradSync,
    checked_exchanges,
    ordered_exchanges,
)
from pipesim.lowering.issue_order import ISSUE_ORDERS, IssueOrder, in_issue_order
from pipesim.lowering.microbatch_streams import with_streams_of_microbatches
from pipesim.lowering.receive_before_recompute import gradients_first
from pipesim.lowering.recomputed_microbatches import (
    RECOMPUTE,
    Chosen,
    Recompute,
    recompute_label,
    with_chosen,
    with_recomputes,
)
from pipesim.ops import Op
from pipesim.scheduling.placement import LAYOUTS, Layout, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.host_memory import check_tasks

__all__ = ["RECOMPUTE", "Recompute", "lower"]

Streams = Literal["per_peer", "single", "per_microbatch"]
STREAMS: tuple[Streams, ...] = ("per_peer", "single", "per_microbatch")
#: Buckets that a stage may have; each is a task.
_MOST_BUCKETS = 1000


def lower(
    schedule: Schedule,
    *,
    recompute: Chosen = "listed",
    overlap: bool = True,
    streams: Streams = "per_peer",
    rendezvous: bool = False,
    hosts: Hosts = "one",
    host_threads: bool = False,
    issue_order: IssueOrder = "clock_cycle",
    step: Literal["flush", "none"] = "flush",
    n_replicas: int = 1,
    layout: Layout = "replica_major",
    grad_sync: GradSyncArgument = "last",
    n_buckets: int = 4,
    shard_optimizer: bool = False,
    sharded: Iterable[int] | int = (),
    exchange_work: ExchangeWork = "collective",
    prefetch_keys: bool = False,
    sparse_grad_sync: SparseGradSync = "every",
    skips: Iterable[tuple[int, int]] | str = (),
    portals: bool = True,
    recompute_first: bool = False,
    recompute_waits: bool = False,
) -> TaskGraph:
    """Lower a schedule to the tasks that the simulator and the executor run.

    Parameters
    ----------
    schedule
        Verified first.
    recompute
        Which micro-batches drop their activations after F and run R before their backward:
        ``"never"``, ``"always"``, or all ``"except_last"`` (GPipe, arXiv 1811.06965, section 2.3,
        and torchgpipe). R does not wait for the gradient. It comes where the schedule lists it,
        or else right before its backward. ``"listed"``: those that the schedule lists.
    overlap
        Whether transfers run on copy streams beside the compute stream. Without it a device sends
        right after it has computed and receives right before it computes, on ``compute`` (rule 5).
        What blocks there are bytes over bandwidth and ``Costs.output_seconds``: a sender goes on
        during the latency of its message, so that messages of latency alone block no sender.
    streams
        ``"per_peer"``: a copy stream a peer and direction. ``"single"``: one a device, which shows
        head-of-line blocking (rule 1). ``"per_microbatch"``: one a peer, direction and micro-batch,
        as torchgpipe has one a device and micro-batch.
    rendezvous
        Whether a SEND waits until its RECV is reached (rule 6).
    hosts
        ``"one"`` host issues for all devices, or one ``"per_device"`` (rule 7), or the number of
        each device's host, such as ``[0, 0, 1, 1]``: of each of ``n_replicas * n_devices`` devices,
        whole numbers from 0 without gaps.
    host_threads
        Whether several hosts are threads of one process, as in a `pipeexec.Pipeline` of one
        process and in torchgpipe: then a host waits until the others have issued what its next
        task needs. Otherwise they are processes, of which none waits for another (rule 7). Of one
        host it says nothing.
    issue_order
        In which order a host issues tasks. It changes when tasks are issued, never the order of a
        stream. Messages and collectives come right behind what makes them.

        - ``"clock_cycle"``: by distance from the first task, counted in compute tasks (torchgpipe,
          arXiv 2004.09910, section 3.1). The default: with hosts that are processes no other
          order that was tried took less time, and with one host none took over 2.5 % less. Where
          hosts are threads, GPipe may take less by micro-batch (``benchmarks/hosts.py``).
        - ``"microbatch_major"``: the forward of a micro-batch through all stages, then that of the
          next; so for backwards.
        - ``"stage_major"``: all micro-batches of a stage, then the next stage; back from the last.

        Where the schedule does not let a host go on like that, as in 1F1B, it takes the first of
        the tasks that it can issue; `pipesim.lowering.issue_order.in_issue_order` has the exact
        order.
    step
        ``"flush"`` ends with one optimizer step a stage, after all its gradients, or after those
        of each mini-batch; ``"none"`` ends with the gradients.
    n_replicas
        Data-parallel replicas of the pipeline, each on devices of its own. Where there are
        several, a stage's gradients are reduced over all of them, on a stream of its own if
        transfers overlap, as soon as its last one is there; its optimizer step waits for that.
        The paths of a bidirectional placement are replicas too, on the same devices.
    layout
        Which devices have consecutive numbers: those of a replica (``"replica_major"``), or the
        replicas of a stage (``"stage_major"``); see `pipesim.scheduling.placement.replica_devices`.
    grad_sync
        When gradients are reduced: once a mini-batch, after the ``"last"`` backward, as in the
        ``no_sync`` of torch's DistributedDataParallel (PyTorch Distributed, arXiv 2006.15704,
        section 3.2.4); after ``"every"`` micro-batch, as it does without; after every k
        micro-batches, for a number k that divides those of a mini-batch; or once in ``"bucketed"``
        parts, each as soon as the last backward has made its gradients (section 3.2.2 there).
        Stages may differ, such as embeddings and dense layers: give a sequence of one value a
        stage, the same as text, ``"every/2/last"``, or a mapping from stages, whose other stages
        have ``"last"``. Gradients that wait for a reduction are memory; see rule 10.
    n_buckets
        Of a stage, where gradients are bucketed; the first has those of the last layers.
    shard_optimizer
        Whether each replica steps its share of the parameters and then gathers the others (UNSHARD)
        as in ZeRO-1 (arXiv 1910.02054). `pipesim.Costs` then has REDUCE_GRAD as a reduce-scatter, a
        STEP of the share's seconds, and optimizer state of its bytes. Gradients are held whole.
    sharded
        Stages, or a stage, that are embeddings whose rows are spread over the replicas, as in
        HugeCTR's sparse operation kit. Their F looks up the rows that all replicas ask for, their
        B adds up the gradients of those rows; ALL_TO_ALLs exchange counts, keys and vectors around
        F and gradients before B. They reduce no gradients and are not recomputed.
    exchange_work
        Where a sharded stage groups keys by owner, puts vectors in the order of its input and sums
        the gradients of each key: as part of the exchanges, on the ``"collective"`` stream; or by
        tasks of their own (DISPATCH, REORDER) on the ``"compute"`` stream of its device, so that
        they compete with its other tasks, which wait behind them.
    prefetch_keys
        Whether a sharded stage 0 exchanges counts and keys of a micro-batch before the F of the one
        before, so that they overlap with its compute. The keys of the whole batch are there when
        a step begins. Later sharded stages get theirs from the stage before, as always.
    sparse_grad_sync
        After ``"every"`` micro-batch, before its B; or once, after the ``"last"`` backward of a
        sharded stage (``ALL_TO_ALL.accumulated``): gradients of all micro-batches, with the sum of
        each row that a replica has asked for. Both ends know the rows from the exchanges of keys.
    skips
        ``(source, target)`` pairs of stages between which tensors go beside the pipeline's
        outputs, such as a U-Net's long connections; each pair once, with source < target. Also as
        text, ``"0-3,1-2"``, or as a mapping, whose keys count, such as ``skip_bytes`` of `Costs`.
        Stages on one device hand over for free.
    portals
        Whether what a skip carries goes straight from the source's device to the target's, as in
        torchgpipe (arXiv 2004.09910). Otherwise it goes from stage to stage, and what
        crosses the border between two stages is one message beside the output. Gradients go back
        the same way.
    recompute_first
        Whether every R of a stage comes before its first backward, as where autograd runs all
        that it can early; by default each comes right before its own. It takes the activations
        of all micro-batches at once, and needs a schedule such as GPipe's, with all forwards of
        a stage before its backwards.
    recompute_waits
        Whether a device that has ``overlap=False`` receives a gradient before the R of that
        micro-batch, which then does not fill the wait for it; by default, right before B. So does
        torchgpipe on default streams: its host issues the copy of the gradient first.

    Returns
    -------
    TaskGraph
        Its ids are the issue order.

    Raises
    ------
    ArgumentError
        For ``hosts`` that are no such numbers, for skips that are no such pairs, for
        ``recompute_first`` where a forward comes later or the schedule lists R, for
        ``recompute_waits`` where transfers overlap, and for collectives that do not suit the
        schedule.
    ScheduleError
        If the schedule is wrong; see `pipesim.verify`.
    DeadlockError
        If the transfers, so ordered, would wait for each other for ever.
    CapacityError
        If the graph and its times would not fit in memory.
    """
    check_name("recompute mode", recompute, ("listed", *RECOMPUTE))
    check_name("streams", streams, STREAMS)
    check_name("issue_order", issue_order, ISSUE_ORDERS)
    check_name("step", step, ("flush", "none"))
    flags = {"overlap": overlap, "rendezvous": rendezvous, "portals": portals}
    flags |= {"recompute_first": recompute_first, "recompute_waits": recompute_waits}
    flags |= {"shard_optimizer": shard_optimizer, "host_threads": host_threads}
    check_name("layout", layout, LAYOUTS)
    for name, flag in flags.items():
        check_flag(name, flag)
    if recompute_waits and overlap:
        raise ArgumentError(
            "recompute_waits=True, but transfers overlap: a gradient is received on a stream of "
            "its own, and R never waits for it; add overlap=False, or leave recompute_waits out"
        )
    n_replicas = check_count("n_replicas", n_replicas)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"lower takes a Schedule, got {type(schedule).__name__}")
    verify_listing(schedule)
    check_tasks(len(schedule) * n_replicas)
    host = host_of_devices(hosts, n_replicas * schedule.n_devices)
    pairs = checked_skips(skips, schedule.n_stages)
    reduces = n_replicas * schedule.placement.n_paths > 1
    n_buckets = check_count("n_buckets", n_buckets)
    if n_buckets > _MOST_BUCKETS:
        raise ArgumentError(f"n_buckets must be at most {_MOST_BUCKETS}, got {n_buckets}")
    n_stages = schedule.n_stages
    given_sync = grad_sync
    grad_sync = checked_grad_sync(
        grad_sync, n_stages, schedule.n_microbatches // schedule.n_batches
    )
    syncs = of_stages(grad_sync, n_stages) if reduces else ()
    of_sharded = _checked_sharded(sharded, schedule)
    _check_named(given_sync, of_sharded)
    collectives = Collectives(
        buckets=[n_buckets if sync == "bucketed" else 1 for sync in syncs],
        groups=group_sizes(grad_sync, n_stages).tolist(),
        exchanges=checked_exchanges(of_sharded, exchange_work, prefetch_keys, sparse_grad_sync),
        unshards=shard_optimizer and n_replicas > 1,
    )
    _check_collectives(schedule, collectives, to_text(grad_sync), step)
    schedule = with_chosen(schedule, recompute, collectives.sharded)
    kinds, kind, microbatch = _with_recompute_and_steps(
        schedule, recompute, step, recompute_first, collectives.sharded
    )
    n_batches = schedule.n_batches
    compute = TaskGraph.of_kinds(
        kinds, kind, microbatch, options=LoweringOptions(n_batches=n_batches)
    )
    cycles = compute.levels
    if cycles.min() < 0:
        verify(schedule)  # says who waits for whom
    if schedule.placement.n_paths > 1:
        cycles = _with_late_steps(compute, cycles)
    borders = list(carried(pairs, portals))
    kinds, partners = add_partners(compute, overlap, streams, collectives, borders)
    groups = np.array(collectives.groups)
    issued = issue(compute, cycles, partners, overlap, n_replicas, groups)
    issued = ordered_exchanges(collectives.exchanges, kinds, issued)
    del compute, cycles, kind, microbatch
    if n_replicas > 1:
        issued = replicated(issued, n_replicas, len(kinds))
        kinds = kinds.replicated(replica_devices(n_replicas, schedule.n_devices, layout))
    kind, microbatch = issued.kind, issued.microbatch
    if overlap and streams == "per_microbatch":
        kinds, kind = with_streams_of_microbatches(kinds, kind, microbatch)
    if recompute_waits:
        order = gradients_first(kinds, kind, microbatch)
        kind, microbatch = kind[order], microbatch[order]
    graph = TaskGraph.of_kinds(
        kinds,
        kind,
        microbatch,
        name=schedule.name,
        host=host,
        options=LoweringOptions(
            recompute=recompute_label(schedule, recompute),
            overlap=overlap,
            rendezvous=rendezvous,
            host_threads=host_threads,
            n_batches=n_batches,
            grad_sync=grad_sync,
            weight_versions=schedule.weight_versions,
            skips=pairs,
            portals=portals,
        ),
    )
    if not overlap and (rendezvous or recompute_waits):  # may have to be reordered, or deadlock
        graph = graph.in_topological_order()
        verify(graph)
    return in_issue_order(graph, issue_order).as_verified()


def _checked_sharded(sharded: Iterable[int] | int, schedule: Schedule) -> tuple[int, ...]:
    """Return the numbers of the sharded stages."""
    try:
        if isinstance(sharded, (str, Mapping)):
            raise TypeError
        given = (sharded,) if isinstance(sharded, (int, np.integer)) else sharded
        stages = tuple(itertools.islice(given, schedule.n_stages + 1))
    except TypeError:
        raise ArgumentError(
            f"sharded must be the numbers of stages, such as [0], got {sharded!r}"
        ) from None
    for stage in stages:
        if check_count("sharded: a stage", stage, 0) >= schedule.n_stages:
            raise ArgumentError(
                f"sharded names stage {stage}; there are {schedule.n_stages} stages, "
                f"0..{schedule.n_stages - 1}"
            )
        if stage == schedule.n_stages - 1:
            raise ArgumentError(
                f"sharded names stage {stage}, the last one, which computes the loss; its vectors "
                "have to go to a stage after it"
            )
    if len(set(stages)) < len(stages):
        raise ArgumentError(f"sharded names a stage twice: {list(stages)}; name each once")
    return stages


def _check_named(grad_sync: GradSyncArgument, sharded: tuple[int, ...]) -> None:
    """Raise if a mapping of `lower` says when a stage reduces that reduces nothing."""
    named = set(grad_sync) & set(sharded) if isinstance(grad_sync, Mapping) else set()
    if named:
        raise ArgumentError(
            f"grad_sync names stage {min(named)}, which is sharded and reduces no gradients: it "
            'exchanges them; leave it out, and give sparse_grad_sync="every" or "last"'
        )


def _check_collectives(
    schedule: Schedule, collectives: Collectives, grad_sync: str, step: str
) -> None:
    """Raise for collectives that mean nothing for a schedule."""
    each = any(collectives.groups)
    if schedule.placement.n_paths > 1 and (each or collectives.sharded):
        what = f'grad_sync="{grad_sync}"' if each else f"sharded={list(collectives.sharded)}"
        raise ArgumentError(
            f"{what}, but schedule {schedule.name!r} has {schedule.placement.n_paths} paths, of "
            "which each has other micro-batches; take a schedule of one path"
        )
    if schedule.n_batches > 1 and step == "none" and collectives.buckets:
        raise ArgumentError(
            f'step="none", but schedule {schedule.name!r} has {schedule.n_batches} mini-batches, '
            "whose gradients are reduced over replicas: without steps between them those of one "
            "would be added to those of the next; leave step out, or take n_replicas=1"
        )
    if collectives.unshards and schedule.n_batches > 1:
        raise ArgumentError(
            f"shard_optimizer=True, but schedule {schedule.name!r} steps {schedule.n_batches} "
            "times while micro-batches are in flight; take a schedule of one mini-batch"
        )
    if collectives.sharded and schedule.n_batches > 1:
        raise ArgumentError(
            f"sharded={list(collectives.sharded)}, but schedule {schedule.name!r} steps "
            f"{schedule.n_batches} times while micro-batches are in flight, and shards have no "
            "versions of their weights; take a schedule of one mini-batch"
        )


def _with_recompute_and_steps(
    schedule: Schedule,
    recompute: Chosen,
    step: str,
    recompute_first: bool,
    sharded: tuple[int, ...],
) -> tuple[Kinds, NDArray[np.int32], NDArray[np.int32]]:
    """Put R before each backward whose forward kept no activations, and STEPs last.

    Of several mini-batches each has its STEPs, after the last backward of the stage.
    """
    kinds, kind = compute_kinds(schedule)
    kinds, recomputes, of_microbatch, places = with_recomputes(
        schedule, kinds, kind, recompute, sharded, first=recompute_first
    )
    homes = np.asarray(schedule.placement.paths)
    path, stage = (
        x.ravel() if step == "flush" else np.empty(0, dtype=np.int64)
        for x in np.indices(homes.shape)
    )
    added = Kinds(
        op=np.full_like(stage, Op.STEP),
        device=homes[path, stage],
        stage=stage,
        replica=path,
        stream=np.full_like(stage, StreamKind.COMPUTE),
    )
    steps, step_microbatch, step_places = _steps(schedule, path, stage)
    position = np.concatenate([step_places, places])
    kind, microbatch = (
        np.insert(column, position, np.concatenate(new))
        for column, new in (
            (kind, [(len(kinds) + steps).astype(np.int32), recomputes]),
            (schedule.microbatch, [step_microbatch, of_microbatch]),
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

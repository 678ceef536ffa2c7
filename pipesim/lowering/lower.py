"""`lower`: turn a schedule into a task graph, in named passes and two loops.

`lower` is longer than 40 lines: half of them list its options, the rest has one line for each pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pipesim.errors import ArgumentError, check_count
from pipesim.graph.grad_sync import GradSyncArgument
from pipesim.graph.graph import TaskGraph
from pipesim.graph.hosts import Hosts, host_of_devices
from pipesim.graph.options import LoweringOptions
from pipesim.graph.schedule_checks import verify_listing
from pipesim.graph.skips import border_crossings, checked_skips
from pipesim.graph.verify import verify
from pipesim.lowering.clock_cycles import issue, replicated
from pipesim.lowering.communication import add_partners
from pipesim.lowering.exchanges import (
    ExchangeWork,
    SparseGradSync,
    checked_exchanges,
    ordered_exchanges,
)
from pipesim.lowering.issue_order import IssueOrder, in_issue_order
from pipesim.lowering.lower_options import (
    Streams,
    check_options,
    checked_collectives,
    checked_sharded,
)
from pipesim.lowering.microbatch_streams import with_streams_of_microbatches
from pipesim.lowering.receive_before_recompute import gradients_first
from pipesim.lowering.recompute_and_steps import clock_cycles, with_recomputes_and_steps
from pipesim.lowering.recomputed_microbatches import (
    RECOMPUTE,
    Chosen,
    Recompute,
    recompute_label,
    with_chosen,
)
from pipesim.scheduling.placement import Layout, replica_devices
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.host_memory import check_tasks

__all__ = ["RECOMPUTE", "Recompute", "lower"]


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
    check_options(
        recompute=recompute,
        streams=streams,
        issue_order=issue_order,
        step=step,
        layout=layout,
        overlap=overlap,
        rendezvous=rendezvous,
        host_threads=host_threads,
        shard_optimizer=shard_optimizer,
        prefetch_keys=prefetch_keys,
        portals=portals,
        recompute_first=recompute_first,
        recompute_waits=recompute_waits,
    )
    n_replicas = check_count("n_replicas", n_replicas)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"lower takes a Schedule, got {type(schedule).__name__}")
    verify_listing(schedule)
    check_tasks(len(schedule) * n_replicas)
    host = host_of_devices(hosts, n_replicas * schedule.n_devices)
    pairs = checked_skips(skips, schedule.n_stages)
    shards = checked_sharded(sharded, schedule)
    exchanges = checked_exchanges(shards, exchange_work, prefetch_keys, sparse_grad_sync)
    collectives = checked_collectives(
        schedule, grad_sync, n_buckets, exchanges, n_replicas, shard_optimizer, step
    )
    schedule = with_chosen(schedule, recompute, shards)
    options = LoweringOptions(
        recompute=recompute_label(schedule, recompute),
        overlap=overlap,
        rendezvous=rendezvous,
        host_threads=host_threads,
        n_batches=schedule.n_batches,
        grad_sync=collectives.grad_sync,
        weight_versions=schedule.weight_versions,
        skips=pairs,
        portals=portals,
    )
    compute = with_recomputes_and_steps(schedule, recompute, step, recompute_first, shards)
    cycles = clock_cycles(schedule, compute)
    borders = list(border_crossings(pairs, portals))
    kinds, partners = add_partners(compute, overlap, streams, collectives, borders)
    issued = issue(compute, cycles, partners, overlap, n_replicas, collectives.groups)
    issued = ordered_exchanges(exchanges, kinds, issued)
    del compute, cycles
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
        kinds, kind, microbatch, name=schedule.name, host=host, options=options
    )
    if not overlap and (rendezvous or recompute_waits):  # may have to be reordered, or deadlock
        graph = graph.in_topological_order()
        verify(graph)
    return in_issue_order(graph, issue_order).as_verified()

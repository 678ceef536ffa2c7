"""`lower`: turn a schedule into a task graph, in named passes.

`lower` lists its options and has one line for each pass. `lower_replica` lowers one of several
equal replicas alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pipesim.errors import ArgumentError
from pipesim.framework.framework import (
    BEST_CASE,
    Buckets,
    Framework,
    GatherParameters,
    as_framework,
    schedule_reason,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import (
    GradSyncArgument,
    Hosts,
    LoweredSchedule,
    OffloadArgument,
    OffloadTarget,
    PrefetchArgument,
    checked_grad_sync,
    checked_prefetch,
    grad_sync_by_stage,
    group_sizes,
    host_of_devices,
    values_text,
)
from pipesim.graph.skips import border_crossings, checked_skips
from pipesim.graph.verify import verify, verify_listing
from pipesim.lowering.communication import (
    Collectives,
    add_partners,
    gradients_first,
    with_streams_of_microbatches,
)
from pipesim.lowering.device_collectives import (
    DeviceCollectives,
    checked_device_collectives,
    with_device_collectives,
)
from pipesim.lowering.exchanges import (
    Exchanges,
    ExchangeWork,
    SparseGradSync,
    checked_exchanges,
    ordered_exchanges,
)
from pipesim.lowering.expert_segments import checked_experts
from pipesim.lowering.framework_options import LAYOUT_OF_RANKS, framework_options
from pipesim.lowering.issue_order import (
    IssueOrder,
    in_issue_order,
    issue,
    replicated,
    replicated_kinds,
)
from pipesim.lowering.offloads import Offloads, checked_offloads, with_offloads
from pipesim.lowering.parameter_shards import (
    ParameterShards,
    ShardParameters,
    checked_parameter_shards,
    with_parameter_shards,
)
from pipesim.lowering.recomputes import (
    Chosen,
    clock_cycles,
    recompute_label,
    with_chosen,
    with_recomputes_and_steps,
)
from pipesim.scheduling.memory_checks import check_tasks
from pipesim.scheduling.placement import Layout, is_first_on_device, replica_devices
from pipesim.scheduling.schedule import Schedule, forward_actions
from pipesim.utils.checks import Count, Whole, checked

Streams = Literal["per_peer", "single", "per_microbatch"]


def checked_collectives(
    schedule: Schedule,
    grad_sync: GradSyncArgument,
    n_buckets: int,
    exchanges: Exchanges,
    n_replicas: int,
    shard_optimizer: bool,
    gather_parameters: GatherParameters,
    step: str,
) -> Collectives:
    """Return the collectives of a schedule, from options of `pipesim.lower`."""
    n_stages, n_batches, n_paths = schedule.n_stages, schedule.n_batches, schedule.placement.n_paths
    syncs = checked_grad_sync(grad_sync, n_stages, schedule.n_microbatches // n_batches)
    named = set(grad_sync) & set(exchanges.sharded) if isinstance(grad_sync, Mapping) else ()
    if named:
        raise ArgumentError(
            f"grad_sync names stage {min(named)}, which is sharded and reduces no gradients: it "
            'exchanges them; leave it out, and give sparse_grad_sync="every" or "last"'
        )
    groups = tuple(group_sizes(syncs, n_stages).tolist())
    if n_paths > 1 and any(groups):
        raise ArgumentError(
            f'grad_sync="{values_text(syncs)}", but schedule {schedule.name!r} has {n_paths} '
            "paths, each with other micro-batches; take a schedule of one path"
        )
    reduces = n_replicas * n_paths > 1
    if reduces and n_batches > 1 and step == "none":
        raise ArgumentError(
            f'step="none", but schedule {schedule.name!r} has {n_batches} mini-batches, '
            "whose gradients are reduced over replicas: without steps between them those of one "
            "would be added to those of the next; leave step out, or take n_replicas=1"
        )
    # The paths of a bidirectional pipeline have a whole optimizer each.
    shares_steps = shard_optimizer and (n_replicas > 1 or schedule.placement.has_replicas)
    if shares_steps and n_batches > 1:
        raise ArgumentError(
            f"shard_optimizer=True, but schedule {schedule.name!r} steps {n_batches} "
            "times while micro-batches are in flight; take a schedule of one mini-batch"
        )
    stages = grad_sync_by_stage(syncs, n_stages) if reduces else ()
    n_copies = is_first_on_device(np.asarray(schedule.placement.paths)).sum(axis=0) * n_replicas
    buckets = tuple(
        (n_buckets if sync == "bucketed" else 1) if n > 1 else 0
        for sync, n in zip(stages, n_copies.tolist(), strict=False)
    )
    unshards = shares_steps and gather_parameters == "after_step"
    gathered = tuple((n_copies > 1).tolist()) if unshards else ()
    return Collectives(syncs, buckets, groups, exchanges, gathered)


def forward_collectives(collectives: Collectives) -> Collectives:
    """Return the collectives of a forward-only graph: exchanges, but no reductions and gathers."""
    return collectives._replace(
        grad_sync="last",
        buckets=(),
        groups=(0,) * len(collectives.groups),
        exchanges=collectives.exchanges._replace(accumulates=False),
        unshards=(),
    )


@checked
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
    n_replicas: Count = 1,
    layout: Layout | None = None,
    grad_sync: GradSyncArgument | None = None,
    n_buckets: Buckets | None = None,
    shard_optimizer: bool = False,
    gather_parameters: GatherParameters | None = None,
    sharded: Iterable[int] | int = (),
    exchange_work: ExchangeWork = "collective",
    prefetch_keys: bool = False,
    sparse_grad_sync: SparseGradSync = "every",
    skips: Iterable[tuple[int, int]] | str = (),
    portals: bool = True,
    recompute_first: bool = False,
    recompute_waits: bool = False,
    forward_only: bool = False,
    prompt_slices: Whole = 0,
    tied: Iterable[Iterable[int]] | str = (),
    grad_norm: bool = False,
    prefetch: PrefetchArgument = 1,
    offload: OffloadArgument = "none",
    offload_to: OffloadTarget = "host",
    shard_parameters: ShardParameters = "none",
    expert_layers: Iterable[float] | float = (),
    expert_replicas: Count | None = None,
    blocking_messages: bool | None = None,
    framework: Framework | Mapping[str, Any] | str | None = None,
) -> TaskGraph:
    """Lower a schedule to the tasks that the simulator and the executor run.

    Parameters
    ----------
    schedule
        Schedule; verified first.
    recompute
        Micro-batches that drop their activations after F and run R before their backward:
        ``"never"``, ``"always"``, or all ``"except_last"`` (GPipe, arXiv 1811.06965, section 2.3,
        and torchgpipe). ``"listed"``: those for which the schedule lists R. R does not wait for the
        gradient. It runs where the schedule lists it, or else right before its backward.
    overlap
        Whether transfers run on copy streams beside the compute stream. If False, a device sends
        right after its compute task and receives right before it, on ``compute`` (rule 5). A
        message then blocks the stream of its sender for bytes over bandwidth and
        ``Costs.output_seconds``, but not for its latency.
    streams
        ``"per_peer"``: one copy stream for each peer and direction. ``"single"``: one for each
        device, which shows head-of-line blocking (rule 1). ``"per_microbatch"``: one for each peer,
        direction and micro-batch; torchgpipe has one for each device and micro-batch.
    rendezvous
        Whether a SEND waits until its RECV is reached (rule 6).
    hosts
        ``"one"`` host issues for all devices, or one host ``"per_device"`` (rule 7). Or a sequence
        with the number of the host of each of ``n_replicas * n_devices`` devices, such as
        ``[0, 0, 1, 1]``: whole numbers from 0 without gaps.
    host_threads
        Whether several hosts are threads of one process, as in a `pipeexec.Pipeline` of one
        process and in torchgpipe. A host then waits until the others have issued the dependencies
        of its next task. Otherwise hosts are processes that do not wait for each other (rule 7). It
        has no effect with one host.
    issue_order
        Order in which a host issues tasks. It changes issue times, but never the order of a stream.
        Messages and collectives come right behind their producers.

        - ``"clock_cycle"``: by distance from the first task, counted in compute tasks (torchgpipe,
          arXiv 2004.09910, section 3.1). This is the default: with hosts that are processes, no
          other tested order took less time; with one host, none took over 2.5 % less. With hosts
          that are threads, GPipe may take less time by micro-batch (``benchmarks/hosts.py``).
        - ``"microbatch_major"``: the forward of a micro-batch through all stages, then that of the
          next; likewise for backwards.
        - ``"stage_major"``: all micro-batches of a stage, then those of the next stage; backwards
          from the last stage.

        If the schedule does not allow this order, as in 1F1B, the host issues the first of the
        tasks that it can issue; `pipesim.lowering.issue_order.in_issue_order` has the exact order.
    step
        ``"flush"``: one optimizer step for each stage, after all its gradients, or after those of
        each mini-batch. ``"none"``: no optimizer steps; the graph ends with the gradients.
    n_replicas
        Number of data-parallel replicas of the pipeline, each on devices of its own. With several,
        the gradients of a stage are reduced over all of them once the last gradient is complete, on
        a stream of its own if transfers overlap. The optimizer step waits for the reduction. The
        paths of a bidirectional placement are replicas too, on the same devices.
    layout
        Devices with consecutive numbers: those of a replica (``"replica_major"``), or those of the
        replicas of a stage (``"stage_major"``); see `pipesim.scheduling.placement.replica_devices`.
        None (the default) for ``"replica_major"``, if ``framework`` has no order of ranks.
    grad_sync
        When gradients are reduced:

        - ``"last"``: once a mini-batch, after the last backward, as with ``no_sync`` of torch's
          DistributedDataParallel (PyTorch Distributed, arXiv 2006.15704, section 3.2.4).
        - ``"every"``: after every micro-batch, as DistributedDataParallel does without ``no_sync``.
        - A number k: after every k micro-batches; k must divide the micro-batches of a mini-batch.
        - ``"bucketed"``: once a mini-batch in buckets, each once the last backward has completed
          its gradients (section 3.2.2 there).

        Stages may differ, such as embeddings and dense layers: give a sequence of one value a
        stage, the same as text, ``"every/2/last"``, or a mapping from stages, whose other stages
        have ``"last"``. Gradients that wait for a reduction occupy memory; see rule 10.
    n_buckets
        Number of buckets of a stage with bucketed gradients; the first has those of the last
        layers.
    shard_optimizer
        Whether each replica updates its share of the parameters and then gathers the others
        (UNSHARD), as in ZeRO-1 (arXiv 1910.02054). In `pipesim.Costs`, REDUCE_GRAD is then a
        reduce-scatter, and STEP and optimizer state have the seconds and bytes of the share. Each
        replica still holds all gradients of a stage.
    gather_parameters
        When replicas that share the optimizer gather parameters:

        - ``"after_step"``: each stage after its STEP.
        - ``"before_forward"``: each stage before its first F in the next step, as with
          ``--overlap-param-gather`` of Megatron-LM. A step is simulated alone, so that the gathers
          of what the step before has changed stand at its start: all at once, in the order in which
          a device needs its stages. They run behind the first forwards of other stages.
    sharded
        Stage, or stages, that are embeddings with rows spread over the replicas, as in HugeCTR's
        sparse operation kit. Their F looks up the rows that all replicas request, and their B sums
        the gradients of these rows. ALL_TO_ALLs exchange counts, keys and vectors around F, and
        gradients before B. Sharded stages reduce no gradients and are not recomputed.
    exchange_work
        Where a sharded stage groups keys by owner, puts vectors in the order of its input and sums
        the gradients of each key. ``"collective"``: as part of the exchanges, on their stream.
        ``"compute"``: in tasks of their own (DISPATCH, REORDER) on the compute stream of its
        device, where other tasks wait behind them.
    prefetch_keys
        Whether a sharded stage 0 exchanges counts and keys of a micro-batch before the F of the
        previous one, so that they overlap with its compute. The keys of the whole batch are known
        when a step begins. Later sharded stages still get their keys from the stage before.
    sparse_grad_sync
        When sharded stages exchange gradients: for ``"every"`` micro-batch, before its B; or once,
        after the ``"last"`` backward of a sharded stage (``ALL_TO_ALL.accumulated``). The one
        exchange then has, for each row that a replica requested, the sum of its gradients over all
        micro-batches. Both ends know the rows from the exchanges of keys.
    skips
        ``(source, target)`` pairs of stages with tensors beside the pipeline's outputs, such as the
        long connections of a U-Net; each pair once, with source < target. Also as text,
        ``"0-3,1-2"``, or as a mapping with such pairs as keys, such as ``skip_bytes`` of `Costs`.
        Skips between stages on one device need no message and take no time. A placement with
        ``edges`` has its pairs there, and takes none here.
    portals
        Whether the tensors of a skip go directly from the source's device to the target's, as in
        torchgpipe (arXiv 2004.09910). Otherwise they go from stage to stage; all tensors of skips
        that cross the border between two stages are one message beside the output. Gradients take
        the same way back.
    recompute_first
        Whether every R of a stage comes before its first backward, as if autograd ran all
        recomputes early. By default each R comes right before its own backward. It holds the
        activations of all micro-batches at once, and needs a schedule such as GPipe's, with all
        forwards of a stage before its backwards.
    recompute_waits
        Whether a device with ``overlap=False`` receives a gradient before the R of that
        micro-batch, so that R does not fill the wait for it. By default the device receives it
        right before B. torchgpipe on default streams receives it before R: its host issues the copy
        of the gradient first.
    forward_only
        Whether the graph has only the F of the schedule, with their messages and exchanges: an
        evaluation, or an inference. Each device keeps the order of its F. Options of backwards,
        recomputes, reductions and optimizer steps are checked as always, but have no effect. F
        keeps no activations; see rule 10.
    prompt_slices
        Number of slices of each sequence that are its prompt, in a ``forward_only`` graph. Later
        slices are decode steps: F of stage 0 needs the token that F of the last stage computes of
        the slice before. On another device it comes as a message without bytes, which takes the
        latency. 0 (the default): all slices are known at the start.
    tied
        Groups of stages with copies of one parameter, such as embedding and head: ``[(0, 7)]``,
        or the text ``"0-7"``. REDUCE_TIED sums the gradients of the copies once a mini-batch,
        before the STEPs of the stages. It is one collective for each group and replica, with one
        member on each device of the group. The member has the number of the lowest of the group's
        stages on its device, and the number of the group as part.
    grad_norm
        Whether the norm of all gradients, over all stages and replicas, is computed between
        backward and optimizer, such as to clip gradients. GRAD_NORM is one collective with one
        member a device, on the compute stream. The member has the number of the lowest stage of
        the lowest replica on its device.
    prefetch
        Number of compute tasks (F, B, I, W, R) of a device that a fetch, RELOAD or UNSHARD, may
        run beside before the task that needs it. The fetch needs the compute task that comes
        ``prefetch + 1`` places before its consumer; see `pipesim.graph.dependencies`. Devices of
        the pipeline may differ, so that their gathers do not meet on one link: give a sequence of
        one number a device, the same as text, ``"1/2/2"``, or a mapping from devices, whose other
        devices have 1.
    offload
        Activations that wait off their device for their backward (PipeOffload, arXiv 2503.01328):
        OFFLOAD moves them after F, and RELOAD brings them back before R, B or I, on streams of
        their own if transfers overlap.

        - ``"none"``: they stay on the device.
        - ``"all"``: those of every micro-batch and stage.
        - A share, such as 0.5: that share of the bytes of each micro-batch.
        - ``"longest:0.5"``: at most the half of a device's micro-batches and stages, all bytes of
          those that live longest. A lifespan is the number of compute tasks of the device from F to
          the consumer; of equal ones, lower stages and lower micro-batches are offloaded.
        - ``"above:4"``: those beyond 4 micro-batches and stages that a device would hold at once,
          of which the last needed go. Copies count as long as a compute task each.

        Stages may differ: give a sequence of one value a stage, the same as text,
        ``"all/0.5/none"``, or a mapping from stages, whose other stages have ``"none"``. There
        ``"longest:0.5"`` is the half of the stage's micro-batches.

        Activations that are needed again within ``prefetch + 1`` compute tasks stay on the device
        with every value, such as those of the last stage in 1F1B. Micro-batches that are recomputed
        keep only their input: OFFLOAD moves all of that, whatever the share, and nothing for stage
        0, whose input is the caller's. Sharded stages offload nothing. The link to the host is
        `Network.host`.
    offload_to
        Where activations wait: in the memory of the ``"host"``, or of a ``"peer"``, device
        p - 1 - i for device i of p, over the network between both (BPipe, Kim et al., ICML 2023).
        With ``offload="above:k"`` and k = ceil((p + 2) / 2), no device of 1F1B holds more
        than k micro-batches, of p otherwise. The middle one of an odd number offloads nothing.
    shard_parameters
        Whether each replica holds a share of the parameters, gradients and optimizer of each stage,
        as in FSDP and ZeRO-3 (arXiv 1910.02054), and how long it keeps gathered parameters. UNSHARD
        gathers them before a use: an F, or a backward. RESHARD frees them.

        - ``"none"``: all replicas hold all parameters.
        - ``"every"``: they are freed after each use (``reshard_after_forward=True`` of torch's
          ``fully_shard``).
        - A number k: a device keeps those of the k stages that it uses next, as
          torch.distributed.pipelining does with ``max_active_stages=k``. With 1, consecutive uses
          of one stage share an UNSHARD.
        - ``"step"``: from the first use in a step to the last one. A step then moves as many bytes
          as in ZeRO-2, and holds at most as many.

        REDUCE_GRAD is then a reduce-scatter, as often as ``grad_sync`` says. Stages among
        ``sharded`` keep their shards of rows.
    expert_layers
        Number of layers with experts of each stage, one number or one a stage, such as
        ``Costs.expert_layers``. F, B and I of a stage with n such layers are 2n + 1 tasks
        (segments), with exchanges of tokens between them (ALL_TO_ALL) on a stream of their own. If
        the schedule pairs F and B (DualPipe), their segments alternate, so that the exchanges of
        one run behind the compute of the other; see rule 3. R has no segments: its exchanges are
        part of its seconds.
    expert_replicas
        Number of replicas that together have all experts, and exchange tokens; such as
        ``Costs.expert_replicas``. It divides ``n_replicas``: replicas from 0 on are the first such
        group. None: all replicas.
    blocking_messages
        Whether messages between stages run on the compute stream as with ``overlap=False``, while
        collectives and copies overlap: Megatron-LM's 1F1B without interleaving.
    framework
        What the training framework does, as a `pipesim.Framework`, the name of a preset, or a
        mapping of its attributes. It gives ``grad_sync``, ``n_buckets``, ``gather_parameters``,
        ``blocking_messages`` and ``layout``, where they are None (the default), as far as they suit
        the other options. None (the default) for ``"last"``, 4, ``"after_step"`` and False. Give
        it to `pipesim.Transformer.costs` too.

    Returns
    -------
    TaskGraph
        Graph; its task ids are the issue order.

    Raises
    ------
    ArgumentError
        If the framework does not run the schedule.
    ScheduleError
        If the schedule is wrong; see `pipesim.verify`.
    DeadlockError
        If transfers in this order would wait for each other for ever.
    CapacityError
        If the graph and its times would not fit in memory.

    Examples
    --------
    Four F, four B and two STEP, and a SEND and a RECV for each output and each gradient:

    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", n_devices=2, n_microbatches=2))
    >>> graph
    <TaskGraph 1f1b: 18 tasks, 2 devices, 2 stages, 2 micro-batches, recompute=never>
    >>> [str(graph.task(k)) for k in range(4)]
    ['0F0', '0SEND_F0', '1RECV_F0', '0F1']
    """
    arguments = {name: value for name, value in locals().items() if name != "schedule"}
    if recompute_waits and overlap:
        raise ArgumentError(
            "recompute_waits=True, but transfers overlap: a gradient is received on its own "
            "stream, and R never waits for it; add overlap=False, or leave recompute_waits out"
        )
    verify_listing(schedule)
    check_tasks(len(schedule.op) * n_replicas)
    n_stages = schedule.n_stages
    host = host_of_devices(hosts, n_replicas * schedule.n_devices)
    pairs = checked_skips(skips, n_stages)
    edges = schedule.placement.edges
    if edges and (pairs or not portals):
        raise ArgumentError(
            f"the stages of schedule {schedule.name!r} have edges, between which all tensors go; "
            "leave skips and portals out, and add a pair of stages to Placement(edges=), with its "
            "bytes as skip_bytes of the costs"
        )
    exchanges = checked_exchanges(schedule, sharded, exchange_work, prefetch_keys, sparse_grad_sync)
    shards = exchanges.sharded
    arguments["framework"] = framework = as_framework(framework)
    if reason := schedule_reason(framework, schedule.name, schedule.n_devices):
        raise ArgumentError(reason)
    own = framework_options(
        framework, schedule.placement, n_replicas=n_replicas, shard_optimizer=shard_optimizer,
        shard_parameters=shard_parameters,
    )  # fmt: skip
    n_buckets = own.n_buckets if n_buckets is None else n_buckets
    gathers = own.gather_parameters if gather_parameters is None else gather_parameters
    blocks = own.blocking_messages if blocking_messages is None else blocking_messages
    sends_beside = overlap and not blocks
    layout = layout or LAYOUT_OF_RANKS.get(framework.rank_order, "replica_major")
    collectives = checked_collectives(
        schedule, own.grad_sync if grad_sync is None else grad_sync, n_buckets, exchanges,
        n_replicas, shard_optimizer, gathers, step,
    )  # fmt: skip
    experts, n_sharing = checked_experts(
        expert_layers, n_stages, shards, expert_replicas, n_replicas
    )
    if any(experts) and schedule.placement.has_replicas:
        raise ArgumentError(
            f"expert_layers={experts}, but the paths of schedule {schedule.name!r} are replicas "
            "with other micro-batches each, which exchange no tokens; leave expert_layers out, or "
            "give n_replicas to a schedule of one path"
        )
    of_devices = checked_device_collectives(schedule, tied, grad_norm, shards, step)
    groups = of_devices.tied
    arguments["prefetch"] = prefetch = checked_prefetch(prefetch, schedule.n_devices)
    offloads = checked_offloads(offload, prefetch, schedule, shards, offload_to)
    parameters = checked_parameter_shards(
        schedule, shard_parameters, gathers, prefetch, shards, n_replicas=n_replicas,
        tied=groups, shard_optimizer=shard_optimizer, grad_sync=collectives.grad_sync,
    )  # fmt: skip
    # Iterables were checked, and may be used up.
    arguments |= {"hosts": host.tolist(), "skips": pairs, "sharded": shards, "tied": groups}
    arguments |= {"offload": offloads.text, "expert_layers": experts}
    if grad_sync is not None:
        arguments["grad_sync"] = collectives.grad_sync
    source = LoweredSchedule(schedule, arguments)
    if prompt_slices and (
        not forward_only or schedule.n_slices < 2 or shards or not sends_beside
        or schedule.placement.n_paths > 1 or edges
    ):  # fmt: skip
        raise ArgumentError(
            f"prompt_slices={prompt_slices} needs forward_only=True, a schedule of one path with "
            "several slices a sequence (schedule.with_slices), messages that overlap, and no "
            "sharded stages or edges of stages"
        )
    if forward_only:
        schedule, collectives = forward_actions(schedule), forward_collectives(collectives)
        recompute, step, recompute_first, recompute_waits = "never", "none", False, False
        exchanges, of_devices = collectives.exchanges, DeviceCollectives()
        offloads = Offloads()
        parameters = parameters if parameters.frees else ParameterShards()
    schedule = with_chosen(schedule, recompute, shards)
    compute = with_recomputes_and_steps(
        schedule, recompute, step, recompute_first, shards, experts,
        forward_only=forward_only, prompt_slices=prompt_slices,
    )  # fmt: skip
    cycles = clock_cycles(schedule, compute)
    borders = tuple(border_crossings(compute.skips or pairs, portals))
    borders += ((schedule.n_stages - 1, 0),) * (prompt_slices > 0)
    kinds, partners = add_partners(
        compute.kinds, sends_beside, overlap, streams, collectives, borders, edges
    )
    issued = issue(compute, cycles, partners, sends_beside, n_replicas, collectives.groups)
    issued = ordered_exchanges(exchanges, kinds, issued)
    kinds, issued = with_device_collectives(of_devices, kinds, issued, overlap)
    kinds, issued = with_parameter_shards(parameters, kinds, issued, overlap)
    kinds, issued, shares = with_offloads(offloads, kinds, issued, overlap, schedule.name, edges)
    options = replace(
        compute.options,
        recompute=recompute_label(schedule, recompute),
        overlap=overlap,
        rendezvous=rendezvous,
        host_threads=host_threads,
        grad_sync=collectives.grad_sync,
        skips=pairs,
        portals=portals,
        tied=of_devices.tied,
        prefetch=prefetch,
        expert_replicas=n_sharing,
        offload_shares=shares,
        offload_to="host" if offloads.is_none else offload_to,
        source=source,
    )
    del compute, cycles
    if n_replicas > 1:
        devices = replica_devices(n_replicas, schedule.n_devices, layout)
        issued = replicated(issued, n_replicas, len(kinds))
        kinds = replicated_kinds(kinds, devices)
        if isinstance(prefetch, tuple):
            ahead = np.empty(devices.size, dtype=object)  # whole numbers of any size
            ahead[devices] = prefetch
            options = replace(options, prefetch=tuple(ahead))
    kind, microbatch = issued.kind, issued.microbatch
    if prompt_slices:  # tokens are sent for decode steps alone
        following = microbatch % schedule.n_slices + 1
        is_needed = (following >= prompt_slices) & (following < schedule.n_slices)
        kept = is_needed | ~kinds.returns_tokens[kind]
        kind, microbatch = kind[kept], microbatch[kept]
    if sends_beside and streams == "per_microbatch":
        kinds, kind = with_streams_of_microbatches(kinds, kind, microbatch)
    if recompute_waits:
        order = gradients_first(kinds, kind, microbatch)
        kind, microbatch = kind[order], microbatch[order]
    graph = TaskGraph.of_kinds(
        kinds, kind, microbatch, name=schedule.name, host=host, options=options
    )
    if not sends_beside and (rendezvous or recompute_waits):  # may need another order, or deadlock
        graph = graph.in_topological_order()
        verify(graph)
    return in_issue_order(graph, issue_order).as_verified()


def lower_replica(
    schedule: Schedule,
    *,
    replicated: bool,
    shard_optimizer: bool,
    framework: Framework = BEST_CASE,
    shard_parameters: ShardParameters = "none",
    grad_sync: GradSyncArgument | None = None,
) -> TaskGraph:
    """Lower one of several equal replicas alone, with its part in their collectives.

    The tasks are those of the first copy (`pipesim.graph.copies`) of
    ``lower(schedule, n_replicas=n)`` for any ``n`` above 1 if ``replicated``, else of one replica.
    Other arguments are those of `lower`.
    """
    verify_listing(schedule)
    check_tasks(len(schedule.op))
    n_replicas = 2 if replicated else 1
    own = framework_options(
        framework, schedule.placement, n_replicas=n_replicas, shard_optimizer=shard_optimizer,
        shard_parameters=shard_parameters,
    )  # fmt: skip
    collectives = checked_collectives(
        schedule, grad_sync or own.grad_sync, own.n_buckets, Exchanges(), n_replicas,
        shard_optimizer, own.gather_parameters, "flush",
    )  # fmt: skip
    parameters = checked_parameter_shards(
        schedule, shard_parameters, own.gather_parameters, 1, (), n_replicas=n_replicas,
        shard_optimizer=shard_optimizer, grad_sync=collectives.grad_sync, tied=(),
    )  # fmt: skip
    compute = with_recomputes_and_steps(schedule, "listed", "flush", False, ())
    options = replace(
        compute.options,
        recompute=recompute_label(schedule, "listed"),
        grad_sync=collectives.grad_sync,
    )
    sends_beside = not own.blocking_messages
    kinds, partners = add_partners(
        compute.kinds, sends_beside, True, "per_peer", collectives, compute.skips, compute.edges
    )
    cycles = clock_cycles(schedule, compute)
    issued = issue(compute, cycles, partners, sends_beside, 1, collectives.groups)
    kinds, issued = with_parameter_shards(parameters, kinds, issued, overlap=True)
    return TaskGraph.of_kinds(
        kinds, issued.kind, issued.microbatch, name=schedule.name, options=options
    ).as_verified()

"""`plan`: the best configurations of a training run on a cluster."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args

from pipesim.analysis.prediction_interval import KnownSteps, known_steps
from pipesim.errors import ArgumentError, check_count, check_flag, check_name, check_type, number
from pipesim.framework.framework import GatherParameters, GradSync
from pipesim.graph.options import OffloadTarget
from pipesim.lowering.framework_options import LAYOUT_OF_RANKS
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.models.encoders import Encoder
from pipesim.models.layers import Layers
from pipesim.models.model_costs import Lengths, microbatch_shards
from pipesim.models.parallel import FixedSettings, Parallel, as_parallel, takes_settings
from pipesim.models.transformer import Transformer
from pipesim.named_schedules.patterns import Merged
from pipesim.planning.choice import Evaluation, PlanChoice
from pipesim.planning.cluster import Cluster
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.plan_search import (
    PlanSearch,
    Workers,
    by_step,
    checked_filters,
    evaluate,
    fill_search,
    run_search,
    with_noise,
    with_refined,
)
from pipesim.planning.plan_tables import SETTINGS
from pipesim.planning.plans import Plan, Plans
from pipesim.planning.possible_settings import has_experts
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import SearchSpace, named_choice
from pipesim.scheduling.placement import LAYOUTS, Layout
from pipesim.simulation.noise import Noise
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import format_bytes, format_time, in_bytes

#: How layers are divided among stages.
PlanSplit = Literal["refined", "balanced", "even"]

#: What ranks configurations.
RankBy = Literal["step", "high"]

#: Configurations that an error names as the nearest to fit, and changes that would.
_NEAREST = 3
#: Settings that follow from the others.
_FOLLOWING = ("n_microbatches", "layers_per_stage", "ordered_for_costs")


@checked_names
@takes_settings(FixedSettings, flash_attention=True)
def plan(
    model: Transformer | Layers | Sequence[Encoder | Transformer],
    cluster: Cluster,
    *,
    global_batch: int,
    lengths: Lengths | None = None,
    tensor_parallel: int | Sequence[int] | None = None,
    pipeline_parallel: int | Sequence[int] | None = None,
    data_parallel: int | Sequence[int] | None = None,
    microbatch_size: int | Sequence[int] | None = None,
    schedules: str | Sequence[str] | None = None,
    n_chunks: int | Sequence[int] | None = None,
    recompute: str | Sequence[str] | None = None,
    shard_optimizer: bool | Sequence[bool] | None = None,
    sequence_parallel: bool | Sequence[bool] | None = None,
    context_parallel: int | Sequence[int] | None = None,
    expert_parallel: int | Sequence[int] | None = None,
    expert_tensor_parallel: int | Sequence[int] | None = None,
    shard_parameters: ShardParameters | Sequence[ShardParameters] | None = None,
    offload: str | float | Sequence[str | float] | None = None,
    offload_to: OffloadTarget | Sequence[OffloadTarget] | None = None,
    n_slices: int | Sequence[int] | None = None,
    merged: Merged | Sequence[Merged] | None = None,
    group_size: int | Sequence[int] | None = None,
    split: PlanSplit = "refined",
    layout: Layout | None = None,
    grad_sync: GradSync | None = None,
    gather_parameters: GatherParameters | None = None,
    memory_limit: float | str | None = None,
    memory_reserve: float = 0.0,
    where: Callable[[PlanChoice], bool] | Sequence[Callable[[PlanChoice], bool]] | None = None,
    noise: Noise | None = None,
    percentile: float = 90,
    n_best: int = 20,
    rank_by: RankBy = "step",
    n_jobs: int = 1,
    backend: str | None = None,
    progress: bool | None = None,
    **settings: Unpack[FixedSettings],
) -> Plans:
    """Return the configurations with the shortest steps that fit in memory, best first.

    Each parameter may be fixed, listed, or None for all sensible values. All GPUs are used:
    ``tensor_parallel * context_parallel * pipeline_parallel * data_parallel`` is their number.
    Bounds rule out configurations that can be neither among the ``n_best`` nor on the front of time
    and memory; the others are simulated, exactly as `pipesim.simulate` simulates all replicas.

    Parameters
    ----------
    model
        A `Transformer`; or measured `Layers`, whose micro-batch has ``microbatch_size`` sequences
        (1 by default); or a list of several modules: a `pipesim.Encoder` for each encoder, and last
        the transformer that takes their outputs. Their layers are one chain, so that encoders are
        on devices of their own or share them with layers of the transformer, as the split says; in
        ``"encoder_first"`` and ``"encoder_nested"`` each device has layers of both.
    cluster
        GPUs, nodes, network and memory.
    global_batch
        Sequences of a step, of all replicas.
    lengths
        Tokens of each of these sequences, or a list of the tokens of the documents packed into it,
        as in `Transformer.costs`. Each is a micro-batch. Replicas have equal parts of the list, in
        its order. None (the default): all have the length of the model.
    tensor_parallel
        GPUs that share each layer. By default those that divide heads and fit in a node.
    pipeline_parallel
        Devices of the pipeline. With 1, micro-batches are accumulation steps.
    data_parallel
        Replicas; they must divide the batch.
    microbatch_size
        Sequences of a micro-batch; by default divisors of the batch of a replica up to 16.
    schedules
        Names of schedules; by default 1F1B, interleaved and zero-bubble ones, and those in V shape;
        for slices of sequences ``"seq1f1b"`` and ``"slimpipe"``; with encoders also
        ``"encoder_first"`` and ``"encoder_nested"``.
    n_chunks
        Stages of each device, for schedules with chunks, and for one device with shared parameters.
    recompute
        ``"none"``, ``"selective"`` or ``"full"``.
    shard_optimizer
        Whether replicas share the optimizer (ZeRO-1, the distributed optimizer of Megatron-LM).
        With one replica it does not apply, and is False.
    sequence_parallel
        Whether tensors that tensor parallelism leaves whole are split along the sequence. With
        ``tensor_parallel=1`` it does not apply, and is False.
    context_parallel
        GPUs that share each sequence, as in `Transformer.costs`; by default 1. A device of the
        pipeline has ``tensor_parallel * context_parallel`` GPUs.
    expert_parallel
        GPUs among which the experts of a layer are divided, those of several replicas. By default
        divisors of the number of experts whose groups fill whole replicas; 1 without experts. If
        the schedule pairs F and B (DualPipeV), exchanges of tokens run behind the other half.
    expert_tensor_parallel
        GPUs that share each expert, 0 for ``tensor_parallel``. By default that, and 1 where
        the sequence is split too (parallel folding, arXiv 2504.14960): groups of whole experts
        then spread over the GPUs of tensor parallelism.
    shard_parameters
        Whether and how long replicas share parameters (FSDP, ZeRO-3), as in `pipesim.lower`; by
        default ``"none"``. Configurations with shared parameters have ``shard_optimizer=False``:
        replicas share the optimizer anyway. A pipeline of one device gathers layer by layer: by
        default embedding, each layer and head are stages of the schedule ``"naive"``.
    offload
        Activations that wait in host memory, as in `pipesim.lower`, one value for all stages; by
        default ``"none"``. The network of the cluster must have a link to the host.
    offload_to
        ``"host"`` (the default) or ``"peer"``: the device that holds them, as in `pipesim.lower`.
    n_slices
        Slices of each sequence, for schedules that take slices; by default 1, whole sequences.
    merged
        Whether F and B of two micro-batches run as one action, as in ``"interleaved_1f1b"`` of
        `pipesim.schedule`; by default False, since their exchanges are many tasks to simulate. Of
        ``[False, True, "delayed_w"]``, the last two are tried with ``expert_parallel`` above 1,
        where exchanges hide.
    group_size
        Micro-batches of a group, for schedules that take groups; by default their own.
    split
        Layers of each stage: ``"balanced"``, such that the busiest device has as little work as
        possible; ``"refined"`` (the default), balanced, and those of the best few moved as long as
        the simulated step takes less time; or ``"even"``, as many on each stage.
    layout
        Order of devices, as in `pipesim.lower`; by default that of the framework's ranks, or else
        replicas of a stage are neighbours.
    grad_sync, gather_parameters
        When replicas reduce gradients, and gather what others have stepped, as in `pipesim.lower`;
        by default as the framework does. Without a pipeline, replicas that share parameters reduce
        gradients after every micro-batch, or with ``grad_sync="last"`` once, and hold whole ones.
        Where that does not apply, it has no effect: buckets with ``shard_parameters``, gathers
        ``"before_forward"`` without ``shard_optimizer`` and in bidirectional schedules.
    memory_limit
        Most bytes of each device, such as ``"76GB"``, as in `pipesim.simulate`. By default the
        usable memory of its GPU.
    memory_reserve
        Share of the bytes of tensors that the allocator holds besides, as in `Costs`.
    where
        Function, or functions, of a `PlanChoice` that return True to keep it, or False.
    noise, percentile
        Noise of the steps. The ``n_best`` are then ranked by this percentile of noisy steps, and
        their intervals, tokens a second and MFU are those of it.
    n_best
        Number of the best configurations to find for certain.
    rank_by
        ``"step"`` (the default), or ``"high"``: the ``n_best`` by the high end of
        `Timeline.interval`. Where published steps of the framework give it, that is the order of
        steps. A band is the step of a framework that hides nothing, which may have another order.
    n_jobs, backend
        Processes, and backend of joblib, as in `sweep`; by default this process alone.
    progress
        Whether to show a progress bar; by default on a terminal.
    **settings
        Other fields of `Parallel`, each with one value; ``flash_attention`` is True by default.

    Returns
    -------
    Plans
        All configurations: simulated ones by rank, and why the others were ruled out. After Ctrl-C
        ``complete`` is False, and configurations that were left are missing. Those whose noisy
        steps were left follow the others, by steps without noise.

    See Also
    --------
    pipesim.sweep : Simulate all of a list of configurations.
    pipesim.optimize : Search for the best order of one configuration.

    Examples
    --------
    >>> import pipesim as ps
    >>> model, cluster = ps.Transformer.preset("llama3_8b"), ps.Cluster("dgx_h100", n_gpus=8)
    >>> plans = ps.plan(model, cluster, global_batch=8, tensor_parallel=[2, 4], microbatch_size=1,
    ...                 schedules="1f1b", recompute="none", progress=False)
    >>> sizes = ["tensor_parallel", "pipeline_parallel", "data_parallel"]
    >>> plans.table[sizes].iloc[0].tolist()
    [2, 1, 4]
    """
    began = time.perf_counter()
    check_name("split", split, get_args(PlanSplit))
    problem = checked_problem(
        model, cluster, global_batch, memory_limit, memory_reserve, layout, split == "even",
        as_parallel(plan, {"flash_attention": True}, settings),
    )  # fmt: skip
    if lengths is not None:
        problem = _with_lengths(problem, lengths)
    if grad_sync is not None:
        check_name("grad_sync", grad_sync, get_args(GradSync))
    if gather_parameters is not None:
        check_name("gather_parameters", gather_parameters, get_args(GatherParameters))
    problem = replace(problem, grad_sync=grad_sync, gather_parameters=gather_parameters)
    space = SearchSpace.checked(
        tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel,
        data_parallel=data_parallel, microbatch_size=microbatch_size, schedules=schedules,
        n_chunks=n_chunks, recompute=recompute, shard_optimizer=shard_optimizer,
        sequence_parallel=sequence_parallel, context_parallel=context_parallel,
        expert_parallel=expert_parallel, expert_tensor_parallel=expert_tensor_parallel,
        shard_parameters=shard_parameters, offload=offload, offload_to=offload_to,
        n_slices=n_slices,
        merged=merged, group_size=group_size,
    )  # fmt: skip
    problem = replace(problem, measured_size=space.measured_size(problem))
    filters = checked_filters(where)
    share = number(percentile)
    if share is None or not 0 < share <= 100:
        raise ArgumentError(f"percentile must be above 0 and at most 100, got {percentile!r:.60}")
    check_count("n_best", n_best)
    check_name("rank_by", rank_by, get_args(RankBy))
    if rank_by == "high" and noise is not None:
        raise ArgumentError(
            'rank_by="high" and noise= each rank the best configurations; give one of them'
        )
    if rank_by == "high" and _known_steps(problem) is None:
        raise ArgumentError(
            'rank_by="high" needs the interval of a step, which is known for a pipesim.Transformer '
            "on GPUs of one kind"
        )
    if noise is not None:
        advice = "give such as pipesim.Noise(task=pipesim.simulation.LogNormal(0.02))"
        check_type("noise", noise, Noise, advice)
        if noise.slow_devices or noise.slow_links:
            raise ArgumentError(
                "noise of plans takes no slow_devices and slow_links, as device 3 is another GPU "
                "in each configuration; simulate one plan with them: pipesim.simulate(plan.graph, "
                "plan.costs, noise=noise)"
            )
    workers = checked_workers(n_jobs, backend)
    if progress is not None:
        check_flag("progress", progress)
    search = PlanSearch(Evaluator(problem), n_best)
    fill_search(search, space, filters, progress)
    run_search(search, workers, progress)
    ranked = by_step(search.evaluations)
    if split == "refined" and search.complete:
        ranked = with_refined(search, ranked, filters, progress)
    if not ranked and search.complete:
        raise ArgumentError(_infeasible(search.evaluator, search.evaluations))
    if noise is not None:
        ranked = with_noise(search, ranked, noise, share, progress)
    ranked = _with_intervals(problem, ranked, n_best if rank_by == "high" else 0)
    is_noisy = any(not math.isnan(x.noisy_step) for x in ranked)
    others = [x for x in search.evaluations if x.status != "simulated"]
    return Plans(
        problem, (*ranked, *others), time.perf_counter() - began, search.complete,
        share if is_noisy else None, _notes(problem, n_best if rank_by == "high" else 0),
    )  # fmt: skip


def _infeasible(evaluator: Evaluator, evaluations: Sequence[Evaluation]) -> str:
    problem = evaluator.problem
    unfit = [x for x in evaluations if x.status == "does not fit"]
    if not unfit:
        reasons = list(dict.fromkeys(x.reason for x in evaluations if x.reason))[:_NEAREST]
        return f"no configuration is possible: {'; '.join(reasons)}"
    unfit.sort(key=lambda x: x.memory)
    nearest = "; ".join(f"{x.choice}: {x.reason}" for x in unfit[:_NEAREST])
    limit = format_bytes(min(problem.device_limits(unfit[0].choice)))
    name = "the memory of a GPU" if problem.memory_limit is None else "memory_limit"
    reserve = f" with memory_reserve={problem.memory_reserve:g}" if problem.memory_reserve else ""
    changes = _changes_that_fit(evaluator, unfit[0].choice)
    advice = f"Of the first, {'; or '.join(changes)} would fit" if changes else (
        "Give more GPUs, GPUs with more memory, a smaller microbatch_size, "
        'recompute="full", shard_optimizer=True, or shard_parameters="step"'
    )  # fmt: skip
    return (
        f"none of {len(unfit)} configurations fits in {name}, {limit} a device{reserve}. The "
        f"nearest: {nearest}. {advice}"
    )


def _changes_that_fit(evaluator: Evaluator, choice: PlanChoice) -> list[str]:
    """Return the fastest changes of a configuration that fit: two together if none does alone."""
    problem, size = evaluator.problem, choice.microbatch_size
    before = {name: getattr(choice, name) for name in SETTINGS if name not in _FOLLOWING}
    if choice.pipeline_parallel == 1:
        del before["n_chunks"]  # FSDP gathers layer by layer
    changes: list[dict[str, Any]] = [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"shard_optimizer": True},
        {"shard_optimizer": False, "shard_parameters": "step"},
        {"shard_optimizer": False, "shard_parameters": "every"},
        {"sequence_parallel": True},
        *({"microbatch_size": x} for x in {size // 2, 1} if x and size % x == 0),
    ]
    changes = [x for x in changes if not x.items() <= before.items()]
    for count in (1, 2):
        fitting = []
        for parts in itertools.combinations(changes, count):
            change = {name: value for part in parts for name, value in part.items()}
            if len(change) < sum(map(len, parts)):
                continue  # two values of one setting
            try:
                changed = named_choice(problem, {**before, **change})
            except ArgumentError:
                continue
            result = evaluate(evaluator, changed, evaluator.bounds(changed))
            if result.status == "simulated":
                text = ", ".join(f"{name}={value!r}" for name, value in change.items())
                fitting.append((result.step, f"{text} ({format_time(result.step)} a step)"))
        if fitting:
            return [text for _, text in sorted(fitting)[:_NEAREST]]
    return []


def _with_intervals(
    problem: PlanProblem, ranked: list[Evaluation], n_bands: int
) -> list[Evaluation]:
    """Return ranked configurations with their intervals, the first ``n_bands`` ranked by ends.

    These have a band if published steps give no interval.
    """
    steps = _known_steps(problem)
    if steps is None:
        return ranked
    rows, (least, most) = [], steps.ends(1.0)
    for place, row in enumerate(ranked):
        seconds = row.step if math.isnan(row.noisy_step) else row.noisy_step
        low, high = seconds * least, seconds * most
        if place < n_bands and not steps.quotients:
            low, high, _, _ = Plan(problem, row).timeline.interval()
        rows.append(row._replace(low=low, high=high))
    return sorted(rows[:n_bands], key=lambda row: row.high) + rows[n_bands:]


def _known_steps(problem: PlanProblem) -> KnownSteps | None:
    """Return published steps like those of a problem; None for measured layers and mixed GPUs."""
    if isinstance(problem.model, Layers) or problem.cluster.is_mixed or problem.encoders:
        return None
    parallel = problem.parallel
    return known_steps(
        parallel.framework, problem.cluster.gpu, parallel.precision,
        has_experts=has_experts(problem),
    )  # fmt: skip


def _notes(problem: PlanProblem, n_bands: int) -> tuple[str, ...]:
    """Return assumptions, errors and the order of the first ``n_bands``, to show with results."""
    scaling = problem.cluster.scaling
    return (*[f"The cluster is {scaling}."] * bool(scaling), *_assumptions(problem, n_bands))


def _assumptions(problem: PlanProblem, n_bands: int) -> tuple[str, ...]:
    if isinstance(problem.model, Layers):
        return ()
    if problem.encoders:
        same = "micro-batches"
        if all(encoder.recompute is None for encoder in problem.encoders):
            same += " and recompute"
        return (
            f"The first {problem.n_encoder_layers} of {problem.n_layers} layers are those of "
            f"encoders. All modules train, with the same {same}.",
            "No published steps of models with encoders say how far predictions are off.",
        )
    steps = _known_steps(problem)
    if steps is not None:
        order = f"The first {n_bands} are in the order of the high ends of their intervals."
        half = "Gradients take 2 bytes (bytes_per_gradient); Megatron-LM takes 4 by default."
        return (
            str(steps),
            *[half] * (problem.model.bytes_per_gradient == 2),
            *[order] * (n_bands > 0),
        )
    return (
        "GPUs differ: each stage takes the seconds of the slowest GPU that holds it in any "
        "replica, the one with the longest F and B of a layer.",
        "The memory of a stage is that of the smallest GPU that holds it in any replica. MFU is a "
        "share of the mean peak of all GPUs.",
        "Messages and collectives have the slowest rates of all nodes, everywhere.",
    )


# Checks of the arguments.

#: Most sequences of a step.
_MOST_SEQUENCES = 10**9


def checked_problem(
    model: Any, cluster: Any, global_batch: Any, memory_limit: Any, memory_reserve: Any,
    layout: Any, is_even: bool, parallel: Parallel,
) -> PlanProblem:  # fmt: skip
    """Return the problem of checked arguments."""
    is_chain = isinstance(model, (list, tuple)) and model
    *encoders, model = model if is_chain else [model]
    if not isinstance(model, (Transformer, Layers)):
        raise ArgumentError(
            f"model must be a pipesim.Transformer or pipesim.Layers, got {model!r:.60}; give such "
            'as pipesim.Transformer.preset("llama3_70b")'
        )
    for encoder in encoders:
        advice = "list pipesim.Encoder(model, sequences=...) before the model that they feed"
        check_type("an encoder", encoder, Encoder, advice)
    if isinstance(model, Layers) and parallel.precision != "bf16":
        raise ArgumentError(
            f"precision={parallel.precision!r} changes no measured seconds; measure layers in this "
            "precision, or plan with a pipesim.Transformer"
        )
    check_type("cluster", cluster, Cluster, 'give such as pipesim.Cluster("dgx_h100", n_gpus=64)')
    if encoders and (isinstance(model, Layers) or cluster.is_mixed):
        raise ArgumentError(
            "encoders are planned before a pipesim.Transformer, on a cluster of equal GPUs; give "
            "these, or leave the encoders out"
        )
    if check_count("global_batch", global_batch) > _MOST_SEQUENCES:
        raise ArgumentError(f"global_batch must be at most {_MOST_SEQUENCES}, got {global_batch}")
    limit = in_bytes("memory_limit", memory_limit)
    if isinstance(limit, Iterable):
        raise ArgumentError(
            f"memory_limit of a plan must be one value for all devices, got {memory_limit!r:.60}; "
            "give the GPUs of each node their memory in the cluster"
        )
    reserve = number(memory_reserve)
    if reserve is None or not 0 <= reserve < float("inf"):
        raise ArgumentError(
            f"memory_reserve must be a finite share >= 0 of the bytes of tensors, got "
            f"{memory_reserve!r:.60}; give bytes as a smaller memory_limit"
        )
    return PlanProblem(
        model, cluster, global_batch,
        None if limit is None else float(checked_memory_limit(limit, 1)[0]),
        layout=LAYOUT_OF_RANKS.get(parallel.framework.rank_order, "stage_major") if layout is None
        else check_name("layout", layout, LAYOUTS),  # type: ignore[arg-type]  # one of them
        memory_reserve=reserve, is_even=is_even, parallel=parallel, encoders=tuple(encoders),
    )  # fmt: skip


def _with_lengths(problem: PlanProblem, lengths: Lengths) -> PlanProblem:
    """Return a problem with the tokens of each sequence."""
    if isinstance(problem.model, Layers) or problem.encoders or problem.cluster.is_mixed:
        raise ArgumentError(
            "lengths are those of the sequences of one pipesim.Transformer, on a cluster of equal "
            "GPUs; leave lengths out"
        )
    shards = microbatch_shards(problem.model.shard(problem.parallel), lengths, 1)
    if len(shards) != problem.global_batch:
        raise ArgumentError(
            f"lengths has {len(shards)} entries, and global_batch={problem.global_batch}; give one "
            "each a sequence"
        )
    tokens = sum(shard.tokens for (shard,) in shards)
    flops = math.fsum(shard.step_flops for (shard,) in shards)
    return replace(problem, lengths=list(lengths), length_totals=(tokens, flops))


def checked_workers(n_jobs: object, backend: object) -> Workers:
    """Return the checked number of processes and backend."""
    if not isinstance(n_jobs, int) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise ArgumentError(
            f"n_jobs must be a whole number but 0 (-1: all cores), got {n_jobs!r:.60}"
        )
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(f"backend must be the name of a backend of joblib, got {backend!r:.60}")
    return Workers(n_jobs, backend)

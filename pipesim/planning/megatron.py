"""Write the flags of Megatron-LM for a configuration, and read them from a command line.

Names and rules are those of Megatron-LM 0.20.0 (github.com/NVIDIA/Megatron-LM, commit d98e8a6 of
22 August 2026): ``arguments.py`` and ``config/common_config.py`` of ``megatron/training``, and of
``megatron/core`` ``model_parallel_config.py``, ``transformer/transformer_config.py``,
``transformer/transformer_block.py`` (layers of each stage) and ``pipeline_parallel/schedules.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from pipesim.costs.layer_split import layout_modules, read_layout, write_layout
from pipesim.errors import ArgumentError, check_count, check_list, check_name
from pipesim.framework.framework import (
    Framework,
    FusedSums,
    GatherParameters,
    RecomputeModule,
)
from pipesim.graph.options import GradSyncs
from pipesim.lowering.framework_options import LAYOUT_OF_RANKS, FrameworkOptions
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.models.parallel import ExpertExchange, Parallel
from pipesim.models.precision import Precision
from pipesim.models.transformer import Transformer
from pipesim.named_schedules.patterns import Merged
from pipesim.planning.choice import PlanChoice, layer_by_layer
from pipesim.planning.framework_settings import TrainerSettings, replicas_of, whole_number
from pipesim.scheduling.placement import Layout
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import parse_int

_MERGED, _DELAYED = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
_GROUPS = ("--microbatch-group-size-per-virtual-pipeline-stage",
           "--microbatch-group-size-per-vp-stage")  # fmt: skip

# Write.

_SCHEDULES = ("1f1b", "interleaved_1f1b")
_RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}

#: Flags of each number format of linear products.
_PRECISION: Mapping[Precision, tuple[str, ...]] = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "fp8": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "mxfp8": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
#: Modules of ``--recompute-modules`` that are read; others are refused, such as ``moe``.
_MODULES = tuple(x for x in get_args(RecomputeModule) if x != "second_products")
#: Flags of Megatron-FSDP besides those of the distributed optimizer.
_FSDP = [
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params",
    "--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor",
]  # fmt: skip
#: Flags of the bytes of a summed gradient, by the parameters' format, or of Megatron-FSDP.
_GRADIENTS: Mapping[str, Mapping[float, tuple[str, ...]]] = {
    "bf16": {2: ("--grad-reduce-in-bf16",), 4: ()},
    "fp16": {2: (), 4: ("--accumulate-allreduce-grads-in-fp32",)},
    "fsdp": {2: (), 4: ("--megatron-fsdp-main-grads-dtype", "fp32")},
}
#: Flags of the bytes of both moments of Adam.
_PRECISION_AWARE = "--use-precision-aware-optimizer"
_MOMENTS: Mapping[float, tuple[str, ...]] = {
    8: (_PRECISION_AWARE,),
    4: (_PRECISION_AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
    2: (_PRECISION_AWARE, "--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"),
}
#: Formats with which the precision-aware optimizer holds those 2 of 4 bytes of a parameter that
#: bfloat16 lacks (``store_param_remainders``): Transformer Engine's Adam casts them itself.
_REMAINDERS = ("bf16", "nvfp4")
#: Exchanges of tokens, of keys and values.
_DISPATCHERS: Mapping[ExpertExchange, str] = {
    "direct": "alltoall",
    "hierarchical": "flex",  # DeepEP
}
_CONTEXT = {"ring": "p2p", "all_gather": "allgather", "all_to_all": "a2a"}
#: Modules whose inputs are offloaded; with those of experts, nearly all activations of a layer.
OFFLOADED = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip


def megatron_flags(
    choice: PlanChoice, global_batch: int, layout: Layout, exchange: FrameworkOptions,
    model: Transformer | None = None, parallel: Parallel | None = None,
) -> str:  # fmt: skip
    """Return the flags of a configuration; see `Plan.to_megatron`.

    ``model`` is None for measured layers, whose bytes and number formats are not known.
    """
    parallel = parallel or Parallel(microbatch_size=1, flash_attention=True)
    framework, has_experts = parallel.framework, model is not None and model.n_experts > 0
    _check(choice)
    _check_sharing(choice, has_experts)
    t = choice.tensor_parallel
    flags = ["--tensor-model-parallel-size", str(t)]
    flags += ["--pipeline-model-parallel-size", str(choice.pipeline_parallel)]
    if choice.context_parallel > 1:
        flags += ["--context-parallel-size", str(choice.context_parallel)]
        if parallel.context_exchange != "ring":
            flags += ["--cp-comm-type", _CONTEXT[parallel.context_exchange]]
    if choice.expert_parallel > 1:
        flags += ["--expert-model-parallel-size", str(choice.expert_parallel)]
    if choice.expert_tensor_parallel:
        flags += ["--expert-tensor-parallel-size", str(choice.expert_tensor_parallel)]
    sizes = choice.layers_per_stage
    if choice.is_layer_by_layer:
        pass  # Megatron-FSDP gathers layer by layer
    elif len(set(sizes)) > 1:
        mtp_layers = 0 if model is None else model.mtp_layers
        flags += ["--pipeline-model-parallel-layout", write_layout(sizes, mtp_layers=mtp_layers)]
    elif choice.n_chunks > 1:  # one even stage a device needs no flag
        flags += ["--num-layers-per-virtual-pipeline-stage", str(sizes[0])]
    flags += ["--micro-batch-size", str(choice.microbatch_size)]
    flags += ["--global-batch-size", str(global_batch)]
    splits = choice.sequence_parallel and t > 1
    flags += ["--sequence-parallel"] * splits
    flags += ["--tp-comm-overlap"] * (splits and framework.tensor_overlap == "userbuffers")
    if model is not None:
        flags += [*_PRECISION[parallel.precision], *_bytes_flags(model, choice, parallel)]
    if has_experts or choice.expert_parallel > 1:
        flags += _expert_flags(choice, parallel)
    flags += [] if parallel.flash_attention else ["--attention-backend", "unfused"]
    if parallel.fused_loss:
        flags += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]
    flags += _RECOMPUTE[choice.recompute]
    if choice.recompute == "selective" and framework.recompute_modules != ("core_attn",):
        flags += ["--recompute-modules", *_modules(framework)]
    is_shared = choice.optimizer_shares > 1 or _PRECISION_AWARE in flags
    flags += ["--use-distributed-optimizer"] * is_shared
    gathers = exchange.gather_parameters == "before_forward"
    reduces = exchange.grad_sync == "bucketed"
    blocks = choice.n_chunks > 1 and exchange.blocking_messages
    flags += ["--no-overlap-p2p-communication"] * blocks
    flags += ["--overlap-grad-reduce"] * (reduces or gathers)  # which the gather needs
    flags += ["--overlap-param-gather"] * gathers
    flags += _FSDP * choice.shards_parameters
    flags += [_MERGED] * bool(choice.merged) + [_DELAYED] * (choice.merged == "delayed_w")
    flags += [_GROUPS[0], str(choice.group_size)] if choice.group_size else []
    if choice.offload != "none":
        flags += ["--fine-grained-activation-offloading", "--offload-modules", *OFFLOADED]
    # Megatron-LM numbers the replicas of a stage in a row unless told otherwise.
    is_replica_major = layout == "replica_major" and choice.layout_matters
    flags += ["--use-tp-pp-dp-mapping"] * is_replica_major
    return shlex.join(flags)


def _bytes_flags(model: Transformer, choice: PlanChoice, parallel: Parallel) -> list[str]:
    """Return the flags of the bytes of gradients and of the optimizer's state.

    Raise `ArgumentError` for bytes that no flags make: a run would need another memory.
    """
    precision, framework = parallel.precision, parallel.framework
    names = ("bytes_per_parameter", "bytes_per_activation")
    if other := {name: n for name in names if (n := getattr(model, name)) != 2}:
        got = " and ".join(f"{name}={n:g}" for name, n in other.items())
        raise ArgumentError(
            f"Megatron-LM holds parameters and activations in 2 bytes with {precision}; the model "
            f"has {got}; plan with a model with 2"
        )
    half = "fp16" if precision == "fp16" else "bf16"
    sums = _GRADIENTS["fsdp" if choice.shards_parameters else half]
    if model.bytes_per_gradient not in sums:
        raise ArgumentError(
            "Megatron-LM sums gradients in 2 or 4 bytes; the model has bytes_per_gradient="
            f"{model.bytes_per_gradient:g}; plan with a model with one of these"
        )
    is_wider = model.bytes_per_gradient > model.bytes_per_parameter
    fuses = framework.fused_sums == "all" or (framework.fused_sums == "wider" and is_wider)
    flags = list(sums[model.bytes_per_gradient])
    flags += ["--no-gradient-accumulation-fusion"] * (not fuses and not choice.shards_parameters)
    held = model.optimizer_bytes_per_parameter - (4 - framework.master_bytes)
    if held == 12:
        return flags
    master = 2 if precision in _REMAINDERS else 4
    is_alone = choice.optimizer_shares == 1 < choice.data_parallel
    if held - master not in _MOMENTS or choice.shards_parameters or is_alone:
        sizes = "12" if choice.shards_parameters or is_alone else ", ".join(
            f"{n:g}" for n in (12, *(master + n for n in _MOMENTS))
        )  # fmt: skip
        raise ArgumentError(
            f"Megatron-LM holds {sizes} bytes a parameter in the optimizer with {precision}"
            f"{' if replicas do not share it' * is_alone}, and the plan has {held:g}: "
            f"optimizer_bytes_per_parameter={model.optimizer_bytes_per_parameter:g} of the model, "
            f"less 4 - master_bytes={framework.master_bytes:g} of the framework; change one of them"
            f"{', or plan with shard_optimizer=True' * is_alone}"
        )
    return [*flags, *_MOMENTS[held - master]]


def _expert_flags(choice: PlanChoice, parallel: Parallel) -> list[str]:
    """Return the flags of the kernels of experts and of the exchange of their tokens.

    By default Megatron-LM gathers all tokens, and multiplies expert by expert.
    """
    framework = parallel.framework
    exchange = parallel.expert_exchange if choice.expert_parallel > 1 else "direct"
    flags = ["--moe-token-dispatcher-type", _DISPATCHERS[exchange]]
    flags += ["--moe-grouped-gemm"] * (framework.expert_products != "sequential")
    flags += ["--moe-permute-fusion"] * framework.fused_permute
    flags += ["--moe-router-fusion"] * framework.fused_router
    overlaps = framework.shared_expert_overlap and not choice.merged
    return flags + ["--moe-shared-expert-overlap"] * overlaps


def _modules(framework: Framework) -> tuple[str, ...]:
    modules = framework.recompute_modules
    if "second_products" in modules:
        raise ArgumentError(
            f"Megatron-LM recomputes {', '.join(_MODULES)}, and not every other product; plan with "
            'a framework with recompute_modules=["core_attn"]'
        )
    return modules


def _check(choice: PlanChoice) -> None:
    """Raise `ArgumentError` for a configuration that Megatron-LM cannot run."""
    runnable = ", ".join(_SCHEDULES)
    if choice.schedule not in _SCHEDULES and not choice.is_layer_by_layer:
        raise ArgumentError(
            f"Megatron-LM has no schedule {choice.schedule!r}; it runs {runnable}. Plan with "
            f"schedules={list(_SCHEDULES)}, or run the schedule with pipeexec"
        )
    chunked = choice.schedule == "interleaved_1f1b"
    if chunked and 1 in (choice.pipeline_parallel, choice.n_chunks):
        raise ArgumentError(
            "Megatron-LM runs interleaved_1f1b with at least 2 devices and 2 chunks; got "
            f"pipeline_parallel={choice.pipeline_parallel} and n_chunks={choice.n_chunks}"
        )
    rest = choice.n_microbatches % choice.pipeline_parallel
    if chunked and rest and not choice.group_size:
        raise ArgumentError(
            f"Megatron-LM runs interleaved_1f1b with a multiple of pipeline_parallel="
            f"{choice.pipeline_parallel} micro-batches; got {choice.n_microbatches}"
        )
    if reason := _merged_reason(choice):
        raise ArgumentError(f"Megatron-LM merges F and B {reason}; plan with merged=False")


def _merged_reason(choice: PlanChoice) -> str:
    """Return why Megatron-LM does not merge F and B of a configuration; empty if it may."""
    if not choice.merged:
        return ""
    if choice.pipeline_parallel > 1 and choice.n_chunks == 1:
        return "of pipelines only with several stages a device, got one"
    if choice.expert_parallel == 1:
        return "only with experts on several GPUs, got expert_parallel=1"
    if choice.recompute == "full":
        return 'without full recompute, got recompute="full"'
    if choice.is_layer_by_layer:
        return "here without gathers layer by layer: the schedule naive has no pairs"
    return ""


def _check_sharing(choice: PlanChoice, has_experts: bool) -> None:
    """Raise `ArgumentError` for parallel sizes, sharding and offload that Megatron-LM lacks."""
    t = choice.tensor_parallel
    if choice.expert_parallel > 1 and t > 1 and not choice.sequence_parallel:
        raise ArgumentError(
            "Megatron-LM divides experts only with sequence parallelism, if there is tensor "
            f"parallelism; got expert_parallel={choice.expert_parallel} and tensor_parallel={t}; "
            "plan with sequence_parallel=True"
        )
    if choice.shards_parameters and (
        choice.shard_parameters != "every" or choice.pipeline_parallel > 1
    ):
        raise ArgumentError(
            "the flags of Megatron-FSDP are for one device a replica that frees parameters after "
            f"each use; got shard_parameters={choice.shard_parameters!r} and pipeline_parallel="
            f'{choice.pipeline_parallel}; plan with shard_parameters="every" and '
            "pipeline_parallel=1, or with shard_optimizer=True"
        )
    is_all = choice.offload == "all" and choice.offload_to == "host" and has_experts
    if choice.offload != "none" and not is_all:
        model = "" if has_experts else " of a model without experts"
        model += ' to a "peer"' * (choice.offload_to == "peer")
        raise ArgumentError(
            "Megatron-LM offloads the inputs of named modules (--offload-modules), all or none, and"
            f" of the MLP only those of experts; got offload={choice.offload!r}{model}; plan with "
            'offload="none", or run the graph with pipeexec'
        )


# Read.

#: Flags that change the pipeline in a way that a configuration does not have.
_REFUSED: Mapping[str, str] = {
    "--hybrid-layer-pattern": "layers of several kinds",
    "--hybrid-override-pattern": "layers of several kinds",
    "--encoder-num-layers": "an encoder and a decoder",
    "--decoder-num-layers": "an encoder and a decoder",
    "--defer-embedding-wgrad-compute": "gradients of the embedding that wait",
    "--cpu-offloading": "weights or activations of some layers in host memory",
    "--cpu-offloading-num-layers": "weights or activations of some layers in host memory",
    "--use-torch-fsdp2": "FSDP of torch",
    **dict.fromkeys(
        ("--hybrid-context-parallel", "--dynamic-context-parallel"),
        "context parallelism of a size for each micro-batch (context_parallel=[...] and "
        "lengths=[...] of Transformer.costs)",
    ),
    "--tensor-parallel-num-weight-shards": "weights in more parts than tensor parallelism",
    "--model-parallel-size": "a size of no kind",
    "--yaml-cfg": "settings of a file, which take the place of all flags",
    "--use-mp-args-from-checkpoint-args": "parallel sizes of a checkpoint",
    "--rampup-batch-size": "steps with other batches",
    "--step-batch-size-schedule": "steps with other batches",
    "--decrease-batch-size-if-needed": "another batch",
    "--heterogeneous-layers-config-path": "layers of several kinds",
    "--heterogeneous-layers-config-encoded-json": "layers of several kinds",
    "--mtp-hybrid-override-pattern": "layers of several kinds",
    "--overlap-dispatch-backward-with-experts-wgrad": "gradients of weights that wait",
    "--num-microbatches-with-partial-activation-checkpoints": "recompute of some micro-batches",
    "--moe-layer-recompute": "recompute of experts alone",
    "--outer-dp-sharding-strategy": "parameters that some replicas share otherwise than others",
    "--enable-full-sharding-in-hsdp": "parameters that some replicas share otherwise than others",
    "--expert-tensor-parallel-num-weight-shards": "weights in more parts than tensor parallelism",
    "--gtp-weight-remat-size": "weights in more parts than tensor parallelism",
    "--expert-gtp-weight-remat-size": "weights in more parts than tensor parallelism",
    "--perform-rl-step": "steps of reinforcement learning",
    "--skip-train": "forwards alone",
}
#: Values of ``--attention-backend``.
_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
#: Flags with "pipeline" in their name that do not change it.
_HARMLESS = ("--pipeline-model-parallel-comm-backend", "--deallocate-pipeline-outputs",
             "--rl-inference-pipeline-model-parallel-size")  # fmt: skip


@checked_names
def read_megatron(
    flags: str | Sequence[str], *, n_layers: int | None = None, n_gpus: int | None = None
) -> TrainerSettings:
    """Read the configuration of a pipeline from flags of Megatron-LM.

    Flags of parallel sizes, batch sizes, stages and their layers, precision, attention, recompute,
    distributed optimizer and its overlap, Megatron-FSDP, offload and order of ranks are understood.
    Others that would change the pipeline are refused, such as ``--yaml-cfg`` and
    ``--rampup-batch-size``, and the rest is listed in `TrainerSettings.ignored`.

    Parameters
    ----------
    flags
        A command line, or its words. Words before the first flag are left out, and so are names of
        scripts, so that ``torchrun --nproc-per-node 8 pretrain_gpt.py ...`` can be given as it is.
    n_layers
        Layers of the model; by default ``--num-layers``, or those of the layout.
    n_gpus
        GPUs of all replicas; by default the processes of ``torchrun``, or else one replica.

    Returns
    -------
    TrainerSettings
        Schedule, placement, layers of each stage, options of `pipesim.lower`, parallel sizes.

    See Also
    --------
    Plan.to_megatron : Write the flags of a configuration.

    Examples
    --------
    >>> import pipesim as ps
    >>> settings = ps.read_megatron(
    ...     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel "
    ...     "--pipeline-model-parallel-layout Et*7|(t*8|)*2t*7L --micro-batch-size 1 "
    ...     "--global-batch-size 64 --recompute-granularity full --lr 1e-4",
    ...     n_gpus=16,
    ... )
    >>> settings.choice.layers_per_stage
    (7, 8, 8, 7)
    >>> settings.choice.data_parallel, settings.choice.n_microbatches, settings.ignored
    (2, 32, ('--lr',))
    """
    read = Flags(flags)
    mtp_layers, stage_layout = _multi_token_prediction(read)
    if n_layers is not None:
        check_count("n_layers", n_layers)
    gpus = _processes(read) if n_gpus is None else check_count("n_gpus", n_gpus)
    t, p = (read.size(f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline"))
    c, x = (read.size(f"--{kind}-parallel-size") for kind in ("context", "expert-model"))
    sizes = layers_of_stages(read, p, n_layers)
    n_chunks = len(sizes) // p if sizes else chunks_of_devices(read, p)
    replicas = replicas_of("flags", gpus, t * c * p)
    size, batch, count = _batches(read, replicas, gpus)
    group_size = _group_size(read, p, count, n_chunks)
    shard_parameters, shard_optimizer = _sharding(read, replicas)
    parts = read.count("--expert-tensor-parallel-size") or t
    choice = PlanChoice(
        tensor_parallel=t,
        pipeline_parallel=p,
        data_parallel=replicas,
        microbatch_size=size,
        n_microbatches=count,
        schedule="interleaved_1f1b" if n_chunks > 1 else "1f1b",
        n_chunks=n_chunks,
        recompute=_recompute(read, sizes),
        shard_optimizer=shard_optimizer,
        sequence_parallel=read.switch("--sequence-parallel") and t > 1,
        layers_per_stage=sizes,
        context_parallel=c,
        expert_parallel=x,
        expert_tensor_parallel=parts if parts != t and (x > 1 or "--num-experts" in read) else 0,
        shard_parameters=shard_parameters,
        offload=_offload(read),
        merged=_merged(read),
        group_size=group_size,
    )
    choice = layer_by_layer(choice)
    if reason := _merged_reason(choice):
        raise ArgumentError(f"flags: {_MERGED} merges F and B {reason}; leave it out")
    grad_sync, gather_parameters = _exchange(read, choice)
    precision = _precision(read)
    optimizer_bytes, master_bytes = _optimizer_bytes(read, precision)
    framework = replace(_framework(read), master_bytes=master_bytes)
    return TrainerSettings(
        choice,
        batch,
        layout=LAYOUT_OF_RANKS[framework.rank_order],
        grad_sync=grad_sync,
        gather_parameters=gather_parameters,
        framework=framework,
        flash_attention=_fuses_attention(read),
        precision=precision,
        mtp_layers=mtp_layers,
        bytes_per_gradient=_gradient_bytes(read, precision),
        optimizer_bytes_per_parameter=optimizer_bytes,
        expert_exchange=_expert_exchange(read),
        stage_layout=stage_layout,
        ignored=_checked_rest(read),
    )


def _processes(read: Flags) -> int | None:
    """Return the processes that torchrun starts, or None."""
    counts = []
    for names in (("--nproc-per-node", "--nproc_per_node"), ("--nnodes",)):
        numbers = [read.count(name) for name in names if name in read]
        counts.append(numbers[0] if numbers else None)
    per_node, nodes = counts
    return None if per_node is None else per_node * (nodes or 1)


def _batches(read: Flags, replicas: int, gpus: int | None) -> tuple[int, int, int]:
    """Return the sizes of a micro-batch and of the batch, and the micro-batches of a replica."""
    size = read.count("--micro-batch-size")
    if size is None:
        raise ArgumentError("flags: --micro-batch-size is missing; Megatron-LM needs it, too")
    batch = read.count("--global-batch-size") or size * replicas
    why = (
        f"--global-batch-size must be a multiple of --micro-batch-size {size} on {replicas} "
        f"{'replica' if replicas == 1 else 'replicas'}{f' of {gpus} GPUs' if gpus else ''}"
    )
    return size, batch, whole_number("flags", batch, size * replicas, why)


def _merged(read: Flags) -> Merged:
    """Return whether F and B are merged, and W delayed."""
    merged, delays = read.switch(_MERGED), read.switch(_DELAYED)
    if delays and not merged:
        raise ArgumentError(f"flags: {_DELAYED} needs {_MERGED}; add it, or leave both out")
    if merged and read.switch("--moe-shared-expert-overlap"):
        raise ArgumentError(
            f"flags: {_MERGED} and --moe-shared-expert-overlap contradict each other; give one"
        )
    return "delayed_w" if delays else merged


def _group_size(read: Flags, p: int, n_microbatches: int, n_chunks: int) -> int | None:
    """Return the micro-batches of a group; None for as many as devices."""
    sizes = [(name, size) for name in _GROUPS if (size := read.count(name)) is not None]
    if n_chunks == 1:
        return None
    if sizes:
        name, size = sizes[0]
        rest = n_microbatches % size
        if not p <= size <= n_microbatches or 0 < rest < p:
            raise ArgumentError(
                f"flags: {name} must be from --pipeline-model-parallel-size, {p}, to the "
                f"{n_microbatches} micro-batches of a replica, and no smaller last group may be "
                f"left, got {size}"
            )
        return None if size == p else size
    if n_microbatches % p:
        raise ArgumentError(
            f"flags: with several stages a device the micro-batches of a replica must be a "
            f"multiple of --pipeline-model-parallel-size, {p}; --global-batch-size makes "
            f"{n_microbatches}"
        )
    return None


def _recompute(read: Flags, sizes: Sequence[int]) -> str:
    default = "selective" if read.switch("--recompute-activations") else "none"
    mode = check_name(
        "flags: --recompute-granularity",
        read.text("--recompute-granularity", default),
        ("none", "selective", "full"),
    )
    method = read.text("--recompute-method", "uniform")
    count, modules = read.count("--recompute-num-layers"), read.texts("--recompute-modules")
    if mode == "selective":
        for module in modules:
            check_name("flags: --recompute-modules", module, _MODULES)
    if mode != "full":
        return mode
    check_name("flags: --recompute-method", method, ("uniform", "block"))
    is_all = count == 1 or count is None
    if method == "block":
        is_all = count is not None and bool(sizes) and count >= max(sizes)
    if not is_all:
        raise ArgumentError(
            f"flags: --recompute-method {method} with --recompute-num-layers {count} recomputes "
            "some layers, or several as one; give uniform and 1, or block and all layers of a stage"
        )
    return mode


def _sharding(read: Flags, replicas: int) -> tuple[ShardParameters, bool]:
    """Return how replicas share parameters, and whether they share the optimizer alone."""
    distributed = read.switch("--use-distributed-optimizer")
    strategy = read.text("--data-parallel-sharding-strategy", "optim_grads_params")
    instances = read.size("--num-distributed-optimizer-instances")
    if instances > 1:
        raise ArgumentError(
            "flags: --num-distributed-optimizer-instances must be 1: all replicas share the "
            f"optimizer, or none, got {instances}"
        )
    if not read.switch("--use-megatron-fsdp"):
        return "none", distributed and replicas > 1
    kinds: dict[str, tuple[ShardParameters, bool]] = {
        "no_shard": ("none", False),
        "optim": ("none", True),
        "optim_grads_params": ("every", False),
    }
    check_name("flags: --data-parallel-sharding-strategy", strategy, kinds)
    return kinds[strategy] if replicas > 1 else ("none", False)


def _exchange(read: Flags, choice: PlanChoice) -> tuple[GradSyncs, GatherParameters]:
    """Return when replicas reduce gradients and gather parameters.

    Of all stages, the first alone reduces in buckets (``DistributedDataParallel`` of
    ``megatron/core/distributed``): it is the last to finish its backwards.
    """
    reduces, gathers = map(read.switch, ("--overlap-grad-reduce", "--overlap-param-gather"))
    shares = read.switch("--use-distributed-optimizer") or read.switch("--use-megatron-fsdp")
    if gathers and not (reduces and shares):
        raise ArgumentError(
            "flags: --overlap-param-gather needs --overlap-grad-reduce, and "
            "--use-distributed-optimizer or --use-megatron-fsdp; add them, or leave it out"
        )
    if choice.data_parallel == 1 or choice.shards_parameters:  # FSDP hides both in any case
        accumulates = choice.shards_parameters and choice.pipeline_parallel == 1
        return "every" if accumulates else "last", "after_step"
    rest = ("last",) * (choice.n_stages - 1)
    return (
        ("bucketed", *rest) if reduces and rest else "bucketed" if reduces else "last",
        "before_forward" if gathers and choice.shard_optimizer else "after_step",
    )


def _framework(read: Flags) -> Framework:
    """Return Megatron-Core with the collectives, sums and exchanges that the flags ask for.

    Of a model with experts, also with the kernels of their tokens.
    """
    reduces, gathers = map(read.switch, ("--overlap-grad-reduce", "--overlap-param-gather"))
    sums: FusedSums = "all" if read.switch("--grad-reduce-in-bf16") else "wider"
    framework = Framework.preset(
        "megatron_core_2024",
        messages="blocking" if read.switch("--no-overlap-p2p-communication") else "interleaved",
        rank_order="tp-cp-ep-pp-dp" if read.switch("--use-tp-pp-dp-mapping") else "tp-cp-ep-dp-pp",
        recompute_modules=read.texts("--recompute-modules") or ("core_attn",),
        tensor_overlap="userbuffers" if read.switch("--tp-comm-overlap") else "none",
        fused_sums="none" if read.switch("--no-gradient-accumulation-fusion") else sums,
        grad_sync="bucketed" if reduces else "last",
        gather_parameters="before_forward" if gathers else "after_step",
    )
    if "--num-experts" not in read and "--moe-token-dispatcher-type" not in read:
        return framework
    return replace(
        framework,
        expert_products="streams" if read.switch("--moe-grouped-gemm") else "sequential",
        fused_permute=read.switch("--moe-permute-fusion"),
        fused_router=read.switch("--moe-router-fusion"),
        shared_expert_overlap=read.switch("--moe-shared-expert-overlap"),
    )


def _expert_exchange(read: Flags) -> ExpertExchange:
    """Return how tokens reach experts on other GPUs, which Megatron's default does not do."""
    dispatcher = read.text("--moe-token-dispatcher-type", "allgather")
    exchanges = {flag: exchange for exchange, flag in _DISPATCHERS.items()}
    exchanges["allgather"] = "direct"  # experts are on one GPU: nothing is exchanged
    check_name("flags: --moe-token-dispatcher-type", dispatcher, exchanges)
    if dispatcher == "allgather" and read.size("--expert-model-parallel-size") > 1:
        raise ArgumentError(
            "flags: --expert-model-parallel-size needs --moe-token-dispatcher-type alltoall or "
            "flex: by default Megatron-LM gathers all tokens, which costs here do not have"
        )
    return exchanges[dispatcher]


def _fuses_attention(read: Flags) -> bool:
    """Return whether the attention core is one kernel, as Transformer Engine chooses by default."""
    name = "--attention-backend"
    backend = check_name(f"flags: {name}", read.text(name, "auto"), _BACKENDS)
    is_local = read.text("--transformer-impl", "transformer_engine") == "local"
    return backend not in ("unfused", "local") and not is_local


def _precision(read: Flags) -> Precision:
    """Return the format of linear products; 16 bits without a flag.

    A scale a block is no format here: it is read as FP8, and its flag as one that is not.
    """
    halves = [name for name in ("--bf16", "--fp16") if read.switch(name)]
    low = [name for name in ("--fp8-format", "--fp4-format") if name in read]
    if len(halves) > 1 or len(low) > 1:
        pair = " and ".join(halves if len(halves) > 1 else low)
        raise ArgumentError(f"flags: {pair} contradict each other; give one of them")
    if low == ["--fp4-format"]:
        check_name("flags: --fp4-format", read.text("--fp4-format"), ("e2m1",))
        check_name("flags: --fp4-recipe", read.text("--fp4-recipe", "nvfp4"), ("nvfp4",))
        return "nvfp4"
    if low:
        check_name("flags: --fp8-format", read.text("--fp8-format"), ("e4m3", "hybrid"))
        if read.values.get("--fp8-recipe") == ["blockwise"]:
            return "fp8"
        recipe = read.text("--fp8-recipe", "delayed")
        check_name("flags: --fp8-recipe", recipe, ("tensorwise", "delayed", "blockwise", "mxfp8"))
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    return "fp16" if halves == ["--fp16"] else "bf16"


def _gradient_bytes(read: Flags, precision: Precision) -> float:
    """Return the bytes of a summed gradient: 4 with bfloat16, and 2 with float16, by default."""
    fsdp = read.text("--megatron-fsdp-main-grads-dtype", "auto")
    half = read.switch("--grad-reduce-in-bf16") or read.text("--main-grads-dtype") == "bf16"
    whole = read.switch("--accumulate-allreduce-grads-in-fp32")
    if read.switch("--use-megatron-fsdp"):
        return 4 if fsdp == "fp32" else 2
    return 2 if half or (precision == "fp16" and not whole) else 4


def _optimizer_bytes(read: Flags, precision: Precision) -> tuple[float, float]:
    """Return the bytes a parameter of Adam with 4 of them for the parameter, and bytes of these."""
    names = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
    kinds = [check_name(f"flags: {x}", read.text(x, "fp32"), sizes) for x in names]
    if not read.switch(_PRECISION_AWARE):
        if kinds != ["fp32", "fp32"]:
            raise ArgumentError(f"flags: {' and '.join(names)} need {_PRECISION_AWARE}; add it")
        return 12, 4
    if read.text("--main-params-dtype", "fp32") != "fp32":
        raise ArgumentError(
            "flags: --main-params-dtype must be fp32: costs here have parameters in 32 bits"
        )
    delays = read.values.get("--fp8-recipe", ["delayed"]) == ["delayed"]
    is_cast = precision in _REMAINDERS or (precision == "fp8" and delays)
    return 4 + sum(sizes[kind] for kind in kinds), 2 if is_cast else 4


def _offload(read: Flags) -> str:
    modules = read.texts("--offload-modules")
    if not read.switch("--fine-grained-activation-offloading"):
        return "none"
    if set(modules) != set(OFFLOADED):
        raise ArgumentError(
            f"flags: --offload-modules must be all of {' '.join(OFFLOADED)}, got "
            f"{' '.join(modules) or 'none'}; some modules are no offload that a graph has"
        )
    return "all"


def _checked_rest(read: Flags) -> tuple[str, ...]:
    """Return the flags that were not read; raise `ArgumentError` for those that matter."""
    for name in read.unread:
        is_off = read.values[name] in (["0"], ["False"], ["false"], ["no_shard"])
        reason = _REFUSED.get(name)
        if reason is None and "pipeline" in name and name not in _HARMLESS:
            reason = "another pipeline"
        if reason and not is_off:
            raise ArgumentError(
                f"flags: {name} is not understood: it makes {reason}, which a configuration here "
                "does not have; leave it out to read the others"
            )
    return read.unread


_LAYOUT = "--pipeline-model-parallel-layout"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_STAGES = "--num-virtual-stages-per-pipeline-rank"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_LOSS = "--account-for-loss-in-pipeline-split"


def layers_of_stages(read: Flags, p: int, n_layers: int | None) -> tuple[int, ...]:
    """Return the layers of each stage; none if their number is unknown."""
    names = [name for name in (_LAYOUT, _LAYERS, _STAGES) if name in read]
    if len(names) > 1:
        raise ArgumentError(f"flags: {' and '.join(names)} contradict each other; give one of them")
    layers = read.count("--num-layers")
    if None not in (layers, n_layers) and layers != n_layers:
        raise ArgumentError(f"flags: --num-layers is {layers}, but n_layers={n_layers}")
    layers = layers or n_layers
    if _LAYOUT in read:
        sizes = read_layout(read.text(_LAYOUT))
        why = f"the stages of {_LAYOUT} must be a multiple of --pipeline-model-parallel-size"
        whole_number("flags", len(sizes), p, why)
        if layers is not None and sum(sizes) != layers:
            raise ArgumentError(
                f"flags: {_LAYOUT} has {sum(sizes)} layers, but the model has n_layers={layers}"
            )
        return sizes
    if layers is None:
        for name in (_LAYERS, _FIRST, _LAST, _EMBEDDING, _LOSS):
            if name in read:
                raise ArgumentError(
                    f"flags: --num-layers is missing, which {name} needs; give it, or n_layers="
                )
        return ()
    return _split(read, p, layers)


def _multi_token_prediction(read: Flags) -> tuple[int, str]:
    """Return the layers of MTP, and the layout if any or a loss is not on the last stage."""
    n, text = read.count("--mtp-num-layers", 0, 0) or 0, read.text(_LAYOUT)
    layout = text if layout_modules(text, n, f"flags: {_LAYOUT}") else ""
    if read.switch("--mtp-standalone") and not layout:
        raise ArgumentError(
            "flags: --mtp-standalone needs the stage of multi-token prediction: give it as m in "
            f"{_LAYOUT}, such as 'Et*4|t*4|m|L', with --mtp-num-layers"
        )
    return n, layout


def _split(read: Flags, p: int, layers: int) -> tuple[int, ...]:
    """Return the layers of each stage, chunk by chunk, as Megatron-LM shares them."""
    ends = [read.switch(name) for name in (_EMBEDDING, _LOSS)]
    first, last = (read.count(name) for name in (_FIRST, _LAST))
    uneven = first is not None or last is not None
    if uneven and any(ends):
        raise ArgumentError(
            f"flags: {_FIRST} or {_LAST} contradict {_EMBEDDING} or {_LOSS}; give one pair"
        )
    per_device = [0] * p
    middle = [d for d in range(p) if not (d == 0 and first) and not (d == p - 1 and last)]
    if first is not None:
        per_device[0] = first
    if last is not None:
        per_device[-1] = last
    rest = layers + sum(ends) - sum(per_device)
    if middle:
        why = f"{layers} layers must be shared evenly by {len(middle)} devices"
        even = whole_number("flags", rest, len(middle), why)
        for device in middle:
            per_device[device] = even
    elif rest:
        raise ArgumentError(
            f"flags: {_FIRST} and {_LAST} have {sum(per_device)} layers, but --num-layers is "
            f"{layers}"
        )
    n_chunks = chunks_of_devices(read, p, per_device)
    why = f"the layers of a device must be a multiple of its {n_chunks} stages"
    sizes = [whole_number("flags", size, n_chunks, why) for size in per_device] * n_chunks
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return tuple(sizes)


def chunks_of_devices(read: Flags, p: int, per_device: Sequence[int] = ()) -> int:
    """Return the stages of each device."""
    layers, stages = read.count(_LAYERS), read.count(_STAGES)
    if layers is not None and per_device:
        if len(set(per_device)) > 1:
            raise ArgumentError(f"flags: {_LAYERS} needs even devices; give {_STAGES}")
        why = f"the layers of a device must be a multiple of {_LAYERS}"
        stages = whole_number("flags", per_device[0], layers, why)
    if (stages or 1) > 1 and p == 1:
        raise ArgumentError(
            "flags: several stages a device need --pipeline-model-parallel-size of at least 2"
        )
    return stages or 1


class Flags:
    """Flags with their values, such as ``{"--bf16": [], "--lr": ["1e-4"]}``, and which were read.

    Of a flag that is given twice, the last one counts, as in argparse.
    """

    def __init__(self, flags: str | Sequence[str]) -> None:
        self.values: dict[str, list[str]] = {}
        self._read: set[str] = set()
        values: list[str] = []
        for word in _words(flags):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                values = self.values[name] = [value] if equals else []
            elif not word.endswith(".py"):  # the script behind the flags of torchrun
                values.append(word)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of flags that were not read, in their order."""
        return tuple(name for name in self.values if name not in self._read)

    def switch(self, name: str) -> bool:
        """Return whether a flag without a value is given."""
        self._read.add(name)
        return name in self.values

    def texts(self, name: str) -> list[str]:
        """Return all values of a flag."""
        self._read.add(name)
        return self.values.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """Return the value of a flag."""
        values = self.texts(name)
        if name not in self.values:
            return default
        if len(values) != 1:
            raise ArgumentError(f"flags: {name} takes one value, got {values!r:.60}")
        return values[0]

    def count(self, name: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return the value of a flag as a whole number."""
        text = self.text(name)
        if name not in self.values:
            return default
        number = parse_int(text)
        return check_count(f"flags: {name}", text if number is None else number, minimum)

    def size(self, name: str) -> int:
        """Return the value of a flag as a whole number of at least 1; by default 1."""
        return self.count(name) or 1


def _words(flags: object) -> list[str]:
    """Return the words of a command line; raise `ArgumentError` for anything else."""
    if isinstance(flags, str):
        try:
            return shlex.split(flags.replace("\\\n", " "))
        except ValueError as error:
            raise ArgumentError(f"flags: the text is no command line: {error}") from error
    words = check_list("flags", flags, "a text, or a list of words")
    for word in words:
        if not isinstance(word, str):
            raise ArgumentError(f"flags must be a text or a list of words, got {word!r:.60} in it")
    return words

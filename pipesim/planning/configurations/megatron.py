"""Flags of Megatron-LM for a configuration.

Names and rules are those of Megatron-LM 0.20.0 (github.com/NVIDIA/Megatron-LM, commit d98e8a6 of
22 August 2026): ``arguments.py`` and ``config/common_config.py`` of ``megatron/training``, and
``transformer/transformer_config.py`` and ``pipeline_parallel/schedules.py`` of ``megatron/core``.
"""

from __future__ import annotations

import shlex

from pipesim.costs.megatron_layout import write_layout
from pipesim.errors import ArgumentError
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.scheduling.placement import Layout

_SCHEDULES = ("1f1b", "interleaved_1f1b")
_RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}


#: Flags of Megatron-FSDP besides those of the distributed optimizer.
_FSDP = [
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params",
    "--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor",
]  # fmt: skip
#: Modules whose inputs are offloaded; with those of experts, nearly all activations of a layer.
OFFLOADED = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip


def megatron_flags(
    choice: PlanChoice, global_batch: int, layout: Layout, *, has_experts: bool = False
) -> str:
    """Return the flags of a configuration; see `Plan.to_megatron`."""
    _check(choice)
    _check_sharing(choice, has_experts)
    t = choice.tensor_parallel
    flags = ["--tensor-model-parallel-size", str(t)]
    flags += ["--pipeline-model-parallel-size", str(choice.pipeline_parallel)]
    flags += ["--context-parallel-size", str(choice.context_parallel)] * (
        choice.context_parallel > 1
    )
    flags += ["--expert-model-parallel-size", str(choice.expert_parallel)] * (
        choice.expert_parallel > 1
    )
    flags += _split_flags(choice)
    flags += ["--micro-batch-size", str(choice.microbatch_size)]
    flags += ["--global-batch-size", str(global_batch)]
    flags += ["--sequence-parallel"] * (choice.sequence_parallel and t > 1)
    flags += _RECOMPUTE[choice.recompute]
    flags += ["--use-distributed-optimizer"] * (choice.optimizer_shares > 1)
    flags += _FSDP * choice.shards_parameters
    if choice.offload != "none":
        flags += ["--fine-grained-activation-offloading", "--offload-modules", *OFFLOADED]
    # Megatron-LM numbers the replicas of a stage in a row unless told otherwise.
    is_replica_major = layout == "replica_major" and choice.layout_matters
    flags += ["--use-tp-pp-dp-mapping"] * is_replica_major
    return shlex.join(flags)


def _split_flags(choice: PlanChoice) -> list[str]:
    """Return the flags for the layers of each stage; none for one even stage a device."""
    sizes = choice.layers_per_stage
    if len(set(sizes)) > 1:
        return ["--pipeline-model-parallel-layout", write_layout(sizes)]
    if choice.n_chunks == 1:
        return []
    return ["--num-layers-per-virtual-pipeline-stage", str(sizes[0])]


def _check(choice: PlanChoice) -> None:
    """Raise `ArgumentError` for a configuration that Megatron-LM cannot run."""
    runnable = ", ".join(_SCHEDULES)
    if choice.schedule not in _SCHEDULES:
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
    if chunked and rest:
        raise ArgumentError(
            f"Megatron-LM runs interleaved_1f1b with a multiple of pipeline_parallel="
            f"{choice.pipeline_parallel} micro-batches; got {choice.n_microbatches}"
        )


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
    if choice.offload not in ("none", "all") or (choice.offload == "all" and not has_experts):
        model = "" if has_experts else " of a model without experts"
        raise ArgumentError(
            "Megatron-LM offloads the inputs of named modules (--offload-modules), all or none, and"
            f" of the MLP only those of experts; got offload={choice.offload!r}{model}; plan with "
            'offload="none", or run the graph with pipeexec'
        )

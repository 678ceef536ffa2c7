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

__all__ = ["megatron_flags"]

_SCHEDULES = ("1f1b", "interleaved_1f1b")
_RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}


def megatron_flags(choice: PlanChoice, global_batch: int, layout: Layout) -> str:
    """Return the flags of a configuration; see `Plan.to_megatron`."""
    _check(choice)
    t = choice.tensor_parallel
    flags = ["--tensor-model-parallel-size", str(t)]
    flags += ["--pipeline-model-parallel-size", str(choice.pipeline_parallel)]
    flags += _split_flags(choice)
    flags += ["--micro-batch-size", str(choice.microbatch_size)]
    flags += ["--global-batch-size", str(global_batch)]
    flags += ["--sequence-parallel"] * (choice.sequence_parallel and t > 1)
    flags += _RECOMPUTE[choice.recompute]
    flags += ["--use-distributed-optimizer"] * choice.shard_optimizer
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

"""Read the flags of a command line of Megatron-LM; the inverse of `Plan.to_megatron`.

Names and rules are those of Megatron-LM 0.20.0 (github.com/NVIDIA/Megatron-LM, commit d98e8a6 of
22 August 2026): ``megatron/training/arguments.py``, and of ``megatron/core``
``model_parallel_config.py`` and ``transformer/transformer_block.py`` (layers of each stage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.megatron import OFFLOADED
from pipesim.planning.trainer_settings.flags import Flags
from pipesim.planning.trainer_settings.megatron_layers import (
    chunks_of_devices,
    layers_of_stages,
)
from pipesim.planning.trainer_settings.settings import TrainerSettings, replicas_of, whole_number

#: Flags that change the pipeline in a way that a configuration does not have.
_REFUSED: Mapping[str, str] = {
    "--hybrid-layer-pattern": "layers of several kinds",
    "--hybrid-override-pattern": "layers of several kinds",
    "--mtp-num-layers": "layers of multi-token prediction, on the last stage",
    "--encoder-num-layers": "an encoder and a decoder",
    "--decoder-num-layers": "an encoder and a decoder",
    "--overlap-moe-expert-parallel-comm": "F and B of two micro-batches in one another",
    "--delay-wgrad-compute": "gradients of weights that wait",
    "--defer-embedding-wgrad-compute": "gradients of the embedding that wait",
    "--cpu-offloading": "weights or activations of some layers in host memory",
    "--cpu-offloading-num-layers": "weights or activations of some layers in host memory",
    "--use-torch-fsdp2": "FSDP of torch",
    "--hybrid-context-parallel": "context parallelism of several sizes",
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
    "--mtp-standalone": "layers of multi-token prediction, on a stage of their own",
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
#: Flags with "pipeline" in their name that do not change it.
_HARMLESS = ("--pipeline-model-parallel-comm-backend", "--deallocate-pipeline-outputs",
             "--rl-inference-pipeline-model-parallel-size")  # fmt: skip
_GROUPS = ("--microbatch-group-size-per-virtual-pipeline-stage",
           "--microbatch-group-size-per-vp-stage")  # fmt: skip


def read_megatron(
    flags: str | Sequence[str], *, n_layers: int | None = None, n_gpus: int | None = None
) -> TrainerSettings:
    """Read the configuration of a pipeline from flags of Megatron-LM.

    Flags of parallel sizes, batch sizes, stages and their layers, recompute, distributed optimizer,
    Megatron-FSDP, offload and order of ranks are understood. Others that would change the pipeline
    are refused, such as ``--yaml-cfg`` and ``--rampup-batch-size``, and the rest is listed in
    `TrainerSettings.ignored`.

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
    read_torchtitan : Read settings of torchtitan.
    read_layout : Read a layout string alone.

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
    if n_layers is not None:
        check_count("n_layers", n_layers)
    gpus = _processes(read) if n_gpus is None else check_count("n_gpus", n_gpus)
    t, p = (read.size(f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline"))
    c, x = (read.size(f"--{kind}-parallel-size") for kind in ("context", "expert-model"))
    sizes = layers_of_stages(read, p, n_layers)
    n_chunks = len(sizes) // p if sizes else chunks_of_devices(read, p)
    replicas = replicas_of("flags", gpus, t * c * p)
    size, batch, count = _batches(read, replicas, gpus)
    if n_chunks > 1:
        _check_interleaving(read, p, count)
    shard_parameters, shard_optimizer = _sharding(read, replicas)
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
        shard_parameters=shard_parameters,
        offload=_offload(read),
    )
    in_a_row = read.switch("--use-tp-pp-dp-mapping")
    return TrainerSettings(
        choice,
        batch,
        layout="replica_major" if in_a_row else "stage_major",
        overlap=not read.switch("--no-overlap-p2p-communication"),
        expert_tensor_parallel=read.count("--expert-tensor-parallel-size") or t,
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


def _check_interleaving(read: Flags, p: int, n_microbatches: int) -> None:
    """Raise `ArgumentError` for groups and numbers of micro-batches that the schedule lacks."""
    for name in _GROUPS:
        group = read.count(name, p)
        if group != p:
            raise ArgumentError(
                f"flags: {name} must be --pipeline-model-parallel-size, {p}, got {group}; the "
                "schedule interleaved_1f1b has groups of this size"
            )
    if n_microbatches % p:
        raise ArgumentError(
            f"flags: with several stages a device the micro-batches of a replica must be a "
            f"multiple of --pipeline-model-parallel-size, {p}; --global-batch-size makes "
            f"{n_microbatches}"
        )


def _recompute(read: Flags, sizes: Sequence[int]) -> str:
    """Return the recompute of layers."""
    default = "selective" if read.switch("--recompute-activations") else "none"
    mode = check_name(
        "flags: --recompute-granularity",
        read.text("--recompute-granularity", default),
        ("none", "selective", "full"),
    )
    method = read.text("--recompute-method", "uniform")
    count, modules = read.count("--recompute-num-layers"), read.texts("--recompute-modules")
    if mode == "selective" and modules not in ([], ["core_attn"]):
        raise ArgumentError(
            f"flags: --recompute-modules must be core_attn, which selective recompute is here, got "
            f"{' '.join(modules)}"
        )
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


def _offload(read: Flags) -> str:
    """Return the activations that wait in host memory."""
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

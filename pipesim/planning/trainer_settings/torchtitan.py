"""Read the settings of torchtitan from TOML; the inverse of `Plan.to_torchtitan`.

Names, defaults and rules are those of torchtitan 0.2.2 (github.com/pytorch/torchtitan, tag v0.2.2):
``torchtitan/config/job_config.py``, and ``pipeline_parallel.py`` and ``parallel_dims.py`` of
``torchtitan/distributed``. Later versions are set in Python.
"""

from __future__ import annotations

from pathlib import Path

from pipesim.errors import ArgumentError, check_count, check_flag, check_name, check_text
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.torchtitan import TORCH_NAMES
from pipesim.planning.trainer_settings.settings import TrainerSettings, replicas_of, whole_number
from pipesim.planning.trainer_settings.tables import PREFIX, Tables
from pipesim.planning.trainer_settings.torchtitan_layers import (
    SINGLE,
    check_chunks,
    listed_layers,
    shared_layers,
)

#: Schedules of torch that take their order from a file, and whether devices have several stages.
_OF_FILES = {
    "PipelineScheduleSingle": False,
    "PipelineScheduleMulti": True,
    "_PipelineScheduleRuntime": True,
}


def read_torchtitan(
    toml: str | Path, *, n_layers: int | None = None, n_gpus: int | None = None
) -> TrainerSettings:
    """Read the configuration of a pipeline from settings of torchtitan 0.2.2.

    The tables ``parallelism``, ``training`` and ``activation_checkpoint`` are read; what they lack
    has torchtitan's default, but recompute without a ``mode`` is ``"none"``. Settings that would
    change the pipeline and are not understood are refused. Other settings of these tables are
    listed in `TrainerSettings.ignored`, and other tables are left out.

    FSDP shards parameters, so that replicas that share only the optimizer do not occur:
    ``fsdp_reshard_after_forward = "never"`` is ``shard_parameters="step"`` of `pipesim.lower`.

    Parameters
    ----------
    toml
        Text of the settings, or the path of a file, as `pathlib.Path`.
    n_layers
        Layers of the model, which torchtitan takes from its name; not needed if
        ``module_fqns_per_model_part`` lists them.
    n_gpus
        GPUs of all replicas, for ``data_parallel_shard_degree = -1``; by default one replica.

    Returns
    -------
    TrainerSettings
        Schedule, placement, layers of each stage, options of `pipesim.lower`, parallel sizes.

    See Also
    --------
    Plan.to_torchtitan : Write the settings of a configuration.
    read_megatron : Read flags of Megatron-LM.

    Examples
    --------
    >>> import pipesim as ps
    >>> settings = ps.read_torchtitan(
    ...     '''
    ...     [training]
    ...     local_batch_size = 8
    ...     [parallelism]
    ...     data_parallel_shard_degree = 2
    ...     pipeline_parallel_degree = 4
    ...     pipeline_parallel_schedule = "Interleaved1F1B"
    ...     pipeline_parallel_layers_per_stage = 4
    ...     ''',
    ...     n_layers=30,
    ... )
    >>> settings.choice.layers_per_stage
    (3, 4, 4, 4, 4, 4, 4, 3)
    >>> settings.choice.schedule, settings.choice.n_microbatches, settings.global_batch
    ('interleaved_1f1b', 8, 16)
    """
    tables = Tables(toml)
    if n_layers is not None:
        check_count("n_layers", n_layers)
    if n_gpus is not None:
        check_count("n_gpus", n_gpus)
    t, p, c, x = (
        tables.count("parallelism", f"{kind}_parallel_degree", 1)
        for kind in ("tensor", "pipeline", "context", "expert")
    )
    replicas, shard_parameters = _replicas(tables, n_gpus, t * p * c, p)
    size, count, batch = _batches(tables, p, replicas)
    schedule, csv, n_chunks = _schedule(tables, p, x)
    sizes = listed_layers(tables, n_layers, p) or shared_layers(tables, n_layers, p, n_chunks)
    if sizes and n_chunks:
        n_chunks = len(sizes) // p
        check_chunks(tables, schedule, n_chunks)
    elif not n_chunks:
        n_chunks = 1
    choice = PlanChoice(
        tensor_parallel=t,
        pipeline_parallel=p,
        data_parallel=replicas,
        microbatch_size=size,
        n_microbatches=count,
        schedule=schedule,
        n_chunks=n_chunks,
        recompute=_recompute(tables),
        shard_optimizer=False,
        sequence_parallel=t > 1,
        layers_per_stage=sizes,
        context_parallel=c,
        expert_parallel=x,
        shard_parameters=shard_parameters,
    )
    return TrainerSettings(
        choice,
        batch,
        expert_tensor_parallel=tables.count("parallelism", "expert_tensor_parallel_degree", 1),
        schedule_csv=csv,
        ignored=tables.checked_rest(),
    )


def _replicas(
    tables: Tables, n_gpus: int | None, gpus_per_replica: int, p: int
) -> tuple[int, ShardParameters]:
    """Return the number of replicas, and how they share parameters."""
    copies = tables.count("parallelism", "data_parallel_replicate_degree", 1)
    shards = tables.count("parallelism", "data_parallel_shard_degree", -1, -1)
    key = "fsdp_reshard_after_forward"
    policy = check_name(
        f"toml: {key}",
        tables.text("parallelism", key, "default"),
        ("default", "always", "never"),
    )
    if shards < 1:
        shards = replicas_of("toml", n_gpus, gpus_per_replica * copies)
    elif n_gpus is not None and n_gpus != gpus_per_replica * copies * shards:
        raise ArgumentError(
            f"n_gpus={n_gpus}, but the degrees of the settings make "
            f"{gpus_per_replica * copies * shards} GPUs"
        )
    if copies > 1 and shards > 1:
        raise ArgumentError(
            "toml: data_parallel_replicate_degree and data_parallel_shard_degree must not both be "
            f"above 1, got {copies} and {shards}: replicas share parameters all together or not "
            "at all here"
        )
    if shards == 1:
        return copies, "none"
    # By default, torchtitan keeps parameters if there is a pipeline.
    is_kept = policy == "never" or (policy == "default" and p > 1)
    return shards, "step" if is_kept else "every"


def _batches(tables: Tables, p: int, replicas: int) -> tuple[int, int, int]:
    """Return the size of a micro-batch, the micro-batches of a replica, and the batch."""
    local = tables.count("training", "local_batch_size", 8)
    size = tables.count("parallelism", f"{PREFIX}microbatch_size", 1)
    batch = tables.count("training", "global_batch_size", -1, -1)
    batch = local * replicas if batch < 1 else batch
    why = f"global_batch_size must be a multiple of local_batch_size {local} on each replica"
    steps = whole_number("toml", batch, local * replicas, why)
    if p == 1:
        return local, steps, batch
    if steps > 1:
        raise ArgumentError(
            f"toml: global_batch_size {batch} needs {steps} runs of the pipeline with "
            f"local_batch_size {local} on {replicas} replicas before a step; a configuration here "
            "has one"
        )
    why = f"local_batch_size must be a multiple of {PREFIX}microbatch_size"
    return size, whole_number("toml", local, size, why), batch


def _schedule(tables: Tables, p: int, x: int) -> tuple[str, str, int]:
    """Return the schedule, its file or "", and the usual stages of a device."""
    name = tables.text("parallelism", f"{PREFIX}schedule", "1F1B")
    csv = tables.get("parallelism", f"{PREFIX}schedule_csv", "") or ""
    check_text(f"toml: {PREFIX}schedule_csv", csv)
    overlap = f"{PREFIX}expert_parallel_overlap"
    hides = check_flag(f"toml: {overlap}", tables.get("parallelism", overlap, True))
    if p == 1:
        return "1f1b", "", 1
    names = {torch.lower(): own for own, torch in TORCH_NAMES.items()}
    own = names.get(name.lower(), "")
    if csv:
        check_name(f"toml: {PREFIX}schedule", name, (*_OF_FILES, *TORCH_NAMES.values()))
        several = _OF_FILES.get(name, own not in SINGLE)
        return own or "of a file", csv, 2 if several else 1
    if name in _OF_FILES:
        raise ArgumentError(
            f"toml: {PREFIX}schedule {name!r} takes its order from a file; give "
            f"{PREFIX}schedule_csv"
        )
    if not own:
        check_name(f"toml: {PREFIX}schedule", name, TORCH_NAMES.values())
    if own == "dualpipev" and x > 1 and not hides:
        raise ArgumentError(
            f"toml: {overlap} = false is not understood: exchanges of experts run behind the "
            "other half of a pair here"
        )
    return own, "", 1 if own in SINGLE else 2


def _recompute(tables: Tables) -> str:
    """Return the recompute of layers."""
    table = "activation_checkpoint"
    mode = check_name(
        "toml: mode of activation_checkpoint",
        tables.text(table, "mode", "none"),
        ("none", "selective", "full", "memory_budget"),
    )
    option = tables.get(table, "selective_ac_option", "2")
    if mode == "memory_budget" or (mode == "selective" and option not in ("op", "1")):
        raise ArgumentError(
            f"toml: activation_checkpoint with mode {mode!r} and selective_ac_option {option!r} is "
            'not understood; give mode "none", "full", or "selective" with option "op"'
        )
    return "full" if mode == "selective" and option == "1" else mode

"""Write the settings of torchtitan for a configuration as TOML, and read them.

Names, defaults and rules are those of torchtitan 0.2.2 (github.com/pytorch/torchtitan, tag v0.2.2):
``torchtitan/config/job_config.py``; ``activation_checkpoint.py``, ``parallel_dims.py`` and
``pipeline_parallel.py`` of ``torchtitan/distributed``; and
``torchtitan/models/llama3/infra/parallelize.py``. Later versions are set in Python instead.
Schedules are those of ``torch.distributed.pipelining`` in PyTorch 2.13.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.errors import (
    ArgumentError,
    check_count,
    check_flag,
    check_list,
    check_name,
    check_text,
)
from pipesim.framework.framework import BEST_CASE, Framework, TensorOverlap
from pipesim.lowering.parameter_shards import ShardParameters
from pipesim.models.layers import Layers
from pipesim.models.precision import Precision
from pipesim.models.transformer import Transformer
from pipesim.planning.choice import PlanChoice, layer_by_layer, placement_of
from pipesim.planning.framework_settings import TrainerSettings, replicas_of, whole_number
from pipesim.scheduling.placement import Layout, Placement
from pipesim.utils.checks import checked_names
from pipesim.utils.files import read_text

# Write.


class _TorchSchedule(NamedTuple):
    """A schedule of torch: its name, and the micro-batches and chunks that it can run."""

    name: str
    runs: Callable[[PlanChoice], bool] = lambda choice: True
    needs: str = ""


_Needs = tuple[Callable[[PlanChoice], bool], str]
_CHUNKS: _Needs = (lambda choice: choice.n_chunks > 1, "at least 2 chunks")
_ENOUGH: _Needs = (
    lambda choice: choice.n_microbatches >= choice.n_stages,
    "at least as many micro-batches as stages",
)
_SCHEDULES: Mapping[str, _TorchSchedule] = {
    "gpipe": _TorchSchedule("GPipe"),
    "1f1b": _TorchSchedule("1F1B", *_ENOUGH),
    "interleaved_1f1b": _TorchSchedule("Interleaved1F1B", *_CHUNKS),
    "interleaved_zb": _TorchSchedule("InterleavedZeroBubble", *_CHUNKS),
    "looped_bfs": _TorchSchedule("LoopedBFS", *_CHUNKS),
    "zbv": _TorchSchedule("ZBVZeroBubble"),
    "dualpipev": _TorchSchedule("DualPipeV", *_ENOUGH),
}
#: Name of each schedule in torch.distributed.pipelining.
TORCH_NAMES = {name: schedule.name for name, schedule in _SCHEDULES.items()}


def torchtitan_toml(
    choice: PlanChoice,
    model: Transformer | Layers,
    global_batch: int,
    layout: Layout,
    schedule_csv: str = "",
    precision: Precision = "bf16",
    framework: Framework = BEST_CASE,
) -> str:
    """Return the settings of a configuration as TOML; see `Plan.to_torchtitan`."""
    _check(choice, layout)
    if precision not in ("bf16", *_CONVERTERS.values()):
        raise ArgumentError(
            f"torchtitan trains in bf16, or converts linear maps to fp8 or mxfp8; got precision="
            f"{precision!r}; plan with one of these"
        )
    _check_sharing(choice, model)
    p = choice.pipeline_parallel
    name = _placement_name(choice) if schedule_csv else _schedule_name(choice) if p > 1 else ""
    local = choice.microbatch_size * (choice.n_microbatches if p > 1 else 1)
    training: dict[str, object] = {"local_batch_size": local, "global_batch_size": global_batch}
    if isinstance(model, Transformer):
        training["seq_len"] = model.sequence_length
    shards = choice.optimizer_shares
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": choice.data_parallel // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": choice.tensor_parallel,
        "pipeline_parallel_degree": p,
    }
    if choice.context_parallel > 1:
        parallelism["context_parallel_degree"] = choice.context_parallel
        # Keys and values go around a ring.
        parallelism["context_parallel_rotate_method"] = "alltoall"
    if choice.expert_parallel > 1:
        parallelism["expert_parallel_degree"] = choice.expert_parallel
        parts = choice.expert_tensor_parallel or choice.tensor_parallel
        parallelism["expert_tensor_parallel_degree"] = parts
    if shards > 1:
        always = choice.shard_parameters == "every"
        parallelism["fsdp_reshard_after_forward"] = "always" if always else "never"
    if p > 1:
        parallelism["pipeline_parallel_schedule"] = name
        parallelism |= {"pipeline_parallel_schedule_csv": schedule_csv} if schedule_csv else {}
        parallelism["pipeline_parallel_microbatch_size"] = choice.microbatch_size
        parallelism |= _split_settings(choice.layers_per_stage)
    # By default, "selective" is every second layer there.
    option = {"selective_ac_option": "op"} if choice.recompute == "selective" else {}
    tables: dict[str, Mapping[str, object]] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": choice.recompute, **option},
    }
    texts = [
        f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    ]
    return _comments(choice, precision, framework) + "\n".join(texts)


def _split_settings(sizes: Sequence[int]) -> dict[str, object]:
    if len(set(sizes)) == 1:
        return {
            "pipeline_parallel_layers_per_stage": sizes[0],
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    parts, first = [], 0
    for size in sizes:
        parts.append([f"layers.{layer}" for layer in range(first, first + size)])
        first += size
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return {"module_fqns_per_model_part": parts}


def _comments(choice: PlanChoice, precision: Precision, framework: Framework) -> str:
    """Return comments that name differences between the plan and torchtitan."""
    lines = [
        f'Linear maps are in {precision}: add "{name}" to converters of [model].'
        for name, own in list(_CONVERTERS.items())[:2]
        if own == precision
    ]
    if choice.shard_optimizer:
        lines.append("FSDP shards parameters, too; it keeps them gathered during a step here.")
    if choice.recompute == "selective" and "second_products" not in framework.recompute_modules:
        lines.append(
            "Selective recompute keeps attention and every second matrix product here, and"
        )
        lines.append(
            "recomputes the rest of each layer. The planned seconds and bytes are those of"
        )
        lines.append("Megatron-LM's, which recomputes the core of attention alone.")
    return "".join(f"# {line}\n" for line in lines) + ("\n" if lines else "")


def _value(value: object) -> str:
    """Return a number, a text or nested lists of texts as TOML; a line for each inner list."""
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"    {_value(part)},\n" for part in value) + "]"
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _placement_name(choice: PlanChoice) -> str:
    """Return the schedule of torch that places stages as a configuration does.

    torchtitan takes the placement from its name, and the order from a file.
    """
    p, v = choice.pipeline_parallel, choice.n_chunks
    placement = placement_of(choice)
    if v > 1 and placement == Placement.v_shaped(p):
        return "ZBVZeroBubble"
    if placement != Placement.looped(p, v):
        raise ArgumentError(
            f"torchtitan places stages in loops or in a V; {choice.schedule} of {v} chunks does not"
        )
    return "PipelineScheduleMulti" if v > 1 else "PipelineScheduleSingle"


def _schedule_name(choice: PlanChoice) -> str:
    """Return the schedule of torch with the order of a configuration; raise if it has none."""
    torch = _SCHEDULES.get(choice.schedule)
    advice = "give the order as a file, schedule_csv=..."
    if torch is None:
        raise ArgumentError(
            f"torchtitan has no schedule {choice.schedule!r}; it runs {', '.join(_SCHEDULES)}. "
            f"Plan with one of these, or {advice}"
        )
    if choice.ordered_for_costs:
        raise ArgumentError(
            f"torchtitan knows {choice.schedule} for equal stages only, and this order is made for "
            f"its costs; {advice}"
        )
    if not torch.runs(choice):
        raise ArgumentError(
            f"torch's {torch.name} needs {torch.needs}; got pipeline_parallel="
            f"{choice.pipeline_parallel}, n_chunks={choice.n_chunks} and n_microbatches="
            f"{choice.n_microbatches}"
        )
    return torch.name


def _check(choice: PlanChoice, layout: Layout) -> None:
    """Raise `ArgumentError` for a configuration that torchtitan cannot run."""
    p, t = choice.pipeline_parallel, choice.tensor_parallel
    if p == 1 and choice.schedule != "1f1b" and not choice.is_layer_by_layer:
        raise ArgumentError(
            "torchtitan without a pipeline runs micro-batches one after the other, as 1f1b on one "
            f"device; got schedule={choice.schedule!r}"
        )
    if layout == "replica_major" and choice.layout_matters:
        raise ArgumentError(
            "torchtitan numbers the replicas of a stage in a row; got layout='replica_major', "
            "whose step differs; plan with layout='stage_major'"
        )
    if t > 1 and not choice.sequence_parallel:
        raise ArgumentError(
            f"torchtitan always splits the sequence with tensor parallelism; got tensor_parallel="
            f"{t} without sequence_parallel; plan with sequence_parallel=True"
        )
    if 1 == choice.optimizer_shares < choice.data_parallel and p * t > 1:
        raise ArgumentError(
            f"torchtitan replicates parameters only without pipeline and tensor parallelism; got "
            f"data_parallel={choice.data_parallel} with pipeline_parallel={p} and "
            f"tensor_parallel={t}; plan with shard_optimizer=True"
        )


def _check_sharing(choice: PlanChoice, model: Transformer | Layers) -> None:
    """Raise `ArgumentError` for slices, offload, sharding and sizes that torchtitan lacks."""
    c, x = choice.context_parallel, choice.expert_parallel
    if choice.n_slices > 1:
        raise ArgumentError(
            f"torchtitan runs whole sequences; got n_slices={choice.n_slices}; plan with n_slices=1"
        )
    if choice.merged or choice.group_size:
        raise ArgumentError(
            "torchtitan merges no F and B, and groups as many micro-batches as devices; got "
            f"merged={choice.merged!r} and group_size={choice.group_size}; plan with merged=False "
            "and without group_size"
        )
    if choice.offload != "none":
        raise ArgumentError(
            f"torchtitan offloads no activations; got offload={choice.offload!r}; plan with "
            'offload="none"'
        )
    if isinstance(choice.shard_parameters, int):
        raise ArgumentError(
            "torchtitan frees parameters after each use or keeps them in a step; got "
            f"shard_parameters={choice.shard_parameters}; plan with "
            'shard_parameters="every" or "step"'
        )
    t, etp = choice.tensor_parallel, choice.expert_tensor_parallel
    if etp > 1 or (etp and x == 1):
        raise ArgumentError(
            f"torchtitan has whole experts only where they are divided; got expert_tensor_parallel="
            f"{etp} and expert_parallel={x}; plan with expert_tensor_parallel=0"
        )
    own, words = (t * c, "tensor_parallel x context_parallel") if etp else (c, "context_parallel")
    if x > 1 and (x % own or (x > own and choice.optimizer_shares == 1)):
        raise ArgumentError(
            "torchtitan divides experts among the GPUs of a device and among replicas that share "
            f"parameters; got expert_parallel={x}, {words}={own} and shard_optimizer="
            f"{choice.shard_optimizer}; plan with expert_parallel a multiple of {words}, and "
            "shard_optimizer=True"
        )
    parts = 2 * t * c
    if isinstance(model, Transformer) and c > 1 and model.sequence_length % parts:
        raise ArgumentError(
            f"torchtitan splits a sequence into 2 x tensor_parallel x context_parallel = {parts} "
            f"parts, which do not divide sequence_length={model.sequence_length}"
        )


# Read.

#: Schedules of torch that take their order from a file, and whether devices have several stages.
_OF_FILES = {
    "PipelineScheduleSingle": False,
    "PipelineScheduleMulti": True,
    "_PipelineScheduleRuntime": True,
}


@checked_names
def read_torchtitan(
    toml: str | Path, *, n_layers: int | None = None, n_gpus: int | None = None
) -> TrainerSettings:
    """Read the configuration of a pipeline from settings of torchtitan 0.2.2.

    The tables ``parallelism``, ``training``, ``activation_checkpoint`` and ``compile`` are read;
    what they lack has torchtitan's default, but recompute without a ``mode`` is ``"none"``. Of
    ``model``, converters of linear maps to 8 bits are read, with their recipes. Settings that would
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
    parts = tables.count("parallelism", "expert_tensor_parallel_degree", 1)
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
        expert_tensor_parallel=parts if x > 1 and parts != t else 0,
        shard_parameters=shard_parameters,
    )
    accumulates = choice.shards_parameters and p == 1
    return TrainerSettings(
        layer_by_layer(choice),
        batch,
        grad_sync="every" if accumulates else "last",
        framework=_framework(tables),
        precision=_precision(tables),
        schedule_csv=csv,
        ignored=tables.checked_rest(),
    )


def _framework(tables: Tables) -> Framework:
    """Return torchtitan, whose compiler fuses operations, with its overlap of collectives."""
    name = "enable_async_tensor_parallel"
    overlaps = check_flag(f"toml: {name}", tables.get("parallelism", name, False))
    fuses = check_flag("toml: compile.enable", tables.get("compile", "enable", False))
    fused = dict.fromkeys(("fused_rotary", "fused_activation", "fused_norm"), fuses)
    overlap: TensorOverlap = "async" if overlaps else "none"
    return Framework.preset("torchtitan_2024", tensor_overlap=overlap, **fused)


#: Converters of linear maps, by their names in ``converters`` of ``model``.
_CONVERTERS: Mapping[str, Precision] = {
    "quantize.linear.float8": "fp8",
    "quantize.linear.mx": "mxfp8",
    "float8": "fp8",  # of versions before 0.2
    "mx": "mxfp8",
}


def _precision(tables: Tables) -> Precision:
    """Return the format to which linear maps are converted; 16 bits without a converter.

    A scale a row is no format here: it is read as FP8, and its recipe as a setting that is not.
    """
    names = tables.path("model.converters")
    names = names.split(",") if isinstance(names, str) else names or []
    names = check_list("toml: converters of model", names, 'names, or "" for none')
    own = [name for name in _CONVERTERS if name in names]
    if len(own) > 1:
        raise ArgumentError(f"toml: converters of model has {' and '.join(own)}; give one of them")
    tables.ignored += [f"model.converters: {name}" for name in names if name not in own]
    if not own:
        return "bf16"
    key = f"{own[0]}.recipe_name"
    recipe = tables.path(key)
    usual = ("tensorwise", "rowwise") if own[0].endswith("float8") else ("mxfp8", "mxfp8_cublas")
    if recipe is not None:
        check_name(f"toml: {key}", recipe, usual)
    tables.ignored += [key] * (recipe == "rowwise")
    return _CONVERTERS[own[0]]


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


#: Schedules with one stage a device; others have two unless the layers make more.
SINGLE = frozenset({"gpipe", "1f1b"})
_LAYER = re.compile(r"layers\.([0-9]+)")


def listed_layers(tables: Tables, n_layers: int | None, p: int) -> tuple[int, ...]:
    """Return the layers of each stage that the settings list; none if they list none."""
    key = "module_fqns_per_model_part"
    parts = tables.get("parallelism", key, None)
    if parts is None or p == 1:
        return ()
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts
    ):
        raise ArgumentError(f"toml: {key} must be lists of names, got {parts!r:.60}")
    layers = [[m[1] for name in part if (m := _LAYER.fullmatch(name))] for part in parts]
    order = [int(number) for part in layers for number in part]
    if order != list(range(len(order))) or (n_layers is not None and len(order) != n_layers):
        expected = "all" if n_layers is None else f"n_layers={n_layers}"
        raise ArgumentError(
            f"toml: {key} must have {expected} layers in order, each once, got {order!r:.60}"
        )
    whole_number("toml", len(parts), p, f"the parts of {key} must be a multiple of {PREFIX}degree")
    return tuple(map(len, layers))


def shared_layers(tables: Tables, n_layers: int | None, p: int, n_chunks: int) -> tuple[int, ...]:
    """Return the layers of each stage as torchtitan shares them; none if they are unknown.

    The embedding, and norm and head, count as some layers. The first stages have one more of the
    layers that are left over.
    """
    first, last = (
        tables.count("parallelism", f"{PREFIX}{end}_stage_less_layers", 1, 0)
        for end in ("first", "last")
    )
    key = f"{PREFIX}layers_per_stage"
    per_stage = tables.get("parallelism", key, None)
    if per_stage is not None:
        check_count(f"toml: {key}", per_stage)
    if n_layers is None:
        if per_stage is not None and p > 1:
            raise ArgumentError(f"n_layers is missing, which {key} needs; give n_layers=")
        return ()
    if p == 1:
        return (n_layers,)
    effective = n_layers + first + last
    n_stages = n_chunks * p if per_stage is None else -(-effective // per_stage)
    why = f"{key} must make a multiple of {PREFIX}degree stages"
    whole_number("toml", n_stages, p, why)
    even, longer = divmod(effective, n_stages)
    if even < max(first, last, 1):
        raise ArgumentError(
            f"toml: {n_stages} stages have {even} layers each, of n_layers={n_layers}, which are "
            f"too few for {PREFIX}first_stage_less_layers {first} and last {last}"
        )
    sizes = [even + (stage < longer) for stage in range(n_stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def check_chunks(tables: Tables, schedule: str, n_chunks: int) -> None:
    """Raise `ArgumentError` for a number of stages a device that the schedule does not have."""
    name = TORCH_NAMES.get(schedule, "")
    needs = ""
    if schedule in SINGLE and n_chunks != 1:
        needs = "1"
    elif schedule in ("zbv", "dualpipev") and n_chunks != 2:
        needs = "2"
    elif name and schedule not in SINGLE and n_chunks < 2:
        needs = "at least 2"
    if needs:
        raise ArgumentError(
            f"toml: {name} has {needs} stages a device, but the layers of the settings make "
            f"{n_chunks}; change {PREFIX}layers_per_stage"
        )


#: Beginning of the names of settings of the pipeline.
PREFIX = "pipeline_parallel_"


class Tables:
    """The tables of the settings, and which of their keys were read."""

    def __init__(self, toml: object) -> None:
        text = read_text(toml, "settings from", ArgumentError) if isinstance(toml, Path) else (
            check_text("toml", toml)
        )  # fmt: skip
        try:
            content = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ArgumentError(
                f"toml: the text is no TOML: {str(error) or 'it is nested too deeply'}; give a "
                "file as pathlib.Path"
            ) from error
        self._values: dict[str, dict[str, Any]] = {}
        for name in ("training", "parallelism", "activation_checkpoint", "compile"):
            table = content.get(name, {})
            if not isinstance(table, dict):
                raise ArgumentError(f"toml: {name} must be a table, got {table!r:.60}")
            self._values[name] = table
        self._read: set[tuple[str, str]] = set()
        self._content = content
        #: Settings that other functions read, and that are not understood.
        self.ignored: list[str] = []

    def path(self, path: str) -> Any:
        """Return a value of any table, such as ``"model.converters"``; None if it is missing."""
        value: Any = self._content
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def get(self, table: str, key: str, default: object) -> Any:
        """Return a value."""
        self._read.add((table, key))
        return self._values[table].get(key, default)

    def count(self, table: str, key: str, default: int, minimum: int = 1) -> int:
        """Return a whole number."""
        return check_count(f"toml: {key}", self.get(table, key, default), minimum)

    def text(self, table: str, key: str, default: str) -> str:
        """Return a text."""
        return check_text(f"toml: {key}", self.get(table, key, default))

    def checked_rest(self) -> tuple[str, ...]:
        """Return the settings that were not read; raise for one that changes the pipeline."""
        rest = [
            (table, key)
            for table, values in self._values.items()
            for key in values
            if (table, key) not in self._read
        ]
        for _, key in rest:
            if key.startswith(PREFIX):
                raise ArgumentError(
                    f"toml: {key} is not understood; leave it out to read the other settings"
                )
        return (*(f"{table}.{key}" for table, key in rest), *self.ignored)

"""Settings of torchtitan for a configuration, as TOML.

Names and rules are those of torchtitan 0.2.2 (github.com/pytorch/torchtitan, tag v0.2.2):
``torchtitan/config/job_config.py``; ``activation_checkpoint.py``, ``parallel_dims.py`` and
``pipeline_parallel.py`` of ``torchtitan/distributed``; and
``torchtitan/models/llama3/infra/parallelize.py``. Later versions are set in Python instead.
Schedules are those of ``torch.distributed.pipelining`` in PyTorch 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipesim.errors import ArgumentError
from pipesim.models.layers import Layers
from pipesim.models.transformer import Transformer
from pipesim.planning.configurations.choice import PlanChoice
from pipesim.planning.configurations.order_facts import placement_of
from pipesim.scheduling.placement import Layout, looped, v_shaped


class _TorchSchedule(NamedTuple):
    """A schedule of torch: its name, and the micro-batches and chunks that it can run."""

    name: str
    runs: Callable[[PlanChoice], bool] = lambda choice: True
    needs: str = ""


def _has_chunks(choice: PlanChoice) -> bool:
    """Whether devices have several stages."""
    return choice.n_chunks > 1


def _enough(choice: PlanChoice) -> bool:
    """Whether there are at least as many micro-batches as stages."""
    return choice.n_microbatches >= choice.n_stages


_CHUNKS = "at least 2 chunks"
_ENOUGH = "at least as many micro-batches as stages"
_SCHEDULES: Mapping[str, _TorchSchedule] = {
    "gpipe": _TorchSchedule("GPipe"),
    "1f1b": _TorchSchedule("1F1B", _enough, _ENOUGH),
    "interleaved_1f1b": _TorchSchedule("Interleaved1F1B", _has_chunks, _CHUNKS),
    "interleaved_zb": _TorchSchedule("InterleavedZeroBubble", _has_chunks, _CHUNKS),
    "looped_bfs": _TorchSchedule("LoopedBFS", _has_chunks, _CHUNKS),
    "zbv": _TorchSchedule("ZBVZeroBubble"),
    "dualpipev": _TorchSchedule("DualPipeV", _enough, _ENOUGH),
}
#: Name of each schedule in torch.distributed.pipelining.
TORCH_NAMES = {name: schedule.name for name, schedule in _SCHEDULES.items()}


def torchtitan_toml(
    choice: PlanChoice,
    model: Transformer | Layers,
    global_batch: int,
    layout: Layout,
    schedule_csv: str = "",
) -> str:
    """Return the settings of a configuration as TOML; see `Plan.to_torchtitan`."""
    _check(choice, layout)
    _check_sharing(choice, model)
    name = _placement_name(choice) if schedule_csv else _schedule_name(choice)
    p = choice.pipeline_parallel
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
    parallelism |= _context_and_experts(choice)
    if shards > 1:
        always = choice.shard_parameters == "every"
        parallelism["fsdp_reshard_after_forward"] = "always" if always else "never"
    if p > 1:
        parallelism["pipeline_parallel_schedule"] = name
        parallelism |= {"pipeline_parallel_schedule_csv": schedule_csv} if schedule_csv else {}
        parallelism["pipeline_parallel_microbatch_size"] = choice.microbatch_size
        parallelism |= _split_settings(choice.layers_per_stage)
    tables: dict[str, Mapping[str, object]] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": _recompute_settings(choice.recompute),
    }
    return _comments(choice) + "\n".join(_table_text(*table) for table in tables.items())


def _context_and_experts(choice: PlanChoice) -> dict[str, object]:
    """Return the settings of context and expert parallelism; none for sizes of 1."""
    values: dict[str, object] = {}
    if choice.context_parallel > 1:
        values["context_parallel_degree"] = choice.context_parallel
        values["context_parallel_rotate_method"] = "alltoall"  # keys and values go around a ring
    if choice.expert_parallel > 1:
        values["expert_parallel_degree"] = choice.expert_parallel
        values["expert_tensor_parallel_degree"] = choice.tensor_parallel
    return values


def _recompute_settings(recompute: str) -> dict[str, object]:
    """Return the settings for recompute; by default ``"selective"`` is every second layer there."""
    option = {"selective_ac_option": "op"} if recompute == "selective" else {}
    return {"mode": recompute, **option}


def _split_settings(sizes: Sequence[int]) -> dict[str, object]:
    """Return the settings for the layers of each stage."""
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


def _comments(choice: PlanChoice) -> str:
    """Return comments that name differences between the plan and torchtitan."""
    lines = []
    if choice.shard_optimizer:
        lines.append("FSDP shards parameters, too; it keeps them gathered during a step here.")
    if choice.recompute == "selective":
        lines.append(
            "Selective recompute keeps attention and every second matrix product here, and"
        )
        lines.append(
            "recomputes the rest of each layer. The planned seconds and bytes are those of"
        )
        lines.append("Megatron-LM's, which recomputes the core of attention alone.")
    return "".join(f"# {line}\n" for line in lines) + ("\n" if lines else "")


def _table_text(name: str, values: Mapping[str, object]) -> str:
    """Return a table as TOML."""
    return f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


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
    if v > 1 and placement == v_shaped(p):
        return "ZBVZeroBubble"
    if placement != looped(p, v):
        raise ArgumentError(
            f"torchtitan places stages in loops or in a V; {choice.schedule} of {v} chunks does not"
        )
    return "PipelineScheduleMulti" if v > 1 else "PipelineScheduleSingle"


def _schedule_name(choice: PlanChoice) -> str:
    """Return the schedule of torch with the order of a configuration; raise if it has none."""
    p, torch = choice.pipeline_parallel, _SCHEDULES.get(choice.schedule)
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
    if p > 1 and not torch.runs(choice):
        raise ArgumentError(
            f"torch's {torch.name} needs {torch.needs}; got pipeline_parallel={p}, n_chunks="
            f"{choice.n_chunks} and n_microbatches={choice.n_microbatches}"
        )
    return torch.name


def _check(choice: PlanChoice, layout: Layout) -> None:
    """Raise `ArgumentError` for a configuration that torchtitan cannot run."""
    p, t = choice.pipeline_parallel, choice.tensor_parallel
    if p == 1 and choice.schedule != "1f1b":
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
    if x > 1 and (x % c or (x > c and choice.optimizer_shares == 1)):
        raise ArgumentError(
            "torchtitan divides experts among the GPUs of context parallelism and among replicas "
            f"that share parameters; got expert_parallel={x}, context_parallel={c} and "
            f"shard_optimizer={choice.shard_optimizer}; plan with expert_parallel a multiple of "
            "context_parallel, and shard_optimizer=True"
        )
    parts = 2 * choice.tensor_parallel * c
    if isinstance(model, Transformer) and c > 1 and model.sequence_length % parts:
        raise ArgumentError(
            f"torchtitan splits a sequence into 2 x tensor_parallel x context_parallel = {parts} "
            f"parts, which do not divide sequence_length={model.sequence_length}"
        )

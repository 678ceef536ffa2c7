"""Flags of Megatron-LM and settings of torchtitan for a configuration."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_plans import CHOICE, SPLIT, plans

import pipesim as ps
from pipesim.costs import read_layout
from pipesim.errors import ArgumentError
from pipesim.planning import torchtitan
from pipesim.planning.choice import PlanChoice
from pipesim.planning.plans import Plan

DEEP = replace(
    CHOICE, tensor_parallel=1, pipeline_parallel=4, n_microbatches=8, layers_per_stage=(2,) * 4
)
CHUNKED = replace(CHOICE, schedule="interleaved_1f1b", n_chunks=2, layers_per_stage=(2,) * 4)
ALONE = replace(
    CHOICE, tensor_parallel=1, pipeline_parallel=1, data_parallel=8, n_microbatches=2,
    layers_per_stage=(8,),
)  # fmt: skip


def plan_of(choice: PlanChoice) -> Plan:
    """Return the plan of a configuration of the batch of 16 sequences, on as many GPUs."""
    problem = replace(plans().problem, cluster=ps.Cluster("dgx_h100", choice.n_gpus))
    return replace(plans(), problem=problem).plan(choice)


def flags(choice: PlanChoice) -> dict[str, str]:
    """Return the flags of Megatron-LM with their values, "" for a switch."""
    words = shlex.split(plan_of(choice).to_megatron())
    values: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            values[word] = "" if after.startswith("--") else after
    return values


def test_megatron_sizes() -> None:
    """Even stages of one chunk need no layers; replicas follow from the number of processes."""
    assert flags(CHOICE) == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "2",
        "--micro-batch-size": "1",
        "--global-batch-size": "16",
        "--sequence-parallel": "",
        "--use-distributed-optimizer": "",
        "--bf16": "",
        "--grad-reduce-in-bf16": "",
        "--no-gradient-accumulation-fusion": "",  # without a framework, sums of 2 bytes are not
    }


def test_megatron_stages() -> None:
    """Even chunks are a number of layers; uneven stages a layout that reads back the same."""
    assert flags(CHUNKED)["--num-layers-per-virtual-pipeline-stage"] == "2"
    layout = flags(SPLIT)["--pipeline-model-parallel-layout"]
    assert read_layout(layout) == SPLIT.layers_per_stage
    uneven = flags(replace(CHUNKED, layers_per_stage=(3, 2, 2, 1)))
    assert "--num-layers-per-virtual-pipeline-stage" not in uneven
    assert read_layout(uneven["--pipeline-model-parallel-layout"]) == (3, 2, 2, 1)
    assert "--pipeline-model-parallel-layout" not in flags(ALONE)


def test_megatron_recompute_and_switches() -> None:
    """Sequence parallelism needs tensor parallelism there, and is no flag without."""
    full = flags(replace(SPLIT, recompute="full", shard_optimizer=False))
    assert full["--recompute-granularity"] == "full"
    assert full["--recompute-method"] == "uniform"
    assert full["--recompute-num-layers"] == "1"
    assert "--use-distributed-optimizer" not in full
    assert "--sequence-parallel" not in full
    selective = flags(replace(CHOICE, recompute="selective"))
    assert selective["--recompute-granularity"] == "selective"
    assert "--recompute-method" not in selective


def test_the_order_of_ranks() -> None:
    """Megatron-LM has a flag for stages of a replica in a row; torchtitan cannot number them so."""
    problem = replace(plans().problem, layout="replica_major")
    in_a_row = replace(plans(), problem=problem)
    flag = "--use-tp-pp-dp-mapping"
    assert flag in shlex.split(in_a_row.plan(CHOICE).to_megatron())
    assert flag not in flags(CHOICE)
    with pytest.raises(ArgumentError, match="plan with layout='stage_major'"):
        in_a_row.plan(CHOICE).to_torchtitan()
    for same in (ALONE, replace(DEEP, data_parallel=1, n_microbatches=16)):
        cluster = ps.Cluster("dgx_h100", same.n_gpus)
        plan = replace(in_a_row, problem=replace(problem, cluster=cluster)).plan(same)
        assert flag not in shlex.split(plan.to_megatron())
        assert "pipeline_parallel_degree" in plan.to_torchtitan()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            replace(CHUNKED, schedule="zbv"),
            r"no schedule 'zbv'; it runs 1f1b, .* Plan with schedules=\[",
        ),
        (
            replace(CHUNKED, n_chunks=1, layers_per_stage=(4, 4)),
            "at least 2 devices and 2 chunks",
        ),
        (
            replace(
                CHUNKED,
                pipeline_parallel=4,
                n_microbatches=2,
                data_parallel=8,
                layers_per_stage=(1,) * 8,
            ),
            "a multiple of pipeline_parallel=4 micro-batches; got 2",
        ),
    ],
)
def test_megatron_cannot_run(choice: PlanChoice, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan_of(choice).to_megatron()


def settings(choice: PlanChoice) -> dict[str, Any]:
    """Return torchtitan's settings, all tables in one."""
    tables = tomllib.loads(plan_of(choice).to_torchtitan())
    assert set(tables) == {"training", "parallelism", "activation_checkpoint"}
    return {key: value for table in tables.values() for key, value in table.items()}


def test_torchtitan_settings() -> None:
    """The local batch is that of a replica: its micro-batches times their size."""
    assert settings(replace(CHOICE, microbatch_size=2, n_microbatches=4)) == {
        "local_batch_size": 8,
        "global_batch_size": 16,
        "seq_len": 2048,
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_layers_per_stage": 4,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "mode": "none",
    }


def test_torchtitan_stages() -> None:
    """Uneven stages list their modules: each layer once, in order."""
    parts = settings(SPLIT)["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [4, 2, 2, 3]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"]
    assert parts[-1] == ["layers.7", "norm", "output"]
    layers = [name for part in parts for name in part if name.startswith("layers.")]
    assert layers == [f"layers.{k}" for k in range(8)]
    assert settings(CHUNKED)["pipeline_parallel_layers_per_stage"] == 2


def test_torchtitan_without_a_pipeline() -> None:
    """Micro-batches are accumulation steps there, and the local batch is one of them."""
    values = settings(replace(ALONE, shard_optimizer=False))
    assert values["local_batch_size"] == 1
    assert values["data_parallel_replicate_degree"] == 8
    assert "pipeline_parallel_schedule" not in values
    assert "fsdp_reshard_after_forward" not in values


def test_torchtitan_differences_are_comments() -> None:
    """Without an option, torchtitan's selective mode recomputes every second layer whole."""
    selective = replace(CHOICE, recompute="selective")
    text = plan_of(selective).to_torchtitan()
    assert text.startswith("# FSDP shards parameters, too")
    assert "# Selective recompute keeps attention and every second" in text
    assert settings(selective)["selective_ac_option"] == "op"
    plain = plan_of(replace(ALONE, shard_optimizer=False, recompute="full")).to_torchtitan()
    assert plain.startswith("[training]")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (replace(CHOICE, schedule="zb_h1"), "PipelineScheduleSingle"),
        (CHUNKED, "PipelineScheduleMulti"),
        (
            replace(CHUNKED, schedule="v_half", ordered_for_costs=True),
            "ZBVZeroBubble",
        ),
    ],
)
def test_torchtitan_takes_any_order_as_a_file(
    choice: PlanChoice, name: str, tmp_path: Path
) -> None:
    """The name of torch's schedule says where stages are, the file in which order they run."""
    plan, path = plan_of(choice), tmp_path / 'the "order".csv'
    tables = tomllib.loads(plan.to_torchtitan(path))
    assert tables["parallelism"]["pipeline_parallel_schedule"] == name
    assert tables["parallelism"]["pipeline_parallel_schedule_csv"] == str(path)
    assert ps.Schedule.load(path).orders == plan.schedule.orders


def test_files_of_orders_that_torchtitan_cannot_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written for them. A schedule of a user may place stages otherwise, as in waves."""
    monkeypatch.setattr(torchtitan, "placement_of", lambda *_: ps.Placement.waves(2, 2))
    waves = replace(CHUNKED, n_chunks=4, layers_per_stage=(1,) * 8)
    for choice, path, message in (
        (CHOICE, "order.txt", "must end in .csv"),
        (ALONE, "order.csv", "at least 2 devices"),
        (waves, "order.csv", "in loops or in a V; interleaved_1f1b of 4 chunks"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plan_of(choice).to_torchtitan(tmp_path / path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            replace(CHUNKED, schedule="zbv", ordered_for_costs=True),
            "knows zbv for equal stages only, .* schedule_csv",
        ),
        (
            replace(CHOICE, schedule="zb_h1"),
            "no schedule 'zb_h1'; it runs gpipe, .*schedule_csv",
        ),
        (replace(ALONE, schedule="gpipe"), "one after the other, as 1f1b on one device"),
        (replace(DEEP, n_microbatches=2, data_parallel=8), "at least as many micro-batches as st"),
        (
            replace(CHUNKED, n_chunks=1, layers_per_stage=(4, 4)),
            "Interleaved1F1B needs at least 2 chunks; got .* n_chunks=1",
        ),
        (replace(CHOICE, sequence_parallel=False), "always splits the sequence"),
        (replace(DEEP, shard_optimizer=False), "replicates parameters only without"),
    ],
)
def test_torchtitan_cannot_run(choice: PlanChoice, message: str) -> None:
    batch = choice.data_parallel * choice.n_microbatches
    cluster = ps.Cluster("dgx_h100", choice.n_gpus)
    problem = replace(plans().problem, global_batch=batch, cluster=cluster)
    plan = replace(plans(), problem=problem).plan(choice)
    with pytest.raises(ArgumentError, match=message):
        plan.to_torchtitan()


def test_the_best_is_exported() -> None:
    assert plans().to_megatron() == plans().best.to_megatron()
    assert plans().to_torchtitan() == plans().best.to_torchtitan()

"""Configurations read from Megatron-LM's flags and torchtitan's settings."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from case_choice import EVERY_CASE
from small_plans import CHOICE, SPLIT, plans

import pipesim as ps
from pipesim.errors import ArgumentError, PipeError
from pipesim.lowering.framework_options import FrameworkOptions
from pipesim.planning import TrainerSettings
from pipesim.planning.choice import PlanChoice, layer_by_layer
from pipesim.planning.megatron import OFFLOADED, Flags, megatron_flags
from pipesim.planning.torchtitan import torchtitan_toml

MODEL = ps.Transformer(
    hidden_size=64, n_layers=8, n_heads=4, sequence_length=64, vocabulary_size=64
)
LAYERS = {1: [(8,)], 2: [(4, 4), (5, 3)], 4: [(2,) * 4, (3, 2, 2, 1)], 8: [(1,) * 8]}
#: Flags of one device, to which tests add others.
LEAST = "--micro-batch-size 1 --global-batch-size 8"
MERGED = (
    f"{LEAST} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm"
)


def choices(schedules: dict[str, int]) -> Iterator[PlanChoice]:
    """Yield choices of 8 layers, by default every fifth; most are refused by no framework."""
    product = itertools.product(
        schedules.items(), (1, 2, 4), (1, 2), (1, 2), (1, 4), ("none", "selective", "full"),
        (("none", False), ("none", True), ("every", False), ("step", False)), (1, 2),
        ((1, 0), (2, 0), (4, 1)),
    )  # fmt: skip
    # No setting has five values, or a multiple: all values of all settings meet.
    some = itertools.islice(product, 0, None, 1 if EVERY_CASE else 5)
    for (name, v), p, t, replicas, size, recompute, sharing, context, (experts, etp) in some:
        if (sharing != ("none", False) and replicas == 1) or (name != "1f1b" and p == 1):
            continue
        for layers in LAYERS.get(p * v, []):
            yield layer_by_layer(PlanChoice(
                tensor_parallel=t,
                pipeline_parallel=p,
                data_parallel=replicas,
                microbatch_size=size,
                n_microbatches=16,
                schedule=name,
                n_chunks=v,
                recompute=recompute,
                shard_optimizer=sharing[1],
                sequence_parallel=t > 1,
                layers_per_stage=layers,
                context_parallel=context,
                expert_parallel=experts,
                expert_tensor_parallel=etp if t > 1 else 0,
                shard_parameters=sharing[0],  # type: ignore[arg-type]
            ))  # fmt: skip


def batch_of(choice: PlanChoice) -> int:
    return choice.microbatch_size * choice.n_microbatches * choice.data_parallel


@pytest.mark.slow
def test_every_choice_of_megatron() -> None:
    """Flags are read as the choice that they were written for."""
    count = 0
    for choice in choices({"1f1b": 1, "interleaved_1f1b": 2}):
        for layout in ("stage_major", "replica_major"):
            try:
                flags = megatron_flags(choice, batch_of(choice), layout, FrameworkOptions())  # type: ignore[arg-type]
            except ArgumentError:
                continue
            settings = ps.read_megatron(flags, n_layers=8, n_gpus=choice.n_gpus)
            assert settings.choice == choice
            assert settings.global_batch == batch_of(choice)
            assert settings.layout == (layout if choice.layout_matters else "stage_major")
            assert set(settings.ignored) <= {"--no-gradient-accumulation-fusion", "--ckpt-format"}
            count += 1
    assert count > 200


def test_offload_of_megatron() -> None:
    """All modules of a model with experts, or none."""
    choice = replace(CHOICE, offload="all")
    experts = ps.Transformer.preset("mixtral_8x7b")
    flags = megatron_flags(choice, 16, "stage_major", FrameworkOptions(), experts)
    assert ps.read_megatron(flags, n_layers=8, n_gpus=8).choice == choice
    fewer = flags.replace(OFFLOADED[0], "")
    with pytest.raises(ArgumentError, match="--offload-modules must be all of attn_norm"):
        ps.read_megatron(fewer, n_layers=8, n_gpus=8)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"merged": True}, "--overlap-moe-expert-parallel-comm"),
        ({"merged": "delayed_w"}, "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"),
        ({"group_size": 5, "n_microbatches": 14},
         "--microbatch-group-size-per-virtual-pipeline-stage 5"),
    ],
)  # fmt: skip
def test_merged_orders_and_groups_of_megatron(changes: dict[str, Any], flags: str) -> None:
    """Flags that are read as the choice that they were written for, and its schedule."""
    choice = PlanChoice(
        pipeline_parallel=4, data_parallel=2, n_microbatches=16, schedule="interleaved_1f1b",
        n_chunks=2, layers_per_stage=(1,) * 8, expert_parallel=2,
    )  # fmt: skip
    choice = replace(choice, **changes)
    written = megatron_flags(choice, batch_of(choice), "stage_major", FrameworkOptions())
    assert written.endswith(flags)
    settings = ps.read_megatron(written, n_layers=8, n_gpus=8)
    assert settings.choice == choice
    options = {name: value for name, value in changes.items() if name != "n_microbatches"}
    expected = ps.schedule("interleaved_1f1b", 4, choice.n_microbatches, **options)
    assert settings.schedule == expected
    merged = replace(choice, merged=True)
    for refused, message in (
        ({"schedule": "1f1b", "n_chunks": 1, "layers_per_stage": (2,) * 4}, "several stages a d"),
        ({"expert_parallel": 1}, "only with experts on several GPUs"),
        ({"recompute": "full"}, "without full recompute"),
    ):
        with pytest.raises(ArgumentError, match=message):
            megatron_flags(replace(merged, **refused), 32, "stage_major", FrameworkOptions())


@pytest.mark.slow
def test_every_choice_of_torchtitan() -> None:
    """Replicas that share the optimizer alone share the parameters of a step there."""
    count = 0
    schedules = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "looped_bfs": 2,
                 "interleaved_zb": 2, "zbv": 2, "dualpipev": 2}  # fmt: skip
    for choice in choices(schedules):
        try:
            toml = torchtitan_toml(choice, MODEL, batch_of(choice), "stage_major")
        except ArgumentError:
            continue
        settings = ps.read_torchtitan(toml, n_layers=8, n_gpus=choice.n_gpus)
        expected = choice
        if choice.shard_optimizer:
            expected = layer_by_layer(
                replace(choice, shard_optimizer=False, shard_parameters="step")
            )
        assert settings.choice == expected
        assert settings.global_batch == batch_of(choice)
        assert set(settings.ignored) <= {
            "training.seq_len",
            "parallelism.context_parallel_rotate_method",
        }
        count += 1
    assert count > 200


@pytest.mark.parametrize("choice", [CHOICE, SPLIT])
@pytest.mark.parametrize("layout", ["stage_major", "replica_major"])
def test_the_graph_of_a_plan(choice: PlanChoice, layout: Any) -> None:
    """Its tasks, devices and dependencies."""
    parallel = replace(plans().problem.parallel, framework=ps.Framework(messages="interleaved"))
    problem = replace(plans().problem, layout=layout, parallel=parallel)
    plan = replace(plans(), problem=problem).plan(choice)
    settings = ps.read_megatron(plan.to_megatron(), n_layers=8, n_gpus=8)
    assert settings.schedule.orders == plan.schedule.orders
    assert settings.placement == plan.schedule.placement
    for column in ("op", "device", "stage", "microbatch", "replica", "stream"):
        assert (getattr(settings.graph, column) == getattr(plan.graph, column)).all()


def test_an_order_in_a_file(tmp_path: Path) -> None:
    """Torchtitan's settings name the file; it must be of the same pipeline."""
    choice = replace(CHOICE, schedule="zb_h1")
    plan = replace(plans()).plan(choice)
    toml = plan.to_torchtitan(tmp_path / "order.csv")
    settings = ps.read_torchtitan(toml, n_layers=8)
    assert settings.schedule.orders == plan.schedule.orders
    assert settings.schedule_csv == str(tmp_path / "order.csv")
    assert "order of" in repr(settings)
    assert len(settings.graph) > 0
    other = toml.replace("local_batch_size = 8", "local_batch_size = 4")
    other = other.replace("global_batch_size = 16", "global_batch_size = 8")
    with pytest.raises(ArgumentError, match=r"2 stages and 8 micro-batches; the settings have"):
        _ = ps.read_torchtitan(other, n_layers=8).schedule


# Megatron-LM.


def test_a_command_line() -> None:
    """As it stands in a script: torchrun, line breaks, an equals sign, flags of the model."""
    settings = ps.read_megatron(
        """torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py \\
            --tensor-model-parallel-size 2 --pipeline-model-parallel-size=4 --num-layers 32 \\
            --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --bf16 --lr -1e-4 \\
            --micro-batch-size 2 --global-batch-size 128 --recompute-activations \\
            --use-distributed-optimizer --no-overlap-p2p-communication \\
            --split 949,50,1"""
    )
    assert settings.choice == PlanChoice(
        tensor_parallel=2, pipeline_parallel=4, data_parallel=4, microbatch_size=2,
        n_microbatches=16, schedule="interleaved_1f1b", n_chunks=2, recompute="selective",
        shard_optimizer=True, sequence_parallel=True, layers_per_stage=(4,) * 8,
    )  # fmt: skip
    assert settings.ignored == ("--lr", "--split")
    assert settings.lower_options == {
        "n_replicas": 4, "layout": "stage_major", "shard_optimizer": True,
        "grad_sync": "last", "gather_parameters": "after_step", "shard_parameters": "none",
        "offload": "none", "framework": settings.framework,
    }  # fmt: skip
    assert settings.framework.messages == "blocking"
    assert repr(settings) == (
        "<TrainerSettings tp2 pp4 dp4, interleaved_1f1b x2, 16 micro-batches of 2, selective "
        "recompute, distributed optimizer, sequence parallel; 4(x8) layers by stage; 2 ignored>"
    )


@pytest.mark.parametrize(
    ("flags", "n_stages", "wanted"),
    [
        ("", 1, ("last", "after_step")),
        ("--overlap-grad-reduce", 1, ("bucketed", "after_step")),
        ("--overlap-grad-reduce", 4, (("bucketed", "last", "last", "last"), "after_step")),
        (
            "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer",
            2,
            (("bucketed", "last"), "before_forward"),
        ),
        (
            "--overlap-grad-reduce --overlap-param-gather --use-megatron-fsdp",
            1,
            ("every", "after_step"),
        ),
    ],
)
def test_exchanges_of_replicas(flags: str, n_stages: int, wanted: tuple[Any, str]) -> None:
    """Of all stages, the first alone has buckets. One replica exchanges nothing."""
    text = f"{LEAST} {flags} --pipeline-model-parallel-size {n_stages}"
    settings = ps.read_megatron(text, n_gpus=2 * n_stages)
    assert (settings.grad_sync, settings.gather_parameters) == wanted
    assert settings.graph.n_replicas == 2
    alone = ps.read_megatron(text, n_gpus=n_stages)
    assert (alone.grad_sync, alone.gather_parameters) == ("last", "after_step")


@pytest.mark.parametrize("other", ["--overlap-grad-reduce", "--use-distributed-optimizer"])
def test_gathers_need_other_flags(other: str) -> None:
    with pytest.raises(ArgumentError, match="--overlap-param-gather needs --overlap-grad-reduce"):
        ps.read_megatron(f"{LEAST} --overlap-param-gather {other}")


def test_flags_that_are_off_are_ignored() -> None:
    flag = "--outer-dp-sharding-strategy"
    assert ps.read_megatron(f"{LEAST} {flag} no_shard").ignored == (flag,)


def test_words_and_texts_are_equal() -> None:
    text = f"{LEAST} --pipeline-model-parallel-layout 'E(t|)*3 tL' --pipeline-model-parallel-size 4"
    assert ps.read_megatron(text) == ps.read_megatron(shlex.split(text))
    assert ps.read_megatron(text).choice.layers_per_stage == (1, 1, 1, 1)
    assert ps.read_megatron(f"{text} --pipeline-model-parallel-size 2").choice.n_chunks == 2


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--num-layers 8", (2, 2, 2, 2)),
        ("", ()),
        ("--num-virtual-stages-per-pipeline-rank 2 --num-layers 8", (1,) * 8),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 1 "
         "--decoder-last-pipeline-num-layers 3", (1, 2, 2, 3)),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 2", (2, 2, 2, 2)),
        ("--num-layers 14 --decoder-last-pipeline-num-layers 2 "
         "--num-virtual-stages-per-pipeline-rank 2", (2, 2, 2, 1) * 2),
        ("--num-layers 10 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", (2, 3, 3, 2)),
        ("--num-layers 30 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4",
         (3, 4, 4, 4, 4, 4, 4, 3)),
        ("--num-layers 7 --account-for-loss-in-pipeline-split", (2, 2, 2, 1)),
    ],
)  # fmt: skip
def test_layers_of_megatron(flags: str, sizes: tuple[int, ...]) -> None:
    """Shared as ``get_num_layers_to_build`` of Megatron-LM does."""
    settings = ps.read_megatron(f"{LEAST} --pipeline-model-parallel-size 4 {flags}")
    assert settings.choice.layers_per_stage == sizes
    assert settings.choice.n_chunks == max(1, len(sizes) // 4)


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ("", "none"),
        ("--recompute-granularity selective --recompute-modules core_attn", "selective"),
        ("--recompute-granularity full", "full"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "full"),
    ],
)
def test_recompute_of_megatron(flags: str, recompute: str) -> None:
    base = f"{LEAST} --num-layers 8 --pipeline-model-parallel-size 2"
    assert ps.read_megatron(f"{base} {flags}").choice.recompute == recompute


@pytest.mark.parametrize(
    ("flags", "sharing"),
    [
        ("", ("none", False)),
        ("--use-distributed-optimizer", ("none", True)),
        ("--use-megatron-fsdp", ("every", False)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", ("none", True)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", ("none", False)),
    ],
)
def test_sharding_of_megatron(flags: str, sharing: tuple[str, bool]) -> None:
    choice = ps.read_megatron(f"{LEAST} {flags}", n_gpus=2).choice
    assert (choice.shard_parameters, choice.shard_optimizer) == sharing
    if sharing[0] == "every":
        settings = ps.read_megatron(f"{LEAST} {flags} --num-layers 3", n_gpus=2)
        assert settings.choice.layers_per_stage == (0, 1, 1, 1, 0)
        assert (settings.schedule.name, settings.graph.grad_sync) == ("naive", "every")
    alone = ps.read_megatron(f"{LEAST} {flags}").choice
    assert (alone.shard_parameters, alone.shard_optimizer) == ("none", False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 8", "--micro-batch-size is missing"),
        ("--micro-batch-size", "--micro-batch-size takes one value, got"),
        ("--micro-batch-size 1 2", "--micro-batch-size takes one value"),
        ("--micro-batch-size ${MBS}", r"--micro-batch-size must be a whole number, got '\$\{MBS"),
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1, got 0"),
        ("--micro-batch-size '1", "the text is no command line: No closing quotation"),
        ("--micro-batch-size 3 --global-batch-size 8", "8 is no multiple of 3"),
        (f"{LEAST} --pipeline-model-parallel-size 3 --num-layers 8", "8 layers must be shared ev"),
        (f"{LEAST} --num-layers 8 --pipeline-model-parallel-layout EtL", "has 1 layers, but the"),
        (f"{LEAST} --pipeline-model-parallel-layout 'Et|t|tL' --pipeline-model-parallel-size 2",
         "3 is no multiple of 2"),
        (f"{LEAST} --pipeline-model-parallel-layout Et", "must end with L"),
        (f"{LEAST} --num-layers-per-virtual-pipeline-stage 2", "--num-layers is missing, which -"),
        (f"{LEAST} --num-virtual-stages-per-pipeline-rank 2", "need --pipeline-model-parallel-si"),
        (f"{LEAST} --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout EtL",
         "contradict each other; give one"),
        (f"{LEAST} --pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2",
         "must be a multiple of --pipeline-model-parallel-size, 3; --global-batch-size makes 8"),
        (f"{LEAST} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3", "must be from --pipeline-model-p"),
        (f"{LEAST} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-vp-stage 6", "no smaller last group may be left, got 6"),
        (f"{LEAST} --recompute-granularity some", "unknown flags: --recompute-granularity 'some'"),
        (f"{LEAST} --recompute-granularity selective --recompute-modules mhc",
         "unknown flags: --recompute-modules 'mhc'"),
        (f"{LEAST} --recompute-granularity full --recompute-num-layers 2", "recomputes some laye"),
        (f"{LEAST} --num-layers 8 --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 4", "recomputes some layers"),
        (f"{LEAST} --mtp-num-layers 1 --mtp-standalone", "--mtp-standalone needs the stage of"),
        (f"{LEAST} --pipeline-model-parallel-layout EtmL", "has 1 layers of .* the model has 0"),
        (f"{LEAST} --dynamic-context-parallel", "it makes context parallelism of a size for each"),
        (f"{LEAST} --delay-wgrad-compute", "needs --overlap-moe-expert-parallel-comm; add it"),
        (f"{LEAST} --overlap-moe-expert-parallel-comm", "only with experts on several GPUs, got e"),
        (f"{MERGED} --pipeline-model-parallel-size 2", "of pipelines only with several stages"),
        (f"{MERGED} --recompute-granularity full", "without full recompute, got recompute=.full"),
        (f"{MERGED} --moe-shared-expert-overlap", "contradict each other; give one"),
        (f"{LEAST} --yaml-cfg run.yaml", "it makes settings of a file, which take the place of"),
        (f"{LEAST} --rampup-batch-size 16 16 5859375", "it makes steps with other batches"),
        (f"{LEAST} --step-batch-size-schedule 0:768", "it makes steps with other batches"),
        (f"{LEAST} --use-mp-args-from-checkpoint-args", "it makes parallel sizes of a checkpoint"),
        (f"{LEAST} --heterogeneous-layers-config-path x.json", "it makes layers of several kinds"),
        (f"{LEAST} --outer-dp-sharding-strategy optim", "that some replicas share otherwise"),
        (f"{LEAST} --new-pipeline-order zigzag", "--new-pipeline-order is not understood"),
        (f"{LEAST} --num-distributed-optimizer-instances 2", "must be 1: all replicas share"),
        (f"{LEAST} --use-megatron-fsdp --data-parallel-sharding-strategy x", "unknown flags: --d"),
        (f"{LEAST} --fine-grained-activation-offloading", "must be all of .*, got none"),
        (f"{LEAST} --num-layers 8 --decoder-first-pipeline-num-layers 1 "
         "--account-for-loss-in-pipeline-split", "contradict"),
        (f"{LEAST} --num-layers 8 --pipeline-model-parallel-size 2 "
         "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
         "have 4 layers, but --num-layers is 8"),
        (["--micro-batch-size", 1], "a text or a list of words, got 1"),
    ],
)  # fmt: skip
def test_mistakes_of_megatron(flags: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        ps.read_megatron(flags)
    assert "flags" in str(caught.value) or "layout" in str(caught.value)


def test_numbers_of_megatron() -> None:
    with pytest.raises(ArgumentError, match="n_gpus=6 must be a multiple of the GPUs of a replica"):
        ps.read_megatron(f"{LEAST} --tensor-model-parallel-size 4", n_gpus=6)
    with pytest.raises(ArgumentError, match="--num-layers is 8, but n_layers=4"):
        ps.read_megatron(f"{LEAST} --num-layers 8", n_layers=4)
    unused = ps.read_megatron(f"{LEAST} --mtp-num-layers 0 --cpu-offloading-num-layers 0")
    assert unused.ignored == ("--cpu-offloading-num-layers",)
    etp = ps.read_megatron(
        f"{LEAST} --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --num-experts 8"
    )
    assert etp.choice.expert_tensor_parallel == 1


def test_flags() -> None:
    flags = Flags(["run.py", "x", "--a", "1", "--b", "--a=2", "--c", "-3", "y"])
    assert flags.values == {"--a": ["2"], "--b": [], "--c": ["-3", "y"]}
    assert flags.count("--a") == 2
    assert flags.switch("--b")
    assert flags.unread == ("--c",)


# torchtitan.


def titan(parallelism: str, **options: Any) -> TrainerSettings:
    return ps.read_torchtitan(f"[parallelism]\n{parallelism}", **options)


@pytest.mark.parametrize(
    ("settings", "n_layers", "sizes"),
    [
        ("", 8, (1, 2, 2, 1)),
        ("pipeline_parallel_layers_per_stage = 2", 6, (1, 2, 2, 1)),
        ("pipeline_parallel_first_stage_less_layers = 0", 7, (2, 2, 2, 1)),
        ('pipeline_parallel_schedule = "interleaved1f1b"', 14, (1,) + (2,) * 6 + (1,)),
        ('pipeline_parallel_schedule = "Interleaved1F1B"', 15, (2,) + (2,) * 6 + (1,)),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 1',
         10, (0,) + (1,) * 10 + (0,)),
    ],
)  # fmt: skip
def test_layers_of_torchtitan(settings: str, n_layers: int, sizes: tuple[int, ...]) -> None:
    """Shared as ``generate_llm_fqn_per_model_part`` of torchtitan does; ends have one less."""
    text = f"pipeline_parallel_degree = 4\n{settings}"
    if settings == "":
        n_layers = 6
    choice = titan(text, n_layers=n_layers).choice
    assert choice.layers_per_stage == sizes
    assert choice.n_chunks == len(sizes) // 4


def test_defaults_of_torchtitan(tmp_path: Path) -> None:
    """A file without any table, and replicas of FSDP."""
    (tmp_path / "x.toml").write_text("[model]\nname = 'llama3'\n")
    settings = ps.read_torchtitan(tmp_path / "x.toml", n_gpus=4)
    choice = settings.choice
    assert (choice.data_parallel, choice.microbatch_size, choice.n_microbatches) == (4, 8, 1)
    assert (choice.shard_parameters, choice.recompute, settings.global_batch) == (
        "every",
        "none",
        32,
    )
    kept = titan("pipeline_parallel_degree = 2", n_gpus=4).choice
    assert (kept.data_parallel, kept.shard_parameters) == (2, "step")
    assert (kept.microbatch_size, kept.n_microbatches, kept.layers_per_stage) == (1, 8, ())
    copies = titan("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1").choice
    assert (copies.data_parallel, copies.shard_parameters) == (2, "none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("x", "the text is no TOML"),
        ("pipeline_parallel_degree = '4'", "pipeline_parallel_degree must be a whole number"),
        ("pipeline_parallel_split_points = ['layers.2']", "split_points is not understood"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Zigzag'",
         "unknown toml: pipeline_parallel_schedule 'Zigzag'"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'PipelineScheduleMulti'",
         "takes its order from a file; give pipeline_parallel_schedule_csv"),
        ("pipeline_parallel_degree = 2\nexpert_parallel_degree = 2\n"
         "pipeline_parallel_schedule = 'DualPipeV'\n"
         "pipeline_parallel_expert_parallel_overlap = false", "overlap = false is not understood"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 2",
         "1F1B has 1 stages a device, but the layers of the settings make 3"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 6\n"
         "pipeline_parallel_schedule = 'Interleaved1F1B'", "has at least 2 stages a device"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 1\n"
         "pipeline_parallel_schedule = 'ZBVZeroBubble'", "has 2 stages a device, .* make 6"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 3",
         "4 is no multiple of 3|make a multiple of pipeline_parallel_degree|1F1B has 1 stages"),
        ("pipeline_parallel_degree = 16", "16 stages have 0 layers each, of n_layers=10"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3",
         "local_batch_size must be a multiple"),
        ("pipeline_parallel_degree = 2\n[training]\nglobal_batch_size = 16",
         "global_batch_size 16 needs 2 runs of the pipeline"),
        ("[training]\nglobal_batch_size = 3", "global_batch_size must be a multiple of local_bat"),
        ("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2", "must not both be"),
        ("fsdp_reshard_after_forward = 'often'", "unknown toml: fsdp_reshard_after_forward"),
        ("[activation_checkpoint]\nmode = 'selective'", "selective_ac_option '2' is not understo"),
        ("[activation_checkpoint]\nmode = 'memory_budget'", "is not understood"),
        ("module_fqns_per_model_part = [['layers.1'], ['layers.0']]\npipeline_parallel_degree = 2",
         "must have n_layers=10 layers in order"),
        ("module_fqns_per_model_part = [1]\npipeline_parallel_degree = 2", "must be lists of nam"),
    ],
)  # fmt: skip
def test_mistakes_of_torchtitan(settings: str, message: str) -> None:
    with pytest.raises(PipeError, match=message):
        titan(settings, n_layers=10)


def test_numbers_of_torchtitan() -> None:
    with pytest.raises(ArgumentError, match="n_gpus=3, but the degrees of the settings make 2"):
        titan("data_parallel_shard_degree = 2", n_gpus=3)
    with pytest.raises(ArgumentError, match="n_layers is missing, which pipeline_par"):
        titan("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 2")
    with pytest.raises(ArgumentError, match="training must be a table, got 3"):
        ps.read_torchtitan("training = 3")
    with pytest.raises(ArgumentError, match=r"cannot read settings from .*missing\.toml"):
        ps.read_torchtitan(Path("missing.toml"))
    every = titan("[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '1'").choice
    assert every.recompute == "full"


def test_costs_are_those_of_the_plan() -> None:
    """Flags of a plan give the costs that it was ranked by; experts have their own tensor size."""
    model, cluster = ps.Transformer.preset("llama3_8b"), ps.Cluster("dgx_h100", n_gpus=16)
    plans = ps.plan(
        model, cluster, global_batch=16, tensor_parallel=4, pipeline_parallel=2, schedules="1f1b",
        recompute="selective", sequence_parallel=True, progress=False,
        framework="megatron_core_2024",
    )  # fmt: skip
    best = plans.best
    assert "--tp-comm-overlap" in best.to_megatron()
    settings = ps.read_megatron(best.to_megatron(), n_gpus=16)
    network = cluster.network(best.choice.gpus_per_device)
    costs = model.costs(gpu=cluster.gpus[0], network=network, **settings.cost_options)
    assert costs.forward == best.costs.forward
    assert costs.activation_bytes == best.costs.activation_bytes
    flags = (
        "--num-layers 56 --num-experts 8 --expert-model-parallel-size 4 --sequence-parallel "
        "--moe-token-dispatcher-type alltoall "
        "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --micro-batch-size 1 "
        "--global-batch-size 8"
    )
    options = ps.read_megatron(flags, n_gpus=8).cost_options
    assert (options["expert_parallel"], options["expert_tensor_parallel"]) == (4, 1)


def test_attention_is_one_kernel_unless_a_flag_says_otherwise() -> None:
    """Transformer Engine chooses a fused kernel; torchtitan has torch's; plans write the others."""
    settings = ps.read_megatron
    assert titan("").cost_options["flash_attention"]
    for flags in ("", "--use-flash-attn", "--attention-backend fused"):
        assert settings(f"{LEAST} {flags}").cost_options["flash_attention"]
    for flags in ("--attention-backend unfused", "--transformer-impl local"):
        assert not settings(f"{LEAST} {flags}").cost_options["flash_attention"]
    with pytest.raises(ArgumentError, match="unknown flags: --attention-backend 'fussed'; did"):
        settings(f"{LEAST} --attention-backend fussed")
    model, cluster = ps.Transformer.preset("gpt2_xl"), ps.Cluster("dgx_a100", n_gpus=2)
    flags = [
        ps.plan(
            model, cluster, global_batch=4, pipeline_parallel=2, schedules="1f1b",
            flash_attention=fuses, progress=False,
        ).best.to_megatron()
        for fuses in (True, False)
    ]  # fmt: skip
    assert [settings(text).flash_attention for text in flags] == [True, False]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "mxfp8", "nvfp4"])
def test_plans_write_their_precision(precision: Any) -> None:
    """Megatron-LM reads it back; torchtitan says which converter to add, if it has one."""
    plans = ps.plan(
        MODEL, ps.Cluster("dgx_b200", n_gpus=2), global_batch=4, schedules="1f1b", progress=False,
        pipeline_parallel=2, microbatch_size=1, precision=precision, n_best=1,
    )  # fmt: skip
    settings = ps.read_megatron(plans.best.to_megatron(), n_layers=8)
    assert settings.precision == settings.cost_options["precision"] == precision
    if precision in ("fp16", "nvfp4"):
        with pytest.raises(ArgumentError, match=f"fp8 or mxfp8; got precision='{precision}'"):
            plans.best.to_torchtitan()
    else:
        assert ("converters" in plans.best.to_torchtitan()) == (precision != "bf16")


def written(choice: PlanChoice = CHOICE, precision: Any = "bf16", master_bytes: float = 4,
            **sizes: Any) -> str:  # fmt: skip
    """Return the flags of a model with these bytes."""
    parallel = ps.Parallel(microbatch_size=1, precision=precision,
                           framework=ps.Framework(master_bytes=master_bytes))  # fmt: skip
    return megatron_flags(
        choice, 16, "stage_major", FrameworkOptions(), replace(MODEL, **sizes), parallel
    )


FSDP = replace(
    CHOICE, tensor_parallel=1, pipeline_parallel=1, data_parallel=8, n_microbatches=2,
    sequence_parallel=False, shard_optimizer=False, shard_parameters="every", layers_per_stage=(8,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "precision", "nbytes", "flag"),
    [
        (CHOICE, "bf16", 2, "--grad-reduce-in-bf16"),
        (CHOICE, "fp8", 2, "--grad-reduce-in-bf16"),
        (CHOICE, "bf16", 4, ""),
        (CHOICE, "fp16", 2, ""),
        (CHOICE, "fp16", 4, "--accumulate-allreduce-grads-in-fp32"),
        (FSDP, "bf16", 2, ""),
        (FSDP, "bf16", 4, "--megatron-fsdp-main-grads-dtype fp32"),
    ],
)
def test_bytes_of_gradients(choice: PlanChoice, precision: str, nbytes: int, flag: str) -> None:
    """By default Megatron-LM sums in 32 bits with bfloat16, else in the format of parameters."""
    flags = written(choice, precision, bytes_per_gradient=nbytes)
    others = ("--grad-reduce-in-bf16", "--accumulate", "--megatron-fsdp-main")
    assert [name for name in others if name in flags] == [x for x in others if flag.startswith(x)]
    assert flag in flags
    settings = ps.read_megatron(flags, n_layers=8, n_gpus=8)
    assert (settings.bytes_per_gradient, settings.precision) == (nbytes, precision)


@pytest.mark.parametrize(
    ("precision", "master_bytes", "nbytes", "flag"),
    [
        ("bf16", 4, 12, ""),
        ("bf16", 2, 12, "--use-precision-aware-optimizer --"),
        ("bf16", 2, 8, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
        ("mxfp8", 4, 8, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
        ("nvfp4", 2, 6, "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"),
    ],
)
def test_bytes_of_optimizers(precision: str, master_bytes: int, nbytes: int, flag: str) -> None:
    """Moments of fewer bits are those of the precision-aware optimizer."""
    flags = written(CHOICE, precision, master_bytes, optimizer_bytes_per_parameter=nbytes)
    assert flag in flags
    assert ("precision-aware" in flags) == bool(flag)
    settings = ps.read_megatron(flags, n_layers=8, n_gpus=8)
    assert settings.optimizer_bytes_per_parameter == nbytes
    assert settings.framework.master_bytes == master_bytes


def test_bytes_that_no_flags_make() -> None:
    """A run would need another memory than the plan, so that they are refused."""
    alone = replace(CHOICE, shard_optimizer=False)
    for options, message in (
        ({"bytes_per_gradient": 3}, "in 2 or 4 bytes; the model has bytes_per_gradient=3"),
        ({"bytes_per_parameter": 4}, "the model has bytes_per_parameter=4; plan with"),
        ({"optimizer_bytes_per_parameter": 8}, "holds 12, 10, 6, 4 bytes a parameter.* has 8"),
        ({"optimizer_bytes_per_parameter": 6, "choice": FSDP}, "holds 12 bytes .* has 6"),
        ({"master_bytes": 2, "choice": alone}, "do not share it, .* plan with shard_optimizer=T"),
    ):
        with pytest.raises(ArgumentError, match=message):
            written(**options)
    one = replace(alone, data_parallel=1, n_microbatches=16)
    assert written(one, master_bytes=2).endswith("--use-distributed-optimizer"), "which it needs"
    for flags, message in (
        ("--exp-avg-dtype bf16", "need --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "must be fp32"),
        ("--expert-model-parallel-size 2", "needs --moe-token-dispatcher-type alltoall"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ps.read_megatron(f"{LEAST} {flags}", n_gpus=2)


def test_experts_of_a_plan_are_those_of_its_flags() -> None:
    """By default Megatron-LM gathers tokens and multiplies expert by expert."""
    framework = ps.Framework.preset("megatron_bridge_2025", tensor_overlap="none")
    parallel = ps.Parallel(microbatch_size=1, framework=framework, expert_exchange="hierarchical")
    model = ps.Transformer.preset("mixtral_8x7b", n_layers=8)
    choice = replace(CHOICE, expert_parallel=2)
    flags = megatron_flags(choice, 16, "stage_major", FrameworkOptions(), model, parallel)
    assert "--moe-token-dispatcher-type flex --moe-grouped-gemm" in flags
    again = ps.read_megatron(flags, n_layers=8, n_gpus=8)
    assert again.cost_options["expert_exchange"] == "hierarchical"
    alone = megatron_flags(CHOICE, 16, "stage_major", FrameworkOptions(), model, parallel)
    assert "--moe-token-dispatcher-type alltoall" in alone, "flex needs several GPUs"
    for name in ("expert_products", "fused_permute", "fused_router", "shared_expert_overlap"):
        assert getattr(again.framework, name) == getattr(framework, name)


@pytest.mark.parametrize(
    ("flags", "precision", "ignored"),
    [
        ("", "bf16", ()),
        ("--bf16 --fp8-format hybrid", "fp8", ()),  # with delayed scales
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", "mxfp8",
         ("--fp8-param-gather",)),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "fp8", ("--fp8-recipe",)),
        ("--fp8-recipe mxfp8", "bf16", ("--fp8-recipe",)),
        ("--fp4-format e2m1", "nvfp4", ()),
    ],
)  # fmt: skip
def test_precision_of_megatron(flags: str, precision: str, ignored: tuple[str, ...]) -> None:
    settings = ps.read_megatron(f"{LEAST} {flags}")
    assert (settings.precision, settings.ignored) == (precision, ignored)


@pytest.mark.parametrize(
    ("toml", "precision", "ignored"),
    [
        ("[model]\nconverters = []", "bf16", ()),
        ('[model]\nconverters = ["quantize.linear.float8"]', "fp8", ()),
        ('[model]\nconverters = "float8"\n[float8]\nrecipe_name = "rowwise"', "fp8",
         ("float8.recipe_name",)),
        ('[model]\nconverters = ["quantize.linear.mx", "quantize.grouped_mm.mx"]\n'
         '[quantize.linear.mx]\nrecipe_name = "mxfp8_cublas"', "mxfp8",
         ("model.converters: quantize.grouped_mm.mx",)),
    ],
)  # fmt: skip
def test_precision_of_torchtitan(toml: str, precision: str, ignored: tuple[str, ...]) -> None:
    settings = ps.read_torchtitan(toml)
    assert (settings.precision, settings.ignored) == (precision, ignored)


def test_mistakes_of_precisions() -> None:
    for flags, message in (
        ("--bf16 --fp16", "--bf16 and --fp16 contradict"),
        ("--fp8-format e4m3 --fp4-format e2m1", "--fp8-format and --fp4-format contradict"),
        ("--fp8-format e5m2", "unknown flags: --fp8-format 'e5m2'"),
        ("--fp8-format e4m3 --fp8-recipe custom", "unknown flags: --fp8-recipe 'custom'"),
    ):
        with pytest.raises(PipeError, match=message):
            ps.read_megatron(f"{LEAST} {flags}")
    float8 = '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\n'
    with pytest.raises(PipeError, match="recipe_name 'rowwise_with_gw_hp'"):
        ps.read_torchtitan(f'{float8}recipe_name = "rowwise_with_gw_hp"')
    with pytest.raises(ArgumentError, match="float8 and mx"):
        ps.read_torchtitan('[model]\nconverters = "float8,mx"')
    options = ps.read_megatron(f"{LEAST} --fp8-format hybrid").cost_options
    with pytest.raises(PipeError, match="has no products of this format"):
        MODEL.costs(gpu="a100_80gb", **{**options, "layers_per_stage": (8,)})


def test_recomputed_modules_of_megatron() -> None:
    """Plans write those of their framework, and Megatron-LM has not torchtitan's."""
    cluster = ps.Cluster("dgx_h100", n_gpus=2)
    settings = {"cluster": cluster, "global_batch": 4, "schedules": "1f1b", "progress": False,
                "pipeline_parallel": 2, "microbatch_size": 1, "recompute": "selective"}  # fmt: skip
    model = replace(MODEL, gated_mlp=True)
    for modules in (("core_attn",), ("layernorm", "mlp")):
        framework = ps.Framework.preset("megatron_core_2024", recompute_modules=modules)
        flags = ps.plan(model, framework=framework, **settings).best.to_megatron()
        assert ("--recompute-modules layernorm mlp" in flags) == (len(modules) > 1)
        assert ps.read_megatron(flags).framework.recompute_modules == modules
    best = ps.plan(model, framework="torchtitan_2024", **settings).best
    assert "Selective recompute keeps" not in best.to_torchtitan()
    with pytest.raises(ArgumentError, match="mla_up_proj, and not every other product"):
        best.to_megatron()


def test_frameworks_of_flags_and_settings() -> None:
    """Collectives behind products, sums and exchanges, and fused operations."""
    flags = "--num-layers 8 --micro-batch-size 1 --global-batch-size 8 "
    usual, other = (
        ps.read_megatron(flags + more).framework
        for more in ("", "--tp-comm-overlap --overlap-grad-reduce --grad-reduce-in-bf16")
    )
    moe = "--moe-grouped-gemm --moe-permute-fusion --moe-shared-expert-overlap"
    for more, products, fuses in (("", "sequential", False), (moe, "streams", True)):
        own = ps.read_megatron(f"{flags} --num-experts 8 {more}").framework
        assert own.expert_products == products
        assert (own.fused_permute, own.shared_expert_overlap) == (fuses, fuses)
    assert (usual.expert_products, usual.fused_permute) == ("streams", True)
    assert (usual.tensor_overlap, usual.grad_sync, usual.fused_sums) == ("none", "last", "wider")
    assert (other.tensor_overlap, other.grad_sync, other.fused_sums) == (
        "userbuffers", "bucketed", "all"
    )  # fmt: skip
    eager, compiled = (
        titan(f"enable_async_tensor_parallel = true\n{more}").framework
        for more in ("", "[compile]\nenable = true")
    )
    assert eager.tensor_overlap == compiled.tensor_overlap == "async"
    assert (eager.fused_norm, compiled.fused_norm) == (False, True)

"""Plans of encoders before a language model: costs of the chain, its steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.costs.rows import given_rows
from pipesim.errors import ArgumentError
from pipesim.planning.explanation import step_parts

LLM = ps.Transformer(
    hidden_size=1024, n_layers=12, n_heads=16, sequence_length=512, vocabulary_size=8192,
    tied_embeddings=False,
)  # fmt: skip
VIT = replace(
    LLM, hidden_size=512, n_layers=4, n_heads=8, ffn_size=2048, n_kv_heads=8, vocabulary_size=1,
    bidirectional=True,
)  # fmt: skip
AUDIO = replace(VIT, n_layers=2, sequence_length=256)
CLUSTER = ps.Cluster("dgx_h100", n_gpus=8)
ENCODER = ps.Encoder(VIT, sequences=4)
QUICK: dict[str, Any] = {"global_batch": 16, "schedules": "1f1b", "recompute": "none"}


@cache
def plans(**settings: Any) -> ps.planning.Plans:
    """Return plans of an encoder and a model on 8 GPUs."""
    chosen = {"microbatch_size": 1, "sequence_parallel": False, **QUICK, **settings}
    return ps.plan([ENCODER, LLM], CLUSTER, progress=False, **chosen)


def costs(sizes: list[int], **settings: Any) -> ps.Costs:
    """Return the costs of a configuration of 4 GPUs a device, with these layers of each stage."""
    n = len(sizes)
    sharing = {"tensor_parallel": 4, "pipeline_parallel": n, "layers_per_stage": sizes}
    subject = plans()
    return subject.plan(subject.choice(**sharing, **settings)).costs


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_stages_of_one_module_have_the_costs_of_the_module(tensor_parallel: int) -> None:
    """Four images: one a GPU, two by each half of a device, or four by all GPUs of a device."""
    network = CLUSTER.network(4)
    run: dict[str, Any] = {"gpu": CLUSTER.gpu, "flash_attention": True}
    own = {"microbatch_size": tensor_parallel, "tensor_parallel": tensor_parallel}
    alone = CLUSTER.network(tensor_parallel)
    parts = {
        "vision": (VIT.costs(1, **run, **own, network=alone), 1),
        "language": (
            LLM.costs([12], **run, microbatch_size=1, tensor_parallel=4, network=network),
            1,
        ),
    }
    joined = ps.Costs.concatenate(parts, network=network)
    chain = costs([4, 12], encoder_tensor_parallel=(tensor_parallel,))
    copied = ("optimizer_step", "optimizer_bytes")  # groups of a device share the optimizer
    for name in given_rows(joined):
        expected = np.array(getattr(joined, name))
        expected[0] /= (4 // tensor_parallel) if name in copied else 1
        assert getattr(chain, name) == pytest.approx(tuple(expected)), name
    if tensor_parallel < 4:
        assert chain.reduced_share == pytest.approx((tensor_parallel / 4, 1))


def test_a_stage_of_two_modules_has_the_sums() -> None:
    """Seconds and bytes; the output is that of the language model."""
    ends = {"encoder_tensor_parallel": (2,)}
    apart, together = costs([4, 12], **ends), costs([9, 7], **ends)
    for name in ("forward", "backward", "activation_bytes", "parameter_bytes", "gradient_bytes"):
        assert sum(getattr(together, name)) == pytest.approx(sum(getattr(apart, name)), rel=1e-3)
    one = costs([16], **ends)
    assert one.forward[0] == pytest.approx(sum(apart.forward))  # type: ignore[index,arg-type]
    for name in ("forward_workspace_bytes", "backward_workspace_bytes"):
        (first, last), kept = getattr(apart, name), apart.activation_bytes[1]  # type: ignore[index]
        assert getattr(one, name)[0] == pytest.approx(max(last, first - kept))
    assert together.output_bytes == (apart.output_bytes[1],) * 2  # type: ignore[index]
    dense = np.array(together.parameter_bytes) * np.array(together.reduced_share)
    assert dense.sum() == pytest.approx(np.dot(apart.parameter_bytes, apart.reduced_share))


def test_encoders_one_after_another_pass_outputs_on() -> None:
    """The stage of the second encoder sends the output of the first one, too."""
    modules = [ps.Encoder(VIT), ps.Encoder(AUDIO), LLM]
    subject = ps.plan(modules, CLUSTER, **QUICK, tensor_parallel=1, progress=False)
    choice = subject.choice(pipeline_parallel=4, layers_per_stage=[4, 2, 6, 6])
    vision, audio, text = (2.0 * x.sequence_length * x.hidden_size for x in (VIT, AUDIO, LLM))
    assert subject.plan(choice).costs.output_bytes == (vision, vision + audio, text, text)
    assert subject.best.choice.encoder_tensor_parallel == (1, 1)
    assert "encoder tp1+1," in str(subject.best.choice)


def test_stages_of_the_language_model_sum_the_tied_embedding() -> None:
    """STEP of its first and of the last stage takes as much longer as the sum; of encoders not."""
    modules = [ENCODER, replace(LLM, tied_embeddings=True)]
    settings = {**QUICK, "tensor_parallel": 1, "pipeline_parallel": 4, "microbatch_size": 1}
    subject = ps.plan(modules, CLUSTER, progress=False, **settings)
    cases = {(1, 1, 1, 13): (), (6, 5, 4, 1): (0, 3), (2, 2, 6, 6): (2, 3)}
    for sizes, tied in cases.items():
        plan = subject.plan(subject.choice(pipeline_parallel=4, layers_per_stage=sizes))
        graph, costs = plan.timeline.graph, plan.costs
        steps = graph.is_op((ps.Op.STEP,))
        own, untied = (x.of(graph).duration[steps] for x in (costs, replace(costs, tied_bytes=0)))
        assert {*graph.stage[steps][own > untied].tolist()} == {*tied}
        assert costs.tied_stages == ((tied,) if tied else ())
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 4, 1)), plan.costs)
    changes = timeline.memory.changes_that_fit(quick=True)  # takes the costs as they are
    assert not any("microbatch_size" in x for x in changes["change"])


def test_steps_are_those_of_a_simulation_and_bounds_hold() -> None:
    """All configurations: nothing is left out, and the best has the shortest step."""
    subject = plans()
    sizes = {row.choice.encoder_tensor_parallel for row in subject.evaluations}
    assert sizes == {(1,), (2,), (4,), (8,)}
    for row in subject.evaluations[::4]:
        timeline = subject.plan(row.choice).timeline
        assert timeline.makespan >= max(row.bound, subject.best.step) * (1 - 1e-9)
        if row.status == "simulated":
            assert timeline.makespan == row.step
            assert timeline.memory.peak.max() == pytest.approx(row.memory)
    flops = LLM.step_flops(16) + VIT.step_flops(64)
    assert subject.table["mfu"][0] == pytest.approx(subject.best.timeline.mfu())
    assert subject.best.costs.work is not None
    assert subject.best.costs.work.flops == pytest.approx(flops / 16)


def test_an_encoder_shares_all_devices_with_the_model() -> None:
    """Each device has layers of both; nested encoders hold fewer activations at any batch."""
    settings = {"tensor_parallel": 1, "pipeline_parallel": 4, "shard_optimizer": True}
    names = ("encoder_first", "encoder_nested")
    subject = plans(**settings, schedules=names, global_batch=64, split="balanced")
    first, nested = (
        next(row for row in subject.evaluations if row.choice.schedule == x) for x in names
    )
    for row in (first, nested):
        assert sum(row.choice.layers_per_stage[:4]) == VIT.n_layers
        assert row.bound <= row.step == subject.plan(row.choice).timeline.makespan
    costs = subject.plan(nested.choice).costs
    saved = (32 - 10) * costs.activation_bytes[0]  # type: ignore[index]  # of 4 stages: 3 * 4 - 2
    assert first.memory - nested.memory == pytest.approx(saved)
    even = plans(**settings, schedules=names[1], split="even").best
    assert even.choice.layers_per_stage == (1, 1, 1, 1, 3, 3, 3, 3)
    tried = plans(**settings, schedules=None, split="balanced").evaluations
    assert {*names} < {row.choice.schedule for row in tried}


def test_an_explanation_knows_collectives_and_recompute_of_encoders() -> None:
    """Parts of the step sum to it; encoders whose layers are shared have collectives."""
    subject = plans(recompute="full", tensor_parallel=2, pipeline_parallel=2)
    seconds, choices = {}, []
    for size in (1, 2):
        choice = subject.choice(
            tensor_parallel=2, pipeline_parallel=2, recompute="full",
            encoder_tensor_parallel=(size,), layers_per_stage=[4, 12],
        )  # fmt: skip
        plan = subject.plan(choice)
        seconds[size] = step_parts(plan.timeline, subject.problem.rebuilt(choice))
        assert sum(seconds[size].values()) == pytest.approx(plan.step)
        choices.append(choice)
        assert seconds[size]["recompute"] > 0
    assert seconds[1]["tensor_parallel"] < seconds[2]["tensor_parallel"]
    assert "2 a layer of an encoder" in " ".join(str(subject.explain(*choices)).split())


def test_an_encoder_may_recompute_more_than_the_model() -> None:
    """Its stage has the costs of that recompute, and an explanation its seconds."""
    encoder = replace(ENCODER, recompute="full")
    settings = {**QUICK, "tensor_parallel": 4, "pipeline_parallel": 2, "microbatch_size": 1}
    subject = ps.plan([encoder, LLM], CLUSTER, progress=False, **settings)
    sizes = {"pipeline_parallel": 2, "tensor_parallel": 4, "layers_per_stage": [4, 12]}
    plan = subject.plan(subject.choice(**sizes))
    all_modules, no_module = (costs([4, 12], recompute=x) for x in ("full", "none"))
    for name in ("backward", "activation_bytes"):
        (own, _), (_, main) = (getattr(x, name) for x in (all_modules, no_module))
        assert getattr(plan.costs, name) == (own, main)
    seconds = step_parts(plan.timeline, subject.problem.rebuilt(plan.choice))
    added = all_modules.backward[0] - no_module.backward[0]  # type: ignore[index,operator]
    assert seconds["recompute"] == pytest.approx(16 * added / 2)
    assert "and recompute" not in subject.notes[0]


def test_an_encoder_sees_all_of_its_sequence() -> None:
    """Its fused core computes twice the scores of a causal one; slices are refused."""
    run: dict[str, Any] = {"gpu": "h100_sxm", "microbatch_size": 1, "flash_attention": True}
    causal = replace(VIT, bidirectional=False)
    flops = [
        x.kernels(CLUSTER.gpu, microbatch_size=1, flash_attention=True)
        .groupby("kernel")["flops"].sum()["attention"]
        for x in (VIT, causal)
    ]  # fmt: skip
    assert flops[0] == 2 * flops[1]
    assert VIT.step_flops() == causal.step_flops()
    with pytest.raises(ArgumentError, match="leave slices out"):
        VIT.costs(1, slices=2, **run)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ([VIT, LLM], {}, r"pipesim\.Encoder\(model"),
        ([ENCODER], {}, "model must be"),
        ([], {}, "model must be"),
        ([ENCODER, LLM], {"n_slices": 2, "schedules": "seq1f1b"}, "which slices cut"),
        (
            [ps.Encoder(VIT, tensor_parallel=3), LLM],
            {"tensor_parallel": 2},
            "the 2 GPUs of a device",
        ),
        (LLM, {"schedules": "encoder_nested"}, r"give model=\[pipesim.Encoder"),
        (
            [ENCODER, LLM],
            {"schedules": "encoder_first", "pipeline_parallel": 8},
            "encoders have 4, and the language model has 12",
        ),
        ([ENCODER, ps.Layers({"forward": [1], "backward": [1]})], {}, "planned before"),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    """Each message says what to give."""
    with pytest.raises(ArgumentError, match=message):
        ps.plan(model, CLUSTER, **{**QUICK, "progress": False, **options})


def test_choices_and_exports_of_encoders_are_checked() -> None:
    """A configuration has one number an encoder; settings of trainers have no encoders."""
    subject = plans()
    with pytest.raises(ArgumentError, match="2 numbers for 1 encoders"):
        subject.choice(encoder_tensor_parallel=(1, 2))
    for export in (subject.to_megatron, subject.to_torchtitan):
        with pytest.raises(ArgumentError, match="take the numbers"):
            export()

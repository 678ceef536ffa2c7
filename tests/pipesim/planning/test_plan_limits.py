"""What a plan refuses or does not apply: layers, flags, schedules, batches; and Ctrl-C early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.planning import plan_search
from pipesim.planning.choice import PlanChoice
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import SearchSpace
from pipesim.scheduling import registry
from pipesim.simulation import LogNormal, Scenarios

MODEL = ps.Transformer(
    hidden_size=1024, n_layers=4, n_heads=16, sequence_length=511, vocabulary_size=8192
)
LAYERS = ps.Layers({"forward": [1e-3] * 8, "backward": [2e-3] * 8, "output_bytes": [1e6] * 8})
NODE = ps.Cluster("dgx_h100", n_gpus=8)
QUICK: dict[str, Any] = {
    "global_batch": 16, "schedules": "1f1b", "recompute": "none", "microbatch_size": 1,
    "progress": False, "split": "even",
}  # fmt: skip


def plan(model: Any = MODEL, **options: Any) -> Any:
    """Return a small plan."""
    return ps.plan(model, NODE, **{**QUICK, **options})


def listing(**values: Any) -> tuple[list[PlanChoice], list[str]]:
    """Return the configurations of a space and the reasons of those that are invalid."""
    choices, ruled_out = SearchSpace.checked(**values).choices(PlanProblem(MODEL, NODE, 16))
    return choices, [row.reason for row in ruled_out]


def test_measured_layers_have_one_size_and_no_recompute() -> None:
    """Their seconds and bytes are those of one micro-batch without recompute."""
    with pytest.raises(ArgumentError, match=r"microbatch_size must be one value, got \(1, 2\)"):
        plan(LAYERS, microbatch_size=[1, 2])
    plans = plan(LAYERS, microbatch_size=2, recompute=["none", "full"])
    assert {x.choice.recompute for x in plans} == {"none"}
    reasons = [x for x in plans.ruled_out["reason"] if "recompute='full'" in x]
    assert len(reasons) == 1
    assert plans.choice().microbatch_size == 2
    with pytest.raises(ArgumentError, match="microbatch_size=4: layers were measured with 2"):
        plans.choice(microbatch_size=4, pipeline_parallel=8)
    other = replace(plans.best.choice, microbatch_size=1,
                    n_microbatches=2 * plans.best.choice.n_microbatches)  # fmt: skip
    with pytest.raises(ArgumentError, match="microbatch_size=1: layers were measured with 2"):
        plans.plan(other)


def test_measured_layers_without_halves_of_backward() -> None:
    """Schedules with I and W are ruled out, with the columns that they need; others are planned."""
    plans = plan(LAYERS, schedules=["1f1b", "zb_h1", "zbv"], pipeline_parallel=2)
    assert {x.choice.schedule for x in plans} == {"1f1b"}
    reason = "has I and W: measured layers lack their columns 'input_grad' and 'weight_grad'"
    assert set(plans.ruled_out["reason"]) == {f"{name} {reason}" for name in ("zb_h1", "zbv")}
    with pytest.raises(ArgumentError, match=f"no such configuration: zb_h1 {reason}"):
        plans.choice(schedule="zb_h1", pipeline_parallel=2)
    halves = {"input_grad": [1e-3] * 8, "weight_grad": [1e-3] * 8}
    both = ps.Layers({**LAYERS.columns, **halves})
    assert len(plan(both, schedules="zb_h1", pipeline_parallel=2))


def test_flags_that_do_not_divide_are_ruled_out() -> None:
    """511 tokens cannot be split among 4 GPUs; one GPU has nothing to split."""
    choices, reasons = listing(schedules="1f1b", tensor_parallel=4, sequence_parallel=True)
    assert not choices
    assert reasons == ["sequence_parallel=True: tensor_parallel=4 does not divide "
                       "sequence_length=511"]  # fmt: skip
    choices, _ = listing(schedules="1f1b", tensor_parallel=4, sequence_parallel=[False, True])
    assert {x.sequence_parallel for x in choices} == {False}
    choices, reasons = listing(schedules="1f1b", tensor_parallel=1, pipeline_parallel=8,
                               sequence_parallel=True, shard_optimizer=True)  # fmt: skip
    assert not reasons or not any("parallel=True" in x for x in reasons)
    assert {(x.sequence_parallel, x.shard_optimizer) for x in choices} <= {(False, False)}
    with pytest.raises(ArgumentError, match="does not divide sequence_length=511"):
        plan().choice(tensor_parallel=4, sequence_parallel=True)


@pytest.mark.parametrize("name", ["chimera", "dualpipe", "pipedream"])
def test_schedules_of_several_paths_are_refused_at_once(name: str) -> None:
    """The reason is theirs, and not a depth that nobody named."""
    with pytest.raises(ArgumentError, match=f"schedules has '{name}'.*several paths"):
        plan(schedules=["1f1b", name])


def test_texts_name_the_settings_that_are_ruled_out() -> None:
    """Settings of many configurations have no number of micro-batches, for example."""
    space = SearchSpace.checked(schedules="1f1b", tensor_parallel=4, sequence_parallel=True)
    _, ruled_out = space.choices(PlanProblem(MODEL, NODE, 16))
    assert [str(x.choice) for x in ruled_out] == ["tensor_parallel=4, sequence_parallel=True"]


def test_depths_that_a_schedule_cannot_have_are_ruled_out() -> None:
    """The other depths and schedules are planned."""
    build = registry.schedule_info("1f1b").build
    counts = registry.Counts("an even number of devices", lambda p, m: p % 2 == 0)
    ps.register("even_1f1b", counts=counts)(build)
    try:
        choices, reasons = listing(schedules="even_1f1b", tensor_parallel=2)
        assert {x.pipeline_parallel for x in choices} == {2, 4}
        assert len(reasons) == 1
        assert "an even number of devices; got n_devices=1" in reasons[0]
    finally:
        del registry._REGISTRY["even_1f1b"]


def test_a_schedule_that_is_registered_again_has_new_bounds() -> None:
    """Neither bound nor placement are those of its earlier definition."""

    def define(name: str) -> None:
        @ps.register("redefined")
        def redefined(n_devices: int, n_microbatches: int) -> ps.Schedule:
            return ps.schedule(name, n_devices, n_microbatches).with_name("redefined")

    try:
        for name, n_chunks in (("1f1b", 1), ("zb_h1", 1), ("zbv", 2)):
            define(name)
            options: dict[str, Any] = {"split": "balanced", "pipeline_parallel": 2}
            new, same = (plan(schedules=x, **options).ranked[0] for x in ("redefined", name))
            assert new.choice.n_chunks == n_chunks
            assert (new.bound, new.step) == (same.bound, same.step)
            assert new.bound <= new.step
    finally:
        del registry._REGISTRY["redefined"]


def test_a_fact_of_a_schedule_is_told_once() -> None:
    """Chunks do not depend on tensor parallelism or micro-batches."""
    _, reasons = listing(
        schedules=["v_half", "zbv"], n_chunks=3, pipeline_parallel=[1, 2], tensor_parallel=[1, 2]
    )
    assert len(reasons) == 4
    assert len(set(reasons)) == 2


def test_configurations_of_another_cluster_are_refused() -> None:
    plans = plan()
    with pytest.raises(ArgumentError, match=r"has 4 GPUs \(2 x 2 x 1\); the plan's cluster has 8"):
        plans.explain(0, PlanChoice(2, 2, 1, 1, 16, "1f1b", 1, "none", False, False, (2, 2)))
    model = replace(MODEL, n_heads=4, n_kv_heads=4)
    other = replace(plans, problem=replace(plans.problem, model=model))
    with pytest.raises(ArgumentError, match="tensor_parallel=8 does not divide n_heads=4"):
        other.plan(PlanChoice(8, 1, 1, 1, 16, "1f1b", 1, "none", True, False, (4,)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_microbatches": "16"}, "n_microbatches must be a whole number, got '16'"),
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'"),
        ({"shard_optimizer": "yes"}, "shard_optimizer must be True or False"),
        ({"layers_per_stage": (2, 1)}, r"layers_per_stage=\[2, 1\] sums to 3 layers"),
        ({"ordered_for_costs": True}, "1f1b takes no costs"),
    ],
)
def test_configurations_with_wrong_settings_are_refused(settings: Any, text: str) -> None:
    """`dataclasses.replace` makes any; what takes one checks it as `choice` does."""
    plans = plan(pipeline_parallel=2)
    wrong: PlanChoice = replace(plans[0].choice, **settings)
    with pytest.raises(ArgumentError, match=text):
        plans.plan(wrong)


def test_batches_of_too_many_tasks_are_ruled_out() -> None:
    """A batch of any size answers soon, with the number of tasks."""
    with pytest.raises(ArgumentError, match=r"micro-batches on \d+ stages are \d+ tasks"):
        plan(global_batch=10**8)
    problem = PlanProblem(MODEL, NODE, 2**21)
    space = SearchSpace.checked(schedules="1f1b", microbatch_size=[1, 16], tensor_parallel=8)
    choices, ruled_out = space.choices(problem)
    assert {x.microbatch_size for x in choices} == {16}
    assert ruled_out[0].reason.startswith("2097152 micro-batches on 1 stages are 4194304 tasks")


def test_ctrl_c_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the plan while bounds are computed, too; nothing is ranked then."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "bounds", interrupted)
    plans = plan()
    assert not plans.complete
    assert len(plans) == 0
    with pytest.raises(ArgumentError, match="no configuration is ranked"):
        plans.plan(0)


@pytest.mark.parametrize("n_done", [0, 2])
def test_ctrl_c_between_noisy_steps(monkeypatch: pytest.MonkeyPatch, n_done: int) -> None:
    """Noisy steps that are done rank first; the others follow by steps without noise."""
    noise, calls = ps.Noise(task=LogNormal(0.3), seed=1), []

    def interrupted(*arguments: Any, **options: Any) -> Scenarios:
        calls.append(arguments)
        if len(calls) > n_done:
            raise KeyboardInterrupt
        return ps.simulate_many(*arguments, **options)

    exact = plan(pipeline_parallel=2)
    monkeypatch.setattr(plan_search, "simulate_many", interrupted)
    plans = plan(pipeline_parallel=2, noise=noise)
    assert not plans.complete
    assert "interrupted" in plans.summary()
    assert plans.percentile == (90 if n_done else None)
    assert {x.choice for x in plans.ranked[:n_done]} == {x.choice for x in exact.ranked[:n_done]}
    noisy = [x.noisy_step for x in plans.ranked[:n_done]]
    assert noisy == sorted(noisy)
    assert repr(plans.ranked[n_done:]) == repr(exact.ranked[n_done:])


def test_progress_names_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds, steps, refinement and noise have a bar each."""
    plan(progress=True, split="refined", noise=ps.Noise(seed=0), n_best=1)
    shown = capsys.readouterr().err
    assert all(f"{stage}:" in shown for stage in ("bounds", "steps", "refinement", "noise"))

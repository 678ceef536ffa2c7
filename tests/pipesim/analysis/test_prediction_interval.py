"""Where a step is expected: by published steps, or between two frameworks."""

import math
from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.analysis import prediction_interval
from pipesim.errors import ArgumentError, TimelineError
from pipesim.simulation import Normal

GRAPH = ps.lower(ps.schedule("1f1b", 2, 4), step="none")
MODEL = ps.Transformer.preset("llama3_8b", n_layers=4)


def step(gpu: str | ps.GPU = "a100_80gb", framework: Any = "llm_foundry_2023") -> ps.Timeline:
    costs = MODEL.costs(
        [2, 2], gpu=gpu, microbatch_size=1, flash_attention=True, framework=framework,
        network=ps.Network(bandwidth=1e11),
    )  # fmt: skip
    return ps.simulate(GRAPH, costs)


@pytest.fixture
def hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published steps from 1.01 to 2 times as long as predicted."""
    quotients = [1 + k / 100 for k in range(1, 101)]
    dense = {
        "llm_foundry_2023": {"a100": quotients, "h100": quotients[:5]},
        "": {"h100": quotients},
    }
    experts = {
        "llm_foundry_2023": {"h100": quotients[:10]},
        "nemo_2025": {"h100": quotients[10:13], "b200": quotients[-7:]},
        "": {"h100": quotients[:15]},
    }
    published = {"dense": dense, "experts": experts}
    monkeypatch.setattr(prediction_interval, "_published", lambda: published)


@pytest.mark.usefixtures("hundred_steps")
def test_ends_are_quantiles_of_published_steps() -> None:
    timeline = step()
    interval = timeline.interval(0.8)
    assert interval.low == pytest.approx(1.109 * timeline.makespan)
    assert interval.high == pytest.approx(1.901 * timeline.makespan)
    assert interval.share == 0.8
    assert str(interval).endswith("(80% of 100 published steps of llm_foundry_2023 on a100)")
    whole = timeline.interval(1.0)
    assert whole[:2] == pytest.approx((1.01 * timeline.makespan, 2 * timeline.makespan))


@pytest.mark.usefixtures("hundred_steps")
def test_steps_of_other_frameworks_and_of_the_best_case() -> None:
    """They stand for a framework with few steps of its own on a GPU."""
    other, best = step(framework="megatron_core_2024"), step("h100_sxm", None)
    assert other.interval(1).high == pytest.approx(2 * other.makespan)
    assert other.interval().basis.endswith("published steps of all frameworks on a100")
    assert best.interval().basis.endswith("published steps without their framework on h100")
    named = step("h100_sxm", ps.Framework(name="mine", source="by hand"))
    assert named.interval() == best.interval()  # a name changes no step


@pytest.mark.usefixtures("hundred_steps")
def test_models_with_experts_have_steps_with_experts() -> None:
    """Of all frameworks and GPUs, which are named, if those of the GPU are few; plans say so."""
    model = ps.Transformer.preset("mixtral_8x7b", n_layers=2)
    options = {"gpu": "h100_sxm", "microbatch_size": 1, "network": ps.Network(bandwidth=1e11)}
    model = replace(model, n_experts=2, sequence_length=512)
    for framework, count, where in (
        ("llm_foundry_2023", 20, "of llm_foundry_2023, nemo_2025 on h100, b200"),
        (None, 15, "without their framework on h100"),
    ):
        costs = model.costs([1, 1], framework=framework, **options)
        interval = ps.simulate(GRAPH, costs).interval()
        assert interval.basis == f"80% of {count} published steps with experts {where}"
    plans = ps.plan(
        model, ps.Cluster("dgx_h100", n_gpus=8), framework="llm_foundry_2023", progress=False,
        expert_parallel=1, recompute="none", n_best=1, **SMALL,
    )  # fmt: skip
    assert plans.notes[0].startswith("80 % of 20 published steps with experts of llm_foundry")


@pytest.mark.usefixtures("hundred_steps")
@pytest.mark.parametrize(
    ("gpu", "framework"),
    [
        ("h100_sxm", "llm_foundry_2023"),
        ("a100_80gb", ps.Framework(fused_norm=False)),
        (ps.GPU.preset("a100_80gb").scaled(0.9), "llm_foundry_2023"),
        (replace(ps.GPU.preset("a100_80gb"), bandwidth=1e12), "llm_foundry_2023"),
    ],
    ids=["too few steps", "one of no name", "other rates", "another bandwidth"],
)
def test_without_published_steps_it_is_a_band(gpu: Any, framework: Any) -> None:
    """From a framework that fuses all to one that fuses nothing, and the prediction is inside."""
    timeline = step(gpu, framework)
    interval = timeline.interval()
    assert interval.low <= timeline.makespan <= interval.high
    assert interval.high > 1.1 * interval.low
    assert math.isnan(interval.share)
    assert interval.basis.startswith("from all fused and hidden to nothing, as there are")


def test_the_band_holds_all_presets() -> None:
    """None is faster than its low end or slower than its high one: all have the same."""
    presets = [step("b200", name).interval() for name in ps.frameworks().index]
    assert len({(round(band.low, 12), round(band.high, 12)) for band in presets}) == 1


def test_measured_costs_have_errors_of_their_own() -> None:
    with pytest.raises(TimelineError, match=r"not those of a GPU's data sheet.*validate"):
        ps.simulate(GRAPH, ps.Costs(1, 2)).interval()
    with pytest.raises(TimelineError, match="'measured' has no costs"):
        replace(step(), costs=None, name="measured").interval()
    with pytest.raises(ArgumentError, match="share"):
        step().interval(1.5)


@pytest.mark.usefixtures("hundred_steps")
def test_steps_in_fp8_have_a_band() -> None:
    """Published quotients are of steps in 16 bits."""
    costs = MODEL.costs([2, 2], gpu="h100_sxm", microbatch_size=1, precision="fp8",
                        network=ps.Network(bandwidth=1e11))  # fmt: skip
    assert "too few published steps in fp8" in ps.simulate(GRAPH, costs).interval().basis


@pytest.mark.usefixtures("hundred_steps")
def test_tables_have_the_ends() -> None:
    """A row without a data sheet lacks them."""
    timelines = {"sheet": step(), "given": ps.simulate(GRAPH, ps.Costs(1, 2, activation_bytes=1))}
    table = ps.compare(timelines)
    low, high = timelines["sheet"].interval()[:2]
    assert table.loc["sheet", ["low", "high"]].tolist() == [low, high]
    assert table.loc["given", ["low", "high"]].isna().all()
    assert "low" not in ps.compare({"given": timelines["given"]})
    whiskers = [x.get_xdata() for x in ps.plot.bars(table).lines]
    assert whiskers[0].tolist() == [low, high]


SMALL = {"global_batch": 8, "schedules": ["1f1b", "interleaved_1f1b"], "microbatch_size": 1}


@pytest.mark.usefixtures("hundred_steps")
def test_a_plan_has_the_ends() -> None:
    """Their quotients to the steps are the same for all configurations."""
    cluster = ps.Cluster("dgx_a100", n_gpus=8)
    plans = ps.plan(MODEL, cluster, framework="llm_foundry_2023", progress=False, **SMALL)
    steps = plans.table["step"].to_numpy()
    assert plans.table["low"].to_numpy() == pytest.approx(1.109 * steps)
    assert plans.table["high"].to_numpy() == pytest.approx(1.901 * steps)
    low, high = plans.best.timeline.interval()[:2]
    assert (low, high) == pytest.approx(tuple(plans.table.loc[0, ["low", "high"]]))
    (line,) = [x for x in plans.plot().lines if x.get_gid() == "plan:interval"]
    assert line.get_xdata()[1] / line.get_xdata()[0] == pytest.approx(1.901 / 1.109)


@pytest.mark.usefixtures("hundred_steps")
@pytest.mark.slow
def test_a_noisy_plan_has_the_ends_of_noisy_steps() -> None:
    """And their tokens a second and MFU; devices differ."""
    options: dict[str, Any] = {**SMALL, "pipeline_parallel": 2, "n_best": 1, "progress": False}
    options |= {"framework": "megatron_core_2024", "schedules": "1f1b", "recompute": "none"}
    cluster = ps.Cluster("dgx_a100", n_gpus=2)
    plain, noisy = (
        ps.plan(MODEL, cluster, noise=noise, **options).table.loc[0]
        for noise in (None, ps.Noise(seed=0, device=Normal(0.3)))
    )
    slowdown = noisy["noisy_step"] / plain["step"]
    assert slowdown > 1.2
    assert noisy["step"] == plain["step"]
    for name in ("low", "high"):
        assert noisy[name] == pytest.approx(slowdown * plain[name])
    for name in ("tokens_per_second", "mfu"):
        assert noisy[name] == pytest.approx(plain[name] / slowdown)


def test_a_plan_ranks_by_bands_on_request() -> None:
    """Where no interval is known, the best few are in the order of their worst cases."""
    cluster = ps.Cluster("dgx_b200", n_gpus=8)
    plain = ps.plan(MODEL, cluster, progress=False, n_best=4, **SMALL)
    assert plain.table["high"].isna().all()
    plans = ps.plan(MODEL, cluster, progress=False, n_best=4, rank_by="high", **SMALL)
    highs = plans.table["high"].tolist()[:4]
    assert highs == sorted(highs) == pytest.approx([plan.timeline.interval().high
                                                    for plan in list(plans)[:4]])  # fmt: skip
    assert sorted(plans.table["step"][:4]) == plain.table["step"].tolist()[:4]
    assert "order of the high ends" in plans.summary()


@pytest.mark.parametrize(
    "wrong", [{"rank_by": "worst"}, {"rank_by": "high", "noise": ps.Noise(seed=0)}]
)
def test_a_plan_refuses_other_ranks(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="rank_by"):
        ps.plan(MODEL, ps.Cluster("dgx_b200", n_gpus=8), global_batch=8, **wrong)


def test_measured_layers_have_neither_interval_nor_precision() -> None:
    layers = ps.Layers({"forward": [1, 1], "backward": [2, 2], "activation_bytes": [9, 9]})
    with pytest.raises(ArgumentError, match=r"rank_by=\"high\" needs the interval"):
        ps.plan(layers, ps.Cluster("dgx_h100", n_gpus=2), global_batch=4, rank_by="high")
    with pytest.raises(ArgumentError, match="precision='fp8' changes no measured seconds"):
        ps.plan(layers, ps.Cluster("dgx_h100", n_gpus=2), global_batch=4, precision="fp8")

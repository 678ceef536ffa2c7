"""Where a step is expected: by published steps, or between two frameworks."""

import math
from typing import Any

import pytest

import pipesim as ps
from pipesim.analysis import prediction_interval
from pipesim.errors import ArgumentError, TimelineError

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
    published = {
        "llm_foundry_2023": {"a100": quotients, "h100": quotients[:5]},
        "": {"h100": quotients},
    }
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


@pytest.mark.usefixtures("hundred_steps")
@pytest.mark.parametrize(
    ("gpu", "framework"),
    [
        ("h100_sxm", "llm_foundry_2023"),
        ("a100_80gb", ps.Framework(fused_norm=False)),
        (ps.GPU.preset("a100_80gb").scaled(0.9), "llm_foundry_2023"),
    ],
    ids=["too few steps", "one of no name", "other rates"],
)
def test_without_published_steps_it_is_a_band(gpu: Any, framework: Any) -> None:
    """From a framework that fuses all to one that fuses nothing, and the prediction is inside."""
    timeline = step(gpu, framework)
    interval = timeline.interval()
    assert interval.low <= timeline.makespan <= interval.high
    assert interval.high > 1.1 * interval.low
    assert math.isnan(interval.share)
    assert interval.basis.startswith("from all fused and hidden to nothing, as there are")


def test_measured_costs_have_errors_of_their_own() -> None:
    with pytest.raises(TimelineError, match=r"not those of a GPU's data sheet.*validate"):
        ps.simulate(GRAPH, ps.Costs(1, 2)).interval()
    with pytest.raises(ArgumentError, match="share"):
        step().interval(1.5)

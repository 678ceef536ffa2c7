"""Parts of a step, and the sentences that explain a difference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import CHOICE, GPIPE, SPLIT, plans, problem

import pipesim as ps
from pipesim.planning.choice import PlanChoice
from pipesim.planning.explanation import PARTS, Explanation, explanation, memory_parts, step_parts


def parts_of(costs: ps.Costs, name: str = "1f1b", n_replicas: int = 1) -> dict[str, float]:
    """Return the parts of a step of 4 devices and 8 micro-batches that are not 0."""
    graph = ps.lower(ps.schedule(name, 4, 8), n_replicas=n_replicas)
    parts = step_parts(ps.simulate(graph, costs))
    assert tuple(parts) == PARTS
    return {part: seconds for part, seconds in parts.items() if seconds}


def test_the_bubble_of_1f1b() -> None:
    """(p-1)(f+b) = 9 s before and after m(f+b) = 24 s of compute."""
    assert parts_of(ps.Costs(1, 2)) == {"compute": 24.0, "warm_up_cool_down": 9.0}


def test_messages_and_the_optimizer_are_on_top() -> None:
    """A message of 1 s delays each of 3 borders, forward and backward; a STEP takes 0.5 s."""
    costs = ps.Costs(1, 2, optimizer_step=0.5, network=ps.Network(latency=1.0))
    parts = parts_of(costs)
    assert parts["compute"] == 24.0
    assert parts["warm_up_cool_down"] == 9.0
    assert parts["reduction_and_optimizer"] == 0.5
    alone = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), replace(costs, optimizer_step=0.0))
    assert parts["messages"] == alone.makespan - 33.0 >= 6.0


def test_the_reduction_of_gradients() -> None:
    """Two replicas reduce for 3 s after the last backward; no device has work left then."""
    parts = parts_of(ps.Costs(1, 2, reduce_grad=3.0, optimizer_step=1.0), n_replicas=2)
    assert parts == {"compute": 24.0, "warm_up_cool_down": 9.0, "reduction_and_optimizer": 4.0}


def test_uneven_stages() -> None:
    """The slowest stage has 4 s more a micro-batch; each idle second is the mean of devices."""
    costs = ps.Costs((1, 1, 1, 2), (2, 2, 2, 5))
    parts = parts_of(costs)
    assert parts["compute"] == pytest.approx((3 * 24 + 56) / 4)
    assert parts["imbalance"] > 20
    assert math.fsum(parts.values()) == pytest.approx(8 * 7 + 9)


def test_recompute_as_tasks() -> None:
    """R of 8 micro-batches takes 8 s of each device."""
    graph = ps.lower(ps.schedule("1f1b", 4, 8), recompute="always")
    parts = step_parts(ps.simulate(graph, ps.Costs(1, 2)))
    assert (parts["compute"], parts["recompute"]) == (24.0, 8.0)


def test_a_single_device_computes_only() -> None:
    graph = ps.lower(ps.schedule("1f1b", 1, 4))
    parts = step_parts(ps.simulate(graph, ps.Costs(1, 2)))
    assert {part: x for part, x in parts.items() if x} == {"compute": 12.0}


def test_recompute_and_collectives_inside_backwards() -> None:
    """They are seconds that costs without recompute, or on a network without limits, lack."""
    plan = plans().plan(replace(CHOICE, recompute="full"))
    parts, costs = step_parts(plan.timeline), plan.costs
    once = costs.rebuilt(recompute="none")
    extra = np.sum(costs.backward) - np.sum(once.backward)
    assert parts["recompute"] == pytest.approx(8 * extra / 2)
    fast = problem().cluster.network(2).scaled(bandwidth=1e6, latency=1e-9)
    busy = np.sum(once.rebuilt(network=fast).forward) + np.sum(once.rebuilt(network=fast).backward)
    assert parts["compute"] == pytest.approx(8 * busy / 2, rel=1e-3)
    assert parts["tensor_parallel"] > 0
    unsplit = plans().plan(SPLIT)
    assert step_parts(unsplit.timeline)["tensor_parallel"] == 0.0


seconds = st.floats(1e-4, 1e4)
stages = st.tuples(seconds, seconds, seconds, seconds)


@settings(max_examples=8)
@given(stages, stages, st.floats(0, 10), st.sampled_from(["1f1b", "gpipe", "zb_h1"]))
def test_the_parts_sum_exactly(
    forward: tuple[float, ...], backward: tuple[float, ...], latency: float, name: str
) -> None:
    """``math.fsum`` of the parts is the makespan to the last bit, and nothing is below 0."""
    costs = ps.Costs(
        forward, input_grad=backward, weight_grad=backward, optimizer_step=0.1,
        network=ps.Network(latency=latency),
    )  # fmt: skip
    timeline = ps.simulate(ps.lower(ps.schedule(name, 4, 5)), costs)
    parts = step_parts(timeline)
    assert math.fsum(parts.values()) == timeline.makespan
    assert all(part >= 0 for part in parts.values())


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return plans().explain(CHOICE, GPIPE)


def test_the_difference_sums_exactly(explained: Explanation) -> None:
    """So do the seconds of both; memory is that of the fullest devices."""
    first, second = (plans().plan(choice).timeline for choice in (CHOICE, GPIPE))
    assert math.fsum(explained.seconds["first"]) == first.makespan
    assert math.fsum(explained.seconds["second"]) == second.makespan
    assert explained.difference == first.makespan - second.makespan
    total = explained.memory.loc["total"]
    assert total["first"] == first.memory.breakdown()["total"].max()
    assert total["difference"] == total["first"] - total["second"] < 0


def test_sentences_name_the_settings(explained: Explanation) -> None:
    """The largest part comes first, with both figures and the settings that differ."""
    lines = str(explained).splitlines()
    assert max(map(len, lines)) <= 88
    assert lines[0] == f"A: {CHOICE}"
    text = " ".join(map(str.strip, lines))
    assert lines[2].startswith("A takes ")
    assert " less than B with " in lines[2]
    assert "Recompute: " in text
    assert "; none, against full recompute." in text
    assert "2 replicas with a distributed optimizer, against 2 replicas with a whole" in text
    assert "Activations: " in text
    assert "GPUs a layer" not in text  # as many in both
    changes = [abs(explained.seconds["difference"][part]) for part in explained.seconds.index]
    largest = explained.seconds.index[int(np.argmax(changes))]
    names = {"recompute": "Recompute", "warm_up_cool_down": "Bubble of warm-up and cool-down"}
    assert explained.sentences()[0].startswith(names[largest])
    assert "part of the step" in explained._repr_html_()
    assert repr(explained) == f"<Explanation: {explained.headline}>"


def test_a_configuration_beside_itself() -> None:
    """Nothing differs, and nothing is said of parts."""
    same = plans().explain(0, plans().best)
    assert same.headline.startswith("A and B both take ")
    assert same.sentences() == []
    assert len(same.memory_sentences()) == 1
    assert same.difference == 0.0


def test_small_parts_are_said_together() -> None:
    """Parts below 0.05 % of the step, but above rounding, have one sentence."""
    none = dict.fromkeys(PARTS, 0.0)
    first = none | {"compute": 10.0, "host": 1e-3, "messages": 2e-3}
    second = none | {"compute": 8.0}
    result = explanation((CHOICE, SPLIT), (first, second), ({"total": 2.0}, {"total": 1.0}))
    assert result.sentences() == [
        "Compute: 2.00 s more, 10.0 s against 8.00 s; micro-batches of 1 sequence and 2 GPUs a "
        "layer, against micro-batches of 1 sequence and 1 GPU a layer.",
        "All other parts together: 3.00 ms more.",
    ]
    assert result.headline == "A takes 10.0 s a step: 2.00 s more than B with 8.00 s, or 25.0%."


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("messages", {"n_chunks": 2}, "1 border between stages, against 3 borders between stages"),
        ("schedule_order", {"schedule": "zb_h1"}, "1f1b, against zb_h1"),
        (
            "warm_up_cool_down",
            {"n_microbatches": 1, "n_chunks": 2},
            "1f1b on 2 devices with 8 micro-batches, against 1f1b on 2 devices of 2 chunks with "
            "1 micro-batch",
        ),
        (
            "imbalance",
            {"layers_per_stage": (5, 3)},
            "4 layers in each of 2 stages, which differ in embedding, head or layers, against 3 to "
            "5 layers in each of 2 stages",
        ),
    ],
)
def test_reasons(part: str, change: dict[str, object], reason: str) -> None:
    other: PlanChoice = replace(CHOICE, **change)  # type: ignore[arg-type]  # values suit
    one = dict.fromkeys(PARTS, 1.0)
    memory = {"total": 1.0}
    result = explanation((CHOICE, other), (one, one | {part: 2.0}), (memory, memory))
    assert result.sentences()[0].endswith(f"; {reason}.")


def test_reasons_of_tied_embeddings_and_of_one_stage() -> None:
    """In a V the first and the last stage share a device, which sums no tied matrix."""
    shaped = replace(CHOICE, schedule="zbv", n_chunks=2, layers_per_stage=(2,) * 4)
    one, memory = dict.fromkeys(PARTS, 1.0), {"total": 1.0}
    other = one | {"reduction_and_optimizer": 2.0}
    tied = explanation((CHOICE, shaped), (one, other), (memory, memory), is_tied=True)
    assert tied.sentences()[0].endswith(
        "with a distributed optimizer and tied embeddings on 2 devices, against 2 replicas with a "
        "distributed optimizer and tied embeddings on 1 device."
    )
    apart = explanation((CHOICE, shaped), (one, other), (memory, memory))
    assert ";" not in apart.sentences()[0]
    alone = replace(CHOICE, pipeline_parallel=1, layers_per_stage=(8,))
    other = one | {"imbalance": 2.0}
    single = explanation((alone, SPLIT), (one, other), (memory, memory)).sentences()[0]
    assert "; all layers in 1 stage of one device, against 1 to 3 layers in each of 4" in single


def test_memory_is_that_of_the_fullest_device() -> None:
    costs = ps.Costs(1, 2, activation_bytes=8.0, parameter_bytes=(1.0, 1.0, 90.0, 1.0))
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), costs)
    parts = memory_parts(timeline)
    assert parts["parameters"] == parts["gradients"] == 90.0
    assert parts["activations"] == 16.0
    assert parts["total"] == 196.0

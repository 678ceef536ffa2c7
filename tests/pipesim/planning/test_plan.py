"""`pipesim.plan`: exact steps, pruning that loses nothing, filters, errors, mixed clusters."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError
from pipesim.planning.choice import Evaluation, PlanChoice
from pipesim.planning.plan_evaluator import DeviceSeconds, Evaluator, uniform_split
from pipesim.planning.plan_search import PlanSearch, evaluate
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import SearchSpace
from pipesim.simulation import LogNormal
from pipesim.utils.texts import format_time

MODEL = ps.Transformer(
    hidden_size=1024, n_layers=12, n_heads=16, sequence_length=512, vocabulary_size=8192
)
TIED = ps.Transformer(
    hidden_size=1024, n_layers=12, n_heads=16, sequence_length=512, vocabulary_size=8192,
    tied_embeddings=True,
)  # fmt: skip
#: Two nodes of four GPUs that share NICs: messages of replicas compete.
SHARED = ps.Cluster(
    n_gpus=8, gpu="a100_80gb",
    network=ps.Network(nodes=ps.Nodes(4, 1e-6, 1e11, 5e-6, 1e9, n_nics=2)),
)  # fmt: skip
DGX = ps.Cluster("dgx_h100", n_gpus=16)
MIXED = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)])
#: Arguments of plans that are quick to search.
QUICK: dict[str, Any] = {"recompute": "none", "progress": False}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "v_half", "zb_1p")


#: Clusters of the problems below, whose batch is 16, and their models.
CLUSTERS = {"shared": (SHARED, MODEL), "dgx": (DGX, TIED), "mixed": (MIXED, MODEL)}


@cache
def choices(name: str) -> list[PlanChoice]:
    """Return all configurations of a problem, with their splits."""
    problem = problem_of(name, "stage_major")
    space = SearchSpace.checked(schedules=SCHEDULES, n_chunks=None)
    evaluator = Evaluator(problem)
    listed = [evaluator.with_split(choice) for choice in space.choices(problem)[0]]
    return [choice for choice in listed if choice is not None]


def problem_of(name: str, layout: Any) -> PlanProblem:
    """Return the problem of a cluster."""
    cluster, model = CLUSTERS[name]
    return PlanProblem(model, cluster, 16, layout=layout)


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["shared", "dgx", "mixed"]),
    st.sampled_from(["stage_major", "replica_major"]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_steps_are_those_of_simulate(name: str, layout: Any, index: int, ordered: bool) -> None:
    """Step and memory are those of a simulation of all replicas, to the last bit."""
    problem, listed = problem_of(name, layout), choices(name)
    choice = listed[index % len(listed)]
    if ordered and problem.takes_costs(choice.schedule):
        choice = PlanChoice(**{**vars(choice), "ordered_for_costs": True})
    evaluator = Evaluator(problem)
    bounds = evaluator.bounds(choice)
    result = evaluate(evaluator, choice, bounds)
    assert result.status == "simulated", result.reason
    costs = problem.costs(choice)
    graph = problem.graph(choice, problem.schedule(choice, costs), costs)
    timeline = ps.simulate(graph, costs, memory_limit=problem.limits(choice))
    assert result.step == timeline.makespan
    assert result.memory == timeline.memory.peak.max()
    assert result.bubble == pytest.approx(timeline.bubble_fraction, abs=1e-9)
    assert timeline.memory.fits
    assert bounds.step <= timeline.makespan
    assert (bounds.memory <= timeline.memory.peak.max()).all()


@pytest.mark.parametrize("layout", ["stage_major", "replica_major"])
def test_collectives_hold_the_links_of_all_replicas(layout: Any) -> None:
    """Reductions of stages compete for the NICs that other replicas of both use."""
    problem, listed = problem_of("shared", layout), choices("shared")
    evaluator = Evaluator(problem)
    for choice in listed:
        few = choice.recompute == "none" and not choice.sequence_parallel
        if not few or choice.schedule != "1f1b" or choice.microbatch_size > 1:
            continue
        costs = problem.costs(choice)
        graph = problem.graph(choice, problem.schedule(choice, costs), costs)
        step = evaluate(evaluator, choice, evaluator.bounds(choice)).step
        assert step == ps.simulate(graph, costs).makespan


@pytest.mark.slow
def test_pruning_loses_neither_the_best_nor_the_front() -> None:
    """The best and the front are those of an evaluation of all configurations."""
    cluster = ps.Cluster("dgx_h100", n_gpus=8, memory=0.6e9)
    options: dict[str, Any] = {
        "schedules": ["1f1b", "interleaved_1f1b"], "n_chunks": [1, 2], "tensor_parallel": [1, 2],
        "shard_optimizer": True,
    }  # fmt: skip
    plans = ps.plan(MODEL, cluster, global_batch=8, n_best=3, progress=False, **options)
    every = ps.plan(MODEL, cluster, global_batch=8, n_best=10**6, progress=False, **options)
    assert plans.counts["cannot win"] > 0
    assert every.counts.get("cannot win", 0) == 0
    reasons = plans.ruled_out.query("status == 'cannot win'")["reason"]
    assert reasons.str.fullmatch(
        r"takes at least [\d.]+ \w?s and [\d.]+ [KMG]iB a device: another one is as good or better "
        "in both"
    ).all()
    assert [x.step for x in plans.ranked[:3]] == [x.step for x in every.ranked[:3]]
    fronts = [x.front[["step", "memory"]].to_numpy().tolist() for x in (plans, every)]
    assert fronts[0] == fronts[1]
    assert plans.best.timeline.makespan == plans.best.step


@pytest.mark.slow
def test_processes_find_the_same() -> None:
    """Threads and processes rank as this process does."""
    options: dict[str, Any] = {
        "global_batch": 8,
        "schedules": "1f1b",
        "progress": False,
        "recompute": "none",
    }
    alone = ps.plan(MODEL, ps.Cluster("dgx_h100", 8), **options)
    shared = ps.plan(MODEL, ps.Cluster("dgx_h100", 8), n_jobs=2, backend="threading", **options)
    assert [x.step for x in alone.ranked[:20]] == [x.step for x in shared.ranked[:20]]


def test_fixed_listed_and_filtered() -> None:
    """Each parameter may be fixed or listed; functions see the whole configuration."""
    plans = ps.plan(
        MODEL, DGX, global_batch=16, tensor_parallel=2, pipeline_parallel=[2, 4],
        schedules=["1f1b", "zb_h1"], recompute="none", shard_optimizer=True,
        where=[lambda x: x.microbatch_size < 4, lambda x: max(x.layers_per_stage) <= 7],
        progress=False,
    )  # fmt: skip
    ranked = [x.choice for x in plans.ranked]
    assert {x.tensor_parallel for x in ranked} == {2}
    assert {x.pipeline_parallel for x in ranked} <= {2, 4}
    assert {x.schedule for x in ranked} <= {"1f1b", "zb_h1"}
    assert all(x.shard_optimizer and x.microbatch_size < 4 for x in ranked)
    assert all(x.n_gpus == 16 and sum(x.layers_per_stage) == 12 for x in ranked)


def test_functions_may_come_from_a_generator() -> None:
    """A generator of functions counts as their list; numpy's booleans are booleans."""
    functions = (lambda x, n=n: np.bool_(x.tensor_parallel != n) for n in (1, 4))
    plans = ps.plan(
        MODEL, DGX, global_batch=16, schedules="1f1b", microbatch_size=1, where=functions, **QUICK
    )
    assert {x.choice.tensor_parallel for x in plans} == {2, 8}


def test_even_and_refined_splits() -> None:
    """Even splits have as many layers on each stage; refined ones are never slower."""
    options: dict[str, Any] = {"global_batch": 16, "tensor_parallel": 2, **QUICK}
    plans = {name: ps.plan(MODEL, DGX, split=name, schedules="v_half", pipeline_parallel=4,
                           **options)
             for name in ("balanced", "refined")}  # fmt: skip
    best = plans["refined"].best
    assert best.step < plans["balanced"].best.step
    assert best.timeline.makespan == best.step
    options["schedules"], options["split"] = "1f1b", "even"
    even = ps.plan(MODEL, DGX, pipeline_parallel=4, **options)
    assert {x.choice.layers_per_stage for x in even.ranked} == {(3, 3, 3, 3)}
    with pytest.raises(ArgumentError, match="12 layers cannot be split into 8 stages evenly"):
        ps.plan(MODEL, DGX, pipeline_parallel=8, **options)


def test_ties_are_no_refinements() -> None:
    """An order for costs that gains rounding alone is not listed, and the export works."""
    model = ps.Transformer.preset("llama3_8b")
    # With these seconds, the sums of both orders are rounded differently.
    gpu = replace(ps.GPU.preset("h100_sxm"), attention_half_depth=70.0)
    plans = ps.plan(
        model, ps.Cluster("dgx_h100", 8, gpu=gpu), global_batch=16, schedules="zbv",
        recompute="none", pipeline_parallel=2, tensor_parallel=1, microbatch_size=1,
        progress=False,
    )  # fmt: skip
    best = plans.best
    ordered = plans.plan(replace(best.choice, ordered_for_costs=True))
    assert ordered.step < best.step
    assert not any(x.choice.ordered_for_costs for x in plans.ranked)
    assert "ZBVZeroBubble" in plans.to_torchtitan()


def test_accumulation_steps_are_among_the_choices() -> None:
    """Without a pipeline, micro-batches are accumulation steps."""
    plans = ps.plan(MODEL, DGX, global_batch=64, pipeline_parallel=1, progress=False)
    assert any(x.choice.n_microbatches > 1 for x in plans.ranked)


def test_a_single_device_has_nothing_to_order() -> None:
    """Of several schedules it has 1F1B only: micro-batches one after the other."""
    problem = PlanProblem(MODEL, SHARED, 16)
    space = SearchSpace.checked(pipeline_parallel=[1, 2], schedules=["zb_h1", "1f1b"])
    listed = space.choices(problem)[0]
    assert {x.schedule for x in listed if x.pipeline_parallel == 1} == {"1f1b"}
    assert {x.schedule for x in listed if x.pipeline_parallel == 2} == {"1f1b", "zb_h1"}
    other = SearchSpace.checked(pipeline_parallel=1, schedules="zb_h1").choices(problem)[0]
    assert {x.schedule for x in other} == {"zb_h1"}


def test_measured_layers() -> None:
    """Measured layers have no tensor parallelism; their micro-batch is that of the measurement."""
    layers = ps.Layers(
        {"forward": [1e-3] * 8, "backward": [2e-3] * 7 + [4e-3], "output_bytes": [1e6] * 8,
         "activation_bytes": [1e8] * 8, "parameter_bytes": [1e8] * 8}
    )  # fmt: skip
    plans = ps.plan(layers, DGX, global_batch=32, microbatch_size=2, progress=False)
    best = plans.best
    assert best.choice.tensor_parallel == 1
    assert best.choice.microbatch_size == 2
    assert best.step == best.timeline.makespan


def test_layers_without_bytes() -> None:
    """The plan has a timeline, of which nothing says whether it fits."""
    layers = ps.Layers({"forward": [1e-3] * 8, "backward": [2e-3] * 8})
    plans = ps.plan(layers, DGX, global_batch=16, schedules="1f1b", progress=False)
    assert plans.best.timeline.makespan == plans.best.step
    assert plans.best.timeline.memory.fits is None


@pytest.mark.slow
def test_noise_ranks_by_percentile() -> None:
    """With noise the best are ranked by a percentile of noisy steps."""
    noise = ps.Noise(task=LogNormal(0.3), seed=1)
    plans = ps.plan(
        MODEL, ps.Cluster("dgx_h100", 8), global_batch=8, schedules="1f1b", n_best=3, noise=noise,
        percentile=95, progress=False,
    )  # fmt: skip
    noisy = [x.noisy_step for x in plans.ranked[:3]]
    assert noisy == sorted(noisy)
    assert all(x.noisy_step > x.step for x in plans.ranked[:3])
    assert plans.percentile == 95


def test_interrupt_returns_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C returns the configurations that were evaluated, marked incomplete."""
    calls = []
    original = Evaluator.evaluate

    def interrupted(self: Evaluator, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    plans = ps.plan(MODEL, DGX, global_batch=16, schedules="1f1b", progress=False)
    assert not plans.complete
    assert len(plans.ranked) == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel": 16}, "does not divide the 8 GPUs of a node"),
        ({"pipeline_parallel": 3}, "do not divide by"),
        ({"pipeline_parallel": 16, "n_chunks": 2, "schedules": "interleaved_1f1b"}, "too few"),
        ({"microbatch_size": 5}, "microbatch_size=5 does not divide"),
        ({"schedules": "chimera", "pipeline_parallel": 2}, "several paths"),
        ({"schedules": "seq1f1b", "pipeline_parallel": 2}, "slices of sequences"),
        ({"schedules": "interleaved_1f1b", "pipeline_parallel": 4, "microbatch_size": 1,
          "tensor_parallel": 2, "global_batch": 18}, "interleaved_1f1b takes"),
        ({"global_batch": 7, "data_parallel": 2, "tensor_parallel": 8, "pipeline_parallel": 1},
         "2 replicas do not divide global_batch=7"),
        ({"data_parallel": 3}, "data_parallel=3: 16 GPUs can make 1, 2, 4, 8, 16 replicas"),
        ({"data_parallel": 3, "tensor_parallel": 2, "pipeline_parallel": [2, 4]},
         "data_parallel=3: with tensor_parallel=2 and pipeline_parallel=2 or 4, 16 GPUs can make "
         "2, 4 replicas"),
        ({"memory_limit": [1e9] * 8}, "memory_limit of a plan must be one value"),
        ({"memory_limit": "1MB"}, r"none of \d+ configurations fits in memory_limit, 977 KiB"),
        ({"where": lambda _: False}, "where keeps none"),
        ({"where": lambda x: x.surprise}, "where raised AttributeError"),
        ({"where": lambda _: "no"}, "where must return True or False, got 'no' for tp"),
        ({"where": lambda _: None}, "got None for tp.*; it may lack a return"),
        ({"where": "tp"}, "where must be a list, got 'tp'"),
        ({"recompute": "some"}, "unknown recompute"),
        ({"percentile": 0}, "percentile must be above 0"),
        ({"n_chunks": []}, "n_chunks is empty"),
    ],
)  # fmt: skip
def test_errors(options: dict[str, Any], text: str) -> None:
    """Errors name the parameter, or the nearest configurations and what they lack."""
    with pytest.raises(ArgumentError, match=text):
        ps.plan(MODEL, DGX, **{"global_batch": 16, **QUICK, **options})


def test_nearest_configurations_are_named() -> None:
    """If nothing fits, the error names configurations and the bytes that they lack."""
    cluster = ps.Cluster("dgx_h100", 8, memory=0.1e9)
    with pytest.raises(ArgumentError, match=r"The nearest: tp8 .* too much.*Give more GPUs"):
        ps.plan(MODEL, cluster, global_batch=8, schedules="1f1b", progress=False)


@pytest.mark.parametrize("count", [1, 2])
def test_changes_that_would_fit_are_named(count: int) -> None:
    """One where one is enough, else two together, with the step of the plan that has them."""
    fixed: dict[str, Any] = {
        "global_batch": 16, "schedules": "1f1b", "tensor_parallel": 1, "pipeline_parallel": 4,
        "microbatch_size": 1, "progress": False, "split": "balanced",
    }  # fmt: skip
    plain = {"recompute": "none", "shard_optimizer": False}
    changed = {"recompute": "full" if count == 2 else "none", "shard_optimizer": True}
    best = ps.plan(MODEL, DGX, **fixed, **changed).best
    with pytest.raises(ArgumentError, match="would fit") as caught:
        ps.plan(MODEL, DGX, **fixed, **plain, memory_limit=1.0001 * best.evaluation.memory)
    text = str(caught.value).split("Of the first, ")[1]
    change = "recompute='full', " * (count == 2) + "shard_optimizer=True"
    assert f"{change} ({format_time(best.step)} a step)" in text
    assert all(part.count("=") >= count for part in text.split("; or "))


def test_mixed_stages_have_layers_by_speed() -> None:
    """The faster GPUs get more layers, and each stage the seconds of its own GPU."""
    plans = ps.plan(
        MODEL, MIXED, global_batch=16, tensor_parallel=8, pipeline_parallel=2, schedules="1f1b",
        progress=False,
    )  # fmt: skip
    best = plans.best
    fast, slow = best.choice.layers_per_stage
    assert fast > slow
    assert "slowest GPU" in plans.notes[0]
    alone = PlanProblem(MODEL, ps.Cluster("dgx_a100", 16), 16).costs(best.choice)
    assert best.costs.per_stage("forward", 2)[1] == alone.per_stage("forward", 2)[1]
    assert best.costs.per_stage("forward", 2)[0] < alone.per_stage("forward", 2)[0]


@given(
    st.integers(1, 4), st.integers(4, 14),
    st.floats(0.1, 3), st.floats(0, 3), st.floats(0, 5),
)  # fmt: skip
def test_uniform_split_is_optimal(
    p: int, n_layers: int, slow: float, embedding: float, head: float
) -> None:
    """No distribution of the layers makes the busiest device faster (brute force)."""
    seconds = [DeviceSeconds(slow if d % 2 else 1.0, embedding, head) for d in range(p)]

    def busiest(sizes: tuple[int, ...]) -> float:
        loads = [n * x.layer for n, x in zip(sizes, seconds, strict=True)]
        loads[0] += embedding
        loads[-1] += head
        return max(loads)

    def splits(left: int, devices: int) -> list[tuple[int, ...]]:
        if devices == 1:
            return [(left,)]
        return [(k, *rest) for k in range(left + 1) for rest in splits(left - k, devices - 1)]

    sizes = uniform_split(list(range(p)), seconds, n_layers)
    assert sizes is not None
    allowed = [x for x in splits(n_layers, p) if all(n > 0 for n in x[1:-1])]
    assert math.isclose(busiest(sizes), min(map(busiest, allowed)))


def test_chunks_of_a_device_share_its_layers() -> None:
    """Stages 0 and 3 of a V are on one device: the one with the head or the embedding has fewer."""
    head, embedding = DeviceSeconds(1.0, 0.0, 2.0), DeviceSeconds(1.0, 2.0, 0.0)
    assert uniform_split([0, 1, 1, 0], [head] * 2, 10) == (3, 3, 3, 1)
    assert uniform_split([0, 1, 1, 0], [embedding] * 2, 10) == (1, 3, 3, 3)


def test_slow_gpus_count_more_in_searched_splits() -> None:
    """Stages in the middle of a mixed pipeline load their GPUs by the seconds of a layer there."""
    problem = problem_of("mixed", "stage_major")
    evaluator = Evaluator(problem)
    choice, gpus = next(
        (x, gpus) for x in choices("mixed")
        if x.schedule == "1f1b" and len(set(gpus := problem.gpus_of_devices(x)[1:-1])) == 2
    )  # fmt: skip
    splits = evaluator.split_problem(choice)
    loads = splits.loads(np.cumsum([0, *choice.layers_per_stage])[None])[0, 1:-1]
    seconds = np.array([evaluator._parts(choice, gpu).layer for gpu in (0, *gpus)])
    layers = np.array(choice.layers_per_stage[1:-1])
    assert loads == pytest.approx(splits.sums[0, 1] * layers * seconds[1:] / seconds[0])
    assert len(set(seconds)) == 2


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=12))
def test_a_search_keeps_the_whole_front(results: list[tuple[int, int]]) -> None:
    """Steps and bytes of which no other result is as good in both, and the best steps."""
    search = PlanSearch(Evaluator(problem_of("shared", "stage_major")), n_best=3)
    for step, memory in results:
        search._finish(Evaluation(choices("shared")[0], step, 0.0, memory, 0.0, "simulated"))
    front = {
        (a, b) for a, b in results
        if not any((c, d) != (a, b) and c <= a and d <= b for c, d in results)
    }  # fmt: skip
    assert sorted(search._front) == sorted(front)
    assert sorted(-step for step in search._steps) == sorted(a for a, _ in results)[:3]

"""Plans with context and expert parallelism, shared parameters, offload and slices."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from case_choice import EVERY_CASE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError, PipeError
from pipesim.planning import Plans
from pipesim.planning.choice import PlanChoice
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.plan_search import evaluate
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import SearchSpace
from pipesim.scheduling.placement import replica_devices

SIZES: dict[str, Any] = {
    "hidden_size": 512, "n_layers": 6, "n_heads": 8, "sequence_length": 512,
    "vocabulary_size": 2048,
}  # fmt: skip
DENSE = ps.Transformer(**SIZES, tied_embeddings=True)
EXPERTS = ps.Transformer(
    **SIZES, n_experts=8, experts_per_token=2, expert_ffn_size=512, shared_experts=1,
    n_dense_layers=1,
)  # fmt: skip
HOST = ps.HostLink(latency=10e-6, bandwidth=5e9, devices_per_link=2)
#: Two nodes of four GPUs, whose NICs and links to the host are shared.
CLUSTER = ps.Cluster(
    n_gpus=8, gpu="a100_80gb",
    network=ps.Network(nodes=ps.Nodes(4, 1e-6, 1e11, 5e-6, 1e9, n_nics=2), host=HOST),
)  # fmt: skip
#: The same GPUs with links that take next to no time, for which bounds are the sharpest.
FAST = ps.Cluster(
    n_gpus=8, gpu="a100_80gb",
    network=ps.Network(nodes=ps.Nodes(8, 1e-12, 1e15, 1e-12, 1e15), host=ps.HostLink()),
)  # fmt: skip
MIXED = ps.Cluster([("dgx_h100", 8), ("dgx_a100", 8)])
#: Arguments of plans with all parameters.
LISTED: dict[str, Any] = {
    "context_parallel": [1, 2], "shard_parameters": ["none", "every", "step", 1],
    "offload": ["none", "all", 0.5, "longest:0.5"], "n_slices": [1, 2, 4],
    "schedules": ["1f1b", "interleaved_1f1b", "zb_h1", "v_half", "dualpipev", "seq1f1b",
                  "slimpipe"],
}  # fmt: skip
QUICK: dict[str, Any] = {"global_batch": 16, "progress": False, "recompute": "none"}


def by_hand(
    model: ps.Transformer, choice: PlanChoice, cluster: ps.Cluster = CLUSTER
) -> ps.Timeline:
    """Return the timeline of a configuration that is built from public functions alone."""
    network = cluster.network(choice.tensor_parallel * choice.context_parallel)
    costs = model.costs(
        choice.layers_per_stage, microbatch_size=choice.microbatch_size, gpu="a100_80gb",
        tensor_parallel=choice.tensor_parallel, sequence_parallel=choice.sequence_parallel,
        recompute=choice.recompute, flash_attention=True, network=network,
        context_parallel=choice.context_parallel, expert_parallel=choice.expert_parallel,
        expert_tensor_parallel=choice.expert_tensor_parallel, slices=choice.n_slices,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if choice.schedule in ("interleaved_1f1b", "naive", "slimpipe"):
        options["n_chunks"] = choice.n_chunks
    if choice.n_slices > 1:
        options["n_slices"] = choice.n_slices
    if choice.merged:
        options["merged"] = choice.merged
    if choice.group_size:
        options["group_size"] = choice.group_size
    schedule = ps.schedule(
        choice.schedule, choice.pipeline_parallel, choice.n_microbatches * choice.n_slices,
        **options,
    )  # fmt: skip
    experts: dict[str, Any] = {}
    if (choice.schedule == "dualpipev" or choice.merged) and choice.expert_parallel > 1:
        experts = {"expert_layers": costs.expert_layers, "expert_replicas": costs.expert_replicas}
    graph = ps.lower(
        schedule, n_replicas=choice.data_parallel, layout="stage_major",
        shard_optimizer=choice.shard_optimizer, shard_parameters=choice.shard_parameters,
        offload=choice.offload, offload_to=choice.offload_to,
        grad_sync="every" if choice.schedule == "naive" else "last",
        **experts,
    )  # fmt: skip
    return ps.simulate(graph, costs)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (EXPERTS, {"expert_parallel": 2, "schedules": "1f1b"}),
        (EXPERTS, {"expert_parallel": 4, "schedules": "interleaved_1f1b", "n_chunks": 3}),
        (EXPERTS, {"expert_parallel": 4, "expert_tensor_parallel": 1, "schedules": "1f1b",
                   "tensor_parallel": 2, "sequence_parallel": True}),
        (EXPERTS, {"expert_parallel": 2, "schedules": "dualpipev"}),
        (EXPERTS, {"expert_parallel": 2, "schedules": "interleaved_1f1b", "n_chunks": 3,
                   "merged": "delayed_w", "group_size": 4}),
        (DENSE, {"merged": True, "schedules": "1f1b"}),
        (DENSE, {"context_parallel": 2, "schedules": "zb_h1"}),
        (DENSE, {"shard_parameters": "every", "schedules": "1f1b"}),
        (DENSE, {"shard_parameters": "every", "pipeline_parallel": 1}),
        (EXPERTS, {"shard_parameters": 2, "pipeline_parallel": 1, "expert_parallel": 4}),
        (DENSE, {"shard_parameters": 1, "schedules": "interleaved_1f1b", "n_chunks": 3}),
        (DENSE, {"offload": 0.5, "schedules": "zb_h1"}),
        (DENSE, {"offload": "longest:0.5", "schedules": "interleaved_1f1b", "n_chunks": 3}),
        (DENSE, {"offload": 0.5, "offload_to": "peer", "schedules": "1f1b"}),
        (DENSE, {"n_slices": 4, "schedules": "seq1f1b"}),
        (DENSE, {"n_slices": 2, "schedules": "slimpipe", "n_chunks": 3}),
        (EXPERTS, {"expert_parallel": 4, "context_parallel": 2, "shard_parameters": "step",
                   "offload": "all", "n_slices": 2, "schedules": "slimpipe", "n_chunks": 3,
                   "data_parallel": 2}),
    ],
)  # fmt: skip
def test_steps_and_memory_are_those_of_public_functions(
    model: ps.Transformer, options: dict[str, Any]
) -> None:
    """Each configuration takes the time and the bytes of costs, graph and simulation by hand."""
    usual = {**QUICK, "pipeline_parallel": 2, "expert_parallel": 1, "tensor_parallel": [1, 2]}
    plans = ps.plan(
        model, CLUSTER, microbatch_size=1, n_best=10**6, split="balanced",
        **{**usual, **options},
    )  # fmt: skip
    assert plans.ranked
    for row in plans.ranked:
        timeline = by_hand(model, row.choice)
        assert row.step == timeline.makespan, row.choice
        assert row.memory == timeline.memory.peak.max(), row.choice
    columns = {name: value for name, value in options.items() if name != "schedules"}
    for name, value in columns.items():
        assert {str(x) for x in plans.table[name]} == {str(value)}


def test_merged_orders_are_tried_where_exchanges_hide() -> None:
    """With experts on several GPUs, and not of a schedule without pairs; there they win."""
    network = ps.Network(nodes=ps.Nodes(8, 1e-6, 5e10, 5e-6, 1e9))
    plans = ps.plan(
        EXPERTS, ps.Cluster(n_gpus=8, gpu="a100_80gb", network=network), tensor_parallel=1,
        microbatch_size=4, pipeline_parallel=2, n_chunks=3, global_batch=64,
        schedules=["interleaved_1f1b", "looped_bfs"], expert_parallel=[1, 4], recompute="none",
        shard_optimizer=False, progress=False, split="balanced", n_best=10**6,
        merged=[False, True],
    )  # fmt: skip
    table = plans.table
    merged = table[table["merged"].astype(bool)]
    columns = ["schedule", "expert_parallel"]
    assert merged[columns].to_numpy().tolist() == [["interleaved_1f1b", 4]]
    assert len(table) == 5
    same = (table[columns] == ["interleaved_1f1b", 4]).all(axis=1)
    plain = table[same & ~table["merged"].astype(bool)]
    assert merged.index[0] == 0
    assert merged["step"].item() < 0.95 * plain["step"].item()
    assert "interleaved_1f1b x3, F and B merged, 4 micro" in str(plans.ranked[0].choice)


@pytest.mark.slow
def test_workers_plan_merged_orders_beside_others() -> None:
    """Values of different types: False beside a text."""
    network = ps.Network(nodes=ps.Nodes(8, 1e-6, 5e10, 5e-6, 1e9))
    options: dict[str, Any] = {
        "tensor_parallel": 1, "pipeline_parallel": 2, "microbatch_size": 4, "n_chunks": 3,
        "global_batch": 64, "schedules": "interleaved_1f1b", "expert_parallel": 4,
        "recompute": "none", "shard_optimizer": False, "progress": False, "n_best": 10**6,
        "merged": [False, "delayed_w"],
    }  # fmt: skip
    cluster = ps.Cluster(n_gpus=8, gpu="a100_80gb", network=network)
    alone = ps.plan(EXPERTS, cluster, **options)
    shared = ps.plan(EXPERTS, cluster, n_jobs=2, backend="threading", **options)
    assert alone.table["step"].tolist() == shared.table["step"].tolist()
    assert set(alone.table["merged"]) == {False, "delayed_w"}


def test_one_device_gathers_layer_by_layer() -> None:
    """Each layer, the embedding and the head are stages; micro-batches follow each other.

    There is one such configuration, whatever the schedules. Whole parameters are one stage.
    """
    options: dict[str, Any] = {**QUICK, "tensor_parallel": 1, "pipeline_parallel": 1,
                               "microbatch_size": 1, "shard_optimizer": False}  # fmt: skip
    plans = ps.plan(DENSE, CLUSTER, shard_parameters=["none", "every", "step"], **options)
    layers = {row.choice.shard_parameters: row.choice for row in plans.ranked}
    assert sum(plans.counts.values()) == len(layers) == 3
    assert (layers["none"].schedule, layers["none"].layers_per_stage) == ("1f1b", (6,))
    for mode in ("every", "step"):
        assert (layers[mode].schedule, layers[mode].n_chunks) == ("naive", 8)
        assert layers[mode].layers_per_stage == (0, 1, 1, 1, 1, 1, 1, 0)
    every, whole = (
        ps.plan(DENSE, CLUSTER, shard_parameters="every", n_chunks=n, **options).best
        for n in (None, 1)
    )
    assert every.graph.grad_sync == "every"
    assert every.evaluation.memory < whole.evaluation.memory
    last = ps.plan(DENSE, CLUSTER, shard_parameters="every", grad_sync="last", **options).best
    assert last.graph.grad_sync == "last"
    assert last.evaluation.memory > every.evaluation.memory  # whole gradients wait
    even = ps.plan(DENSE, CLUSTER, shard_parameters="every", split="even", **options).best
    assert even.choice == every.choice
    assert plans.choice(shard_parameters="every") == every.choice
    assert ps.read_megatron(every.to_megatron(), n_layers=6, n_gpus=8).choice == every.choice
    assert ps.read_torchtitan(every.to_torchtitan(), n_layers=6, n_gpus=8).choice == every.choice
    measured = ps.Layers({"forward": [1, 1], "backward": [2, 2], "parameter_bytes": [8, 8],
                          "activation_bytes": [1, 1]})  # fmt: skip
    plans = ps.plan(measured, CLUSTER, shard_parameters="every", **options | {"recompute": None})
    assert plans.best.choice.layers_per_stage == (1, 1)


#: Problems by name: model, cluster, and the allocator's reserve.
PROBLEMS = {
    "experts": (EXPERTS, CLUSTER, 0.0),
    "dense": (DENSE, CLUSTER, 0.1),
    "fast experts": (EXPERTS, FAST, 0.0),
    "fast": (DENSE, FAST, 0.0),
    "mixed": (EXPERTS, MIXED, 0.0),
}


#: Reductions and gathers that run behind compute.
HIDDEN: dict[str, Any] = {"grad_sync": "bucketed", "gather_parameters": "before_forward"}


def problem_of(name: str, layout: Any, **exchange: Any) -> PlanProblem:
    """Return a problem with 16 sequences a step."""
    model, cluster, reserve = PROBLEMS[name]
    return PlanProblem(model, cluster, 16, layout=layout, memory_reserve=reserve, **exchange)


@cache
def choices(name: str) -> list[PlanChoice]:
    """Return all configurations of a problem, without splits."""
    return SearchSpace.checked(**LISTED, microbatch_size=[1, 2]).choices(
        problem_of(name, "stage_major")
    )[0]


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(list(PROBLEMS)),
    st.sampled_from(["stage_major", "replica_major"]),
    st.integers(0, 10**6),
    st.sampled_from([{}, HIDDEN]),
)
def test_bounds_hold(name: str, layout: Any, seed: int, exchange: dict[str, Any]) -> None:
    """Step and bytes are those of all replicas, and no bound is above them."""
    problem = problem_of(name, layout, **exchange)
    evaluator = Evaluator(problem)
    choice = evaluator.with_split(random.Random(seed).choice(choices(name)))
    if choice is None:
        return
    bounds = evaluator.bounds(choice)
    result = evaluate(evaluator, choice, bounds)
    if result.status == "invalid":  # each activation is needed again at once
        assert "no activations to offload" in result.reason
        return
    costs = problem.costs(choice)
    graph = problem.graph(choice, problem.schedule(choice, costs), costs)
    timeline = ps.simulate(graph, costs)
    held = timeline.memory.peak + problem.memory_reserve * timeline.memory.peak
    assert (result.step, result.memory) == (timeline.makespan, held.max())
    assert result.bubble == pytest.approx(timeline.bubble_fraction, abs=1e-9)
    assert bounds.step <= timeline.makespan
    devices = replica_devices(choice.data_parallel, choice.pipeline_parallel, layout)
    assert (bounds.memory <= held[devices].min(axis=0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_bounds_do_not_depend_on_earlier_ones(name: str) -> None:
    """An evaluator with bounds in its caches returns those of a new one."""
    problem = problem_of(name, "stage_major")
    evaluator = Evaluator(problem)
    # Configurations of few different costs, whose other settings caches must not mix up.
    alike = (
        x for x in choices(name)
        if x.microbatch_size == x.tensor_parallel == x.expert_parallel == 1
        and x.pipeline_parallel == 2 and x.schedule in ("1f1b", "seq1f1b")
    )  # fmt: skip
    listed = [x for x in map(evaluator.with_split, alike) if x is not None]
    assert len({(x.shard_parameters, x.offload, x.n_slices) for x in listed}) > 20
    for choice in listed[:: 1 if EVERY_CASE else 3]:
        new, kept = Evaluator(problem).bounds(choice), evaluator.bounds(choice)
        assert new.step == kept.step, choice
        assert (new.memory == kept.memory).all(), choice


def test_bounds_are_sharp_where_nothing_waits() -> None:
    """Without seconds of messages, 1F1B and slices take at most 5 % more than their bounds."""
    plans = ps.plan(
        DENSE, FAST, global_batch=64, tensor_parallel=1, microbatch_size=1, n_best=10**6,
        pipeline_parallel=2, schedules=["1f1b", "seq1f1b"], n_slices=[1, 2, 4], recompute="none",
        shard_parameters=["none", "step"], progress=False,
    )  # fmt: skip
    assert set(plans.table["n_slices"]) == {1, 2, 4}
    assert plans.table["gap"].max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("model", "least_pruned"), [(DENSE, 0), (EXPERTS, 1)])
def test_the_best_is_the_best_of_all_by_hand(model: ps.Transformer, least_pruned: int) -> None:
    """No configuration of the space, simulated on its own, takes less time and fits."""
    space: dict[str, Any] = {
        "tensor_parallel": 1, "pipeline_parallel": [2, 4], "microbatch_size": 2,
        "recompute": "none", "schedules": ["1f1b", "seq1f1b"], "context_parallel": [1, 2],
        "n_slices": [1, 2], "shard_parameters": ["none", "every"],
        "offload": ["none", "all"], "split": "balanced",
    }  # fmt: skip
    options: dict[str, Any] = {"global_batch": 16, "progress": False, **space}
    limit = float(ps.plan(model, CLUSTER, n_best=10**6, **options).table["memory"].median())
    plans = ps.plan(model, CLUSTER, memory_limit=limit, n_best=1, **options)
    del space["split"]
    problem = PlanProblem(model, CLUSTER, 16, memory_limit=limit)
    listed = SearchSpace.checked(**space).choices(problem)[0]
    assert len(listed) == sum(plans.counts.values()) - sum(
        x.status == "invalid" and np.isnan(x.bound) for x in plans.evaluations
    )
    assert plans.counts["cannot win"] >= least_pruned
    assert plans.counts["does not fit"] > 0
    steps = []
    for choice in map(Evaluator(problem).with_split, listed):
        assert choice is not None
        with suppress(ArgumentError):  # no activations to offload
            timeline = by_hand(model, choice)
            if timeline.memory.peak.max() <= limit:
                steps.append(timeline.makespan)
    assert plans.best.step == min(steps)


@pytest.mark.slow
def test_defaults() -> None:
    """Experts are divided by default; nothing else of the new parameters is tried unless listed."""
    options: dict[str, Any] = {
        **QUICK, "schedules": "1f1b", "microbatch_size": 1, "tensor_parallel": [1, 2],
    }  # fmt: skip
    problem = PlanProblem(EXPERTS, CLUSTER, 16)
    listed = SearchSpace.checked(schedules="1f1b").choices(problem)[0]
    assert {x.expert_parallel for x in listed} == {1, 2, 4, 8}
    assert {(x.tensor_parallel > 1 and x.sequence_parallel, x.expert_tensor_parallel)
            for x in listed} == {(False, 0), (True, 0), (True, 1)}  # fmt: skip
    for model in (EXPERTS, DENSE):
        table = ps.plan(model, CLUSTER, **options).table
        assert set(table["context_parallel"]) == set(table["n_slices"]) == {1}
        assert set(table["shard_parameters"]) == set(table["offload"]) == {"none"}
    assert set(table["expert_parallel"]) == {1}
    sliced = ps.plan(
        DENSE, CLUSTER, n_slices=2, pipeline_parallel=2, microbatch_size=1, **QUICK
    ).table
    assert set(sliced["schedule"]) <= {"seq1f1b", "slimpipe"}


@pytest.mark.parametrize(
    ("model", "cluster", "options", "text"),
    [
        (EXPERTS, CLUSTER, {"expert_parallel": 16}, "expert_parallel=16 exceeds n_experts=8"),
        (EXPERTS, CLUSTER, {"expert_parallel": 3}, "expert_parallel=3 does not divide n_experts"),
        (EXPERTS, CLUSTER, {"expert_parallel": 8, "pipeline_parallel": 4}, "do not divide "
         "data_parallel="),
        (DENSE, CLUSTER, {"expert_parallel": 2}, "expert_parallel=2, but the model has no experts"),
        (DENSE, CLUSTER, {"context_parallel": 3}, "8 GPUs do not divide by tensor_parallel=1 x "
         "context_parallel=3"),
        (replace(DENSE, sequence_length=511), CLUSTER, {"context_parallel": 2},
         "context_parallel=2 splits a sequence into"),
        (DENSE, ps.Cluster(n_gpus=8, gpu="a100_80gb", network=ps.Network()),
         {"context_parallel": 2}, "the network has no nodes"),
        (DENSE, CLUSTER, {"shard_parameters": "every", "data_parallel": 1}, "there is one replica"),
        (DENSE, CLUSTER, {"shard_parameters": "every", "shard_optimizer": True,
                          "data_parallel": 2}, "shards the optimizer already"),
        (DENSE, ps.Cluster(n_gpus=8, gpu="a100_80gb", network=ps.Network()), {"offload": "all"},
         "no link to host memory"),
        (DENSE, CLUSTER, {"offload": "all", "pipeline_parallel": 1, "data_parallel": 8,
                          "microbatch_size": 2, "schedules": "1f1b"},
         "no activations to offload"),
        (DENSE, CLUSTER, {"offload": "all", "offload_to": "peer", "pipeline_parallel": 1},
         "has no peer"),
        (DENSE, CLUSTER, {"n_slices": 3}, "slices=3 does not divide sequence_length=512"),
        (DENSE, CLUSTER, {"n_slices": 2, "schedules": "1f1b"}, "1f1b runs whole sequences"),
        (DENSE, CLUSTER, {"schedules": "seq1f1b"}, "seq1f1b runs slices of sequences"),
        (DENSE, MIXED, {"n_slices": 2}, "GPUs of the cluster differ"),
    ],
)  # fmt: skip
def test_impossible_combinations_have_reasons(
    model: ps.Transformer, cluster: ps.Cluster, options: dict[str, Any], text: str
) -> None:
    """A plan without a possible configuration names the reasons."""
    with pytest.raises(ArgumentError, match="no configuration is possible") as caught:
        ps.plan(model, cluster, **{**QUICK, "n_best": 1, **options})
    assert text in str(caught.value)


@pytest.mark.slow
def test_reasons_stand_beside_what_is_possible() -> None:
    """Values that suit some configurations are ruled out for the others, once for each reason."""
    plans = ps.plan(
        EXPERTS, CLUSTER, expert_parallel=[1, 3], shard_parameters=["none", "every"],
        schedules="1f1b", tensor_parallel=4, **QUICK,
    )  # fmt: skip
    invalid = plans.ruled_out.query("status == 'invalid'")
    reasons = invalid["reason"].tolist()
    assert any("expert_parallel=3 does not divide" in x for x in reasons)
    assert reasons.count("shard_parameters='every': there is one replica, which holds all "
                         "parameters") == 1  # fmt: skip
    assert plans.ranked
    both = ps.plan(DENSE, CLUSTER, shard_parameters=["none", "step"], schedules="1f1b", **QUICK)
    shares = both.table.query("shard_parameters == 'step'")
    assert len(shares)
    assert not shares["shard_optimizer"].any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_parallel": 3}, "measured layers do not say which parameters are of experts"),
        ({"context_parallel": 2}, "layers were measured on one GPU"),
        ({"n_slices": 2}, "layers were measured with whole sequences"),
        ({"shard_parameters": "every", "data_parallel": 4}, "lack the column 'parameter_bytes'"),
        ({"offload": "all"}, "lack the column 'activation_bytes'"),
    ],
)
def test_measured_layers_lack_what_is_needed(options: dict[str, Any], text: str) -> None:
    layers = ps.Layers({"forward": [1e-3] * 8, "backward": [2e-3] * 8, "output_bytes": [1e6] * 8})
    with pytest.raises(ArgumentError, match=text):
        ps.plan(layers, CLUSTER, global_batch=16, progress=False, **options)


def test_measured_layers_may_be_shared_and_offloaded() -> None:
    """Sharded parameters and offload need bytes of layers alone."""
    layers = ps.Layers(
        {"forward": [1e-3] * 8, "backward": [2e-3] * 8, "output_bytes": [1e6] * 8,
         "activation_bytes": [1e8] * 8, "parameter_bytes": [1e8] * 8}
    )  # fmt: skip
    plans = ps.plan(
        layers, CLUSTER, global_batch=16, pipeline_parallel=4, schedules="1f1b",
        shard_parameters="step", offload="all", progress=False,
    )  # fmt: skip
    best = plans.best
    assert best.timeline.makespan == best.step
    assert {int(op) for op in best.graph.kinds.op} >= {ps.Op.UNSHARD, ps.Op.OFFLOAD}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context_parallel": 0}, "context_parallel must be at least 1"),
        ({"expert_parallel": "two"}, "expert_parallel must be a whole number"),
        ({"n_slices": []}, "n_slices is empty"),
        ({"shard_parameters": "always"}, "unknown shard_parameters"),
        ({"shard_parameters": True}, "shard_parameters must be"),
        ({"shard_parameters": 0}, "shard_parameters must be"),
        ({"offload": "some"}, "offload"),
        ({"offload": 1.5}, "offload"),
        ({"offload": "all/none"}, "has a value a stage"),
        ({"offload": [["all", "none"]]}, "offload must be one value or a list of values"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PipeError, match=text):
        ps.plan(DENSE, CLUSTER, **{**QUICK, **options})


@cache
def some_plans() -> Plans:
    """Return plans of few configurations, from which `Plans.plan` makes any other."""
    return ps.plan(
        EXPERTS, CLUSTER, tensor_parallel=1, pipeline_parallel=2, microbatch_size=1, n_best=5,
        schedules=["1f1b", "slimpipe"], n_chunks=3, n_slices=[1, 2], context_parallel=[1, 2],
        expert_parallel=4, shard_parameters=["none", 1], offload=["none", "longest:0.5"], **QUICK,
    )  # fmt: skip


def test_tables_and_texts_name_the_parameters() -> None:
    """The table, the text of a choice and its HTML have all values."""
    plans = some_plans()
    choice = plans.choice(
        context_parallel=2, expert_parallel=4, pipeline_parallel=2, schedule="slimpipe",
        n_chunks=3, n_slices=2, shard_parameters=1, offload="longest:0.5",
    )  # fmt: skip
    assert str(choice).startswith(
        "tp1 cp2 pp2 dp2 ep4, slimpipe x3, 8 micro-batches of 1 in 2 slices, parameters of 1 stage "
        "gathered, offload longest:0.5"
    )
    page = plans.plan(choice)._repr_html_()
    for name in ("context_parallel", "expert_parallel", "shard_parameters", "offload", "n_slices"):
        assert name in plans.table
        assert f">{name}<" in page
    assert plans.plan(choice).step == by_hand(EXPERTS, choice).makespan
    with pytest.raises(ArgumentError, match=r"has 16 GPUs \(1 x 4 x 2 x 2\)"):
        plans.plan(replace(choice, context_parallel=4))


def test_explanations_of_all_parameters() -> None:
    """Parts sum to each step, and sentences name what is exchanged, copied and gathered."""
    plans = some_plans()
    sizes = {"pipeline_parallel": 2, "context_parallel": 2}
    first = plans.choice(**sizes, expert_parallel=4, offload="all", shard_parameters="step")
    second = plans.choice(**sizes, schedule="seq1f1b", n_slices=4)
    paired = plans.choice(pipeline_parallel=2, schedule="dualpipev", expert_parallel=2)
    for choice in (second, paired):
        text = plans.explain(first, choice)
        assert text.difference == plans.plan(first).step - plans.plan(choice).step
    text = " ".join(str(plans.explain(first, second)).split())
    assert "between stages and for offloads" in text
    assert "1 GPU a layer, 2 a sequence, 4 for the experts, against " in text
    assert "2 replicas with parameters gathered once a step" in text
    assert "micro-batches of 1 sequence in 4 slices" in text


def test_exchanges_behind_compute() -> None:
    """Buckets, and gathers behind forwards where replicas share the optimizer; faster steps."""
    sizes = {"pipeline_parallel": 2, "data_parallel": 4, "microbatch_size": 1, "n_chunks": 3}
    options: dict[str, Any] = {**QUICK, **sizes, "schedules": "interleaved_1f1b"}
    usual, hidden = (ps.plan(DENSE, FAST, **options, **more) for more in ({}, HIDDEN))
    costly = ps.plan(DENSE, FAST, **options, framework=ps.Framework(overlap_cost=0.5, **HIDDEN))
    steps = {row.choice: row.step for row in costly.ranked}
    for choice in (row.choice for row in usual.ranked):
        plan = hidden.plan(choice)
        own = HIDDEN if choice.shard_optimizer else {"grad_sync": "bucketed"}
        options = {"n_replicas": 4, "layout": "stage_major", **own}
        graph = ps.lower(plan.schedule, shard_optimizer=choice.shard_optimizer, **options)
        assert plan.step == ps.simulate(graph, plan.costs).makespan < usual.plan(choice).step
        costs = replace(plan.costs, overlap_cost=0.5)
        assert steps[choice] == ps.simulate(graph, costs).makespan > plan.step
        flags = {"--overlap-grad-reduce", "--overlap-param-gather"}
        wanted = flags if choice.shard_optimizer else {"--overlap-grad-reduce"}
        assert flags & set(plan.to_megatron().split()) == wanted
        assert not flags & set(usual.plan(choice).to_megatron().split())
    alone = {"pipeline_parallel": 1, "microbatch_size": 2, "schedules": "1f1b"}
    slow = ps.plan(DENSE, CLUSTER, **QUICK, **alone, **HIDDEN)
    assert all(row.bound <= row.step for row in slow.ranked), "reductions begin before the end"
    framework = ps.Framework(n_buckets=4, **HIDDEN)
    named = ps.plan(DENSE, CLUSTER, **QUICK, **alone, framework=framework)
    ends = ["low", "high"]  # no published steps are of such a framework
    assert named.table.drop(columns=ends).equals(slow.table.drop(columns=ends))
    with pytest.raises(ArgumentError, match="unknown gather_parameters 'later'"):
        ps.plan(DENSE, FAST, **QUICK, gather_parameters="later")  # type: ignore[arg-type]


def test_exports() -> None:
    """Megatron-LM and torchtitan get sizes and sharding, and refuse what they lack."""
    plans = some_plans()
    base = {"pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4}
    flags = plans.plan(plans.choice(**base, shard_optimizer=True)).to_megatron().split()
    assert flags[flags.index("--context-parallel-size") + 1] == "2"
    assert flags[flags.index("--expert-model-parallel-size") + 1] == "4"
    alone = plans.choice(context_parallel=2, expert_parallel=4, shard_parameters="every")
    text = plans.plan(alone).to_megatron()
    assert "--use-distributed-optimizer --use-megatron-fsdp" in text
    assert "optim_grads_params" in text
    offloaded = plans.plan(plans.choice(**base, offload="all")).to_megatron()
    assert "--fine-grained-activation-offloading --offload-modules attn_norm" in offloaded
    folded = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4,
              "expert_tensor_parallel": 1, "shard_optimizer": True}  # fmt: skip
    whole = plans.plan(plans.choice(**folded))
    assert "--expert-tensor-parallel-size 1" in whole.to_megatron()
    assert "expert_tensor_parallel_degree = 1" in whole.to_torchtitan()
    assert "ep4 etp1" in str(whole.choice)
    toml = plans.plan(plans.choice(**base, shard_parameters="every")).to_torchtitan()
    for line in (
        "context_parallel_degree = 2", "expert_parallel_degree = 4",
        "data_parallel_shard_degree = 2", "data_parallel_replicate_degree = 1",
        'fsdp_reshard_after_forward = "always"', 'context_parallel_rotate_method = "alltoall"',
    ):  # fmt: skip
        assert line in toml
    step = plans.plan(plans.choice(**base, shard_parameters="step")).to_torchtitan()
    assert 'fsdp_reshard_after_forward = "never"' in step


@pytest.mark.parametrize(
    ("settings_of", "megatron", "torchtitan"),
    [
        ({"expert_parallel": 2, "tensor_parallel": 2}, "sequence_parallel=True", "split"),
        ({"shard_parameters": "step", "pipeline_parallel": 2}, "Megatron-FSDP", ""),
        ({"shard_parameters": 1, "pipeline_parallel": 2}, "Megatron-FSDP",
         'shard_parameters="every" or "step"'),
        ({"offload": 0.5, "pipeline_parallel": 4, "shard_optimizer": True}, "--offload-modules",
         "offloads no activations"),
        ({"n_slices": 2, "schedule": "seq1f1b", "pipeline_parallel": 2, "shard_optimizer": True},
         "no schedule 'seq1f1b'", "whole sequences"),
        ({"expert_parallel": 4, "pipeline_parallel": 1}, "", "share parameters"),
        ({"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1,
          "shard_optimizer": True}, "",
         "whole experts only where they are divided"),
        ({"context_parallel": 2, "expert_parallel": 1, "pipeline_parallel": 1, "data_parallel": 4,
          "shard_optimizer": True}, "", ""),
    ],
)  # fmt: skip
def test_exports_refuse(settings_of: dict[str, Any], megatron: str, torchtitan: str) -> None:
    """Each program names what it does not run."""
    plans = some_plans()
    plan = plans.plan(plans.choice(**settings_of))
    for export, text in ((plan.to_megatron, megatron), (plan.to_torchtitan, torchtitan)):
        if text:
            with pytest.raises(ArgumentError, match=text):
                export()
        else:
            assert export()

"""Transformers with experts: parameters, FLOPs, bytes and seconds by hand, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, PipeError, UnknownNameError

#: A small model: a dense layer, then two with 4 experts, of which a token goes to 2 and 1 shared.
SIZES: dict[str, Any] = {
    "hidden_size": 8, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "sequence_length": 16,
    "ffn_size": 12, "vocabulary_size": 100, "gated_mlp": True, "biases": False,
    "learned_positions": False, "dropout": False, "tied_embeddings": False,
    "n_experts": 4, "experts_per_token": 2, "shared_experts": 1, "expert_ffn_size": 6,
    "n_dense_layers": 1,
}  # fmt: skip
MODEL = ps.Transformer(**SIZES)
#: Q and projection 8 x 8, K and V 8 x 4; each expert three matrices 8 x 6.
ATTENTION, EXPERT = 2 * 64 + 2 * 32, 3 * 48
GPU = ps.GPU(flops=1e12, bandwidth=1e11, overhead=1e-6, memory=80e9)
NODE = ps.Network(nodes=ps.Nodes(8, 1e-6, 1e9, 5e-6, 1e8))
RUN: dict[str, Any] = {"microbatch_size": 3, "gpu": GPU}


def graph(n_replicas: int, **options: Any) -> ps.TaskGraph:
    """Return a step of two stages and two micro-batches."""
    return ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=n_replicas, **options)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral_8x7b", 46.7e9, 12.9e9),
        ("mixtral_8x22b", 141e9, 39e9),
        ("qwen3_235b_a22b", 235e9, 22e9),
        ("deepseek_v2", 236e9, 21e9),
        ("deepseek_v3", 671e9, 37e9),
        ("qwen3_30b_a3b", 30.5e9, 3.3e9),
        ("gpt_oss_20b", 20.91e9, 3.61e9 + 0.58e9),
        ("gpt_oss_120b", 116.83e9, 5.13e9 + 0.58e9),
        ("kimi_k2", 1.026e12, 32.6e9),
    ],
)
def test_published_parameters(name: str, total: float, active: float) -> None:
    """Totals as their authors state them, and those of one token within 2 %.

    DeepSeek-V3 counts 37 billion without the embedding, and GPT-OSS leaves out 0.58 billion of it.
    Kimi K2 has 1.04 trillion in its paper, and 1.026 by its sizes.
    """
    model = ps.Transformer.preset(name)
    assert model.n_parameters == pytest.approx(total, rel=0.003)
    assert model.n_active_parameters == pytest.approx(active, rel=0.02)


def test_parameters_and_flops_by_hand() -> None:
    """A dense layer, two with experts, embedding and head."""
    dense, experts = ATTENTION + 3 * 96 + 16, ATTENTION + 16 + 8 * 4 + 5 * EXPERT
    assert MODEL.layer_parameters == dense
    assert MODEL.expert_layer_parameters == experts
    assert MODEL.n_parameters == dense + 2 * experts + 2 * 800 + 8
    assert MODEL.n_active_parameters == MODEL.n_parameters - 2 * 2 * EXPERT
    core = 4 * 16 * 16 * 8
    layer = 2 * 16 * (ATTENTION + 8 * 4 + 3 * EXPERT) + core
    assert MODEL.expert_layer_flops() == layer
    once = 2 * 16 * (ATTENTION + 3 * 96) + core + 2 * layer + 2 * 16 * 800
    assert MODEL.step_flops() == 3 * once
    assert MODEL.step_flops(2, "full") == 2 * (4 * once - 2 * 16 * 800)
    assert MODEL.step_flops(1, "selective") == 3 * once + 3 * core


def test_biases_of_experts() -> None:
    """Each expert has one for each output of its matrices."""
    biased = ps.Transformer(**{**SIZES, "biases": True})
    assert biased.expert_parameters == EXPERT + 2 * 6 + 8


def test_latent_attention_by_hand() -> None:
    """Maps to vectors of 6 and 5 elements, and from them to 4 heads of 3 + 2 and of 3."""
    latent = ps.Transformer(**{
        **SIZES, "n_kv_heads": 0, "head_size": 3, "kv_rank": 5, "query_rank": 6,
        "rope_head_size": 2,
    })  # fmt: skip
    maps = 8 * 6 + 6 * 4 * 5 + 8 * (5 + 2) + 5 * 4 * (3 + 3) + 4 * 3 * 8
    assert (latent.query_size, latent.kv_size, latent.value_size) == (20, 20, 12)
    assert latent.layer_parameters == maps + 3 * 96 + 2 * 8 + 6 + 5
    assert latent.core_flops() == 2 * 16 * 16 * (20 + 12)
    plain = ps.Transformer(**{
        **SIZES, "n_kv_heads": 0, "head_size": 3, "kv_rank": 5, "rope_head_size": 2,
    })  # fmt: skip
    queries = 8 * 4 * 5
    assert plain.layer_parameters == latent.layer_parameters - 8 * 6 - 6 * 20 - 6 + queries


def test_kept_bytes_by_hand() -> None:
    """Attention as in a dense layer; then what router, experts and shared experts keep."""
    shard = MODEL.shard(microbatch_size=3, flash_attention=True)
    tokens, routed = 48, 96
    attention = tokens * (2 * (8 + 8 + 8 + 4 + 4 + 8) + 4 * 4)
    second = tokens * (2 * (8 + 8) + 8 * 4) + routed * 2 * (8 + 12 + 6) + tokens * 2 * (12 + 6)
    assert shard.expert_layer_activation_bytes == attention + second
    dense = tokens * 2 * (8 + 8 + 24 + 12)
    assert shard.layer_activation_bytes == attention + dense
    maps = tokens * 2 * (8 + 16 + 8 + 8)
    needed = maps + routed * 2 * (8 + 12 + 6 + 8) + tokens * 2 * (8 + 12 + 6 + 8)
    assert shard.expert_layer_weight_grad_bytes == needed


def test_experts_are_divided_and_the_rest_is_not() -> None:
    """Two of four experts on each GPU; tokens that arrive are as many as are sent."""
    whole, half = (MODEL.shard(microbatch_size=3, expert_parallel=x) for x in (1, 2))
    assert whole.routed_parameters == 4 * EXPERT
    assert half.routed_parameters == 2 * EXPERT
    assert half.expert_layer_parameters == whole.expert_layer_parameters
    assert half.expert_layer_activation_bytes == whole.expert_layer_activation_bytes
    assert (half.expert_replicas, half.expert_copies) == (2, 0.5)


def test_costs_have_exchanges_of_layers_with_experts() -> None:
    """The first stage has the dense layer and one with experts."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=NODE)
    assert costs.expert_layers == (1, 1)
    sent = 48 * 2 * 8 * 2
    assert costs.dispatch_bytes == costs.combine_bytes == (sent, sent)
    seconds = sent / 2 / 1e9 + 1e-6
    assert costs.exchange_dispatch == pytest.approx((seconds, seconds))
    assert costs.exchange_combine == costs.exchange_dispatch
    assert costs.expert_replicas == 2
    assert costs.expert_parameter_bytes == (2 * 2 * EXPERT,) * 2


def test_exchange_between_nodes() -> None:
    """16 GPUs on two nodes: 8 of 16 messages of each leave through its NIC."""
    model = replace(MODEL, n_experts=16)
    costs = model.costs([2, 1], **RUN, expert_parallel=16, network=NODE)
    sent = 48 * 2 * 8 * 2
    assert costs.exchange_dispatch is not None
    expected = max(15 / 16 * sent / 1e9, 8 / 16 * sent / 1e8) + 5e-6
    assert costs.exchange_dispatch == pytest.approx((expected,) * 2)


@pytest.mark.parametrize("rates", [{"gpu": GPU}, {"flops_per_second": 1e12}])
def test_one_rank_has_no_exchange(rates: dict[str, Any]) -> None:
    """``expert_parallel=1`` is no expert parallelism."""
    costs = MODEL.costs([2, 1], microbatch_size=3, **rates)
    assert costs == MODEL.costs([2, 1], microbatch_size=3, **rates, expert_parallel=1)
    assert costs.expert_layers == 0
    assert costs.segments is None


def test_stages_are_sums_of_kernels() -> None:
    """Kernels of the table of each part; exchanges are no kernels."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2)
    table = MODEL.kernels(GPU, microbatch_size=3, expert_parallel=2)
    part = table.groupby(["part", "op"])["seconds"].sum()
    for name, letters in {"forward": "F", "input_grad": "I", "backward": "IW"}.items():
        dense, experts, first, last = (
            sum(part.get((where, op), 0.0) for op in letters)
            for where in ("layer", "expert layer", "embedding", "head")
        )
        expected = (dense + experts + first, experts + last)
        assert getattr(costs, name) == pytest.approx(expected)
    names = set(table[table["part"] == "expert layer"]["kernel"])
    assert {"router", "top-k", "permutation", "experts up", "experts down", "shared up"} <= names
    flops = table[(table["part"] == "expert layer") & (table["op"] == "W")]["flops"].sum()
    assert flops == 2 * 48 * (ATTENTION + 8 * 4 + 3 * EXPERT)


def test_kernels_that_move_tokens_reach_less() -> None:
    """0.64 of the bandwidth; products of experts take their memory in addition."""
    gpu = ps.GPU(flops=1e12, bandwidth=1e12)
    table = MODEL.kernels(gpu, microbatch_size=3, expert_parallel=2)
    forward = table[(table["part"] == "expert layer") & (table["op"] == "F")].set_index("kernel")
    moves = forward.loc[["permutation", "expert sort", "unpermutation"]]
    assert moves["seconds"].tolist() == pytest.approx((moves["bytes"] / 0.64e12).tolist())
    up = forward.loc["experts up"]
    assert up["seconds"] == pytest.approx((up["flops"] + up["bytes"]) / 1e12)


def test_segments_are_shares_between_exchanges() -> None:
    """F of the first stage: embedding, dense layer and attention; experts; their sum."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=NODE)
    table = MODEL.kernels(GPU, microbatch_size=3, expert_parallel=2)
    seconds = table[table["op"] == "F"].set_index(["part", "kernel"])["seconds"]
    experts = seconds["expert layer"]
    middle = experts[["expert sort"]].sum() + experts[
        ["experts up", "experts activation", "experts down"]
    ].sum()  # fmt: skip
    assert costs.segments is not None
    (forward, backward, input_grad), last = costs.segments
    assert list(map(len, (forward, backward, input_grad))) == [3, 3, 3]
    assert forward[1] * costs.forward[0] == pytest.approx(middle)
    assert last[0][2] > forward[2]  # with the LM head
    assert last[1][0] > backward[0]  # which is the first in the backward
    two = MODEL.costs([0, 3], **RUN, expert_parallel=2, network=NODE)
    assert [len(shares[0]) for shares in two.segments] == [1, 5]
    for stage in (*costs.segments, *two.segments):
        for shares in stage:
            assert math.isclose(sum(shares), 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_1p", "gpipe"])
def test_tasks_contain_their_exchanges(schedule: str) -> None:
    """F, B, I and R take two exchanges of each layer longer, and W does not."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=NODE)
    free = replace(costs, expert_layers=0.0, segments=None)
    subject = ps.lower(ps.schedule(schedule, 2, 2), n_replicas=2)
    longer = costs.of(subject).duration - free.of(subject).duration
    with_exchanges = np.isin(subject.op, [ps.Op.F, ps.Op.B, ps.Op.I, ps.Op.R])
    assert longer[with_exchanges] == pytest.approx(2 * costs.exchange_dispatch[0])
    assert not longer[~with_exchanges].any()
    ends = [ps.simulate(subject, costs, engine=x).end for x in ("simpy", "compiled")]
    assert (ends[0] == ends[1]).all()


def test_exchanges_from_links_between_replicas() -> None:
    """Without seconds, the bytes and the links between the devices of a group give them."""
    network = ps.Network(latency=1e-3, bandwidth=1e6)
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=network)
    assert costs.exchange_dispatch is None
    subject = graph(4)
    durations = costs.of(subject).duration - replace(
        costs, expert_layers=0.0, segments=None
    ).of(subject).duration  # fmt: skip
    one = 48 * 2 * 8 * 2 / 2 / 1e6 + 1e-3
    assert durations[subject.op == ps.Op.F] == pytest.approx(2 * one)


def test_replicas_share_the_state_of_their_own_experts() -> None:
    """Four replicas share the dense state; every second of them that of an expert."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=NODE)
    timeline = ps.simulate(graph(4, shard_optimizer=True), costs)
    experts = 2 * EXPERT
    dense = np.array(costs.parameter_bytes) / 2 - experts
    state = 12 * (dense / 4 + experts / 2)
    held = timeline.memory.breakdown()["optimizer"].to_numpy()
    assert held[:2] == pytest.approx(state)
    durations = timeline.end - timeline.start
    first = timeline.graph.stage == 0
    steps = durations[first & (timeline.graph.op == ps.Op.STEP)]
    assert steps[:1] == pytest.approx(costs.optimizer_step[0] * (dense[0] / 4 + experts / 2)
                                      / (dense[0] + experts))  # fmt: skip


def test_gradients_of_experts_are_reduced_over_fewer_replicas() -> None:
    """A ring over four replicas for the others, one over two for those of experts."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=2, network=NODE)
    subject = graph(4, layout="stage_major")
    first = (subject.op == ps.Op.REDUCE_GRAD) & (subject.stage == 0)
    durations = costs.of(subject).duration[first]
    experts = 2 * 2 * EXPERT
    dense = np.array(costs.gradient_bytes) - experts
    ring = NODE.all_reduce(dense[0], range(4), "fastest")
    ring += NODE.all_reduce(experts, [0, 2], "fastest")
    assert durations[0] == pytest.approx(ring)
    assert (costs.of(graph(2)).duration >= 0).all()  # one replica of each expert: no ring


def test_a_graph_needs_whole_groups_of_replicas() -> None:
    """Otherwise some experts would be nowhere."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=4, network=NODE)
    with pytest.raises(CostsError, match=r"on 4 replicas .*the graph has 2; give lower"):
        ps.simulate(graph(2), costs)


def test_imbalance_makes_the_busiest_gpu_slower_and_fuller() -> None:
    """Seconds, bytes and exchanges grow with the exponent of Zipf's law."""
    rows = []
    for exponent in (0.0, 0.3, 0.6, 1.0):
        costs = MODEL.costs(
            [2, 1], **RUN, expert_parallel=4, network=NODE, routing=ps.Routing.zipf(exponent)
        )
        rows.append((costs.forward[1], costs.backward[1], costs.activation_bytes[1],
                     costs.exchange_dispatch[1]))  # fmt: skip
    table = np.array(rows)
    assert (np.diff(table, axis=0) > 0).all()
    even = MODEL.costs([2, 1], **RUN, expert_parallel=4, network=NODE)
    assert rows[0] == (even.forward[1], even.backward[1], even.activation_bytes[1],
                       even.exchange_dispatch[1])  # fmt: skip


def test_routing_by_hand() -> None:
    """Counts of four experts on two ranks; and at most one of k assignments of a token."""
    routing = ps.Routing.from_counts([4, 2, 1, 1])
    assert routing.shares(4).tolist() == [0.5, 0.25, 0.125, 0.125]
    assert routing.imbalance(4, 2) == 1.5
    assert routing.imbalance(4, 1) == 1
    cut = ps.Routing.from_counts([8, 2, 1, 1]).shares(4, experts_per_token=2)
    assert cut == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert ps.Routing.from_counts([1, 0, 0]).shares(3, 2) == pytest.approx([0.5, 0.25, 0.25])
    assert ps.Routing.zipf(0).imbalance(8, 8) == 1
    one, other = (ps.Routing.dirichlet(1.0, seed=seed).shares(8) for seed in (0, 1))
    assert one.sum() == pytest.approx(1)
    assert (one != other).any()
    assert (ps.Routing.dirichlet(1.0, seed=0).shares(8) == one).all()
    assert sorted(ps.Routing.zipf(1, seed=3).shares(3)) == pytest.approx([2 / 11, 3 / 11, 6 / 11])


def test_tensor_parallel_experts() -> None:
    """Experts are split as other layers are, or whole with ``expert_tensor_parallel=1``."""
    split = MODEL.shard(tensor_parallel=2, sequence_parallel=True)
    whole = MODEL.shard(tensor_parallel=2, sequence_parallel=True, expert_tensor_parallel=1,
                        expert_parallel=2)  # fmt: skip
    assert split.routed_parameters == whole.routed_parameters == 2 * EXPERT
    assert split.routed_tokens == 2 * whole.routed_tokens == 32
    assert whole.expert_replicas == 1  # both GPUs of a device have half of the experts


def test_tensor_parallel_experts_of_whole_sequences() -> None:
    """Without sequence parallelism each GPU has all tokens, and outputs are summed."""
    shard = MODEL.shard(tensor_parallel=2)
    assert shard.routed_tokens == 32
    network = NODE.grouped(2)
    costs = MODEL.costs([2, 1], **RUN, tensor_parallel=2, network=network)
    free = MODEL.costs([2, 1], **RUN, tensor_parallel=2, network=ps.Network(nodes=ps.Nodes(8))
                       .grouped(2))  # fmt: skip
    one = network.group_all_reduce(48 * 8 * 2, 2)
    # Attention, shared experts, experts; the loss sums three numbers a token.
    loss = 3 * network.group_all_reduce(48 * 4, 2)
    assert costs.forward[1] - free.forward[1] == pytest.approx(3 * one + loss)


def test_settings_build_the_same_costs_again() -> None:
    """They survive JSON, `rebuilt`, and a change of one of them."""
    costs = MODEL.costs([2, 1], **RUN, expert_parallel=4, network=NODE,
                        routing=ps.Routing.zipf(0.5, seed=2))  # fmt: skip
    again = ps.Costs.from_dict(costs.to_dict())
    assert again == costs
    assert again.rebuilt() == costs
    even = costs.rebuilt(routing={"distribution": "uniform"})
    assert even == MODEL.costs([2, 1], **RUN, expert_parallel=4, network=NODE)
    assert costs.work is not None
    assert costs.work.flops == MODEL.step_flops(3)


def test_settings_of_dense_models_are_as_before() -> None:
    """They name no experts."""
    dense = ps.Transformer(hidden_size=8, n_layers=2, n_heads=2, sequence_length=4,
                           vocabulary_size=16)  # fmt: skip
    work = dense.costs(2, microbatch_size=1, gpu=GPU, partition="even").work
    assert work is not None
    assert work.settings is not None
    assert not [name for name in work.settings if "expert" in name or "context" in name]


def test_balanced_split_counts_experts() -> None:
    """No other split has a faster slowest stage: cheap dense layers come together."""
    model = replace(MODEL, n_layers=8, n_dense_layers=6, expert_ffn_size=2000, vocabulary_size=8)

    def slowest(sizes: Any, **options: Any) -> float:
        costs = model.costs(sizes, **RUN, **options)
        return float((costs.per_stage("forward", 3) + costs.per_stage("backward", 3)).max())

    splits = [(a, b, 8 - a - b) for a in range(1, 7) for b in range(1, 8 - a)]
    assert slowest(3, partition="balanced") == pytest.approx(min(map(slowest, splits)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"expert_parallel": 3}, "expert_parallel=3 does not divide n_experts=4"),
        ({"expert_parallel": 8}, "expert_parallel=8 exceeds n_experts=4"),
        ({"expert_parallel": 0}, "expert_parallel must be at least 1"),
        ({"tensor_parallel": 2, "expert_tensor_parallel": 1}, "needs sequence_parallel=True"),
        ({"expert_tensor_parallel": 2}, "expert_tensor_parallel=2 does not divide tensor_parallel"),
        ({"routing": ps.Routing.from_counts([1, 2])}, "counts are of 2 experts, but n_experts=4"),
        ({"routing": 3}, "routing must be a pipesim.Routing, got 3"),
        ({"routing": {"kind": "zipf"}}, "unknown field of a routing"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], text: str) -> None:
    """The error names argument, value and what is allowed."""
    with pytest.raises(ArgumentError, match=text):
        MODEL.costs([2, 1], **{**RUN, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"experts_per_token": 5}, "experts_per_token must be 1 to n_experts=4, got 5"),
        ({"experts_per_token": 0}, "experts_per_token must be 1 to n_experts=4, got 0"),
        ({"n_dense_layers": 4}, "n_dense_layers=4 must be at most n_layers=3"),
        ({"n_experts": 0}, "experts_per_token=2, but n_experts=0"),
        ({"kv_rank": 4}, "head_size is missing"),
        ({"query_rank": 4}, "query_rank=4, but kv_rank=0"),
        ({"kv_rank": 4, "head_size": 2}, "n_kv_heads=2 with kv_rank=4"),
    ],
)
def test_bad_sizes(changes: dict[str, Any], text: str) -> None:
    """Sizes of experts and of latent attention must suit each other."""
    with pytest.raises(ArgumentError, match=text):
        ps.Transformer(**{**SIZES, **changes})


def test_dense_models_take_no_experts() -> None:
    """The argument is named."""
    dense = ps.Transformer.preset("llama3_8b", n_layers=2)
    for name, value in (("expert_parallel", 2), ("routing", ps.Routing.zipf(1))):
        with pytest.raises(ArgumentError, match=rf"{name}=.*has no experts"):
            dense.costs(2, microbatch_size=1, gpu=GPU, **{name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ps.Routing.zipf(-1),
        lambda: ps.Routing.dirichlet(0),
        lambda: ps.Routing("counts"),
        lambda: ps.Routing("uniform", counts=(1, 2)),
        lambda: ps.Routing.from_counts([0, 0]),
        lambda: ps.Routing().shares(2, 3),
        lambda: ps.Routing().imbalance(4, 3),
        lambda: ps.Routing("pareto"),  # type: ignore[arg-type]
    ],
)
def test_bad_routings(make: Any) -> None:
    """Each is refused with a message of the project."""
    with pytest.raises(PipeError):
        make()
    with pytest.raises(UnknownNameError, match="did you mean 'zipf'"):
        ps.Routing("zipff")  # type: ignore[arg-type]


def test_replicas_hold_the_experts_that_no_other_has() -> None:
    """80 of 100 bytes are experts of one of 4 replicas: they are neither gathered nor reduced."""
    costs = ps.Costs(
        1, 2, parameter_bytes=100, gradient_bytes=100, optimizer_bytes=600, expert_layers=1,
        expert_parameter_bytes=80, expert_gradient_bytes=80, expert_optimizer_bytes=480,
        expert_replicas=4, grad_norm=1, optimizer_step=1,
    )  # fmt: skip
    schedule = ps.schedule("1f1b", 1, 2)
    options: dict[str, Any] = {"n_replicas": 4, "expert_layers": 1}
    graph = ps.lower(schedule, shard_parameters="step", **options)
    timeline = ps.simulate(graph, costs)
    held = timeline.memory()
    first = held[held["device"] == 0]["nbytes"].iloc[0]
    assert first == (20 / 4 + 80) * 2 + 120 / 4 + 480
    frame = timeline.frame
    for op in ("UNSHARD", "REDUCE_GRAD"):
        assert set(frame[frame["op"] == op]["nbytes"]) == {20}
    graph = ps.lower(schedule, shard_optimizer=True, grad_norm=True, **options)
    frame = ps.simulate(graph, costs).frame
    seconds = frame["end"] - frame["start"]
    for op in ("GRAD_NORM", "STEP"):
        assert seconds[frame["op"] == op].max() == pytest.approx(0.85)


def test_exchanging_replicas_are_those_of_the_costs() -> None:
    costs = ps.Costs(1, 2, expert_layers=1, dispatch_bytes=8, combine_bytes=8, expert_replicas=2)
    schedule = ps.schedule("1f1b", 2, 4)
    for size in (None, 1, 4):
        graph = ps.lower(schedule, n_replicas=4, expert_layers=1, expert_replicas=size)
        with pytest.raises(CostsError, match=r"on 2 replicas .*give lower.*expert_replicas=2"):
            ps.simulate(graph, costs)
    ps.simulate(ps.lower(schedule, n_replicas=4, expert_layers=1, expert_replicas=2), costs)

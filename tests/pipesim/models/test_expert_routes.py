"""Routes of tokens to experts: groups that a router picks, nodes, bytes; and passes over gradients.

Seconds are by hand, on nodes of two GPUs.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

import pipesim as ps
from pipesim.costs.cost_fields import Workload
from pipesim.errors import ArgumentError, PipeError
from pipesim.models.routing import reached

#: A token goes to 2 of 4 experts.
SIZES: dict[str, Any] = {
    "hidden_size": 8, "n_layers": 2, "n_heads": 4, "sequence_length": 16, "ffn_size": 12,
    "vocabulary_size": 100, "gated_mlp": True, "biases": False, "learned_positions": False,
    "dropout": False, "tied_embeddings": False, "n_experts": 4, "experts_per_token": 2,
}  # fmt: skip
MODEL = ps.Transformer(**SIZES)
GROUPED = ps.Transformer(**SIZES, expert_groups=2, groups_per_token=1)
GPU = ps.GPU(flops=1e12, bandwidth=1e11)
PORT, NIC = 1e9, 1e8
NODES = ps.Network(nodes=ps.Nodes(2, 1e-6, PORT, 5e-6, NIC))
RUN: dict[str, Any] = {"microbatch_size": 3, "gpu": GPU, "expert_parallel": 4, "network": NODES}
#: 48 tokens of 8 elements of 2 bytes.
TOKENS = 48 * 8 * 2


def test_presets_have_the_groups_of_their_papers() -> None:
    """8 groups of a node or GPU; DeepSeek-V2 picks 3, DeepSeek-V3 4, and others have none."""
    picked = {
        name: (model.expert_groups, model.groups_per_token)
        for name in ps.transformers().index
        if (model := ps.Transformer.preset(name)).n_experts
    }
    assert picked == {
        "mixtral_8x7b": (0, 0), "mixtral_8x22b": (0, 0), "qwen3_30b_a3b": (0, 0),
        "qwen3_235b_a22b": (0, 0), "gpt_oss_20b": (0, 0), "gpt_oss_120b": (0, 0),
        "deepseek_v2": (8, 3), "deepseek_v3": (8, 4), "kimi_k2": (0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(("experts", "share"), [(1, 1 / 2), (2, 5 / 6), (3, 1.0), (4, 1.0)])
def test_reach_without_groups(experts: int, share: float) -> None:
    """Two of four: the first is missed by C(3, 2) of C(4, 2), the first two by one of six."""
    assert reached(MODEL, experts) == pytest.approx(share)


@pytest.mark.parametrize(("experts", "share"), [(1, 1 / 2), (2, 1 / 2), (3, 1.0), (4, 1.0)])
def test_reach_of_one_group(experts: int, share: float) -> None:
    """Both experts of a token are those of one of two groups."""
    assert reached(GROUPED, experts) == pytest.approx(share)


@pytest.mark.parametrize("experts", range(1, 13))
def test_reach_counts_all_choices(experts: int) -> None:
    """Three experts of two of four groups of three, each choice once."""
    model = ps.Transformer(
        **{**SIZES, "n_experts": 12, "experts_per_token": 3}, expert_groups=4, groups_per_token=2
    )
    choices = [
        min(chosen) < experts
        for groups in combinations(range(4), 2)
        for chosen in combinations([3 * g + i for g in groups for i in range(3)], 3)
    ]
    assert reached(model, experts) == pytest.approx(sum(choices) / len(choices))


def exchanges(model: ps.Transformer, **options: Any) -> tuple[float, float]:
    """Return the seconds of a dispatch and of a combine."""
    costs = model.costs([2], **{**RUN, **options})
    dispatch, combine = (
        costs.per_stage(f"exchange_{name}", 1)[0] for name in ("dispatch", "combine")
    )
    return float(dispatch), float(combine)


@pytest.mark.parametrize(("model", "share"), [(MODEL, 5 / 6), (GROUPED, 1 / 2)])
def test_a_node_gets_a_token_once(model: ps.Transformer, share: float) -> None:
    """The other node has an expert of so many tokens; by NIC, then from one GPU to the other."""
    both = exchanges(model, expert_exchange="hierarchical")
    assert both == pytest.approx((share * TOKENS / NIC + 6e-6,) * 2)


def test_the_port_may_be_slower() -> None:
    """A GPU of each of two nodes forwards half of the tokens to the other GPU."""
    slow = ps.Network(nodes=ps.Nodes(2, 1e-6, 1e7, 5e-6, NIC))
    seconds = exchanges(MODEL, expert_exchange="hierarchical", network=slow)
    assert seconds == pytest.approx((2 / 2 * TOKENS / 1e7 + 6e-6,) * 2)


def test_one_node_sends_to_each_gpu_once() -> None:
    """Two GPUs of two experts: five sixths of the tokens go to the other, once."""
    both = exchanges(MODEL, expert_exchange="hierarchical", expert_parallel=2)
    assert both == pytest.approx((5 / 6 * TOKENS / PORT + 1e-6,) * 2)
    direct = exchanges(MODEL, expert_parallel=2)  # half of the two copies
    assert direct == pytest.approx((TOKENS / PORT + 1e-6,) * 2)


def test_groups_do_not_matter_to_direct_exchanges() -> None:
    """Each copy of a token is a message of its own."""
    assert exchanges(MODEL) == exchanges(GROUPED)
    assert MODEL.costs([2], **RUN).forward == GROUPED.costs([2], **RUN).forward


@pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
def test_fewer_bytes_on_the_way_to_experts(exchange: Any) -> None:
    """Half of the bytes, and half of the seconds without latency; results are in 16 bits."""
    whole = exchanges(MODEL, expert_exchange=exchange)
    half = exchanges(MODEL, expert_exchange=exchange, dispatch_element_bytes=1)
    latency = 5e-6 if exchange == "direct" else 6e-6
    assert half == pytest.approx(((whole[0] - latency) / 2 + latency, whole[1]))
    costs = MODEL.costs([2], **RUN, expert_exchange=exchange, dispatch_element_bytes=1)
    assert costs.dispatch_bytes == (2 * TOKENS / 2,)
    assert costs.combine_bytes == (2 * TOKENS,)


def settings_of(costs: ps.Costs) -> dict[str, Any]:
    """Return the arguments that costs keep."""
    assert isinstance(costs.workload, Workload)
    assert costs.workload.settings is not None
    return dict(costs.workload.settings)


def test_settings_build_the_same_costs_again() -> None:
    """A workload keeps the new arguments, and only if they are given."""
    options: dict[str, Any] = {
        "expert_exchange": "hierarchical", "dispatch_element_bytes": 1.5, "gradient_passes": True,
    }  # fmt: skip
    costs = GROUPED.costs([1, 1], **RUN, **options)
    settings = settings_of(costs)
    assert {name: settings[name] for name in options} == options
    layers = settings.pop("layers_per_stage")
    again = ps.Costs.transformer(layers, **settings, network=NODES)
    assert again == costs
    assert not {*options, "expert_groups"} & {*settings_of(MODEL.costs([1, 1], **RUN))}


def test_passes_over_gradients_by_hand() -> None:
    """Four passes over all gradients, and one over those that a replica steps, of two it shares.

    Clipping reads and writes; set to zero moves from the shared part to the other. Stepped
    parameters in 32 bits are read once more.
    """
    dense = ps.Transformer(
        **{**SIZES, "n_experts": 0, "experts_per_token": 0}, bytes_per_gradient=4
    )
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, shard_optimizer=True)
    times = [
        ps.simulate(
            graph, dense.costs(1, microbatch_size=1, gpu=GPU, gradient_passes=passes)
        ).makespan
        for passes in (False, True)
    ]
    nbytes = dense.n_parameters * (16 + (4 + 4) / 2)
    assert times[1] - times[0] == pytest.approx(nbytes / GPU.bandwidth)


def test_a_rate_has_no_passes() -> None:
    """Costs of one FLOP/s have no STEP."""
    options: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 1e12}
    passes = MODEL.costs([2], **options, gradient_passes=True)
    assert passes.reduce_copies == 0.0
    assert passes.forward == MODEL.costs([2], **options).forward


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"expert_groups": 2}, "expert_groups=2 with groups_per_token=0; give both"),
        ({"groups_per_token": 1}, "expert_groups=0 with groups_per_token=1; give both"),
        ({"expert_groups": 3, "groups_per_token": 1}, "expert_groups=3 does not divide n_experts"),
        ({"expert_groups": 2, "groups_per_token": 3}, "groups_per_token=3 must be at most"),
        ({"expert_groups": 4, "groups_per_token": 1}, "experts_per_token=2 exceeds the 1 experts"),
        ({"expert_groups": 1.5}, "expert_groups must be"),
        ({"n_experts": 0, "experts_per_token": 0, "expert_groups": 2}, "the model has no experts"),
    ],
)
def test_bad_groups(changes: dict[str, Any], text: str) -> None:
    """Each error says what is allowed."""
    with pytest.raises(ArgumentError, match=text):
        ps.Transformer(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_exchange": "tree"}, "'tree'"),
        ({"dispatch_element_bytes": -1}, "dispatch_element_bytes must be a finite number"),
        ({"gradient_passes": 1}, "gradient_passes must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    """Likewise for arguments of costs."""
    with pytest.raises(PipeError, match=text):
        MODEL.costs([2], **{**RUN, **options})


def test_dense_models_take_no_exchange() -> None:
    """Arguments of experts are refused without experts."""
    dense = ps.Transformer(**{**SIZES, "n_experts": 0, "experts_per_token": 0})
    for options in ({"expert_exchange": "hierarchical"}, {"dispatch_element_bytes": 1}):
        with pytest.raises(ArgumentError, match="the model has no experts"):
            dense.costs([2], microbatch_size=1, gpu=GPU, **options)

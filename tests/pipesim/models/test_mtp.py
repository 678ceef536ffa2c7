"""Modules that predict further tokens: parameters, seconds and memory by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps

H, F, V, TOKENS = 16, 24, 100, 3 * 16
MODEL = ps.Transformer(
    hidden_size=H, n_layers=4, n_heads=2, sequence_length=16, ffn_size=F, vocabulary_size=V,
    biases=False, learned_positions=False, dropout=False, tied_embeddings=False,
)  # fmt: skip
MTP = replace(MODEL, mtp_layers=2)
EXPERTS = replace(MODEL, n_experts=4, experts_per_token=2)
#: Products alone take time.
GPU = ps.GPU(flops=1e9, bandwidth=1e30)
MAP = 2 * TOKENS * 2 * H * H


def costs(model: ps.Transformer, **options: Any) -> ps.Costs:
    """Return the costs of two stages and micro-batches of three sequences."""
    return model.costs([2, 2], **{"microbatch_size": 3, "gpu": GPU, **options})


def added(field: str, **options: Any) -> list[float]:
    """Return by how much two modules raise a cost of each stage."""
    one, other = (costs(model, **options).per_stage(field, 2) for model in (MODEL, MTP))
    return [float(x) for x in other - one]


def test_parameters_of_deepseek_v3() -> None:
    """671 billion, and 685 with the module, which shares embedding and head (README_WEIGHTS.md)."""
    without = ps.Transformer.preset("deepseek_v3")
    model = ps.Transformer.preset("deepseek_v3", mtp_layers=1)
    h, shared = model.hidden_size, 2 * model.vocabulary_size * model.hidden_size
    own = model.n_parameters - without.n_parameters
    assert own == model.expert_layer_parameters + 2 * h * h + 3 * h
    assert own == pytest.approx(11.5e9, rel=0.01)
    assert model.n_parameters + shared == pytest.approx(685e9, rel=0.001)
    active = model.n_active_parameters - without.n_active_parameters
    assert active + shared == pytest.approx(2.4e9, rel=0.06)


def test_the_last_stage_computes_a_layer_a_map_and_a_head() -> None:
    """Two modules; forward once, backward twice as long, and the same by one rate."""
    more = 2 * (MODEL.layer_flops(3) + MAP + MODEL.head_flops(3))
    assert MTP.step_flops(3) - MODEL.step_flops(3) == 3 * more
    rates: list[dict[str, Any]] = [{}, {"gpu": None, "flops_per_second": 1e9}]
    for options in rates:
        assert added("forward", **options) == pytest.approx([0, more / 1e9])
        assert added("backward", **options) == pytest.approx([0, 2 * more / 1e9])


def test_balanced_stages_leave_room_for_the_modules() -> None:
    """The head is short; two modules are two layers more."""
    layouts = [
        replace(model, n_layers=10, vocabulary_size=1)
        .costs(3, microbatch_size=1, gpu=GPU, partition="balanced")
        .layout
        for model in (MODEL, MTP)
    ]
    assert layouts == ["Et*3|t*4|t*3L", "Et*4|t*4|t*2L"]


def test_memory_by_hand() -> None:
    """A last stage of several has a copy of the embedding; norms and the map keep their inputs."""
    one, other = MODEL.shard(microbatch_size=3), MTP.shard(microbatch_size=3)
    module = 2 * (MODEL.layer_parameters + 2 * H * H + 3 * H)
    for sizes, copy in (([4], 0), ([2, 2], V * H)):
        own = other.stage_parameters(sizes)[-1] - one.stage_parameters(sizes)[-1]
        assert own == module + copy
    kept = one.layer_activation_bytes + one.head_activation_bytes + 2 * TOKENS * 4 * H
    assert added("activation_bytes") == pytest.approx([0, 2 * kept])
    assert costs(MTP).tied_bytes == MTP.bytes_per_gradient * V * H


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_by_hand(sequence_parallel: bool) -> None:
    """Of layer, embedding and head; the map gathers 2h elements, if they are split, and h."""
    network = ps.Network(nodes=ps.Nodes(8, 1e-6, 1e9, 5e-6, 1e8)).grouped(2)
    options: dict[str, Any] = {
        "tensor_parallel": 2, "sequence_parallel": sequence_parallel, "network": network,
        "gpu": ps.GPU(flops=1e30, bandwidth=1e30),
    }  # fmt: skip
    hidden = 2 * TOKENS * H
    whole, half = network.group_all_reduce, network.group_all_gather
    module = 3 * whole(4 * TOKENS, 2)
    if sequence_parallel:  # layer: 4, embedding and head 1 each
        module += 7 * half(hidden, 2) + half(2 * hidden, 2)
    else:
        module += 3 * whole(hidden, 2) + half(hidden, 2)
    assert added("forward", **options) == pytest.approx([0, 2 * module])


def test_experts_of_the_module() -> None:
    """Its layer has experts, whose tokens are exchanged, as the last one."""
    network = ps.Network(nodes=ps.Nodes(8, 1e-6, 1e9, 5e-6, 1e8))
    own = costs(replace(EXPERTS, mtp_layers=1), expert_parallel=4, network=network)
    assert own.expert_layers == (2.0, 3.0)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), n_replicas=4, expert_layers=own.expert_layers)
    assert ps.simulate(graph, own).makespan > 0

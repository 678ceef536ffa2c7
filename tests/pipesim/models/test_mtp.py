"""Modules that predict further tokens: parameters, seconds and memory by hand, in any stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.costs import read_layout
from pipesim.errors import ArgumentError

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
    assert layouts == ["Et*3|t*4|t*3L", "Et*4|t*4|t*2m*2L"]


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


#: Layers of each stage of four, with MTP and losses, and the hidden states that each stage sends.
LAYOUTS = {
    "Et*2|t*2|m*2|L": ((2, 2, 2, 0), (0, 0, 0, 3), (1, 1, 3, 1)),
    "Et*2|t*2m|mL*2|L": ((2, 3, 1, 0), (0, 0, 2, 1), (1, 2, 1, 1)),
    "Et*2|t*2L|mL|mL": ((2, 2, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1)),
    "Et*4|mL|mL|L": ((4, 1, 1, 0), (0, 1, 1, 1), (1, 2, 1, 1)),
    "Et*4,m|mL|L|L": ((5, 1, 0, 0), (0, 1, 1, 1), (2, 2, 1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seconds_and_messages_of_any_stage(layout: str) -> None:
    """Of layers and maps where m stands, of heads where L stands; a state for each loss to come."""
    layers, losses, sent = LAYOUTS[layout]
    own = MTP.costs(layout, microbatch_size=3, gpu=GPU)
    maps = [n - t for n, t in zip(layers, read_layout(layout), strict=True)]
    parts = MODEL.layer_flops(3), MAP, MODEL.head_flops(3)
    counts = zip(layers, maps, losses, strict=True)
    expected = [sum(a * b for a, b in zip(n, parts, strict=True)) / 1e9 for n in counts]
    assert own.forward == pytest.approx(expected)
    assert own.backward == pytest.approx([2 * x for x in expected])
    rate = MTP.costs(layout, microbatch_size=3, flops_per_second=1e9)
    assert rate.forward == pytest.approx(expected)
    assert own.per_stage("output_bytes", 4).tolist() == [n * 2 * TOKENS * H for n in sent]
    kept = MTP.shard(microbatch_size=3)
    assert own.per_stage("activation_bytes", 4).tolist() == pytest.approx([
        n * kept.layer_activation_bytes + k * kept.head_activation_bytes + m * 8 * TOKENS * H
        for n, k, m in zip(layers, losses, maps, strict=True)
    ])  # fmt: skip
    assert own.layout == layout
    assert ps.Costs.transformer(layout, **{
        name: value for name, value in own.work.settings.items() if name != "layers_per_stage"
    }) == own  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_matrices(tied: bool) -> None:
    """MTP reads the embedding, and each stage with a loss has a head; gradients are summed."""
    model = replace(MTP, tied_embeddings=tied)
    layout, matrix = "Et*2|t*2m|mL*2|L", V * H
    own = model.shard(microbatch_size=3).stage_parameters(layout)
    base = [n * model.layer_parameters for n in (2, 3, 1, 0)]
    module = 2 * H * H + 3 * H
    copies = [1, 1, 1, 1] if tied else [1, 1, 2, 1]
    norms = [0, module, module + H, H]
    assert own == pytest.approx([
        a + n * matrix + b for a, n, b in zip(base, copies, norms, strict=True)
    ])  # fmt: skip
    network = ps.Network(nodes=ps.Nodes(8, 1e-6, 1e9, 5e-6, 1e8))
    costs = model.costs(layout, microbatch_size=3, gpu=GPU, network=network)
    groups = [(0, 1, 2, 3)] if tied else [(0, 1, 2), (2, 3)]
    assert costs.tied_stages == tuple(groups)
    schedule = ps.schedule("1f1b", 4, 4)
    graph = ps.lower(schedule)
    steps = graph.op == ps.Op.STEP
    assert graph.stage[steps].tolist() == [3, 2, 1, 0]
    added = (costs.of(graph).duration - replace(costs, tied_bytes=0.0).of(graph).duration)[steps]
    assert added.tolist() == pytest.approx([
        sum(network.all_reduce(2.0 * matrix, g, "fastest") for g in groups if stage in g)
        for stage in graph.stage[steps]
    ])  # fmt: skip
    # Each of two devices sums once a group, in STEP of its first stage in it.
    graph = ps.lower(ps.schedule("interleaved_1f1b", 2, 4, n_chunks=2))
    steps = graph.op == ps.Op.STEP
    added = (costs.of(graph).duration - replace(costs, tied_bytes=0.0).of(graph).duration)[steps]
    pair = network.all_reduce(2.0 * matrix, (0, 1), "fastest")
    by_stage = dict(zip(graph.stage[steps].tolist(), added.tolist(), strict=True))
    assert by_stage == pytest.approx({0: pair, 1: pair, 2: pair * (not tied), 3: pair * (not tied)})
    graph = ps.lower(schedule, tied=costs.tied_stages)
    assert set(costs.of(graph).nbytes[graph.op == ps.Op.REDUCE_TIED]) == {2.0 * matrix}


def test_the_layout_of_deepseek_v3() -> None:
    """Megatron's documented layout: 61 layers, one module on stage 30, its loss on the last."""
    layout = "Et*3|(tt|)*29,m|L"
    settings = ps.read_megatron(
        f"--pipeline-model-parallel-layout {layout} --pipeline-model-parallel-size 16 "
        "--mtp-num-layers 1 --micro-batch-size 1 --global-batch-size 16 --num-layers 61"
    )
    assert (settings.mtp_layers, settings.choice.n_chunks) == (1, 2)
    assert settings.choice.layers_per_stage == (3, *[2] * 29, 0, 0)
    model = ps.Transformer.preset("deepseek_v3", mtp_layers=settings.mtp_layers)
    costs = model.costs(gpu="h100_sxm", **settings.cost_options)
    assert (costs.layout, costs.tied_stages) == (layout, ((0, 30),))
    last = ps.read_megatron(
        "--mtp-num-layers 2 --pipeline-model-parallel-layout Et*2|tmmL --micro-batch-size 1 "
        "--pipeline-model-parallel-size 2"
    )
    assert (last.cost_options["layers_per_stage"], last.mtp_layers) == ((2, 1), 2)


def test_losses_of_several_stages() -> None:
    """The layout of github.com/NVIDIA/Megatron-LM/pull/5318: four losses on two stages."""
    layout = "E|(t|)*10m|m|m|LL|LL"
    model = replace(MODEL, n_layers=10, mtp_layers=3)
    costs = model.costs(layout, microbatch_size=3, gpu=GPU)
    sent = costs.per_stage("output_bytes", 16) / (2 * TOKENS * H)
    assert sent.tolist() == [1.0] * 11 + [2.0, 3.0, 4.0, 2.0, 1.0]
    assert costs.forward[14] == costs.forward[15] == pytest.approx(2 * model.head_flops(3) / 1e9)


def test_mistakes() -> None:
    with pytest.raises(ArgumentError, match=r"has 1 layers of multi-token prediction.*model has 2"):
        MTP.costs("Et*4|mL", microbatch_size=1, gpu=GPU)
    with pytest.raises(ArgumentError, match="position 3 of the layout, 'm': these stages have no"):
        ps.Layers({"forward": [1], "backward": [2]}).costs("Et|mL")
    plans = ps.plan(MTP, ps.Cluster("dgx_h100", n_gpus=2), global_batch=4, schedules="1f1b")
    choice = plans.choice(pipeline_parallel=2, layers_per_stage="Et*2|t*2,mmL")
    assert "Et*2|t*2m*2L" not in plans.plan(choice).to_megatron()  # even stages need no layout
    uneven = plans.choice(pipeline_parallel=2, layers_per_stage="Et*3|tmmL")
    assert "'Et*3|tm*2L'" in plans.plan(uneven).to_megatron()
    with pytest.raises(ArgumentError, match="before the last stage, which plans do not know"):
        plans.choice(pipeline_parallel=2, layers_per_stage="Et*4m|mL")

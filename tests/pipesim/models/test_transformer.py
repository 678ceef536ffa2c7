"""Costs of transformers: by hand, summed over stages, from sizes, and what is refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.costs.rows import MEASURED, STAGE_ROWS
from pipesim.errors import (
    ArgumentError,
    CostsError,
    CostsWarning,
    PipeError,
    UnknownNameError,
)

#: Sizes for tests in which only some setting matters.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "n_heads": 4,
    "sequence_length": 16,
    "vocabulary_size": 100,
}
SMALL = ps.Transformer(**SIZES, n_layers=8)
RUN: dict[str, Any] = {"microbatch_size": 2, "flops_per_second": 1e12}

#: What follows from sizes; seconds of collectives are measured or the network's.
OTHERS = (*MEASURED.values(), "offload_bytes")
SIZED = [name for name, row in STAGE_ROWS.items() if not row.is_rare and name not in OTHERS]


def test_stages_by_hand() -> None:
    """A small gated model with shared key and value heads, over two GPUs, all summed by hand."""
    model = ps.Transformer(
        hidden_size=8, n_layers=3, n_heads=4, n_kv_heads=2, sequence_length=10, ffn_size=6,
        vocabulary_size=100, gated_mlp=True, biases=False, learned_positions=False, dropout=False,
        tied_embeddings=False, bytes_per_gradient=4,
    )  # fmt: skip
    # Q 8x8, K and V 8x4 each, projection 8x8; gate, up and down 8x6 each.
    matrices = 64 + 2 * 32 + 64 + 3 * 48
    assert model.layer_parameters == matrices + 2 * 8
    assert model.n_parameters == 3 * (matrices + 16) + 2 * 800 + 8
    costs = model.costs((2, 1), microbatch_size=3, flops_per_second=10.0, tensor_parallel=2,
                        recompute="selective", optimizer_step=7, launch=5)  # fmt: skip
    tokens = 30
    linear, core, head = 2 * tokens * matrices, 4 * tokens * 10 * 8, 2 * tokens * 800
    values = costs.to_dict()
    assert (
        values["forward"]
        == values["recompute"]
        == pytest.approx((2 * (linear + core) / 20, (linear + core + head) / 20))
    )
    assert values["input_grad"] == pytest.approx(
        (2 * (linear + 3 * core) / 20, (linear + 3 * core + head) / 20)
    )
    assert values["weight_grad"] == pytest.approx((2 * linear / 20, (linear + head) / 20))
    assert values["output_bytes"] == (tokens * 16, tokens * 16)
    # Whole: inputs of norms, QKV, MLP. Split: Q, K, V, input of projection; gate, up, product.
    layer = tokens * (4 * 8 * 2 + (8 + 4 + 4 + 8 + 6 + 6 + 6) * 2 / 2)
    head_bytes = tokens * (2 * 8 * 2 + 100 * 4 / 2)
    assert values["activation_bytes"] == (2 * layer, layer + head_bytes)
    # Inputs of QKV, projection, gate with up, down; gradients of the outputs of all of them.
    held = tokens * 2 * ((8 + 8 + 8 + 8) + (8 + 6 + 8 + 4 + 4 + 6 + 6) / 2)
    assert values["weight_grad_bytes"] == (
        2 * held + tokens * 16, held + tokens * 16 + tokens * 400 / 2
    )  # fmt: skip
    parameters = np.array([2 * (matrices / 2 + 16) + 400, matrices / 2 + 16 + 8 + 400])
    assert values["parameter_bytes"] == tuple(2 * parameters)
    assert values["gradient_bytes"] == tuple(4 * parameters)
    assert values["optimizer_bytes"] == tuple(12 * parameters)
    assert (values["optimizer_step"], values["launch"]) == (7, 5)


def test_parameters_of_a_gpu_by_hand() -> None:
    """Matrices and the biases of QKV and the MLP's inner layer are split; all else is whole."""
    costs = SMALL.costs([3, 5], **RUN, tensor_parallel=4)
    matrices, inner_biases = 12 * 64 * 64, 3 * 64 + 4 * 64
    layer = (matrices + inner_biases) / 4 + 2 * 64 + 2 * 2 * 64
    embedding, positions, norm = 100 * 64 / 4, 16 * 64, 2 * 64
    parameters = 3 * layer + embedding + positions, 5 * layer + embedding + norm
    assert costs.per_stage("parameter_bytes", 2).tolist() == [2 * n for n in parameters]


@pytest.mark.parametrize(("gradient", "total"), [(2, 16), (4, 18)])
def test_bytes_held_for_a_parameter(gradient: int, total: int) -> None:
    """Adam in mixed precision holds 16 bytes a parameter, or 18 with gradients in 32 bits."""
    model = ps.Transformer(**SIZES, n_layers=2, bytes_per_gradient=gradient)
    costs = model.costs(1, **RUN)
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    held = sum(costs.per_stage(name, 1) for name in names)
    assert held.tolist() == [total * model.n_parameters]


def test_tied_embeddings() -> None:
    """First and last stage have a copy each, but one stage has one."""
    for tied in (True, False):
        model = ps.Transformer(**SIZES, n_layers=4, tied_embeddings=tied)
        matrix = 2 * 100 * 64
        one, two = (sum(model.costs(n, **RUN).per_stage("parameter_bytes", n)) for n in (1, 2))
        assert one == 2 * model.n_parameters
        assert two - one == (matrix if tied else 0)


def test_full_recompute_is_r_within_b() -> None:
    """B of a stage of layers alone takes as long as R and B would; its forward stays."""
    none, full = (SMALL.costs(4, **RUN, recompute=r) for r in ("none", "full"))
    r_and_b = none.per_stage("recompute", 4) + none.per_stage("backward", 4)
    assert full.per_stage("backward", 4)[:3] == pytest.approx(r_and_b[:3], rel=1e-12)
    assert full.forward == none.forward
    head = SMALL.head_flops(2) / 1e12
    assert full.per_stage("backward", 4)[3] == pytest.approx(r_and_b[3] - head, rel=1e-12)


def test_door() -> None:
    """`Costs.transformer` takes the settings of both, and counts the layers."""
    network = ps.Network(latency=1e-6, bandwidth=1e11)
    run = {**RUN, "tensor_parallel": 2, "recompute": "full", "network": network}
    costs = ps.Costs.transformer([3, 5], **SIZES, **run)
    assert costs == SMALL.costs((3, 5), **run)
    assert costs == ps.Costs.transformer(np.array([3, 5]), **SIZES, **run)
    assert costs.network is network
    assert ps.Costs.transformer(4, **SIZES, n_layers=8, **RUN) == SMALL.costs([2, 2, 2, 2], **RUN)
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 4)), costs)
    assert timeline.complete


models = st.builds(
    lambda heads, shared, size, gated, dropout, biases, tied, layers: ps.Transformer(
        hidden_size=8 * heads * size,
        n_heads=8 * heads,
        n_kv_heads=8 if shared else 0,
        n_layers=layers,
        sequence_length=32,
        vocabulary_size=100,
        ffn_size=24 * size if gated else 0,
        gated_mlp=gated,
        dropout=dropout,
        biases=biases,
        tied_embeddings=tied,
    ),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 8),
    *[st.booleans()] * 4,
    st.integers(1, 12),
)
recomputes = st.sampled_from(["none", "selective", "full"])
sizes = st.sampled_from([1, 2, 4, 8])


@given(models, sizes, st.booleans(), recomputes, st.data())
def test_stages_sum_to_the_model(
    model: ps.Transformer, t: int, sequence: bool, recompute: Any, data: st.DataObject
) -> None:
    """For any split into stages, the stages have the model's FLOPs, activations and weights."""
    n_stages = data.draw(st.integers(1, model.n_layers))
    cuts = data.draw(st.permutations(range(1, model.n_layers)).map(lambda c: c[: n_stages - 1]))
    split = np.diff([0, *sorted(cuts), model.n_layers]).tolist()
    costs = model.costs(
        split, microbatch_size=3, flops_per_second=1e9, tensor_parallel=t,
        sequence_parallel=sequence, recompute=recompute,
    )  # fmt: skip
    total = {name: costs.per_stage(name, n_stages).sum() for name in SIZED}
    flops = (total["forward"] + total["backward"]) * t * 1e9
    assert flops == pytest.approx(model.step_flops(3, recompute), rel=1e-9)
    halves = total["input_grad"] + total["weight_grad"]
    assert total["backward"] == pytest.approx(halves, rel=1e-9)
    part = model.shard(microbatch_size=3, tensor_parallel=t, sequence_parallel=sequence,
                       recompute=recompute)  # fmt: skip
    activations = model.n_layers * part.layer_activation_bytes
    activations += part.embedding_activation_bytes + part.head_activation_bytes
    assert total["activation_bytes"] == pytest.approx(activations, rel=1e-9)
    copies = 100 * model.hidden_size * (model.tied_embeddings and n_stages > 1)
    if t == 1:
        assert total["parameter_bytes"] == 2 * (model.n_parameters + copies)
    assert t * total["parameter_bytes"] >= 2 * (model.n_parameters + copies) - 1e-6


@given(models, st.booleans(), recomputes)
def test_more_gpus_never_hold_more(model: ps.Transformer, sequence: bool, recompute: Any) -> None:
    """Nor does sequence parallelism, or more recompute; time goes down as FLOPs are divided."""
    run = {**RUN, "recompute": recompute, "sequence_parallel": sequence}
    for t in (1, 2, 4):
        less, more = (model.costs(1, **run, tensor_parallel=n) for n in (t, 2 * t))
        for name in SIZED:
            if "workspace" not in name:
                assert more.per_stage(name, 1)[0] <= less.per_stage(name, 1)[0], name
        for direction in ("forward", "backward"):  # beyond the activations, there may be more
            names = ("activation_bytes", f"{direction}_workspace_bytes")
            held = [sum(x.per_stage(name, 1)[0] for name in names) for x in (more, less)]
            assert held[0] <= held[1], direction
        assert more.per_stage("forward", 1) == pytest.approx(less.per_stage("forward", 1) / 2)
    plain, split = (
        model.shard(tensor_parallel=4, sequence_parallel=sp, recompute=recompute)
        for sp in (False, True)
    )
    assert split.layer_activation_bytes <= plain.layer_activation_bytes
    held = [
        model.shard(sequence_parallel=sequence, recompute=r).layer_activation_bytes
        for r in ("none", "selective", "full")
    ]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_heads": 0}, "n_heads must be at least 1, got 0"),
        ({"hidden_size": -64}, "hidden_size must be at least 1, got -64"),
        ({"hidden_size": 64.0}, "hidden_size must be a whole number, got 64.0"),
        ({"n_layers": True}, "n_layers must be a whole number, got True"),
        ({"ffn_size": -1}, "ffn_size must be at least 0, got -1"),
        ({"vocabulary_size": None}, "vocabulary_size must be a whole number, got None"),
        ({"n_heads": 5}, "n_heads=5 does not divide hidden_size=64; choose n_heads such that"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4"),
        ({"gated_mlp": 1}, "gated_mlp must be True or False, got 1"),
        ({"bytes_per_activation": math.nan}, "bytes_per_activation must be a finite number .at l"),
        ({"bytes_per_parameter": "2"}, "bytes_per_parameter must be a finite number .*, got .2."),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1, got 0"),
        ({"flops_per_second": -1.0}, r"flops_per_second must be finite FLOP/s > 0, got -1\.0"),
        ({"flops_per_second": 0}, "flops_per_second must be finite FLOP/s > 0, got 0"),
        ({"flops_per_second": math.inf}, "flops_per_second must be finite FLOP/s > 0, got inf"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 8}, "tensor_parallel=8 does not divide n_heads=4; choose tensor_par"),
        ({"tensor_parallel": 4, "n_kv_heads": 2}, "tensor_parallel=4 does not divide n_kv_heads=2"),
        ({"tensor_parallel": 4, "ffn_size": 6}, "tensor_parallel=4 does not divide ffn_size=6"),
        (
            {"tensor_parallel": 4, "sequence_parallel": True, "sequence_length": 6},
            "tensor_parallel=4 does not divide sequence_length=6",
        ),
        ({"sequence_parallel": "yes"}, "sequence_parallel must be True or False, got 'yes'"),
        ({"recompute": "sel"}, "unknown recompute 'sel'; did you mean 'selective'"),
        ({"recompute": None}, "unknown recompute None"),
        ({"layers_per_stage": 3}, "8 layers do not divide into 3 stages .* such as .2, 3, 3."),
        ({"layers_per_stage": 9}, "8 layers do not divide into 9 stages"),
        ({"layers_per_stage": 0}, "layers_per_stage must be at least 1, got 0"),
        ({"layers_per_stage": [4, 3]}, "sums to 7 layers, but there are 8; every layer"),
        ({"layers_per_stage": [4, 0, 4]}, "layers of stage 1 must be at least 1, got 0"),
        ({"layers_per_stage": [9, -1]}, "layers of stage 1 must be at least 0, got -1"),
        ({"layers_per_stage": [4.0, 4]}, r"layers of stage 0 must be a whole number, got 4\.0"),
        ({"layers_per_stage": "44"}, "must be a number of stages or the layers of each stage"),
        ({"layers_per_stage": []}, "must be a number of stages or the layers of each stage"),
        ({"layers_per_stage": None}, "must be a number of stages or the layers of each stage"),
        ({"hiden_size": 64}, "unknown setting of a transformer 'hiden_size'; did you mean 'hidden"),
    ],
)
def test_bad_input(wrong: dict[str, Any], message: str) -> None:
    """What is wrong, what was got and what is allowed."""
    settings = {"layers_per_stage": [4, 4], **SIZES, "n_layers": 8, **RUN, **wrong}
    with pytest.raises(ArgumentError, match=message):
        ps.Costs.transformer(**settings)


@pytest.mark.parametrize("name", ["hidden_size", "vocabulary_size", "microbatch_size"])
def test_missing_setting(name: str) -> None:
    """It is named, and so is everything that is needed."""
    settings = {name_: value for name_, value in {**SIZES, **RUN}.items() if name_ != name}
    with pytest.raises(ArgumentError, match=f"{name} is missing; a transformer needs hidden_size"):
        ps.Costs.transformer([1, 2], **settings)
    with pytest.raises(ArgumentError, match="n_layers is missing"):
        ps.Costs.transformer(2, **SIZES, **RUN)


def test_errors_are_ours() -> None:
    """Of an unknown name, of the values of `Costs`, and of the network."""
    with pytest.raises(UnknownNameError):
        SMALL.step_flops(1, "all")  # type: ignore[arg-type]
    with pytest.raises(CostsError, match="launch must be finite seconds >= 0, got -1"):
        SMALL.costs(1, **RUN, launch=-1)
    with pytest.raises(PipeError, match=r"network must be a pipesim\.Network, got 0"):
        SMALL.costs(1, **RUN, network=0)  # type: ignore[arg-type]


LARGE_HEAD: dict[str, Any] = {
    "hidden_size": 64, "n_layers": 8, "n_heads": 4, "sequence_length": 16,
    "vocabulary_size": 4000,
}  # fmt: skip
RATE: dict[str, Any] = {"microbatch_size": 1, "flops_per_second": 1e9}


def test_one_meaning_of_a_number_of_stages() -> None:
    """Words say how layers are divided, of a transformer and of a table of its layers alike."""
    model = ps.Transformer(**LARGE_HEAD)
    # In the table, the head has its own row if it may have its own stage.
    for partition, rows in (("even", [1] * 8), ("balanced", [*[1] * 8, 0])):
        costs = model.costs(rows, **RATE)
        layers = ps.Layers({"forward": costs.forward, "backward": costs.backward})  # type: ignore[dict-item]
        of_model = model.costs(4, **RATE, partition=partition)
        of_layers = layers.costs(4, partition=partition)
        assert of_layers == ps.Costs.from_layers(layers, 4, partition=partition)
        assert of_layers.forward == pytest.approx(of_model.forward)
    assert model.costs(4, **RATE, partition="even") == model.costs([2, 2, 2, 2], **RATE)
    # The head takes as long as 9.3 layers: it gets its own stage.
    assert model.costs(4, **RATE, partition="balanced") == model.costs([2, 3, 3, 0], **RATE)
    assert layers.costs(4) == layers.costs(4, partition="balanced")


def test_an_even_split_that_costs_time_is_told() -> None:
    """Unless the caller wants it, or its cost is negligible."""
    model = ps.Transformer(**LARGE_HEAD)
    with pytest.warns(CostsWarning, match="the last takes .*partition=.balanced") as caught:
        assert model.costs(4, **RATE) == model.costs([2, 2, 2, 2], **RATE)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.costs(4, **RATE, partition="even")
        model.costs([2, 2, 2, 2], **RATE)
        ps.Transformer(**{**LARGE_HEAD, "vocabulary_size": 1}).costs(4, **RATE)


@pytest.mark.parametrize(
    ("split", "partition", "message"),
    [
        ([4, 4], "even", "gives the layers of each stage, so that partition="),
        (2, "fair", "unknown partition 'fair'"),
        (10, "balanced", "8 layers"),
        (3, "even", "8 layers do not divide into 3 stages"),
    ],
)
def test_bad_partitions(split: Any, partition: Any, message: str) -> None:
    """Of a transformer and of layers."""
    layers = ps.Layers({"forward": [1] * 8, "backward": [1] * 8})
    with pytest.raises(ArgumentError, match=message):
        ps.Transformer(**LARGE_HEAD).costs(split, **RATE, partition=partition)
    with pytest.raises(ArgumentError, match=message):
        layers.costs(split, partition=partition)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2_xl", 1.5576), ("gpt3_175b", 174.60), ("megatron_22b", 22.07),
        ("megatron_530b", 529.6), ("megatron_1t", 1008.0), ("llama2_7b", 6.738),
        ("llama2_13b", 13.016), ("llama2_70b", 68.977), ("llama3_8b", 8.030),
        ("llama3_70b", 70.554), ("llama3_405b", 405.85), ("mistral_7b", 7.2417),
        ("qwen3_8b", 8.191), ("qwen3_14b", 14.768), ("qwen3_32b", 32.762),
        ("nemotron4_15b", 15.628), ("nemotron4_340b", 341.03),
    ],
)  # fmt: skip
def test_parameters_of_published_models(name: str, billions: float) -> None:
    """Counts of the released weights, and of arXiv 2104.04473, table 1, for Megatron's."""
    assert ps.Transformer.preset(name).n_parameters / 1e9 == pytest.approx(billions, rel=2e-4)


def test_every_published_model_is_listed() -> None:
    table = ps.transformers()
    for name, row in table.iterrows():
        model = ps.Transformer.preset(str(name))
        assert (model.hidden_size, model.n_layers) == (row["hidden_size"], row["n_layers"])
        assert "arXiv" in row["source"] or "20" in row["source"]
    sizes = ["n_kv_heads", "head_size", "ffn_size"]
    assert table.loc["gpt3_175b", sizes].tolist() == [96, 128, 49152]
    assert table.loc["qwen3_32b", "head_size"] == 128
    assert not table.isna().any(axis=None)
    assert {str(table[name].dtype) for name in sizes} == {"int64"}


def test_a_preset_with_changes() -> None:
    short = ps.Transformer.preset("llama3_70b", n_layers=12, sequence_length=4096)
    assert (short.n_layers, short.sequence_length, short.ffn_size) == (12, 4096, 28672)
    with pytest.raises(UnknownNameError, match="'llama3'; did you mean 'llama3_405b' or"):
        ps.Transformer.preset("llama3")
    with pytest.raises(UnknownNameError, match="unknown attribute of a transformer 'n_layer'"):
        ps.Transformer.preset("llama3_70b", n_layer=12)


def test_heads_of_another_size() -> None:
    """Queries, keys and values by hand: 4 heads of 6 elements, 2 of them for keys, h = 10."""
    model = ps.Transformer(
        hidden_size=10, n_layers=1, n_heads=4, n_kv_heads=2, head_size=6, sequence_length=8,
        vocabulary_size=100, ffn_size=7,
    )  # fmt: skip
    assert (model.query_size, model.kv_size) == (24, 12)
    assert model.layer_matrices == 10 * (24 + 2 * 12) + 24 * 10 + 2 * 10 * 7
    outputs = (24 + 2 * 12) + 10 + 7 + 10
    assert model.layer_parameters == model.layer_matrices + outputs + 2 * 2 * 10
    assert model.core_flops(3) == 4 * 3 * 8 * 8 * 24
    shard = model.shard(microbatch_size=3)
    whole, split = 4 * 10 * 2 + 2 * 10, 2 * (24 + 2 * 12 + 24 + 7 + 7) + (2 + 1 + 2) * 4 * 8
    assert shard.layer_activation_bytes == 3 * 8 * (whole + split)
    table = model.kernels(ps.GPU(flops=1, bandwidth=1), microbatch_size=3)
    layer = table[table["part"] == "layer"].groupby("op")["flops"].sum()
    assert layer["F"] == model.layer_flops(3)
    assert layer["I"] == model.linear_flops(3) + 2 * model.core_flops(3)
    with pytest.raises(ArgumentError, match="n_heads=4 does not divide hidden_size=10"):
        ps.Transformer(
            hidden_size=10, n_layers=1, n_heads=4, sequence_length=8, vocabulary_size=100
        )

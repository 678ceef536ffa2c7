"""Costs of transformers against the formulas and tables of the papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_runs import published

import pipesim as ps
from pipesim.costs.rows import MEASURED, STAGE_ROWS

#: What follows from sizes; seconds of collectives are measured or the network's.
OTHERS = (*MEASURED.values(), "offload_bytes")
SIZED = [name for name, row in STAGE_ROWS.items() if not row.is_rare and name not in OTHERS]


FORMULAS = published("korthikanti_activation_formulas")["expected"]
TABLES = published("korthikanti_table3_4_5")
MEGATRON = published("megatron_formulas")["expected"]
SCALING = published("megatron_table1_weak_scaling")
ZERO_BUBBLE = published("zb_formulas")["expected"]
A100 = 312e12  # FLOP/s at peak in 16 bits, what both papers' percentages refer to


def gpt(row: dict[str, Any]) -> ps.Transformer:
    """Return the model of a row of either table."""
    return ps.Transformer(
        hidden_size=row["hidden"],
        n_layers=row["layers"],
        n_heads=row["heads"],
        sequence_length=2048,
        vocabulary_size=51200,
    )


MODELS = {name: gpt(row) for name, row in TABLES["inputs"]["models"].items()}
GPT3 = MODELS["175B"]

#: The texts of table 2 of arXiv 2205.05198, in Python.
BYTES: dict[str, Callable[..., float]] = {
    "sbh(34+5as/h)": lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    "sbh(10+24/t+5as/(ht))": lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    "sbh(34/t+5as/(ht))": lambda s, b, h, a, t: s * b * h * (34 / t + 5 * a * s / (h * t)),
    "sbh(10+24/t)": lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    "34sbh/t": lambda s, b, h, a, t: 34 * s * b * h / t,
    "2sbh": lambda s, b, h, a, t: 2 * s * b * h,
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {"tensor_parallel": 1},
    "TP": {},
    "TP+SP": {"sequence_parallel": True},
    "TP+selective": {"recompute": "selective"},
    "TP+SP+selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}


@pytest.mark.parametrize("technique", FORMULAS["bytes_per_layer"])
@pytest.mark.parametrize("name", MODELS)
def test_published_activation_bytes(name: str, technique: str) -> None:
    """Every row of table 2, for the paper's models and several group sizes."""
    model, formula = MODELS[name], BYTES[FORMULAS["bytes_per_layer"][technique]]
    for b, t in [(1, 1), (1, 8), (4, 2), (3, 16)]:
        shard = model.shard(**{"microbatch_size": b, "tensor_parallel": t, **TECHNIQUES[technique]})
        expected = formula(2048, b, model.hidden_size, model.n_heads, t)
        assert shard.layer_activation_bytes == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "saved"), [("175B", 70), ("530B", 65)])
def test_published_share_of_the_attention_core(name: str, saved: int) -> None:
    """Selective recompute saves 70 % and 65 % (arXiv 2205.05198, section 5)."""
    shards = [MODELS[name].shard(recompute=r) for r in ("none", "selective")]
    whole, selective = (shard.layer_activation_bytes for shard in shards)
    assert round(100 * (1 - selective / whole)) == saved


def test_published_reduction() -> None:
    """Both techniques together leave about a fifth of what tensor parallelism holds."""
    shares = {
        name: model.shard(
            tensor_parallel=8, sequence_parallel=True, recompute="selective"
        ).layer_activation_bytes
        / model.shard(tensor_parallel=8).layer_activation_bytes
        for name, model in MODELS.items()
    }
    by_hand = {"22B": 4.25 / (13 + 40 / 3), "175B": 4.25 / 23, "530B": 4.25 / 21, "1T": 4.25 / 21}
    assert shares == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("name", ["175B", "530B"])
def test_published_first_stage(name: str) -> None:
    """1F1B holds the activations of all layers on its first stage: as many micro-batches as stages.

    ``first_stage_1F1B``, and the embedding's mask, sbhp/t (section 4.3), on a simulated timeline.
    """
    assert FORMULAS["first_stage_1F1B"] == "(sbhL/t)(34+5as/h)"
    row, model = TABLES["inputs"]["models"][name], MODELS[name]
    p, t, sbh = row["pp"], row["tp"], 2048 * row["mbs"] * row["hidden"]
    costs = model.costs(
        p, microbatch_size=1, flops_per_second=1e14, tensor_parallel=t, sequence_parallel=True
    )
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", p, p)), costs)
    held = 2 * costs.per_stage("parameter_bytes", p) + costs.per_stage("optimizer_bytes", p)
    held[0] += costs.per_stage("backward_workspace_bytes", p)[0]  # of the B at the peak
    core = 5 * row["heads"] * 2048 / row["hidden"]
    expected = sbh * row["layers"] / t * (34 + core) + sbh * p / t
    assert timeline.memory.peak[0] - held[0] == pytest.approx(expected, rel=1e-9)


def interleaved(p: int, n_chunks: int, n_microbatches: int) -> ps.Schedule:
    """Return Megatron-LM's interleaved 1F1B (arXiv 2104.04473, section 2.2)."""
    cells = [
        (j // p, group * p + j % p)
        for group in range(n_microbatches // p)
        for j in range(p * n_chunks)
    ]
    orders = []
    for device in range(p):
        forward = [f"{chunk * p + device}F{m}" for chunk, m in cells]
        backward = [f"{(n_chunks - 1 - chunk) * p + device}B{m}" for chunk, m in cells]
        warm_up = 2 * (p - 1 - device) + (n_chunks - 1) * p
        pairs = zip(forward[warm_up:], backward, strict=False)
        steady = [action for pair in pairs for action in pair]
        orders.append(forward[:warm_up] + steady + backward[len(forward) - warm_up :])
    return ps.Schedule.from_orders(orders, placement=ps.Placement.looped(p, n_chunks))


@pytest.mark.parametrize("name", TABLES["inputs"]["interleave"])
def test_published_first_stage_interleaved(name: str) -> None:
    """Interleaving holds 1 + (p-1)/(pm) times that on device 0.

    The embedding's mask is kept for 2p micro-batches then, not for p: two rounds of a chunk.
    """
    assert FORMULAS["first_stage_interleaved"] == "times (1+(p-1)/(p m))"
    row, model = TABLES["inputs"]["models"][name], MODELS[name]
    m = TABLES["inputs"]["interleave"][name]
    p, t = row["pp"], row["tp"]
    shape: dict[str, Any] = {"tensor_parallel": t, "sequence_parallel": True}
    costs = model.costs(p * m, microbatch_size=1, flops_per_second=1e14, **shape)
    timeline = ps.simulate(ps.lower(interleaved(p, m, 2 * p)), costs)
    held = 2 * costs.per_stage("parameter_bytes", p * m)
    held += costs.per_stage("optimizer_bytes", p * m)
    held[0] += costs.per_stage("backward_workspace_bytes", p * m)[p]  # of the B at the peak
    shard = model.shard(**shape)
    layers = row["layers"] * shard.layer_activation_bytes * (1 + (p - 1) / (p * m))
    masks = 2 * p * shard.embedding_activation_bytes
    assert timeline.memory.peak[0] - held[::p].sum() == pytest.approx(layers + masks, rel=1e-9)


def test_published_ends_of_the_model() -> None:
    """Final norm, LM head and loss hold 4sbh/t(1 + v/h) (arXiv 2205.05198, section 4.3)."""
    for t in (1, 8):
        sbh = 2048 * 12288
        parts = GPT3.shard(tensor_parallel=t, sequence_parallel=True)
        expected = 4 * sbh / t * (1 + 51200 / 12288)
        assert parts.head_activation_bytes == pytest.approx(expected, rel=1e-12)
        assert parts.embedding_activation_bytes == sbh / t
        assert GPT3.shard(tensor_parallel=t).head_activation_bytes == pytest.approx(
            4 * sbh + 4 * 2048 * 51200 / t, rel=1e-12
        )


@pytest.mark.parametrize("name", MODELS)
def test_published_utilization(name: str) -> None:
    """MFU of table 5 from its iteration times, within the rounding of both.

    HFU comes out with the paper's own hardware FLOPs, which have 12Bssh a layer for selective
    recompute. One more forward of the core is 4Bssh, so that ours is at most 1.5 points lower.
    """
    row, expected = TABLES["inputs"]["models"][name], TABLES["expected"]["iteration_s"][name]
    model, batch = MODELS[name], row["gbs"]
    rounding = 0.005 / expected["present"] + 0.05 / expected["MFU"]
    share = 100 / (row["gpus"] * A100 * expected["present"])
    assert model.step_flops(batch) * share == pytest.approx(expected["MFU"], rel=rounding)
    h, layers = row["hidden"], row["layers"]
    hardware = 72 * batch * layers * 2048 * h**2
    hardware *= 1 + 2048 / (3 * h) + 51200 / (12 * h * layers)
    assert hardware * share == pytest.approx(expected["HFU"], rel=rounding)
    once = hardware - 8 * batch * 2048**2 * h * layers
    assert model.step_flops(batch, "selective") == pytest.approx(once, rel=1e-12)
    assert 0 < expected["HFU"] - model.step_flops(batch, "selective") * share < 1.5


@pytest.mark.parametrize(
    ("recompute", "row", "points"), [("selective", "selective", 5.0), ("full", "full_recompute", 6)]
)
def test_published_overhead_of_recompute(recompute: Any, row: str, points: float) -> None:
    """Table 4 measures 7 % and 39 % of a layer's time; FLOPs alone say 1.8 % and 33 %.

    What is recomputed is slower than the average FLOP: softmax and dropout are bound by memory,
    and messages of the tensor-parallel group are sent again.
    """
    times = TABLES["expected"]["layer_ms_22B"]
    measured = 100 * (times[row]["combined"] / times["baseline"]["combined"] - 1)
    model = MODELS["22B"]
    counted = 100 * model.recomputed_flops(4, recompute) / (3 * model.layer_flops(4))
    assert 0 < measured - counted < points


@pytest.mark.parametrize(
    ("row", "expected"), list(zip(SCALING["inputs"]["rows"], SCALING["expected"], strict=True))
)
def test_published_weak_scaling(row: dict[str, Any], expected: dict[str, float]) -> None:
    """Table 1 of arXiv 2104.04473: parameters, FLOPs, and rates that follow from each other.

    The time of training from our FLOPs is that of 8TP/(nX) and what this leaves out: attention
    cores and the LM head, up to 12 % in the smallest model. Rates are of the whole step, bubbles
    included, so that they cannot be predicted without the iterations' times.
    """
    model, n = gpt(row), row["gpus"]
    digits = 0 if row["params_B"] > 1000 else 1
    assert round(model.n_parameters / 1e9, digits) == row["params_B"]
    assert MEGATRON["flops"] == "96 B s l h^2 (1+s/(6h)+V/(16 l h))"
    batch, s, layers, h, v = row["batch"], 2048, row["layers"], row["hidden"], 51200
    flops = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.step_flops(batch, "full") == pytest.approx(flops, rel=1e-12)
    rate = expected["tflops_per_gpu"] * 1e12
    # With no device ever idle, the costs of all stages take the time that the rate stands for.
    costs = model.costs(
        row["pp"], microbatch_size=1, flops_per_second=rate, tensor_parallel=row["tp"],
        recompute="full",
    )  # fmt: skip
    of_stages = costs.per_stage("forward", row["pp"]) + costs.per_stage("backward", row["pp"])
    petaflops = flops / (batch * of_stages.sum() * row["tp"] / n) / 1e15
    rounding = 0.05 + n * 0.5e-3
    assert petaflops == pytest.approx(expected["aggregate_pflops"], abs=rounding)
    assert round(100 * rate / A100) == expected["pct_peak"]
    assert MEGATRON["train_time"] == "8 T P/(n X)"
    tokens = 300e9
    short = 8 * tokens * model.n_parameters / (n * rate)
    mfu = tokens / (batch * s) * model.step_flops(batch, "full") / (n * rate)
    cores_and_head = 16 * s * h * layers + 6 * h * v
    not_multiplied = 8 * (model.n_parameters - 12 * layers * h**2)
    left_out = (cores_and_head - not_multiplied) / (8 * model.n_parameters)
    assert mfu / short == pytest.approx(1 + left_out, rel=1e-12)
    assert 1.01 < mfu / short < 1.12


def test_published_parameters_formula() -> None:
    """P = 12lhh(1 + 13/(12h) + (V+s)/(12lh)) (arXiv 2104.04473, equation 2), and a final norm."""
    for model in MODELS.values():
        layers, h = model.n_layers, model.hidden_size
        formula = 12 * layers * h**2 + 13 * layers * h + (51200 + 2048) * h
        assert model.n_parameters == formula + 2 * h


@pytest.mark.parametrize(
    ("sizes", "billions", "tolerance"),
    [((4096, 32, 32, 14336), 8, 0.01), ((8192, 80, 64, 28672), 70, 0.01),
     ((16384, 126, 128, 53248), 405, 0.0025)],
)  # fmt: skip
def test_published_llama_3(sizes: tuple[int, ...], billions: float, tolerance: float) -> None:
    """Table 3 of arXiv 2407.21783 (8 heads of keys and values, 128 256 words)."""
    h, layers, heads, ffn = sizes
    model = ps.Transformer(
        hidden_size=h, n_layers=layers, n_heads=heads, ffn_size=ffn, n_kv_heads=8,
        sequence_length=8192, vocabulary_size=128256, gated_mlp=True, biases=False,
        learned_positions=False, dropout=False, tied_embeddings=False,
    )  # fmt: skip
    assert model.n_parameters == pytest.approx(billions * 1e9, rel=tolerance)


def test_published_gpt_3() -> None:
    """175 billion parameters with GPT-3's own vocabulary (arXiv 2005.14165, table 2.1)."""
    model = ps.Transformer(
        hidden_size=12288, n_layers=96, n_heads=96, sequence_length=2048, vocabulary_size=50257
    )
    assert round(model.n_parameters / 1e9) == 175


def test_published_split_backward() -> None:
    """Table 1 of arXiv 2401.10241: FLOPs and bytes of F, I (its B) and W of a layer."""
    assert ZERO_BUBBLE["flops_per_layer"] == {
        "F": "sbh(24h+4s)", "B": "sbh(24h+8s)", "W": "24sbh^2"
    }  # fmt: skip
    assert ZERO_BUBBLE["act_per_layer"] == {"M_B": "sb(34h+5as)", "M_W": "32sbh"}
    s, b, h, a = 2048, 2, 12288, 96
    costs = GPT3.costs([47, 1, 48], microbatch_size=b, flops_per_second=1.0)
    middle = {name: costs.per_stage(name, 3)[1] for name in SIZED}
    assert middle["forward"] == s * b * h * (24 * h + 4 * s)
    assert middle["input_grad"] == s * b * h * (24 * h + 8 * s)
    assert middle["weight_grad"] == 24 * s * b * h**2
    assert middle["backward"] == middle["input_grad"] + middle["weight_grad"]
    assert middle["activation_bytes"] == s * b * (34 * h + 5 * a * s)
    assert middle["weight_grad_bytes"] == 32 * s * b * h
    assert middle["output_bytes"] == 2 * s * b * h  # bsh elements (arXiv 2104.04473, section 4.1)

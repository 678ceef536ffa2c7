"""Kernels of experts by framework: products, copies of tokens, router, biases; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

import pipesim as ps

#: 64 tokens of 16 elements; each goes to 2 of 4 experts of 32, and to a shared one.
H, U, TOKENS, K = 16, 32, 64, 2
MODEL = ps.Transformer(
    hidden_size=H, n_layers=1, n_heads=2, sequence_length=TOKENS, vocabulary_size=100,
    ffn_size=U, gated_mlp=True, biases=False, learned_positions=False, dropout=False,
    n_experts=4, experts_per_token=K, shared_experts=1,
)  # fmt: skip
#: Bytes of the tokens of a GPU.
ROWS = 2 * TOKENS * H
GPU = ps.GPU(flops=1e12, bandwidth=1e11)


def kernels(
    framework: ps.Framework, model: ps.Transformer = MODEL, **options: Any
) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the kernels of a layer by operation and name."""
    options = {"microbatch_size": 1, "gpu": GPU, **options}
    table = model.kernels(framework=framework, **options)
    return {
        (str(op), str(name)): own
        for (op, name), own in table[table["part"] == "expert layer"].groupby(["op", "kernel"])
    }


@pytest.mark.parametrize(
    ("method", "n_kernels", "rows", "waves"),
    [
        ("streams", 4, 128, 1.0),
        ("grouped", 1, 512, 5 / 2 / 0.93),
        ("sequential", 4, 128, 5 * 8 / 0.93),
    ],
)
def test_products_of_experts(method: Any, n_kernels: int, rows: int, waves: float) -> None:
    """Four experts of 32 tokens and 64 outputs, on five multiprocessors.

    In one kernel each expert has tiles of 128 rows, as many elements as two tiles of 128 by 128.
    Alone, an expert's product is an eighth of such a tile. They reach 93 % of the rate.
    """
    gpu = replace(GPU, multiprocessors=5, bandwidth=1e30)
    product = kernels(ps.Framework(expert_products=method), gpu=gpu)["F", "experts up"]
    flops = 2 * rows * 2 * U * H
    assert product["n_kernels"].item() == n_kernels
    assert product["flops"].item() == flops
    assert product["seconds"].item() == pytest.approx(flops * waves / 1e12)


def test_copies_of_tokens() -> None:
    """Fused, 1 + k accesses; unfused, copies of k tokens, and sums into zeros."""
    for fused, (copied, summed) in ((True, (3, 3)), (False, (4, 7))):
        table = kernels(ps.Framework(fused_permute=fused))
        accesses = [
            table[op, name]["bytes"].item() / ROWS
            for name in ("permutation", "unpermutation")
            for op in "FI"
        ]
        assert accesses == [copied, summed, summed, copied]


def test_router_in_few_kernels() -> None:
    """Three of each direction read and write scores in 32 bits."""
    table = kernels(ps.Framework(fused_router=True))
    scores = 2 * 4 * TOKENS * 4
    for op in "FI":
        own = table[op, "top-k"]
        assert (own["n_kernels"].item(), own["bytes"].item()) == (3, 3 * scores)


def test_biases_of_results() -> None:
    """2 and 4 accesses in 16 bits, 6 and 8 in 32 bits; two and five kernels an expert."""
    biased = replace(MODEL, biases=True)
    assert ("F", "experts bias") not in kernels(ps.Framework(), biased)
    table = kernels(ps.Framework(fused_expert_bias=False), biased)
    elements = TOKENS * K * H
    for op, n, nbytes in (("F", 10, 28), ("I", 22, 40)):
        own = table[op, "experts bias"]
        assert (own["n_kernels"].item(), own["bytes"].item()) == (n, nbytes * elements)


def test_padding_and_casts_below_16_bits() -> None:
    """Tokens are padded and put back, each way; a cast is a kernel for each expert."""
    options: dict[str, Any] = {"gpu": replace(GPU, fp8_ratio=2.0), "precision": "fp8"}
    table = kernels(ps.Framework(expert_padding=True), **options)
    for op in "FI":
        assert table[op, "experts padding"]["bytes"].tolist() == [2 * K * ROWS] * 2
    assert table["F", "experts up cast"]["n_kernels"].item() == 4
    grouped = kernels(ps.Framework(expert_products="grouped"), **options)
    assert grouped["F", "experts up cast"]["n_kernels"].item() == 1
    plain = kernels(ps.Framework(expert_padding=True))  # 16 bits need no padding
    assert ("F", "experts padding") not in plain


@pytest.mark.parametrize("port", [1e6, 1e30])
def test_shared_experts_behind_exchanges(port: float) -> None:
    """``up`` hides behind a dispatch, ``down`` behind a combine; as far as these last."""
    network = ps.Network(nodes=ps.Nodes(8, 0.0, port, 0.0, 1e30))
    one, other = (
        MODEL.costs(
            1, microbatch_size=1, gpu=GPU, expert_parallel=4, network=network,
            framework=ps.Framework(shared_expert_overlap=overlap),
        )
        for overlap in (False, True)
    )  # fmt: skip
    shared = {"F": 0.0, "I": 0.0, "W": 0.0}
    for (op, name), own in kernels(ps.Framework(), expert_parallel=4).items():
        if name.startswith("shared ") and name != "shared sum":
            shared[op] += float(own["seconds"].sum())
    for field, op in (("forward", "F"), ("backward", "I"), ("input_grad", "I")):
        saved = one.per_stage(field, 1)[0] - other.per_stage(field, 1)[0]
        assert saved == pytest.approx(shared[op] * (port == 1e6))
    assert one.weight_grad == other.weight_grad

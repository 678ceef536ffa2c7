"""Seconds of fused attention and of experts' products, against measured kernels of two GPUs.

``simumax_kernels.json`` has the measured shares of the nominal FLOP/s. The presets' rates of
products are those of long training steps, about a tenth below those of short kernels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.models.layer_kernels import KernelSizes
from pipesim.models.shard_sizes import Matrix

MEASURED = json.loads((Path(__file__).parent / "simumax_kernels.json").read_text())["expected"]
GPUS = ("a100_pcie", "b200")
LLAMA = ps.Transformer.preset("llama3_70b", n_layers=1)
LATENT = ps.Transformer.preset("deepseek_v2", n_layers=1)


def attention_seconds(gpu: ps.GPU, tokens: int, heads: int, size: int) -> float:
    """Return the predicted seconds of the core of a layer, forward and backward."""
    sizes: dict[str, Any] = {"n_heads": heads, "sequence_length": tokens}
    if size == 192:
        model = replace(LATENT, n_kv_heads=heads, **sizes)
    else:
        model = replace(LLAMA, n_kv_heads=1, head_size=size, **sizes)
    table = model.kernels(gpu, microbatch_size=1, flash_attention=True)
    return float(table.loc[table["kernel"] == "attention", "seconds"].sum())


def measured_seconds(gpu: ps.GPU, row: list[Any]) -> float:
    """Return the measured seconds of a row of attention."""
    tokens, heads, size, value_size, forward, backward = row
    flops = 2 * tokens**2 * heads * (size + value_size)
    return float(flops / gpu.peak * (1 / forward + 2.5 / backward))


@pytest.mark.parametrize("name", GPUS)
def test_attention_is_as_fast_as_measured(name: str) -> None:
    """Within 13 % from 8 heads on; few heads are slow, since each of their tiles counts."""
    gpu = ps.GPU.preset(name)
    rows = [row for row in MEASURED[name]["attention"] if row[0] == 4096 and row[1] >= 8]
    ratios = [attention_seconds(gpu, *row[:3]) / measured_seconds(gpu, row) for row in rows]
    assert len(ratios) >= 8
    assert ratios == pytest.approx([1] * len(ratios), rel=0.13)
    assert np.mean(ratios) == pytest.approx(1, abs=0.04)


def test_attention_to_long_sequences() -> None:
    """32,768 and 131,072 tokens on B200: within 13 %, but for one kernel of 25 %."""
    gpu = ps.GPU.preset("b200")
    rows = [row for row in MEASURED["b200"]["attention"] if row[0] > 4096]
    ratios = sorted(attention_seconds(gpu, *row[:3]) / measured_seconds(gpu, row) for row in rows)
    assert len(ratios) == 6
    assert ratios[:-1] == pytest.approx([1] * 5, rel=0.13)
    assert ratios[-1] == pytest.approx(1.25, abs=0.03)


def product_seconds(gpu: ps.GPU, row: list[Any], *, is_grouped: bool) -> float:
    """Return the predicted seconds of the products of experts."""
    n, rows, columns, depth, kind, _ = row
    sizes = KernelSizes(replace(LATENT, bytes_per_gradient=4).shard())
    if kind == "weight":
        (kernel,) = sizes.grouped_weight_grad("experts", Matrix(depth, columns), n * rows, n)
    else:
        shape = (depth, columns) if kind == "forward" else (columns, depth)
        (kernel,) = sizes.grouped("experts", Matrix(*shape), n * rows, n)
    return gpu.kernel_seconds(kernel._replace(is_grouped=is_grouped)) - n * gpu.overhead


@pytest.mark.parametrize("name", GPUS)
def test_products_of_experts(name: str) -> None:
    """Mean errors of 15 and 17 %; 20 and 31 % if each product were one of its own."""
    gpu, rows = ps.GPU.preset(name), MEASURED[name]["products"]
    errors = {}
    for is_grouped in (True, False):
        ratios = [
            product_seconds(gpu, row, is_grouped=is_grouped) * row[5] * gpu.peak
            / (2 * row[0] * row[1] * row[2] * row[3])
            for row in rows
        ]  # fmt: skip
        errors[is_grouped] = float(np.abs(np.log(ratios)).mean())
    expected = {"a100_pcie": (0.15, 0.20), "b200": (0.17, 0.31)}[name]
    assert (errors[True], errors[False]) == pytest.approx(expected, abs=0.01)

"""Published peaks of GPU memory, predicted from models' sizes.

- Megatron-LM on 8 B200 (SimuMax's release, ``tests/published/simumax_b200_subset.json``): dense
  models without context parallelism. Measured is PyTorch's peak of allocated bytes on the fullest
  GPU. bfloat16, main gradients in 32 bits, distributed optimizer, FlashAttention, sequence
  parallelism with tensor parallelism, and Transformer Engine's fused loss ("cef").
- Nothing is fitted. Then one constant is: bytes that every GPU holds besides (workspaces of cuBLAS
  and NCCL, masks, tables of positions), as the mean of the other rows, for each row in turn.
- Activations of a layer, and of the first stage, as formulas of Korthikanti et al., arXiv
  2205.05198, table 2.

Llama 3 405B has 16 heads of keys and values in SimuMax's configuration (``configs/models``), and 8
in its paper; both are predicted. The rows were at hand when the terms were written, so that errors
on other rows may be larger. SimuMax's own predictions, stage by stage, showed which buffers exist.

``python benchmarks/published_memory.py`` prints the tables and writes them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from _machine import ROOT, publish, table

import pipesim as ps

PUBLISHED = ROOT / "tests" / "published"
GIB = 2**30
PARTS = ["parameters", "gradients", "optimizer", "activations", "workspace", "buffers"]


class Row(NamedTuple):
    """A measured configuration; ``published`` has the peaks by stage that SimuMax predicts."""

    case: str
    model: ps.Transformer
    tensor: int
    pipeline: int
    n_microbatches: int
    measured: float
    published: dict[str, float]


def rows(**changes: Any) -> Iterator[Row]:
    """Yield the dense rows; ``changes`` are of the sizes of Llama 3 405B."""
    for row in json.loads((PUBLISHED / "simumax_b200_subset.json").read_text())["expected"]:
        sizes = re.fullmatch(r"tp(\d+)pp(\d+)", row["parallel"])
        if sizes is None:  # experts or context parallelism
            continue
        name = row["model"].replace("-", "_")
        model = ps.Transformer.preset(
            name,
            n_layers=row["layer_num"],
            sequence_length=4096,
            bytes_per_gradient=4,
            **(changes if name == "llama3_405b" else {}),
        )
        peaks = row["peak_alloc_by_stage_gib"]
        tensor, pipeline = map(int, sizes.groups())
        yield Row(
            row["case"], model, tensor, pipeline, row["mbc"], row["real_alloc_gib"] * GIB, peaks
        )


def breakdown(row: Row) -> pd.DataFrame:
    """Return the predicted bytes of a device of each stage at its peak."""
    costs = row.model.costs(
        row.pipeline,
        microbatch_size=1,
        flops_per_second=1e15,  # memory does not depend on it
        tensor_parallel=row.tensor,
        sequence_parallel=row.tensor > 1,
        flash_attention=True,
        fused_loss=True,
        partition="even",
    )
    graph = ps.lower(
        ps.schedule("1f1b", row.pipeline, row.n_microbatches),
        n_replicas=8 // (row.tensor * row.pipeline),
        shard_optimizer=True,
    )
    return ps.simulate(graph, costs).memory.breakdown()[: row.pipeline]


def error(predicted: float, measured: float) -> str:
    """Return by how much a prediction differs, in per cent."""
    return f"{100 * (predicted / measured - 1):+.2f}%"


def peak_lines() -> list[str]:
    """Return predicted and measured peaks, by row."""
    body, fullest, measured = [], [], []
    for row, own in zip(rows(n_kv_heads=16), rows(), strict=True):
        peak, other = (float(breakdown(x)["total"].max()) for x in (row, own))
        fullest.append(peak)
        measured.append(row.measured)
        published = max(row.published.values()) * GIB
        values = (row.measured, peak, published)
        body.append(
            [row.case, *(f"{value / GIB:.2f}" for value in values), error(peak, row.measured),
             error(published, row.measured), error(other, own.measured)]
        )  # fmt: skip
    errors = np.abs(np.array(fullest) / measured - 1)
    rest = np.array(measured) - fullest
    others = (rest.sum() - rest) / (len(rest) - 1)
    left_out = np.abs((fullest + others) / measured - 1)
    head = ["case", "measured", "predicted", "SimuMax", "error", "SimuMax's", "8 kv heads"]
    return [
        "Peak of the fullest GPU (GiB), nothing fitted:",
        *table(head, body, 1),
        f"mean error {errors.mean():.2%}, largest {errors.max():.2%}",
        f"with a constant of {rest.mean() / GIB:.3f} GiB a GPU, each row left out in turn: mean "
        f"{left_out.mean():.2%}, largest {left_out.max():.2%}",
    ]


def part_lines() -> list[str]:
    """Return the parts of each stage's peak."""
    body = []
    for row in rows(n_kv_heads=16):
        for (stage, published), (_, parts) in zip(
            row.published.items(), breakdown(row).iterrows(), strict=True
        ):
            values = [*parts[PARTS], parts["total"], published * GIB]
            body.append([f"{row.case}, {stage}", *(f"{value / GIB:.2f}" for value in values)])
    head = ["stage", *PARTS, "total", "SimuMax"]
    return ["Bytes at the peak of each stage (GiB):", *table(head, body, 1)]


def activation_lines() -> list[str]:
    """Return activations of a layer over sbh, and those of table 2."""
    models = json.loads((PUBLISHED / "korthikanti_table3_4_5.json").read_text())["inputs"]["models"]
    body = []
    for name, sizes in models.items():
        h, a, t = sizes["hidden"], sizes["heads"], sizes["tp"]
        model = ps.Transformer(
            hidden_size=h, n_layers=sizes["layers"], n_heads=a, sequence_length=2048,
            vocabulary_size=51200,
        )  # fmt: skip
        core = 5 * a * 2048 / h
        for technique, formula, settings in (
            ("TP", 10 + 24 / t + core / t, {}),
            ("TP+SP", 34 / t + core / t, {"sequence_parallel": True}),
            ("TP+selective", 10 + 24 / t, {"recompute": "selective"}),
            ("TP+full", 2.0, {"recompute": "full"}),
        ):
            shard = model.shard(tensor_parallel=t, **settings)
            bytes_per_sbh = shard.layer_activation_bytes / (2048 * h)
            body.append([name, technique, f"{formula:.4f}", f"{bytes_per_sbh:.4f}"])
    head = ["model", "technique", "table 2", "predicted"]
    return ["Activations of a layer (bytes / sbh):", *table(head, body, 2)]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "published_memory.txt")
    options = parser.parse_args()
    lines = ["# python benchmarks/published_memory.py", "", *peak_lines(), "", *part_lines(), ""]
    publish([*lines, *activation_lines()], options.out)


if __name__ == "__main__":
    main()

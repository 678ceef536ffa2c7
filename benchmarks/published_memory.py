"""Published peaks of GPU memory, predicted from models' sizes.

- Megatron-LM on 8 B200 (SimuMax's release, ``tests/published/simumax_b200_subset.json``): dense
  models without context parallelism. Measured is PyTorch's peak of allocated bytes on the fullest
  GPU. bfloat16, main gradients in 32 bits, distributed optimizer, FlashAttention, sequence
  parallelism with tensor parallelism, and Transformer Engine's fused loss ("cef").
- Nothing is fitted. Then one constant is: bytes that every GPU holds besides (workspaces of cuBLAS
  and NCCL, masks, tables of positions), as the mean of the other rows, for each row in turn.
- Activations of a layer, and of the first stage, as formulas of Korthikanti et al., arXiv
  2205.05198, table 2.
- Published steps of `_published_runs`, which fit in memory as they ran: bytes of the fullest device
  of the fullest run of each set, over those that tensors may take by the preset of its GPU.
  Nemotron-4 340B and Llama 3.1 405B are on the GPUs on which NVIDIA trains them with NeMo.

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
from _published_runs import published_runs

import pipesim as ps
from pipesim.simulation.simulate import predict_timeline

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


def run_lines() -> list[str]:
    """Return how much of their memory published runs are predicted to need."""
    body, n_runs, n_fit = [], 0, 0
    for steps in published_runs():
        gpu = ps.GPU.preset(steps.gpu)
        assert gpu.memory is not None
        peaks = []
        for row, step in zip(steps.rows, steps.steps, strict=True):
            network = steps.network.grouped(step.gpus_per_device)
            costs = step.model.costs(
                step.layers_per_stage, gpu=gpu, network=network, **step.options
            )
            peaks.append((fullest(predict_timeline(step.graph, costs)), row.get("label", "")))
        peak, label = max(peaks, key=lambda x: x[0]["total"])
        fit = sum(x["total"] <= gpu.memory for x, _ in peaks)
        n_runs, n_fit = n_runs + len(peaks), n_fit + fit
        shares = [peak[x] / gpu.memory for x in ("total", *PARTS)]
        body.append(
            [steps.name, f"{fit} of {len(peaks)}", *(f"{x:.1%}" for x in shares), f"{label:.45}"]
        )
    for name, layers, devices, chunks, context, replicas in LARGE:
        costs, graph = nemo(name, layers, devices, chunks, context, replicas)
        peak = fullest(predict_timeline(graph, costs))
        memory = ps.GPU.preset("h100_sxm").memory or 0.0
        n_gpus = 8 * devices * context * replicas
        shares = [peak[x] / memory for x in ("total", *PARTS)]
        body.append(["NeMo", "", *(f"{x:.1%}" for x in shares), f"{name} on {n_gpus} H100"])
    head = ["set", "fit", "fullest", *PARTS, "run"]
    return [
        f"Published runs: {n_fit} of {n_runs} are predicted to fit in the memory that tensors may "
        "take. Shares of it:",
        *table(head, body, 1),
    ]


#: Models that NVIDIA trains with 8 GPUs a layer: layers of stages, devices, chunks, context
#: parallelism and replicas.
LARGE = [
    ("nemotron4_340b", [1] * 96, 8, 12, 1, 2),
    ("llama3_405b", [1, *[2] * 62, 1], 8, 8, 2, 4),
]


def nemo(
    name: str, layers: list[int], devices: int, chunks: int, context: int, replicas: int
) -> tuple[ps.Costs, ps.TaskGraph]:
    """Return costs and graph of a model with NeMo, of 8 micro-batches a device."""
    framework = ps.Framework.preset("nemo_2025")
    costs = ps.Transformer.preset(name, bytes_per_gradient=2).costs(
        layers, gpu="h100_sxm", microbatch_size=1, tensor_parallel=8, sequence_parallel=True,
        context_parallel=context, flash_attention=True, framework=framework,
        network=ps.Network.preset("dgx_h100", gpus_per_device=8 * context),
    )  # fmt: skip
    graph = ps.lower(
        ps.schedule("interleaved_1f1b", devices, 8 * devices, n_chunks=chunks),
        n_replicas=replicas, shard_optimizer=True, framework=framework,
    )  # fmt: skip
    return costs, graph


def fullest(timeline: ps.Timeline) -> pd.Series:
    """Return the bytes of the fullest device at its peak, by kind."""
    parts = timeline.memory.breakdown()
    return parts.loc[parts["total"].idxmax()]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "published_memory.txt")
    options = parser.parse_args()
    lines = ["# python benchmarks/published_memory.py", "", *peak_lines(), "", *part_lines(), ""]
    publish([*lines, *activation_lines(), "", *run_lines()], options.out)


if __name__ == "__main__":
    main()

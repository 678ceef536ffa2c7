"""SOK's published iterations of DLRM on 8 GPUs, predicted from data sheets and one scalar.

Rows are those of HugeCTR's sparse_operation_kit/documents/tutorials/DLRM_Benchmark: A100 and V100,
FP32 and mixed precision (AMP), two batch sizes, TensorFlow's interaction and one of its own.
Seconds follow from `pipeexec.demo_models.dlrm.TERABYTE.costs`; fitted is one scalar, the part of
the nominal rates that GPUs, their memories and NVLink reach.

- one fit: on the first row of each interaction (A100, FP32, 65,536 samples); all others predicted.
- batch size: on 65,536 samples of each GPU and precision; 55,296 predicted.
- exchanges: what 8 GPUs add to one in SOK's demo of dense embeddings (100 slots of 10 keys, vectors
  of 4, 8,192 samples a GPU), and how long its keys, vectors and gradients take over NVLink. Nothing
  is fitted.

Assumed: A100s of 80 GB; FP32 on an A100 is TF32, TensorFlow's default; with AMP activations,
vectors and gradients have 16 bits; keys follow Zipf's law (`pipeexec.demo_models.dlrm.SKEW`),
each sent once, though SOK does that (``--compress``) in FP32 alone; the host launches a kernel in
5 us, and a kernel takes 2 us beside its work.

``python benchmarks/recommender.py`` prints the tables and writes them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _machine import ROOT, header, publish, table

import pipesim as ps
from pipeexec.demo_models.dlrm import TERABYTE

OUT = ROOT / "results" / "benchmarks" / "recommender.txt"
PUBLISHED = ROOT / "tests" / "published" / "sok_dlrm.json"
N_GPUS, NVLINK_LATENCY = 8, 3.4e-6
LAUNCH, OVERHEAD = 5e-6, 2e-6
COLUMNS = (
    "interaction", "GPU", "batch", "precision", "part", "published", "predicted", "error",
)  # fmt: skip
INTERACTIONS = {"TensorFlow's": "", "its own": "_custom_interact"}


class Sheet(NamedTuple):
    """Nominal rates: operations a second by precision, bytes a second of memory and NVLink."""

    flops: dict[str, float]
    memory: float
    nvlink: float


#: NVIDIA's data sheets, without sparsity; NVLink each way.
SHEETS = {
    "A100": Sheet({"FP32": 156e12, "AMP": 312e12}, 2.039e12, 300e9),
    "V100": Sheet({"FP32": 15.7e12, "AMP": 125e12}, 0.9e12, 150e9),
}
GRAPH = ps.lower(
    ps.schedule("looped_bfs", 1, 1, n_chunks=2), n_replicas=N_GPUS, sharded=[0], hosts="per_device"
)


def milliseconds(gpu: str, batch: int, precision: str, part: float) -> float:
    """Return the simulated step."""
    sheet = SHEETS[gpu]
    device = ps.GPU(
        flops=sheet.flops[precision], bandwidth=sheet.memory, launch=LAUNCH, overhead=OVERHEAD
    )
    nodes = ps.Nodes(N_GPUS, port_latency=NVLINK_LATENCY, port_bandwidth=sheet.nvlink * part)
    costs = TERABYTE.costs(
        device.scaled(part),
        batch // N_GPUS,
        n_replicas=N_GPUS,
        network=ps.Network(nodes=nodes),
        dtype=torch.half if precision == "AMP" else torch.float32,
    )
    return 1e3 * ps.simulate(GRAPH, costs).makespan


def fit(gpu: str, batch: int, precision: str, published: float) -> float:
    """Return the part of the rates at which the step takes as long as published, by bisection."""
    low, high = 0.05, 1.0
    while high - low > 1e-3:
        part = (low + high) / 2
        is_slow = milliseconds(gpu, batch, precision, part) > published
        low, high = (part, high) if is_slow else (low, part)
    return high


def one_fit(published: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a line for each row, predicted with the scalar of the first one."""
    for name, suffix in INTERACTIONS.items():
        batch, precision, wanted, _ = published[f"8xA100{suffix}"][0]
        part = fit("A100", batch, precision, wanted)
        for gpu in SHEETS:
            for batch, precision, wanted, _ in published[f"8x{gpu}{suffix}"]:
                yield _line(name, gpu, batch, precision, wanted, part)


def batch_size(published: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a line for each smaller batch, predicted with the scalar of the larger."""
    for name, suffix in INTERACTIONS.items():
        for gpu in SHEETS:
            rows = {tuple(row[:2]): row[2] for row in published[f"8x{gpu}{suffix}"]}
            for precision in ("FP32", "AMP"):
                part = fit(gpu, 65536, precision, rows[65536, precision])
                yield _line(name, gpu, 55296, precision, rows[55296, precision], part)


def _line(
    interaction: str, gpu: str, batch: int, precision: str, published: float, part: float
) -> list[str]:
    got = milliseconds(gpu, batch, precision, part)
    return [
        interaction, gpu, f"{batch:,}", precision, f"{part:.2f}", f"{published:.2f}", f"{got:.2f}",
        f"{got / published - 1:+.0%}",
    ]  # fmt: skip


def exchanges() -> list[str]:
    """Return published and predicted milliseconds that 8 GPUs take more than one."""
    n_keys, dim = 8192 * 100 * 10, 4
    network = ps.Network.preset("dgx_a100", 1.0)
    gpus = range(N_GPUS)
    keys, vectors = (network.all_to_all(n * n_keys, gpus) for n in (8, 4 * dim))
    return [f"{45.36 - 25.90:.2f}", f"{1e3 * (keys + 2 * vectors):.2f}"]


def tables() -> Iterator[str]:
    """Yield the lines of all tables."""
    published = json.loads(PUBLISHED.read_text())["expected"]
    yield "One fit; ms of an iteration"
    yield from table(COLUMNS, list(one_fit(published)), 4)
    yield from ("", "Batch size; ms of an iteration")
    yield from table(COLUMNS, list(batch_size(published)), 4)
    yield from ("", "What 8 GPUs add to one in the demo of dense embeddings, ms")
    yield from table(("published", "predicted: exchanges"), [exchanges()], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    args = parser.parse_args()
    publish([*header(["torch", "numpy"]), "", *tables()], args.out)


if __name__ == "__main__":
    main()

"""Published steps with experts and with context parallelism, predicted from models' sizes.

- Rows: Megatron-LM on 8 B200 (SimuMax's release, ``tests/published/simumax_b200_subset.json``):
  DeepSeek-V2 of four layers with expert parallelism, and Llama 3 70B of twelve layers with context
  parallelism. Measured are seconds of a step, and PyTorch's peak of allocated bytes on the fullest
  GPU. SimuMax's scripts (``simu_tools/megatron_scripts``) have all experts filled to a capacity of
  1, and exchange tokens for heads (``--cp-comm-type a2a``). Otherwise the runs are those of
  ``published_memory.py``.
- Nothing is fitted to these rows. Memory depends on no constant. Time is predicted by presets at
  0.7 of nominal bandwidths; and by FLOP/s and network efficiency that suit the six dense rows.
- Megatron-LM at the commit of the runs (23e00ed) scales, checks and clips gradients in passes of
  their own, so that all rows have ``gradient_passes``. Experts filled to a capacity have counts
  of tokens that the host knows: it waits for no counts (``_maybe_dtoh_and_synchronize``).
- Rates of attention, of products of experts and of permutations rest on measured kernels of the
  same source (``tests/published/test_kernels_published.py``).
- Not modelled: SimuMax's measured all-to-all has 41 to 58 us beside its bytes, and 0.64 of the
  nominal bandwidth, here 13 us and 0.7; kernels of the router other than their bytes and overhead;
  the host's time for each of the experts' parameters.

The rows were at hand when the terms were written, so that errors on other rows may be larger.

``python benchmarks/published_experts.py`` prints the table and writes it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _machine import ROOT, publish, table
from _published_steps import EFFICIENCY, published_steps

import pipesim as ps

PUBLISHED = ROOT / "tests" / "published"
GIB = 2**30
NAMES = {"deepseekv2": "deepseek_v2", "llama3-70b": "llama3_70b"}
#: GPU, and network of groups of so many GPUs.
Rates = tuple[ps.GPU, Callable[[int], ps.Network]]


def rows() -> list[dict[str, Any]]:
    """Return the rows with experts or context parallelism."""
    listed = json.loads((PUBLISHED / "simumax_b200_subset.json").read_text())["expected"]
    return [row for row in listed if re.search("ep|cp", row["parallel"])]


def step(row: dict[str, Any], rates: Rates) -> ps.Timeline:
    """Return the predicted step of a row."""
    kinds = dict(re.findall(r"(tp|cp|ep|pp)(\d+)", row["parallel"]))
    t, c, x, p = (int(kinds.get(kind, 1)) for kind in ("tp", "cp", "ep", "pp"))
    layout = ps.Layout(
        tensor_parallel=t, context_parallel=c, expert_parallel=x, pipeline_parallel=p,
        data_parallel=8 // (t * c * p), available_gpus=8,
    )  # fmt: skip
    length = re.search(r"seq(\d+)", row["case"])
    model = ps.Transformer.preset(
        NAMES[row["model"]], n_layers=row["layer_num"], bytes_per_gradient=4,
        sequence_length=int(length[1]) if length else 4096,
    )  # fmt: skip
    gpu, network = rates
    costs = model.costs(
        p, microbatch_size=1, gpu=gpu, network=network(layout.gpus_per_device), partition="even",
        sequence_parallel=t > 1, flash_attention=True, fused_loss=True,
        context_exchange="all_to_all", gradient_passes=True, **layout.sharding,
    )  # fmt: skip
    schedule = ps.schedule("1f1b", p, row["mbc"])
    graph = ps.lower(schedule, shard_optimizer=True, overlap=False, **layout.lowering)
    return ps.simulate(graph, costs)


def preset_rates() -> Rates:
    """Return the preset of the GPU and of its network."""
    return ps.GPU.preset("b200"), ps.Network.preset("dgx_b200", EFFICIENCY).grouped


def dense_rates() -> tuple[Rates, str]:
    """Return constants that suit the dense rows, and their errors on these as text."""
    (dense,) = (steps for steps in published_steps() if steps.name == "B200")
    gpu = ps.GPU.preset("b200")
    fitted = ps.GPU.fit(
        dense.rows, gpu=gpu, network=dense.network, constants=["flops", "network_efficiency"],
        progress=False,
    )  # fmt: skip
    errors = np.abs(dense.predicted_with(fitted) / dense.seconds - 1)
    text = (
        f"Constants of the {len(dense.rows)} dense rows: {fitted.gpu.flops:.3g} FLOP/s, network "
        f"efficiency {fitted.network_efficiency * EFFICIENCY:.2f} of nominal; mean error on these "
        f"{errors.mean():.1%}, largest {errors.max():.1%}"
    )
    return (fitted.gpu, fitted.network), text


def error(predicted: float, measured: float) -> str:
    """Return by how much a prediction differs, in per cent."""
    return f"{100 * (predicted / measured - 1):+.1f}%"


def lines() -> list[str]:
    """Return the tables of times and of peaks."""
    presets, (dense, text) = preset_rates(), dense_rates()
    times, peaks = [], []
    for row in rows():
        measured = row["real_ms"] / 1e3
        first, second = (step(row, rates) for rates in (presets, dense))
        times.append([
            row["case"], *(f"{1e3 * x:.1f}" for x in (measured, first.makespan, second.makespan)),
            *(error(x, measured) for x in (first.makespan, second.makespan)),
            error(row["perf_ms"], row["real_ms"]),
        ])  # fmt: skip
        peak = float(first.memory.peak.max()) / GIB
        peaks.append([
            row["case"], f"{row['real_alloc_gib']:.2f}", f"{peak:.2f}",
            f"{100 * (peak / row['real_alloc_gib'] - 1):+.2f}%",
            f"{100 * (row['perf_alloc_gib'] / row['real_alloc_gib'] - 1):+.2f}%",
        ])  # fmt: skip
    head = ["case", "measured", "presets", "dense", "error", "error, dense", "SimuMax's"]
    return [
        text,
        "",
        "Seconds of a step (ms), by presets and by constants of the dense rows:",
        *table(head, times, 1),
        "",
        "Peak of the fullest GPU (GiB):",
        *table(["case", "measured", "predicted", "error", "SimuMax's"], peaks, 1),
    ]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "published_experts.txt")
    options = parser.parse_args()
    publish(["# python benchmarks/published_experts.py", "", *lines()], options.out)


if __name__ == "__main__":
    main()

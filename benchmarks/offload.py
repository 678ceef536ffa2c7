"""Offload: peaks and bubbles beside PipeOffload's table 1, and predicted against measured steps.

1. PipeOffload (arXiv 2503.01328), table 1, for d devices and v chunks of a micro-batch:
   activations in units of M, those of 1F1B's first device, and bubbles of a step. Ours are
   simulated. T_F = T_B = T_W = 1 s of a chunk, in the paper's words: its B is our I. Its rows
   1F1B, 1F1B-I, GIS and GIS-H are our ``1f1b``, ``interleaved_1f1b``, ``gis`` and ``gis_h``. Below
   stands GIS with the half that lives longest, and with all, in host memory. A copy takes a tenth
   of a forward.
2. Steps on two CPU workers, round by round: seconds predicted from ``px.profile`` and measured, and
   peak bytes of activations predicted and counted. Copies share the cores with the workers.

``python benchmarks/offload.py`` writes results/benchmarks/offload.txt; a few seconds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _machine as machine
import numpy as np
import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeWarning
from pipesim.timeline.task_bytes import static

#: Devices and chunks of the first table, and micro-batches.
CASES, MICROBATCHES = ((4, 2), (8, 2), (8, 4)), 16
WIDTH, SAMPLES, STEPS = 512, 1024, 7
OFFLOADS: tuple[Any, ...] = ("none", "longest:0.5", 0.5, "all")
Formula = Callable[[int, int], float]
#: Activations (M) and bubble (s) of table 1 for d devices and v chunks, with T_F = T_B = T_W = 1 s.
TABLE_1: dict[str, tuple[Formula, Formula]] = {
    "1F1B": (lambda d, v: 1.0, lambda d, v: v * (d - 1) * 3.0),
    "1F1B-I": (lambda d, v: (v + 1) / v, lambda d, v: (d - 1) * 3.0),
    "GIS": (lambda d, v: 1.0, lambda d, v: (d - 1) * 2.0),
    "GIS-H": (lambda d, v: (v + 1) / (2 * v), lambda d, v: (d - 1) * 2.0 + (v - 1) * d / 2),
}


def simulated(name: str, d: int, v: int, offload: Any) -> tuple[float, float]:
    """Return activations, in units of M, and the bubble (s) of a schedule."""
    chunked = name != "1f1b"
    share = 1 / v if chunked else 1.0  # a chunk's activations, of those of a device's micro-batch
    network = ps.Network(host=ps.HostLink(bandwidth=10 * share if chunked else 10 / v))
    f, b, w = (v * share,) * 3
    costs = ps.Costs(f, input_grad=b, weight_grad=w, activation_bytes=share, network=network)
    schedule = ps.schedule(name, d, MICROBATCHES, **({"n_chunks": v} if chunked else {}))
    timeline = ps.simulate(ps.lower(schedule, offload=offload, step="none"), costs)
    work = MICROBATCHES * v * 3.0
    return float(timeline.memory.peak.max()) / d, timeline.makespan - work


def table() -> list[str]:
    """Return the rows of the first table."""
    rows = [f"{'d':>2} {'v':>2}  {'':36}{'activations (M)':>16}{'bubble (s)':>12}"]
    cases = (("1F1B", "1f1b", "none"), ("1F1B-I", "interleaved_1f1b", "none"),
            ("GIS", "gis", "none"), ("GIS-H", "gis_h", "none"),
            ("", "gis", "longest:0.5"), ("", "gis", "all"))  # fmt: skip
    for d, v in CASES:
        for paper, name, offload in cases:
            if paper:
                held, bubble = (formula(d, v) for formula in TABLE_1[paper])
                rows.append(f"{d:>2} {v:>2}  {paper + ', formula':36}{held:16.3f}{bubble:12.2f}")
            held, bubble = simulated(name, d, v, offload)
            label = f"{name}, offload={offload}"
            rows.append(f"{d:>2} {v:>2}  {label:36}{held:16.3f}{bubble:12.2f}")
    return rows


def stages() -> list[nn.Module]:
    """Return two stages of products and element-wise functions."""
    torch.manual_seed(0)

    def layers() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]

    return [nn.Sequential(*layers()), nn.Sequential(*layers()[:3])]


def steps() -> list[str]:
    """Return the rows of the second table."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, SAMPLES, WIDTH)
    schedule = ps.schedule("gpipe", 2, 8)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    runs = []
    for offload in OFFLOADS:
        graph = ps.lower(schedule, offload=offload)
        pipeline = px.Pipeline(stages(), graph, ["cpu"] * 2, nn.functional.mse_loss, sgd)
        costs = px.profile(pipeline, inputs, targets, n_steps=3, warm_up=1)
        predicted = ps.simulate(graph, costs)
        held = predicted.memory.peak - static(graph, costs)
        counted = pipeline.memory(inputs, targets).at(predicted).peak_activations
        runs.append((offload, pipeline, predicted, held, counted))
    makespans = np.array(
        [[run[1].step(inputs, targets).timeline.makespan for run in runs] for _ in range(STEPS)]
    )
    rows = [f"{'offload':>12}{'predicted (ms)':>16}{'measured (ms)':>15}{'error':>8}"
            f"{'predicted (kB)':>16}{'counted (kB)':>14}{'host (kB)':>11}"]  # fmt: skip
    for run, measured in zip(runs, np.median(makespans, axis=0).tolist(), strict=True):
        offload, pipeline, predicted, held, counted = run
        host = float(predicted.memory.peak_host.max())
        error = predicted.makespan / measured - 1
        rows.append(
            f"{offload!s:>12}{predicted.makespan * 1e3:16.2f}{measured * 1e3:15.2f}{error:8.1%}"
            f"{held.max() / 1e3:16.1f}{counted.max() / 1e3:14.1f}{host / 1e3:11.1f}"
        )
        pipeline.close()
    return rows


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = machine.ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "offload.txt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    lines = [
        *machine.header(["torch"]),
        "",
        f"PipeOffload's table 1, and simulations of {MICROBATCHES} micro-batches",
        *table(),
        "",
        f"GPipe of 8 micro-batches on 2 CPU workers, medians of {STEPS} steps",
        *steps(),
    ]
    print("\n".join(lines))
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

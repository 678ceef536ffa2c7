"""What `px.watch_sync` says of the loops of Accelerate's no_sync guide, and what it predicts.

Five loops (`_no_sync_variants`) on two processes over gloo, a thread each, K = 4. Each is watched
once, and measured without watching, in turns; the first run of each is left out. The seconds that
no_sync would save a batch, as predicted from one loop alone, are compared with the difference
between its batches and those of the loop with no_sync. Published: 2.00 s a batch for the baseline,
2.13 for no_sync around the backward alone, 0.91 for no_sync (two nodes, T4).

``python benchmarks/sync_lint.py`` prints this, and writes it to results/benchmarks/sync_lint.txt.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import torch
import torch.distributed as dist
from _no_sync_variants import VARIANTS, Parts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px

N_RANKS, K, N_PARTS = 2, 4, 12
WIDTH, LAYERS, SAMPLES = 768, 4, 64


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )


def parts(rank: int) -> Parts:
    generator = torch.Generator().manual_seed(rank)
    return [
        tuple(torch.randn(2, SAMPLES, WIDTH, generator=generator))  # type: ignore[misc]
        for _ in range(N_PARTS)
    ]


def seconds(name: str, ddp: DistributedDataParallel, batches: Parts) -> float:
    """Return the seconds of a loop, from when all processes begin to when all have ended."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    optimizer.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    VARIANTS[name](ddp, optimizer, batches, K)
    dist.barrier()
    return time.perf_counter() - begin


def run(folder: str, repeat: int) -> None:
    """Be a rank; rank 0 leaves what it found in a file."""
    torch.set_num_threads(1)
    with px.join(120) as processes:
        whole, batches = model(), parts(processes.rank)
        ddps = {name: DistributedDataParallel(copy.deepcopy(whole)) for name in VARIANTS}
        measured: dict[str, list[float]] = {name: [] for name in VARIANTS}
        saved: dict[str, list[float]] = {name: [] for name in VARIANTS}
        reports: dict[str, Any] = {}
        for again in range(repeat + 1):
            for name, ddp in ddps.items():
                plain = seconds(name, ddp, batches)
                with px.watch_sync(ddp) as sync:
                    seconds(name, ddp, batches)
                report = sync.report()
                if again:
                    measured[name].append(plain)
                    saved[name].append(report.saved)
                    reports[name] = str(report)
        if processes.rank == 0:
            results = {"measured": measured, "saved": saved, "reports": reports}
            (Path(folder) / "found.json").write_text(json.dumps(results))


def text(results: dict[str, Any]) -> str:
    """Return the table, with gains against the loop with no_sync in the same round."""
    measured, saved = results["measured"], results["saved"]
    ms = 1e3 / N_PARTS
    lines = [
        f"{N_RANKS} processes, K = {K}, {N_PARTS} micro-batches of {SAMPLES} samples, {LAYERS} "
        f"layers of {WIDTH}",
        f"ms a micro-batch; medians of {len(saved['baseline'])} rounds, and their quartiles",
        "",
        f"{'':<18}{'':>9}   seconds that no_sync saves",
        f"{'loop':<18}{'measured':>9}   {'predicted':<24}measured",
    ]
    for name, took in measured.items():
        gains = [(x - y) * ms for x, y in zip(took, measured["no_sync"], strict=True)]
        predicted = [x * ms for x in saved[name]]
        shown = [f"{statistics.median(x):6.2f} {_quartiles(x)}" for x in (predicted, gains)]
        lines.append(f"{name:<18}{statistics.median(took) * ms:>9.2f}   {shown[0]:<24}{shown[1]}")
    for name, report in results["reports"].items():
        lines += ["", f"{name}: {report}"]
    return "\n".join(lines)


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _ranks.spawn(run, N_RANKS, folder, arguments.repeat)
        results = json.loads((Path(folder) / "found.json").read_text())
    report = "\n".join([*machine.header(["pipesim", "torch"]), "", text(results)])
    print(report)
    (machine.ROOT / "results" / "benchmarks" / "sync_lint.txt").write_text(report + "\n")


if __name__ == "__main__":
    main()

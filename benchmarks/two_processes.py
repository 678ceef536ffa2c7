"""A run of two processes with a sharded embedding, for figures: its timeline, and an exchange.

Each process is a replica of two stages on one device: an embedding of four tables, whose rows are
spread over both processes, and layers with a loss. Processes exchange keys, vectors and gradients
over gloo, with one thread each. A step has four micro-batches of 512 rows. The step of median
makespan of ``--steps`` is kept, after five that warm up.

The exchange is that of four keys in each process, two of them equal, with gradients of their
vectors.

``python benchmarks/two_processes.py`` writes results/two_processes: timeline.csv, exchange.csv,
and run.txt with the machine, its load and the makespans.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import _machine as machine
import _ranks
import numpy as np
import torch
from torch import nn

import pipeexec as px
import pipesim as ps

ROWS, DIM, MICROBATCHES, BATCH = [50_000, 5_000, 500, 50], 64, 4, 2048


def run_rank(n_steps: int, folder: str) -> None:
    """Be one process: run steps, then exchange the keys of the example; rank 0 writes."""
    torch.set_num_threads(1)
    graph = ps.lower(
        ps.schedule("interleaved_1f1b", n_devices=1, n_microbatches=MICROBATCHES, n_chunks=2),
        n_replicas=2,
        sharded=[0],
        hosts=[0, 1],
    )
    with px.join(timeout=300) as processes:
        torch.manual_seed(0)
        group = processes.group([0, 1], key="embedding")
        embedding = px.ShardedEmbedding(ROWS, DIM, group)
        width = DIM * len(ROWS)
        layers = nn.Sequential(
            nn.Flatten(), nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        pipeline = px.Pipeline(
            [px.EmbeddingStage(embedding), layers], graph, ["cpu"], nn.functional.mse_loss,
            torch.optim.SGD, processes=processes,
        )  # fmt: skip
        own = torch.Generator().manual_seed(processes.rank)
        keys = torch.stack([torch.randint(rows, (BATCH,), generator=own) for rows in ROWS], 1)
        targets = torch.randn(BATCH, 1, generator=own)
        results = [pipeline.gather(pipeline.step(keys, targets)) for _ in range(n_steps + 5)]
        small = px.ShardedEmbedding(8, 4, processes)
        few = torch.tensor([[1, 3, 3, 5], [5, 4, 6, 5]][processes.rank])
        vectors = small(few)
        vectors.retain_grad()
        vectors.square().sum().backward()
        exchange = small.explain(few, vectors.grad)
        if processes.rank:
            return
    timelines = [result.timeline for result in results[5:]]
    makespans = np.array([timeline.makespan for timeline in timelines])
    middle = int(np.argsort(makespans)[len(makespans) // 2])
    out = Path(folder)
    timelines[middle].save(out / "timeline.csv")
    exchange.to_csv(out / "exchange.csv", index=False)
    low, high = 1e3 * np.quantile(makespans, [0.1, 0.9])
    (out / "run.txt").write_text(
        f"{n_steps} steps: median {1e3 * makespans[middle]:.1f} ms, "
        f"80 % of them from {low:.1f} to {high:.1f} ms\n"
    )


def main() -> None:
    """Run, and keep the machine with the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=machine.ROOT / "results" / "two_processes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    _ranks.spawn(run_rank, 2, options.steps, str(options.out))
    lines = (options.out / "run.txt").read_text().splitlines()
    load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
    machine.publish([*machine.header(["torch"]), load, "", *lines], options.out / "run.txt")


if __name__ == "__main__":
    main()

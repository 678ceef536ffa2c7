"""Steps of two replicas that share optimizer or parameters, against their predictions.

Two stages of linear layers on one device a process (``looped_bfs``), two processes over gloo, Adam:
the optimizer alone is sharded (ZeRO-1), or parameters too, freed after every use, while the next
stages of the device are others (1), and once a step. Costs come from calibration steps that take
turns with the measured ones (`pipeexec.validate`); nothing is fitted to a row.

Then the bytes of gathered parameters and of gradients at their peak: counted storage by storage
(`pipeexec.Pipeline.memory`), and by rule 10 of docs/time.md at the times of that very step.

``python benchmarks/sharding.py`` writes results/benchmarks/sharding.txt.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _ranks
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import PipeWarning

N_RANKS, K, WIDTH, SAMPLES = 2, 4, 512, 128
PIPELINES: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {"ZeRO-1": {"shard_optimizer": True}},
    "parameters": {
        "every use": {"shard_parameters": "every"},
        "every use, no prefetch": {"shard_parameters": "every", "prefetch": 0},
        "1 stage": {"shard_parameters": 1},
        "once a step": {"shard_parameters": "step"},
        "once a step, every grad": {"shard_parameters": "step", "grad_sync": "every"},
    },
}
ADAM = partial(torch.optim.Adam, lr=1e-4)
MIB = 2**20


def stages() -> list[nn.Sequential]:
    """Return two stages of two layers."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*(x for _ in range(2) for x in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
        for _ in range(2)
    ]


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        x, y = torch.randn(2, K * SAMPLES, WIDTH, generator=generator)
        yield x, y


def lowered(options: dict[str, Any]) -> ps.TaskGraph:
    schedule = ps.schedule("looped_bfs", 1, K, n_chunks=2)
    return ps.lower(schedule, n_replicas=N_RANKS, hosts="per_device", **options)


def times(processes: Processes, kind: str, n_steps: int, repeat: int) -> list[str]:
    """Return a row for each graph of one kind: predicted and measured seconds of a step."""
    validation = px.validate(
        stages(),
        {name: lowered(options) for name, options in PIPELINES[kind].items()},
        ["cpu"],
        nn.functional.mse_loss,
        batches(processes.rank),
        ADAM,
        n_steps=n_steps,
        repeat=repeat,
        processes=processes,
    )
    rows = []
    for name, row in validation.table.iterrows():
        interval = f"{row['error_mean']:+.1%} ({row['error_low']:+.1%} to {row['error_high']:+.1%})"
        rows.append(
            f"{name:24}{row['predicted'] * 1e3:8.2f} ms{row['measured'] * 1e3:7.2f} ms"
            f"{row['error']:+8.1%}{interval:>28}"
        )
    return rows


def memory(processes: Processes, kind: str) -> list[str]:
    """Return a row for each graph of one kind: bytes beyond the static ones, counted and ruled."""
    rows = []
    x, y = next(batches(processes.rank))
    for name, options in PIPELINES[kind].items():
        own, graph = stages(), lowered(options)
        nbytes = [float(sum(p.nbytes for p in stage.parameters())) for stage in own]
        with px.Pipeline(
            own, graph, ["cpu"], nn.functional.mse_loss, ADAM, processes=processes
        ) as pipeline:
            counted = pipeline.memory(x, y)
        frame = counted.frame
        measured = (frame["total"] - frame["activations"]).max()
        costs = ps.Costs(0, 0, parameter_bytes=nbytes, gradient_bytes=nbytes)
        static = sum(nbytes) * (2 if kind == "optimizer" else 2 / N_RANKS)
        peak = replace(counted.timeline, costs=costs, sizes=None).memory.peak.max()
        optimizer = 2 * sum(nbytes) / N_RANKS
        rows.append(
            f"{name:24}{(static + optimizer) / MIB:9.2f}{(peak - static) / MIB:10.2f}"
            f"{measured / MIB:10.2f}{measured - (peak - static):10.0f}"
        )
    return rows


def run(folder: str, n_steps: int, repeat: int) -> None:
    """Be a rank; rank 0 leaves the text in a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    lines = [f"{'':24}{'predicted':>11}{'measured':>10}{'error':>8}{'mean, 95 % interval':>28}"]
    with px.join(120) as processes:
        for kind in PIPELINES:
            lines += times(processes, kind, n_steps, repeat)
        lines += ["", "most bytes of a device, without activations (MiB; the difference in bytes):"]
        lines += [f"{'':24}{'always':>9}{'by rule':>10}{'counted':>10}{'differ':>10}"]
        for kind in PIPELINES:
            lines += memory(processes, kind)
        if processes.rank == 0:
            (Path(folder) / "text").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    _ranks.publish_text(run, N_RANKS, "sharding", arguments.steps, arguments.repeat)


if __name__ == "__main__":
    main()

"""Micro-batches of different lengths: step times predicted from costs of each, and measured.

A small GPT in two stages, one sample of 64 to 512 tokens a micro-batch. The orders are those of
1F1B as given, and with its micro-batches relabelled: longest first, and shortest first. For each,

- predicted: makespan of `pipesim.simulate` from costs of each stage and micro-batch, which
  `pipeexec.validate` measures beside the steps;
- averaged: the same from one mean a stage (``costs.averaged()``), which knows no order;
- measured: median makespan of the steps.

Errors are relative to the median. Two workers: threads of one process, then two processes over
gloo; one thread of torch each.

``python benchmarks/unequal_microbatches.py`` writes results/benchmarks/unequal_microbatches.txt.
On a machine that other work keeps busy, measured times say little: the load is in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import gpt
from pipeexec.distributed import Processes
from pipesim.errors import PipeWarning

LENGTHS = (128, 512, 64, 256, 64, 384, 512, 128)
ORDERS = ("as given", "longest first", "shortest first")
COLUMNS = ("workers", "order", "predicted", "averaged", "measured", "error", "error, averaged")
OUT = machine.ROOT / "results" / "benchmarks" / "unequal_microbatches.txt"


def relabelled(order: Sequence[int]) -> ps.TaskGraph:
    """Return 1F1B with other micro-batches in place of 0, 1, 2, ..."""
    base = ps.schedule("1f1b", n_devices=2, n_microbatches=len(order))
    rows = [
        [action._replace(microbatch=order[action.microbatch]) for action in actions]
        for actions in base.orders
    ]
    return ps.lower(ps.Schedule.from_orders(rows, placement=base.placement))


def graphs() -> dict[str, ps.TaskGraph]:
    """Return the task graph of each order."""
    numbers = list(range(len(LENGTHS)))
    longest = sorted(numbers, key=lambda k: -LENGTHS[k])
    rows = zip(ORDERS, (numbers, longest, longest[::-1]), strict=True)
    return {name: relabelled(order) for name, order in rows}


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return the sum over tokens, and their number."""
    total = cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def validated(n_steps: int, processes: Processes | None = None) -> list[list[Any]]:
    """Return predicted, averaged and measured seconds of each order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", PipeWarning)
    model = gpt(n_layers=2, d_model=128, sequence=max(LENGTHS))
    inputs = px.Microbatches([torch.randint(256, (1, n)) for n in LENGTHS])
    targets = inputs.map(lambda x: x.roll(-1, 1))
    run = px.validate(
        [model[:2], model[2:]],
        graphs(),
        ["cpu"] * (2 if processes is None else 1),
        loss,
        repeat((inputs, targets)),
        n_steps=n_steps,
        processes=processes,
    )
    averages = run.costs.averaged()
    return [
        [
            row.predicted.makespan,
            ps.simulate(row.predicted.graph, averages).makespan,
            statistics.median(row.makespans),
        ]
        for row in run.rows.values()
    ]


def in_processes(n_steps: int, path: str) -> None:
    """Measure in this process and another; the first writes the seconds."""
    processes = px.join()
    rows = validated(n_steps, processes)
    if processes.rank == 0:
        Path(path).write_text(json.dumps(rows))


def measure(n_steps: int) -> list[list[str]]:
    """Return the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        _ranks.spawn(in_processes, 2, n_steps, str(path))
        seconds_of = {"threads": validated(n_steps), "processes": json.loads(path.read_text())}
    return [
        [
            workers,
            order,
            *(f"{1e3 * x:.1f}" for x in seconds),
            *(f"{x / seconds[2] - 1:+.1%}" for x in seconds[:2]),
        ]
        for workers, rows in seconds_of.items()
        for order, seconds in zip(ORDERS, rows, strict=True)
    ]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each order")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    rows = measure(options.steps)
    lines = [
        *machine.header(["torch"]),
        f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after",
        f"1F1B of {len(LENGTHS)} micro-batches of {', '.join(map(str, LENGTHS))} tokens; "
        f"ms, medians of {options.steps} steps",
        "",
        *machine.table(COLUMNS, rows, 2),
    ]
    machine.publish(lines, options.out)


if __name__ == "__main__":
    main()

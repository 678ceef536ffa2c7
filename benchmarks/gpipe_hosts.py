"""Hosts and copy streams of `pipeexec.GPipe`: what each costs where launches take time.

Four CPU workers, whose layers sleep 10 ms in forward and 20 ms in backward, so that two cores are
enough. Launches are imposed (`pipeexec.workers`): a host takes so long to issue each task, messages
included. Messages are handed over. Columns are

- F: milliseconds from the beginning of a step to the end of its last F;
- step: milliseconds of the whole step. The host issues no backward before the caller has the
  outputs, which is not simulated.

The first of each three columns is simulated: with the mean seconds of F and B in steps without
launches, and the launch that is imposed; nothing is fitted. ``run`` is the least of the steps that
were run, the first one of each module left out: other programs only delay a step.

``python benchmarks/gpipe_hosts.py`` prints the table and writes it to
results/benchmarks/gpipe_hosts.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from _machine import ROOT, header, publish, table
from hosts import PARTS, B, F, M, N, Nap
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeWarning
from pipesim.ops import Op

OUT = ROOT / "results" / "benchmarks" / "gpipe_hosts.txt"
STREAMS, HOSTS = ("per_peer", "per_microbatch"), ("one", "per_device")


def module(launch: float, **switches: Any) -> px.GPipe:
    """Return a module of sleeping layers on workers with imposed launches."""
    layers = nn.Sequential(*(Nap() for _ in range(N)))
    devices = px.workers(N, launch=launch)
    return px.GPipe(layers, [1] * N, devices=devices, chunks=M, checkpoint="never", **switches)


def steps(model: px.GPipe, n_steps: int) -> list[ps.Timeline]:
    """Run some steps behind a first one."""
    timelines = []
    for _ in range(n_steps + 1):
        model(torch.zeros(M, 1)).sum().backward()
        timelines.append(model.timeline())
    return timelines[1:]


def milliseconds(timeline: ps.Timeline) -> tuple[float, float]:
    """Return when the last F ends, and the makespan."""
    return 1e3 * float(timeline.end[timeline.graph.op == Op.F].max()), 1e3 * timeline.makespan


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each module")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    warnings.simplefilter("ignore", PipeWarning)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    free = ps.Costs.from_timeline(min(steps(module(0.0), options.steps), key=milliseconds))
    lines = []
    for hosts, streams, (name, launch) in itertools.product(HOSTS, STREAMS, PARTS.items()):
        model = module(launch, hosts=hosts, streams=streams)
        costs = ps.Costs(forward=free.forward, backward=free.backward, launch=launch)
        simulated = milliseconds(ps.simulate(model.graph(M), costs))
        columns = zip(*map(milliseconds, steps(model, options.steps)), strict=True)
        pairs = zip(simulated, map(min, columns), strict=True)
        cells = [(f"{sim:.1f}", f"{run:.1f}", f"{sim / run - 1:+.1%}") for sim, run in pairs]
        lines.append([hosts, streams, name, *cells[0], *cells[1]])
    columns = ["hosts", "streams", "launch", "F", "run", "error", "step", "run", "error"]
    publish(
        [
            *header(["torch"]), f"load average before: {load:.1f}",
            f"{N} partitions, {M} micro-batches; F {F * 1e3:g} ms, B {B * 1e3:g} ms asleep",
            "milliseconds; the first column of each three is simulated", "",
            *table(columns, lines, 3),
        ],
        options.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()

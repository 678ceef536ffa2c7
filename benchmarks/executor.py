"""Host time a task: what issuing and bookkeeping cost when stages do nothing.

``python benchmarks/executor.py`` prints, for several graphs, the median over steps of

- issue: microseconds a task that the host takes to walk the graph;
- step: makespan of the whole step a task, which includes the workers' own bookkeeping, their
  wake-ups, and autograd's for an identity; devices that work side by side share it.

Two more tables say where the time goes, in steps of their own with a clock in each function
(`_where.py`; a clock costs about 1 us a call): the parts of a task in one process, summed over all
threads, and the parts of a message between two processes, with the time from the start of a SEND to
that of its RECV and on to its end, from the timelines of both on one clock. Times are of the wall:
whoever waits for the interpreter lock, or for a core, counts that too.

The tables are written to results/benchmarks/executor.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import _where as where
import numpy as np
import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import PipeWarning
from pipesim.ops import SENDS

SHAPES = ((1, 64), (2, 8), (2, 64), (4, 32), (8, 32))
WARM_UP = 3


def make(
    name: str, n_devices: int, n_microbatches: int, processes: Processes | None = None
) -> tuple[px.Pipeline, torch.Tensor]:
    """Return a pipeline of empty stages, and a batch."""
    graph = ps.lower(ps.schedule(name, n_devices, n_microbatches), step="none")
    stages = [nn.Identity() for _ in range(n_devices)]
    own = ["cpu"] * (n_devices if processes is None else 1)
    pipeline = px.Pipeline(stages, graph, own, lambda y, t: y.sum(), processes=processes)
    return pipeline, torch.zeros(n_microbatches, 1)


def measure(
    name: str, n_devices: int, n_microbatches: int, n_steps: int
) -> tuple[int, float, float]:
    """Return the number of tasks, and issue and step time in microseconds a task."""
    pipeline, batch = make(name, n_devices, n_microbatches)
    with pipeline:
        results = [pipeline.step(batch, batch) for _ in range(n_steps + WARM_UP)][WARM_UP:]
    n_tasks = len(pipeline.graph)
    issue = statistics.median(r.host_seconds for r in results)
    step = statistics.median(r.timeline.makespan for r in results)
    return n_tasks, issue / n_tasks * 1e6, step / n_tasks * 1e6


def parts_of_a_task(n_steps: int) -> list[list[str]]:
    """Return where the time of 1F1B's tasks goes on one and on two devices."""
    measurements = []
    for n_devices in (1, 2):
        with where.clocks(where.PARTS) as clock:
            pipeline, batch = make("1f1b", n_devices, 64)
            with pipeline:
                for number in range(WARM_UP + n_steps):
                    if number == WARM_UP:
                        clock.reset()
                    pipeline.step(batch, batch)
        measurements.append((clock, len(pipeline.graph) * n_steps))
    labels = dict.fromkeys([*(part for _, _, part in where.PARTS), "wake-up"])
    lines = [
        [label, *(f"{clock.seconds[label] / n * 1e6:.1f}" for clock, n in measurements),
         f"{measurements[1][0].calls[label] / measurements[1][1]:.2f}"]
        for label in labels if label not in where.ASLEEP
    ]  # fmt: skip
    return lines


def run_rank(n_steps: int, directory: str) -> None:
    """Be one of two processes; the first writes where the time of a message goes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", PipeWarning)
    values: dict[str, Any] = {}
    with px.join() as processes:
        pipeline, batch = make("1f1b", 2, 32, processes)
        results = []
        for _ in range(WARM_UP + n_steps):
            pipeline.align()
            results.append(pipeline.gather(pipeline.step(batch, batch)))
        values["tasks"] = len(pipeline.graph)
        values["issue"] = statistics.median(r.host_seconds for r in results[WARM_UP:])
        values["step"] = statistics.median(r.timeline.makespan for r in results[WARM_UP:])
        timelines = [r.timeline for r in results[WARM_UP:]]
        values |= dict(zip(("header", "payload"), one_way(timelines), strict=True))
        with where.clocks(where.MESSAGES) as clock:
            for _ in range(n_steps):
                pipeline.step(batch, batch)
        n_messages = pipeline.graph.is_op(SENDS).sum()  # one end of each is here
        values["parts"] = {key: s / n_messages / n_steps for key, s in clock.seconds.items()}
        values["residual"] = processes.clock.alignment.residual
        pipeline.close()
        Path(directory, f"{processes.rank}.json").write_text(json.dumps(values))


def one_way(timelines: list[ps.Timeline]) -> tuple[float, float]:
    """Return the median seconds from SEND to RECV, and of RECV, of messages that were awaited."""
    latencies, lengths = [], []
    for timeline in timelines:
        graph = timeline.graph
        sends = np.flatnonzero(graph.is_op(SENDS))
        recvs = graph.pair[sends]
        latencies.append(timeline.start[recvs] - timeline.start[sends])
        lengths.append(timeline.end[recvs] - timeline.start[recvs])
    return float(np.median(latencies)), float(np.median(lengths))


def messages(n_steps: int) -> list[list[str]]:
    """Return the lines about two processes."""
    with tempfile.TemporaryDirectory() as directory:
        _ranks.spawn(run_rank, 2, n_steps, directory)
        ranks = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in (0, 1)]
    first = ranks[0]
    lines = [
        ["issue, a task", first["issue"] / first["tasks"]],
        ["step, a task", first["step"] / first["tasks"]],
        ["SEND starts to RECV starts (header)", first["header"]],
        ["RECV starts to RECV ends (payload)", first["payload"]],
        *([key, sum(r["parts"][key] for r in ranks) / 2] for key in first["parts"]),
        ["clocks: residual", ranks[1]["residual"]],
    ]
    return [
        [label + (" (asleep)" if label in where.ASLEEP else ""), f"{seconds * 1e6:.1f}"]
        for label, seconds in lines
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    out = machine.ROOT / "results" / "benchmarks" / "executor.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    warnings.simplefilter("ignore", PipeWarning)
    rows = []
    for name in ("gpipe", "1f1b"):
        for shape in SHAPES:
            n_tasks, issue, step = measure(name, *shape, options.steps)
            label = f"{name} {shape[0]}x{shape[1]}"
            rows.append([label, str(n_tasks), f"{issue:.1f}", f"{step:.1f}"])
    parts, between = parts_of_a_task(options.steps), messages(options.steps)
    load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
    lines = [*machine.header(["torch"]), load, "us: microseconds", ""]
    lines += machine.table(["graph", "tasks", "issue us/task", "step us/task"], rows, 1)
    columns = ["where the time goes, 1f1b", "1x64, us/task", "2x64, us/task", "calls/task"]
    lines += ["", *machine.table(columns, parts, 1)]
    columns = ["2 processes over gloo, 1f1b 2x32", "us, a message unless said"]
    machine.publish([*lines, "", *machine.table(columns, between, 1)], options.out)


if __name__ == "__main__":
    main()

"""Gaps of all named schedules: makespan over a bound that no order of the same tasks goes below.

A cell is `Timeline.why.gap` in percent: the schedule is proved optimal at 0, for its placement, its
kinds of backward and these costs. Above 0, a better order may exist, or the bound may be too low. A
dash stands for numbers of devices and micro-batches that the schedule does not allow. Schedules are
those that `pipesim.schedule` builds without costs. One table for each of these costs:

- equal: F, I and W take 1, B takes 2, messages nothing.
- latency: F takes 10, I 12, W 8, B 20; each message arrives 3 later.
- slow messages: the same, and each message holds its channel for 4.
- uneven: whole seconds of each stage, drawn from 5 to 15 for each operation, and a latency of 1.
- equal, own memory: as equal, and orders must not hold more activations on any device than the
  schedule does. A gap of 0 then proves that no order with as little memory is faster.

``python benchmarks/schedule_bounds.py`` writes results/benchmarks/schedule_bounds.txt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import _machine as machine
import numpy as np

import pipesim as ps
from pipesim.errors import PipeError

DEVICES, FACTORS = (2, 4, 8, 16), (1, 2, 4)
COUNTS = [(p, factor * p) for p in DEVICES for factor in FACTORS]
OWN_MEMORY = "equal, own memory"
COSTS = ("equal", "latency", "slow messages", "uneven", OWN_MEMORY)


def costs_of(case: str, n_stages: int) -> ps.Costs:
    """Return the costs of a table; each micro-batch holds one byte a stage until its W or B."""
    held = {"activation_bytes": 1.0, "weight_grad_bytes": 1.0}
    if case in ("equal", OWN_MEMORY):
        return ps.Costs(forward=1, input_grad=1, weight_grad=1, **held)
    if case == "uneven":
        draw = np.random.default_rng(n_stages)
        f, i, w = draw.integers(5, 16, (3, n_stages)).astype(float).tolist()
        network = ps.Network(latency=1)
        return ps.Costs(forward=f, input_grad=i, weight_grad=w, network=network, **held)
    seconds = 4.0 if case == "slow messages" else 0.0
    network = ps.Network(latency=3)
    return ps.Costs(10, 20, 12, 8, output_seconds=seconds, network=network, **held)


def gap(name: str, case: str, n_devices: int, n_microbatches: int) -> float | None:
    """Return the gap of a schedule, or None if it does not allow these numbers."""
    try:
        graph = ps.lower(ps.schedule(name, n_devices, n_microbatches))
    except PipeError:
        return None
    timeline = ps.simulate(graph, costs_of(case, graph.n_stages))
    if case == OWN_MEMORY:
        timeline = replace(timeline, limits=timeline.memory.peak)
    return timeline.why.gap


def gap_text(value: float | None) -> str:
    """Return a gap in percent, 0 if it is proved to be none."""
    return "-" if value is None else f"{100 * value:.1f}" if value else "0"


def table_of(case: str) -> Iterator[str]:
    """Yield the lines of the table of one kind of costs, and what it shows."""
    rows, always, never = [], [], []
    for name in ps.schedules().index:
        gaps = [gap(name, case, *counts) for counts in COUNTS]
        rows.append([name, *map(gap_text, gaps)])
        allowed = [x for x in gaps if x is not None]
        if not any(allowed):
            always.append(name)
        elif all(allowed):
            never.append(name)
    yield from ("", f"{case}: gap in percent, for p devices and m micro-batches")
    yield from machine.table(["schedule", *(f"{p}/{m}" for p, m in COUNTS)], rows, 1)
    yield f"optimal in each cell: {', '.join(always) or 'none'}"
    yield f"optimal in no cell: {', '.join(never) or 'none'}"


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = machine.ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "schedule_bounds.txt")
    options = parser.parse_args()
    start = time.perf_counter()
    lines = [*machine.header(["numpy", "numba"])]
    for case in COSTS:
        lines.extend(table_of(case))
    lines.extend(["", f"{time.perf_counter() - start:.0f} s in all"])
    machine.publish(lines, options.out)


if __name__ == "__main__":
    main()

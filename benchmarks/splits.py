"""Balanced splits against 2,000 random ones: the busiest device, and the simulated step.

Each row is a schedule and a model: layers of equal weight and a head of four ("head"), random
weights ("random"), or equal weights of which B takes longer by full recompute, with such a head
("recompute"). The columns are ratios to the best of 2,000 random splits, so that 1 is as good and
less is better: the busiest device of the split for the placement; the step of that split, of the
split for the schedule, and of a split with balanced stages.

Then the time that the search takes for a model of 128 layers, and that of `balanced_split`, which
is exact, for a thousand layers on 16 stages (the median of 11 calls). "slowest" is the largest
stage over the mean one.

``python benchmarks/splits.py`` writes results/benchmarks/splits.txt.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import _machine as machine
import numpy as np
from numpy.typing import NDArray

import pipesim as ps

N_RANDOM = 2000
SCHEDULES: list[tuple[str, int, int, dict[str, int]]] = [
    ("zbv", 4, 32, {}),
    ("zbv", 8, 16, {}),
    ("interleaved_1f1b", 4, 32, {"n_chunks": 2}),
    ("interleaved_1f1b", 3, 6, {"n_chunks": 3}),
    ("1f1b", 4, 32, {}),
    ("gpipe", 4, 32, {}),
]
WEIGHTS = ("head", "random", "recompute")


def layers(weights: str, n_layers: int, random: np.random.Generator) -> ps.Layers:
    """Return layers with F, I and W."""
    forward = np.ones(n_layers)
    if weights == "random":
        forward = random.uniform(0.2, 2, n_layers)
    else:
        forward[-1] = 4
    input_grad = forward.copy()
    if weights == "recompute":
        input_grad[:-1] *= 2  # the head is not recomputed
    columns = {"forward": forward, "input_grad": input_grad, "weight_grad": forward}
    return ps.Layers({name: (1e-3 * x).tolist() for name, x in columns.items()})


def busiest(placement: ps.Placement, seconds: NDArray[np.float64], sizes: Any) -> float:
    """Return the seconds of the busiest device."""
    stages = np.add.reduceat(seconds, np.cumsum([0, *sizes[:-1]]))
    return float(np.bincount(placement.device_of, stages).max())


def row(name: str, p: int, m: int, options: dict[str, int], weights: str) -> list[str]:
    """Return one row of the table."""
    random = np.random.default_rng(0)
    schedule = ps.schedule(name, p, m, **options)
    n, n_layers = schedule.n_stages, 2 * schedule.n_stages + 1
    model, graph = layers(weights, n_layers, random), ps.lower(schedule)

    def step(sizes: Any) -> float:
        return ps.simulate(graph, model.costs(sizes)).makespan

    inner = [random.choice(n_layers - 1, n - 1, replace=False) + 1 for _ in range(N_RANDOM)]
    splits = [np.diff([0, *np.sort(x), n_layers]).tolist() for x in inner]
    least_busy = min(busiest(schedule.placement, model.seconds, x) for x in splits)
    fastest = min(map(step, splits))
    by_devices = model.split("balanced", placement=schedule.placement)
    start = time.perf_counter()
    by_time = model.split("balanced", placement=graph)
    seconds = time.perf_counter() - start
    ratios = [
        busiest(schedule.placement, model.seconds, by_devices) / least_busy,
        *(step(x) / fastest for x in (by_devices, by_time, model.split(n))),
    ]
    return [name, f"{p}", f"{m}", f"{n}", f"{n_layers}", weights,
            *(f"{x:.4f}" for x in ratios), f"{seconds:.2f}"]  # fmt: skip


def search_seconds() -> list[str]:
    """Return lines with the seconds of searches for 128 layers."""
    lines = []
    for n_devices, n_chunks in ((16, 1), (16, 2), (16, 4), (64, 1)):
        placement = ps.Placement.looped(n_devices, n_chunks)
        for weights in WEIGHTS:
            model = layers(weights, 128, np.random.default_rng(0))
            start = time.perf_counter()
            model.split("balanced", placement=placement)
            seconds = time.perf_counter() - start
            lines.append(f"{n_devices:8d}{placement.n_stages:8d}  {weights:<10}{seconds:8.2f}")
    return lines


def partition_lines() -> list[str]:
    """Return lines with the milliseconds of `balanced_split`, and its slowest stage."""
    random, n_layers, n_stages = np.random.default_rng(0), 1000, 16
    cases = {
        "uniform": random.uniform(0.2e-3, 2e-3, n_layers),
        "lognormal": random.lognormal(0, 1, n_layers),
        "equal": np.full(n_layers, 0.1),
        "alternating": np.tile([0.1, 0.3], n_layers // 2),
        "heavy last layer": np.append(random.random(n_layers - 1), 100.0),
    }
    lines = [f"{'weights':<18}{'layers':>9}{'stages':>8}{'ms':>8}  slowest"]
    for name, seconds in cases.items():
        durations = []
        for _ in range(11):
            start = time.process_time()
            sizes = ps.balanced_split(seconds, n_stages)
            durations.append(time.process_time() - start)
        stages = np.add.reduceat(seconds, np.cumsum([0, *sizes[:-1]]))
        slowest = stages.max() / stages.mean()
        median = 1e3 * np.median(durations)
        lines.append(f"{name:<18}{n_layers:9d}{n_stages:8d}{median:8.1f}  {slowest:.5f}")
    return lines


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = machine.ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "splits.txt")
    options = parser.parse_args()
    columns = ["schedule", "p", "m", "stages", "layers", "weights", "busiest", "step: devices",
               "schedule", "stages", "search s"]  # fmt: skip
    rows = [row(*case, weights) for case in SCHEDULES for weights in WEIGHTS]
    lines = [
        *machine.header(["numpy"]),
        "",
        f"ratios to the best of {N_RANDOM} random splits",
        *machine.table(columns, rows, 1),
        "",
        "seconds of a search for a placement, 128 layers: devices, stages, weights, seconds",
        *search_seconds(),
        "",
        "balanced_split",
        *partition_lines(),
    ]
    machine.publish(lines, options.out)


if __name__ == "__main__":
    main()

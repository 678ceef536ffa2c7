"""One step of Llama 3 405B on 16,384 GPUs: seconds to simulate it, and what stragglers do to it.

``python benchmarks/cluster_step.py`` writes ``results/benchmarks/cluster_step.txt``. The step is
that of ``benchmarks/_cluster.py``, which says where each number is from: 1F1B on 16 stages, 16
micro-batches, 128 data-parallel replicas, tensor parallelism over 8 GPUs inside each device.

1. Seconds of each phase in fresh processes on one core, with numba's cache filled and empty.
2. The step against the paper's. Input: the FLOP/s that a GPU reaches inside a task, set to the
   paper's 400e12, which is the paper's result for the *whole* step. Predicted: what the schedule,
   messages and the all-reduce leave of it. The paper interleaves its stages, this is plain 1F1B.
3. What noise, slow GPUs, slow links and pauses do to the step, and what the number of replicas
   does to noise. All on one core. ``--quick`` takes few scenarios, and writes no file unless
   ``--out`` names one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import _cluster as cluster
import _machine as machine
import numpy as np

NETWORKS = {"nics": "a NIC each way a node", "links": "a link for each pair"}
#: (GPUs, replicas, TFLOP/s a GPU, MFU) of the first two rows of table 4 of arXiv 2407.21783.
PAPER = ((8192, 64, 430e12, 0.43), (16384, 128, 400e12, 0.41))
#: Chunks a stage, if a chunk is one layer; see `paper_table`.
N_CHUNKS = 8
#: Unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783, section 3.3.4, table 5).
EVERY = 54 * 86400 * 16384 / 419
#: Seconds that the step should take, end to end.
AIM = 2.0
SLOW = (1.05, 1.1, 1.2, 1.5)
REPLICAS = (1, 8, 32, 128)
GPUS = {"gpus_per_device": cluster.TENSOR_PARALLEL, "seed": 0}


def fresh(kind: str, cache: str | None) -> dict[str, float]:
    """Run `cluster.one_step` in a process of its own; its "process" is start to exit."""
    environment = machine.pinned(1)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, cluster.__file__, kind],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "process": perf_counter() - start}


def phase_table(quick: bool) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the median seconds of each phase, and one result for each network."""
    names = (*cluster.STEP_PARTS, "process")
    body, results, verdicts = [], {}, []
    for kind, what in NETWORKS.items():
        with tempfile.TemporaryDirectory() as cache:
            runs: dict[str, list[dict[str, float]]] = {"empty": []}
            for _ in range(1 if quick else 3):
                with tempfile.TemporaryDirectory() as empty:
                    runs["empty"].append(fresh(kind, empty))
            fresh(kind, cache)
            runs["filled"] = [fresh(kind, cache) for _ in range(3 if quick else 9)]
        results[kind] = runs["filled"][-1]
        for state, samples in runs.items():
            cells = [
                machine.number(statistics.median(run[name] for run in samples)) for name in names
            ]
            slowest = machine.number(max(run["process"] for run in samples))
            body.append([what, state, f"{len(samples)}", *cells, slowest])
            if state == "filled":
                middle = statistics.median(run["process"] for run in samples)
                verdicts.append(f"{middle:.2f} s, {'met' if middle < AIM else 'not met'}")
    lines = machine.table(("network", "cache", "runs", *names, "slowest"), body, 2)
    return [
        *lines,
        f"Aim: {AIM:g} s from start to exit, cache filled: {'; '.join(verdicts)}",
    ], results


def share(value: float) -> str:
    """Return per cent with one digit."""
    return f"{value:.1%}"


def paper_table(ps: Any) -> list[str]:
    """Return the steps of both rows of the paper beside 1F1B's and the closed form."""
    price, model, body = cluster.costs(ps, "nics"), cluster.llama(ps), []
    p, efficiency = cluster.N_STAGES, []
    for gpus, replicas, reported, mfu in PAPER:
        m = cluster.BATCH // replicas
        timeline = ps.simulate(cluster.graph(ps, replicas), price)
        achieved = model.step_flops(cluster.BATCH) / gpus / timeline.makespan
        # Interleaved, bubbles alone: (p - 1) / (V m) of the time without them (section 3.3.2).
        interleaved = cluster.RATE / (1 + (p - 1) / (N_CHUNKS * m))
        efficiency.append((reported, achieved, interleaved))
        body.append([
            f"{gpus:,}", f"{replicas}", f"{m}", f"{reported / 1e12:.0f}", f"{mfu:.0%}",
            f"{timeline.makespan:.2f}", share(timeline.bubble_fraction),
            f"{achieved / 1e12:.0f}", share(achieved / cluster.PEAK),
            f"{interleaved / 1e12:.0f}", share(interleaved / cluster.PEAK),
        ])  # fmt: skip
    columns = ("GPUs", "replicas", "micro-batches", "paper TFLOP/s", "MFU", "1F1B step s", "bubble",
               "TFLOP/s", "MFU", f"V={N_CHUNKS} TFLOP/s", "MFU")  # fmt: skip
    (big, ours_big, v_big), (small, ours_small, v_small) = efficiency
    needed = cluster.RATE * small / ours_small
    return [
        *machine.table(columns, body, 0),
        f"TFLOP/s of 16 micro-batches over 32: paper {small / big:.3f}, 1F1B "
        f"{ours_small / ours_big:.3f}, closed form with V={N_CHUNKS} {v_small / v_big:.3f}",
        f"For 400 TFLOP/s in the whole step, 1F1B's tasks would have to reach "
        f"{needed / 1e12:.0f}, {needed / cluster.PEAK:.0%} of the peak; with V={N_CHUNKS} "
        f"{400 * small / v_small:.0f}, {cluster.RATE * small / v_small / cluster.PEAK:.0%}.",
    ]


def row(name: str, slowdown: Any, bubble: Any, n_tasks: int, seconds: float) -> list[str]:
    """Return percentiles of many steps, and how fast they were simulated."""
    levels = np.percentile(slowdown, (50, 95, 99))
    return [
        name,
        *(f"{level:.4f}" for level in levels),
        share(float(np.median(bubble))),
        f"{len(slowdown):,}",
        machine.number(seconds),
        machine.number(n_tasks * len(slowdown) / seconds, 1e6),
    ]


def noisy(ps: Any, graph: Any, price: Any, name: str, noise: Any, n: int) -> list[str]:
    """Return the row of a kind of noise."""
    start = perf_counter()
    scenarios = ps.simulate_many(graph, price, noise, n, n_jobs=1, progress=False)
    seconds = perf_counter() - start
    slowdown = scenarios.makespan / scenarios.quiet_makespan
    return row(name, slowdown, scenarios.bubble_fraction, len(graph), seconds)


def one_by_one(ps: Any, graph: Any, price: Any, name: str, noises: list[Any]) -> list[str]:
    """Return the row of steps that differ in what is slow."""
    quiet, start = ps.simulate(graph, price).makespan, perf_counter()
    timelines = [ps.simulate(graph, price, noise=noise) for noise in noises]
    slowdown = [timeline.makespan / quiet for timeline in timelines]
    bubble = [timeline.bubble_fraction for timeline in timelines]
    return row(name, slowdown, bubble, len(graph), perf_counter() - start)


STRAGGLERS = ("", "median", "p95", "p99", "bubble", "scenarios", "seconds", "M/s")


def straggler_table(ps: Any, price: Any, n: int) -> list[str]:
    """Return what each kind of straggler does to the step of 128 replicas."""
    graph = cluster.graph(ps)
    p = cluster.N_STAGES
    rows: list[list[str]] = [one_by_one(ps, graph, price, "no noise", [ps.Noise(seed=0)])]
    for x in (0.005, 0.01, 0.02, 0.05):
        noise = ps.Noise(device=ps.simulation.Normal(x), **GPUS)
        rows.append(noisy(ps, graph, price, f"each GPU its speed, std {x:.1%}", noise, n))
    for x in (0.01, 0.02, 0.05, 0.1):
        noise = ps.Noise(task=ps.simulation.LogNormal(x), **GPUS)
        rows.append(noisy(ps, graph, price, f"each task its time, std {x:.0%}", noise, n))
    for factor in SLOW:
        slow = [ps.Noise(slow_devices={stage: factor}, seed=0) for stage in range(p)]
        rows.append(one_by_one(ps, graph, price, f"one GPU {factor - 1:.0%} slower", slow))
    for factor in (10.0, 100.0):
        pairs = [(a, b) for k in range(p - 1) for a, b in ((k, k + 1), (k + 1, k))]
        slow = [ps.Noise(slow_links={pair: factor}, seed=0) for pair in pairs]
        rows.append(one_by_one(ps, graph, price, f"one link {factor:.0f} times slower", slow))
    for hours in (100, 10, 1):
        noise = ps.Noise(failures=ps.simulation.Failures(every=3600.0 * hours, pause=1.0), **GPUS)
        rows.append(noisy(ps, graph, price, f"a GPU pauses 1 s every {hours} h", noise, n))
    slow = [ps.Noise(slow_devices={stage: 1.1}, seed=0) for stage in range(p)]
    quiet = ps.simulate(graph, price).makespan
    slowdowns = [ps.simulate(graph, price, noise=noise).makespan / quiet - 1 for noise in slow]
    return [
        *machine.table(STRAGGLERS, rows, 1),
        f"One GPU 10% slower, by its stage (%): {' '.join(f'{x:.1%}'[:-1] for x in slowdowns)}",
    ]


def replica_table(ps: Any, price: Any, n: int) -> list[str]:
    """Return what the same noise does to 1 to 128 replicas of 16 micro-batches."""
    m = cluster.BATCH // cluster.N_REPLICAS
    noises = {
        "each GPU its speed, std 1%": ps.Noise(device=ps.simulation.Normal(0.01), **GPUS),
        "each task its time, std 2%": ps.Noise(task=ps.simulation.LogNormal(0.02), **GPUS),
        "a GPU pauses 1 s every 10 h": ps.Noise(failures=ps.simulation.Failures(36e3, 1.0), **GPUS),
    }
    graphs = {r: cluster.graph(ps, r, m * r) for r in REPLICAS}
    body = []
    for name, noise in noises.items():
        one = ps.simulate_many(graphs[1], price, noise, 16 * n, n_jobs=1, progress=False)
        for r, graph in graphs.items():
            start = perf_counter()
            runs = ps.simulate_many(graph, price, noise, n, n_jobs=1, progress=False)
            seconds = perf_counter() - start
            # All replicas are done when the slowest is: half of all steps are longer than the
            # quantile 2^(-1/r) of one; then comes the all-reduce, quiet or not.
            median = np.quantile(one.makespan, 0.5 ** (1 / r)) - one.quiet_makespan
            cells = row(name, runs.makespan / runs.quiet_makespan, runs.bubble_fraction,
                        len(graph), seconds)  # fmt: skip
            expected = f"{1 + median / runs.quiet_makespan:.4f}"
            body.append([name, f"{r}", expected, *cells[1:]])
    columns = ("", "replicas", "median expected", *STRAGGLERS[1:])
    return machine.table(columns, body, 1)


def agreement(ps: Any, n: int) -> list[str]:
    """Return how far apart the two networks are, and how fast runs run on either."""
    graph, lines = cluster.graph(ps), []
    noise = ps.Noise(task=ps.simulation.LogNormal(0.02), **GPUS)
    makespans = {}
    for kind, what in NETWORKS.items():
        price = cluster.costs(ps, kind)
        ps.simulate_many(graph, price, noise, 1, n_jobs=1, progress=False)  # compiles
        start = perf_counter()
        makespans[kind] = ps.simulate_many(
            graph, price, noise, n, n_jobs=1, progress=False
        ).makespan
        rate = len(graph) * n / (perf_counter() - start)
        lines.append(f"{what}: {machine.number(rate, 1e6)} M task-scenarios/s ({n} scenarios)")
    apart = float(np.abs(makespans["nics"] / makespans["links"] - 1).max())
    return [*lines, f"Their makespans differ by {apart:.1e} at most."]


def report(quick: bool) -> list[str]:
    """Measure everything and return the lines."""
    phases, results = phase_table(quick)
    machine.pin(1)
    import pipesim as ps

    pace = machine.pace()
    n = 32 if quick else 1024
    price = cluster.costs(ps, "links")
    busy = 3 * price.forward[1] * cluster.BATCH / cluster.N_REPLICAS  # seconds a GPU and step
    per_step = 16384 * busy / EVERY
    lines = [
        *machine.header(("numpy", "numba", "pipesim")),
        "Llama 3 405B, arXiv 2407.21783, table 4: 16,384 GPUs as TP8 x PP16 x DP128; 1F1B (the",
        "paper interleaves), 16 micro-batches of 1 sequence; 400 TFLOP/s a GPU inside tasks;",
        "DGX H100, nominal: 50 GB/s and 14 us a NIC, one NIC a GPU. No optimizer step.",
        *cluster.size_lines(ps, results["nics"]),
        "",
        "Seconds to simulate one step, median of runs; fresh processes on one core, one thread.",
        "process: start to exit, the interpreter's included. imports: pipesim and numpy; numba is",
        "imported by lower. cache: numba's compiled code on disk",
        *phases,
        "",
        f"The paper's step. Input: {cluster.RATE / 1e12:.0f} TFLOP/s inside tasks, sizes, network",
        f"V={N_CHUNKS}: bubbles of the interleaved schedule alone, by the paper's (p-1)/(V m); 8",
        "chunks because the paper's first chunk has no layer where its stage has one layer less",
        *paper_table(ps),
        "",
        "What stragglers do to the step: percentiles of its slowdown (1 is the quiet step), median",
        "bubble, scenarios, seconds for all of them and million task-scenarios a second, one core.",
        "A device is as slow as the slowest of its 8 GPUs. Slow GPU: scenarios are its 16 stages;",
        "slow link: 15 pairs of stages, both ways, of one replica (all-reduces are not slowed)",
        *straggler_table(ps, price, n),
        f"Failures as in the paper, 419 in 54 days of 16,384 GPUs: {per_step:.1e} of them a step",
        "",
        "Why replicas amplify: the all-reduce waits for the slowest. Expected median: the quantile",
        f"2^(-1/replicas) of {16 * n:,} steps of one replica; 16 micro-batches each. One replica",
        "waits for the slowest of 8 GPUs in each of 16 stages already, so noise that all GPUs have",
        "grows little from there; rare pauses hit few steps of one replica and most steps of many",
        *replica_table(ps, price, n),
        "",
        "The tables above have a link for each pair of nodes. Beside a NIC for both directions:",
        *agreement(ps, 8 if quick else 64),
    ]
    paces = f"{pace * 1e9:.0f} ns before the tables of stragglers, {machine.pace() * 1e9:.0f} after"
    return [*lines, "", f"An addition in a Python loop, which shows drift: {paces}"]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few scenarios")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/cluster_step.txt")
    options = parser.parse_args()
    quick = options.quick
    out = options.out or (None if quick else machine.ROOT / "results/benchmarks/cluster_step.txt")
    machine.publish([line.rstrip() for line in report(quick)], out)


if __name__ == "__main__":
    main()

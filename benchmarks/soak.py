"""A soak: 2,000 steps of 1F1B, in two processes and in the threads of one.

Stages are small, so that what a step leaves behind would show. Each process notes, every 20 steps,
what is resident; when warm and at the end, how many objects Python's collector sees after a full
collection, its threads, its open files, and the keys of the shared store. The soak fails, and exits
with 1, unless

- memory is flat: the resident set grows by less than 1 KiB a step from the first tenth of the
  steps, which warm up, to the end; objects by less than one in 10 steps; threads and files not
  at all, and the store's keys by those of leaving;
- the step's time does not drift: its slope over blocks of 50 steps (Theil and Sen's, with the
  95 % interval of Sen 1968) is not above 5 % a 1,000 steps with confidence, or that of the
  process's own CPU time is not. Others on the machine can slow all steps down, and with them the
  first; what we do ourselves more and more shows in both;
- the loss falls: the mean of the last tenth is below half that of the first.

``python benchmarks/soak.py`` prints the table and writes it to results/benchmarks/soak.txt.
``--trace`` adds what `tracemalloc` finds to have grown; it slows steps down.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import tracemalloc
import warnings
from itertools import combinations
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import _machine as machine
import _ranks
import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import PipeWarning

N_STAGES, N_MICROBATCHES, WIDTH, BATCH = 2, 8, 64, 64
EVERY, BLOCK = 20, 50
MOST_BYTES, MOST_OBJECTS, MOST_DRIFT, MOST_LOSS = 1024.0, 0.1, 0.05, 0.5
MOST_KEYS = 2  # a process that has ended its steps says so, one key each


class ProcessCounts(NamedTuple):
    """What a process has."""

    n_objects: int
    n_threads: int
    n_files: int
    n_keys: int


def run_rank(options: dict[str, Any], n_ranks: int, directory: str) -> None:
    """Be one process: run all steps, and write what was seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", PipeWarning)
    if n_ranks == 1:
        record = soak(options, None)
    else:
        with px.join(timeout=60) as processes:
            record = soak(options, processes)
    Path(directory, f"{n_ranks}.{os.environ['RANK']}.json").write_text(json.dumps(record))


def soak(options: dict[str, Any], processes: Processes | None) -> dict[str, Any]:
    """Run all steps; return seconds, CPU seconds, losses, resident bytes and counts."""
    n_steps = options["steps"]
    # Made first: what is noted is no growth.
    record: dict[str, Any] = {key: [0.0] * n_steps for key in ("seconds", "cpu", "losses")}
    record["resident"] = [0] * (n_steps // EVERY)
    inputs = torch.randn(BATCH, WIDTH)
    targets = torch.tanh(inputs @ torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
    stages = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for _ in range(N_STAGES)
    ]
    graph = ps.lower(ps.schedule("1f1b", N_STAGES, N_MICROBATCHES))
    pipeline = px.Pipeline(
        stages,
        graph,
        ["cpu"] * (N_STAGES if processes is None else 1),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        processes=processes,
    )
    before = None
    for step in range(n_steps):
        if step == n_steps // 10:
            record["warm"] = counts(processes)
            if options["trace"]:
                tracemalloc.start()
                before = tracemalloc.take_snapshot()
        cpu, start = process_time(), perf_counter()
        result = pipeline.step(inputs, targets)
        record["seconds"][step] = perf_counter() - start
        record["cpu"][step] = process_time() - cpu
        record["losses"][step] = float(sum(result.losses)) if result.losses else 0.0
        if step % EVERY == EVERY - 1:
            record["resident"][step // EVERY] = machine.resident()
    del result
    record["end"] = counts(processes)
    if before is not None:
        grown = tracemalloc.take_snapshot().compare_to(before, "lineno")
        record["trace"] = [str(line) for line in grown[:10]]
    pipeline.close()
    return record


def counts(processes: Processes | None) -> ProcessCounts:
    """Return what this process has now."""
    gc.collect()
    return ProcessCounts(
        len(gc.get_objects()),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        0 if processes is None else processes.store.num_keys(),
    )


def slope(values: list[float]) -> tuple[float, float, float]:
    """Return Theil and Sen's slope, from one value to the next, and its 95 % interval."""
    n = len(values)
    slopes = sorted((values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2))
    spread = 1.96 * (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    low = max(int((len(slopes) - spread) / 2), 0)
    return statistics.median(slopes), slopes[low], slopes[-1 - low]


def drift(seconds: list[float]) -> tuple[float, float, float]:
    """Return the slope of the steps' time as a share of its median, a 1,000 steps."""
    warm = seconds[len(seconds) // 10 :]
    blocks = [
        statistics.median(warm[i : i + BLOCK]) for i in range(0, len(warm) - BLOCK + 1, BLOCK)
    ]
    scale = 1000 / BLOCK / statistics.median(blocks)
    trend = slope(blocks)
    return trend[0] * scale, trend[1] * scale, trend[2] * scale


def row(name: str, record: dict[str, Any], losses: list[float]) -> tuple[list[str], list[str]]:
    """Return a process's line of the table, and what is wrong with it."""
    n_steps = len(record["seconds"])
    n_warm = n_steps - n_steps // 10
    resident = record["resident"][n_steps // 10 // EVERY :]
    first, last = (statistics.median(part) for part in (resident[:5], resident[-5:]))
    warm, end = ProcessCounts(*record["warm"]), ProcessCounts(*record["end"])
    tenth = n_steps // 10
    falls = statistics.mean(losses[-tenth:]) / statistics.mean(losses[:tenth])
    time, cpu = drift(record["seconds"]), drift(record["cpu"])
    wrong = {
        "the resident set grows": (last - first) / n_warm > MOST_BYTES,
        "objects grow": (end.n_objects - warm.n_objects) / n_warm > MOST_OBJECTS,
        "threads or files grow": end.n_threads > warm.n_threads or end.n_files > warm.n_files,
        "the store's keys grow": end.n_keys > warm.n_keys + MOST_KEYS,
        "steps become slower": min(time[1], cpu[1]) > MOST_DRIFT,
        "the loss does not fall": not falls < MOST_LOSS,
    }
    cells = [
        name,
        f"{statistics.median(record['seconds']) * 1e3:.1f}",
        f"{statistics.median(record['cpu']) * 1e3:.1f}",
        _share(time),
        _share(cpu),
        f"{first / 2**20:.1f}",
        f"{last / 2**20:.1f}",
        *(f"{a} -> {b}" for a, b in zip(warm, end, strict=True)),
        f"{losses[0]:.3f} -> {losses[-1]:.4f}",
    ]
    return cells, [f"{name}: {what}" for what, is_so in wrong.items() if is_so]


def _share(trend: tuple[float, float, float]) -> str:
    return f"{trend[0]:+.1%} ({trend[1]:+.1%} to {trend[2]:+.1%})"


def main() -> None:
    """Run both, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--trace", action="store_true")
    out = machine.ROOT / "results" / "benchmarks" / "soak.txt"
    parser.add_argument("--out", type=Path, default=out)
    options = vars(parser.parse_args())
    out = options.pop("out")
    table, wrong, traces = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for n_ranks, name in ((2, "process"), (1, "threads")):
            _ranks.spawn(run_rank, n_ranks, options, n_ranks, directory)
            records = [
                json.loads(Path(directory, f"{n_ranks}.{rank}.json").read_text())
                for rank in range(n_ranks)
            ]
            losses = records[-1]["losses"]  # the last process has the last stage
            for rank, one in enumerate(records):
                label = f"{name} {rank}" if n_ranks > 1 else name
                cells, bad = row(label, one, losses)
                table.append(cells)
                wrong += bad
                traces += [f"{label}: {line}" for line in one.get("trace", [])]
    columns = ["", "step ms", "CPU ms", "drift of the step's time a 1,000 steps", "of its CPU time",
               "resident MiB when warm", "at the end", "objects", "threads", "files", "store keys",
               "loss"]  # fmt: skip
    sizes = f"1F1B, {N_STAGES} stages, {N_MICROBATCHES} micro-batches, {options['steps']} steps"
    load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
    verdict = "\n".join(wrong) or "memory flat, no drift, loss falls"
    lines = [*machine.header(["torch"]), load, sizes, "", *machine.table(columns, table, 1), ""]
    machine.publish([*lines, verdict, *traces], out)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

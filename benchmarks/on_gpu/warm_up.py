"""Step ``warm-up``: load what all steps load, and save the prediction from the data sheet first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter

import torch

import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.prediction import predicted, sheet_of
from on_gpu.report import Report
from on_gpu.sources import digest
from pipesim.utils import jit

#: Tasks of a micro-batch on eight devices: F and B of each, and messages to and from seven.
_TASKS = 8 * 2 + 7 * 4


def warm_up(bench: Bench, report: Report) -> None:
    """Load torch, CUDA's libraries and compiled loops; save what a data sheet predicts."""
    start = perf_counter()
    report.record("sources", digest=digest())
    bench.out.mkdir(parents=True, exist_ok=True)
    (bench.out / "machine.txt").write_text(_machine())
    if not bench.dry:
        properties = torch.cuda.get_device_properties(bench.gpu)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        report.add(f"{properties.name}, {memory}, UUID {getattr(properties, 'uuid', 'unknown')}")
    named_sheet = sheet_of(bench)
    if named_sheet is None:
        report.add("no data sheet of this GPU: no prediction from it")
    else:
        name, sheet = named_sheet
        report.add(f"data sheet of {name}: {sheet}; makespans in ms, of nothing measured")
        for row in predicted(bench, sheet, bench.slice_counts).itertuples():
            report.record(
                "data sheet", slices=row.slices, schedule=row.schedule, overlap=row.overlap,
                makespan=row.makespan, sheet=name,
            )  # fmt: skip
            if row.overlap:
                report.add(f"{row.slices} slices, {row.schedule:>16} {row.makespan * 1e3:8.2f}")
    report.add(f"predicted in {perf_counter() - start:.1f} s")
    if not bench.dry:
        x = torch.randn(1024, 1024, device=bench.gpu, requires_grad=True)
        (x @ x).sum().backward()  # cuBLAS, and autograd's thread for the GPU
        torch.cuda.synchronize()
        # Loops are compiled, and kept on disk, once they have more tasks than run as plain Python.
        graph = ps.lower(ps.schedule("1f1b", 8, jit.PLAIN_ELEMENTS_UNCACHED // _TASKS))
        ps.simulate(graph, ps.Costs(forward=1.0, backward=2.0))
    report.add(f"compiled loops: {jit.available()}; ready after {perf_counter() - start:.1f} s")


def _machine() -> str:
    """Return what is known of the machine: its GPU, memory and packages."""
    try:
        done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=20,
                              check=False)  # fmt: skip
        gpu = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        gpu = f"nvidia-smi: {error}\n"
    packages = sorted({f"{x.name} {x.version}" for x in distributions()})
    lines = [gpu, f"{platform.platform()}, {os.cpu_count()} cores, Python {sys.version}",
             Path("/proc/meminfo").read_text().splitlines()[0], *packages]  # fmt: skip
    return "\n".join(lines) + "\n"

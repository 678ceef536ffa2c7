"""How long the first answers take in a new process, beside the libraries that they stand on.

``python benchmarks/cold_start.py`` starts processes in turn, so that a machine that slows down
slows all, and writes ``results/benchmarks/cold_start.txt``: medians of their own clocks. numba's
cache is filled before. The first simulation is of 389,184 tasks, 1F1B on (64, 1024), and has the
schedule, lowering and loading of compiled code in it; the small one, (4, 8), runs as Python.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import _machine as machine

_TIMED = "from time import perf_counter as now; t = now(); {}; print(now() - t)"
_SIMULATED = (
    "graph = ps.lower(ps.schedule('1f1b', {0}, {1})); "
    "ps.simulate(graph, ps.Costs(1e-3, 2e-3, output_bytes=1e6, "
    "network=ps.Network(1e-6, 25e9))).makespan"
)
CASES = {
    "import numpy, pandas": _TIMED.format("import numpy, pandas"),
    "import numba": _TIMED.format("import numba"),
    "import pipesim": _TIMED.format("import pipesim"),
    "first small simulation, pipesim imported": (
        "import pipesim as ps; " + _TIMED.format(_SIMULATED.format(4, 8))
    ),
    "first compiled simulation, pipesim imported": (
        "import pipesim as ps; " + _TIMED.format(_SIMULATED.format(64, 1024))
    ),
    "import pipesim and first compiled simulation": (
        _TIMED.format("import pipesim as ps; " + _SIMULATED.format(64, 1024))
    ),
}


def seconds(code: str) -> float:
    """Run code in a fresh process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=machine.pinned(1),
        cwd=machine.ROOT,
    )
    return float(done.stdout)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--out", type=Path, default=machine.ROOT / "results/benchmarks/cold_start.txt"
    )
    options = parser.parse_args()
    for code in CASES.values():
        seconds(code)  # fills the caches of numba and of the file system
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, code in CASES.items():
            times[name].append(seconds(code))
    rows = [
        [name, f"{statistics.median(values):.3f}", f"{min(values):.3f}", f"{max(values):.3f}"]
        for name, values in times.items()
    ]
    lines = machine.header(("numpy", "pandas", "numba", "pipesim"))
    lines += [f"Seconds in fresh processes, medians of {options.rounds} rounds in turn", ""]
    machine.publish([*lines, *machine.table(("", "median", "least", "most"), rows, 1)], options.out)


if __name__ == "__main__":
    main()

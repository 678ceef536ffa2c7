"""What the benchmarks of the simulator share: the machine, its clock and memory, and tables."""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
ROOT = Path(__file__).resolve().parent.parent


def pinned(n_cores: int) -> dict[str, str]:
    """Return the environment of a process that has ``n_cores`` threads."""
    return {**os.environ, **dict.fromkeys(THREADS, str(n_cores))}


def pin(n_cores: int) -> None:
    """Keep this process on ``n_cores`` of the cores that it may use: the last ones."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-n_cores:])


def _field(path: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", Path(path).read_text(), re.MULTILINE)
    return match[1].strip() if match else "unknown"


def memory(name: str) -> int:
    """Return MemTotal or MemAvailable of the machine, in bytes."""
    return int(_field("/proc/meminfo", name).split()[0]) * 1024


def reset_peak() -> int:
    """Make `peak` start again at what is resident now; return that, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not allowed in some containers: the peak then is that since the start
        return peak()
    return resident()


def resident() -> int:
    """Return the bytes that are resident now."""
    return int(_field("/proc/self/status", "VmRSS").split()[0]) * 1024


def peak() -> int:
    """Return the most bytes that were resident since `reset_peak`."""
    return int(_field("/proc/self/status", "VmHWM").split()[0]) * 1024


def header(packages: Sequence[str]) -> list[str]:
    """Return the lines that say what was run, when, and on what."""
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    cores = f"{os.cpu_count()} cores, {memory('MemTotal') / 2**30:.0f} GiB of memory"
    return [
        f"# {' '.join(['python', str(script), *sys.argv[1:]])}",
        f"{_field('/proc/cpuinfo', 'model name')}, {cores}",
        ", ".join(versions),
        f"{datetime.date.today()}",
    ]


def pace() -> float:
    """Return seconds of an addition in a Python loop: shows by how much a shared machine drifts."""
    best = math.inf
    for _ in range(5):
        start, total = perf_counter(), 0
        for i in range(300_000):
            total += i
        best = min(best, perf_counter() - start)
    return best / 300_000


def number(value: float | None, scale: float = 1.0) -> str:
    """Return three significant digits, or a dash for what was not measured."""
    if value is None:
        return "-"
    value /= scale
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], n_left: int) -> list[str]:
    """Return aligned lines; the first ``n_left`` columns are flush left.

    A row that is shorter than ``columns`` ends in a remark, which may run over them.
    """
    cells = [columns, *(row for row in rows if len(row) == len(columns))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in rows:
        head = row if len(row) == len(columns) else row[:-1]
        for i, cell in enumerate(head):
            widths[i] = max(widths[i], len(cell))
    return [
        "  ".join(
            cell if i == len(row) - 1 and len(row) < len(columns)
            else cell.ljust(widths[i]) if i < n_left
            else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in (columns, *rows)
    ]  # fmt: skip


def publish(lines: Sequence[str], out: Path | None) -> None:
    """Print the lines, and write them to ``out``, whole or not at all."""
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = out.with_name(out.name + ".tmp")
        written.write_text(text)
        written.replace(out)

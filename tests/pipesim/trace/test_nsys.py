"""Reports of Nsight Systems, made by hand, as timelines."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

import pipesim as ps
from pipesim.errors import TimelineError

#: Process, name, start and end of a range (us). The second process has a clock 1 ms ahead.
FIRST = [(7, "PP:0F0", 0, 10), (7, "PP:0B0", 35, 45)]
SECOND = [(9, "PP:1F0, seq = 3, sizes = [[2, 2]]", 1013, 1023), (9, "PP:1B0", 1023, 1033)]
#: Process, launch and its thread, start and end of the kernel (us), and its name.
KERNELS = [
    (7, 1, 1, 2, 12, "gemm"),
    (7, 38, 2, 37, 47, "gemm"),  # by the thread of autograd
    (9, 1014, 1, 1015, 1024, "gemm"),
    (9, 1020, 1, 1000, 1100, "ncclDevKernel_SendRecv"),
    (9, 1025, 1, 1026, 1034, "gemm"),
]


def report(
    path: Path,
    ranges: Iterable[tuple[int, str, int, int]],
    kernels: Iterable[tuple[int, int, int, int, int, str]] = (),
) -> Path:
    """Write a report, names of ranges in turn as texts and as numbers of texts."""
    names: dict[str, int] = {}
    with closing(sqlite3.connect(path)) as database:
        database.executescript("""
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE NVTX_EVENTS
                (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT);
        """)
        for k, (process, name, start, end) in enumerate(ranges):
            texts = (name, None) if k % 2 else (None, names.setdefault(name, len(names)))
            place = (1 << 56) + (process << 24) + 1
            row = (start * 1000, end * 1000, 59, *texts, place)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
            mark = (start * 1000, None, 34, "PP:0F1", None, place)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", mark)
        if kernels:
            database.executescript("""
                CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
                    (start INT, end INT, globalTid INT, correlationId INT);
                CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
                    (start INT, end INT, globalPid INT, correlationId INT, demangledName INT);
            """)
        for k, (process, time, thread, start, end, name) in enumerate(kernels):
            launch = (time * 1000, time * 1000 + 500, (process << 24) + thread, k)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", launch)
            text = names.setdefault(name, len(names))
            kernel = (start * 1000, end * 1000, process << 24, k, text)
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", kernel
            )
        rows = [(number, name) for name, number in names.items()]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        database.commit()
    return path


def compute(timeline: ps.Timeline) -> dict[str, tuple[float, float]]:
    """Return start and end of each forward and backward (us)."""
    frame = timeline.frame[timeline.frame["op"].isin(["F", "B"])]
    return {
        f"{row.stage}{row.op}{row.microbatch}": (
            round(row.start * 1e6, 3), round(row.end * 1e6, 3)
        )
        for row in frame.itertuples()
    }  # fmt: skip


def test_ranges_alone(tmp_path: Path) -> None:
    """Without kernels, tasks have the times of their ranges; clocks are aligned by messages."""
    reports = [report(tmp_path / "0.sqlite", FIRST), report(tmp_path / "1.sqlite", SECOND)]
    traces = ps.trace.nsys_to_chrome(reports, tmp_path / "traces")
    assert [trace.name for trace in traces] == ["0.rank0.json", "1.rank1.json"]
    # Of the 35 - 10 us between the tasks of stage 0, 5 us are messages: half each way.
    assert compute(ps.Timeline.from_chrome(traces)) == {
        "0F0": (0, 10), "1F0": (12.5, 22.5), "1B0": (22.5, 32.5), "0B0": (35, 45)
    }  # fmt: skip


def test_kernels_of_two_processes(tmp_path: Path) -> None:
    """Tasks last from their first kernel to their last; one report has both processes."""
    path = report(tmp_path / "all.sqlite", FIRST + SECOND, KERNELS)
    timeline = ps.Timeline.from_chrome(ps.trace.nsys_to_chrome(path, tmp_path / "traces"))
    # 37 - 12 us between the kernels of stage 0, 19 us of which stage 1 takes.
    assert compute(timeline) == {"0F0": (0, 10), "1F0": (13, 22), "1B0": (24, 32), "0B0": (35, 45)}


def test_refused_files(tmp_path: Path) -> None:
    """Errors say how to record or convert."""
    (tmp_path / "report.nsys-rep").write_bytes(b"something else")
    with pytest.raises(TimelineError, match="nsys export --type sqlite"):
        ps.trace.nsys_to_chrome(tmp_path / "report.nsys-rep", tmp_path)
    with pytest.raises(TimelineError, match="no NVTX ranges"):
        ps.trace.nsys_to_chrome(report(tmp_path / "empty.sqlite", []), tmp_path)
    cut = report(tmp_path / "cut.sqlite", FIRST).read_bytes()[:5000]
    (tmp_path / "cut.sqlite").write_bytes(cut)
    with pytest.raises(TimelineError, match="export it again"):
        ps.trace.nsys_to_chrome(tmp_path / "cut.sqlite", tmp_path)

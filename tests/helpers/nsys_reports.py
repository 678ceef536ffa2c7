"""Reports of Nsight Systems, as ``nsys export --type sqlite`` writes them, made by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

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
    path.unlink(missing_ok=True)
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

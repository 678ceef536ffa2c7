"""Reports of Nsight Systems as Chrome traces.

``nsys export --type sqlite report.nsys-rep`` writes the report as a database. Its tables are in the
"SQLite Export Schema Reference" of https://docs.nvidia.com/nsight-systems. Names of ranges from
`torch.autograd.profiler.emit_nvtx` are in ``getNvtxStr`` of pytorch/pytorch,
torch/csrc/profiler/util.cpp.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.errors import TimelineError
from pipesim.trace.chrome_export import Event, write
from pipesim.trace.listed_files import files_of
from pipesim.utils.files import check_path, read_bytes, write_errors

if TYPE_CHECKING:
    import sqlite3


#: First bytes of an SQLite database.
SQLITE = b"SQLite format 3\0"
#: Ranges, with the event types of push and pop, and of start and end.
_RANGES = """
    SELECT COALESCE(n.text, s.value, ''), n.start, n.end, n.globalTid
    FROM NVTX_EVENTS AS n LEFT JOIN StringIds AS s ON s.id = n.textId
    WHERE n.eventType IN (59, 60) AND n.end IS NOT NULL
"""
_LAUNCHES = "SELECT 'launch', start, end, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNELS = """
    SELECT COALESCE(s.value, ''), k.start, k.end, k.globalPid, k.correlationId
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS k LEFT JOIN StringIds AS s ON s.id = k.demangledName
"""
#: Table, query and category of each kind of event in a trace.
_EVENTS = (
    ("NVTX_EVENTS", _RANGES, "user_annotation"),
    ("CUPTI_ACTIVITY_KIND_RUNTIME", _LAUNCHES, "cuda_runtime"),
    ("CUPTI_ACTIVITY_KIND_KERNEL", _KERNELS, "kernel"),
    *(
        (
            f"CUPTI_ACTIVITY_KIND_{kind}",
            f"SELECT '{kind}', start, end, globalPid, correlationId "
            f"FROM CUPTI_ACTIVITY_KIND_{kind}",
            f"gpu_{kind.lower()}",
        )
        for kind in ("MEMCPY", "MEMSET")
    ),
)
#: Suffixes of torch's names: number in autograd, number of the operation, sizes of its inputs.
_SUFFIX = re.compile(r", (seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)


def nsys_to_chrome(paths: Path | str | Iterable[Path | str], folder: Path | str) -> list[Path]:
    """Convert reports of Nsight Systems to Chrome traces, one a process.

    A trace has the NVTX ranges of its process, and the kernels and copies that it launched.
    `pipesim.Timeline.from_chrome` reads the traces, ui.perfetto.dev shows them.

    Record ranges with ``nsys profile --trace=cuda,nvtx``. Torch's ranges, such as ``PP:1F0``, are
    NVTX ranges in the context `torch.autograd.profiler.emit_nvtx`.

    Parameters
    ----------
    paths
        SQLite databases that ``nsys export --type sqlite`` wrote, in order of the ranks; or one
        for all ranks of a host; or a folder of ``*.sqlite``, in order of name.
    folder
        Folder for the traces; made if it is not there.

    Returns
    -------
    list of Path
        Traces of all processes with ranges. Those of one report are in order of process numbers.

    Raises
    ------
    TimelineError
        For a file that is no such database, and for one without ranges.

    Examples
    --------
    >>> import pipesim as ps
    >>> traces = ps.trace.nsys_to_chrome("report.sqlite", "traces")  # doctest: +SKIP
    >>> ps.Timeline.from_chrome(traces)  # doctest: +SKIP
    """
    files = files_of(paths, "*.sqlite")
    target = check_path("folder", folder, "write")
    with write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    traces: list[Path] = []
    for path in files:
        for events in _events_by_process(path):
            rank = len(traces)
            traces.append(target / f"{path.stem}.rank{rank}.json")
            write(traces[-1], {"distributedInfo": {"rank": rank}, "traceEvents": events})
    return traces


def _events_by_process(path: Path) -> list[list[Event]]:
    """Return the events of each process with ranges, in order of its number."""
    import sqlite3

    if read_bytes(path, "a report from", TimelineError, first=len(SQLITE)) != SQLITE:
        raise TimelineError(
            f"cannot read a report from {path}: it is no SQLite database; convert it with: "
            "nsys export --type sqlite report.nsys-rep"
        )
    events: dict[int, list[Event]] = defaultdict(list)
    ranged: set[int] = set()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as report:
            for event in _events(report):
                events[event["pid"]].append(event)
                if event["cat"] == "user_annotation":
                    ranged.add(event["pid"])
    except (sqlite3.Error, ValueError) as error:
        raise TimelineError(
            f"cannot read a report from {path}: {error}; export it again with: "
            "nsys export --type sqlite report.nsys-rep"
        ) from error
    if not ranged:
        raise TimelineError(
            f"{path} has no NVTX ranges; record them with: nsys profile --trace=cuda,nvtx"
        )
    return [events[process] for process in sorted(ranged)]


def _events(report: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Yield ranges, launches, kernels and copies as events of a trace (us)."""
    tables = {name for (name,) in report.execute("SELECT name FROM sqlite_master")}
    for table, query, category in _EVENTS:
        for name, start, end, place, *correlation in (
            report.execute(query) if table in tables else ()
        ):
            numbers = (start, end, place, *correlation)
            if not (isinstance(name, str) and all(isinstance(x, int) for x in numbers)):
                raise ValueError(f"{table} has a row without name, times and process")
            # The lowest 24 bits are the thread (0 in a globalPid), the next 24 the process.
            process, thread = place >> 24 & 0xFFFFFF, place & 0xFFFFFF
            yield {
                "ph": "X", "cat": category, "name": _SUFFIX.sub("", name), "pid": process,
                "tid": thread, "ts": start / 1e3, "dur": (end - start) / 1e3,
                "args": {"correlation": correlation[0]} if correlation else {},
            }  # fmt: skip

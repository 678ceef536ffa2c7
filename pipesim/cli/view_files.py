"""Read the files that `pipesim view` shows: timelines, schedules, traces and run directories.

The kind of a file is recognised by its content, that of a folder by the names of its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.cli.view_runs import is_run, read_run
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.lowering.lower import lower
from pipesim.plot.page.html import PAGE_MARK
from pipesim.plot.page.save import Showable
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.timeline.csv_files import is_header
from pipesim.timeline.timeline import Timeline
from pipesim.trace.nsys import SQLITE
from pipesim.trace.run_files import as_chrome, file_kind, load
from pipesim.utils.files import check_path, is_folder, read_bytes

_EXPECTED = (
    "pipesim view shows a timeline (.csv or .parquet), a schedule (.csv), a trace (.json, "
    ".json.gz, .sqlite, or a folder of one file a rank) and a run directory of pipeexec"
)
#: Bytes of a file by which its kind is recognised.
_HEAD = 1 << 16
_GZIP = b"\x1f\x8b"
_PAGE = PAGE_MARK.encode()
_ACTION = re.compile(r"\(?[0-9]+[A-Z]")
#: Options of the command for arguments of `Timeline.from_chrome`.
TRACE_FLAGS = {
    **{name: f"--{name}" for name in ("pattern", "fields", "ops", "only")},
    "step": "--step",
    "n_ranks": "--ranks",
}
_ENDING = re.compile(
    r"((\.pt)?(\.trace)?\.json(\.gz)?|\.csv|\.txt|\.parquet|\.sqlite)$", re.IGNORECASE
)
#: JSON files of a run directory, and what to do with each.
_RUN_FILES = {
    "run.json": "it is the record of a run; give its folder",
    "training.json": "it is the record of a training; give its folder",
    "costs.json": "it has costs and no times; give it as --costs, beside a file to show",
}


class ViewOptions(NamedTuple):
    """Options of all files.

    Attributes
    ----------
    costs
        Costs of timelines, which schedules are simulated with; None for those of a run directory.
    trace
        Further arguments of `Timeline.from_chrome`, by name.
    """

    costs: Costs | None
    trace: Mapping[str, Any]


#: Returns the content of a file by name, "" for the file itself.
_Reader = Callable[[Path, ViewOptions], Mapping[str, Showable]]


def read_items(files: Sequence[str], options: ViewOptions) -> dict[str, Showable]:
    """Return the timelines, comparisons and schedules of files by name.

    Raises
    ------
    PipeError
        For a file that cannot be read.
    """
    if "" in files:
        raise ArgumentError("the name of a FILE is empty; give a file or a folder")
    paths = [check_path("FILE", file) for file in files]
    for path in paths:
        if paths.count(path) > 1:
            raise ArgumentError(f"{path} is given twice; give each file once")
    readers = [_reader(path) for path in paths]
    if options.trace and _read_trace not in readers:
        flags = " and ".join(TRACE_FLAGS[name] for name in options.trace)
        raise ArgumentError(f"no FILE is a Chrome trace; leave out {flags}")
    stems = [stem(path) for path in paths]
    items: dict[str, Showable] = {}
    for path, reader in zip(paths, readers, strict=True):
        name = str(path) if stems.count(stem(path)) > 1 else stem(path)
        for part, item in reader(path, options).items():
            label = f"{name}: {part}" if part and len(paths) > 1 else part
            items[label or name] = item
    return items


def stem(path: Path) -> str:
    """Return the name of a file without its ending, or of a folder."""
    if is_folder(path):
        return path.resolve().name or "timeline"
    return _ENDING.sub("", path.name) or "timeline"


def is_page(path: Path) -> bool:
    """Return whether a file is a page that `pipesim.to_html` wrote."""
    return path.is_file() and _PAGE in read_bytes(path, "page", ArgumentError, first=_HEAD)


def _reader(path: Path) -> _Reader:
    """Return the function that reads a file or a folder."""
    if is_folder(path):
        return _folder_reader(path)
    head = read_bytes(path, "file", ArgumentError, first=_HEAD)
    if head.startswith((_GZIP, SQLITE)):
        return _read_trace
    if path.suffix.lower() == ".parquet":
        return _read_timeline
    text = head.decode("utf-8-sig", errors="replace").strip()
    if not text:
        raise ArgumentError(f"cannot view {path}: it is empty; {_EXPECTED}")
    if "\0" in text:
        raise ArgumentError(f"cannot view {path}: it is no text; {_EXPECTED}")
    if _PAGE in head:
        raise ArgumentError(f"cannot view {path}: it is a page already; open it in a browser")
    if text[0] in "[{":
        if path.name in _RUN_FILES:
            raise ArgumentError(f"cannot view {path}: {_RUN_FILES[path.name]}")
        return _read_trace
    first = text.partition("\n")[0]
    if is_header(first):
        return _read_timeline
    # A device may begin with idle steps, which are empty cells; a grid has labels of devices.
    action = re.search(r"[^,\s]+", first.rpartition("|")[2])
    if action and _ACTION.match(action[0]):
        return _read_schedule
    raise ArgumentError(f"cannot view {path}: it begins with {first[:60]!a}; {_EXPECTED}")


def _folder_reader(path: Path) -> _Reader:
    """Return the function that reads a folder."""
    if is_run(path):
        return _read_run
    names = sorted(file.name for file in path.iterdir() if not file.name.startswith("."))
    if any(name.endswith((".json", ".json.gz", ".sqlite")) for name in names):
        return _read_trace
    runs = [name for name in names if is_run(path / name)]
    near = f"; did you mean {path / runs[0]}?" if runs else ""
    raise ArgumentError(
        f"cannot view the folder {path}: it has no timeline.csv, no run.json and no trace{near}"
        f"{'' if near else f'; {_EXPECTED}'}"
    )


def _read_timeline(path: Path, options: ViewOptions) -> dict[str, Showable]:
    return {"": Timeline.load(path, costs=options.costs)}


def _read_run(path: Path, options: ViewOptions) -> dict[str, Showable]:
    return {**read_run(path, options.costs)}


def _read_trace(path: Path, options: ViewOptions) -> dict[str, Showable]:
    """Return the timelines of a file, or the step of a trace, with the costs' bytes."""
    kind = file_kind(path)
    if kind == "primus" and options.trace:
        flags = " and ".join(TRACE_FLAGS[name] for name in options.trace)
        raise ArgumentError(f"{path} has no ranges, but times of Primus; leave out {flags}")
    if kind == "primus" or (kind == "saved" and not options.trace):
        timelines = [replace(x, costs=options.costs) for x in load(path).values()]
        names = [x.name for x in timelines] if len(timelines) > 1 else [""]
        return dict(zip(names, timelines, strict=True))
    nbytes: Any = 0.0 if options.costs is None else options.costs.averaged().output_bytes
    with as_chrome(path, kind) as traces:
        timeline = Timeline.from_chrome(traces, output_bytes=nbytes, **options.trace)
    return {"": replace(timeline, costs=options.costs)}


def _read_schedule(path: Path, options: ViewOptions) -> dict[str, Showable]:
    """Return a schedule, or its simulation if there are costs."""
    schedule = Schedule.load(path)
    if options.costs is None:
        return {"": schedule}
    return {"": simulate(lower(schedule), options.costs)}

"""Commands that write interactive pages: ``pipesim view`` of files, ``pipesim demo-page``.

The kind of a file is recognised by its content, that of a folder by the names of its files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.analysis.compare import Comparison
from pipesim.cli.arguments import TRACE_FLAGS
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, CostsError, PipeError, RunDirectoryError, check_count
from pipesim.graph.verify import verify
from pipesim.lowering.lower import lower
from pipesim.network.network import Network
from pipesim.plot.page.save import PAGE_MARK, Showable, to_html
from pipesim.scheduling.registry import options_of_schedules
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import simulate
from pipesim.sweeps.settings import cases, run
from pipesim.timeline.timeline import Timeline
from pipesim.trace.run_files import HEAD, as_chrome, file_kind, head_kind, load
from pipesim.trace.trace_files import stem
from pipesim.utils.files import check_path, is_folder, read_bytes, read_json
from pipesim.utils.texts import format_decimal, format_time

# Run directories of `pipeexec`: each prediction over its measured step

#: Records of a run and of a training.
_RECORDS = ("run.json", "training.json")
_MEASURED, _PREDICTED, _COSTS_FILE = "timeline.csv", "predicted.csv", "costs.json"
#: Places of measured timelines in a run directory: of the run, of its rows, of steps of a training.
_PLACES = (_MEASURED, f"*/{_MEASURED}", f"*/*/{_MEASURED}")
#: Files of a training that are shown.
_TRAINING = re.compile(r"(steps/step-[0-9]{8,}/)?timeline\.csv|predicted\.csv|costs\.json")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, or one of its folders with a timeline."""
    return any((folder / name).is_file() for name in (*_RECORDS, _MEASURED))


def read_run(folder: Path, costs: Costs | None) -> dict[str, Timeline | Comparison]:
    """Return the timelines of a run by name, in the order of its record; it names their files.

    The name of a timeline in the folder itself is "". A timeline is compared with the prediction
    of its row, or else of its run. Without ``costs`` both have the costs of the run, if any.
    """
    is_listed = _listed_files(folder)
    files = [x for place in _PLACES for x in sorted(folder.glob(place)) if is_listed(x)]
    if not files:
        raise RunDirectoryError(
            f"{folder} is a run directory without timelines: neither it nor a folder in it has "
            f"{_MEASURED}; pipeexec run and pipeexec validate write them"
        )
    rows = _record(folder).get("rows")
    listed = rows if isinstance(rows, dict) else ()
    # `pipeexec.validation.result` writes folders of these names.
    names = {name.replace("/", "-").replace(" ", "-"): name for name in listed}
    order = {name: rank for rank, name in enumerate(names)}
    files.sort(key=lambda file: order.get(_place(file, folder), len(order)))
    timelines = {}
    for file in files:
        place = _place(file, folder)
        timelines[names.get(place, place)] = _read_row(file, folder, costs, is_listed)
    return timelines


def _place(file: Path, folder: Path) -> str:
    place = file.parent.relative_to(folder).as_posix()
    return "" if place == "." else place


def _listed_files(folder: Path) -> Callable[[Path], bool]:
    """Return whether a file belongs to the run of a folder: others beside its files are not read.

    The record of a run lists its files. Those of a training have fixed names.
    """
    root = _places_of_files(folder, folder)[-1]
    prefix = "" if root == folder else f"{folder.resolve().relative_to(root).as_posix()}/"
    files = _record(root).get("files")

    def is_listed(file: Path) -> bool:
        name = (
            file.relative_to(root).as_posix()
            if file.is_relative_to(root)
            else f"{prefix}{file.relative_to(folder).as_posix()}"
        )
        if isinstance(files, dict):
            return name in files
        return not (root / _RECORDS[1]).is_file() or _TRAINING.fullmatch(name) is not None

    return is_listed


def _record(folder: Path) -> Mapping[str, Any]:
    record = folder / _RECORDS[0]
    content = read_json(record, "the record", RunDirectoryError) if record.is_file() else None
    return content if isinstance(content, dict) else {}


def _read_row(
    file: Path, folder: Path, costs: Costs | None, is_listed: Callable[[Path], bool]
) -> Timeline | Comparison:
    """Return a measured timeline, compared with its prediction if there is one."""
    places = _places_of_files(file.parent, folder)
    if costs is None and (path := _nearest(_COSTS_FILE, places, is_listed)):
        costs = Costs.load(path)
    measured = Timeline.load(file, costs=costs)
    path = _nearest(_PREDICTED, places, is_listed)
    if path is None:
        return measured
    predicted = Timeline.load(path, costs=costs)
    try:
        return Comparison(predicted, measured)
    except PipeError as error:
        raise RunDirectoryError(f"cannot compare {path} with {file}: {error}") from error


def _places_of_files(place: Path, folder: Path) -> Sequence[Path]:
    """Return the folders that have files of a timeline, the nearest first.

    They reach from ``place``, the folder of the timeline, up to that of the record, which may be
    above ``folder``; without a record, up to ``folder``.
    """
    above = [place, *place.resolve().parents[:2]] if place == folder else [place, *place.parents]
    for count, parent in enumerate(above[:3], start=1):
        if any((parent / name).is_file() for name in _RECORDS):
            return above[:count]
    return above[: above.index(folder) + 1]


def _nearest(name: str, places: Sequence[Path], is_listed: Callable[[Path], bool]) -> Path | None:
    """Return the first file of a name in folders that belongs to the run, or None."""
    files = [place / name for place in places]
    return next((file for file in files if file.is_file() and is_listed(file)), None)


# Files: timelines, schedules, traces and run directories

_EXPECTED = (
    "pipesim view shows a timeline (.csv or .parquet), a schedule (.csv), a trace (.json, "
    ".json.gz, .sqlite, or a folder of one file a rank) and a run directory of pipeexec"
)
_PAGE_MARK = PAGE_MARK.encode()
#: JSON files of a run directory, and what to do with each.
_RUN_FILES = {
    "run.json": "it is the record of a run; give its folder",
    "training.json": "it is the record of a training; give its folder",
    "costs.json": "it has costs and no times; give it as --costs, beside a file to show",
}


class ViewOptions(NamedTuple):
    """Options of all files: costs of timelines and simulations, and more of `Timeline.from_chrome`.

    Without ``costs`` those of a run directory hold.
    """

    costs: Costs | None
    trace: Mapping[str, Any]


#: Returns the content of a file by name, "" for the file itself.
_Reader = Callable[[Path, ViewOptions], Mapping[str, Showable]]


def read_items(files: Sequence[str], options: ViewOptions) -> dict[str, Showable]:
    """Return the timelines, comparisons and schedules of files by name."""
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


def _reader(path: Path) -> _Reader:
    if is_folder(path):
        return _folder_reader(path)
    head = read_bytes(path, "file", ArgumentError, first=HEAD)
    kind = head_kind(path, head)
    if kind == "json" and path.name in _RUN_FILES:
        raise ArgumentError(f"cannot view {path}: {_RUN_FILES[path.name]}")
    if kind == "table":
        return lambda path, options: {"": Timeline.load(path, costs=options.costs)}
    if kind is not None:
        return _read_trace
    text = head.decode("utf-8-sig", errors="replace").strip()
    if not text:
        raise ArgumentError(f"cannot view {path}: it is empty; {_EXPECTED}")
    if "\0" in text:
        raise ArgumentError(f"cannot view {path}: it is no text; {_EXPECTED}")
    if _PAGE_MARK in head:
        raise ArgumentError(f"cannot view {path}: it is a page already; open it in a browser")
    first = text.partition("\n")[0]
    # A device may begin with idle steps, which are empty cells; a grid has labels of devices.
    action = re.search(r"[^,\s]+", first.rpartition("|")[2])
    if action and re.match(r"\(?[0-9]+[A-Z]", action[0]):
        return _read_schedule
    raise ArgumentError(f"cannot view {path}: it begins with {first[:60]!a}; {_EXPECTED}")


def _folder_reader(path: Path) -> _Reader:
    if is_run(path):
        return lambda path, options: {**read_run(path, options.costs)}
    names = sorted(file.name for file in path.iterdir() if not file.name.startswith("."))
    if any(name.endswith((".json", ".json.gz", ".sqlite")) for name in names):
        return _read_trace
    runs = [name for name in names if is_run(path / name)]
    near = f"; did you mean {path / runs[0]}?" if runs else ""
    raise ArgumentError(
        f"cannot view the folder {path}: it has no timeline.csv, no run.json and no trace{near}"
        f"{'' if near else f'; {_EXPECTED}'}"
    )


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
        timeline = Timeline.from_chrome(
            traces, output_bytes=nbytes, name=stem(path), **options.trace
        )
    return {"": replace(timeline, costs=options.costs)}


def _read_schedule(path: Path, options: ViewOptions) -> dict[str, Showable]:
    """Return a schedule, or its simulation if there are costs."""
    schedule = Schedule.load(path)
    if options.costs is None:
        return {"": schedule}
    return {"": simulate(lower(schedule), options.costs)}


# ``pipesim view``

#: Variables of which Linux sets one where a browser can open a window, or which names a browser.
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def view(args: argparse.Namespace) -> None:
    """Write a page of files and open it; print its path, and a line on each timeline."""
    options = ViewOptions(
        costs=None if args.costs is None else Costs.load(args.costs),
        trace={name: value for name, value in vars(args).items() if name in TRACE_FLAGS},
    )
    first, *others = map(Path, args.files)
    default = f"{stem(first)}-and-{len(others)}-more" if others else stem(first)
    path = page_target(args.out, f"{default}.html")
    title = args.title or (None if others else stem(first))
    try:
        items = read_items(args.files, options)
        to_html(path, items, title=title, layout=args.layout)
    except CostsError as error:
        if options.costs is None:
            raise
        raise CostsError(f"{args.costs}: {error}") from error
    print(path, *(f"{name}: {_summary(item)}" for name, item in items.items()), sep="\n")
    if not args.no_open:
        sys.stdout.flush()  # a text browser blocks until the user leaves it
        open_page(path)


def page_target(out: Path | None, default: str) -> Path:
    """Return the path of a page to write: ``out``, or ``default`` if that replaces nothing else."""
    if out is not None:
        return out
    path = Path(default)
    head = read_bytes(path, "page", ArgumentError, first=HEAD) if path.is_file() else b""
    if os.path.lexists(path) and _PAGE_MARK not in head:
        raise ArgumentError(
            f"{path} exists, and is no page of pipesim; name the page with --out, which replaces a "
            "file"
        )
    return path


def open_page(path: Path) -> bool:
    """Open a page in the user's browser; return whether there is one."""
    if sys.platform.startswith("linux") and not any(map(os.environ.get, _DISPLAYS)):
        return False  # Python would start a text browser such as w3m
    try:
        return webbrowser.open(path.resolve().as_uri())
    except webbrowser.Error:  # such as a BROWSER that is not installed
        return False


def size_text(path: Path) -> str:
    """Return the size of a file as text."""
    return format_decimal(path.stat().st_size, "B")


def _summary(item: Showable) -> str:
    """Return numbers of tasks and devices, and the makespan, as text."""
    if isinstance(item, Comparison):
        return (
            f"{_counts(item.measured)}, makespan {format_time(item.predicted.makespan)} predicted, "
            f"{format_time(item.measured.makespan)} measured ({item.makespan_error:+.1%})"
        )
    if isinstance(item, Timeline):
        return f"{_counts(item)}, makespan {format_time(item.makespan)}"
    assert isinstance(item, Schedule)
    counts = f"{len(item)} actions, {item.n_devices} devices"
    try:
        verify(item)
    except PipeError as error:
        return f"{counts}; it cannot run: {str(error).splitlines()[0].partition(';')[0]}"
    return f"{counts}, an action a clock cycle (--costs simulates it)"


def _counts(timeline: Timeline) -> str:
    ran = "" if timeline.complete else f", of which {int(timeline.ran.sum())} ran"
    return f"{len(timeline)} tasks{ran}, {timeline.n_devices} devices"


# ``pipesim demo-page``: a page of all named schedules

#: Costs of a device, whose stages share them; those of the README, with split backwards.
_DEMO_COSTS = Costs(
    forward=1e-3,
    input_grad=1e-3,
    weight_grad=1e-3,
    output_bytes=4 << 20,
    activation_bytes=1 << 30,
    weight_grad_bytes=1 << 28,
    network=Network(latency=20e-6, bandwidth=25e9),
)


def demo_page(args: argparse.Namespace) -> None:
    """Write a page of all named schedules on one time axis; print its path and size."""
    counts = {
        "devices": check_count("devices", args.devices),
        "microbatches": check_count("microbatches", args.microbatches),
    }
    path = page_target(args.out, "gallery.html")
    settings = {**counts, "per": "device", "costs": _DEMO_COSTS.to_dict()}
    timelines, refusals = {}, []
    for case in cases([*options_of_schedules()], None, settings):
        try:
            timelines[case["label"]] = run(case)
        except ArgumentError as error:  # of a schedule that does not take these counts
            refusals.append(error)
    if not timelines:
        raise refusals[0]
    shape = f"{counts['devices']} devices, {counts['microbatches']} micro-batches"
    to_html(path, timelines, title=f"Schedules on {shape}")
    n_tasks = sum(map(len, timelines.values()))
    print(f"{path}\n{len(timelines)} schedules, {shape}, {n_tasks} tasks, {size_text(path)}")
    print("".join(f"without: {error}\n" for error in refusals), end="")

"""Timelines as Chrome's trace JSON, for ui.perfetto.dev, and read back from it.

Perfetto shows a process a device and a thread a stream. It colours a slice by its name without
digits, so that names in torch's form (``0F3``, ``1SEND_F0``) are coloured by operation.

The format is that of "Trace Event Format" (Google, 2016): complete events (``X``), flows (``s``,
``f``), counters (``C``) and metadata (``M``), in microseconds.

Events have times in whole nanoseconds, and lack settings of the graph. So the trace also has the
columns and settings of each timeline, under a key of its own behind the events. Perfetto stops
reading there, and chrome://tracing shows it as metadata.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, PipeError, TimelineError, number
from pipesim.ops import SENDS, Action, Op
from pipesim.timeline.memory import over_time
from pipesim.timeline.tables import INTEGERS, SECONDS_AND_BYTES, SETTINGS, from_rows, to_rows
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import SAVED, SIGNATURE
from pipesim.trace.chrome_json import load as read_trace
from pipesim.utils.csr import CSR
from pipesim.utils.files import check_path, gunzip, read_bytes, write_whole
from pipesim.utils.texts import CHECKSUM, checksum

if TYPE_CHECKING:
    import pandas as pd


# Columns and settings of timelines in a trace


def load_saved(path: Path) -> dict[str, Timeline]:
    """Return the timelines of a trace that `pipesim.trace.save` wrote, by name."""
    timelines = saved_timelines(path, read_trace(path))
    if not timelines:
        raise TimelineError(
            f"{path} has no {SAVED!r}, which pipesim.trace.save writes; read the events of another "
            "program with Timeline.from_chrome"
        )
    return timelines


def has_timelines(path: Path) -> bool:
    """Return whether a trace has timelines; a large one of another program is not parsed twice."""
    what = "a trace from"
    data = read_bytes(path, what, TimelineError)
    return SAVED.encode() in gunzip(data, path, what, TimelineError)


def saved_form(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Return timelines as JSON values: name, columns (None for NaN) and settings of each."""
    saved = []
    for name, timeline in timelines.items():
        rows, settings = to_rows(timeline)
        columns = {str(key): rows[key].tolist() for key in rows}
        for key in columns.keys() & SECONDS_AND_BYTES:
            columns[key] = [None if value != value else value for value in columns[key]]
        saved.append({"name": name, "columns": columns, "settings": settings})
    return saved


def saved_timelines(path: Path, content: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines in a trace, by name; empty if `pipesim.trace.save` did not write it.

    ``content`` is as `pipesim.trace.chrome_json.load` returns it, which has checked its checksum.
    """
    saved = content.get(SAVED)
    if saved is None:
        return {}
    listed = saved.get("timelines") if isinstance(saved, dict) else None
    timelines: dict[str, Timeline] = {}
    try:
        for item in listed if isinstance(listed, list) else [None]:
            name, rows, settings = _checked(item)
            timelines[name] = from_rows(rows, settings, costs=None, name=name)
    except (PipeError, ValueError) as error:
        raise TimelineError(
            f"{path}: {SAVED!r} has no whole timelines: {error}; write the trace again, or delete "
            "that key to read the events alone"
        ) from error
    return timelines


def _checked(item: object) -> tuple[str, pd.DataFrame, dict[str, str]]:
    """Return the name, the table and the settings of a timeline in JSON; check their types."""
    from pipesim.utils.packages import pandas as pd

    parts = item if isinstance(item, dict) else {}
    name, columns, settings = (parts.get(key) for key in ("name", "columns", "settings"))
    if not isinstance(name, str) or not isinstance(settings, dict) or not isinstance(columns, dict):
        raise TimelineError("each must have a name, settings and columns")
    if not all(k in SETTINGS and isinstance(text, str) for k, text in settings.items()):
        raise TimelineError("the settings must be texts of known names")
    sizes = {len(values) if isinstance(values, list) else -1 for values in columns.values()}
    if len(sizes) != 1 or -1 in sizes:
        raise TimelineError("the columns must be lists of the same length")
    checked = {key: _column(key, values) for key, values in columns.items()}
    index = pd.RangeIndex(sizes.pop(), name="task")
    return name, pd.DataFrame(checked, index=index), settings


def _column(name: str, values: Sequence[object]) -> Any:
    """Return a column as an array, or raise `TimelineError` for a value of another type."""
    if name in INTEGERS:
        _check_all(name, (type(x) is int and abs(x) < 2**31 for x in values), "whole numbers")
        return np.array(values, dtype=np.int64)
    if name in SECONDS_AND_BYTES:
        _check_all(name, (x is None or number(x) is not None for x in values), "numbers or null")
        return np.array([np.nan if x is None else x for x in values], dtype=np.float64)
    _check_all(name, (isinstance(x, str) for x in values), "texts")
    return np.array(values, dtype=object)


def _check_all(name: str, good: Iterable[bool], kind: str) -> None:
    if not all(good):
        raise TimelineError(f"column {name!r} must have {kind}")


# Events

Event = dict[str, Any]
Place = Mapping[str, int]
Nanoseconds = NDArray[np.int64]
Microseconds = NDArray[np.float64]

#: Start of tasks that never start.
NEVER = np.iinfo(np.int64).min

#: Order of threads in a process, by the first part of their stream's name.
_SORTED = ("compute", "collective", "exchange", "unshard", "offload", "reload", "copy", "recv",
           "send")  # fmt: skip


def save(
    path: Path | str, timelines: Timeline | Sequence[Timeline] | Mapping[str, Timeline]
) -> None:
    """Write timelines as one Chrome trace, whole or not at all; open it in ui.perfetto.dev.

    Each device is a process, each of its streams a thread, and each task a slice. A slice's
    category is its operation, such as ``F``; its arguments are the operation, the stage,
    the micro-batch, and the bytes of a message. Arrows lead from a SEND to its RECV. For
    timelines with costs, a counter shows the bytes that a device holds. A task that has not ended
    lasts to the end of the trace and is marked ``unfinished``.
    Tasks that take no time last 1 ns if there is room, since arrows need slices to attach to.

    The file has the timelines themselves too, which `load` and `Timeline.from_chrome` read back.

    Parameters
    ----------
    path
        A file that ends in ``.json``, or in ``.json.gz`` to compress it.
    timelines
        One, or several to show side by side, such as a prediction and a measurement. The
        processes of each have their own numbers and names. A mapping gives the names.

    Examples
    --------
    >>> import tempfile
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> timelines = {f"backward {x}": ps.simulate(graph, ps.Costs(1, x)) for x in (2, 3)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ps.trace.save(f"{folder}/both.json", timelines)
    ...     both = ps.trace.load(f"{folder}/both.json")
    >>> {name: float(timeline.makespan) for name, timeline in both.items()}
    {'backward 2': 15.0, 'backward 3': 20.0}
    """
    path = check_path("path", path, "write", "path: a trace is written to")
    if not path.name.endswith((".json", ".json.gz")):
        raise ArgumentError(f"a trace's file ends in .json or .json.gz, got {path}")
    named = _named(timelines)
    events: list[Event] = []
    n_tasks = 0
    for name, timeline in named.items():
        label = f"{name}: " if len(named) > 1 else ""
        used = max((event["pid"] for event in events), default=0)
        first_pid = 1000 * (used // 1000 + 1) if used else 1
        events += _events(timeline, label, n_tasks, first_pid)
        n_tasks += len(timeline)
    saved = {"timelines": saved_form(named)}
    write(path, {"displayTimeUnit": "ms", "traceEvents": events, SAVED: saved})


def _named(timelines: object) -> dict[str, Timeline]:
    """Return timelines by name. A repeated name gets a number."""
    pairs: Iterable[tuple[str, object]]
    if isinstance(timelines, Timeline):
        pairs = [(timelines.name, timelines)]
    elif isinstance(timelines, Mapping):
        pairs = [(str(name), item) for name, item in timelines.items()]
    elif isinstance(timelines, (list, tuple)):
        pairs = [(getattr(item, "name", "?"), item) for item in timelines]
    else:
        raise ArgumentError(
            f"timelines is no Timeline but {type(timelines).__name__}; give a Timeline, or several "
            "in a list or by name"
        )
    named: dict[str, Timeline] = {}
    for name, timeline in pairs:
        if not isinstance(timeline, Timeline):
            raise ArgumentError(f"timelines: {name!r} is no Timeline but {type(timeline).__name__}")
        while name in named:
            name = f"{name} ({len(named) + 1})"
        named[name] = timeline
    if not named:
        raise ArgumentError("timelines is empty; a trace needs at least one timeline")
    return named


def _events(timeline: Timeline, label: str, first_id: int, first_pid: int) -> Iterator[Event]:
    """Yield metadata, slices, arrows and counters of one timeline."""
    graph, (start, end) = timeline.graph, nanoseconds(timeline)
    for device in range(graph.n_devices):
        number = first_pid + device
        yield from _metadata(number, 0, "process", f"{label}device {device}", number)
    tid = np.zeros(len(graph), np.int64)
    for stream, lane, tasks in lanes(graph.queues, start, end):
        device, name = graph.streams[stream]
        tid[tasks] = number = 1 + stream + lane * len(graph.streams)
        shown = name if not lane else f"{name} ({lane + 1})"
        order = _SORTED.index(name.partition(":")[0])
        yield from _metadata(first_pid + device, number, "thread", shown, order)
        room = np.append(start[tasks[1:]], np.iinfo(np.int64).max) > end[tasks]
        end[tasks] += (start[tasks] == end[tasks]) & room
    places = [
        {"pid": pid, "tid": number}
        for pid, number in zip((graph.device + first_pid).tolist(), tid.tolist(), strict=True)
    ]
    yield from _slices(timeline, start / 1e3, end / 1e3, places)
    yield from _arrows(timeline, start / 1e3, places, first_id)
    yield from _counters(timeline, first_pid)


def _slices(
    timeline: Timeline, start: Microseconds, end: Microseconds, places: Sequence[Place]
) -> Iterator[Event]:
    graph, shown, nbytes = timeline.graph, names(timeline), timeline.nbytes
    stages, ops, microbatches = graph.stage.tolist(), graph.op.tolist(), graph.microbatch.tolist()
    for task in np.flatnonzero(~np.isnan(timeline.start)).tolist():
        op = Op(ops[task])
        args: Event = {"task": task, "operation": op.name, "stage": stages[task]}
        if microbatches[task] >= 0:
            args["microbatch"] = microbatches[task]
        if nbytes[task]:
            args["nbytes"] = float(nbytes[task])
        if np.isnan(timeline.end[task]):
            args["unfinished"] = True
        yield slice_event(
            shown[task], op.name, float(start[task]), float(end[task]), places[task], args
        )


def _arrows(
    timeline: Timeline, start: Microseconds, places: Sequence[Place], first_id: int
) -> Iterator[Event]:
    """Yield both ends of an arrow for each message of which both ends started."""
    graph = timeline.graph
    for send in np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0)).tolist():
        recv = int(graph.pair[send])
        if np.isnan(timeline.start[[send, recv]]).any():
            continue
        message = {"id": first_id + send, "name": "message", "cat": "message"}
        # With bp "e" an arrow ends at the slice that encloses its end, not at the next one.
        for ph, task in (({"ph": "s"}, send), ({"ph": "f", "bp": "e"}, recv)):
            yield {**ph, **message, **places[task], "ts": float(start[task])}


def _counters(timeline: Timeline, first_pid: int) -> Iterator[Event]:
    """Yield the bytes that each device holds, at each change."""
    if timeline.costs is None:
        return
    rows = over_time(timeline)
    columns = (rows[name].tolist() for name in ("device", "time", "nbytes"))
    for device, time, nbytes in zip(*columns, strict=True):
        yield {
            "ph": "C", "name": "memory", "pid": first_pid + device,
            "ts": round(time * 1e9) / 1e3, "args": {"bytes": nbytes},
        }  # fmt: skip


def names(timeline: Timeline) -> list[str]:
    """Return the text form of each task's action.

    Parameters
    ----------
    timeline
        Timeline, complete or not.

    Returns
    -------
    list of str
        Text of each task, such as ``"0F3"``, in order of task ids.
    """
    graph = timeline.graph
    columns = (graph.stage, graph.op, graph.microbatch, graph.peer_stage, graph.part)
    return [
        str(Action(stage, Op(op), None if microbatch < 0 else microbatch, peer, part))
        for stage, op, microbatch, peer, part in zip(*(c.tolist() for c in columns), strict=True)
    ]


def nanoseconds(timeline: Timeline) -> tuple[Nanoseconds, Nanoseconds]:
    """Return starts and ends as whole nanoseconds, so that slices that touch do not overlap.

    Tasks that did not end last as long as the timeline. Tasks that did not start have `NEVER`.

    Parameters
    ----------
    timeline
        Timeline, complete or not.

    Returns
    -------
    tuple of numpy.ndarray
        Start and end of each task (ns), integers; shape ``(len(timeline.graph),)`` each.
    """
    times = np.concatenate([timeline.start, timeline.end])
    latest = float(np.fmax.reduce(times, initial=0.0))
    start, end = (
        np.round(np.nan_to_num(time, nan=latest) * 1e9).astype(np.int64)
        for time in (timeline.start, timeline.end)
    )
    start[np.isnan(timeline.start)] = NEVER
    return start, end


def lanes(
    queues: CSR, start: Nanoseconds, end: Nanoseconds
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield a stream, a lane of it, and the lane's tasks in order; tasks of a lane do not overlap.

    Tasks that never started are left out. A stream runs one task after the other and has one lane,
    unless its times overlap, as measured ones may.

    Parameters
    ----------
    queues
        Tasks of each stream, such as ``graph.queues``.
    start, end
        Times of each task (ns), as from `nanoseconds`; shape ``(len(graph),)``.

    Yields
    ------
    tuple
        Number of the stream, number of the lane in the stream, and ids of its tasks by start.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> times = ps.trace.nanoseconds(ps.simulate(graph, ps.Costs(1, 2)))
    >>> stream, lane, tasks = next(ps.trace.lanes(graph.queues, *times))
    >>> graph.streams[stream], [str(graph.task(k)) for k in tasks]
    ((0, 'compute'), ['0F0', '0F1', '0B1', '0B0', '0STEP'])
    """
    for stream in range(len(queues)):
        tasks = queues[stream].astype(np.int64)
        tasks = tasks[start[tasks] > NEVER]
        tasks = tasks[np.lexsort((end[tasks], start[tasks]))]
        lane = 0
        while len(tasks):
            kept = np.ones(len(tasks), dtype=bool)
            if (end[tasks[:-1]] > start[tasks[1:]]).any():
                free = NEVER
                for k, task in enumerate(tasks.tolist()):
                    kept[k] = start[task] >= free
                    free = end[task] if kept[k] else free
            yield stream, lane, tasks[kept]
            tasks, lane = tasks[~kept], lane + 1


def slice_event(
    name: str, category: str, start: float, end: float, place: Place, args: Event
) -> Event:
    """Return a complete event of a trace, which viewers show as a slice.

    Parameters
    ----------
    name
        Text on the slice.
    category
        Category by which viewers filter.
    start, end
        Microseconds.
    place
        ``pid`` and ``tid``: numbers of process and thread.
    args
        Values that viewers show for a selected slice.

    Returns
    -------
    dict
        The event, to be written as JSON.
    """
    # A trace's times have three decimals; their difference has more, from rounding.
    duration = round(end - start, 3)
    return {
        "ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": duration,
        "args": args,
    }  # fmt: skip


def _metadata(pid: int, tid: int, kind: str, name: str, order: int) -> Iterator[Event]:
    for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
        yield {"ph": "M", "name": f"{kind}_{key}", "pid": pid, "tid": tid, "args": args}


def write(path: Path, trace: Event) -> None:
    """Write a trace, one event a line, with a checksum of its content.

    Saved timelines come last, since Perfetto ignores all that follows a key that it does not know.

    The events are removed from ``trace``.

    Parameters
    ----------
    path
        File to write; compressed if the name ends in ``.gz``.
    trace
        The trace as a dict, with a list of events as ``"traceEvents"``.
    """
    events = [json.dumps(event) for event in trace.pop("traceEvents")]
    saved = f', "{SAVED}": {json.dumps(trace.pop(SAVED))}' if SAVED in trace else ""
    signed = f'{json.dumps(trace)[:-1]}, "traceEvents": [{", ".join(events)}]{saved}}}'
    digest = checksum(signed)
    head = json.dumps({**trace, "otherData": {SIGNATURE: digest}})[:-1]
    body = ",\n".join(events)
    tail = f'{saved[:-1]}, "{CHECKSUM}": "{digest}"}}' if saved else ""
    text = f'{head}, "traceEvents": [\n{body}\n]{tail}}}\n'.encode()
    if path.name.endswith(".gz"):
        text = gzip.compress(text, mtime=0)
    write_whole(path, lambda file: file.write_bytes(text))


def timeline_to_chrome(timeline: Timeline, path: Path | str) -> None:
    """Write a Chrome trace that ui.perfetto.dev shows; see `pipesim.trace.save`.

    That function also takes several timelines. ``pipesim.trace.hta.save`` writes files for
    HolisticTraceAnalysis. `from_chrome` reads the file back exactly.

    Parameters
    ----------
    path
        File that ends in ``.json``, or in ``.json.gz`` to compress it.
    """
    save(path, timeline)

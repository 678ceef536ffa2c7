"""Timelines inside the Chrome traces that `pipesim.trace.save` writes, so that they are read back.

Events have times in whole nanoseconds, and lack settings of the graph. So the trace also has the
columns and settings of each timeline, under a key of its own behind the events. Perfetto stops
reading there, and chrome://tracing shows it as metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.errors import PipeError, TimelineError, number
from pipesim.timeline.task_rows import INTEGERS, SECONDS_AND_BYTES, SETTINGS, from_rows, to_rows
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import SAVED
from pipesim.trace.chrome_json import load as read_trace
from pipesim.utils.files import gunzip, read_bytes

if TYPE_CHECKING:
    import pandas as pd


def load(path: Path) -> dict[str, Timeline]:
    """Return the timelines of a trace that `pipesim.trace.save` wrote, by name.

    Raises
    ------
    TimelineError
        For a file that cannot be read, was cut or changed, or that another program wrote.
    CapacityError
        For a file that is too large for memory, once decompressed.
    """
    timelines = saved_timelines(path, read_trace(path))
    if not timelines:
        raise TimelineError(
            f"{path} has no {SAVED!r}, which pipesim.trace.save writes; read the events of another "
            "program with Timeline.from_chrome"
        )
    return timelines


def has_timelines(path: Path) -> bool:
    """Return whether a trace has timelines; a large one of another program is not parsed twice."""
    data = read_bytes(path, "a trace from", TimelineError)
    if data.startswith(b"\x1f\x8b"):
        data = gunzip(data, path, "a trace from", TimelineError)
    return SAVED.encode() in data


def saved_form(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Return timelines as JSON values: name, settings and columns of each."""
    return [
        {"name": name, **dict(zip(("columns", "settings"), _columns(timeline), strict=True))}
        for name, timeline in timelines.items()
    ]


def _columns(timeline: Timeline) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the columns of a timeline, None for NaN, which JSON does not have; and settings."""
    rows, settings = to_rows(timeline)
    columns = {str(name): rows[name].tolist() for name in rows}
    for name in SECONDS_AND_BYTES:
        if name in columns:
            columns[name] = [None if value != value else value for value in columns[name]]
    return columns, settings


def saved_timelines(path: Path, content: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines in a trace, by name; empty if `pipesim.trace.save` did not write it.

    ``content`` is as `pipesim.trace.chrome_json.load` returns it, which has checked its checksum.

    Raises
    ------
    TimelineError
        For a timeline that `pipesim.trace.save` would not write.
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
    """Raise `TimelineError` unless all values of a column are good."""
    if not all(good):
        raise TimelineError(f"column {name!r} must have {kind}")

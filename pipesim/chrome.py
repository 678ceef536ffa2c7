"""Read Chrome's trace JSON, which may be compressed, cut, or of another program."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesim.errors import TimelineError, number

__all__ = ["load", "seconds"]


def load(path: Path) -> Mapping[str, Any]:
    """Return the object that a trace's file holds; its ``traceEvents`` are a list.

    Raises
    ------
    TimelineError
        For a file that cannot be read or was cut, naming the place, or is no Chrome trace.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TimelineError(
            f"cannot read a trace from {path}: {error}; give torch.profiler's .json or .json.gz, "
            "one whole file a rank"
        ) from error
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        place = error.pos if isinstance(error, json.JSONDecodeError) else 0
        whole = text.strip()
        open_ended = whole[:1] in ("{", "[") and whole[-1:] not in ("}", "]")
        cut = open_ended or place >= len(text.rstrip()) - 1
        problem = "it was cut" if cut else "it is no JSON there"
        raise TimelineError(
            f"cannot read a trace from {path}: {problem}, at character {place} of "
            f"{len(text)} ({str(error).partition(':')[0]}); export the trace again"
        ) from error
    if isinstance(content, list):  # the format's other form
        content = {"traceEvents": content}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TimelineError(
            f"{path} is no Chrome trace: it has no list 'traceEvents'; give what torch.profiler's "
            "export_chrome_trace writes"
        )
    return content


def seconds(path: Path, event: Mapping[str, Any], index: int) -> tuple[float, float]:
    """Return when a complete event of a trace began and ended.

    Raises
    ------
    TimelineError
        For times that are no numbers, not finite or negative durations, naming the event.
    """
    times = []
    for key, what in (("ts", "time"), ("dur", "duration")):
        value = number(event.get(key))
        if value is None or math.isinf(value) or (key == "dur" and value < 0):
            allowed = "finite microseconds" + (" >= 0" if key == "dur" else "")
            raise TimelineError(
                f"{path}: the {what} of event {index}, {event.get('name')!r}, must be {allowed}, "
                f"got {event.get(key)!r}; export the trace again"
            )
        times.append(value)
    start, duration = times
    return start * 1e-6, (start + duration) * 1e-6

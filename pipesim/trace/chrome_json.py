"""Read Chrome's trace JSON, which may be compressed, cut, or of another program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesim.errors import TimelineError, number
from pipesim.utils.atomic_write import gunzip, read_bytes
from pipesim.utils.texts import changed, checksum, parse_json, unique

__all__ = ["SIGNATURE", "head", "load", "seconds"]

#: Key of our checksum in a trace's ``otherData``, which viewers pass over.
SIGNATURE = "pipesim_checksum"

#: Nanoseconds that a clock can show, as 64 bits hold them.
_LATEST = 2**63
#: Fewer digits than Python may be told to refuse in a whole number.
_DIGITS = 600


def load(path: Path) -> Mapping[str, Any]:
    """Return the object that a trace's file holds; its ``traceEvents`` are a list.

    Raises
    ------
    TimelineError
        For a file that cannot be read or was cut, naming the place, is no Chrome trace, or was
        written by `pipesim.trace.save` and changed since.
    CapacityError
        For a file that is too large for memory, compressed or not.
    """
    what = "a trace from"
    data = read_bytes(path, what, TimelineError)
    if data[:2] == b"\x1f\x8b":
        data = gunzip(data, path, what, TimelineError)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TimelineError(
            f"cannot read a trace from {path}: {error}; give torch.profiler's .json or .json.gz, "
            "one whole file a rank"
        ) from error
    try:
        content = _parsed(text)
    except json.JSONDecodeError as error:
        place = error.pos
        whole = text.strip()
        open_ended = whole[:1] in ("{", "[") and whole[-1:] not in ("}", "]")
        cut = open_ended or place >= len(text.rstrip()) - 1
        problem = "it was cut" if cut else "it is no JSON there"
        if str(error).startswith("Extra data"):
            problem = "it goes on after the end of its JSON"
        raise TimelineError(
            f"cannot read a trace from {path}: {problem}, at character {place} of "
            f"{len(text)} ({str(error).partition(':')[0]}); export the trace again"
        ) from error
    except ValueError as error:
        raise TimelineError(
            f"cannot read a trace from {path}: {error}; export the trace again"
        ) from error
    if isinstance(content, list):  # the format's other form
        content = {"traceEvents": content}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TimelineError(
            f"{path} is no Chrome trace: it has no list 'traceEvents'; give what torch.profiler's "
            "export_chrome_trace writes"
        )
    _check_signature(path, content)
    return content


def _check_signature(path: Path, content: Mapping[str, Any]) -> None:
    """Raise if a trace has a checksum of ours, which is that of other content."""
    other = content.get("otherData")
    if isinstance(other, dict) and SIGNATURE in other:
        rest = {key: value for key, value in content.items() if key != "otherData"}
        if other[SIGNATURE] != checksum(rest):
            raise TimelineError(changed(path, f'delete "{SIGNATURE}" from its "otherData"'))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; what profilers note of an event may come twice, its time may not."""
    found = dict(pairs)
    if len(found) < len(pairs) and ("ph" in found or "traceEvents" in found):
        unique(pairs)
    return found


def _parsed(text: str) -> Any:
    """Read JSON; a whole number of more digits than Python reads is a float, maybe infinite."""
    try:
        return parse_json(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:  # far too many digits; what uses the number refuses it by name
        return parse_json(
            text,
            object_pairs_hook=_object,
            parse_int=lambda x: int(x) if len(x) < _DIGITS else float(x),
        )


def head(path: Path, content: Mapping[str, Any]) -> tuple[int | None, int | None, int]:
    """Return what a trace says of itself: rank, number of ranks, and the origin of its times (ns).

    Rank and number are None, and the origin 0, where it says nothing of them.

    Raises
    ------
    TimelineError
        For a rank that is negative or beyond the number of ranks, and an origin that no clock
        shows.
    """
    said = content.get("distributedInfo")
    said = said if isinstance(said, dict) else {}
    rank, world_size = (_whole(said.get(key)) for key in ("rank", "world_size"))
    if rank is not None and not 0 <= rank < (math.inf if world_size is None else world_size):
        of = "" if world_size is None else f" of {world_size}"
        raise TimelineError(
            f"{path} says that it is of rank {rank}{of}; ranks count from 0 to one less than "
            "there are of them; correct its distributedInfo, or leave it out"
        )
    origin: Any = content.get("baseTimeNanoseconds")
    if number(origin) is None and not _whole(origin):
        return rank, world_size, 0
    if not 0 <= origin < _LATEST:
        shown = origin if abs(origin) < _LATEST**2 else "far more"
        raise TimelineError(
            f"{path}: baseTimeNanoseconds must be nanoseconds from 0 to below 2^63, got {shown}; "
            "export the trace again"
        )
    return rank, world_size, int(origin)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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

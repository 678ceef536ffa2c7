"""Read Chrome's trace JSON. The file may be compressed, cut, or written by another program."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.errors import TimelineError, number
from pipesim.utils.files import gunzip, read_bytes
from pipesim.utils.texts import CHECKSUM, checksum, checksum_mismatch, parse_json, unique_keys

#: Key of pipesim's checksum in a trace's ``otherData``, which viewers ignore.
SIGNATURE = "pipesim_checksum"
#: Key of a trace with the timelines that `pipesim.trace.save` wrote, and the same checksum.
SAVED = "pipesimTimelines"

#: First time that a clock of 64 bits cannot show (ns).
_LATEST = 2**63
#: Digits from which on a whole number is read as a float, where Python's own limit refuses one.
#: That limit is never below 640.
_DIGITS = 600


def load(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a trace's file; its ``traceEvents`` are a list."""
    what = "a trace from"
    data = gunzip(read_bytes(path, what, TimelineError), path, what, TimelineError)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TimelineError(
            f"cannot read a trace from {path}: {error}; give torch.profiler's .json or .json.gz, "
            "one whole file a rank"
        ) from error
    try:
        content = _parse_events(text)
    except json.JSONDecodeError as error:
        position = error.pos
        whole = text.strip()
        open_ended = whole[:1] in ("{", "[") and whole[-1:] not in ("}", "]")
        cut = open_ended or position >= len(text.rstrip()) - 1
        problem = "it was cut" if cut else "it is no JSON there"
        if str(error).startswith("Extra data"):
            problem = "it continues after the end of its JSON"
        raise TimelineError(
            f"cannot read a trace from {path}: {problem}, at character {position} of "
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


def signed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a trace that its checksum is of: all but the checksum itself."""
    rest = {key: value for key, value in content.items() if key != "otherData"}
    if isinstance(rest.get(SAVED), dict):
        rest[SAVED] = {key: value for key, value in rest[SAVED].items() if key != CHECKSUM}
    return rest


def _check_signature(path: Path, content: Mapping[str, Any]) -> None:
    """Raise if a trace has pipesim's checksum, and its content another one.

    With saved timelines, either place of the checksum suffices to notice a change.
    """
    other, saved = content.get("otherData"), content.get(SAVED)
    digests = [other[SIGNATURE]] if isinstance(other, dict) and SIGNATURE in other else []
    remedy = f'delete "{SIGNATURE}" from its "otherData"'
    if saved is not None:
        digests.append(saved.get(CHECKSUM) if isinstance(saved, dict) else None)
        remedy += f', and "{SAVED}", and its events are read alone'
    if digests and set(map(str, digests)) != {checksum(signed(content))}:
        raise TimelineError(checksum_mismatch(path, remedy))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. In an event's ``args`` a key may come twice; its times may not."""
    content = dict(pairs)
    if len(content) < len(pairs) and ("ph" in content or "traceEvents" in content):
        unique_keys(pairs)
    return content


def _parse(text: str) -> Any:
    """Read JSON. A whole number with more digits than Python reads is a float, maybe infinite."""
    try:
        return parse_json(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:  # far too many digits; the code that uses the number refuses it by name
        return parse_json(
            text,
            object_pairs_hook=_object,
            parse_int=lambda x: int(x) if len(x) < _DIGITS else float(x),
        )


def _parse_events(text: str) -> Any:
    """Read JSON. An array may lack its bracket at the end, as the format allows, or end in a comma.

    A file that was cut within an event, or within an object with ``traceEvents``, is no JSON.
    """
    try:
        return _parse(text)
    except json.JSONDecodeError:
        events = text.strip().removesuffix("]").rstrip().removesuffix(",").rstrip()
        if not (events.startswith("[") and events.endswith("}")):
            raise
        with contextlib.suppress(json.JSONDecodeError):
            return _parse(f"{events}]")
        raise


def row_labels(content: Mapping[str, Any]) -> dict[tuple[str, str, str], object]:
    """Return the texts of a trace's metadata, by kind, process and thread ("" for a process).

    The kinds are ``process_name``, ``process_labels`` and ``thread_name``.
    """
    labels: dict[tuple[str, str, str], object] = {}
    for event in content["traceEvents"]:
        if isinstance(event, dict) and event.get("ph") == "M":
            kind, args = str(event.get("name")), event.get("args")
            thread = str(event.get("tid")) if kind == "thread_name" else ""
            if isinstance(args, dict):
                text = args.get("labels" if kind == "process_labels" else "name")
                labels[kind, str(event.get("pid")), thread] = text
    return labels


def read_header(path: Path, content: Mapping[str, Any]) -> tuple[int | None, int | None, int]:
    """Return the rank, the number of ranks, and the origin of the times (ns) of a trace.

    Rank and number are None, and the origin is 0, if the trace does not have them.
    """
    info = content.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = (_whole(info.get(key)) for key in ("rank", "world_size"))
    if rank is not None and not 0 <= rank < (math.inf if world_size is None else world_size):
        total = "" if world_size is None else f" of {world_size}"
        raise TimelineError(
            f"{path} says that it is of rank {rank}{total}; ranks count from 0 to one less than "
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
    """Return when a complete event of a trace began and ended (s)."""
    start, duration = (_microseconds(path, event, index, key) for key in ("ts", "dur"))
    return start * 1e-6, (start + duration) * 1e-6


def _microseconds(path: Path, event: Mapping[str, Any], index: int, key: str) -> float:
    """Return the time or the duration of an event, which must be finite."""
    value = number(event.get(key))
    if value is None or math.isinf(value) or (key == "dur" and value < 0):
        what = "duration" if key == "dur" else "time"
        allowed = "finite microseconds" + (" >= 0" if key == "dur" else "")
        raise TimelineError(
            f"{path}: the {what} of event {index}, {event.get('name')!r}, must be {allowed}, "
            f"got {event.get(key)!r}; export the trace again"
        )
    return value


class _Mark(NamedTuple):
    """An event that begins or ends a range; its time in microseconds."""

    time: float
    number: int
    event: Mapping[str, Any]


def complete_events(
    path: Path, content: Mapping[str, Any]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the complete events of a trace, each with its index.

    A begin and an end event become one complete event, with the index of the begin:

    - ``"B"`` and ``"E"``: an end ends the innermost range of its thread. Ends need no name.
    - ``"b"`` and ``"e"``: an end ends the innermost range of its process, category, id and name.

    Begin and end events of a thread may stand in any order, and are sorted by their time.
    """
    marks: dict[tuple[object, ...], list[_Mark]] = defaultdict(list)
    for index, event in enumerate(content["traceEvents"]):
        if not isinstance(event, dict):
            continue
        match event.get("ph"):
            case "X":
                yield index, event
            case "B" | "E" | "b" | "e":
                time = _microseconds(path, event, index, "ts")
                marks[_row(event)].append(_Mark(time, index, event))
    for row in marks.values():
        yield from _paired(path, sorted(row, key=lambda mark: mark.time))


def _row(event: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what the begin and the end of a range have in common."""
    keys = ("pid", "tid") if event["ph"] in "BE" else ("pid", "cat", "id", "id2", "scope", "name")
    return event["ph"] in "BE", *(str(event.get(key)) for key in keys)


def _paired(path: Path, marks: list[_Mark]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the ranges of a row, whose begins and ends are in order of time."""
    stack: list[_Mark] = []
    for mark in marks:
        event, name = mark.event, mark.event.get("name")
        if event["ph"] in "Bb":
            stack.append(mark)
            continue
        # The range that begins when another ends may stand before that end.
        k = len(stack) - 1
        while k > 0 and name not in (None, "", stack[k].event.get("name")):
            if stack[k].time < mark.time:
                break
            k -= 1
        if k < 0 or name not in (None, "", stack[k].event.get("name")):
            problem = f"{_shown(stack[-1])} is open" if stack else "no range is open"
            raise TimelineError(
                f"{path}: event {mark.number} ends {_shown(mark)}, where {problem} on its thread; "
                "give each range a begin (B) and an end (E) on one thread, within the ranges "
                "around it, or complete events (X)"
            )
        begin = stack.pop(k)
        args = [x.get("args") for x in (begin.event, event)]
        merged = {key: value for x in args if isinstance(x, dict) for key, value in x.items()}
        complete = {"ph": "X", "dur": mark.time - begin.time, "ts": begin.time, "args": merged}
        yield begin.number, {**begin.event, **complete}
    if stack:
        raise TimelineError(
            f"{path}: event {stack[-1].number} begins {_shown(stack[-1])}, and no event ends it; "
            "profile until the range has ended, or leave its begin out"
        )


def _shown(mark: _Mark) -> str:
    """Return the name of a range, if its event has one, and the time of the event."""
    name = mark.event.get("name")
    what = "a range" if name in (None, "") else f"range {name!r:.80}"
    return f"{what} at {mark.time:.15g} us"

"""Traces as torch.profiler writes them, made by hand or from timelines, for the tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from places import DATA as DATA_FOLDER

import pipesim as ps
from pipesim.ops import COMPUTE, Op

Event = dict[str, Any]
DATA = DATA_FOLDER / "torch_interleaved"


def event(
    name: str,
    start: float,
    end: float,
    category: str = "user_annotation",
    tid: int = 1,
    **args: Any,
) -> Event:
    """Return a complete event; microseconds."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start,
        "dur": end - start, "args": args,
    }  # fmt: skip


def ranges(text: str, length: float = 10.0, start: float = 0.0) -> list[Event]:
    """Return ``PP:`` ranges one after the other; a dot passes the time of one."""
    return [
        event(f"PP:{name}", start + k * length, start + (k + 1) * length)
        for k, name in enumerate(text.split())
        if name != "."
    ]


def write(
    directory: Path, ranks: Sequence[Iterable[Event]], *, packed: bool = False, **extra: Any
) -> list[Path]:
    """Write a file a rank; ``extra`` goes beside the events of each."""
    paths = []
    for rank, events in enumerate(ranks):
        info = {"distributedInfo": {"rank": rank, "world_size": len(ranks)}}
        text = json.dumps({"traceEvents": list(events), **info, **extra}).encode()
        paths.append(directory / (f"rank{rank}.json" + ".gz" * packed))
        paths[-1].write_bytes(gzip.compress(text) if packed else text)
    return paths


def traced(timeline: ps.Timeline, shifts: Sequence[float] | None = None) -> list[list[Event]]:
    """Return each device's compute tasks as ranges, on clocks that are ``shifts`` seconds ahead."""
    ranges: list[list[Event]] = [[] for _ in range(timeline.n_devices)]
    for row in timeline.frame.itertuples():
        if Op[row.op] not in COMPUTE:
            continue
        number = "" if row.microbatch < 0 else row.microbatch
        ahead = 0.0 if shifts is None else shifts[row.device]
        start, end = ((time + ahead) * 1e6 for time in (row.start, row.end))
        ranges[row.device].append(event(f"PP:{row.stage}{row.op}{number}", start, end))
    return ranges

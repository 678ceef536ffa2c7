"""Columns of timelines in a page: times, waits, idle gaps, memory."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle import CAUSES, exact_sums
from pipesim.analysis.idle_attribution import causes_of_gaps
from pipesim.analysis.waits import last_waits
from pipesim.ops import COMPUTE
from pipesim.plot.page.columns import ColumnWriter, Spec, decimal_digits, ticks_of
from pipesim.plot.page.simulation_inputs import SimulationInputs, input_columns, simulation_inputs
from pipesim.timeline.memory import costs_of
from pipesim.timeline.memory_limit import memory_limit
from pipesim.timeline.task_bytes import changes, row_bytes, static
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: Compressed bytes that exact doubles may take in a page.
EXACT_BYTES = 7_500
#: Compressed bytes that rounded times may take: in any page, and for each task.
ROUNDED_BYTES, ROUNDED_BYTES_PER_TASK = 3_000, 3.2
#: Most digits after the point of rounded times (s).
_FINEST = 9


def timeline_columns(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add the times of a timeline and what explains them; return their places."""
    inputs = simulation_inputs(timeline)
    waits = last_waits(timeline)
    ids = np.arange(len(timeline))
    spec: Spec = {
        "name": timeline.name,
        "unit": "s",
        "times": _times(writer, timeline, inputs),
        "inputs": input_columns(writer, inputs),
        "waits": {
            "back": writer.integers(np.where(waits.task < 0, 0, ids - waits.task)),
            "reason": writer.flags(waits.reason),
        },
    }
    if timeline.nbytes.any():
        spec["nbytes"] = writer.floats(timeline.nbytes)
    if timeline.complete and len(timeline):
        spec["gaps"] = _gaps(writer, timeline)
    if timeline.costs is not None:
        spec["memory"] = _memory(writer, timeline)
    return spec


def _times(writer: ColumnWriter, timeline: Timeline, inputs: SimulationInputs) -> Spec:
    """Add starts and ends; return their places.

    Times that the page's simulator gives are left out. Others are exact if they take few bytes,
    or else rounded. A stream's times are stored as the gap before each task, and its duration.
    """
    if inputs.is_exact:
        return {"type": "simulated"}
    order = timeline.graph.queues.values
    start, end = timeline.start[order], timeline.end[order]
    not_started, not_ended = np.flatnonzero(np.isnan(start)), np.flatnonzero(np.isnan(end))
    missing = {
        name: writer.integers(rows)
        for name, rows in (("not_started", not_started), ("not_ended", not_ended))
        if len(rows)
    }
    start, end = _filled(start, end)
    digits = decimal_digits(np.concatenate([start, end]))
    if digits is None:
        doubles = np.concatenate([start, end]).astype("<f8").view(np.uint8).reshape(-1, 8).T
        if len(zlib.compress(np.ascontiguousarray(doubles).tobytes(), 6)) <= EXACT_BYTES:
            both = {"start": writer.floats(start), "end": writer.floats(end)}
            return {"type": "exact", "resolution": 0, **both, **missing}
        room = ROUNDED_BYTES + ROUNDED_BYTES_PER_TASK * len(start)
        digits = _digits_that_fit(start, end, room)
    ticks = ticks_of(start, digits), ticks_of(end, digits)
    exact = all((t / 10.0**digits == x).all() for t, x in zip(ticks, (start, end), strict=True))
    gap, seconds = _gaps_and_durations(*ticks)
    return {
        "type": "ticks",
        "digits": digits,
        "resolution": 0 if exact else 10.0**-digits,
        "gap": writer.integers(gap),
        "duration": writer.integers(seconds),
        **missing,
    }


def _filled(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return times in which NaN is replaced: by the start, or by 0."""
    start = np.nan_to_num(start, nan=0.0)
    return start, np.where(np.isnan(end), start, end)


def _gaps_and_durations(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the time before each task since the end of the task before it, and its duration."""
    return start - np.concatenate([[0], end[:-1]]), end - start


def _digits_that_fit(start: Floats, end: Floats, room: float) -> int:
    """Return the most digits after the point with which compressed times take ``room`` bytes."""
    for digits in range(_FINEST, -10, -1):
        ticks = _gaps_and_durations(ticks_of(start, digits), ticks_of(end, digits))
        trial = ColumnWriter()
        for column in ticks:
            trial.integers(column)
        if len(trial.packed()) <= room:
            break
    return digits


def _gaps(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add the causes of idle gaps: seconds of each device, and shares of each gap in 255ths."""
    gaps, seconds = causes_of_gaps(timeline)
    table = exact_sums(timeline, gaps, seconds)
    shares = np.rint(255 * seconds / (gaps.until - gaps.since)[:, None])
    return {
        "n": len(gaps.task),
        "seconds": writer.floats(table.ravel()),
        "shares": [writer.flags(shares[:, cause].clip(0, 255)) for cause in range(len(CAUSES))],
    }


def _memory(writer: ColumnWriter, timeline: Timeline) -> Spec:
    """Add bytes that tasks allocate and release, and bytes that devices hold throughout."""
    graph, costs = timeline.graph, costs_of(timeline)
    allocated, released = changes(graph, costs)
    rows = row_bytes(graph, costs)
    always, workspace = static(graph, costs), rows.workspace[rows.row]
    if not (allocated.any() or always.any() or workspace.any()):
        return {}
    spec: Spec = {
        "allocated": writer.floats(allocated),
        "released": writer.floats(released),
        "workspace": writer.floats(workspace),
        "static": writer.floats(always),
        "computes": writer.flags(graph.kinds.is_op(COMPUTE)),
    }
    limit = memory_limit(timeline)
    if limit is not None and np.isfinite(limit).all():
        spec["limit"] = writer.floats(limit)
    return spec

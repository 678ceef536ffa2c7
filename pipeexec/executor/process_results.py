"""`ProcessResult`: what one process measured of a step, and the step made whole of all parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.timeline.timeline import Timeline

__all__ = ["ProcessResult", "align_collectives", "merge_results", "none_if_unknown"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ProcessResult:
    """What one process measured of a step.

    Attributes
    ----------
    zero
        When its step began, on rank 0's clock; seconds.
    timeline
        Of its own tasks, counted from there; NaN for others.
    losses
        Of the micro-batches whose last stage it has.
    host_seconds
        What its host took to issue all its tasks.
    peak_held
        Most micro-batches whose activations each device held; 0 for those of other processes.
    loss_dtype
        Name of torch's type of the losses; empty where there are none.
    clock_error
        The most that times of two of its devices can be wrong against each other, seconds.
    host_times
        What its host took to issue each of its tasks, seconds; NaN for others.
    """

    zero: float
    timeline: Timeline
    losses: dict[int, float]
    host_seconds: float
    peak_held: tuple[int, ...] = ()
    loss_dtype: str = ""
    clock_error: float = 0.0
    host_times: Floats | None = None

    def pack(self) -> bytes:
        """Return it as bytes: a line of JSON, then the columns of the tasks that ran."""
        tasks = np.flatnonzero(self.timeline.ran)
        columns = [tasks, self.timeline.start[tasks], self.timeline.end[tasks],
                   self.timeline.nbytes[tasks], _issued(self.timeline)[tasks],
                   _or_nan(self.host_times, len(self.timeline))[tasks]]  # fmt: skip
        head = [self.zero, list(self.losses.items()), self.host_seconds, self.peak_held,
                self.loss_dtype, self.clock_error]  # fmt: skip
        return json.dumps(head).encode() + b"\n" + np.array(columns, dtype=np.float64).tobytes()

    @classmethod
    def unpack(cls, graph: TaskGraph, text: bytes) -> ProcessResult:
        """Return the part that was packed."""
        line, _, body = text.partition(b"\n")
        zero, losses, host_seconds, peak_held, dtype, clock_error = json.loads(line)
        tasks, *columns = np.frombuffer(body).reshape(6, -1)
        merged = _empty(len(graph))
        for column, values in zip(merged, columns, strict=True):
            column[tasks.astype(np.int64)] = values
        start, end, nbytes, issued, took = merged
        timeline = Timeline(graph, start, end, nbytes, issued=none_if_unknown(issued))
        return cls(
            zero,
            timeline,
            dict(losses),
            host_seconds,
            tuple(peak_held),
            dtype,
            clock_error,
            none_if_unknown(took),
        )


def none_if_unknown(issued: Floats) -> Floats | None:
    """Return when tasks were issued, or None where it is known of none."""
    return None if np.isnan(issued).all() else issued


def _issued(timeline: Timeline) -> Floats:
    """Return when tasks were issued; NaN where it is not known."""
    return _or_nan(timeline.issued, len(timeline))


def _or_nan(column: Floats | None, n_tasks: int) -> Floats:
    return np.full(n_tasks, np.nan) if column is None else column


def _empty(n_tasks: int) -> list[Floats]:
    """Return columns of tasks that did not run.

    Start, end, bytes, when the host issued each, and what it took for that.
    """
    return [np.full(n_tasks, value) for value in (np.nan, np.nan, 0.0, np.nan, np.nan)]


def align_collectives(graph: TaskGraph, start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return times in which the members of a collective start when the last one has come (rule 9).

    Each has noted when it came itself; where some are of other processes, that is all there is.
    """
    start = start.copy()
    for row in range(len(graph.collectives)):
        members = graph.collectives[row]
        latest = start[members].max()
        if not np.isnan(latest):  # clocks of two processes are not quite one
            start[members] = np.fmin(latest, end[members])
    return start, end


def merge_results(graph: TaskGraph, parts: Iterable[ProcessResult]) -> ProcessResult:
    """Return the sum of parts, on one clock; time zero is when the first process began."""
    parts = list(parts)
    zero = min(part.zero for part in parts)
    start, end, nbytes, issued, took = _empty(len(graph))
    for part in parts:
        ran = part.timeline.ran
        issued[ran] = _issued(part.timeline)[ran] + (part.zero - zero)
        start[ran] = part.timeline.start[ran] + (part.zero - zero)
        end[ran] = part.timeline.end[ran] + (part.zero - zero)
        nbytes[ran] = part.timeline.nbytes[ran]
        took[ran] = _or_nan(part.host_times, len(graph))[ran]
    held = np.array([part.peak_held for part in parts]).sum(axis=0).tolist()
    return ProcessResult(
        zero,
        Timeline(
            graph, *align_collectives(graph, start, end), nbytes, issued=none_if_unknown(issued)
        ),
        {m: loss for part in parts for m, loss in part.losses.items()},
        sum(part.host_seconds for part in parts),
        tuple(held) if isinstance(held, list) else (),
        max(part.loss_dtype for part in parts),
        sum(sorted(part.clock_error for part in parts)[-2:]),
        none_if_unknown(took),
    )

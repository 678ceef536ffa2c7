"""`ProcessResult`: the measurements of one process in a step; merge those of all processes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.timeline.collective_starts import align_collectives
from pipesim.timeline.timeline import Timeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ProcessResult:
    """Measurements of one process in a step.

    Attributes
    ----------
    zero
        Start of its step on rank 0's clock (s).
    timeline
        Times of its tasks, relative to ``zero``; NaN for tasks of other processes.
    losses
        Losses of the micro-batches whose last stage is in this process, by micro-batch.
    host_seconds
        Time in which its host issued all its tasks (s).
    peak_held
        Most micro-batches whose activations each device held; 0 for devices of other processes.
    loss_dtype
        Name of the losses' torch dtype; empty if there are no losses.
    clock_error
        Largest error of time differences between two of its devices (s).
    host_times
        Time in which its host issued each task (s); NaN for tasks of other processes.
    metrics
        Total and count of each metric of ``loss_fn``; no count for weighted values.
    votes
        1 if this process asks to end the training after this step, as after Ctrl-C; the sum over
        all of them in a merged result.
    """

    zero: float
    timeline: Timeline
    losses: dict[int, float]
    host_seconds: float
    peak_held: tuple[int, ...] = ()
    loss_dtype: str = ""
    clock_error: float = 0.0
    host_times: Floats | None = None
    metrics: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    votes: int = 0

    def pack(self) -> bytes:
        """Return the result as bytes: a line of JSON, then the columns of the tasks that ran."""
        tasks = np.flatnonzero(self.timeline.ran)
        columns = [tasks, self.timeline.start[tasks], self.timeline.end[tasks],
                   self.timeline.nbytes[tasks], _issue_times(self.timeline)[tasks],
                   _values_or_nan(self.host_times, len(self.timeline))[tasks]]  # fmt: skip
        head = [self.zero, list(self.losses.items()), self.host_seconds, self.peak_held,
                self.loss_dtype, self.clock_error, dict(self.metrics), self.votes]  # fmt: skip
        return json.dumps(head).encode() + b"\n" + np.array(columns, dtype=np.float64).tobytes()

    @classmethod
    def unpack(cls, graph: TaskGraph, text: bytes) -> ProcessResult:
        """Return the result from the bytes of `pack`."""
        line, _, body = text.partition(b"\n")
        zero, losses, host_seconds, peak_held, dtype, clock_error, metrics, votes = json.loads(line)
        tasks, *columns = np.frombuffer(body).reshape(6, -1)
        all_columns = _columns_before_run(len(graph))
        for column, values in zip(all_columns, columns, strict=True):
            column[tasks.astype(np.int64)] = values
        start, end, nbytes, issued, issue_seconds = all_columns
        timeline = Timeline(graph, start, end, nbytes, issued=none_if_all_nan(issued))
        return cls(
            zero,
            timeline,
            dict(losses),
            host_seconds,
            tuple(peak_held),
            dtype,
            clock_error,
            none_if_all_nan(issue_seconds),
            {name: (total, count) for name, (total, count) in metrics.items()},
            votes,
        )


def none_if_all_nan(column: Floats) -> Floats | None:
    """Return a column of tasks, or None if it is NaN for all of them."""
    return None if np.isnan(column).all() else column


def _issue_times(timeline: Timeline) -> Floats:
    """Return the time at which each task was issued; NaN if it is unknown."""
    return _values_or_nan(timeline.issued, len(timeline))


def _values_or_nan(column: Floats | None, n_tasks: int) -> Floats:
    """Return a column of tasks; NaN for all of them if it is None."""
    return np.full(n_tasks, np.nan) if column is None else column


def _columns_before_run(n_tasks: int) -> list[Floats]:
    """Return the columns of tasks that did not run.

    They are: start, end, bytes, time at which the host issued a task, and time that this took it.
    """
    return [np.full(n_tasks, value) for value in (np.nan, np.nan, 0.0, np.nan, np.nan)]


def merge_results(graph: TaskGraph, parts: Iterable[ProcessResult]) -> ProcessResult:
    """Return the results of all processes as one; time zero is the start of the first process."""
    parts = list(parts)
    zero = min(part.zero for part in parts)
    start, end, nbytes, issued, issue_seconds = _columns_before_run(len(graph))
    for part in parts:
        ran = part.timeline.ran
        issued[ran] = _issue_times(part.timeline)[ran] + (part.zero - zero)
        start[ran] = part.timeline.start[ran] + (part.zero - zero)
        end[ran] = part.timeline.end[ran] + (part.zero - zero)
        nbytes[ran] = part.timeline.nbytes[ran]
        issue_seconds[ran] = _values_or_nan(part.host_times, len(graph))[ran]
    peak_held = np.array([part.peak_held for part in parts]).sum(axis=0).tolist()
    return ProcessResult(
        zero,
        Timeline(
            graph, *align_collectives(graph, start, end), nbytes, issued=none_if_all_nan(issued)
        ),
        {m: loss for part in parts for m, loss in part.losses.items()},
        sum(part.host_seconds for part in parts),
        tuple(peak_held) if isinstance(peak_held, list) else (),
        max(part.loss_dtype for part in parts),
        sum(sorted(part.clock_error for part in parts)[-2:]),
        none_if_all_nan(issue_seconds),
        _merged_metrics([part.metrics for part in parts]),
        sum(part.votes for part in parts),
    )


def _merged_metrics(
    rows: Sequence[Mapping[str, tuple[float, float | None]]],
) -> dict[str, tuple[float, float | None]]:
    """Return the sums of totals and counts over processes."""
    merged: dict[str, tuple[float, float | None]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        pairs = [row[name] for row in rows if name in row]
        counts = [count for _, count in pairs if count is not None]
        merged[name] = math.fsum(total for total, _ in pairs), math.fsum(counts) if counts else None
    return merged

"""`StepResult`: losses, times and counts of one training step, in one process or merged over all.

CUDA takes about 2 us to read the time between two events, and each task needs two such reads. A
training loop that never uses the times would lose as much time as a whole message may take. So the
result of a step holds the events, which are small, and reads them at the first access. It does not
hold the step, its batch or its activations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeexec.devices.clocks import Clocks
from pipeexec.devices.streams import Event
from pipeexec.stages.loss_function import MetricSum, stage_loss_name
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline, align_collectives

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
    host_seconds, peak_held, clock_error, host_times
        As in `StepResult`; 0 or NaN for devices and tasks of other processes.
    loss_dtype
        Name of the losses' torch dtype; empty if there are no losses.
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
                   self.timeline.nbytes[tasks],
                   _values_or_nan(self.timeline.issued, len(self.timeline))[tasks],
                   _values_or_nan(self.host_times, len(self.timeline))[tasks]]  # fmt: skip
        head = [self.zero, list(self.losses.items()), self.host_seconds, self.peak_held,
                self.loss_dtype, self.clock_error, dict(self.metrics), self.votes]  # fmt: skip
        return json.dumps(head).encode() + b"\n" + np.array(columns, dtype=np.float64).tobytes()

    @classmethod
    def unpack(cls, graph: TaskGraph, text: bytes) -> ProcessResult:
        """Return the result that `pack` has turned into bytes."""
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


def _values_or_nan(column: Floats | None, n_tasks: int) -> Floats:
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
        issued[ran] = _values_or_nan(part.timeline.issued, len(graph))[ran] + (part.zero - zero)
        start[ran] = part.timeline.start[ran] + (part.zero - zero)
        end[ran] = part.timeline.end[ran] + (part.zero - zero)
        nbytes[ran] = part.timeline.nbytes[ran]
        issue_seconds[ran] = _values_or_nan(part.host_times, len(graph))[ran]
    peak_held = np.array([part.peak_held for part in parts]).sum(axis=0).tolist()
    metrics: dict[str, tuple[float, float | None]] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        pairs = [part.metrics[name] for part in parts if name in part.metrics]
        counts = [count for _, count in pairs if count is not None]
        total = math.fsum(total for total, _ in pairs)
        metrics[name] = total, math.fsum(counts) if counts else None
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
        metrics,
        sum(part.votes for part in parts),
    )


class Milestone(NamedTuple):
    """A task that waits for an event inside a backward, and that backward's start and end event."""

    task: int
    event: Event
    start: Event
    end: Event


@dataclass(frozen=True, eq=False)
class Readings:
    """Events of a step of this process, and the other columns of its timeline; see `StepEvents`.

    Attributes
    ----------
    local_numbers
        Position of each device of the graph among this process's devices; -1 for remote devices.
    on_host
        Whether each device of the graph is a CPU, whose clock is the host's.
    leaders
        For members of a collective that another member of this process runs: that member.
    order
        The tasks of this process in the order in which they were issued.
    may_be_running
        Whether some tasks may not have ended.
    """

    graph: TaskGraph
    clock: Clocks | None
    local_numbers: Sequence[int]
    on_host: NDArray[np.bool_]
    start_events: Sequence[Event | None]
    end_events: Sequence[Event | None]
    ran: NDArray[np.bool_]
    leaders: Mapping[int, int]
    nbytes: NDArray[np.float64]
    issued: Sequence[float]
    host_seconds: float
    order: Sequence[int]
    issue_seconds: NDArray[np.float64] | None = None
    milestones: Sequence[Milestone] = ()
    is_replay: bool = False
    may_be_running: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the step; NaN for tasks that did not run, or ran in other processes."""
        graph = self.graph
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        for task in np.flatnonzero(self.ran).tolist():
            start_event, end_event = self.start_events[task], self.end_events[task]
            if self.clock is None or start_event is None or end_event is None:
                continue
            if self.may_be_running and not end_event.is_set():
                continue
            device = self.local_numbers[int(graph.device[task])]
            start[task] = self.clock.seconds(device, start_event)
            end[task] = self.clock.seconds(device, end_event)
        for task, leader in self.leaders.items():
            if not np.isnan(end[task]):
                start[task], end[task] = start[leader], end[leader]
        # A GPU's clock is not the host's: issue times are unknown on it.
        issued = np.where(self.on_host[graph.device] & ~np.isnan(start), self.issued, np.nan)
        times = align_collectives(graph, start, end)
        return Timeline(graph, *times, self.nbytes, issued=none_if_all_nan(issued))

    @property
    def milestone_shares(self) -> dict[int, float]:
        """Share of its backward after which each bucket's gradients are computed, by reduction."""
        shares: dict[int, float] = {}
        for task, event, start, end in self.milestones:
            duration = max(end.seconds_since(start), 1e-9)
            shares[task] = max(shares.get(task, 0.0), event.seconds_since(start) / duration)
        return shares

    @property
    def host_times(self) -> NDArray[np.float64] | None:
        """Time in which the host issued each task (s); NaN for others, None for a replay."""
        if self.is_replay or self.issue_seconds is not None:
            return self.issue_seconds
        seconds = np.full(len(self.graph), np.nan)
        order = np.array(self.order, dtype=np.int64)
        seconds[order] = np.diff(np.array(self.issued)[order], append=self.host_seconds)
        return seconds

    def fields(self) -> dict[str, Any]:
        """Return the fields of `StepResult` that come from events, by name."""
        return {
            "timeline": self.timeline,
            "clock_error": 0.0 if self.clock is None else self.clock.error,
            "milestones": self.milestone_shares,
            "host_times": self.host_times,
        }


#: Fields that are read from events, and the attribute that holds the events until then.
_EVENT_FIELDS = frozenset({"timeline", "clock_error", "milestones", "host_times"})
_READINGS = "_readings"


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """Result of one training step.

    Attributes
    ----------
    losses
        Share of each micro-batch in the loss of its mini-batch, without `stage_losses`. With
        several processes: of the micro-batches whose last stage is in this process.
    timeline
        Start and end of each task; NaN for tasks of other processes. On a GPU, a task of an eager
        step starts when its stream reaches it. If the host is late, the duration includes the time
        in which the host launches the task. In an eager step of one process, this,
        ``clock_error``, ``milestones`` and ``host_times`` are read from events at the first access;
        until then the result keeps these events.
    peak_held
        Most micro-batches whose activations each device held; shape ``(n_devices,)``.
    host_seconds
        Time in which the host issued all tasks, or launched them as one CUDA graph (s); after
        `Pipeline.gather`, the sum over processes.
    part
        Measurements of this process, for `Pipeline.gather`; None if there is one process.
    n_losses
        Number of mini-batches, whose losses `loss` averages.
    clock_error
        Largest error of time differences between two devices (s), from the alignment of their
        clocks; 0 if they have one clock. See `pipeexec.devices.clocks`.
    host_times
        Time in which the host issued each task, until the next one (s); shape ``(n_tasks,)``. NaN
        for tasks of other processes, None if one CUDA graph was launched.
    milestones
        Share of the last backward, 0 to 1, at which all gradients of a bucket were computed. The
        key is the number of the bucket's REDUCE_GRAD. Only buckets of this process; empty after
        `Pipeline.gather`.
    metric_sums
        Sums of each metric of ``loss_fn`` over the micro-batches of this process, from which
        `metrics` are computed.
    grad_norm
        Norm of all gradients over stages, replicas and processes, before clipping; no dimensions.
        None if the graph was lowered without ``grad_norm=True``.
    skipped
        Whether no optimizer stepped, since a gradient was not finite; see ``grad_scaler`` of
        `pipeexec.Pipeline`.
    loss_stages
        Stages before the last one that have a loss of their own.
    lacks_losses
        Whether some of these stages are in other processes; False after `Pipeline.gather`.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...     result = pipeline.step(x, x)
    >>> result.n_microbatches, result.peak_held, result.timeline.makespan > 0
    (4, (2, 1), True)
    """

    losses: tuple[Tensor, ...]
    timeline: Timeline
    peak_held: tuple[int, ...]
    host_seconds: float
    part: ProcessResult | None = None
    n_losses: int = 1
    clock_error: float = field(default_factory=float)
    milestones: Mapping[int, float] = field(default_factory=dict)
    #: A default factory leaves no class attribute, which would bypass `__getattr__`.
    host_times: NDArray[np.float64] | None = field(default_factory=lambda: None)
    metric_sums: Mapping[str, MetricSum] = field(default_factory=dict)
    grad_norm: Tensor | None = None
    skipped: bool = False
    loss_stages: tuple[int, ...] = ()
    lacks_losses: bool = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            readings = self.__dict__.get(_READINGS)
            if readings is not None and name in _EVENT_FIELDS:
                self.__dict__.update(readings.fields())
                self.__dict__.pop(_READINGS, None)  # another thread may have read them too
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, for copies and pickles; events cannot leave their process."""
        return {x.name: getattr(self, x.name) for x in fields(self)}

    @property
    def n_microbatches(self) -> int:
        """Number of micro-batches of all replicas."""
        readings = self.__dict__.get(_READINGS)
        graph = self.timeline.graph if readings is None else readings.graph
        return int(((graph.op == Op.F) & (graph.stage == 0) & (graph.part <= 0)).sum())

    @cached_property
    def loss(self) -> Tensor:
        """Loss of the whole batch, or mean loss of its mini-batches; a tensor without dimensions.

        It is the sum of that of the last stage and of `stage_losses`. If a stage with a loss is in
        another process, it raises `ExecutionError` before `Pipeline.gather`.
        """
        self._check_complete("the loss is")
        first = self.losses[0]
        loss = torch.stack([loss.to(first.device) for loss in self.losses]).sum()
        for stage in self.loss_stages:
            for total in self.metric_sums[stage_loss_name(stage)].totals:
                loss = loss + (total.to(first) if isinstance(total, Tensor) else total)
        return loss / self.n_losses

    @property
    def stage_losses(self) -> dict[int, float]:
        """Loss of each stage of ``stage_losses`` of `pipeexec.Pipeline`, over all micro-batches.

        They are among `metrics`, and raise as those do.
        """
        return {stage: self.metrics[stage_loss_name(stage)] for stage in self.loss_stages}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Losses of ``stage_losses``, and metrics that losses return, combined over micro-batches.

        A metric that is a number is a mean weighted by samples, or a sum if losses are sums; over
        several mini-batches it is the mean of theirs. One that is ``(sum, count)`` is the sum of
        all sums over that of all counts. The first access waits for values on GPUs. They raise
        where `loss` does.
        """
        self._check_complete("metrics are")
        return {name: x.value(self.n_losses) for name, x in self.metric_sums.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._text()}, {self.timeline!r}>"

    def _repr_html_(self) -> str:
        from pipesim.plot.html import timeline_html
        from pipesim.plot.html_tables import note_html

        text = f"{type(self).__name__}: {self._text()}"
        return note_html(text) + timeline_html(self.timeline)

    def _text(self) -> str:
        """Return loss, metrics and norm of the gradients, as far as this process has them."""
        if not self._is_complete:
            parts = [f"{len(self.losses)} of {self.n_microbatches} losses in this process"]
        else:
            values = {"loss": float(self.loss), **self.metrics}
            parts = [f"{name} {value:.6g}" for name, value in values.items()]
        if self.grad_norm is not None:
            parts.append(f"grad_norm {float(self.grad_norm):.6g}")
        if self.skipped:
            parts.append("skipped, since a gradient is not finite")
        return ", ".join(parts)

    @property
    def _is_complete(self) -> bool:
        """Whether this process has the losses of all micro-batches."""
        return len(self.losses) >= self.n_microbatches and not self.lacks_losses

    def _check_complete(self, what: str) -> None:
        if not self._is_complete:
            raise ExecutionError(
                f"{what} computed in another process; every process can have it from "
                "pipeline.gather(result), which all must call"
            )


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationResult(StepResult):
    """Result of an evaluation; its fields are those of `StepResult`.

    Attributes
    ----------
    losses, timeline, host_seconds, part, clock_error, host_times, metric_sums
        As those of `StepResult`, of the forward-only graph.
    peak_held
        0 for each device, as no activations are kept; shape ``(n_devices,)``.
    n_losses
        1: mini-batches count as one batch.
    milestones, grad_norm, skipped
        Empty, None and False, as there is neither a backward nor an optimizer step.
    """


def lazy_result(
    result_type: type[StepResult], readings: Readings, fields: Mapping[str, Any]
) -> StepResult:
    """Return the result of a step of one process; its events are read at the first access.

    ``fields`` are those that are not read from events, without ``part``.
    """
    result = object.__new__(result_type)
    # `__getattr__` adds the missing fields.
    result.__dict__.update({**fields, "part": None, _READINGS: readings})
    return result


def gathered_result(result: StepResult, merged: ProcessResult) -> StepResult:
    """Return the result of a whole step, from that of one process and the merged ones of all."""
    dtype = getattr(torch, merged.loss_dtype)
    losses = (torch.tensor(merged.losses[m], dtype=dtype) for m in range(result.n_microbatches))
    return type(result)(
        losses=tuple(losses),
        timeline=merged.timeline,
        peak_held=merged.peak_held,
        host_seconds=merged.host_seconds,
        part=merged,
        n_losses=result.n_losses,
        clock_error=merged.clock_error,
        host_times=merged.host_times,
        metric_sums={
            name: MetricSum((total,), () if count is None else (count,))
            for name, (total, count) in merged.metrics.items()
        },
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        loss_stages=result.loss_stages,
    )


def copy_losses(losses: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return copies of the losses of micro-batches, and the numbers of those that are NaN.

    A later replay of a CUDA graph overwrites the losses themselves. The caller waits, once for each
    device, until its own stream there has made the copies. After that, other streams may reuse the
    memory of the losses.
    """
    numbers_by_type: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, loss in enumerate(losses):
        if loss is not None:
            numbers_by_type.setdefault((loss.device, loss.dtype), []).append(number)
    copies: dict[int, Tensor] = {}
    nan: list[int] = []
    for numbers in numbers_by_type.values():
        stack = torch.stack([x for k in numbers if (x := losses[k]) is not None])
        copies.update(zip(numbers, stack.unbind(), strict=True))
        nan += [k for k, is_nan in zip(numbers, stack.isnan().tolist(), strict=True) if is_nan]
    return tuple(copies[k] for k in sorted(copies)), sorted(nan)

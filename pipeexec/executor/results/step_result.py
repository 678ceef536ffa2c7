"""`StepResult`: losses, times and counts of one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeexec.executor.results.process_results import ProcessResult
from pipeexec.executor.results.task_times import Readings
from pipeexec.stages.loss.metrics import MetricSum
from pipesim.errors import ExecutionError
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline

#: Fields that are read from events, and the attribute that holds the events until then.
_EVENT_FIELDS = frozenset({"timeline", "clock_error", "milestones", "host_times"})
_READINGS = "_readings"


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """Result of one training step.

    Attributes
    ----------
    losses
        Share of each micro-batch in the loss of its mini-batch. With several processes: of the
        micro-batches whose last stage is in this process.
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

    Raises
    ------
    ExecutionError
        By ``loss`` and ``metrics``, if a last stage is in another process, and the result was not
        gathered.

    See Also
    --------
    pipeexec.Pipeline.step : Returns such a result.
    pipeexec.EvaluationResult : Result of an evaluation.
    pipesim.compare : Compare its timeline with a prediction.

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

        Raises
        ------
        ExecutionError
            If a last stage is in another process, and the result was not gathered.
        """
        self._check_complete("the loss is")
        first = self.losses[0]
        return torch.stack([loss.to(first.device) for loss in self.losses]).sum() / self.n_losses

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics that ``loss_fn`` returns, combined over all micro-batches.

        A metric that is a number is a mean weighted by samples, or a sum if losses are sums; over
        several mini-batches it is the mean of theirs. One that is ``(sum, count)`` is the sum of
        all sums over that of all counts. The first access waits for values on GPUs.

        Raises
        ------
        ExecutionError
            If a last stage is in another process, and the result was not gathered.
        """
        self._check_complete("metrics are")
        return {name: x.value(self.n_losses) for name, x in self.metric_sums.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._text()}, {self.timeline!r}>"

    def _repr_html_(self) -> str:
        from pipesim.plot.html_parts import note_html

        text = f"{type(self).__name__}: {self._text()}"
        return note_html(text) + self.timeline._repr_html_()

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
        return len(self.losses) >= self.n_microbatches

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
    losses
        Share of each micro-batch in the loss of the batch.
    timeline
        Start and end of each task of the forward-only graph (s); NaN for tasks of other processes.
    peak_held
        0 for each device, as no activations are kept; shape ``(n_devices,)``.
    host_seconds, part, clock_error, host_times, metric_sums
        As those of `StepResult`.
    n_losses
        1: mini-batches count as one batch.
    milestones
        Empty, as there is no backward.
    grad_norm
        None, as there are no gradients.
    skipped
        False, as there is no optimizer step.

    Raises
    ------
    ExecutionError
        By ``loss`` and ``metrics``, as those of `StepResult`.

    See Also
    --------
    pipeexec.Pipeline.evaluate : Returns such a result.
    pipeexec.StepResult : Result of a training step, with the same fields.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...     result = pipeline.evaluate(x, x)
    >>> result.peak_held, result.loss.shape
    ((0, 0), torch.Size([]))
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

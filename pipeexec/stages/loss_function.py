"""`LossFunction`: the user's loss function on one micro-batch, checked, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pipeexec.nesting import leaves
from pipesim.errors import ExecutionError, check_function, check_name, number

Value = Tensor | float
#: Value of each metric of a micro-batch, and its count; None for a mean over samples, or a sum.
Metrics = dict[str, tuple[Value, Value | None]]


class MetricSum(NamedTuple):
    """Sums of a metric over micro-batches, one a device; without counts, of weighted values."""

    totals: tuple[Value, ...]
    counts: tuple[Value, ...] = ()

    def numbers(self) -> tuple[float, float | None]:
        """Return total and count; the host waits for tensors on a GPU."""
        count = math.fsum(map(float, self.counts)) if self.counts else None
        return math.fsum(map(float, self.totals)), count

    def value(self, n_losses: int) -> float:
        """Return the metric of a step of so many mini-batches; NaN for a count of 0."""
        total, count = self.numbers()
        return total / n_losses if count is None else total / (count or math.nan)


def checked_metrics(metrics: Mapping[object, object], *, on_device: bool) -> Metrics:
    """Return metrics without gradients: numbers, or pairs of them.

    With ``on_device``, numbers of the host are refused, as a CUDA graph would repeat them.
    """
    checked: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ExecutionError(f"loss_fn returned a metric with the name {name!r:.60}; give text")
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        total = _checked_value(name, pair[0], on_device)
        checked[name] = total, None if pair[1] is None else _checked_value(name, pair[1], on_device)
    return checked


def _checked_value(name: str, value: object, on_device: bool) -> Value:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    result = float(value) if isinstance(value, bool) else number(value)
    if result is None or on_device:
        raise ExecutionError(
            f"loss_fn returned {value!r:.60} as metric {name!r}; a metric is "
            + ("" if on_device else "a number, or ")
            + f"a tensor with one element{' on the GPU' if on_device else ''}, or a pair (sum, "
            "count) of them"
        )
    return result


def metric_sums(
    metrics: Sequence[Metrics | None], weights: Sequence[float]
) -> dict[str, MetricSum]:
    """Return the sums of each metric over micro-batches; None for those of other processes.

    Weights are those of micro-batches, for metrics without counts.
    """
    rows = [(row, w) for row, w in zip(metrics, weights, strict=True) if row is not None]
    sums: dict[str, MetricSum] = {}
    for name in rows[0][0] if rows else ():
        if any(row[name][1] is None for row, _ in rows):
            sums[name] = MetricSum(_sums_by_device([row[name][0] * w for row, w in rows]))
            continue
        counts = [x for row, _ in rows if (x := row[name][1]) is not None]
        sums[name] = MetricSum(
            _sums_by_device([row[name][0] for row, _ in rows]), _sums_by_device(counts)
        )
    return sums


def _sums_by_device(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the sum of the values on each device, in double precision."""
    by_device: dict[object, Value] = {}
    for value in values:
        device = value.device if isinstance(value, Tensor) else None
        term = value.double() if isinstance(value, Tensor) else value
        by_device[device] = by_device[device] + term if device in by_device else term
    return tuple(by_device.values())


Count = Tensor | float
#: Takes the output of the last stage and the targets of a micro-batch; returns a loss tensor, or
#: the tuple ``(sum, count)``, or a tuple of one of these and a dict of metrics.
Loss = Callable[[Any, Any], Any]

_FORMS = (
    "let loss_fn return a loss tensor, or the tuple (sum, count), or a tuple of one of these and a "
    "dict of metrics"
)


class LossFunction:
    """The loss function of a pipeline, and whether it returns a count.

    Parameters
    ----------
    function, reduction
        The user's, and how the losses of samples are reduced if it returns no count.
    on_device
        Whether a count must be a tensor, as a CUDA graph needs.
    of_stages
        Functions of stages before the last one that have a loss of their own, by stage.

    Attributes
    ----------
    returns_count
        Whether the function returns ``(sum, count)``; None before the first call.
    is_checked
        Whether a step has compared the combined loss with that of several micro-batches at once;
        see `pipeexec.stages.step_loss`.
    has_warned_of_shapes
        Whether a step has warned of `Microbatches` of different lengths.
    """

    def __init__(
        self,
        function: Loss,
        reduction: Literal["mean", "sum"],
        *,
        on_device: bool = False,
        of_stages: Mapping[int, LossFunction] = MappingProxyType({}),
    ) -> None:
        check_function("loss_fn", function, "loss_fn(output, targets)")
        check_name("loss_reduction", reduction, ("mean", "sum"))
        self.function, self.reduction, self.on_device = function, reduction, on_device
        self.of_stages = of_stages
        self.returns_count: bool | None = None
        self.is_checked = self.has_warned_of_shapes = False

    def __call__(self, output: object, targets: object) -> tuple[Tensor, Count | None]:
        """Return the loss of a micro-batch and its count, None without one."""
        return self.with_metrics(output, targets)[:2]

    def with_metrics(
        self, output: object, targets: object
    ) -> tuple[Tensor, Count | None, Metrics | None]:
        """Return the loss of a micro-batch, its count and its metrics."""
        try:
            value = self.function(output, targets)
        except Exception as error:  # of the user's code
            if not hasattr(error, "__notes__"):  # the same error object may be raised again
                error.add_note(
                    f"loss_fn was called with {_outline_of_values(output=output, targets=targets)}"
                )
            raise
        metrics: Metrics | None = None
        if _has_metrics(value):
            metrics = checked_metrics(value[1], on_device=self.on_device)
            value = value[0]
        if not isinstance(value, tuple) or len(value) != 2:
            loss = _check_loss(value)
            self._note(False)
            return loss, None, metrics
        loss = _check_loss(value[0])
        self._note(True)
        return loss, self._check_count(value[1]), metrics

    def _note(self, returns_count: bool) -> None:
        if self.returns_count is None:
            self.returns_count = returns_count
        if self.returns_count != returns_count:
            raise ExecutionError(
                "loss_fn returned (sum, count) for one micro-batch and a loss alone for another; "
                "return the same for all"
            )
        if returns_count and self.reduction == "sum":
            raise ExecutionError(
                "loss_fn returned (sum, count), which is a mean over the count, but loss_reduction "
                "is 'sum'; leave loss_reduction out, or return the sum alone"
            )

    def _check_count(self, count: object) -> Count:
        """Return a count as a float; one on a GPU stays there, so that the host does not wait."""
        if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
            if count.requires_grad:
                raise ExecutionError(
                    "loss_fn returned a count that depends on parameters; the count of (sum, "
                    "count) is a number of things, such as tokens: detach it"
                )
            count = count.detach().reshape(())
            if count.device.type != "cpu":
                return count.double()
            if not self.on_device:
                count = count.item()
        if self.on_device:
            raise ExecutionError(
                f"loss_fn returned the count {count!r:.60}, which a CUDA graph would repeat in "
                "every step; return a tensor with one element on the GPU, made from the targets"
            )
        value = float(count) if isinstance(count, bool) else number(count)
        if value is None or not 0 <= value < math.inf:
            raise ExecutionError(
                f"loss_fn returned the count {count!r:.60}; the count of (sum, count) must be a "
                "finite number of at least 0, or a tensor with one element"
            )
        return value


def _outline_of_values(**values: object) -> str:
    """Return paths and shapes or types of the first leaves of nested values."""
    rows = [leaf for name, value in values.items() for leaf in leaves(value, name)[:4]]
    return ", ".join(
        f"{path} {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
        for path, x in rows
    )


def _check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        actual = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ExecutionError(f"the loss must be a tensor with one element, got {actual}; {_FORMS}")
    if not loss.is_floating_point():
        raise ExecutionError(
            f"the loss must be a real floating-point tensor, got {loss.dtype}; {_FORMS}"
        )
    return loss.reshape(())


def _has_metrics(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def stage_loss_name(stage: int) -> str:
    """Return the name of the metric that is the loss of a stage before the last one."""
    return f"stage_{stage}_loss"


def combined_loss(loss: Any) -> Tensor:
    """Return the loss of a whole batch from the value of a loss function."""
    if _has_metrics(loss):
        loss = loss[0]
    if isinstance(loss, Tensor):
        return loss
    total, count = loss
    mean: Tensor = total / count
    return mean

"""Metrics that a loss function returns beside the loss, and their sums over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pipesim.errors import ExecutionError, number

Value = Tensor | float
#: Value of each metric of a micro-batch, and its count; None for a mean over samples, or a sum.
Metrics = dict[str, tuple[Value, Value | None]]


class MetricSum(NamedTuple):
    """Sums of a metric over micro-batches, one a device.

    Attributes
    ----------
    totals
        Weighted values, or sums.
    counts
        Counts that belong to the sums; empty for a metric without counts.
    """

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
    """Return metrics without gradients.

    Raises
    ------
    ExecutionError
        For names that are no text, and values that are neither numbers nor pairs of them. With
        ``on_device``, numbers of the host are refused, as a CUDA graph would repeat them.
    """
    checked: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ExecutionError(f"loss_fn returned a metric with the name {name!r:.60}; give text")
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        total = _checked(name, pair[0], on_device)
        checked[name] = total, None if pair[1] is None else _checked(name, pair[1], on_device)
    return checked


def _checked(name: str, value: object, on_device: bool) -> Value:
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

    Parameters
    ----------
    metrics, weights
        Metrics and weight of each micro-batch; weights are for metrics without counts.
    """
    rows = [(row, w) for row, w in zip(metrics, weights, strict=True) if row is not None]
    names = list(rows[0][0]) if rows else []
    sums: dict[str, MetricSum] = {}
    for name in names:
        if any(count is None for count in (row[name][1] for row, _ in rows)):
            sums[name] = MetricSum(_sums([row[name][0] * w for row, w in rows]))
            continue
        counts = [x for row, _ in rows if (x := row[name][1]) is not None]
        sums[name] = MetricSum(_sums([row[name][0] for row, _ in rows]), _sums(counts))
    return sums


def _sums(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the sum of the values on each device, in double precision."""
    by_device: dict[object, Value] = {}
    for value in values:
        device = value.device if isinstance(value, Tensor) else None
        term = value.double() if isinstance(value, Tensor) else value
        by_device[device] = by_device[device] + term if device in by_device else term
    return tuple(by_device.values())

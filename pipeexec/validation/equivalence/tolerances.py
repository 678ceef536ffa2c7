"""Compare results of two steps, with the differences that rounding explains.

Sums in another order differ by a share of the largest summand, not of the sum, which may cancel. So
a gradient may differ by `SHARE` units in the last place of the largest gradient of the model, and a
weight after a step by what such a difference of its gradient makes of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeexec.validation.equivalence.real_steps import OPTIMIZERS, StepTensors
from pipesim.errors import ArgumentError

if TYPE_CHECKING:
    import pandas as pd


#: Units in the last place by which results may differ.
SHARE = 4096
#: Largest distance of 1 and the next number of a type: that of single precision has room.
_LARGEST_EPS = 1e-4
#: ``eps`` of `torch.optim.Adam`.
_ADAM_EPS = 1e-8


def rounding_share(dtype: torch.dtype) -> float:
    """Return the difference that rounding explains, as a share of the largest value."""
    eps = torch.finfo(dtype).eps
    if eps > _LARGEST_EPS:
        raise ArgumentError(
            f"dtype: {dtype} has too few digits to tell rounding from a wrong gradient (one unit "
            f"in the last place of 1 is {eps:.2g}); give dtype=torch.float64, the default"
        )
    return SHARE * eps


def different_buffers(first: StepTensors, second: StepTensors, share: float) -> tuple[str, ...]:
    """Return the paths of buffers that differ after a step with SGD by more than rounding."""
    return tuple(
        path
        for path, value in first.buffers.items()
        if not _is_close(value, second.buffers[path], share)
    )


def _is_close(value: Tensor, other: Tensor, share: float) -> bool:
    """Return whether tensors differ by at most a share of the largest value."""
    if value.shape != other.shape or not value.is_floating_point():
        return torch.equal(value, other)
    largest = float(torch.maximum(value.abs().max(), other.abs().max())) if value.numel() else 0.0
    return torch.allclose(value, other, rtol=0.0, atol=share * largest, equal_nan=True)


def compared(
    first: StepTensors, second: StepTensors, learning_rate: float, share: float
) -> pd.DataFrame:
    """Return a table of the largest differences by parameter; see `Equivalence`."""
    from pipesim.utils.packages import pandas as pd

    values = [x for step in (first, second) for x in step.gradients.values()]
    limit = share * max((float(x.abs().max()) for x in values if x.numel()), default=0.0)
    rows = {}
    for path, gradient in first.gradients.items():
        other = second.gradients[path]
        columns = {"gradient": ((gradient - other).abs(), torch.full_like(gradient, limit))}
        for name in OPTIMIZERS:
            weights = first.weights[name][path]
            change = _CHANGES[name](gradient, limit) * learning_rate
            allowed = change + share * float(weights.abs().max() if weights.numel() else 0.0)
            columns[name] = (weights - second.weights[name][path]).abs(), allowed
        rows[path] = _row(columns)
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table.rename_axis("parameter")


def _row(columns: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float | bool]:
    """Return the largest difference of each column, its limit, and whether all are in limits."""
    row: dict[str, float | bool] = {}
    equal = True
    for name, (difference, limit) in columns.items():
        if not difference.numel():
            row[name] = row[f"{name}_limit"] = 0.0
            continue
        worst = int((difference - limit).argmax())
        row[name] = float(difference.flatten()[worst])
        row[f"{name}_limit"] = float(limit.flatten()[worst])
        equal &= bool((difference <= limit).all())
    row["equal"] = equal
    return row


def _sgd_change(gradient: Tensor, limit: float) -> Tensor:
    """Return the change of an update by SGD if a gradient changes by ``limit``."""
    return torch.full_like(gradient, limit)


def _adam_change(gradient: Tensor, limit: float) -> Tensor:
    """Return the largest change of the first update by Adam if a gradient changes by ``limit``.

    That update is ``g / (abs(g) + eps)``: a gradient near zero may even change its sign.
    """

    def update(x: Tensor) -> Tensor:
        return x / (x.abs() + _ADAM_EPS)

    value = update(gradient)
    return torch.maximum(update(gradient + limit) - value, value - update(gradient - limit))


_CHANGES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "sgd": _sgd_change,
    "adam": _adam_change,
}

"""`check_equivalent`: whether two configurations of a model compute the same training step.

Sums in another order differ by a share of the largest summand, not of the sum, which may cancel. So
a gradient may differ by `_SHARE` units in the last place of the largest gradient of the model, and
a weight after a step by what such a difference of its gradient makes of the update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.loss_function import Loss, LossFunction
from pipeexec.validation.layer_isolation import BrokenLayer, broken_layers, broken_loss
from pipeexec.validation.small_runs import (
    OPTIMIZERS,
    Configuration,
    SmallRun,
    StepTensors,
    check_layers,
    named_layers,
    run_step,
    small_runs,
    to_dtype,
)
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_function,
    check_name,
    number,
)
from pipesim.planning.choice import PlanChoice
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    import pandas as pd


@checked_names
def check_equivalent(
    model: nn.Module | Sequence[nn.Module],
    a: Configuration,
    b: Configuration,
    batch: tuple[Batch, Any],
    loss_fn: Loss,
    *,
    loss_reduction: Literal["mean", "sum"] = "mean",
    learning_rate: float = 1e-2,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Equivalence:
    """Run two configurations on one batch, and compare losses, gradients and weights.

    Both run on CPU workers, from copies of the model; the model stays as it is. If they are not
    equal, each layer runs alone on the micro-batches of both, and the report names the layers whose
    outputs differ.

    Parameters
    ----------
    model
        An `nn.Sequential`, or a list of modules; its children are divided into stages. Another
        module is one layer.
    a, b
        Two choices of `pipesim.plan`, or two mappings with any of ``n_stages``,
        ``n_microbatches`` (accumulation steps of a replica), ``n_replicas``, ``n_chunks`` (stages
        of a device), ``schedule`` and ``recompute`` (``"never"``, ``"always"``,
        ``"except_last"``). Counts are 1 unless given.
    batch
        Inputs and targets of the global batch. The first dimension of tensors is the batch.
    loss_fn, loss_reduction
        As for `Pipeline`.
    learning_rate
        Learning rate of the step of SGD, and of that of Adam.
    dtype
        Type of floating-point values for the comparison. Double precision tells rounding from true
        differences best. None keeps that of the model and the batch.
    seed
        Seed of random numbers in both runs.

    Returns
    -------
    Equivalence
        ``equal``, ``table``, ``layers``, ``losses``, ``buffers`` and ``notes``.

    Notes
    -----
    Choices of a plan are scaled down: at most 2 devices, 2 stages on each and 2 replicas. Sizes of
    micro-batches keep their ratio, and are the largest that divide the batch into at least as many
    micro-batches as a choice has, or 2. Tensor parallelism, sharded optimizers and sequence
    parallelism do not run; they add the same numbers in another order.

    Results are equal if they differ by at most 4096 units in the last place: of the loss, of the
    largest gradient of the model, and of a weight plus the change of its update that such a
    gradient makes. Buffers, such as running means, are compared and
    listed, but do not count: those of batch norm differ with the size of micro-batches.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    >>> batch = torch.randn(8, 4), torch.randn(8, 1)
    >>> report = px.check_equivalent(
    ...     model, {"n_microbatches": 1}, {"n_microbatches": 2}, batch, nn.functional.mse_loss
    ... )
    >>> report.equal, [layer.path for layer in report.layers]
    (False, ['1'])
    """
    check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    check_name("loss_reduction", loss_reduction, ("mean", "sum"))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(
            f"dtype must be a floating-point type such as torch.float64, or None, got {dtype!r}"
        )
    rate = number(learning_rate)
    if rate is None or not 0 < rate < math.inf:
        raise ArgumentError(f"learning_rate must be finite and above 0, got {learning_rate!r}")
    start = check_count("seed", seed, 0) % 2**63
    layers = copy.deepcopy(named_layers(model))
    inputs, targets = _checked_batch(batch)
    n_samples = len(inputs[0] if isinstance(inputs, tuple) else inputs)
    runs = small_runs(a, b, n_samples, len(layers))
    check_layers(layers, {name: run.n_stages for name, run in zip("ab", runs, strict=True)})
    if dtype is not None:
        for layer in layers.values():
            layer.to(dtype)
        loss_fn = copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn
    inputs, targets = to_dtype(inputs, dtype), to_dtype(targets, dtype)
    share = _rounding_share(dtype or _narrowest(layers.values(), inputs))
    steps = [
        run_step(
            layers, run, (inputs, targets), loss_fn,
            loss_reduction=loss_reduction, learning_rate=rate, seed=start,
        )
        for run in runs
    ]  # fmt: skip
    table = _compared(steps[0], steps[1], rate, share)
    losses = steps[0].loss, steps[1].loss
    is_loss_equal = math.isclose(*losses, rel_tol=share) or losses[0] == losses[1]
    equal = bool(is_loss_equal and table["equal"].all())
    broken: list[BrokenLayer] = []
    is_finite = all(map(math.isfinite, losses))
    if not equal and any(map(math.isfinite, losses)):
        n_parts = [run.n_parts for run in runs]
        broken, output = broken_layers(layers, inputs, n_parts, share)
        loss = broken_loss(LossFunction(loss_fn, loss_reduction), output, targets, n_parts, share)
        broken += [loss] if loss else []
    notes = _notes(a, b)
    if not is_finite:
        notes += (
            f"the losses {losses[0]:.9g} and {losses[1]:.9g} are not both finite; look at the "
            "inputs, or at layers and losses that overflow or divide by zero",
        )
    elif not equal and not broken:
        notes += (_no_layer_note(table),)
    buffers = _different_buffers(steps[0], steps[1], share)
    return Equivalence(equal, runs, losses, table, tuple(broken), buffers, notes)


def _checked_batch(batch: object) -> tuple[Batch, Any]:
    """Return inputs and targets; raise `ArgumentError` unless both are tensors of samples."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ArgumentError(
            f"batch must be a pair of inputs and targets, got {type(batch).__name__}"
        )
    inputs, targets = batch
    check_batch(inputs, targets)
    if inputs is None or targets is None:
        raise ArgumentError("batch must have inputs and targets, got None")
    for name, values in (("inputs", inputs), ("targets", targets)):
        tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
        if any(bool(x.isnan().any()) for x in tensors):
            raise ArgumentError(
                f"batch: the {name} have NaN, which makes all results NaN; give numbers"
            )
    return inputs, targets


def _narrowest(layers: Any, inputs: Batch) -> torch.dtype:
    """Return the floating-point type with the fewest digits, of parameters and inputs."""
    tensors: list[Tensor] = [p for layer in layers for p in layer.parameters()]
    tensors += inputs if isinstance(inputs, tuple) else [inputs]
    types = {x.dtype for x in tensors if x.is_floating_point()}
    return max(types, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def _notes(a: Configuration, b: Configuration) -> tuple[str, ...]:
    """Return what of the choices of a plan does not run."""
    choices = [choice for choice in (a, b) if isinstance(choice, PlanChoice)]
    absent = {
        "tensor parallelism": any(x.tensor_parallel > 1 for x in choices),
        "the sharded optimizer": any(x.shard_optimizer for x in choices),
        "sequence parallelism": any(x.sequence_parallel for x in choices),
    }
    names = [name for name, is_absent in absent.items() if is_absent]
    if not names:
        return ()
    return (f"not run: {', '.join(names)}, which add the same numbers in another order",)


def _no_layer_note(table: Any) -> str:
    """Return the note if the steps differ, but no layer does alone."""
    excess = (table["gradient"] / table["gradient_limit"].clip(lower=1e-300)).sort_values()
    return (
        f"no layer differs alone; the gradient of {excess.index[-1]} differs most. The layers may "
        "share state, or differ in their backward alone"
    )


@dataclass(frozen=True, eq=False)
class Equivalence:
    """Comparison of two configurations; `print` it to read it.

    Attributes
    ----------
    equal
        Whether losses, all gradients and all weights after a step are equal up to rounding.
    runs
        The two configurations that ran.
    losses
        Loss of each.
    table
        One row a parameter: ``gradient``, ``sgd`` and ``adam``, the largest difference of its
        gradient, and of its values after a step of each optimizer; ``gradient_limit``,
        ``sgd_limit`` and ``adam_limit``, the largest that rounding explains for the value with this
        difference; and ``equal``.
    layers
        Layers that break the equality, in the order of the model; empty if ``equal``.
    buffers
        Paths of buffers, such as running means, that differ after a step; those of the first
        replica are compared. ``equal`` does not count them.
    notes
        Parts of the configurations that did not run, and other remarks, a sentence each.
    """

    equal: bool
    runs: tuple[SmallRun, SmallRun]
    losses: tuple[float, float]
    table: pd.DataFrame
    layers: tuple[BrokenLayer, ...]
    buffers: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"a: {self.runs[0]}", f"b: {self.runs[1]}"]
        n_wrong = int((~self.table["equal"]).sum())
        if self.equal:
            lines.append(f"equal: losses, and {len(self.table)} parameters after a step")
        else:
            lines.append(
                f"not equal: {n_wrong} of {len(self.table)} parameters differ; losses "
                f"{self.losses[0]:.9g} and {self.losses[1]:.9g}"
            )
        lines += [f"{x.path} ({x.kind}): {x.reason}" for x in self.layers]
        if self.buffers:
            lines.append(f"buffers that differ after a step: {', '.join(self.buffers)}")
        return "\n".join([*lines, *self.notes])


# Differences that rounding explains

#: Units in the last place by which results may differ.
_SHARE = 4096
#: Largest distance of 1 and the next number of a type: that of single precision has room.
_LARGEST_EPS = 1e-4
#: ``eps`` of `torch.optim.Adam`.
_ADAM_EPS = 1e-8


def _rounding_share(dtype: torch.dtype) -> float:
    """Return the difference that rounding explains, as a share of the largest value."""
    eps = torch.finfo(dtype).eps
    if eps > _LARGEST_EPS:
        raise ArgumentError(
            f"dtype: {dtype} has too few digits to tell rounding from a wrong gradient (one unit "
            f"in the last place of 1 is {eps:.2g}); give dtype=torch.float64, the default"
        )
    return _SHARE * eps


def _different_buffers(first: StepTensors, second: StepTensors, share: float) -> tuple[str, ...]:
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


def _compared(
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


def _adam_change(gradient: Tensor, limit: float) -> Tensor:
    """Return the largest change of the first update by Adam if a gradient changes by ``limit``.

    That update is ``g / (abs(g) + eps)``: a gradient near zero may even change its sign.
    """

    def update(x: Tensor) -> Tensor:
        return x / (x.abs() + _ADAM_EPS)

    value = update(gradient)
    return torch.maximum(update(gradient + limit) - value, value - update(gradient - limit))


#: Change of an update, without the learning rate, if a gradient changes by a limit.
_CHANGES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "sgd": torch.full_like,  # the update is the gradient
    "adam": _adam_change,
}

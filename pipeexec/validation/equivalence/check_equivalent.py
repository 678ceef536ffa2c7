"""`check_equivalent`: whether two configurations of a model compute the same training step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.loss.loss_function import Loss, LossFunction
from pipeexec.validation.equivalence.layer_isolation import BrokenLayer, broken_layers, broken_loss
from pipeexec.validation.equivalence.real_steps import (
    check_layers,
    named_layers,
    run_step,
    to_dtype,
)
from pipeexec.validation.equivalence.report import Equivalence
from pipeexec.validation.equivalence.small_runs import Configuration, small_runs
from pipeexec.validation.equivalence.tolerances import compared, different_buffers, rounding_share
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_function,
    check_name,
    number,
)
from pipesim.planning.configurations.choice import PlanChoice


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

    Raises
    ------
    StageError
        If a layer or the loss raises; see `Pipeline.step`.

    See Also
    --------
    pipeexec.Equivalence : The result.
    pipeexec.validate : Compare predicted and measured times.
    pipesim.plan : Its choices are configurations.

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
    _check_dtype(dtype)
    rate, start = _checked_rate(learning_rate), check_count("seed", seed, 0) % 2**63
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
    share = rounding_share(dtype or _narrowest(layers.values(), inputs))
    steps = [
        run_step(
            layers, run, (inputs, targets), loss_fn,
            loss_reduction=loss_reduction, learning_rate=rate, seed=start,
        )
        for run in runs
    ]  # fmt: skip
    table = compared(steps[0], steps[1], rate, share)
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
        notes += (_not_finite_note(losses),)
    elif not equal and not broken:
        notes += (_no_layer_note(table),)
    buffers = different_buffers(steps[0], steps[1], share)
    return Equivalence(equal, runs, losses, table, tuple(broken), buffers, notes)


def _check_dtype(dtype: object) -> None:
    """Raise `ArgumentTypeError` unless a type of floating-point numbers, or None, is given."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(
            f"dtype must be a floating-point type such as torch.float64, or None, got {dtype!r}"
        )


def _checked_rate(learning_rate: object) -> float:
    """Return the learning rate; raise `ArgumentError` unless it is finite and above 0."""
    rate = number(learning_rate)
    if rate is None or not 0 < rate < math.inf:
        raise ArgumentError(f"learning_rate must be finite and above 0, got {learning_rate!r}")
    return rate


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


def _not_finite_note(losses: tuple[float, float]) -> str:
    """Return the note if a loss is NaN or infinite."""
    return (
        f"the losses {losses[0]:.9g} and {losses[1]:.9g} are not both finite; look at the inputs, "
        "or at layers and losses that overflow or divide by zero"
    )


def _no_layer_note(table: Any) -> str:
    """Return the note if the steps differ, but no layer does alone."""
    excess = (table["gradient"] / table["gradient_limit"].clip(lower=1e-300)).sort_values()
    return (
        f"no layer differs alone; the gradient of {excess.index[-1]} differs most. The layers may "
        "share state, or differ in their backward alone"
    )

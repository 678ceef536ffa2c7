"""Compare stages with their model: outputs, loss, gradients and buffers of one forward each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.nesting import tensors_in
from pipeexec.splitting.model_state import unchanged
from pipeexec.splitting.tracing.code_lines import line_of_error
from pipesim.errors import ArgumentError, ExecutionError, PipeError

Loss = Callable[[Any], Tensor]
#: Each trained parameter of a model, with its copies.
Parameters = Sequence[Sequence[nn.Parameter]]


class Differences(NamedTuple):
    """Largest differences of stages to their model, relative to largest elements.

    Attributes
    ----------
    outputs, loss, gradients, buffers
        Difference of each kind; infinite if one has a tensor that the other has not.
    """

    outputs: float
    loss: float
    gradients: float
    buffers: float

    @property
    def largest(self) -> float:
        """The largest of them; NaN if one is."""
        return _worst(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} by {x:.1e}" for name, x in self._asdict().items() if x != 0)


class _Result(NamedTuple):
    outputs: list[Tensor]
    loss: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    random_state: Tensor


def tolerance(model: nn.Module) -> float:
    """Return the difference that rounding may make: the root of the coarsest type's precision."""
    types = {x.dtype for x in model.parameters() if x.is_floating_point()}
    return sqrt(max((torch.finfo(x).eps for x in types), default=torch.finfo(torch.float32).eps))


def compared(
    model: nn.Module,
    stages: Sequence[nn.Module],
    run_model: Callable[[], Any],
    run_stages: Callable[[], Any],
    parameters: Parameters,
    loss_fn: Loss | None,
    draws: str = "",
) -> Differences:
    """Run a model and its stages, each from the same state, and compare.

    Parameters
    ----------
    model, stages
        The model and all of its stages.
    run_model, run_stages
        Return the output.
    parameters
        Each trained parameter of the model, with its copies in stages.
    loss_fn
        Loss of an output; by default the sum of squares of all floating-point values.
    draws
        Where the model's forward draws random numbers, for a message.

    Raises
    ------
    ExecutionError
        If ``loss_fn`` fails.
    """

    def result(run: Callable[[], Any], copies: Parameters) -> _Result:
        with unchanged(model, *stages, guard=False):  # all draw the same random numbers
            return _result(model, run, copies, loss_fn)

    alone = [row[:1] for row in parameters]
    whole = result(run_model, alone)
    try:
        parts = result(run_stages, parameters)
    except PipeError:
        raise
    except Exception as error:  # of the user's code, with other values than in the model
        raise ExecutionError(
            f"stages fail where the model does not: {type(error).__name__}: "
            f"{str(error).strip():.100}{line_of_error(error)}; modules of other stages are "
            "stand-ins there: let the forward use their results alone, not their types or methods"
        ) from error
    differences = _differences(whole, parts)
    if differences.largest != 0 and _differences(whole, result(run_model, alone)).largest != 0:
        raise ArgumentError(
            f"two forwards of {type(model).__name__} differ, with equal states of torch's random "
            "numbers, so that its stages cannot be compared with it; let it draw no other random "
            "numbers, and keep nothing but buffers from one forward to the next"
        )
    if not torch.equal(whole.random_state, parts.random_state):
        raise ArgumentError(
            f"the stages draw other random numbers than {type(model).__name__}, as its forward "
            f"draws some outside of its modules{draws}; use a module such as nn.Dropout, or call "
            "model.eval() and split again, to compare without dropout"
        )
    return differences


def _result(
    model: nn.Module, run: Callable[[], Any], parameters: Parameters, loss_fn: Loss | None
) -> _Result:
    """Run one forward and backward; gradients of copies add to those of their parameters."""
    output = run()
    loss = _sum_of_squares(output) if loss_fn is None else _given_loss(loss_fn, output)
    gradients: list[Tensor | None] = []
    if loss.requires_grad:
        leaves = [p for row in parameters for p in row if p.requires_grad]
        try:
            own = dict(zip(map(id, leaves), torch.autograd.grad(loss, leaves, allow_unused=True),
                           strict=True))  # fmt: skip
        except PipeError:
            raise
        except Exception as error:  # such as that of reentrant checkpoints
            raise ArgumentError(
                f"gradients of {type(model).__name__} cannot be compared by torch.autograd.grad: "
                f"{str(error).strip():.80}; let that work for its parameters, such as by "
                "use_reentrant=False of checkpoints"
            ) from error
        gradients = [_sum([own.get(id(p)) for p in row]) for row in parameters]
    return _Result(
        [x.detach().clone() for x in tensors_in(output)],
        [loss.detach()],
        gradients,
        [x.clone() for x in model.buffers() if not x.is_meta],
        torch.get_rng_state(),
    )


def _given_loss(loss_fn: Loss, output: Any) -> Tensor:
    """Return the loss of an output."""
    try:
        loss = loss_fn(output)
    except Exception as error:  # of the user's code
        raise ExecutionError(
            f"loss_fn fails on the model's output: {type(error).__name__}: {error!s:.300}"
        ) from error
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise ExecutionError(
            f"loss_fn must return a tensor of one element that has a gradient, got {loss!r:.60}"
        )
    return loss


def _sum_of_squares(output: Any) -> Tensor:
    values = [x.square().sum().float() for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack(values).sum() if values else torch.zeros(())


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of gradients, without those that are missing."""
    values = [x for x in gradients if x is not None]
    return torch.stack(values).sum(0) if len(values) > 1 else next(iter(values), None)


def _differences(a: _Result, b: _Result) -> Differences:
    return Differences(
        _largest(a.outputs, b.outputs),
        _largest(a.loss, b.loss),
        _largest(a.gradients, b.gradients, together=True),
        _largest(a.buffers, b.buffers),
    )


def _largest(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None], *, together: bool = False
) -> float:
    """Return the largest difference of tensors, relative to the largest element of each, or of all.

    It is infinite if forms differ or one is missing.
    """
    if len(first) != len(second):
        return float("inf")
    rows = [_difference(a, b) for a, b in zip(first, second, strict=True)]
    if together:
        size = max((x for _, x in rows), default=0.0)
        rows = [(x, size) for x, _ in rows]
    return _worst([x / size if size and x else x for x, size in rows])


def _worst(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if one is."""
    worst: float = next((x for x in values if isnan(x)), max(values, default=0.0))
    return worst


def _difference(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest element of the first."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf"), 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf"), 0.0
    if not a.numel() or torch.equal(a, b):
        return 0.0, 0.0 if not a.numel() else float(a.abs().max())
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf"), 0.0
    is_nan = a.isnan()
    if not torch.equal(is_nan, b.isnan()):
        return float("nan"), 0.0
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max()), float(a.abs().max())

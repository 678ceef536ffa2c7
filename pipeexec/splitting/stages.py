"""`Stages`: a model as stages, and what flows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from pipeexec.splitting.nested_values import call_arguments, tensors_of
from pipeexec.splitting.split_stage import SplitStage
from pipesim.errors import ArgumentError, ExecutionError, check_function

__all__ = ["Stages"]


class Stages(Sequence[SplitStage | None]):
    """Stages of a model, in order; `pipeexec.split` makes them.

    They share their parameters with the model, and have the modules of its forward in turn. Stages
    of other processes are None. Each
    takes what the stage before returns; the first one takes `arguments` of a batch, the last one
    returns what the model returns.

    Attributes
    ----------
    model
        The model.
    modules
        Names of the modules of each stage, in the order of their calls.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[SplitStage | None],
        modules: Sequence[tuple[str, ...]],
        arguments: Callable[[Any], tuple[Tensor, ...]],
    ) -> None:
        self.model, self.modules = model, tuple(modules)
        self._stages, self._arguments = tuple(stages), arguments

    @overload
    def __getitem__(self, index: int) -> SplitStage | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SplitStage | None, ...]: ...
    def __getitem__(self, index: int | slice) -> SplitStage | tuple[SplitStage | None, ...] | None:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[SplitStage | None]:
        return iter(self._stages)

    def __repr__(self) -> str:
        parts = (
            f"{names[0]} to {names[-1]}"
            + ("" if stage is None else f" ({sum(p.numel() for p in stage.parameters()):,})")
            for names, stage in zip(self.modules, self, strict=True)
        )
        return f"<Stages of {type(self.model).__name__}: {'; '.join(parts)}>"

    def arguments(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a batch, as the first stage takes them.

        Raises
        ------
        ArgumentError
            If the batch is not nested as the sample was, or has other values that are no tensors.
        """
        return self._arguments(batch)

    def __call__(self, batch: Any) -> Any:
        """Return the output of all stages, one after the other."""
        if None in self._stages:
            raise ExecutionError(
                f"stages {[k for k, x in enumerate(self) if x is None]} are those of other "
                "processes; only a pipeexec.Pipeline of all processes can run them"
            )
        values: Any = self.arguments(batch)
        for stage in self:
            assert stage is not None
            values = stage(*values)
        return values

    def check(self, batch: Any, loss_fn: Callable[[Any], Tensor] | None = None) -> float:
        """Compare loss and gradients of the stages with those of the model, for one batch.

        Parameters
        ----------
        batch
            A batch, nested as the sample was.
        loss_fn
            Called with the model's output; returns the loss. By default the sum of squares of all
            floating-point values of the output.

        Returns
        -------
        float
            Largest difference of the loss or of a parameter's gradient, relative to its largest
            element. 0 means equal to the last bit.

        Raises
        ------
        ArgumentError
            If the model draws random numbers, so that two forwards differ; and as `arguments`.
        ExecutionError
            If ``loss_fn`` fails, or returns no loss.
        """
        if loss_fn is None:
            loss_fn = _sum_of_squares
        check_function("loss_fn", loss_fn, "loss_fn(output), which returns a tensor")
        self.arguments(batch)
        args, kwargs = call_arguments(batch)
        whole = self._gradients(lambda: self.model(*args, **kwargs), loss_fn)
        again = self._gradients(lambda: self.model(*args, **kwargs), loss_fn)
        if any(not _equal(a, b) for a, b in zip(whole, again, strict=True)):
            raise ArgumentError(
                "two forwards of the model differ, so that its stages cannot be compared with it; "
                "call model.eval() first, which switches dropout off, and then split"
            )
        parts = self._gradients(lambda: self(batch), loss_fn)
        return max(_difference(a, b) for a, b in zip(whole, parts, strict=True))

    def _gradients(
        self, forward: Callable[[], Any], loss_fn: Callable[[Any], Tensor]
    ) -> list[Tensor | None]:
        """Return a loss and the gradients of all parameters, which stay as they were."""
        output = forward()
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
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]


def _sum_of_squares(output: Any) -> Tensor:
    values = [x.square().sum() for x in tensors_of(output) if x.is_floating_point()]
    return torch.stack(values).sum()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference of two tensors, relative to the largest element of the first.

    It is infinite if one of them is missing.
    """
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    most = float((a - b).abs().max())
    return most / float(a.abs().max()) if most else 0.0

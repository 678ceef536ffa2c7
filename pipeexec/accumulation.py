"""`GradientAccumulation`: one optimizer step for several backwards, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeexec.ddp import ddp_of, synchronize
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_function,
    check_type,
)

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Adds up the gradients of ``n_steps`` micro-batches before each optimizer step.

    Gradients are those of the whole batch at once. Replicas of DistributedDataParallel add theirs
    up once a batch, in the backward of its last micro-batch: the others run, forward and backward,
    within DDP's ``no_sync()``. ::

        accumulation = px.GradientAccumulation(model, optimizer, n_steps=4)
        for inputs, targets in loader:
            with accumulation.microbatch():
                accumulation.backward(loss_fn(model(inputs), targets))
            if accumulation.has_stepped:
                scheduler.step()
        accumulation.flush()  # where n_steps does not divide the number of micro-batches

    A block of `microbatch` holds one forward and one `backward`. The last one of a batch ends with
    ``optimizer.step()``, and the first begins with ``optimizer.zero_grad()``: a loop calls neither.

    A block that raises before its `backward` can be tried again. One that raises in it, or later,
    drops the batch: gradients are zeroed, and counting begins anew.

    Parameters
    ----------
    model
        A module, or one in DistributedDataParallel.
    optimizer
        Of its parameters.
    n_steps
        Micro-batches of a batch.
    n_batches
        Micro-batches of an epoch, where they are known, as from ``len(loader)``.
    scaler
        A `torch.amp.GradScaler`, or whatever has its ``scale``, ``unscale_``, ``step``, ``update``.
    before_step
        Called before each optimizer step, with all gradients there and unscaled, as to clip them.

    Raises
    ------
    ArgumentError
        If ``n_steps`` does not divide ``n_batches``; or DDP is around a part of the model, or has
        options that count on a backward that adds up gradients after each forward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        n_steps: int,
        *,
        n_batches: int | None = None,
        scaler: Any = None,
        before_step: Callable[[], object] | None = None,
    ) -> None:
        _check_arguments(model, optimizer, scaler, before_step)
        self.model, self.optimizer = model, optimizer
        self.n_steps = check_count("n_steps", n_steps)
        if n_batches is not None and check_count("n_batches", n_batches) % n_steps:
            raise ArgumentError(
                f"n_steps={n_steps} does not divide n_batches={n_batches}: "
                f"{n_batches % n_steps} would be left at the end of an epoch; drop these, or leave "
                "n_batches out and call flush() at the end"
            )
        self.scaler, self.before_step = scaler, before_step
        self.ddp = ddp_of(model, "the model")
        self.has_stepped = False  # whether the last block, or flush, ended with an optimizer step
        self._clear()

    def _clear(self) -> None:
        self._n_done = 0
        self._n_samples: list[int] = []  # of each micro-batch, where they are given
        self._state = "outside"  # then "forward", "backward", "done" within a block

    @property
    def n_accumulated(self) -> int:
        """Micro-batches whose gradients have been added up since the last optimizer step."""
        return self._n_done

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way, or else the next one, is the last of its batch."""
        return self._n_done + (self._state != "done") == self.n_steps

    @contextmanager
    def microbatch(self, n_samples: int | None = None) -> Iterator[None]:
        """Return the context of one micro-batch: its forward, and `backward` of its loss.

        Parameters
        ----------
        n_samples
            Of this micro-batch, where micro-batches differ: each loss is the mean over so many, and
            gradients become those of the mean over all samples of the batch, in all replicas. Then
            replicas exchange one number more a batch. For a loss that is a mean over anything else,
            such as tokens that are not masked, the number of these.

        Raises
        ------
        ArgumentError
            If some micro-batches of a batch have ``n_samples`` and others do not.
        ExecutionError
            If blocks are nested, one ends without `backward`, or gradients of the batch were
            cleared since the last one.
        """
        self._check_beginning(n_samples)
        if not self._n_done:
            self.optimizer.zero_grad()
        self.has_stepped = False
        self._state = "forward"
        if n_samples is not None:
            self._n_samples.append(n_samples)
        try:
            with nullcontext() if self.ddp is None or self.is_last else self.ddp.no_sync():
                yield
            if self._state == "forward":
                self._state = "backward"  # there may have been one, past this object
                raise ExecutionError(
                    f"micro-batch {self._n_done} of {self.n_steps} has had no backward; call "
                    "accumulation.backward(loss) in the block, in place of loss.backward()"
                )
            if self._n_done == self.n_steps:
                self._step()
        except BaseException:
            self._failed(n_samples)
            raise
        self._state = "outside"

    def backward(self, loss: Tensor) -> None:
        """Go back from a micro-batch's loss, weighted by its share of the batch.

        Raises
        ------
        ExecutionError
            Outside a block of `microbatch`, or if called twice in one.
        ArgumentError
            If the loss is no tensor with one element that depends on parameters.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                "loss must be a tensor with one element that depends on parameters of the model, "
                f"got {loss!r:.60}"
            )
        if self._state != "forward":
            raise ExecutionError(
                "backward was called outside a block of accumulation.microbatch()"
                if self._state == "outside"
                else "backward was called twice in one block; add the losses up before"
            )
        self._state = "backward"
        # What all samples are is known after the last: gradients are divided by it then.
        weighted = loss * self._n_samples[-1] if self._n_samples else loss / self.n_steps
        (weighted if self.scaler is None else self.scaler.scale(weighted)).backward()
        if self.is_last:
            self._finish()
        self._n_done += 1
        self._state = "done"

    def flush(self) -> bool:
        """Step with the micro-batches that there are, where they are fewer than ``n_steps``.

        As at the end of an epoch. All replicas must call this, with equally many. Gradients are the
        mean over these micro-batches, or over their samples.

        Returns
        -------
        bool
            Whether there were any.

        Raises
        ------
        ExecutionError
            Within a block.
        """
        if self._state != "outside":
            raise ExecutionError("flush was called within a block of microbatch(); call it after")
        self.has_stepped = False
        if not self._n_done:
            return False
        self._check_gradients()
        self._state = "backward"
        try:
            if self.ddp is not None:
                synchronize(self.ddp)
            if not self._n_samples:
                self._scale_gradients(self.n_steps / self._n_done)
            self._finish()
            self._step()
        except BaseException:
            self._drop(synchronizing=True)
            raise
        return True

    def _check_beginning(self, n_samples: int | None) -> None:
        if self._state != "outside":
            raise ExecutionError("blocks of microbatch() are nested; end one before the next")
        if n_samples is not None:
            check_count("n_samples", n_samples)
        if self._n_done:
            self._check_gradients()
            if (n_samples is None) == bool(self._n_samples):
                raise ArgumentError(
                    f"micro-batch {self._n_done} has n_samples={n_samples}, but those before it in "
                    f"this batch {'have' if self._n_samples else 'do not have'} a number; give one "
                    "to all of them, or to none"
                )

    def _check_gradients(self) -> None:
        if all(p.grad is None for p in self._parameters()):
            n_done = self._n_done
            self._clear()
            raise ExecutionError(
                f"gradients of {n_done} micro-batches are gone; call neither zero_grad() nor "
                "step() of the optimizer: GradientAccumulation does"
            )

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _finish(self) -> None:
        """Divide gradients of samples' sums by the number of all samples, over all replicas."""
        if not self._n_samples:
            return
        total, n_replicas = float(sum(self._n_samples)), 1
        if self.ddp is not None:  # which has taken the mean over replicas
            group = self.ddp.process_group
            n_replicas = dist.get_world_size(group)
            device = next(self.ddp.parameters()).device
            whole = torch.tensor(total, device=device)
            dist.all_reduce(whole, group=group)
            total = float(whole)
        self._scale_gradients(n_replicas / total)

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _step(self) -> None:
        if self.scaler is None:
            if self.before_step is not None:
                self.before_step()
            self.optimizer.step()
        else:
            if self.before_step is not None:
                self.scaler.unscale_(self.optimizer)
                self.before_step()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._clear()
        self.has_stepped = True

    def _failed(self, n_samples: int | None) -> None:
        """Put things back as they were before a block, or drop its batch."""
        if self._state != "forward":
            self._drop(synchronizing=self._state == "backward" and self.is_last)
            return
        self._state = "outside"
        if n_samples is not None:
            self._n_samples.pop()

    def _drop(self, *, synchronizing: bool) -> None:
        """Forget the batch; what DDP's reducer may still wait for will not come."""
        if synchronizing and self.ddp is not None:
            self.ddp.reducer._reset_state()
        self.optimizer.zero_grad()
        self._clear()


def _check_arguments(model: object, optimizer: object, scaler: object, before_step: object) -> None:
    """Raise `ArgumentTypeError` for arguments of the wrong type."""
    check_type("model", model, nn.Module)
    check_type("optimizer", optimizer, torch.optim.Optimizer, "make it from the model's parameters")
    if scaler is not None and not all(
        callable(getattr(scaler, name, None)) for name in ("scale", "step", "update", "unscale_")
    ):
        raise ArgumentTypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r:.60}")
    if before_step is not None:
        check_function("before_step", before_step, "before_step()")

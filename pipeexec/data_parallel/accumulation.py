"""`GradientAccumulation`: one optimizer step for several backwards, without a pipeline.

The file is longer than most: it is one class, half of it docstrings. Replicas and checkpoints are
in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.accumulation_replicas import Replicas, scale_gradients
from pipeexec.data_parallel.accumulation_state import (
    check_state,
    named_parameters,
    restore_gradients,
    state_of,
)
from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
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

    A block of `microbatch` holds one `backward`, or as many as its ``n_losses``. The last block of
    a batch ends with ``optimizer.step()``, and the first begins with ``optimizer.zero_grad()``: a
    loop calls neither.

    A block that raises before its `backward` can be tried again. One that raises in it, or later,
    drops the batch: gradients are zeroed, and counting begins anew.

    `state_dict` and `load_state_dict` resume between two blocks, also in the middle of a batch. The
    first batch of a model with batch norms in training mode causes a `BatchNormWarning`.

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
        self._replicas = Replicas(model)
        self.has_stepped = False  # whether the last block, or flush, ended with an optimizer step
        self._check_batch_norms = BatchNormCheck(
            self._replicas.module.named_modules(),
            "DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=n_steps) of "
            "pipeexec.gpipe.batchnorm makes the running statistics alone those of the batch.",
        )
        self._clear()

    def _clear(self) -> None:
        self._n_done = 0
        self._n_samples: list[int] = []  # of each micro-batch, where they are given
        # Then within a block: "forward", "backward", "between" two losses, "done".
        self._state = "outside"
        self._n_losses = self._n_backwards = 0  # of the block under way

    @property
    def n_accumulated(self) -> int:
        """Micro-batches whose gradients have been added up since the last optimizer step."""
        return self._n_done

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way, or else the next one, is the last of its batch."""
        return self._n_done + (self._state != "done") == self.n_steps

    @contextmanager
    def microbatch(self, n_samples: int | None = None, *, n_losses: int = 1) -> Iterator[None]:
        """Return the context of one micro-batch: its forward, and `backward` of its loss.

        Several losses go back one after the other, so that one graph is alive at a time. Gradients
        are those of the sum of the losses::

            with accumulation.microbatch(n_losses=2):
                accumulation.backward(reconstruction(model(images)))
                accumulation.backward(classification(model(texts)))

        Replicas of DDP add up gradients within the last `backward` of a batch; with several losses
        right after it, without overlap, as parameters that the last loss does not use may have
        gradients of others.

        Parameters
        ----------
        n_samples
            Of this micro-batch, where micro-batches differ: each loss is the mean over so many, and
            gradients become those of the mean over all samples of the batch, in all replicas. Then
            replicas exchange one number more a batch. For a loss that is a mean over anything else,
            such as tokens that are not masked, the number of these.
        n_losses
            Calls of `backward` in the block.

        Raises
        ------
        ArgumentError
            If some micro-batches of a batch have ``n_samples`` and others do not, or ``n_losses``
            is below 1.
        ExecutionError
            If blocks are nested, one ends before ``n_losses`` calls of `backward`, or gradients of
            the batch were cleared since the last one.
        """
        self._check_beginning(n_samples)
        self._n_losses, self._n_backwards = check_count("n_losses", n_losses), 0
        if not self._n_done:
            self._check_batch_norms(self.n_steps, stacklevel=4)
            self.optimizer.zero_grad()
        self.has_stepped = False
        self._state = "forward"
        if n_samples is not None:
            self._n_samples.append(n_samples)
        try:
            with self._replicas.microbatch(watched=self._is_watched):
                yield
            if self._state != "done":
                self._refuse_end()
            if self._n_done == self.n_steps:
                self._step()
        except BaseException:
            self._failed(n_samples)
            raise
        self._state = "outside"

    @property
    def _is_watched(self) -> bool:
        """Whether DDP adds up gradients within the backward of the micro-batch under way.

        It watches one backward alone, which has to reach every parameter that has a gradient of
        this micro-batch.
        """
        return self.is_last and self._n_losses == 1

    def _refuse_end(self) -> NoReturn:
        """Raise at the end of a block that had too few backwards."""
        n_had = f"{self._n_backwards} of {self._n_losses} backwards" if self._n_backwards else ""
        self._state = "backward"  # there may have been one, past this object
        raise ExecutionError(
            f"micro-batch {self._n_done} of {self.n_steps} has had {n_had or 'no backward'}; call "
            "accumulation.backward(loss) in the block, in place of loss.backward(), once for each "
            "of the n_losses of microbatch()"
        )

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Go back from a loss of the micro-batch, weighted by the micro-batch's share of the batch.

        Parameters
        ----------
        loss
            One element, a mean over the micro-batch.
        retain_graph
            Whether the graph is kept, for another loss of the same forward; as of
            `torch.Tensor.backward`.

        Raises
        ------
        ExecutionError
            Outside a block of `microbatch`, or if called more often in one than its ``n_losses``.
        ArgumentError
            If the loss is no tensor with one element that depends on parameters.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                "loss must be a tensor with one element that depends on parameters of the model, "
                f"got {loss!r:.60}"
            )
        check_flag("retain_graph", retain_graph)
        if self._state not in ("forward", "between"):
            raise ExecutionError(
                "backward was called outside a block of accumulation.microbatch()"
                if self._state == "outside"
                else f"backward was called {_times(self._n_losses + 1)} in one block; give "
                f"microbatch(n_losses={self._n_losses + 1}), or add the losses up before"
            )
        self._state = "backward"
        # What all samples are is known after the last: gradients are divided by it then.
        weighted = loss * self._n_samples[-1] if self._n_samples else loss / self.n_steps
        weighted = weighted if self.scaler is None else self.scaler.scale(weighted)
        weighted.backward(retain_graph=retain_graph)
        self._n_backwards += 1
        if self._n_backwards < self._n_losses:
            self._state = "between"
            return
        if self.is_last:
            if not self._is_watched:
                self._replicas.synchronize()
            self._finish()
        self._n_done += 1
        self._state = "done"

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes here, in the middle of a batch too: gradients so far, and counts.

        `torch.save` and ``torch.load(weights_only=True)`` take it. Model, optimizer, ``scaler``,
        scheduler, random numbers and the place in the data have checkpoints of their own. Replicas
        of DDP save a file each, and load their own: gradients are each replica's, before the sum.
        Gradients are copies, by name of their parameter.

        Raises
        ------
        ExecutionError
            Within a block.
        """
        self._check_outside("state_dict")
        return state_of(
            named_parameters(self._replicas.module, self.optimizer),
            self._replicas,
            self.n_steps,
            self._n_done,
            self._n_samples,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: the weights become those of a run that was not interrupted.

        They are bit for bit the same, if model and optimizer were loaded before, DDP splits
        gradients into the same buckets, and the loop goes on with the next micro-batch. Gradients
        that have accumulated here are dropped.

        Parameters
        ----------
        state_dict
            Of the same ``n_steps`` and parameters; and in the middle of a batch, of the same rank
            and number of replicas.

        Raises
        ------
        ArgumentError
            If it is of another training, naming how it differs; nothing has changed then.
        ExecutionError
            Within a block.
        """
        self._check_outside("load_state_dict")
        parameters = named_parameters(self._replicas.module, self.optimizer)
        state = check_state(state_dict, parameters, self._replicas, self.n_steps)
        self.optimizer.zero_grad()
        self._clear()
        self.has_stepped = False
        if state["n_accumulated"]:
            restore_gradients(parameters, state["gradients"])
        self._n_done, self._n_samples = state["n_accumulated"], list(state["n_samples"])
        self._replicas.broadcasts_buffers = bool(state["broadcasts_buffers"])

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
        self._check_outside("flush")
        self.has_stepped = False
        if not self._n_done:
            return False
        self._check_gradients()
        self._state = "backward"
        try:
            self._replicas.synchronize()
            if not self._n_samples:
                scale_gradients(self._parameters(), self.n_steps / self._n_done)
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

    def _check_outside(self, call: str) -> None:
        if self._state != "outside":
            raise ExecutionError(f"{call} was called within a block of microbatch(); call it after")

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _finish(self) -> None:
        """Divide gradients of samples' sums by the number of all samples, over all replicas."""
        if not self._n_samples:
            return
        total = self._replicas.total(float(sum(self._n_samples)))
        scale_gradients(self._parameters(), self._replicas.n / total)  # DDP has taken the mean

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
        if synchronizing:
            self._replicas.reset()
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


def _times(n: int) -> str:
    return "twice" if n == 2 else f"{n} times"

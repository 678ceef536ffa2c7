"""`GradientAccumulation`: one optimizer step for several backwards, without a pipeline.

Replicas, checkpoints and the optimizer's step are in files beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.accumulation_replicas import Replicas
from pipeexec.data_parallel.accumulation_state import (
    check_state,
    make_state,
    named_parameters,
    restore_gradients,
)
from pipeexec.data_parallel.accumulation_step import (
    check_arguments,
    scale_gradients,
    step_optimizer,
    weighted_loss,
)
from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    check_count,
    check_flag,
)


class GradientAccumulation:
    """Adds up the gradients of ``n_steps`` micro-batches before each optimizer step.

    Gradients equal those of the whole batch at once. Replicas of DistributedDataParallel reduce
    theirs once a batch, in the backward of its last micro-batch. The others run, forward and
    backward, within DDP's ``no_sync()``. ::

        accumulation = px.GradientAccumulation(model, optimizer, n_steps=4)
        for inputs, targets in loader:
            with accumulation.microbatch():
                accumulation.backward(loss_fn(model(inputs), targets))
            if accumulation.has_stepped:
                scheduler.step()
        accumulation.flush()  # where n_steps does not divide the number of micro-batches

    A block of `microbatch` holds one `backward`, or as many as its ``n_losses``. The last block of
    a batch ends with ``optimizer.step()``, and the first begins with ``optimizer.zero_grad()``: the
    loop calls neither.

    A block that raises before its `backward` can be tried again. A block that raises in its
    `backward`, or later, drops the batch: gradients are zeroed, and counting starts again.

    `state_dict` and `load_state_dict` resume between two blocks, also in the middle of a batch. The
    first batch of a model with batch norms in training mode causes a `BatchNormWarning`.

    Parameters
    ----------
    model
        A module, or one in DistributedDataParallel.
    optimizer
        Optimizer of its parameters.
    n_steps
        Micro-batches of a batch.
    n_batches
        Micro-batches of an epoch if known, such as ``len(loader)``.
    scaler
        A `torch.amp.GradScaler`, or an object with its methods ``scale``, ``unscale_``, ``step``
        and ``update``.
    before_step
        Called before each optimizer step, when all gradients are complete and unscaled, for example
        to clip them.

    Attributes
    ----------
    has_stepped
        Whether the last block, or `flush`, ended with an optimizer step.

    See Also
    --------
    pipeexec.Pipeline.step : Its ``accumulate`` adds up gradients of a pipeline's steps.
    pipeexec.watch_sync : Find useless reductions of gradients in a loop.
    pipeexec.scaled_learning_rate : Learning rate of a larger batch.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px
    >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
    >>> for inputs in x.chunk(4):
    ...     with accumulation.microbatch():
    ...         accumulation.backward(mse_loss(model(inputs), inputs))
    ...     print(accumulation.has_stepped)
    False
    True
    False
    True
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
        check_arguments(model, optimizer, scaler, before_step)
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
        self.has_stepped = False
        self._check_batch_norms = BatchNormCheck(
            self._replicas.module.named_modules(),
            "DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=n_steps) of "
            "pipeexec.gpipe.batchnorm makes the running statistics alone those of the batch.",
        )
        self._clear()

    def _clear(self) -> None:
        self._n_done = 0
        self._n_samples: list[int] = []  # of each micro-batch, if the user gives them
        # Within a block: "forward", "backward", "between" two losses, "done".
        self._state = "outside"
        self._n_losses = self._n_backwards = 0  # of the current block

    @property
    def n_accumulated(self) -> int:
        """Micro-batches whose gradients have accumulated since the last optimizer step.

        From 0 to ``n_steps - 1`` between two blocks. At 0 a checkpoint needs no gradients, and any
        rank can load it.
        """
        return self._n_done

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch, or between blocks the next, is the last of its batch."""
        return self._n_done + (self._state != "done") == self.n_steps

    @contextmanager
    def microbatch(self, n_samples: int | None = None, *, n_losses: int = 1) -> Iterator[None]:
        """Return the context of one micro-batch: its forward, and `backward` of its loss.

        Several losses call `backward` one after the other, so that one graph at a time is in
        memory. Gradients are those of the sum of the losses::

            with accumulation.microbatch(n_losses=2):
                accumulation.backward(reconstruction(model(images)))
                accumulation.backward(classification(model(texts)))

        Replicas of DDP reduce gradients within the last `backward` of a batch. With several losses
        they do it right after that, without overlap: parameters that the last loss does not use may
        have gradients of other losses.

        Parameters
        ----------
        n_samples
            Samples of this micro-batch, for micro-batches of different sizes: each loss is the mean
            over ``n_samples``. Gradients become those of the mean over all samples of the batch, in
            all replicas; replicas then exchange one more number a batch. For a loss that is a mean
            over anything else, such as tokens that are not masked, give the number of these.
        n_losses
            Calls of `backward` in the block.

        Returns
        -------
        contextmanager
            The block of the micro-batch.

        Raises
        ------
        ExecutionError
            If blocks are nested, one ends before ``n_losses`` calls of `backward`, or gradients of
            the batch were cleared since the last one.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> with accumulation.microbatch():
        ...     accumulation.backward(mse_loss(model(x), x))
        >>> accumulation.n_accumulated, accumulation.is_last
        (1, True)
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
            with self._replicas.microbatch(synchronizes=self._ddp_synchronizes):
                yield
            if self._state != "done":
                self._refuse_end()
            if self._n_done == self.n_steps:
                self._step()
        except BaseException:
            self._restore_after_error(n_samples)
            raise
        self._state = "outside"

    @property
    def _ddp_synchronizes(self) -> bool:
        """Whether DDP reduces gradients within the backward of the current micro-batch.

        DDP watches one backward only, which has to reach every parameter that has a gradient of
        this micro-batch.
        """
        return self.is_last and self._n_losses == 1

    def _refuse_end(self) -> NoReturn:
        """Raise the error of a block that ended with too few backwards."""
        n_had = f"{self._n_backwards} of {self._n_losses} backwards" if self._n_backwards else ""
        self._state = "backward"  # the user may have called loss.backward()
        raise ExecutionError(
            f"micro-batch {self._n_done} of {self.n_steps} has had {n_had or 'no backward'}; call "
            "accumulation.backward(loss) in the block, in place of loss.backward(), once for each "
            "of the n_losses of microbatch()"
        )

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward of a loss, weighted by the micro-batch's share of the batch.

        Parameters
        ----------
        loss
            One element, a mean over the micro-batch.
        retain_graph
            Whether to keep the graph, for another loss of the same forward; passed to
            `torch.Tensor.backward`.

        Raises
        ------
        ExecutionError
            Outside a block of `microbatch`, or if a block calls it more than ``n_losses`` times.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> with accumulation.microbatch():
        ...     accumulation.backward(mse_loss(model(x), x))
        >>> model.weight.grad.shape
        torch.Size([4, 4])
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
                else f"backward was called {_times_text(self._n_losses + 1)} in one block; give "
                f"microbatch(n_losses={self._n_losses + 1}), or add the losses up before"
            )
        self._state = "backward"
        weighted = weighted_loss(loss, self._n_samples, self.n_steps, self.scaler)
        weighted.backward(retain_graph=retain_graph)
        self._n_backwards += 1
        if self._n_backwards < self._n_losses:
            self._state = "between"
            return
        if self.is_last:
            if not self._ddp_synchronizes:
                self._replicas.synchronize()
            self._finish()
        self._n_done += 1
        self._state = "done"

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint: gradients so far, and counts.

        It may be in the middle of a batch.

        - `torch.save` and ``torch.load(weights_only=True)`` accept it.
        - Model, optimizer, ``scaler``, scheduler, random numbers and the position in the data need
          separate checkpoints.
        - Each replica of DDP saves a file and loads that file again: the gradients are the
          replica's own, before the reduction.
        - Gradients are copies, by name of their parameter.

        Returns
        -------
        dict
            Values that `load_state_dict` takes.

        Raises
        ------
        ExecutionError
            Within a block.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> with accumulation.microbatch():
        ...     accumulation.backward(mse_loss(model(x), x))
        >>> state = accumulation.state_dict()
        >>> state["n_accumulated"], list(state["gradients"])
        (1, ['weight', 'bias'])
        """
        self._check_outside("state_dict")
        return make_state(
            named_parameters(self._replicas.module, self.optimizer),
            self._replicas,
            self.n_steps,
            self._n_done,
            self._n_samples,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a checkpoint: the weights become those of a run that was not interrupted.

        They are bit for bit the same under three conditions: model and optimizer were loaded
        before, DDP splits gradients into the same buckets, and the loop continues with the next
        micro-batch. Gradients that have accumulated before the call are dropped.

        Parameters
        ----------
        state_dict
            A checkpoint of the same ``n_steps`` and parameters; in the middle of a batch also of
            the same rank and number of replicas.

        Raises
        ------
        ExecutionError
            Within a block.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> with accumulation.microbatch():
        ...     accumulation.backward(mse_loss(model(x), x))
        >>> other = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> other.load_state_dict(accumulation.state_dict())
        >>> other.n_accumulated
        1
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
        """Step with an incomplete batch of fewer than ``n_steps`` micro-batches.

        Call it at the end of an epoch. All replicas must call it, with equally many micro-batches.
        Gradients are the mean over these micro-batches, or over their samples.

        Returns
        -------
        bool
            Whether there were any micro-batches.

        Raises
        ------
        ExecutionError
            Within a block.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = px.GradientAccumulation(model, optimizer, n_steps=2)
        >>> with accumulation.microbatch():
        ...     accumulation.backward(mse_loss(model(x), x))
        >>> accumulation.flush(), accumulation.has_stepped
        (True, True)
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
        """Divide gradients of sums over samples by the number of samples, over all replicas."""
        if not self._n_samples:
            return
        total = self._replicas.total(float(sum(self._n_samples)))
        scale_gradients(self._parameters(), self._replicas.n / total)  # DDP has taken the mean

    def _step(self) -> None:
        step_optimizer(self.optimizer, self.scaler, self.before_step)
        self._clear()
        self.has_stepped = True

    def _restore_after_error(self, n_samples: int | None) -> None:
        """Restore the state from before a block that raised, or drop its batch."""
        if self._state != "forward":
            self._drop(synchronizing=self._state == "backward" and self.is_last)
            return
        self._state = "outside"
        if n_samples is not None:
            self._n_samples.pop()

    def _drop(self, *, synchronizing: bool) -> None:
        """Drop the batch; DDP's reducer may wait for gradients that will not come."""
        if synchronizing:
            self._replicas.reset()
        self.optimizer.zero_grad()
        self._clear()


def _times_text(n: int) -> str:
    return "twice" if n == 2 else f"{n} times"

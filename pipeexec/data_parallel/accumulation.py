"""`GradientAccumulation`: one optimizer step for several backwards, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeexec.data_parallel.batch_norms import BatchNormCheck
from pipeexec.data_parallel.ddp import ddp_of, synchronize
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    check_count,
    check_flag,
    check_list,
)
from pipesim.utils.checks import Count, checked


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
    pipeexec.data_parallel.scaled_learning_rate : Learning rate of a larger batch.

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

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Annotated[torch.optim.Optimizer, "make it from the model's parameters"],
        n_steps: Count,
        *,
        n_batches: Count | None = None,
        scaler: Any = None,
        before_step: Annotated[Callable[[], object], "before_step()"] | None = None,
    ) -> None:
        if scaler is not None and not all(
            callable(getattr(scaler, name, None))
            for name in ("scale", "step", "update", "unscale_")
        ):
            raise ArgumentTypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r:.60}")
        self.model, self.optimizer, self.n_steps = model, optimizer, n_steps
        if n_batches is not None and n_batches % n_steps:
            raise ArgumentError(
                f"n_steps={n_steps} does not divide n_batches={n_batches}: "
                f"{n_batches % n_steps} would be left at the end of an epoch; drop these, or leave "
                "n_batches out and call flush() at the end"
            )
        self.scaler, self.before_step = scaler, before_step
        self._replicas = _Replicas(model)
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
        """
        self._check_beginning(n_samples)
        self._n_losses, self._n_backwards = check_count("n_losses", n_losses), 0
        if not self._n_done:
            self._check_batch_norms(self.n_steps)
            self.optimizer.zero_grad()
        self.has_stepped = False
        self._state = "forward"
        if n_samples is not None:
            self._n_samples.append(n_samples)
        try:
            with self._replicas.microbatch(synchronizes=self._ddp_synchronizes):
                yield
            if self._state != "done":
                n_had = "no backward"
                if self._n_backwards:
                    n_had = f"{self._n_backwards} of {self._n_losses} backwards"
                self._state = "backward"  # the user may have called loss.backward()
                raise ExecutionError(
                    f"micro-batch {self._n_done} of {self.n_steps} has had {n_had}; call "
                    "accumulation.backward(loss) in the block, in place of loss.backward(), once "
                    "for each of the n_losses of microbatch()"
                )
            if self._n_done == self.n_steps:
                self._step()
        except BaseException:
            if self._state == "forward":  # restore the state from before the block
                self._state = "outside"
                if n_samples is not None:
                    self._n_samples.pop()
            else:
                self._drop(synchronizing=self._state == "backward" and self.is_last)
            raise
        self._state = "outside"

    @property
    def _ddp_synchronizes(self) -> bool:
        """Whether DDP reduces gradients within the backward of the current micro-batch.

        DDP watches one backward only, which has to reach every parameter that has a gradient of
        this micro-batch.
        """
        return self.is_last and self._n_losses == 1

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward of a loss, weighted by the micro-batch's share of the batch.

        Parameters
        ----------
        loss
            One element, a mean over the micro-batch.
        retain_graph
            Whether to keep the graph, for another loss of the same forward; passed to
            `torch.Tensor.backward`.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                "loss must be a tensor with one element that depends on parameters of the model, "
                f"got {loss!r:.60}"
            )
        check_flag("retain_graph", retain_graph)
        if self._state not in ("forward", "between"):
            n_calls = self._n_losses + 1
            raise ExecutionError(
                "backward was called outside a block of accumulation.microbatch()"
                if self._state == "outside"
                else f"backward was called {'twice' if n_calls == 2 else f'{n_calls} times'} in "
                f"one block; give microbatch(n_losses={n_calls}), or add the losses up before"
            )
        self._state = "backward"
        # The number of all samples is known after the last micro-batch: `_finish` divides by it.
        weighted = loss * self._n_samples[-1] if self._n_samples else loss / self.n_steps
        if self.scaler is not None:
            weighted = self.scaler.scale(weighted)
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
        """
        self._check_outside("state_dict")
        parameters = _named_parameters(self._replicas.module, self.optimizer)
        return {
            "n_steps": self.n_steps,
            "n_accumulated": self._n_done,
            "n_samples": list(self._n_samples),
            "rank": self._replicas.rank,
            "n_replicas": self._replicas.n,
            "shapes": {name: list(x.shape) for name, x in parameters.items()},
            "gradients": {
                name: x.grad.detach().clone()
                for name, x in parameters.items()
                if self._n_done and x.grad is not None
            },
            "broadcasts_buffers": self._replicas.broadcasts_buffers,
        }

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
        """
        self._check_outside("load_state_dict")
        parameters = _named_parameters(self._replicas.module, self.optimizer)
        state = _check_state(state_dict, parameters, self._replicas, self.n_steps)
        self.optimizer.zero_grad()
        self._clear()
        self.has_stepped = False
        if state["n_accumulated"]:
            with torch.no_grad():
                for name, x in parameters.items():
                    saved = state["gradients"].get(name)
                    x.grad = None if saved is None else saved.to(x.device, copy=True)
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
                _scale_gradients(self._parameters(), self.n_steps / self._n_done)
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
        _scale_gradients(self._parameters(), self._replicas.n / total)  # DDP has taken the mean

    def _step(self) -> None:
        """Step the optimizer, with the scaler if any; `before_step` sees unscaled gradients."""
        if self.before_step is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.before_step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._clear()
        self.has_stepped = True

    def _drop(self, *, synchronizing: bool) -> None:
        """Drop the batch; DDP's reducer may wait for gradients that will not come."""
        if synchronizing:
            self._replicas.reset()
        self.optimizer.zero_grad()
        self._clear()


class _Replicas:
    """Replicas of a model in DDP, one of which is in this process; other models have one."""

    def __init__(self, model: nn.Module) -> None:
        self.ddp = ddp_of(model, "the model")
        #: The model without DDP, which would change the names of its parameters.
        self.module: nn.Module = model if self.ddp is None else self.ddp.module

    @property
    def rank(self) -> int:
        return 0 if self.ddp is None else dist.get_rank(self.ddp.process_group)

    @property
    def n(self) -> int:
        return 1 if self.ddp is None else dist.get_world_size(self.ddp.process_group)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether the next forward starts by broadcasting rank 0's buffers, if DDP does that."""
        return self.ddp is None or bool(self.ddp.require_forward_param_sync)

    @broadcasts_buffers.setter
    def broadcasts_buffers(self, value: bool) -> None:
        if self.ddp is not None:
            self.ddp.require_forward_param_sync = value

    def microbatch(self, *, synchronizes: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch; ``synchronizes``: DDP reduces in its backward."""
        return nullcontext() if self.ddp is None or synchronizes else self.ddp.no_sync()

    def synchronize(self) -> None:
        """Reduce accumulated gradients, after backwards in which DDP did not."""
        if self.ddp is not None:
            synchronize(self.ddp)
            self.broadcasts_buffers = True  # as after a backward in which DDP reduces

    def reset(self) -> None:
        """Reset DDP's reducer, which may wait for gradients that will not come."""
        if self.ddp is not None:
            self.ddp.reducer._reset_state()

    def total(self, count: float) -> float:
        """Return the sum of a count over all replicas."""
        if self.ddp is None:
            return count
        device = next(self.ddp.parameters()).device
        total = torch.tensor(count, device=device)
        dist.all_reduce(total, group=self.ddp.process_group)
        return float(total)


@torch.no_grad()
def _scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of parameters; those without a gradient are left out."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# Checkpoints

#: Most names that a message lists; it counts the others.
_MAX_NAMES = 5


def _named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by their names in a model.

    A parameter that is not in the model, such as a weight of the loss, is named by its position in
    the optimizer: ``param_groups.1.0``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names.get(id(parameter), f"param_groups.{group}.{index}"): parameter
        for group, options in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(options["params"])
    }


def _check_state(
    state: object, parameters: Mapping[str, Tensor], replicas: _Replicas, n_steps: int
) -> dict[str, Any]:
    """Return a checkpoint if it fits this training."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"state_dict must be a dict of GradientAccumulation.state_dict(), got {state!r:.60}"
        )
    keys = ("n_steps", "n_accumulated", "n_samples", "rank", "n_replicas", "shapes", "gradients",
            "broadcasts_buffers")  # fmt: skip
    if missing := [key for key in keys if key not in state]:
        raise ArgumentError(
            f"state_dict lacks {', '.join(map(repr, missing))}; give what "
            "GradientAccumulation.state_dict() returned"
        )
    if check_count("n_steps of state_dict", state["n_steps"]) != n_steps:
        raise ArgumentError(
            f"state_dict is of n_steps={state['n_steps']}, this GradientAccumulation has "
            f"n_steps={n_steps}: micro-batches are weighted by it; make one with the same n_steps"
        )
    _check_counts(state, n_steps)
    _check_shapes(state["shapes"], parameters)
    _check_saved_gradients(state["gradients"], parameters, bool(state["n_accumulated"]))
    if state["n_accumulated"]:
        for name, saved, own in (
            ("n_replicas", state["n_replicas"], replicas.n),
            ("rank", state["rank"], replicas.rank),
        ):
            if saved != own:
                raise ArgumentError(
                    f"state_dict is of {name}={saved}, this process has {name}={own}: gradients in "
                    "the middle of a batch are each replica's own; load each rank's own state, or "
                    "save where n_accumulated is 0"
                )
    return dict(state)


def _check_counts(state: Mapping[str, Any], n_steps: int) -> None:
    n_done = check_count("n_accumulated of state_dict", state["n_accumulated"], 0)
    n_samples = check_list("n_samples of state_dict", state["n_samples"], "a count a micro-batch")
    for count in n_samples:
        check_count("n_samples of state_dict", count)
    if n_done >= n_steps or len(n_samples) not in (0, n_done):
        raise ArgumentError(
            f"state_dict has n_accumulated={n_done} of n_steps={n_steps}, and {len(n_samples)} "
            "n_samples; give what GradientAccumulation.state_dict() returned"
        )


def _check_shapes(shapes: object, parameters: Mapping[str, Tensor]) -> None:
    if not isinstance(shapes, Mapping):
        raise ArgumentTypeError(f"shapes of state_dict must be a dict, got {shapes!r:.60}")
    for what, names in (
        ("lacks", [name for name in parameters if name not in shapes]),
        ("has, and the optimizer lacks,", [name for name in shapes if name not in parameters]),
    ):
        if names:
            listed = ", ".join(map(repr, names[:_MAX_NAMES]))
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise ArgumentError(
                f"state_dict {what} parameters {listed}{more}; it is of another model or optimizer"
            )
    for name, parameter in parameters.items():
        if (shape := shapes[name]) != list(parameter.shape):
            raise ArgumentError(
                f"state_dict has parameter {name!r} of shape {shape!r:.60}, the model of shape "
                f"{list(parameter.shape)}; it is of another model"
            )


def _check_saved_gradients(
    gradients: object, parameters: Mapping[str, Tensor], is_within_batch: bool
) -> None:
    if not isinstance(gradients, Mapping):
        raise ArgumentTypeError(f"gradients of state_dict must be a dict, got {gradients!r:.60}")
    if bool(gradients) != is_within_batch:
        raise ArgumentError(
            f"state_dict has {len(gradients)} gradients, which does not fit its n_accumulated; "
            "give what GradientAccumulation.state_dict() returned"
        )
    for name, gradient in gradients.items():
        parameter = parameters.get(name)
        if (
            parameter is None
            or not isinstance(gradient, Tensor)
            or gradient.shape != parameter.shape
        ):
            raise ArgumentError(
                f"state_dict has a gradient of {name!r} that is no tensor of the parameter's shape"
            )

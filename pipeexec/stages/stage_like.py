"""`StageLike`: the attributes and methods of a stage that the executor uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from pipeexec.devices.device import Values
from pipeexec.devices.thread_settings import ContextFactory
from pipeexec.nesting import Arguments
from pipeexec.stages.activation_bytes import ActivationMeter
from pipeexec.stages.module_call import LossCall, Seed
from pipeexec.stages.weight_versions import WeightVersions


class StageLike(Protocol):
    """A stage that the executor can run: tasks of one micro-batch, and the bounds of a step.

    The arguments of tasks are positional, so a stage may ignore arguments that it does not need.

    Attributes
    ----------
    module, index
        The module, and the number of the stage.
    is_random, modifies_input
        By training mode: whether the module draws random numbers, and whether it changes its input
        in place. Missing until the first forward.
    loss_fn
        The loss, for the last stage.
    versions
        Versions of the weights, for a stage that steps while micro-batches are in flight.
    meter
        Counts the bytes that the stage holds; None if they are not counted.
    arguments
        Positional and keyword arguments of the first stage for each micro-batch of a step, with
        other tensors; None for a stage that takes tensors, all positional.
    """

    module: nn.Module
    index: int
    is_random: dict[bool, bool]
    modifies_input: dict[bool, bool]
    loss_fn: LossCall | None
    versions: WeightVersions | None
    meter: ActivationMeter | None
    arguments: Sequence[Arguments] | None

    @property
    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel adds up the gradients over replicas."""
        ...

    def forward(
        self, microbatch: int, values: Values, seed: Seed, recomputed: bool, split: bool, /
    ) -> Values:
        """Run F; return the outputs."""
        ...

    def recompute(self, microbatch: int, seed: Seed, split: bool, /) -> None:
        """Run R: F again, keeping the activations."""
        ...

    def backward(self, microbatch: int, gradients: Values, /) -> Values:
        """Run B: accumulate the parameters' gradients, return those of the inputs."""
        ...

    def input_grad(self, microbatch: int, gradients: Values, /) -> Values:
        """Run I: return the gradients of the inputs."""
        ...

    def weight_grad(self, microbatch: int, /) -> None:
        """Run W: accumulate the parameters' gradients that I left."""
        ...

    def pending_parameters(self, microbatch: int, /) -> set[int] | None:
        """Return the ids of the parameters whose gradients W will make; None if it makes all."""
        ...

    def begin_step(self, autocast: ContextFactory | None, /) -> None:
        """Begin a step: the weights are as they are now."""
        ...

    def end_step(self) -> None:
        """End a step: free what only a step needs."""
        ...

    def after_optimizer_step(self, *, zero_grad: bool) -> None:
        """Note an optimizer step; of several in a step, each begins without gradients."""
        ...

    def mean_count(self, count: Tensor | float, /) -> Tensor | float:
        """Return the mean of a count over replicas that the pipeline does not know."""
        ...

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        ...

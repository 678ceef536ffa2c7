"""`ModuleCaller`: call a stage's module, and the loss after the last stage, for one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeexec.data_parallel.ddp_stage import ddp_stage
from pipeexec.devices.thread_settings import ContextFactory
from pipeexec.nesting import Arguments, with_tensors
from pipeexec.stages.activation_bytes import ActivationMeter
from pipeexec.stages.deferred_weight_grads import DeferredGradients
from pipeexec.stages.offload import SavedActivations
from pipeexec.stages.random_numbers import OwnGenerator
from pipeexec.stages.weight_versions import WeightVersions
from pipesim.errors import ExecutionError

#: Computes the weighted loss from the last stage's output and the number of the micro-batch.
LossCall = Callable[[object, int], Tensor]
#: Source of random numbers: a seed, the state of a generator that a forward drew from, or None for
#: the process's generator.
Seed = int | Tensor | None

_NO_CONTEXT = contextlib.nullcontext()


class ModuleCaller:
    """Calls a module under the random numbers, autocast and hooks of a task.

    Parameters
    ----------
    module, index, device, loss_fn, versions, batch_size
        As of `pipeexec.stages.stage.Stage`.

    Attributes
    ----------
    is_random, modifies_input
        By training mode: whether the module draws random numbers, and whether it changes its input
        in place. Missing until the first forward.
    autocast
        Makes the autocast context of a step; None without autocast.
    meter
        Counts the bytes that the stage holds; None if they are not counted.
    arguments
        Positional and keyword arguments of the first stage for each micro-batch of a step, with
        other tensors; None for a stage that takes tensors, all positional.
    loss_scale
        Gradient of the loss from which backwards start: 1, or that of a gradient scaler.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        device: torch.device,
        loss_fn: LossCall | None,
        versions: WeightVersions | None,
        batch_size: int | None,
    ) -> None:
        self.module, self.index, self.device = module, index, device
        self.loss_fn, self.versions = loss_fn, versions
        self.ddp = ddp_stage(module, index, batch_size, versions is not None)
        self.is_random: dict[bool, bool] = {}
        self.modifies_input: dict[bool, bool] = {}
        self.autocast: ContextFactory | None = None
        self.meter: ActivationMeter | None = None
        self.arguments: Sequence[Arguments] | None = None
        self._loss_gradient = torch.ones(())  # of a loss with respect to itself
        self.loss_scale = 1.0

    def _call(
        self,
        inputs: tuple[Tensor, ...],
        microbatch: int,
        seed: Seed,
        deferred: DeferredGradients | None = None,
        saved: SavedActivations | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the module, and the loss after the last stage, under the task's random numbers."""
        is_inference = torch.is_inference_mode_enabled()  # its tensors have no version counter
        training = self.module.training
        copies = self.modifies_input.get(training, True) or is_inference
        arguments = tuple(x.clone() for x in inputs) if copies else inputs
        counters = [] if is_inference else [x._version for x in arguments]
        draws = self.is_random.get(training, True) or isinstance(seed, Tensor)
        generator = OwnGenerator(seed, self.device) if draws and seed is not None else None
        with self._call_contexts(generator, deferred, saved):
            output = self._module_output(arguments, microbatch)
            if self.loss_fn is not None:
                outputs: tuple[Tensor, ...] = (self.loss_fn(output, microbatch),)
                self._loss_gradient = torch.full_like(outputs[0], self.loss_scale)
            else:
                outputs = self._output_tensors(output)
        if generator is not None:
            self.is_random.setdefault(training, generator.drew)
        if not is_inference:
            self._note_modified(arguments, counters, training)
        return outputs

    def _call_contexts(
        self,
        generator: OwnGenerator | None,
        deferred: DeferredGradients | None,
        saved: SavedActivations | None,
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context in which to run the module; most calls need none."""
        if (generator is None and self.meter is None and deferred is None and self.ddp is None
                and self.autocast is None and saved is None):  # fmt: skip
            return _NO_CONTEXT
        context = contextlib.ExitStack()
        if self.autocast is not None:
            context.enter_context(self.autocast())
        if self.ddp is not None:
            context.enter_context(self.ddp.forward_context())
        if generator is not None:
            context.enter_context(generator)
        if saved is not None:  # counts the bytes too: only the last of such contexts counts
            context.enter_context(saved.hooks())
        elif self.meter is not None:
            context.enter_context(self.meter.saved_tensors())
        if deferred is not None:
            context.enter_context(deferred.interception())
        return context

    def _module_output(self, inputs: tuple[Tensor, ...], microbatch: int) -> object:
        weights = {} if self.versions is None else self.versions.weights(microbatch)
        args, kwargs = inputs, None
        if self.arguments is not None:
            args, kwargs = with_tensors(self.arguments[microbatch], inputs)
        if weights:
            return functional_call(self.module, {**weights}, args, kwargs)
        return self.module(*args, **(kwargs or {}))

    def _note_modified(
        self, arguments: tuple[Tensor, ...], counters: list[int], training: bool
    ) -> None:
        """Note whether the module changes its input in place; if so, it gets copies from then on.

        ``counters`` are the version counters of the arguments before the call.
        """
        is_modified = any(x._version != n for x, n in zip(arguments, counters, strict=True))
        was_modified = self.modifies_input.setdefault(training, is_modified)
        if is_modified and not was_modified:
            self.modifies_input[training] = True
            raise ExecutionError(
                f"stage {self.index} changed its input in place, which its first forward did not; "
                "other holders of the input have lost its values: let the module clone its input "
                "first"
            )

    def _output_tensors(self, output: object) -> tuple[Tensor, ...]:
        """Return the module's output as a tuple of tensors."""
        outputs = output if isinstance(output, tuple) else (output,)
        for value in outputs:
            if not isinstance(value, Tensor):
                raise ExecutionError(
                    f"the output of stage {self.index} must be a tensor or a tuple of tensors, "
                    f"got {type(output).__name__}"
                    + (f" with {type(value).__name__}" if output is not value else "")
                    + "; return the tensors in a tuple, or let pipeexec.split cut the model, whose "
                    "stages pass on nested values"
                )
        return outputs

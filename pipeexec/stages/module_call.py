"""Call a stage's module, and the loss after the last stage, for one micro-batch.

A forward has its own random numbers and the version of the weights that its schedule prescribes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeexec.data_parallel.ddp import ddp_stage
from pipeexec.devices.thread_settings import ContextFactory
from pipeexec.nesting import Arguments, with_tensors
from pipeexec.stages.activations import ActivationMeter, SavedActivations
from pipeexec.stages.deferred_weight_grads import DeferredGradients
from pipeexec.stages.recompute import NO_CONTEXT
from pipeexec.thread_modes import ThreadMode
from pipesim.errors import ExecutionError

# Random numbers that do not depend on the schedule: a generator for each stage and micro-batch.
#
# All threads of the process share torch's generator of a device. So two stages that draw at the
# same time race for its numbers, and a recompute cannot return to the state at which its forward
# began. Here every forward draws from its own generator, seeded by the step, the stage and the
# micro-batch. Its recompute draws from the same seed.

_DEFAULT_GENERATOR = threading.Lock()


def task_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Return the seed of one forward; independent streams for different arguments."""
    sequence = np.random.SeedSequence((seed, step, stage, microbatch))
    return int(sequence.generate_state(1, np.uint64)[0])


class OwnGenerator(ThreadMode):
    """While active in a thread, random operations of that thread draw from one seed, or state.

    Operations with a generator argument get this generator. Others run with the process's
    generator set to this one's state, one thread at a time. ``drew`` tells whether any did.
    """

    def __init__(self, seed: int | torch.Tensor, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device)
        if isinstance(seed, torch.Tensor):
            self.generator.set_state(seed)
        else:
            self.generator.manual_seed(seed)
        self.drew = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would load the compiler to skip this mode, 3 s in a first step."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs under this mode, and is not replaced by eager code."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; a random operation draws from this generator."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(a.name == "generator" for a in func._schema.arguments):
            self.drew = True
            if kwargs.get("generator") is None:
                kwargs["generator"] = self.generator
            return func(*args, **kwargs)
        default = _default_generator(self.generator.device)
        with _DEFAULT_GENERATOR:
            process_state, own_state = default.get_state(), self.generator.get_state()
            default.set_state(own_state)
            try:
                return func(*args, **kwargs)
            finally:
                new_state = default.get_state()
                default.set_state(process_state)
                # Attention, for example, counts as random but draws nothing without dropout.
                if not torch.equal(new_state, own_state):
                    self.drew = True
                    self.generator.set_state(new_state)


def default_state(device: torch.device) -> torch.Tensor:
    """Return the state of the process's generator of a device."""
    return _default_generator(device).get_state()


def set_default_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the process's generator of a device."""
    _default_generator(device).set_state(state)


def next_seed() -> int:
    """Return the next seed of the process's generator without advancing it; see `use_seed`."""
    generator = torch.Generator().set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=generator))


def use_seed() -> None:
    """Advance the process's generator, so that its next seed is another."""
    torch.randint(2**62, ())


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on ``device`` draw from by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class WeightVersions:
    """Gives each micro-batch, from its F to its backward, the weights that its schedule prescribes.

    Version ``v`` is the weights after ``v`` optimizer steps. It is a copy with its own parameters:
    the optimizer changes the stage's in place, and a backward needs the weights of its forward. A
    version is kept while a micro-batch in flight uses it, or a later one will. The newest exists
    twice, once for the optimizer.

    If ``double_buffered``, a forward uses the weights of the step before the last mini-batch's, or
    else the newest; see `pipesim.Schedule`.
    """

    def __init__(self, module: nn.Module, batch_size: int, double_buffered: bool) -> None:
        self.module, self.batch_size, self.double_buffered = module, batch_size, double_buffered
        self.newest = 0
        self.kept: dict[int, dict[str, nn.Parameter]] = {}
        self.in_flight: dict[int, int] = {}

    def reset(self) -> None:
        """Begin a step with the weights as they are."""
        self.clear()
        self._keep()

    def clear(self) -> None:
        """Free all versions."""
        self.newest = 0
        self.kept.clear()
        self.in_flight.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all versions."""
        return (parameter for weights in self.kept.values() for parameter in weights.values())

    def _keep(self) -> None:
        self.kept[self.newest] = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
            for name, p in self.module.named_parameters()
        }

    def begin_microbatch(self, microbatch: int) -> None:
        """Choose the weights for F of a micro-batch."""
        version = self.newest
        if self.double_buffered:
            # Without optimizer steps the first version is the only one.
            version = min(self.newest, max(0, microbatch // self.batch_size - 1))
        self.in_flight[microbatch] = version

    def weights(self, microbatch: int) -> dict[str, nn.Parameter]:
        """Return the weights of the forward of a micro-batch."""
        return self.kept[self.in_flight[microbatch]]

    def end_microbatch(self, microbatch: int) -> None:
        """Add the gradients of a micro-batch to the stage's own parameters."""
        weights = self.weights(microbatch)
        del self.in_flight[microbatch]
        for name, parameter in self.module.named_parameters():
            gradient, weights[name].grad = weights[name].grad, None
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        self._drop()

    @torch.no_grad()
    def add_version(self) -> None:
        """Keep the weights after an optimizer step as the newest version."""
        self.newest += 1
        self._drop()
        self._keep()

    def _drop(self) -> None:
        """Free the versions that no micro-batch will use."""
        oldest = self.newest - 1 if self.double_buffered else self.newest
        needed = {*range(max(0, oldest), self.newest + 1), *self.in_flight.values()}
        for version in [v for v in self.kept if v not in needed]:
            del self.kept[version]


#: Computes the weighted loss from the last stage's output and the number of the micro-batch.
LossCall = Callable[[object, int], Tensor]
#: Computes the weighted loss of a stage before the last one from what its module returns and the
#: number of the micro-batch. Returns the output of the stage, and the loss; None to leave it out.
OutputLossCall = Callable[[object, int], tuple[object, Tensor | None]]
#: Source of random numbers: a seed, the state of a generator that a forward drew from, or None for
#: the process's generator.
Seed = int | Tensor | None


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
        Positional and keyword arguments of a stage that takes the batch, for each micro-batch of a
        step, with other tensors; None for a stage that takes tensors, all positional.
    loss_scale
        Gradient of the loss from which backwards start: 1, or that of a gradient scaler.
    output_loss
        Loss of a stage before the last one; None without.
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
        self.output_loss: OutputLossCall | None = None

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
            weights = {} if self.versions is None else self.versions.weights(microbatch)
            args, kwargs = arguments, {}
            if self.arguments is not None:
                args, kwargs = with_tensors(self.arguments[microbatch], arguments)
            if weights:
                output: object = functional_call(self.module, {**weights}, args, kwargs)
            else:
                output = self.module(*args, **kwargs)
            if self.loss_fn is not None:
                outputs: tuple[Tensor, ...] = (self.loss_fn(output, microbatch),)
                self._loss_gradient = torch.full_like(outputs[0], self.loss_scale)
            else:
                outputs = self._output_tensors(output, microbatch)
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
            return NO_CONTEXT
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

    def _note_modified(
        self, arguments: tuple[Tensor, ...], counters: list[int], training: bool
    ) -> None:
        """Note whether the module changes its input in place; if so, it gets copies from then on.

        ``counters`` are the version counters of the arguments before the call.
        """
        is_modified = [x._version for x in arguments] != counters
        was_modified = self.modifies_input.setdefault(training, is_modified)
        if is_modified and not was_modified:
            self.modifies_input[training] = True
            raise ExecutionError(
                f"stage {self.index} changed its input in place, which its first forward did not; "
                "other holders of the input have lost its values: let the module clone its input "
                "first"
            )

    def _output_tensors(self, output: object, microbatch: int) -> tuple[Tensor, ...]:
        """Return the module's output as a tuple of tensors, to which a loss of its own is added."""
        loss = None
        if self.output_loss is not None:
            output, loss = self.output_loss(output, microbatch)
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
        if loss is None or not loss.requires_grad:
            return outputs
        kinds = [x.is_floating_point() or x.is_complex() for x in outputs]
        own = itertools.compress(outputs, kinds)
        with_loss = iter(_AddLoss.apply(loss, self.loss_scale, *own))  # type: ignore[no-untyped-call]
        return tuple(next(with_loss) if kind else x for kind, x in zip(kinds, outputs, strict=True))


def own_output(stage: int, output: object) -> tuple[object, object]:
    """Return the two values that a stage with a loss of its own returns.

    They are its output, and what its loss takes.
    """
    if not isinstance(output, tuple) or len(output) != 2:
        text = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        raise ExecutionError(
            f"stage {stage} has a loss of its own (stage_losses), so its module must return a "
            f"pair: its output for the next stage, and what the loss takes; got {text}"
        )
    return output


class OutputAlone(nn.Module):
    """Runs a stage with a loss of its own; returns its output for the next stage alone."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        super().__init__()
        self.stage, self.module = stage, module

    def forward(self, *args: Any, **kwargs: Any) -> object:
        """Return the output without what the loss takes."""
        return own_output(self.stage, self.module(*args, **kwargs))[0]


class _AddLoss(torch.autograd.Function):
    """Returns tensors as they are; their backward is also that of a loss, with a scale.

    So gradients of the loss are part of the stage's own backward, whole or split, as with
    ``MTPLossAutoScaler`` of Megatron-LM.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradient = torch.full_like(loss, scale)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.gradient, None, *gradients

"""One stage: forward, recompute, backward and split backward of one micro-batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from pipeexec.data_parallel.ddp_stage import ddp_stage
from pipeexec.devices.device import Values
from pipeexec.devices.thread_settings import Casts
from pipeexec.stages.activation_bytes import Meter, Receipt
from pipeexec.stages.deferred_weight_grads import Deferred
from pipeexec.stages.random_numbers import OwnGenerator
from pipeexec.stages.weight_versions import Versions
from pipesim.errors import ExecutionError

__all__ = ["Held", "Stage", "Values", "metered"]

#: Turns the last stage's output and the number of the micro-batch into its weighted loss.
Finish = Callable[[object, int], Tensor]
#: Where random numbers begin: a seed, the state of a generator that a forward drew from, or None
#: for the process's generator.
Seed = int | Tensor | None


_NOTHING = contextlib.nullcontext()


def _go_back(outputs: list[GradientEdge], gradients: list[Tensor]) -> None:
    """Accumulate gradients, as `torch.autograd.backward` does, but for its checks.

    They take 30 us a call in Python, as long as the backward of a small stage; the engine repeats
    those of shapes and types.
    """
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), True, True
    )


@contextlib.contextmanager
def metered(stages: Sequence[Stage], meters: Sequence[Meter]) -> Iterator[None]:
    """Let each stage count the bytes that it holds, in a block."""
    try:
        for stage, meter in zip(stages, meters, strict=True):
            stage.meter = meter
        yield
    finally:
        for stage in stages:
            stage.meter = None


class Held:
    """Counts the micro-batches whose activations a device holds, over all its stages."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def take(self) -> None:
        """Count one more."""
        self.now += 1
        self.peak = max(self.peak, self.now)

    def give(self) -> None:
        """Count one less."""
        self.now -= 1


@dataclass
class _Activations:
    """What F or R keeps for the backward: the inputs as leaves, and where the outputs came from.

    The outputs themselves are not kept: they are the next stage's.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    deferred: Deferred | None = None  # what I leaves for W
    receipts: tuple[Receipt, ...] = ()


class Stage:
    """A module on a device, and what it holds for the micro-batches in flight.

    All of a stage's tasks run on one stream, so nothing here is locked.

    Parameters
    ----------
    module
        Takes one tensor or several, returns a tensor or a tuple of tensors.
    index
        Number of the stage; stage 0 computes no gradient of its input.
    device
        Where its random numbers are drawn.
    held
        Counts activations; shared by the stages of a device.
    finish
        The loss, for the last stage.
    versions
        Of the weights, where the stage steps while micro-batches are in flight.
    batch_size
        Micro-batches of a mini-batch, after which a stage that is DistributedDataParallel adds up
        its gradients over replicas; such a stage needs it.

    Raises
    ------
    ArgumentError
        For DistributedDataParallel that cannot be a stage; see `pipeexec.data_parallel.ddp_stage`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        device: torch.device,
        held: Held,
        finish: Finish | None = None,
        versions: Versions | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.module, self.index, self.device, self.versions = module, index, device, versions
        self.held, self.finish = held, finish
        self.ddp = ddp_stage(module, index, batch_size, versions is not None)
        self.buffers = [name for name, _ in module.named_buffers()]
        self.is_random: dict[bool, bool] = {}  # by training mode; unknown until the first forward
        self.modifies_input: dict[bool, bool] = {}  # likewise
        self.needs_input_grad = index > 0
        self.casts: Casts | None = None  # makes the context of autocast, where there is one
        self.meter: Meter | None = None  # counts the bytes held, where one is set
        self._of_loss = torch.ones(())  # the gradient of a loss with respect to itself
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # of micro-batches to be recomputed
        self._input_receipts: dict[int, tuple[Receipt, ...]] = {}
        self._activations: dict[int, _Activations] = {}

    def evaluate(self, microbatch: int, values: Values, seed: Seed) -> Values:
        """Run F for its outputs alone."""
        inputs = tuple(value for value in values if value is not None)
        with torch.no_grad():
            return tuple(x.detach() for x in self._call(inputs, microbatch, seed))

    def forward(
        self,
        microbatch: int,
        values: Values,
        seed: Seed,
        recomputed: bool,
        split: bool = False,
        again: bool = False,
    ) -> Values:
        """Run F; keep the activations, or only the input where it will be recomputed.

        Where the backward will be ``split``, its weight gradients are made such that they can wait.
        A forward that is run ``again`` leaves buffers as they are.
        """
        fresh = self._fresh_buffers() if again else None
        inputs = tuple(value for value in values if value is not None)
        if self.versions is not None:
            self.versions.begin(microbatch)
        if recomputed:
            self._inputs[microbatch] = inputs
            self._input_receipts[microbatch] = self._receipts(inputs)
            with torch.no_grad():
                outputs = self._call(inputs, microbatch, seed, fresh)
        else:
            outputs = self._activate(microbatch, self._leaves(inputs), seed, split, fresh)
        return tuple(output.detach() for output in outputs)

    def recompute(self, microbatch: int, seed: Seed, split: bool = False) -> None:
        """Run R: F again, under the same random numbers, without updating buffers again."""
        leaves = self._leaves(self._inputs.pop(microbatch))
        self._activate(microbatch, leaves, seed, split, self._fresh_buffers())
        del self._input_receipts[microbatch]

    def _fresh_buffers(self) -> dict[str, Tensor]:
        return {name: self.module.get_buffer(name).clone() for name in self.buffers}

    def backward(self, microbatch: int, gradients: Values) -> Values:
        """Run B: accumulate the parameters' gradients, return those of the inputs."""
        kept = self._release(microbatch)
        outputs, given = self._with_gradients(kept.outputs, gradients)
        if outputs:
            if self.ddp is not None:
                self.ddp.before_backward(microbatch)
            _go_back(outputs, given)
        self._ended(microbatch)
        return tuple(leaf.grad for leaf in kept.inputs)

    def input_grad(self, microbatch: int, gradients: Values) -> Values:
        """Run I: return the gradients of the inputs, keep no more than W needs.

        Parameters whose gradients cannot wait (see `pipeexec.stages.deferred_weight_grads`) get
        them here.
        """
        kept = self._activations[microbatch]
        outputs, given = self._with_gradients(kept.outputs, gradients)
        if outputs:
            back = _go_back if kept.deferred is None else kept.deferred.collect
            back(outputs, given)
        self._activations[microbatch] = _Activations((), (), kept.deferred)
        found = tuple(leaf.grad for leaf in kept.inputs)
        del kept, outputs
        if self.meter is not None:
            self.meter.left = max(self.meter.left, self.meter.now)
        return found

    def weight_grad(self, microbatch: int) -> None:
        """Run W: accumulate the parameters' gradients that I left."""
        deferred = self._release(microbatch).deferred
        if deferred is not None:
            deferred.run()
        self._ended(microbatch)

    def pending(self, microbatch: int) -> set[int] | None:
        """Return the ids of the parameters whose gradients W will make; None where all are to come.

        Others have had theirs from I.
        """
        deferred = self._activations[microbatch].deferred
        if deferred is None or self.versions is not None:  # whose weights are not the module's
            return None
        return deferred.parameters()

    def begin(self, casts: Casts | None = None) -> None:
        """Begin a step: the weights are as they are now, and forwards cast as ``casts`` says."""
        self.casts = casts
        if self.ddp is not None:
            self.ddp.begin()
        if self.versions is not None:
            self.versions.reset()
            self._note_versions()

    def done(self) -> None:
        """End a step: let go of what only a step needs."""
        if self.versions is not None:
            self.versions.clear()

    def stepped(self, *, zero_grad: bool) -> None:
        """Note an optimizer step; of several in a step, each begins without gradients."""
        if self.versions is None:
            return
        if zero_grad:
            self.module.zero_grad(set_to_none=True)
        self.versions.stepped()
        self._note_versions()

    def mean_count(self, count: Tensor | float) -> Tensor | float:
        """Return the mean of a count over the replicas of DistributedDataParallel, if any."""
        return count if self.ddp is None else self.ddp.mean_count(count)

    def _note_versions(self) -> None:
        if self.meter is not None and self.versions is not None:
            self.meter.ignore_weights(self.index, self.versions.weights())

    def _ended(self, microbatch: int) -> None:
        """Note the end of a micro-batch's backward."""
        if self.versions is not None:
            self.versions.end(microbatch)
        if self.ddp is not None:
            self.ddp.finish_microbatch(microbatch)

    def forget(self, microbatch: int) -> None:
        """Let go of a micro-batch whose backward will not come, if it is held."""
        self._inputs.pop(microbatch, None)
        self._input_receipts.pop(microbatch, None)
        if microbatch in self._activations:
            self._release(microbatch)

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        self._inputs.clear()
        self._input_receipts.clear()
        while self._activations:
            self._release(next(iter(self._activations)))
        if self.ddp is not None:
            self.ddp.reset()

    def _activate(
        self,
        microbatch: int,
        leaves: tuple[Tensor, ...],
        seed: Seed,
        split: bool,
        buffers: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the module, and keep what the backward needs."""
        deferred = Deferred(self.meter) if split else None
        outputs = self._call(leaves, microbatch, seed, buffers, deferred)
        edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in outputs)
        kept = _Activations(leaves, edges, deferred, self._receipts(leaves))
        self._activations[microbatch] = kept
        self.held.take()
        return outputs

    def _receipts(self, tensors: tuple[Tensor, ...]) -> tuple[Receipt, ...]:
        return () if self.meter is None else tuple(Receipt(self.meter, x) for x in tensors)

    def _release(self, microbatch: int) -> _Activations:
        self.held.give()
        return self._activations.pop(microbatch)

    def _leaves(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut the inputs off from whatever made them; all but stage 0's collect gradients."""
        return tuple(
            value.detach().requires_grad_(
                self.needs_input_grad and (value.is_floating_point() or value.is_complex())
            )
            for value in inputs
        )

    def _call(
        self,
        inputs: tuple[Tensor, ...],
        microbatch: int,
        seed: Seed,
        buffers: dict[str, Tensor] | None = None,
        deferred: Deferred | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the module, and the loss after the last stage, under the task's random numbers."""
        infers = torch.is_inference_mode_enabled()  # whose tensors do not know their version
        training = self.module.training
        copies = self.modifies_input.get(training, True) or infers
        given = tuple(x.clone() for x in inputs) if copies else inputs
        versions = [] if infers else [x._version for x in given]
        draws = self.is_random.get(training, True) or isinstance(seed, Tensor)
        random = OwnGenerator(seed, self.device) if draws and seed is not None else None
        with self._around(random, deferred):
            output = self._module_output(given, microbatch, buffers)
            if self.finish is not None:
                outputs: tuple[Tensor, ...] = (self.finish(output, microbatch),)
                self._of_loss = torch.ones_like(outputs[0])
            else:
                outputs = self._checked(output)
        if random is not None:
            self.is_random.setdefault(training, random.drew)
        if not infers:
            self._note_modified(given, versions, training)
        return outputs

    def _around(
        self, random: OwnGenerator | None, deferred: Deferred | None
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context in which to run the module; mostly there is none."""
        if (random is None and self.meter is None and deferred is None and self.ddp is None
                and self.casts is None):  # fmt: skip
            return _NOTHING
        context = contextlib.ExitStack()
        if self.casts is not None:
            context.enter_context(self.casts())
        if self.ddp is not None:
            context.enter_context(self.ddp.forward_context())
        if random is not None:
            context.enter_context(random)
        if self.meter is not None:
            context.enter_context(self.meter.saved_tensors())
        if deferred is not None:
            context.enter_context(deferred.deferring())
        return context

    def _module_output(
        self, inputs: tuple[Tensor, ...], microbatch: int, buffers: dict[str, Tensor] | None
    ) -> object:
        weights = {} if self.versions is None else self.versions.of(microbatch)
        if buffers or weights:
            return functional_call(self.module, {**weights, **(buffers or {})}, inputs)
        return self.module(*inputs)

    def _note_modified(
        self, given: tuple[Tensor, ...], versions: list[int], training: bool
    ) -> None:
        """Learn whether the module changes its input in place; it is given copies if so."""
        changed = any(x._version != v for x, v in zip(given, versions, strict=True))
        known = self.modifies_input.setdefault(training, changed)
        if changed and not known:
            self.modifies_input[training] = True
            raise ExecutionError(
                f"stage {self.index} changed its input in place, which it did not do at first; "
                "what others hold of it is lost: let the module clone its input first"
            )

    def _checked(self, output: object) -> tuple[Tensor, ...]:
        """Return the output as a tuple of tensors."""
        outputs = output if isinstance(output, tuple) else (output,)
        for value in outputs:
            if not isinstance(value, Tensor):
                raise ExecutionError(
                    f"the output of stage {self.index} must be a tensor or a tuple of tensors, "
                    f"got {type(output).__name__}"
                    + (f" with {type(value).__name__}" if output is not value else "")
                )
        return outputs

    def _with_gradients(
        self, outputs: tuple[GradientEdge | None, ...], gradients: Values
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the outputs to go back from, and their gradients; that of a loss is 1."""
        if self.finish is not None:
            gradients = (self._of_loss,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

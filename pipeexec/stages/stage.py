"""One stage: forward, recompute, backward and split backward of one micro-batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase

from pipeexec.devices.device import Values
from pipeexec.devices.thread_settings import ContextFactory
from pipeexec.nesting import Arguments
from pipeexec.stages.activations import (
    ActivationCounter,
    ActivationMeter,
    Copy,
    CountedTensor,
    SavedActivations,
    counted_tensors,
    module_storages,
    storages,
)
from pipeexec.stages.deferred_weight_grads import DeferredGradients
from pipeexec.stages.module_call import (
    LossCall,
    ModuleCaller,
    Seed,
    WeightVersions,
    default_state,
    set_default_state,
)
from pipeexec.stages.recompute import (
    NO_CONTEXT,
    Buffer,
    Buffers,
    ForwardBuffers,
    ModuleState,
    not_repeatable,
    same_tensors,
    use_buffers,
)
from pipeexec.stages.sequence_slices import Mode, StageSlices
from pipesim.errors import ExecutionError


class StageLike(Protocol):
    """A stage that the executor can run: tasks of one micro-batch, and the bounds of a step.

    The arguments of tasks are positional, so a stage may ignore arguments that it does not need.
    Attributes are those of `pipeexec.stages.module_call.ModuleCaller`.
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


def _are_same(buffer: Buffer, other: Buffer) -> bool:
    if isinstance(buffer, Tensor) and isinstance(other, Tensor):
        return same_tensors([buffer], [other])
    return buffer is other


def run_backward(outputs: list[GradientEdge], gradients: list[Tensor]) -> None:
    """Accumulate gradients, as `torch.autograd.backward` does, without its checks.

    The checks take 30 us a call in Python, as long as the backward of a small stage. The engine
    repeats those of shapes and types.
    """
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), True, True
    )


@contextlib.contextmanager
def attach_meters(
    stages: Sequence[StageLike],
    meters: Sequence[ActivationMeter],
    peer_meters: Sequence[ActivationMeter | None] = (),
) -> Iterator[None]:
    """Let each stage count the bytes that it holds, in a block; and those that its peer holds.

    A stage that is listed several times, for paths that share it, has the first of its meters.
    """
    try:
        for stage, meter in reversed([*zip(stages, meters, strict=True)]):
            stage.meter = meter
        for stage, peer_meter in zip(stages, peer_meters, strict=False):
            if isinstance(stage, Stage):
                stage.peer_meter = peer_meter
        yield
    finally:
        for stage in stages:
            stage.meter = None
            if isinstance(stage, Stage):
                stage.peer_meter = None


@dataclass
class _Activations:
    """Activations that F or R keeps for the backward: inputs as leaves, outputs as graph edges.

    The outputs themselves are not kept: they belong to the next stage.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    deferred: DeferredGradients | None = None  # left by I for W
    counted: tuple[CountedTensor, ...] = ()
    saved: SavedActivations | None = None  # of a micro-batch that is offloaded


class Stage(ModuleCaller):
    """A module on a device, with the activations of its micro-batches in flight.

    All tasks of a stage run on one stream, so nothing here is locked.

    Parameters
    ----------
    module
        Takes one tensor or several, returns a tensor or a tuple of tensors.
    index
        Number of the stage. All but stage 0 compute gradients of their inputs, unless
        ``needs_input_grad`` is set otherwise.
    device
        Device on which its random numbers are drawn.
    counter
        Counts activations; shared by the stages of a device.
    loss_fn
        The loss, for the last stage.
    versions
        Versions of the weights, for a stage that steps while micro-batches are in flight.
    batch_size
        Micro-batches of a mini-batch. A stage that is DistributedDataParallel needs it: it adds up
        its gradients over replicas after so many.
    n_slices
        Slices of a sequence; micro-batches are slices then.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        device: torch.device,
        counter: ActivationCounter,
        loss_fn: LossCall | None = None,
        versions: WeightVersions | None = None,
        batch_size: int | None = None,
        n_slices: int = 1,
    ) -> None:
        super().__init__(module, index, device, loss_fn, versions, batch_size)
        self.slices = StageSlices(module, index, n_slices) if n_slices > 1 else None
        self.counter = counter
        self.buffers = ForwardBuffers(module, index)
        #: Context of a recompute, and the words of its caller's option to keep activations instead.
        self.recompute_context: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        self.recompute_option = "recompute='never'"
        #: Whether to refuse a forward that is recomputed and changes state that is no buffer.
        self.must_be_repeatable = True
        self._repeatable: set[bool] = set()  # training modes in which F is known to be
        self.needs_input_grad = index > 0
        # Inputs of micro-batches to be recomputed.
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._counted_inputs: dict[int, tuple[CountedTensor, ...]] = {}
        self._saved_inputs: dict[int, SavedActivations] = {}
        self._activations: dict[int, _Activations] = {}
        #: Micro-batches that have an OFFLOAD; storages of the batch of a step, and of the module.
        self.offloaded: frozenset[int] = frozenset()
        self.batch_storages: set[int] = set()
        #: Counts the bytes that a peer holds for the stage; None if they are not counted.
        self.peer_meter: ActivationMeter | None = None
        self._module_storages: set[int] | None = None

    @property
    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel adds up the gradients over replicas."""
        return self.ddp is not None

    def evaluate(
        self, microbatch: int, values: Values, seed: Seed, again: Buffers | None = None
    ) -> Values:
        """Run F without keeping anything for a backward; see `forward` about ``again``."""
        if again is not None:
            with use_buffers(again):
                return self.evaluate(microbatch, values, seed)
        inputs = tuple(value for value in values if value is not None)
        with torch.no_grad(), self._watch(), self._slice(microbatch, "evaluate"):
            return tuple(x.detach() for x in self._call(inputs, microbatch, seed))

    def forward(
        self,
        microbatch: int,
        values: Values,
        seed: Seed,
        recomputed: bool,
        split: bool = False,
        again: Buffers | None = None,
    ) -> Values:
        """Run F; keep the activations, or only the input if they are ``recomputed``.

        With ``split``, the backward is split, and layers defer their weight gradients to W. A
        forward that is run ``again`` changes these buffers in place of the module's.
        """
        if again is not None:
            with use_buffers(again):
                return self.forward(microbatch, values, seed, recomputed, split)
        inputs = tuple(value for value in values if value is not None)
        if self.versions is not None:
            self.versions.begin_microbatch(microbatch)
        if recomputed:
            self._keep_inputs(microbatch, inputs)
            if self.ddp is not None:
                self.ddp.sync_buffers()
            is_checked = not self.must_be_repeatable or self.module.training in self._repeatable
            run = self._drop if is_checked else self._drop_if_repeatable
            outputs = run(microbatch, inputs, seed)
        else:
            with self._watch():
                outputs = self._activate(microbatch, self._leaves(inputs), seed, split)
        return tuple(output.detach() for output in outputs)

    def recompute(self, microbatch: int, seed: Seed, split: bool = False) -> None:
        """Run R: F again, under the same random numbers, on the buffers that F saw.

        Buffers of the module stay as they are.
        """
        leaves = self._leaves(self._inputs.pop(microbatch))
        with use_buffers(self.buffers.recompute(microbatch)):
            self._activate(microbatch, leaves, seed, split, "recompute", offloads=False)
        self._counted_inputs.pop(microbatch, None)
        self._saved_inputs.pop(microbatch, None)

    def repeat(self, microbatch: int, values: tuple[Tensor, ...], seed: Seed) -> tuple[Tensor, ...]:
        """Run F again in the caller's own graph; the stage keeps nothing.

        Buffers stay as they are. A module whose result depends on what its forwards change, buffers
        but for statistics of norms included, raises `ExecutionError`.
        """
        state, before = ModuleState(self.module), default_state(self.device)
        buffers, expected = self.buffers.present(), self.buffers.present()
        with use_buffers(buffers):
            outputs = self._call(values, microbatch, seed)
        changed = [
            f"{type(change.module).__name__} changes {change.name!r}"
            for change in ModuleState(self.module).changes(state)
        ] + [
            f"{type(slot.module).__name__} changes its buffer {slot.key!r}"
            for slot, buffer in buffers.items()
            if not isinstance(slot.module, _NormBase) and not _are_same(buffer, expected[slot])
        ]
        if not torch.equal(before, default_state(self.device)):
            set_default_state(self.device, before)
            changed.append("a single micro-batch draws random numbers")
        if changed:
            raise ExecutionError(
                f"the forward of stage {self.index} cannot be run again, as create_graph=True and "
                f"a second backward need it: {changed[0]} in every forward; use the layers without "
                "a pipeline, such as torch.nn.Sequential(*model)"
            )
        return outputs

    def _drop(self, microbatch: int, inputs: tuple[Tensor, ...], seed: Seed) -> tuple[Tensor, ...]:
        """Run F without keeping activations, but the buffers that R needs."""
        with torch.no_grad(), self.buffers.watch(microbatch), self._slice(microbatch, "drop"):
            return self._call(inputs, microbatch, seed)

    def _drop_if_repeatable(
        self, microbatch: int, inputs: tuple[Tensor, ...], seed: Seed
    ) -> tuple[Tensor, ...]:
        """Run F as `_drop` does; if it changes state of the module that is no buffer, run it twice.

        The second forward, on the buffers of the first, must neither change this state nor give
        another output.
        """
        same_seed = default_state(self.device) if seed is None else seed
        before = self._module_state(microbatch)
        outputs = self._drop(microbatch, inputs, seed)
        after = self._module_state(microbatch)
        changes = after.changes(before)
        if changes:
            with (
                torch.no_grad(),
                self.recompute_context(),
                use_buffers(self.buffers.copies(microbatch)),
                self._slice(microbatch, "drop"),
            ):
                repeated = self._call(inputs, microbatch, same_seed)
            lasting = self._module_state(microbatch).changes(after)
            if lasting or not same_tensors(outputs, repeated):
                change = (lasting or changes)[0]
                raise not_repeatable(self.index, change, bool(lasting), self.recompute_option)
        self._repeatable.add(self.module.training)
        return outputs

    def _module_state(self, microbatch: int) -> ModuleState:
        weights = None if self.versions is None else self.versions.weights(microbatch)
        return ModuleState(self.module, weights)

    def _watch(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward without R: earlier micro-batches may need buffers."""
        return self.buffers.watch(None) if self.buffers.is_needed else NO_CONTEXT

    def backward(self, microbatch: int, gradients: Values) -> Values:
        """Run B: accumulate the parameters' gradients, return those of the inputs."""
        kept = self._release(microbatch)
        outputs, output_gradients = self._with_gradients(microbatch, kept.outputs, gradients)
        if outputs:
            if self.ddp is not None:
                self.ddp.before_backward(microbatch)
            run_backward(outputs, output_gradients)
        self._end_backward(microbatch)
        return tuple(leaf.grad for leaf in kept.inputs)

    def input_grad(self, microbatch: int, gradients: Values) -> Values:
        """Run I: return the gradients of the inputs; keep only what W needs.

        Parameters whose gradients cannot be deferred get them here; see
        `pipeexec.stages.deferred_weight_grads`.
        """
        kept = self._activations[microbatch]
        outputs, output_gradients = self._with_gradients(microbatch, kept.outputs, gradients)
        if outputs:
            run = run_backward if kept.deferred is None else kept.deferred.collect
            run(outputs, output_gradients)
        self._activations[microbatch] = _Activations((), (), kept.deferred)
        input_gradients = tuple(leaf.grad for leaf in kept.inputs)
        del kept, outputs
        if self.meter is not None:
            self.meter.deferred_peak = max(self.meter.deferred_peak, self.meter.current)
        return input_gradients

    def weight_grad(self, microbatch: int) -> None:
        """Run W: accumulate the parameters' gradients that I left."""
        deferred = self._release(microbatch).deferred
        if deferred is not None:
            deferred.run()
        self._end_backward(microbatch)

    def pending_parameters(self, microbatch: int) -> set[int] | None:
        """Return the ids of the parameters whose gradients W will make; None if it makes all.

        Other parameters have their gradients from I.
        """
        deferred = self._activations[microbatch].deferred
        if deferred is None or self.versions is not None:  # its weights are not the module's
            return None
        return deferred.parameter_ids()

    def begin_step(self, autocast: ContextFactory | None = None) -> None:
        """Begin a step: the weights are as they are now; forwards run under ``autocast``."""
        self.autocast = autocast
        self.forget_storages()
        if self.ddp is not None:
            self.ddp.begin()
        if self.versions is not None:
            self.versions.reset()
            self._ignore_versions()

    def end_step(self) -> None:
        """End a step: free what only a step needs; its forwards have shown what they change."""
        if self.versions is not None:
            self.versions.clear()
        if self.slices is not None:
            self.slices.clear()
        self.buffers.end_step()

    def after_optimizer_step(self, *, zero_grad: bool) -> None:
        """Note an optimizer step; of several in a step, each begins without gradients."""
        if self.versions is None:
            return
        if zero_grad:
            self.module.zero_grad(set_to_none=True)
        self.versions.add_version()
        self._ignore_versions()

    def mean_count(self, count: Tensor | float) -> Tensor | float:
        """Return the mean of a count over the replicas of DistributedDataParallel, if any."""
        return count if self.ddp is None else self.ddp.mean_count(count)

    def _ignore_versions(self) -> None:
        if self.meter is not None and self.versions is not None:
            self.meter.ignore_weights(self.index, self.versions.parameters())

    def _end_backward(self, microbatch: int) -> None:
        """Note the end of a micro-batch's backward."""
        if self.versions is not None:
            self.versions.end_microbatch(microbatch)
        if self.ddp is not None:
            self.ddp.finish_microbatch(microbatch)

    def offload(self, microbatch: int, share: float, copy: Copy) -> tuple[Tensor, ...]:
        """Run OFFLOAD: move a share of what F keeps, and return what was copied.

        Of a micro-batch that will be recomputed, all of the input goes.
        """
        if microbatch in self._saved_inputs:
            return self._saved_inputs[microbatch].offload(1.0, copy, self.peer_meter)
        return self._saved(microbatch).offload(share, copy, self.peer_meter)

    def reload(self, microbatch: int, copy: Copy) -> int:
        """Run RELOAD: move it back, and return the bytes."""
        saved = self._saved_inputs.get(microbatch) or self._saved(microbatch)
        return saved.reload(copy)

    def _saved(self, microbatch: int) -> SavedActivations:
        saved = self._activations[microbatch].saved
        assert saved is not None  # `offloaded` has the micro-batch
        return saved

    def _keep_inputs(self, microbatch: int, inputs: tuple[Tensor, ...]) -> None:
        """Keep the inputs of a micro-batch that will be recomputed."""
        if microbatch not in self.offloaded:
            self._inputs[microbatch] = inputs
            self._counted_inputs[microbatch] = counted_tensors(self.meter, inputs)
            return
        own = tuple(x.detach() for x in inputs)  # whose data OFFLOAD may free
        self._inputs[microbatch] = own
        self._saved_inputs[microbatch] = SavedActivations(own, self.meter, self._kept_storages())

    def _kept_storages(self) -> set[int]:
        """Return the addresses of storages that OFFLOAD does not move."""
        weights = set() if self.versions is None else storages(self.versions.parameters())
        if self._module_storages is None:  # found once, as each parameter takes a microsecond
            self._module_storages = module_storages(self.module)
        return self.batch_storages | self._module_storages | weights

    def forget_storages(self) -> None:
        """Forget where the module's tensors are, as they may have moved."""
        self._module_storages = None

    def forget(self, microbatch: int) -> None:
        """Drop a micro-batch that gets no backward, if it is held."""
        self._inputs.pop(microbatch, None)
        self._counted_inputs.pop(microbatch, None)
        if self.slices is not None:
            self.slices.forget(microbatch)
        self._saved_inputs.pop(microbatch, None)
        self.buffers.forget(microbatch)
        if microbatch in self._activations:
            self._release(microbatch)

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        self._inputs.clear()
        self._counted_inputs.clear()
        self._saved_inputs.clear()
        self.buffers.clear()
        while self._activations:
            self._release(next(iter(self._activations)))
        if self.slices is not None:
            self.slices.clear()
        if self.ddp is not None:
            self.ddp.reset()

    def _activate(
        self,
        microbatch: int,
        leaves: tuple[Tensor, ...],
        seed: Seed,
        split: bool,
        mode: Mode = "train",
        offloads: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run the module, and keep what the backward needs."""
        deferred = DeferredGradients(self.meter) if split else None
        saved = None
        if offloads and microbatch in self.offloaded:
            saved = SavedActivations(leaves, self.meter, self._kept_storages())
        with self._slice(microbatch, mode):
            outputs = self._call(leaves, microbatch, seed, deferred, saved)
        edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in outputs)
        counted = counted_tensors(self.meter, leaves) if saved is None else ()
        kept = _Activations(leaves, edges, deferred, counted, saved)
        self._activations[microbatch] = kept
        self.counter.acquire()
        return outputs

    def _slice(self, microbatch: int, mode: Mode) -> contextlib.AbstractContextManager[None]:
        """Return the context of a slice's forward, in which modules find keys and values."""
        if self.slices is None:
            return NO_CONTEXT
        return self.slices.forward(microbatch, mode, self.meter)

    def _release(self, microbatch: int) -> _Activations:
        self.counter.release()
        return self._activations.pop(microbatch)

    def _leaves(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Detach the inputs from the graph that made them; they collect gradients if needed."""
        return tuple(
            value.detach().requires_grad_(
                self.needs_input_grad and (value.is_floating_point() or value.is_complex())
            )
            for value in inputs
        )

    def _with_gradients(
        self, microbatch: int, outputs: tuple[GradientEdge | None, ...], gradients: Values
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the outputs from which the backward starts, and their gradients; 1 for a loss.

        Of a slice, keys and values that later slices have read are among the outputs.
        """
        if self.loss_fn is not None:
            gradients = (self._loss_gradient,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        starts, start_gradients = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        if self.slices is not None:
            edges, left = self.slices.gradients(microbatch)
            return [*starts, *edges], [*start_gradients, *left]
        return starts, start_gradients

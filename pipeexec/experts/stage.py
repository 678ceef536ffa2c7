"""A stage with experts: F, B and I of a micro-batch in segments, cut at exchanges of tokens.

A stage with one layer of experts, forward and backward (rule 3 of docs/time.md)::

    F.0  modules, router   rows ->    F.1  experts    results ->    F.2  weighted sum, modules
                           dispatch                   combine
    B.2  modules, router   <- grads   B.1  experts    <- grads      B.0  weighted sum, modules
                       dispatch_grad               combine_grad

Autograd's graph is cut there too. A segment's inputs are leaves: the rows that an exchange
received, and tensors that the segment before the experts has kept for the one after them (weights
of the router, residual). A backward of a segment starts from the gradients of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from pipeexec.devices.device import Values
from pipeexec.experts.expert_shares import stage_parts
from pipeexec.experts.layer import Experts, Routed, run_experts
from pipeexec.nesting import with_tensors
from pipeexec.stages.activations import ActivationCounter, CountedTensor, counted_tensors
from pipeexec.stages.deferred_weight_grads import DeferredGradients
from pipeexec.stages.module_call import LossCall, OwnGenerator, Seed
from pipeexec.stages.stage import Stage, run_backward

# Exchange rows of tokens between the replicas that together have all experts.
#
# Member ``k`` sends ``numbers[k].sent[m]`` rows to member ``m``, in order of members, and receives
# rows of all members in the same order. Numbers of rows differ, so that a dispatch exchanges
# counts first: the host waits for them once, for all members of its process. The other exchanges
# of the layer have the same numbers.


class RowNumbers(NamedTuple):
    """Numbers of rows of one member, on the host."""

    sent: list[int]  # for each member
    received: list[int]  # from each member
    per_expert: list[int]  # that each expert of the member gets in the dispatch

    def reversed(self) -> RowNumbers:
        """Return the numbers of an exchange that sends rows back."""
        return RowNumbers(self.received, self.sent, self.per_expert)


class Rows(tuple[Tensor, ...]):
    """Rows of one member for all members, or from all of them, in their order.

    In a dispatch also the number of rows for, or from, each member and expert, shape
    ``(n_members, n)``.
    """

    numbers: RowNumbers | None  # None before a dispatch

    def __new__(cls, tensors: Iterable[Tensor], numbers: RowNumbers | None = None) -> Self:
        """Return a tuple of the tensors, with the numbers."""
        rows = super().__new__(cls, tensors)
        rows.numbers = numbers
        return rows

    def others_bytes(self, own: int) -> int:
        """Return the bytes that member ``own``, which has received these, sent to other members."""
        assert self.numbers is not None
        sent = self.numbers.sent
        rows, *counts = self
        n_rows = sum(sent) - sent[own]
        nbytes = n_rows * rows.shape[1:].numel() * rows.itemsize
        return nbytes + sum(x.nbytes - x[own].nbytes for x in counts)


@torch.no_grad()
def exchange_rows(members: Sequence[Rows], group: ProcessGroup | None = None) -> list[Rows]:
    """Return the rows that each member receives.

    All members are here, in their order; or, with a group, the one of this process. The group then
    has one member a process, in order of ranks.
    """
    rows, *counts = (list(tensors) for tensors in zip(*members, strict=True))
    numbers = [member.numbers for member in members if member.numbers is not None]
    if counts:
        counts[0], numbers = _exchange_counts(counts[0], group)
    sent, received = [own.sent for own in numbers], [own.received for own in numbers]
    tensors = zip(_exchange(rows, sent, received, group), *counts, strict=True)
    return [Rows(own, n) for own, n in zip(tensors, numbers, strict=True)]


def _exchange_counts(
    sent: list[Tensor], group: ProcessGroup | None
) -> tuple[list[Tensor], list[RowNumbers]]:
    """Return the counts that each member receives, and its numbers of rows."""
    ones = [[1] * len(own) for own in sent]
    received = _exchange(sent, ones, ones, group)
    on_host = torch.stack([x.to(sent[0].device) for x in (*sent, *received)]).tolist()
    numbers = [
        RowNumbers(
            [sum(row) for row in own],
            [sum(row) for row in others],
            [sum(column) for column in zip(*others, strict=True)],
        )
        for own, others in zip(on_host[: len(sent)], on_host[len(sent) :], strict=True)
    ]
    return received, numbers


def _exchange(
    members: list[Tensor],
    sent: list[list[int]],
    received: list[list[int]],
    group: ProcessGroup | None,
) -> list[Tensor]:
    """Return the rows that each member receives, joined."""
    if group is not None:
        (own,) = members
        rows = own.new_empty(sum(received[0]), *own.shape[1:])
        dist.all_to_all_single(rows, own.contiguous(), received[0], sent[0], group=group)
        return [rows]
    parts = [own.split(sizes) for own, sizes in zip(members, sent, strict=True)]
    joined = []
    for k, own in enumerate(members):
        pieces = [part[k].to(own.device) for part in parts]
        joined.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return joined


@dataclass
class Segment:
    """Activations of a segment: inputs as leaves, outputs as graph edges."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    counted: tuple[CountedTensor, ...]


@dataclass
class MicrobatchState:
    """What a stage keeps of a micro-batch between its segments."""

    deferred: DeferredGradients | None
    random_state: Seed  # of the next segment
    #: Segments that have run forward, without those that have run backward.
    segments: list[Segment] = field(default_factory=list)
    #: Of the dispatch of each layer, without those whose experts have run backward.
    numbers: list[RowNumbers] = field(default_factory=list)
    #: Number of rows from each member for each expert, in the latest dispatch.
    counts: Tensor | None = None
    #: The latest layer's tokens, without rows; its tensors are leaves of the next segment but one.
    routed: Routed | None = None
    #: Of the tensors kept by the segment before the experts; set by the one after them.
    kept_gradients: Values = ()
    drew: bool = False


def kept_tensors(routed: Routed | None) -> tuple[Tensor, ...]:
    """Return the tensors that the segment after the experts needs from the one before them."""
    if routed is None:
        return ()
    return (routed.weights,) if routed.kept is None else (routed.weights, routed.kept)


def with_kept(routed: Routed, kept: Sequence[Tensor]) -> Routed:
    """Return routed tokens with other tensors in place of `kept_tensors`."""
    weights, *others = kept
    return routed._replace(weights=weights, kept=others[0] if others else None)


class ExpertStage(Stage):
    """A stage whose layers with experts are spread over ``n_members`` replicas.

    This replica is number ``member`` of those that together have all experts.
    """

    #: Whether backwards follow.
    trains = True

    def __init__(
        self,
        module: nn.Module,
        index: int,
        device: torch.device,
        counter: ActivationCounter,
        loss_fn: LossCall | None = None,
        *,
        member: int = 0,
        n_members: int = 1,
    ) -> None:
        super().__init__(module, index, device, counter, loss_fn)
        self.parts = stage_parts(module, index)
        self.member, self.n_members = member, n_members
        self.last = 2 * len(self.parts.layers)  # segment
        self._states: dict[int, MicrobatchState] = {}

    def own_experts(self, layer: Experts) -> range:
        """Return the numbers of the experts of a layer that this replica computes."""
        size = layer.n_experts // self.n_members
        return range(self.member * size, (self.member + 1) * size)

    def forward_segment(
        self, microbatch: int, number: int, values: Values, seed: Seed, split: bool
    ) -> Values:
        """Run a segment of F; return its outputs, or the rows to exchange (`Rows`)."""
        if number == 0:
            deferred = DeferredGradients(self.meter) if split else None
            self._states[microbatch] = MicrobatchState(deferred, seed)
            self.counter.acquire()
        state = self._states[microbatch]
        if number % 2:
            inputs = self._received(state, values)
        else:
            inputs = tuple(x for x in (values if number == 0 else values[:1]) if x is not None)
            inputs += kept_tensors(state.routed)
        needs_grad = self.trains and (number > 0 or self.needs_input_grad)
        leaves = tuple(
            x.detach().requires_grad_(needs_grad and (x.is_floating_point() or x.is_complex()))
            for x in inputs
        )
        with torch.set_grad_enabled(self.trains):
            outputs = self._call_segment(state, microbatch, number, leaves)
        if self.trains:
            edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in outputs)
            state.segments.append(Segment(leaves, edges, counted_tensors(self.meter, leaves)))
        if number == self.last:
            state.routed = None
            self.is_random.setdefault(self.module.training, state.drew)
            if not self.trains:
                self.forget(microbatch)
            return tuple(x.detach() for x in outputs)
        rows = outputs[0].detach()
        if number % 2:
            return Rows((rows,), state.numbers[-1].reversed())
        assert state.routed is not None
        return Rows((rows, state.routed.counts.view(self.n_members, -1)))

    def _received(self, state: MicrobatchState, values: Values) -> tuple[Tensor, ...]:
        """Return the rows that the experts of this replica get."""
        assert isinstance(values, Rows)
        assert values.numbers is not None
        state.numbers.append(values.numbers)
        rows, state.counts = values
        return (rows,)

    def _call_segment(
        self, state: MicrobatchState, microbatch: int, number: int, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run the modules of a segment, under the random numbers of the task."""
        training, random_state = self.module.training, state.random_state
        draws = self.is_random.get(training, True)
        generator = (
            OwnGenerator(random_state, self.device) if draws and random_state is not None else None
        )
        is_inference = torch.is_inference_mode_enabled()  # its tensors have no version counter
        if number == 0 and (self.modifies_input.get(training, True) or is_inference):
            inputs = tuple(x.clone() for x in inputs)
        counters = [] if number or is_inference else [x._version for x in inputs]
        with self._call_contexts(generator, state.deferred, None):
            outputs = self._segment_outputs(state, microbatch, number, inputs)
        if generator is not None:
            state.drew |= generator.drew
            state.random_state = generator.generator.get_state()
        if counters:
            self._note_modified(inputs, counters, training)
        return outputs

    def _segment_outputs(
        self, state: MicrobatchState, microbatch: int, number: int, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        layer = number // 2
        if number % 2:
            experts = self.parts.layers[layer]
            numbers = self.own_experts(experts)
            assert state.counts is not None
            if type(experts).compute is not Experts.compute:  # of a class of the user's
                return (experts.compute(inputs[0], state.counts, numbers),)
            own = [experts.experts[str(k)] for k in numbers]
            return (run_experts(own, inputs[0], state.counts, state.numbers[-1].per_expert),)
        output = self._between(state, layer, inputs)
        if number < self.last:
            return self._route(state, self.parts.layers[layer], output)
        if self.loss_fn is None:
            return self._output_tensors(output, microbatch)
        loss = self.loss_fn(output, microbatch)
        self._loss_gradient = torch.full_like(loss, self.loss_scale)
        return (loss,)

    def _between(self, state: MicrobatchState, layer: int, inputs: tuple[Tensor, ...]) -> Any:
        """Run the modules before a layer, from the results of the layer before it, if any."""
        modules = self.parts.between[layer]
        output: Any = inputs if len(inputs) > 1 else inputs[0]
        if layer:
            results, *kept = inputs
            assert state.routed is not None
            routed = with_kept(state.routed, kept)
            output = self.parts.layers[layer - 1].combine(results, routed)
        elif modules:
            args, kwargs = inputs, None
            if self.arguments is not None:
                args, kwargs = with_tensors(self.arguments, inputs)
            output, modules = modules[0](*args, **(kwargs or {})), modules[1:]
        for module in modules:
            output = module(output)
        return output

    def _route(self, state: MicrobatchState, layer: Experts, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows to send, and the tensors that the segment after the experts needs."""
        routed = layer.route(x)
        kept = kept_tensors(routed)
        state.routed = with_kept(routed, [k.detach() for k in kept])._replace(
            rows=routed.rows[:0].detach()
        )
        return (routed.rows, *kept)

    def backward_segment(self, microbatch: int, number: int, values: Values) -> Values:
        """Run a segment of B, of the forward's segment ``last - number``; return gradients."""
        gradients = self._segment_backward(microbatch, number, values)
        if number == self.last:
            self.counter.release()
            del self._states[microbatch]
        return gradients

    def input_grad_segment(self, microbatch: int, number: int, values: Values) -> Values:
        """Run a segment of I; W adds up the gradients that it defers."""
        gradients = self._segment_backward(microbatch, number, values)
        if number == self.last and self.meter is not None:
            self.meter.deferred_peak = max(self.meter.deferred_peak, self.meter.current)
        return gradients

    def _segment_backward(self, microbatch: int, number: int, values: Values) -> Values:
        """Run the backward of one segment; return gradients, or rows of them to exchange."""
        state = self._states[microbatch]
        segment, place = state.segments.pop(), self.last - number
        edges, gradients = self._starts(state, segment, place, values)
        if edges:
            run = run_backward if state.deferred is None else state.deferred.collect
            run(edges, gradients)
        if place == 0:
            return tuple(leaf.grad for leaf in segment.inputs)
        first, *kept = segment.inputs
        rows = torch.zeros_like(first) if first.grad is None else first.grad
        if place % 2:
            return Rows((rows,), state.numbers.pop().reversed())
        state.kept_gradients = tuple(x.grad for x in kept)
        return Rows((rows,), state.numbers[-1])

    def _starts(
        self, state: MicrobatchState, segment: Segment, place: int, values: Values
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the outputs of a segment from which its backward starts, and their gradients."""
        if place == self.last:
            gradients = values if self.loss_fn is None else (self._loss_gradient,)
        elif place % 2:
            gradients = values[:1]
        else:
            gradients = (values[0], *state.kept_gradients)
            state.kept_gradients = ()
        pairs = [
            (output, gradient)
            for output, gradient in zip(segment.outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def weight_grad(self, microbatch: int) -> None:
        """Run W: accumulate the parameters' gradients that I left."""
        deferred = self._states.pop(microbatch).deferred
        self.counter.release()
        if deferred is not None:
            deferred.run()

    def pending_parameters(self, microbatch: int) -> set[int] | None:
        """Return the ids of the parameters whose gradients W will make; None if it makes all."""
        deferred = self._states[microbatch].deferred
        return None if deferred is None else deferred.parameter_ids()

    def forget(self, microbatch: int) -> None:
        """Drop a micro-batch, if it is held."""
        if self._states.pop(microbatch, None) is not None:
            self.counter.release()

    def reset(self) -> None:
        """Forget the micro-batches in flight, after a failure."""
        for microbatch in list(self._states):
            self.forget(microbatch)


class ForwardExpertStage(ExpertStage):
    """A stage with experts of a forward-only graph: it keeps nothing for a backward."""

    trains = False

    def forward_segment(
        self, microbatch: int, number: int, values: Values, seed: Seed, split: bool
    ) -> Values:
        """Run a segment of F; keep what the next segments need."""
        # Of this thread, which may be a worker's. Later segments get new tensors, with `Rows`.
        if number == 0 and not torch.is_inference_mode_enabled():
            values = tuple(x.clone() if x is not None and x.is_inference() else x for x in values)
        return super().forward_segment(microbatch, number, values, seed, split)

"""One forward of a `pipeexec.GPipe`, and the backward that may follow it.

The host issues tasks and messages to streams: forwards by the clock cycle, backwards as the
autograd engine comes to their nodes (`pipeexec.backward_order`). Tables hand tensors from task to
task, so that the host waits for nothing but the outputs, and the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from pipeexec import clocks, transfer
from pipeexec.backward_order import issue, phony
from pipeexec.clock_cycles import clock_cycles
from pipeexec.devices import Device, Values
from pipeexec.partition import Form, Partition
from pipeexec.randomness import default_state, task_seed
from pipeexec.recomputing import checkpointing, recomputing
from pipeexec.skip import Key
from pipeexec.stage import Stage
from pipeexec.streams import Event
from pipeexec.thread_settings import thread_settings
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Call", "Machine", "Message"]

#: A task or an end of a message: operation, partition, micro-batch, and the skip that it carries.
Done = tuple[Op, int, int, Key | None]
#: Of one tensor among those of a partition: its number, or the skip that it is.
Slot = int | Key


class Machine(NamedTuple):
    """What all calls of a module have in common.

    Attributes
    ----------
    stages, partitions, devices
        One of each a partition; the partition is the stage's module.
    skips
        Those that cross a border, and from which partition to which.
    dependencies
        Whether ``B[i+1, j]`` must come before ``B[i, j]``.
    copy_streams
        Whether messages have streams of their own; else they are on those that compute.
    portals
        Whether a skip goes straight to where it is popped; else by each partition between.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    skips: dict[Key, tuple[int, int]]
    dependencies: bool = True
    copy_streams: bool = True
    portals: bool = True

    def hops(self, to: int) -> Iterator[tuple[Key, int]]:
        """Return the skips that come to a partition, and from which each comes."""
        for key, (source, target) in self.skips.items():
            if self.portals and to == target:
                yield key, source
            elif not self.portals and source < to <= target:
                yield key, to - 1


class Message(NamedTuple):
    """Tensors of a micro-batch that go from one partition to another.

    ``skip`` is the one that it carries; None for the outputs of the partition before.
    """

    call: Call
    microbatch: int
    source: int
    target: int
    skip: Key | None = None

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Move tensors; runs on the sender's stream."""
        return self.call.move(self, tensors)

    def go_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Issue the message of the gradients."""
        self.call.send_back(self)

    def forget(self) -> None:
        """Do nothing: tables forget."""


class Forward(NamedTuple):
    """F of a micro-batch in a partition."""

    call: Call
    microbatch: int
    partition: int

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the layers; runs on the partition's stream."""
        return self.call.compute(self.microbatch, self.partition, tensors)

    def go_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Issue the backward."""
        self.call.go_back_through(self.microbatch, self.partition, gradients)

    def forget(self) -> None:
        """Let the stage forget the micro-batch."""
        self.call.machine.stages[self.partition].forget(self.call.key(self.microbatch))


class Call:
    """One forward, and its backward.

    Parameters
    ----------
    machine
        What runs it.
    first_key
        Under which stages keep the first micro-batch, others under the next.
    recomputed
        For each micro-batch, whether its activations are dropped and recomputed.
    seed
        Of the random numbers of all tasks; None to draw from the process's generator.
    """

    def __init__(
        self, machine: Machine, first_key: int, recomputed: Sequence[bool], seed: int | None
    ) -> None:
        self.machine, self.first_key, self.seed = machine, first_key, seed
        self.recomputed = list(recomputed)
        self.tracks = torch.is_grad_enabled()
        self.settings = thread_settings()
        self.clock: clocks.Clocks | None = None
        self.began: dict[Done, Event] = {}
        self.ended: dict[Done, Event] = {}
        self.nbytes: dict[Done, int] = {}
        self.order: list[Done] = []  # of backwards and recomputes, as they were issued
        self.has_failed = False
        self.is_going_back = False
        self._error: BaseException | None = None  # what failed first, until it is raised
        self._last: dict[int, Event] = {}  # of each partition
        # Where tensors of the forward are: outputs, then skips on their way.
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._is_atomic: dict[int, bool] = {}
        self._skips: dict[tuple[int, Key], Tensor] = {}
        self._phony: dict[int, Tensor] = {}
        self._arrived: dict[tuple[int, int], list[Event]] = {}
        # What a backward needs: what tensors stood for, and where random numbers began.
        self._forms: dict[tuple[int, int], tuple[Form, Form]] = {}
        self._states: dict[tuple[int, int], Tensor] = {}
        # Gradients of outputs, of inputs, and of skips that pass through.
        self._gradients: dict[tuple[int, int], dict[Slot, Tensor]] = {}
        self._found: dict[tuple[int, int], dict[Slot, Tensor]] = {}
        self._passing: dict[tuple[int, int, Key], Tensor] = {}
        self._arrived_back: dict[tuple[int, int], list[Event]] = {}

    def key(self, i: int) -> int:
        """Return the number under which stages keep a micro-batch of this call."""
        return self.first_key + i

    # Forward

    def run(self, microbatches: Sequence[tuple[Tensor, ...]], is_atomic: bool) -> list[Any]:
        """Run all micro-batches through all partitions; return what each became."""
        self.clock = clocks.start(self.machine.devices)
        m, n = len(microbatches), len(self.machine.stages)
        for i, tensors in enumerate(microbatches):
            self._tensors[i], self._is_atomic[i] = tuple(tensors), is_atomic
        try:
            for cycle in clock_cycles(m, n):
                for i, j in cycle:
                    self._fence(i, j)
                for i, j in cycle:
                    self._issue(Op.F, i, j, self._arrived.pop((i, j), ()), self._forward)
            self._wait()
            found = [self._tensors[i] for i in range(m)]
        finally:
            for table in (self._tensors, self._skips, self._phony):
                table.clear()  # whose graphs know this call
        return [x[0] if self._is_atomic[i] else x for i, x in enumerate(found)]

    def _fence(self, i: int, j: int) -> None:
        """Issue the messages that a forward needs."""
        for skip, source in self.machine.hops(j):
            self._send(Message(self, i, source, j, skip))
        if j:
            self._send(Message(self, i, j - 1, j))

    def _issue(
        self, op: Op, i: int, j: int, needed: Sequence[Event], work: Callable[[int, int], None]
    ) -> None:
        """Give a task to its device."""
        done = op, j, i, None
        stream = self.machine.devices[j].stream("compute")
        for event in needed:
            stream.wait_event(event)
        self.began[done] = stream.record()
        stream.submit(partial(self._guarded, work, i, j))
        self.ended[done] = self._last[j] = stream.record()
        if op != Op.F:
            self.order.append(done)

    def _send(self, message: Message, *, back: bool = False, needed: Sequence[Event] = ()) -> None:
        """Give the two ends of a message to their streams."""
        _, i, source, target, skip = message
        a, b = (target, source) if back else (source, target)
        sender, receiver = self.machine.devices[a], self.machine.devices[b]
        names = self._names(a, b)
        out, into = sender.stream(names[0]), receiver.stream(names[1])
        ops = (Op.SEND_B, Op.RECV_B) if back else (Op.SEND_F, Op.RECV_F)
        sent, there = (ops[0], a, i, skip), (ops[1], b, i, skip)
        for event in needed or (self.ended[Op.F, a, i, None],):
            out.wait_event(event)
        self.began[sent] = out.record()
        work = self._carry_back if back else self._carry
        out.submit(partial(self._guarded, work, message))
        self.ended[sent] = out.record()
        into.wait_event(self.ended[sent])
        self.began[there] = into.record()
        into.submit(partial(self._guarded, self._land, message, back))
        self.ended[there] = into.record()
        if not self.machine.copy_streams:
            self._last[a], self._last[b] = self.ended[sent], self.ended[there]
        arrived = self._arrived_back if back else self._arrived
        arrived.setdefault((i, b), []).append(self.ended[there])

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run a task, unless another has failed."""
        if self.has_failed:
            return
        try:
            work(*arguments)
        except BaseException as error:
            self.has_failed, self._error = True, error

    def _check(self) -> None:
        """Raise what went wrong, as it was, once no device works on this call any longer.

        It is not kept: its traceback knows the graph, which knows this call.
        """
        if self.has_failed:
            self._settle()
            error, self._error = self._error, None
            raise error or ExecutionError("this forward of GPipe has failed; run it again")

    def _settle(self) -> None:
        """Wait until every device is through with what was issued."""
        for event in list(self._last.values()):
            while not event.wait(0.1):
                pass

    def _wait(self) -> None:
        """Wait until every device is through; raise what went wrong, as it was."""
        self._settle()
        self._check()

    def _forward(self, i: int, j: int) -> None:
        """Run F of a micro-batch, on the stream of its partition."""
        partition = self.machine.partitions[j]
        skips = tuple(key for key in partition.entering if (i, key) in self._skips)
        tensors = self._tensors.pop(i)
        form = Form(self._is_atomic[i], len(tensors), skips)
        given = (*tensors, *(self._skips.pop((i, key)) for key in skips))
        self._forms[i, j] = form, form
        parameters = self.machine.stages[j].module.parameters()
        with self.settings():
            if self.tracks and any(x.requires_grad for x in (*given, *parameters)):
                before = self._phony.get(j) if self.machine.dependencies else None
                before = phony() if before is None else before
                after, made = issue(Forward(self, i, j), before, given)
                assert after is not None
                self._phony[j] = after
            else:
                made = self.compute(i, j, given, is_kept=False)
        form = self._forms[i, j][1]
        self._is_atomic[i], self._tensors[i] = form.is_atomic, tuple(made[: form.n])
        self._skips |= {(i, key): x for key, x in zip(form.skips, made[form.n :], strict=True)}

    def compute(
        self, i: int, j: int, given: Sequence[Tensor], *, is_kept: bool = True
    ) -> tuple[Tensor, ...]:
        """Run the layers of a partition; keep what the backward needs, or nothing."""
        stage, partition = self.machine.stages[j], self.machine.partitions[j]
        partition.given = form = self._forms[i, j][0]
        seed = None if self.seed is None else task_seed(self.seed, 0, j, i)
        is_recomputed = is_kept and self.recomputed[i]
        if is_recomputed and seed is None:
            self._states[i, j] = default_state(stage.device)
        with checkpointing() if is_recomputed else nullcontext():
            if is_kept:
                stage.needs_input_grad |= any(x.requires_grad for x in given)
                with torch.enable_grad():
                    made = stage.forward(self.key(i), tuple(given), seed, is_recomputed)
            else:
                made = stage.evaluate(i, tuple(given), seed)
        self._forms[i, j] = form, partition.made
        return tuple(x for x in made if x is not None)

    def _carry(self, message: Message) -> None:
        """Move what a message carries; runs on the sender's stream."""
        i, skip = message.microbatch, message.skip
        tensors = self._tensors[i] if skip is None else self._skip_of(i, skip)
        with self.settings():
            _, moved = issue(message, None, tensors)
        if skip is None:
            self._tensors[i] = moved
        elif moved:
            (self._skips[i, skip],) = moved

    def _skip_of(self, i: int, skip: Key) -> tuple[Tensor, ...]:
        return (self._skips[i, skip],) if (i, skip) in self._skips else ()

    def move(self, message: Message, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors on the memory of a message's receiver."""
        _, i, source, target, skip = message
        values = tuple(x.detach() for x in tensors)
        self.nbytes[Op.SEND_F, source, i, skip] = transfer.nbytes(values)
        return tuple(x for x in self._moved(values, source, target) if x is not None)

    def _moved(self, values: Values, source: int, target: int) -> Values:
        sender, receiver = self.machine.devices[source], self.machine.devices[target]
        stream = sender.stream(self._names(source, target)[0])
        return transfer.send(values, sender, stream, receiver)

    def _names(self, source: int, target: int) -> tuple[str, str]:
        """Return the streams of the two ends of a message."""
        if self.machine.copy_streams:
            return f"send:{target}", f"recv:{source}"
        return "compute", "compute"

    def _land(self, message: Message, back: bool) -> None:
        """Make what came safe to use where it is computed with."""
        _, i, source, target, skip = message
        device = self.machine.devices[source if back else target]
        if back:
            slots = list(self._gradients.get((i, source), {}).items())  # others add to them
            came = tuple(x for slot, x in slots if (slot == skip) == (skip is not None))
        else:
            came = self._tensors[i] if skip is None else self._skip_of(i, skip)
        transfer.receive(came, device, device.stream("compute"))

    # Backward

    def _go_back(self) -> None:
        """Note that a backward pass has begun; its end waits for the devices."""
        self._check()
        if self.is_going_back:
            return
        if not Variable._execution_engine.is_checkpoint_valid():
            raise ExecutionError(
                "the backward of GPipe adds to the .grad of its parameters: call backward() "
                "without inputs=, instead of torch.autograd.grad()"
            )
        self.is_going_back = True
        Variable._execution_engine.queue_callback(self._came_back)

    def _came_back(self) -> None:
        self.is_going_back = False
        self._wait()

    def go_back_through(self, i: int, j: int, gradients: Sequence[Tensor | None]) -> None:
        """Issue what a partition's backward is: R, if nothing was kept, and B."""
        self._go_back()
        if (Op.B, j, i, None) in self.ended:
            raise ExecutionError(
                "a second backward through one forward of GPipe: what it needs is gone; run the "
                "forward again, or add up the losses and go back once"
            )
        if j == len(self.machine.stages) - 1:
            real: dict[Slot, Tensor] = {k: x for k, x in enumerate(gradients) if x is not None}
            self._gradients.setdefault((i, j), {}).update(real)
        if self.recomputed[i]:
            self._issue(Op.R, i, j, (), self._recompute)
        self._issue(Op.B, i, j, self._arrived_back.pop((i, j), ()), self._backward)

    def _recompute(self, i: int, j: int) -> None:
        self.machine.partitions[j].given = self._forms[i, j][0]
        state = self._states.pop((i, j), None)
        seed = state if self.seed is None else task_seed(self.seed, 0, j, i)
        with self.settings(), torch.enable_grad(), recomputing():
            self.machine.stages[j].recompute(self.key(i), seed)

    def _backward(self, i: int, j: int) -> None:
        given, made = self._forms.pop((i, j))
        gradients = self._gradients.pop((i, j), {})
        slots = (*range(made.n), *made.skips)
        found = self.machine.stages[j].backward(
            self.key(i), tuple(gradients.get(slot) for slot in slots)
        )
        names = (*range(given.n), *given.skips)
        self._found[i, j] = {name: x for name, x in zip(names, found, strict=True) if x is not None}

    def send_back(self, message: Message) -> None:
        """Issue the way back of a message's gradients."""
        self._go_back()
        _, i, _, at, skip = message
        behind = None if skip is None else self.ended.get((Op.RECV_B, at, i, skip))
        made = self.ended.get((Op.B, at, i, None))
        self._send(message, back=True, needed=[x for x in (made, behind) if x is not None])

    def _carry_back(self, message: Message) -> None:
        """Move gradients to where what they are of came from; runs on the sender's stream."""
        _, i, source, target, skip = message
        taken: dict[Slot, Tensor] = {}
        if skip is None:
            found = self._found.get((i, target), {})
            taken = {slot: found.pop(slot) for slot in list(found) if isinstance(slot, int)}
        elif self.machine.skips[skip][1] == target:
            found = self._found.get((i, target), {})
            taken = {skip: found.pop(skip)} if skip in found else {}
        elif (i, target, skip) in self._passing:
            taken = {skip: self._passing.pop((i, target, skip))}
        values: Values = tuple(taken.values())
        self.nbytes[Op.SEND_B, target, i, skip] = transfer.nbytes(values)
        moved = dict(zip(taken, self._moved(values, target, source), strict=True))
        kept = {slot: x for slot, x in moved.items() if x is not None}
        if skip is None or self.machine.skips[skip][0] == source:
            self._gradients.setdefault((i, source), {}).update(kept)
        elif skip in kept:
            self._passing[i, source, skip] = kept[skip]

    def entry_gradient(self, i: int, k: int) -> Tensor | None:
        """Return the gradient of a micro-batch's input number ``k``, once it is there."""
        event = self.ended.get((Op.B, 0, i, None))
        if event is None:
            return None
        while not event.wait(0.1):
            pass
        self._check()
        return self._found.get((i, 0), {}).pop(k, None)

"""One forward of a `pipeexec.GPipe`, and the backward that may follow it.

The host issues tasks and messages to streams: forwards by the clock cycle, recomputes and backwards
as the autograd engine comes to their nodes (`pipeexec.backward_order`). Tables hand tensors from
task to task; a task takes what arrived, and leaves what is to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from pipeexec import clocks, transfer
from pipeexec.backward_order import joined, link, ordered, unordered
from pipeexec.clock_cycles import clock_cycles
from pipeexec.devices import Device, Values
from pipeexec.partition import Form, Partition
from pipeexec.randomness import default_state, task_seed
from pipeexec.recomputing import checkpointing, recomputing
from pipeexec.routes import Route, Ways
from pipeexec.skip import Key
from pipeexec.stage import Stage
from pipeexec.streams import Event, Stream
from pipeexec.thread_settings import thread_settings
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Call", "Machine"]

#: A task, or an end of a message: operation, partition, micro-batch, and the partition at the other
#: end if it carries skips.
Done = tuple[Op, int, int, int | None]
#: Tensors of a micro-batch in a partition, by the number of an output, or the skip that it is.
Tensors = dict[int | Key, Tensor]


class Machine(NamedTuple):
    """What all calls of a module have in common.

    Attributes
    ----------
    stages, partitions, devices
        One of each a partition; the partition is the stage's module.
    forward, backward
        The ways of outputs and skips, and of their gradients.
    dependencies
        Whether ``B[i+1, j]`` must come before ``B[i, j]``.
    copy_streams
        Whether messages have streams of their own; else they are on those that compute.
    seed
        Of the order of the backward, where there are no dependencies; None for autograd's own.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    forward: Ways
    backward: Ways
    dependencies: bool = True
    copy_streams: bool = True
    seed: int | None = None


#: Seconds of a forward from which on a thread is worth having: below, threads that take Python's
#: lock from each other cost more than they gain (``benchmarks/peers_gpipe.py``).
WORTH_A_THREAD = 300e-6


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
    tracked
        The partitions that have a backward: these and all behind them.
    stream
        The one of each device that computes.
    """

    def __init__(
        self,
        machine: Machine,
        first_key: int,
        recomputed: Sequence[bool],
        seed: int | None,
        tracked: Sequence[int],
        stream: str = "compute",
    ) -> None:
        self._stream = stream
        self.machine, self.first_key, self.seed = machine, first_key, seed
        self.recomputed, self.tracked = list(recomputed), tracked
        self.settings = thread_settings()
        self.clock: clocks.Clocks | None = None
        self.began: dict[Done, Event] = {}
        self.ended: dict[Done, Event] = {}
        self.nbytes: dict[Done, int] = {}
        self.skip_bytes: dict[Key, int] = {}  # of the largest micro-batch
        self.order: list[Done] = []  # of backwards and recomputes, as they were issued
        self.has_failed = False
        self._error: BaseException | None = None  # what failed first, until it is raised
        self._has_gone_back = self._is_done = False
        self._last: dict[int, Event] = {}  # of each partition
        # Of F and B, micro-batch and partition: what has arrived, what is to leave, and, by the
        # SEND, what is on its way.
        self._arrived: dict[tuple[Op, int, int], Tensors] = {}
        self._leaving: dict[tuple[Op, int, int], Tensors] = {}
        self._moving: dict[Done, tuple[Sequence[int | Key], Values]] = {}
        # Of two partitions: the messages that were sent from one to the other, but not received.
        self._channels: dict[tuple[int, ...], deque[tuple[Op, int, Route, Done]]] = {}
        # Of micro-batch and partition: what inputs and outputs stand for, and where random numbers
        # began.
        self._is_atomic: dict[tuple[int, int], bool] = {}
        self._entered: Sequence[Sequence[torch.Size]] = ()
        self._forms: dict[tuple[int, int], tuple[Form, Form]] = {}
        self._states: dict[tuple[int, int], Tensor] = {}

    def key(self, i: int) -> int:
        """Return the number under which stages keep a micro-batch of this call."""
        return self.first_key + i

    # Forward

    def run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        """Run all micro-batches through all partitions; return what they became, as one.

        It is one tensor if the first of what is returned says so, else a tuple.
        """
        m, n = len(microbatches), len(self.machine.stages)
        self.clock = clocks.start(self.machine.devices)
        self._entered = [[x.shape for x in tensors] for tensors in microbatches]
        for i, tensors in enumerate(microbatches):
            self._arrived[Op.F, i, 0] = dict(enumerate(tensors))
            self._is_atomic[i, 0] = atomic
        for i, j in chain.from_iterable(clock_cycles(m, n)):
            self._issue(Op.F, i, j)
        leave = self._linked(inputs) if self.tracked else joined  # while devices work
        made = self._awaited(n - 1, [(Op.F, i, n - 1) for i in range(m)])
        is_atomic = all(self._is_atomic.pop((i, n)) for i in range(m))
        return is_atomic, leave([tuple(tensors.values()) for tensors in made])

    def _awaited(self, j: int, which: Sequence[tuple[Op, int, int]]) -> list[Tensors]:
        """Return what partition ``j`` has made, for the caller to use."""
        device = self.machine.devices[j]
        device.rejoin(self._last[j])
        self._check()
        made = [self._leaving.pop(each) for each in which]
        device.rejoin(self._last[j], tuple(x for tensors in made for x in tensors.values()))
        return made

    def _linked(
        self, inputs: tuple[Tensor, ...]
    ) -> Callable[[Sequence[tuple[Tensor, ...]]], tuple[Tensor, ...]]:
        """Make the graph that gives the backward its order."""
        m, machine = len(self.recomputed), self.machine
        if machine.dependencies:
            cycles = clock_cycles(m, len(machine.stages))
            nodes = ordered(
                ([cell for cell in cycle if cell[1] in self.tracked] for cycle in cycles),
                self.recomputed,
            )
        else:
            nodes = unordered(self.recomputed, self.tracked, machine.seed)
        return link(self, inputs, nodes, dependencies=machine.dependencies)

    def _issue(self, op: Op, i: int, j: int) -> None:
        """Give a task to its stream, what arrives for it before, and what leaves after it."""
        ways = self.machine.forward if op == Op.F else self.machine.backward
        needed = [self._receive(op, i, route) for route in ways.arriving[j]] if op != Op.R else ()
        work = {Op.F: self._forward, Op.R: self._recompute, Op.B: self._backward}[op]
        stream = self.machine.devices[j].stream(self._stream)
        done = op, j, i, None
        began, ended = stream.run(partial(self._guarded, work, i, j), needed)
        self.began[done], self.ended[done], self._last[j] = began, ended, ended
        if op == Op.R:
            return
        for route in ways.leaving[j]:
            if op == Op.F or route.target in self.tracked:
                self._send(op, i, route, ended)

    def _send(self, op: Op, i: int, route: Route, made: Event) -> None:
        """Give the sender's end of a message to its stream, behind what ``made`` it."""
        name = f"send:{route.target}" if self.machine.copy_streams else self._stream
        stream = self.machine.devices[route.source].stream(name)
        done = self._done(Op.SEND_F if op == Op.F else Op.SEND_B, i, route.source, route)
        work = partial(self._guarded, self._part, op, i, route, done, stream)
        self.began[done], self.ended[done] = stream.run(work, [made])
        if not self.machine.copy_streams:
            self._last[route.source] = self.ended[done]
        self._channels.setdefault(route[:2], deque()).append((op, i, route, done))

    def _receive(self, op: Op, i: int, route: Route) -> Event:
        """See that a message is received, behind those that its sender sent before."""
        done = self._done(Op.RECV_F if op == Op.F else Op.RECV_B, i, route.target, route)
        while done not in self.ended:
            self._receive_next(*self._channels[route[:2]].popleft())
        return self.ended[done]

    def _receive_next(self, op: Op, i: int, route: Route, sent: Done) -> None:
        """Give the receiver's end of a message to its stream."""
        name = f"recv:{route.source}" if self.machine.copy_streams else self._stream
        stream = self.machine.devices[route.target].stream(name)
        done = self._done(Op.RECV_F if op == Op.F else Op.RECV_B, i, route.target, route)
        work = partial(self._guarded, self._land, op, i, route, sent)
        self.began[done], self.ended[done] = stream.run(work, [self.ended[sent]])

    @staticmethod
    def _done(op: Op, i: int, at: int, route: Route) -> Done:
        """Return what one end of a message is known by."""
        peer = route.source if at == route.target else route.target
        return op, at, i, None if route.skips is None else peer

    def forward_seconds(self) -> float:
        """Return how long a forward takes: the fastest of each partition, on average."""
        n = len(self.machine.stages)
        tasks = [[(Op.F, j, i, None) for i in range(len(self.recomputed))] for j in range(n)]
        return (
            sum(
                min(self.ended[done].seconds_since(self.began[done]) for done in each)
                for each in tasks
            )
            / n
        )

    # What streams run

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run a task, unless another has failed."""
        if self.has_failed:
            return
        try:
            work(*arguments)
        except BaseException as error:
            self.has_failed, self._error = True, error

    def _part(self, op: Op, i: int, route: Route, sent: Done, stream: Stream) -> None:
        """Put what leaves on a route into the memory of its target."""
        leaving = self._leaving[op, i, route.source]
        taken = {slot: leaving.pop(slot) for slot in list(leaving) if route.carries(slot)}
        sender, receiver = self.machine.devices[route.source], self.machine.devices[route.target]
        values = tuple(taken.values())
        self.nbytes[sent] = transfer.nbytes(values)
        for slot, value in taken.items() if op == Op.F and route.skips is not None else ():
            assert not isinstance(slot, int)
            self.skip_bytes[slot] = max(self.skip_bytes.get(slot, 0), value.nbytes)
        self._moving[sent] = tuple(taken), transfer.send(values, sender, stream, receiver)

    def _land(self, op: Op, i: int, route: Route, sent: Done) -> None:
        """Make what came safe to use where it is computed with."""
        device = self.machine.devices[route.target]
        slots, values = self._moving.pop(sent)
        transfer.receive(values, device, device.stream(self._stream))
        there = self._arrived.setdefault((op, i, route.target), {})
        there.update({k: x for k, x in zip(slots, values, strict=True) if x is not None})

    def _forward(self, i: int, j: int) -> None:
        """Run the layers of a partition; keep what the backward needs, or nothing."""
        stage, partition = self.machine.stages[j], self.machine.partitions[j]
        held = self._arrived.pop((Op.F, i, j))
        skips = tuple(key for key in partition.entering if key in held)
        n = sum(isinstance(slot, int) for slot in held)
        given = partition.forms.given = Form(self._is_atomic.pop((i, j)), n, skips)
        tensors = tuple(held.pop(slot) for slot in given.slots)
        seed = self._seed(i, j)
        with self.settings():
            if j not in self.tracked:
                made = stage.evaluate(self.key(i), tensors, seed)
            elif self.recomputed[i]:
                if seed is None:
                    self._states[i, j] = default_state(stage.device)
                with checkpointing():
                    made = stage.forward(self.key(i), tensors, seed, recomputed=True)
            else:
                made = stage.forward(self.key(i), tensors, seed, recomputed=False)
        form = partition.forms.made
        self._is_atomic[i, j + 1] = form.is_atomic
        if j in self.tracked:
            self._forms[i, j] = given, form
        held.update({k: x for k, x in zip(form.slots, made, strict=True) if x is not None})
        self._leaving[Op.F, i, j] = held  # with skips that pass

    def _seed(self, i: int, j: int) -> int | None:
        """Return the seed of a forward, if it may draw random numbers of its own."""
        stage = self.machine.stages[j]
        if self.seed is None or not stage.is_random.get(stage.module.training, True):
            return None
        return task_seed(self.seed, 0, j, i)

    def _recompute(self, i: int, j: int) -> None:
        self.machine.partitions[j].forms.given = self._forms[i, j][0]
        seed = self._states.pop((i, j), None) if self.seed is None else self._seed(i, j)
        with self.settings(), recomputing():
            self.machine.stages[j].recompute(self.key(i), seed)

    def _backward(self, i: int, j: int) -> None:
        given, made = self._forms.pop((i, j))
        held = self._arrived.pop((Op.B, i, j), {})
        gradients = tuple(held.pop(slot, None) for slot in made.slots)
        found = self.machine.stages[j].backward(self.key(i), gradients)
        held.update({k: x for k, x in zip(given.slots, found, strict=True) if x is not None})
        self._leaving[Op.B, i, j] = held

    # Where host and streams meet

    def _check(self) -> None:
        """Raise what went wrong, as it was, once no device works on this call any longer.

        It is not kept: its traceback knows the graph, which knows this call.
        """
        if self.has_failed:
            self.forget()
            error, self._error = self._error, None
            raise error or ExecutionError("this forward of GPipe has failed; run it again")

    def settle(self) -> None:
        """Wait until every device is through with what was issued."""
        for event in list(self._last.values()):
            while not event.wait(0.1):
                pass

    def forget(self) -> None:
        """Let go of what a backward would need: there will be none any more."""
        if self._is_done:
            return
        self.settle()
        self._is_done = True
        for stage in self.machine.stages:
            for i in range(len(self.recomputed)):
                stage.forget(self.key(i))
        for table in (self._arrived, self._leaving, self._moving, self._forms, self._states):
            table.clear()

    # Backward: what its graph asks for

    def begin(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Take the gradients of the outputs; see that the end waits for the devices."""
        self._check()
        if not Variable._execution_engine.is_checkpoint_valid():
            raise ExecutionError(
                "the backward of GPipe adds to the .grad of its parameters: call backward() "
                "without inputs=, instead of torch.autograd.grad()"
            )
        if self._has_gone_back:
            raise ExecutionError(
                "a second backward through one forward of GPipe: what it needs is gone; run the "
                "forward again, or add up the losses and go back once"
            )
        self._has_gone_back = True
        n = len(self.machine.stages)
        device = self.machine.devices[n - 1]
        device.mark()  # what follows comes behind what the caller has made
        for i, given in enumerate(gradients):
            there: Tensors = {k: x for k, x in enumerate(given) if x is not None}
            transfer.receive(tuple(there.values()), device, device.stream(self._stream))
            self._arrived[Op.B, i, n - 1] = there
        Variable._execution_engine.queue_callback(self._came_back)

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of a micro-batch in a partition."""
        self._check()
        self.order.append((op, j, i, None))
        self._issue(op, i, j)

    def _came_back(self) -> None:
        for j, event in self._last.items():
            self.machine.devices[j].rejoin(event)
        self._check()
        self._is_done = True
        self._leaving.clear()  # gradients of inputs that need none

    def entry_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the mini-batch's inputs, once they are there."""
        m = len(self._entered)
        found = self._awaited(0, [(Op.B, i, 0) for i in range(m)])
        whole: list[Tensor | None] = []
        for k in range(len(self._entered[0])):
            like = next((tensors[k] for tensors in found if k in tensors), None)
            if like is None:
                whole.append(None)
                continue
            parts = [
                tensors[k] if k in tensors else like.new_zeros(shapes[k])
                for tensors, shapes in zip(found, self._entered, strict=True)
            ]
            whole.append(torch.cat(parts) if m > 1 else parts[0])
        return whole

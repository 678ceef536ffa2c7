"""One forward of a `pipeexec.GPipe`, and the backward that may follow it.

The host issues tasks and messages to streams: forwards by the clock cycle, recomputes and backwards
as the autograd engine comes to their nodes (`pipeexec.gpipe.backward_order`). What they do with
tensors is in `pipeexec.gpipe.partition_tasks`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from pipeexec.devices import clocks
from pipeexec.devices.streams import Event, wait_for
from pipeexec.devices.thread_settings import one_thread
from pipeexec.gpipe.backward_order import in_cycles, in_order, joined, link, undirected
from pipeexec.gpipe.clock_cycles import clock_cycles
from pipeexec.gpipe.message_streams import Lane, Lanes, lanes
from pipeexec.gpipe.partition_tasks import Done, Tensors, Work
from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["CALLER", "COMPUTE", "WORTH_A_THREAD", "Call"]

#: Streams that compute: one that a device has, or that which is whoever gives it work.
COMPUTE, CALLER = "compute", "caller"
#: Seconds of a forward from which on a thread is worth having: below, threads that take Python's
#: lock from each other cost more than they gain (``benchmarks/peers_gpipe.py``).
WORTH_A_THREAD = 300e-6


class Call:
    """One forward, and its backward.

    Parameters
    ----------
    work
        What is to be run.
    stream
        The one of each device that computes.

    Attributes
    ----------
    clock, began, ended
        When each task and message began and ended.
    order
        Backwards and recomputes, as they were issued.
    """

    def __init__(self, work: Work, stream: str = COMPUTE) -> None:
        self.work, self.machine = work, work.machine
        self.clock: clocks.Clocks | None = None
        self.began: dict[Done, Event] = {}
        self.ended: dict[Done, Event] = {}
        self.order: list[tuple[Op, int, int]] = []
        self.has_failed = False
        # The caller's thread computes and moves all, or gives both to other streams.
        self._stream, self._copies = stream, work.machine.copy_streams and stream != CALLER
        self._around = one_thread if stream == CALLER else nullcontext
        self._streams = [device.stream(stream) for device in self.machine.devices]
        self._works = {Op.F: work.forward, Op.R: work.recompute, Op.B: work.backward}
        self._error: BaseException | None = None  # what failed first, until it is raised
        self._has_gone_back = self._is_done = False
        self._last: dict[int, Event] = {}  # of each partition
        # Of two partitions: the messages that were sent from one to the other, but not received.
        self._channels: dict[tuple[int, int], deque[tuple[int, Lane, Done]]] = defaultdict(deque)
        self._lanes: dict[Op, Lanes] = {}
        self._entered: Sequence[Sequence[torch.Size]] = ()

    # Forward

    def run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        """Run all micro-batches through all partitions; return what they became, as one.

        It is one tensor if the first of what is returned says so, else a tuple.
        """
        try:
            return self._run(inputs, microbatches, atomic)
        except BaseException:  # an interrupt, too
            self.has_failed = True
            self.forget()
            raise

    def _run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        m, n = len(microbatches), len(self.machine.stages)
        self.clock = clocks.start(self.machine.devices)
        self._entered = [[x.shape for x in tensors] for tensors in microbatches]
        for x in inputs:
            self.machine.devices[0].adopt(x, self._streams[0])
        for i, tensors in enumerate(microbatches):
            self.work.enter(i, tensors, atomic)
        with self._around():
            for i, j in chain.from_iterable(clock_cycles(m, n)):
                self._issue(Op.F, i, j)
        leave = self._linked(inputs) if self.work.tracked else joined  # while devices work
        self._rejoin()
        made = self._taken(n - 1, [(Op.F, i, n - 1) for i in range(m)])
        is_atomic = all(self.work.is_atomic(i) for i in range(m))
        return is_atomic, leave([tuple(tensors.values()) for tensors in made])

    def _rejoin(self) -> None:
        """Let the caller go on once all devices have: what it does then may concern each."""
        for j, event in self._last.items():
            self.machine.devices[j].rejoin(event)
        self._check()

    def _taken(self, j: int, which: Sequence[tuple[Op, int, int]]) -> list[Tensors]:
        """Return what partition ``j`` has made, for the caller to use."""
        made = [self.work.take(*each) for each in which]
        values = tuple(x for tensors in made for x in tensors.values())
        self.machine.devices[j].rejoin(self._last[j], values)
        return made

    def _linked(
        self, inputs: tuple[Tensor, ...]
    ) -> Callable[[Sequence[tuple[Tensor, ...]]], tuple[Tensor, ...]]:
        """Make the graph that gives the backward its order."""
        machine, recomputed, tracked = self.machine, self.work.recomputed, self.work.tracked
        if machine.dependencies:
            cycles = clock_cycles(len(recomputed), len(machine.stages))
            kept = [[cell for cell in cycle if cell[1] in tracked] for cycle in cycles]
            return link(self, inputs, partial(in_cycles, self, kept, recomputed))
        tasks = undirected(len(machine.stages), recomputed, machine.seed, machine.schedule)
        kept_tasks = [task for task in tasks if task[2] in tracked]
        return link(self, inputs, partial(in_order, self, kept_tasks))

    def _issue(self, op: Op, i: int, j: int) -> None:
        """Give a task to its stream, what arrives for it before, and what leaves after it."""
        arriving, leaving = self._lanes_of(op)
        if op == Op.R and self.machine.recompute_waits:
            arriving = self._lanes_of(Op.B).arriving
        needed = [self._received(i, lane) for lane in arriving[j]]
        done = op, j, i, None
        began, ended = self._streams[j].run(partial(self._guarded, self._works[op], i, j), needed)
        self.began[done], self.ended[done], self._last[j] = began, ended, ended
        for lane in leaving[j]:
            self._send(i, lane, ended)

    def _lanes_of(self, op: Op) -> Lanes:
        """Return the lanes of F, or of B, made on first use; R has none."""
        if op not in self._lanes:
            machine, tracked = self.machine, self.work.tracked
            ways, partitions = (
                (machine.forward, range(len(machine.stages)))
                if op == Op.F
                else (machine.backward, tracked if op == Op.B else ())
            )
            self._lanes[op] = lanes(
                op, ways, machine.devices, self._stream,
                copy_streams=self._copies, partitions=partitions,
            )  # fmt: skip
        return self._lanes[op]

    def _send(self, i: int, lane: Lane, made: Event) -> None:
        """Give the sender's end of a message to its stream, behind what ``made`` it."""
        source, target, _ = lane.route
        sent = lane.send, source, i, lane.ahead
        work = partial(self._guarded, self.work.part, i, lane, sent)
        self.began[sent], self.ended[sent] = lane.sends.run(work, (made,))
        if not self._copies:
            self._last[source] = self.ended[sent]
        self._channels[source, target].append((i, lane, sent))

    def _received(self, i: int, lane: Lane) -> Event:
        """Return when a message is there: it is received behind those that were sent before."""
        source, target, _ = lane.route
        done = lane.recv, target, i, lane.behind
        while done not in self.ended:
            self._receive(*self._channels[source, target].popleft())
        return self.ended[done]

    def _receive(self, i: int, lane: Lane, sent: Done) -> None:
        """Give the receiver's end of a message to its stream."""
        done = lane.recv, lane.route.target, i, lane.behind
        work = partial(self._guarded, self.work.land, i, lane, sent)
        self.began[done], self.ended[done] = lane.receives.run(work, (self.ended[sent],))

    def forward_seconds(self) -> float:
        """Return how long a forward takes: the fastest of each partition, on average."""
        n = len(self.machine.stages)
        seconds = [
            min(self.ended[done].seconds_since(self.began[done]) for done in each)
            for each in (
                [(Op.F, j, i, None) for i in range(len(self.work.recomputed))] for j in range(n)
            )
        ]
        return sum(seconds) / n

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run a task, unless another has failed."""
        if self.has_failed:
            return
        try:
            work(*arguments)
        except BaseException as error:
            self.has_failed, self._error = True, error

    # Where host and streams meet

    def _check(self) -> None:
        """Raise what went wrong, as it was, once no thread works on this call any longer.

        It is not kept: its traceback knows the graph, which knows this call.
        """
        if self.has_failed:
            self.forget()
            error, self._error = self._error, None
            raise error or ExecutionError("this forward of GPipe has failed; run it again")

    def settle(self) -> None:
        """Wait until every device is through with what was issued."""
        for event in list(self._last.values()):
            wait_for(event)

    def forget(self) -> None:
        """Drop what a backward would need: there will be none any more.

        Threads of CPU workers still use it; kernels of a GPU need its memory only, which the
        allocator keeps. So the caller waits for the former, not for the latter.
        """
        if self._is_done:
            return
        for j, event in list(self._last.items()):
            self.machine.devices[j].wait_for_host(event)
        self._is_done = True
        self.work.forget()

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
        for device in self.machine.devices:
            device.mark()  # what follows comes behind what the caller has made and changed
        for i, given in enumerate(gradients):
            self.work.go_back(i, given, self._streams[-1])
        Variable._execution_engine.queue_callback(self._came_back)

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of a micro-batch in a partition."""
        self._check()
        self.order.append((op, j, i))
        with self._around():
            self._issue(op, i, j)

    def _came_back(self) -> None:
        self._rejoin()
        self._is_done = True
        self.work.drop()

    def entry_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the mini-batch's inputs, once they are there."""
        m = len(self._entered)
        self.machine.devices[0].rejoin(self._last[0])
        self._check()
        found = self._taken(0, [(Op.B, i, 0) for i in range(m)])
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

"""One forward of a `pipeexec.GPipe`, its backward, and the measured times of its tasks.

The host issues tasks and messages to streams. Forwards are issued by clock cycle, recomputes and
backwards when the autograd engine reaches their nodes (`pipeexec.gpipe.backward_order`). The tasks
themselves are in `pipeexec.gpipe.partition_tasks`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from pipeexec.devices import clocks
from pipeexec.devices.streams import Event, wait_for
from pipeexec.devices.thread_settings import one_thread
from pipeexec.gpipe.backward_order import (
    PartitionTask,
    clock_cycles,
    join_gradients,
    join_outputs,
    link_backward,
    link_cycles,
    link_tasks,
    unordered_backward,
)
from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipeexec.gpipe.partition import (
    MessageStreams,
    MessageStreamsByPartition,
    Runtime,
    message_streams,
)
from pipeexec.gpipe.partition_tasks import PartitionTasks, SlotTensors, TaskKey
from pipeexec.stages.module_call import next_seed, use_seed
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import Action, Op
from pipesim.scheduling.autograd_engine import newest_first
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

#: Names of streams that compute: a separate stream of the device, or the calling thread.
COMPUTE, CALLER = "compute", "caller"


class Call:
    """One forward, and its backward, on the stream of each device named ``stream``.

    Attributes
    ----------
    start_events, end_events
        Events at the start and end of each task and message.
    order
        Recomputes and backwards in the order in which they were issued: operation, partition,
        micro-batch.
    has_failed
        Whether a task failed, or the forward was interrupted.
    """

    def __init__(self, tasks: PartitionTasks, stream: str = COMPUTE) -> None:
        self.tasks, self.runtime = tasks, tasks.runtime
        self.clock: clocks.Clocks | None = None
        self.start_events: dict[TaskKey, Event] = {}
        self.end_events: dict[TaskKey, Event] = {}
        self.order: list[tuple[Op, int, int]] = []
        self.has_failed = False
        # The caller's thread runs all tasks and messages, or other streams run both.
        self._stream = stream
        self._copy_streams = self.runtime.switches.copy_streams and stream != CALLER
        self._thread_context = one_thread if stream == CALLER else nullcontext
        self._streams = [device.stream(stream) for device in self.runtime.devices]
        self._run_task = {Op.F: tasks.forward, Op.R: tasks.recompute, Op.B: tasks.backward}
        self._error: BaseException | None = None  # the first failure, until it is raised
        self._has_begun_backward = self._is_done = False
        self._last_event: dict[int, Event] = {}  # by partition
        # By source and target partition: messages that were sent, but not received.
        self._channels: dict[tuple[int, int], deque[tuple[int, MessageStreams, TaskKey]]]
        self._channels = defaultdict(deque)
        self._message_streams: dict[Op, MessageStreamsByPartition] = {}
        self._input_shapes: Sequence[Sequence[torch.Size]] = ()

    # Forward

    def run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        """Run all micro-batches through all partitions; return the outputs of the mini-batch.

        The first value returned says whether the outputs are one tensor, not a tuple.
        """
        try:
            return self._run(inputs, microbatches, atomic)
        except BaseException:  # interrupts too
            self.has_failed = True
            self.forget()
            raise

    def _run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        m, n = len(microbatches), len(self.runtime.stages)
        self.clock = clocks.start(self.runtime.devices)
        self._input_shapes = [[x.shape for x in tensors] for tensors in microbatches]
        for x in inputs:
            self.runtime.devices[0].adopt(x, self._streams[0])
        for i, tensors in enumerate(microbatches):
            self.tasks.put_microbatch(i, tensors, atomic)
        with self._thread_context():
            for i, j in chain.from_iterable(clock_cycles(m, n)):
                self._issue(Op.F, i, j)
        # The graph is made while devices work.
        leave = self._link(inputs) if self.tasks.tracked else join_outputs
        self._rejoin()
        outputs = self._pop_results(n - 1, [(Op.F, i, n - 1) for i in range(m)])
        is_atomic = all(self.tasks.pop_is_atomic(i) for i in range(m))
        return is_atomic, leave([tuple(tensors.values()) for tensors in outputs])

    def _rejoin(self) -> None:
        """Order the caller behind all devices: the caller may use or change what they used."""
        for j, event in self._last_event.items():
            self.runtime.devices[j].rejoin(event)
        self._raise_failure()

    def _pop_results(self, j: int, tasks: Sequence[PartitionTask]) -> list[SlotTensors]:
        """Return the results of tasks of partition ``j``, for the caller to use."""
        results = [self.tasks.pop_result(*task) for task in tasks]
        values = tuple(x for tensors in results for x in tensors.values())
        self.runtime.devices[j].rejoin(self._last_event[j], values)
        return results

    def _link(
        self, inputs: tuple[Tensor, ...]
    ) -> Callable[[Sequence[tuple[Tensor, ...]]], tuple[Tensor, ...]]:
        """Make the autograd graph that orders the backward."""
        n, switches = len(self.runtime.stages), self.runtime.switches
        recomputed, tracked = self.tasks.recomputed, self.tasks.tracked
        if switches.dependencies:
            cycles = clock_cycles(len(recomputed), n)
            kept = [[cell for cell in cycle if cell[1] in tracked] for cycle in cycles]
            return link_backward(self, inputs, partial(link_cycles, kept, recomputed))
        order = unordered_backward(n, recomputed, switches.backward_seed, switches.backward_order)
        tasks = [task for task in order if task[2] in tracked]
        return link_backward(self, inputs, partial(link_tasks, tasks))

    def _issue(self, op: Op, i: int, j: int) -> None:
        """Issue a task, the messages that it needs before it, and its results' messages after."""
        incoming, outgoing = self._streams_of(op)
        if op == Op.R and self.runtime.switches.recompute_waits:
            incoming = self._streams_of(Op.B).incoming
        needed = [self._arrival(i, streams) for streams in incoming[j]]
        task = partial(self._run_unless_failed, self._run_task[op], i, j)
        key = op, j, i, None
        start, end = self._streams[j].run(task, needed)
        self.start_events[key], self.end_events[key], self._last_event[j] = start, end, end
        for streams in outgoing[j]:
            self._send(i, streams, end)

    def _streams_of(self, op: Op) -> MessageStreamsByPartition:
        """Return the streams of the messages of F or B, made on first use; R has no messages."""
        if op not in self._message_streams:
            runtime, tracked = self.runtime, self.tasks.tracked
            routes, partitions = (
                (runtime.forward_routes, range(len(runtime.stages)))
                if op == Op.F
                else (runtime.backward_routes, tracked if op == Op.B else ())
            )
            self._message_streams[op] = message_streams(
                op, routes, runtime.devices, self._stream,
                copy_streams=self._copy_streams, partitions=partitions,
            )  # fmt: skip
        return self._message_streams[op]

    def _send(self, i: int, streams: MessageStreams, produced: Event) -> None:
        """Issue the SEND of a message, behind the event ``produced`` of its task."""
        source, target, _ = streams.route
        key = streams.send_op, source, i, streams.send_peer
        send = partial(self._run_unless_failed, self.tasks.send, i, streams, key)
        self.start_events[key], self.end_events[key] = streams.send_stream.run(send, (produced,))
        if not self._copy_streams:
            self._last_event[source] = self.end_events[key]
        self._channels[source, target].append((i, streams, key))

    def _arrival(self, i: int, streams: MessageStreams) -> Event:
        """Return the event at the end of a RECV; RECVs are issued in the order of their SENDs."""
        source, target, _ = streams.route
        key = streams.recv_op, target, i, streams.recv_peer
        while key not in self.end_events:
            self._receive(*self._channels[source, target].popleft())
        return self.end_events[key]

    def _receive(self, i: int, streams: MessageStreams, send: TaskKey) -> None:
        key = streams.recv_op, streams.route.target, i, streams.recv_peer
        receive = partial(self._run_unless_failed, self.tasks.receive, i, streams, send)
        start, end = streams.recv_stream.run(receive, (self.end_events[send],))
        self.start_events[key], self.end_events[key] = start, end

    def forward_seconds(self) -> float:
        """Return the time of a forward (s): the fastest of each partition, averaged."""
        n, m = len(self.runtime.stages), len(self.tasks.recomputed)
        fastest = [
            min(
                self.end_events[key].seconds_since(self.start_events[key])
                for key in ((Op.F, j, i, None) for i in range(m))
            )
            for j in range(n)
        ]
        return sum(fastest) / n

    def _run_unless_failed(self, task: Callable[..., None], *arguments: Any) -> None:
        if self.has_failed:
            return
        try:
            task(*arguments)
        except BaseException as error:
            self.has_failed, self._error = True, error

    # Where the host meets the streams

    def _raise_failure(self) -> None:
        """Raise the first failure, if any, once no thread works on this call.

        The error is not kept: its traceback refers to the graph, which refers to this call.
        """
        if self.has_failed:
            self.forget()
            error, self._error = self._error, None
            raise error or ExecutionError("this forward of GPipe has failed; run it again")

    def wait(self) -> None:
        """Wait until every device has run all that was issued."""
        for event in list(self._last_event.values()):
            wait_for(event)

    def forget(self) -> None:
        """Drop the tensors that a backward would need: no backward will come.

        The host waits for threads of CPU workers, which still use them. It does not wait for
        kernels of a GPU: they need the memory only, which the allocator keeps.
        """
        if self._is_done:
            return
        for j, event in list(self._last_event.items()):
            self.runtime.devices[j].wait_for_host(event)
        self._is_done = True
        self.tasks.forget()

    # Backward: called by the nodes of its graph

    def begin(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Take the gradients of the outputs; let the end of the backward wait for the devices."""
        self._raise_failure()
        if not Variable._execution_engine.is_checkpoint_valid():
            raise ExecutionError(
                "the backward of GPipe adds to the .grad of its parameters: call backward() "
                "without inputs=, instead of torch.autograd.grad()"
            )
        if self._has_begun_backward:
            raise ExecutionError(
                "a second backward through one forward of GPipe: the activations are gone; run the "
                "forward again, or add up the losses and call backward() once"
            )
        self._has_begun_backward = True
        for device in self.runtime.devices:
            device.mark()  # tasks issued from here on come after the caller's own work
        for i, output_gradients in enumerate(gradients):
            self.tasks.put_gradients(i, output_gradients, self._streams[-1])
        Variable._execution_engine.queue_callback(self._finish_backward)

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of a micro-batch in a partition."""
        self._raise_failure()
        self.order.append((op, j, i))
        with self._thread_context():
            self._issue(op, i, j)

    def _finish_backward(self) -> None:
        self._rejoin()
        self._is_done = True
        self.tasks.drop_results()
        for stage in self.runtime.stages:
            stage.end_step()

    def entry_gradients(self) -> list[Tensor | None]:
        """Wait for the gradients of the mini-batch's inputs, and return them."""
        self.runtime.devices[0].rejoin(self._last_event[0])
        self._raise_failure()
        tasks = [(Op.B, i, 0) for i in range(len(self._input_shapes))]
        return join_gradients(self._pop_results(0, tasks), self._input_shapes)


class ForwardRunner:
    """Runs the forwards of a module.

    With several micro-batches, each partition that draws random numbers gets a seed for each
    micro-batch. Whether a partition draws is known after its first forward. If the generator has
    moved in a forward, a partition drew without a seed; the forward is then run a second time,
    with seeds for all partitions. Recomputes would draw other numbers otherwise.
    """

    def __init__(self) -> None:
        # Whether other code draws from the process's generator while a forward runs: a generator
        # that moved then says nothing about partitions.
        self._others_draw = False

    def run(
        self,
        runtime: Runtime,
        stream: str,
        inputs: tuple[Tensor, ...],
        microbatches: Sequence[tuple[Tensor, ...]],
        recomputed: Sequence[bool],
        tracked: Sequence[int],
        batch_norms: Sequence[DeferredBatchNorm],
        *,
        atomic: bool,
    ) -> tuple[Call, bool, tuple[Tensor, ...]]:
        """Run a forward; return its call, whether the output is one tensor, and the outputs.

        ``tracked`` are the partitions that have a backward. Running statistics of ``batch_norms``
        are restored if the forward fails. An ``atomic`` input is one tensor, not a tuple.
        """
        several = len(microbatches) > 1
        seed = next_seed() if several and runtime.draws_random(unknown=True) else None
        repeats = several and bool(tracked) and any(recomputed) and not self._others_draw
        states = runtime.random_states() if repeats else None
        call = Call(PartitionTasks(runtime, recomputed, seed, tracked), stream)
        try:
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
        except BaseException:
            for norm in batch_norms:  # early partitions may have run the whole mini-batch
                norm.undo()
            raise
        if states is not None and runtime.restore_random_states(states):
            call.wait()
            buffers = call.tasks.first_buffers()
            call.forget()
            seed = next_seed()
            call = Call(PartitionTasks(runtime, recomputed, seed, tracked, buffers), stream)
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
            self._others_draw = not runtime.draws_random(unknown=False)  # no partition had drawn
        if seed is not None and runtime.draws_random(unknown=False):
            use_seed()
        return call, is_atomic, outputs


def forward_backward_graph(
    m: int,
    backward: Sequence[Sequence[tuple[Op, int]]],
    *,
    skips: Iterable[tuple[int, int]],
    overlap: bool,
    portals: bool,
    recompute_waits: bool,
) -> TaskGraph:
    """Return the tasks of a forward and a backward of ``m`` micro-batches.

    ``backward`` has R and B of each partition, in order: operation and micro-batch. See
    `pipesim.lower` for the other parameters.
    """
    schedule = Schedule.from_orders(
        [
            [Action(j, Op.F, i) for i in range(m)] + [Action(j, op, i) for op, i in order]
            for j, order in enumerate(backward)
        ],
        placement=Placement.linear(len(backward)),
        name="gpipe",
    )
    return lower(
        schedule,
        overlap=overlap,
        step="none",
        skips=set(skips),
        portals=portals,
        recompute_waits=recompute_waits,
    )


def backward_by_partition(
    n_partitions: int, recomputed: Sequence[bool], tasks: Iterable[PartitionTask]
) -> list[list[tuple[Op, int]]]:
    """Return R and B of each partition, in the order of ``tasks``: operation and micro-batch.

    A partition without tasks needs no gradient. It gets the tasks of the order that the
    dependencies give.
    """
    orders: list[list[tuple[Op, int]]] = [[] for _ in range(n_partitions)]
    for op, i, j in tasks:
        orders[j].append((op, i))
    default = [
        (op, i) for op, i, _ in newest_first([(i, 0) for i in range(len(recomputed))], recomputed)
    ]
    return [order or default for order in orders]


def measured_timeline(call: Call, graph: TaskGraph) -> Timeline:
    """Wait for all tasks, and return their times; NaN for tasks that did not run."""
    call.wait()
    assert call.clock is not None
    start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    nbytes = np.zeros(len(graph))
    for index in range(len(graph)):
        task = graph.task(index)
        assert task.microbatch is not None
        peer = None if task.peer_stage < 0 else task.peer_stage
        key = task.op, task.stage, task.microbatch, peer
        if key in call.end_events and call.end_events[key].is_set():
            start[index] = call.clock.seconds(task.device, call.start_events[key])
            end[index] = call.clock.seconds(task.device, call.end_events[key])
            nbytes[index] = call.tasks.nbytes.get(key, 0)
    sent = np.flatnonzero(graph.pair >= 0)
    nbytes[sent] = np.maximum(nbytes[sent], nbytes[graph.pair[sent]])
    return Timeline(graph, start, end, nbytes)

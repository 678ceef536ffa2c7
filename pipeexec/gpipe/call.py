"""One forward of a `pipeexec.GPipe`, its backward, and the measured times of its tasks.

A call is a step of the executor whose tasks are issued one by one: forwards by clock cycle,
recomputes and backwards when the autograd engine reaches their nodes
(`pipeexec.gpipe.backward_order`). The tasks themselves are in `pipeexec.gpipe.partition_tasks`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from threading import Thread

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from pipeexec.devices.cuda import CudaStream
from pipeexec.devices.device import has_launches
from pipeexec.devices.streams import Event, wait_for
from pipeexec.devices.thread_settings import one_thread
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step import Step
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
from pipeexec.gpipe.call_plan import CALLER, COMPUTE, make_call_plan
from pipeexec.gpipe.engine_graph import link_engine
from pipeexec.gpipe.hosts import CallHosts
from pipeexec.gpipe.leaf_gradients import Leaves, repeated_gradients, trainable_parameters
from pipeexec.gpipe.partition import Runtime
from pipeexec.gpipe.partition_tasks import PARTITIONS, CallTensors, SlotTensors
from pipeexec.gpipe.rendezvous import Rendezvous
from pipeexec.stages.module_call import next_seed, use_seed
from pipeexec.stages.recompute import Buffers
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline.timeline import Timeline


class Call:
    """One forward, and its backward, on the stream of each device named ``stream``.

    `CallTensors` has the other parameters.

    Attributes
    ----------
    order
        Recomputes and backwards in the order in which they were issued: operation, partition,
        micro-batch.
    """

    def __init__(
        self,
        runtime: Runtime,
        recomputed: Sequence[bool],
        seed: int | None,
        tracked: Sequence[int],
        again: Sequence[Buffers] | None = None,
        *,
        stream: str = COMPUTE,
    ) -> None:
        self.runtime = runtime
        form = tuple(recomputed), tuple(tracked), stream
        if form not in runtime.plans:
            runtime.plans[form] = make_call_plan(runtime, recomputed, tracked, stream)
        self.plan = runtime.plans[form]
        self.tensors = CallTensors(runtime, self.plan, stream, recomputed, seed, tracked, again)
        self.step = Step(self.plan.graph, runtime.devices)
        self.step.state[PARTITIONS] = self.tensors
        self.order: list[tuple[Op, int, int]] = []
        self._thread_context = one_thread if stream == CALLER else nullcontext
        self._streams = [device.stream(stream) for device in runtime.devices]
        self._has_begun_backward = self._is_done = False
        self._submitted: list[Sequence[PlannedTask]] = []
        # By source and target partition: RECVs of messages that were sent, but not received.
        self._channels: dict[tuple[int, int], deque[PlannedTask]] = defaultdict(deque)
        self._unreceived: set[int] = set()  # the RECVs of all channels
        self._rendezvous = (
            Rendezvous(
                {send: message.recv for send, message in self.plan.messages.items()},
                {task.stage.index: task.id for task in self.plan.forward},
                len(self._streams),
            )
            if self.plan.graph.rendezvous
            else None
        )
        has_hosts = runtime.switches.hosts != "one"
        self._hosts = (
            CallHosts(self.step, runtime.devices, has_hosts)
            if has_hosts or any(map(has_launches, runtime.devices))
            else None
        )
        self._input_shapes: Sequence[Sequence[torch.Size]] = ()
        self._leaves: Leaves | None = None  # as long as a backward may come
        self._keeps_graph = self._repeats = False  # of the present backward
        self._output_gradients: Sequence[Sequence[Tensor | None]] = ()  # if it repeats the forward

    @property
    def has_failed(self) -> bool:
        """Whether a task failed, or the forward was interrupted."""
        return self.step.failure is not None

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
            if self.step.failure is None:
                self.step.failure = -1, _has_failed()
            self.forget()
            raise

    def _run(
        self, inputs: tuple[Tensor, ...], microbatches: Sequence[tuple[Tensor, ...]], atomic: bool
    ) -> tuple[bool, tuple[Tensor, ...]]:
        n = len(self.runtime.stages)
        self.step.events.start()
        self._input_shapes = [[x.shape for x in tensors] for tensors in microbatches]
        for x in inputs:
            self.runtime.devices[0].adopt(x, self._streams[0])
        for i, tensors in enumerate(microbatches):
            self.tensors.put_microbatch(i, tensors, atomic)
        with self._thread_context():
            self._submit(self.plan.forward)
        # The graph is made while devices work.
        leave: Callable[[Sequence[tuple[Tensor, ...]]], tuple[Tensor, ...]] = join_outputs
        if self.tensors.tracked:
            partitions = self.runtime.partitions
            parameters = {j: trainable_parameters(partitions[j]) for j in self.tensors.tracked}
            if not any(parameters.values()) and not any(x.requires_grad for x in inputs):
                # Parameters are results, such as those of torch.func.functional_call.
                parameters[self.tensors.tracked[0]] = [torch.empty(0, requires_grad=True)]
            self._leaves = Leaves(inputs, atomic, parameters)
            leave = self._link(self._leaves)
        self._rejoin()
        if self._leaves is not None:
            self._leaves.note_versions()
        outputs = self._pop_results(n - 1, [(Op.F, i, n - 1) for i in range(len(microbatches))])
        is_atomic = all(self.tensors.pop_is_atomic(i) for i in range(len(microbatches)))
        return is_atomic, leave([tuple(tensors.values()) for tensors in outputs])

    def _rejoin(self) -> None:
        """Order the caller behind all devices: the caller may use or change what they used."""
        for j, event in self._last_events():
            self.runtime.devices[j].rejoin(event)
        self._raise_failure()

    def _last_events(self) -> list[tuple[int, Event]]:
        """Return the end of each partition's last task on the stream that computes, if any."""
        if self._hosts is not None:
            self._hosts.wait()
        last: dict[int, Event] = {}
        for task in chain.from_iterable(map(reversed, reversed(self._submitted))):
            j, event = task.stage.index, self.step.events.end_events[task.id]
            # An interrupt may have come before the task was submitted.
            if j not in last and task.stream is self._streams[j] and event is not None:
                last[j] = event
                if len(last) == len(self._streams):
                    break
        return list(last.items())

    def _pop_results(self, j: int, tasks: Sequence[PartitionTask]) -> list[SlotTensors]:
        """Return the results of tasks of partition ``j``, for the caller to use."""
        results = [self.tensors.pop_result(*task) for task in tasks]
        values = tuple(x for tensors in results for x in tensors.values())
        self.runtime.devices[j].rejoin(dict(self._last_events())[j], values)
        return results

    def _link(self, leaves: Leaves) -> Callable[[Sequence[tuple[Tensor, ...]]], tuple[Tensor, ...]]:
        """Make the autograd graph that orders the backward."""
        n, switches = len(self.runtime.stages), self.runtime.switches
        recomputed, tracked = self.tensors.recomputed, self.tensors.tracked
        run = self._run_on_streams
        if switches.dependencies:
            cycles = clock_cycles(len(recomputed), n)
            kept = [[cell for cell in cycle if cell[1] in tracked] for cycle in cycles]
            nodes = partial(link_cycles, kept, recomputed)
        elif switches.backward_seed is None and switches.backward_order is None:
            devices = [stage.device for stage in self.runtime.stages]
            nodes = partial(link_engine, recomputed, tracked, devices)
            if not leaves.needs_input_gradients:  # torchgpipe's caller then has no such node
                run = self._run_in_thread
        else:
            seed, schedule = switches.backward_seed, switches.backward_order
            order = unordered_backward(n, recomputed, seed, schedule)
            nodes = partial(link_tasks, [task for task in order if task[2] in tracked])
        return link_backward(self, leaves.inputs, nodes, leaves.all_parameters, run)

    def _run_on_streams(self, make: Callable[[], Tensor]) -> Tensor:
        """Make a node of the parameters: their accumulated gradients belong to streams of GPUs."""
        streams = [x.stream for x in self._streams if isinstance(x, CudaStream)]
        if not streams:
            return make()
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return make()

    def _run_in_thread(self, make: Callable[[], Tensor]) -> Tensor:
        """Make a node that is not numbered among those of the calling thread."""
        phonies: list[Tensor] = []
        thread = Thread(target=lambda: phonies.append(self._run_on_streams(make)))
        thread.start()
        thread.join()
        return phonies[0]

    def _issue(self, op: Op, i: int, j: int) -> None:
        """Issue a task, the messages that it needs before it, and its results' messages after.

        RECVs are issued in the order of their SENDs.
        """
        plan, cell = self.plan, (op, i, j)
        tasks: list[PlannedTask] = []
        for needed in plan.received[cell]:
            channel = self._channels[plan.senders[needed.id], j]
            while needed.id in self._unreceived:
                tasks.append(recv := channel.popleft())
                self._unreceived.remove(recv.id)
        tasks += plan.issued[cell]
        if self._rendezvous is None:
            self._submit(tasks)
        else:
            self._rendezvous.put(j, tasks, self._submit)
        for send in plan.issued[cell][1:]:
            recv = plan.messages[send.id].recv
            self._channels[j, recv.stage.index].append(recv)
            self._unreceived.add(recv.id)

    def _submit(self, tasks: Sequence[PlannedTask]) -> None:
        """Submit tasks, which may be of several partitions, or let hosts do so."""
        if self._hosts is None:
            self._submit_here(tasks)
        else:
            self._hosts.put(tasks, self._submit_here)

    def _submit_here(self, tasks: Sequence[PlannedTask]) -> None:
        """Submit tasks from the calling thread."""
        self._submitted.append(tasks)
        self.step.submit(tasks)

    def forward_seconds(self) -> float:
        """Return the time of a forward (s): the fastest of each partition, averaged."""
        n, m = len(self.runtime.stages), len(self.tensors.recomputed)
        fastest = [min(self._seconds(Op.F, i, j) for i in range(m)) for j in range(n)]
        return sum(fastest) / n

    def _seconds(self, op: Op, i: int, j: int) -> float:
        events, t = self.step.events, self.plan.issued[op, i, j][0].id
        start, end = events.start_events[t], events.end_events[t]
        assert start is not None
        assert end is not None
        return end.seconds_since(start)

    # Where the host meets the streams

    def _raise_failure(self) -> None:
        """Raise the first failure, if any, once no thread works on this call.

        The error is not kept: its traceback refers to the graph, which refers to this call.
        """
        if self.step.failure is not None:
            self.forget()
            task, error = self.step.failure
            self.step.failure = task, _has_failed()
            raise error

    def wait(self) -> None:
        """Wait until every device has run all that was issued."""
        for _, event in self._last_events():
            wait_for(event)

    def forget(self) -> None:
        """Drop the tensors that a backward would need: no backward will come.

        The host waits for threads of CPU workers, which still use them. It does not wait for
        kernels of a GPU: they need the memory only, which the allocator keeps.
        """
        self._leaves = None
        if self._is_done:
            return
        for j, event in self._last_events():
            self.runtime.devices[j].wait_for_host(event)
        self._is_done = True
        self.tensors.forget()

    # Backward: called by the nodes of its graph

    def begin(self, gradients: Sequence[Sequence[Tensor | None]]) -> bool:
        """Take the gradients of the outputs; let the end of the backward wait for the devices.

        Return whether gradients of the leaves are to be returned.
        """
        self._raise_failure()
        if self._leaves is None:
            raise ExecutionError(
                "a second backward through one forward of GPipe: give the first one "
                "retain_graph=True, run the forward again, or add up the losses and call "
                "backward() once"
            )
        self._keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self._repeats = self._has_begun_backward or torch.is_grad_enabled()
        Variable._execution_engine.queue_callback(self._finish_backward)
        if self._repeats:
            self._output_gradients = gradients
            return True
        self._has_begun_backward = True
        parameters = self._leaves.parameters
        collects = not Variable._execution_engine.is_checkpoint_valid()  # asked for some gradients
        if collects or self._leaves.have_hooks():
            self.tensors.collected = {j: dict.fromkeys(own) for j, own in parameters.items()}
        for device in self.runtime.devices:
            device.mark()  # tasks issued from here on come after the caller's own work
        for i, output_gradients in enumerate(gradients):
            self.tensors.put_gradients(i, output_gradients, self._streams[-1])
        return bool(self.tensors.collected) or self._leaves.needs_input_gradients

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of a micro-batch in a partition."""
        if self._repeats:
            return
        self._raise_failure()
        self.order.append((op, j, i))
        with self._thread_context():
            self._issue(op, i, j)

    def _finish_backward(self) -> None:
        if not self._keeps_graph:
            self._leaves = None
        self._output_gradients = ()
        if self._repeats:
            return
        self._rejoin()
        self._is_done = True
        self.tensors.drop_results()
        for stage in self.runtime.stages:
            stage.end_step()

    def leaf_gradients(self) -> list[Tensor | None]:
        """Wait for the gradients of inputs and parameters, and return them."""
        leaves = self._leaves
        assert leaves is not None
        if self._repeats:
            return repeated_gradients(
                self.tensors, leaves, self._input_shapes, self._output_gradients
            )
        collected, last = self.tensors.collected, dict(self._last_events())
        for j in collected or (0,):
            values = tuple(collected.get(j, {}).values())
            self.runtime.devices[j].rejoin(last[j], values)
        self._raise_failure()
        gradients: list[Tensor | None] = [None] * len(leaves.inputs)
        if leaves.needs_input_gradients:
            tasks = [(Op.B, i, 0) for i in range(len(self._input_shapes))]
            gradients = join_gradients(self._pop_results(0, tasks), self._input_shapes)
        for j, own in leaves.parameters.items():
            gradients += [collected[j][x] for x in own] if collected else [None] * len(own)
        return gradients

    def timeline(self, graph: TaskGraph) -> Timeline:
        """Wait for all tasks, and return their times; NaN for tasks that did not run.

        ``graph`` has the tasks of this call in the order in which they were issued.
        """
        self.wait()
        own, events = self.plan.graph, self.step.events
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        number = {key: t for t, key in enumerate(_keys(own))}
        numbers = [number[key] for key in _keys(graph)]
        assert events.clock is not None
        for index, t in enumerate(numbers):
            first, last = events.start_events[t], events.end_events[t]
            if first is not None and last is not None and last.is_set():
                start[index] = events.clock.seconds(int(own.device[t]), first)
                end[index] = events.clock.seconds(int(own.device[t]), last)
        return Timeline(graph, start, end, events.nbytes[numbers])


def _keys(graph: TaskGraph) -> list[tuple[int, ...]]:
    """Return what tells each task of a graph from the others, whatever its order."""
    columns = (graph.op, graph.stage, graph.microbatch, graph.peer_stage)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _has_failed() -> ExecutionError:
    return ExecutionError("this forward of GPipe has failed; run it again")


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
        call = Call(runtime, recomputed, seed, tracked, stream=stream)
        try:
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
        except BaseException:
            for norm in batch_norms:  # early partitions may have run the whole mini-batch
                norm.undo()
            raise
        if states is not None and runtime.restore_random_states(states):
            call.wait()
            buffers = call.tensors.first_buffers()
            call.forget()
            seed = next_seed()
            call = Call(runtime, recomputed, seed, tracked, buffers, stream=stream)
            is_atomic, outputs = call.run(inputs, microbatches, atomic)
            self._others_draw = not runtime.draws_random(unknown=False)  # no partition had drawn
        if seed is not None and runtime.draws_random(unknown=False):
            use_seed()
        return call, is_atomic, outputs

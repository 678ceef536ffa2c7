"""Run the tasks of a `pipeexec.GPipe` on tensors: forward, recompute, backward, send, receive.

Tables pass tensors from task to task. A task takes its inputs from one table and puts its results
into another; a message moves results of its source to the inputs of its target. Streams call the
methods; each call is ordered behind the calls whose tensors it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeexec.devices import transfer
from pipeexec.devices.device import Values
from pipeexec.devices.streams import Stream
from pipeexec.devices.thread_settings import thread_settings
from pipeexec.gpipe.checkpoint import checkpointing, recomputing
from pipeexec.gpipe.partition import Form, MessageStreams, Runtime
from pipeexec.gpipe.skip import Key
from pipeexec.stages.module_call import default_state, task_seed
from pipeexec.stages.recompute import Buffers
from pipesim.ops import Op

#: A task, or an end of a message: operation, partition, micro-batch, and the partition at the other
#: end if it carries skips.
TaskKey = tuple[Op, int, int, int | None]
#: Tensors of a micro-batch in a partition, by the number of an output, or by the skip.
SlotTensors = dict[int | Key, Tensor]


class PartitionTasks:
    """Tasks and messages of one forward and its backward, with the tensors between them.

    Construct it in the thread of the caller: the caller's gradient mode, inference mode and
    autocast hold in all other threads.

    Parameters
    ----------
    recomputed
        For each micro-batch, whether its activations are dropped and recomputed.
    seed
        Seed of the random numbers of all tasks; None to draw from the process's generator.
    tracked
        Partitions that have a backward: the first that needs a gradient, and all after it.
    again
        Buffers of each partition if the forward was run before: it changes them, and leaves those
        of the partition as they are.

    Attributes
    ----------
    nbytes
        Bytes of each message that was sent, by its SEND.
    skip_bytes
        Bytes of each skip that was sent, in the largest micro-batch.
    """

    def __init__(
        self,
        runtime: Runtime,
        recomputed: Sequence[bool],
        seed: int | None,
        tracked: Sequence[int],
        again: Sequence[Buffers] | None = None,
    ) -> None:
        self.runtime, self.recomputed, self.tracked = runtime, list(recomputed), tracked
        self.nbytes: dict[TaskKey, int] = {}
        self.skip_bytes: dict[Key, int] = {}
        self._first_key = next(runtime.call_numbers) << 32  # no call has more micro-batches
        self._seed, self._again = seed, again
        self._settings = thread_settings()
        # By operation (F or B), micro-batch and partition: inputs that have arrived, and results
        # that have not left.
        self._inputs: dict[tuple[Op, int, int], SlotTensors] = {}
        self._results: dict[tuple[Op, int, int], SlotTensors] = {}
        # By the SEND: messages in flight.
        self._in_flight: dict[TaskKey, tuple[Sequence[int | Key], Values]] = {}
        # By micro-batch and partition: whether the input is one tensor, the forms of inputs and
        # outputs, and the state of the random generator before the forward.
        self._is_atomic: dict[tuple[int, int], bool] = {}
        self._forms: dict[tuple[int, int], tuple[Form, Form]] = {}
        self._random_states: dict[tuple[int, int], Tensor] = {}

    # Input of the caller, and results for the caller

    def put_microbatch(self, i: int, tensors: Sequence[Tensor], atomic: bool) -> None:
        """Put the input of micro-batch ``i``: one tensor if it is ``atomic``, else a tuple."""
        self._inputs[Op.F, i, 0] = dict(enumerate(tensors))
        self._is_atomic[i, 0] = atomic

    def pop_result(self, op: Op, i: int, j: int) -> SlotTensors:
        """Return and remove the result of a task that no message takes."""
        return self._results.pop((op, i, j))

    def pop_is_atomic(self, i: int) -> bool:
        """Return whether the output of a micro-batch is one tensor, and forget it."""
        return self._is_atomic.pop((i, len(self.runtime.stages)))

    def put_gradients(self, i: int, gradients: Iterable[Tensor | None], stream: Stream) -> None:
        """Put the gradients of a micro-batch's outputs; ``stream`` computes with them."""
        tensors: SlotTensors = {k: x for k, x in enumerate(gradients) if x is not None}
        n = len(self.runtime.stages)
        transfer.receive(tuple(tensors.values()), self.runtime.devices[n - 1], stream)
        self._inputs[Op.B, i, n - 1] = tensors

    def drop_results(self) -> None:
        """Drop results that no task takes: gradients of inputs that need none."""
        self._results.clear()

    def first_buffers(self) -> list[Buffers]:
        """Return for each partition the buffers that forwards changed, as they were before.

        Partitions without a backward have kept none: copies of the present ones.
        """
        keys = [self._key(i) for i in range(len(self.recomputed))]
        return [
            stage.buffers.earliest(keys) if j in self.tracked else stage.buffers.present()
            for j, stage in enumerate(self.runtime.stages)
        ]

    def forget(self) -> None:
        """Drop the tensors that a backward would need."""
        for stage in self.runtime.stages:
            for i in range(len(self.recomputed)):
                stage.forget(self._key(i))
        tables = (self._inputs, self._results, self._in_flight, self._forms, self._random_states)
        for table in tables:
            table.clear()

    def _key(self, i: int) -> int:
        return self._first_key + i

    # Tasks, called by streams

    def send(self, i: int, streams: MessageStreams, task: TaskKey) -> None:
        """Run SEND ``task``: put results of the source into the memory of the target."""
        source, target, skips = streams.route
        results = self._results[streams.op, i, source]
        # SENDs of other streams pop from the same dictionary: a list is made in one call.
        slots = [slot for slot in list(results) if streams.route.carries(slot)]
        sent = {slot: results.pop(slot) for slot in slots}
        values = tuple(sent.values())
        self.nbytes[task] = transfer.nbytes(values)
        for slot, value in sent.items() if streams.op == Op.F and skips is not None else ():
            assert not isinstance(slot, int)
            self.skip_bytes[slot] = max(self.skip_bytes.get(slot, 0), value.nbytes)
        devices = self.runtime.devices
        moved = transfer.send(values, devices[source], streams.send_stream, devices[target])
        self._in_flight[task] = tuple(sent), moved

    def receive(self, i: int, streams: MessageStreams, send: TaskKey) -> None:
        """Run the RECV of ``send``: make the message safe to use on the compute stream."""
        target = streams.route.target
        slots, values = self._in_flight.pop(send)
        transfer.receive(values, self.runtime.devices[target], streams.compute_stream)
        inputs = self._inputs.setdefault((streams.op, i, target), {})
        inputs.update({k: x for k, x in zip(slots, values, strict=True) if x is not None})

    def forward(self, i: int, j: int) -> None:
        """Run F: the layers of a partition; keep the activations, or only the inputs, or none."""
        partition = self.runtime.partitions[j]
        inputs = self._inputs.pop((Op.F, i, j))
        skips = tuple(key for key in partition.popped_skips if key in inputs)
        n = sum(isinstance(slot, int) for slot in inputs)
        input_form = Form(self._is_atomic.pop((i, j)), n, skips)
        tensors = tuple(inputs.pop(slot) for slot in input_form.slots)
        with self.runtime.locks[j], self._settings(), recomputing(self._again is not None):
            partition.forms.inputs = input_form
            outputs = self._run_layers(i, j, tensors)
            form = partition.forms.outputs
        self._is_atomic[i, j + 1] = form.is_atomic
        if j in self.tracked:
            self._forms[i, j] = input_form, form
        results = inputs  # the rest: skips on their way to later partitions
        results.update({k: x for k, x in zip(form.slots, outputs, strict=True) if x is not None})
        self._results[Op.F, i, j] = results

    def _run_layers(self, i: int, j: int, tensors: tuple[Tensor, ...]) -> Values:
        """Return the outputs of a partition's layers, then the skips that they stash."""
        stage, seed = self.runtime.stages[j], self._task_seed(i, j)
        buffers = None if self._again is None else self._again[j]
        if j not in self.tracked:
            return stage.evaluate(self._key(i), tensors, seed, buffers)
        if not self.recomputed[i]:
            return stage.forward(self._key(i), tensors, seed, False, again=buffers)
        before = default_state(stage.device) if len(self.recomputed) == 1 else None
        with checkpointing():
            outputs = stage.forward(self._key(i), tensors, seed, True, again=buffers)
        if before is not None and not torch.equal(before, default_state(stage.device)):
            self._random_states[i, j] = before
        return outputs

    def _task_seed(self, i: int, j: int) -> int | None:
        """Return the seed of a forward, if it may draw random numbers of its micro-batch."""
        stage = self.runtime.stages[j]
        if self._seed is None or not stage.is_random.get(stage.module.training, True):
            return None
        return task_seed(self._seed, 0, j, i)

    def recompute(self, i: int, j: int) -> None:
        """Run R: the layers again, keeping the activations for the backward."""
        state = self._random_states.pop((i, j), None)
        seed = self._task_seed(i, j) if state is None else state
        with self.runtime.locks[j], self._settings(), recomputing():
            self.runtime.partitions[j].forms.inputs = self._forms[i, j][0]
            self.runtime.stages[j].recompute(self._key(i), seed)

    def backward(self, i: int, j: int) -> None:
        """Run B: accumulate gradients of a partition's parameters; keep those of its inputs."""
        input_form, output_form = self._forms.pop((i, j))
        gradients = self._inputs.pop((Op.B, i, j), {})
        output_gradients = tuple(gradients.pop(slot, None) for slot in output_form.slots)
        with self.runtime.locks[j]:
            input_gradients = self.runtime.stages[j].backward(self._key(i), output_gradients)
        gradients.update(
            {k: x for k, x in zip(input_form.slots, input_gradients, strict=True) if x is not None}
        )
        self._results[Op.B, i, j] = gradients

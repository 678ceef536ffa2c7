"""Run the tasks of a `pipeexec.GPipe` on tensors: forward, recompute, backward, send, receive.

The executor's steps run them (`pipeexec.executor.step`). A task takes the tensors that messages
brought, and keeps its results until messages take them. A tensor is named by the number of an
output, or by its skip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeexec.devices import transfer
from pipeexec.devices.device import Values
from pipeexec.devices.streams import Stream
from pipeexec.devices.thread_settings import thread_settings
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.gpipe.checkpoint import checkpointing, recomputing
from pipeexec.gpipe.leaf_gradients import ParameterGradients, collect_gradients
from pipeexec.gpipe.partition import Form, Runtime
from pipeexec.gpipe.skip import Key
from pipeexec.stages.module_call import default_state, task_seed
from pipeexec.stages.recompute import NO_CONTEXT, Buffers
from pipesim.ops import RECVS, SENDS, Op

if TYPE_CHECKING:
    from pipeexec.gpipe.call_plan import CallPlan

#: Tensors of a micro-batch in a partition, by the number of an output, or by the skip.
SlotTensors = dict[int | Key, Tensor]


class CallTensors:
    """Tensors and settings of one forward and its backward.

    Construct it in the thread of the caller: the caller's gradient mode, inference mode and
    autocast hold in all other threads.

    Parameters
    ----------
    stream
        Name of the stream of each device that computes.
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
    skip_bytes
        Bytes of each skip that was sent, in the largest micro-batch.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: CallPlan,
        stream: str,
        recomputed: Sequence[bool],
        seed: int | None,
        tracked: Sequence[int],
        again: Sequence[Buffers] | None = None,
    ) -> None:
        self.runtime, self.plan, self.stream = runtime, plan, stream
        self.recomputed, self.tracked = list(recomputed), tracked
        self.skip_bytes: dict[Key, int] = {}
        self._first_key = next(runtime.call_numbers) << 32  # no call has more micro-batches
        self._seed, self.again = seed, again
        self.settings = thread_settings()
        # By operation (F or B), micro-batch and partition: what the caller gives, until taken.
        self._call_inputs: dict[tuple[Op, int, int], SlotTensors] = {}
        # By task: results that no message, or what a message brought that no task, has taken.
        self._results: dict[int, SlotTensors] = {}
        # By micro-batch and partition: whether the input is one tensor, the forms of inputs and
        # outputs, and the state of the random generator before the forward.
        self.is_atomic: dict[tuple[int, int], bool] = {}
        self.forms: dict[tuple[int, int], tuple[Form, Form]] = {}
        self.random_states: dict[tuple[int, int], Tensor] = {}
        # By partition: gradients that B collects in place of adding them to ``.grad``.
        self.collected: dict[int, ParameterGradients] = {}

    # Input of the caller, and results for the caller

    def put_microbatch(self, i: int, tensors: Sequence[Tensor], atomic: bool) -> None:
        """Put the input of micro-batch ``i``: one tensor if it is ``atomic``, else a tuple."""
        self._call_inputs[Op.F, i, 0] = dict(enumerate(tensors))
        self.is_atomic[i, 0] = atomic

    def put_gradients(self, i: int, gradients: Iterable[Tensor | None], stream: Stream) -> None:
        """Put the gradients of a micro-batch's outputs; ``stream`` computes with them."""
        tensors: SlotTensors = {k: x for k, x in enumerate(gradients) if x is not None}
        last = len(self.runtime.stages) - 1
        transfer.receive(tuple(tensors.values()), self.runtime.devices[last], stream)
        self._call_inputs[Op.B, i, last] = tensors

    def pop_result(self, op: Op, i: int, j: int) -> SlotTensors:
        """Return and remove the result of a task that no message takes."""
        return self._results.pop(self.plan.issued[op, i, j][0].id)

    def pop_is_atomic(self, i: int) -> bool:
        """Return whether the output of a micro-batch is one tensor, and forget it."""
        return self.is_atomic.pop((i, len(self.runtime.stages)))

    def drop_results(self) -> None:
        """Drop results that no task takes, such as gradients of inputs that need none."""
        self._results.clear()
        self.collected.clear()

    def first_buffers(self) -> list[Buffers]:
        """Return for each partition the buffers that forwards changed, as they were before.

        Partitions without a backward have kept none: copies of the present ones.
        """
        keys = [self.key(i) for i in range(len(self.recomputed))]
        return [
            stage.buffers.earliest(keys) if j in self.tracked else stage.buffers.present()
            for j, stage in enumerate(self.runtime.stages)
        ]

    def forget(self) -> None:
        """Drop the tensors that a backward would need."""
        for stage in self.runtime.stages:
            for i in range(len(self.recomputed)):
                stage.forget(self.key(i))
        for table in (self._call_inputs, self._results, self.forms, self.random_states):
            table.clear()
        self.collected.clear()

    # What tasks take and keep

    def key(self, i: int) -> int:
        """Return the key under which stages keep what the backward of a micro-batch needs."""
        return self._first_key + i

    def pop_inputs(self, op: Op, i: int, j: int) -> SlotTensors:
        """Return and remove the inputs of F or B: those of the caller, or of messages."""
        inputs = self._call_inputs.pop((op, i, j), {})
        for recv in self.plan.received[op, i, j]:
            inputs.update(self._results.pop(recv.id))
        return inputs

    def put_result(self, task: int, form: Form, values: Values, passed: SlotTensors) -> None:
        """Keep ``values`` by the slots of their form, and skips that are ``passed`` on."""
        own = {k: x for k, x in zip(form.slots, values, strict=True) if x is not None}
        self._results[task] = passed | own

    def send(self, task: PlannedTask) -> int:
        """Move what a message carries into the memory of its target; return its bytes."""
        results, (recv, skips) = self._results[task.source], self.plan.messages[task.id]
        # SENDs of other streams pop from the same dictionary: a list is made in one call.
        slots = [x for x in list(results) if (isinstance(x, int) if skips is None else x in skips)]
        sent = {slot: results.pop(slot) for slot in slots}
        if skips is not None and task.stage.index < recv.stage.index:
            for key in skips.intersection(sent):
                self.skip_bytes[key] = max(self.skip_bytes.get(key, 0), sent[key].nbytes)
        values = tuple(sent.values())
        receiver = recv.stream if self.plan.graph.rendezvous else None
        moved = transfer.send(values, task.device, task.stream, recv.device, receiver)
        pairs = zip(sent, moved, strict=True)
        self._results[task.id] = {slot: x for slot, x in pairs if x is not None}
        return transfer.nbytes(values)

    def receive(self, task: PlannedTask) -> None:
        """Make what a message carries safe to use on the stream that computes."""
        sent = self._results.pop(task.source)
        transfer.receive(tuple(sent.values()), task.device, task.device.stream(self.stream))
        self._results[task.id] = sent

    def task_seed(self, i: int, j: int) -> int | None:
        """Return the seed of a forward, if it may draw random numbers of its micro-batch."""
        stage = self.runtime.stages[j]
        if self._seed is None or not stage.is_random.get(stage.module.training, True):
            return None
        return task_seed(self._seed, 0, j, i)


class Partitions(StepPart):
    """Runs the tasks of partitions: ``step.state`` has the `CallTensors` of the call."""

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of all tasks of a `pipeexec.GPipe`."""
        return {
            Op.F: self._forward,
            Op.R: self._recompute,
            Op.B: self._backward,
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECVS, self._receive),
        }

    def _forward(self, step: Step, task: PlannedTask) -> None:
        """Run the layers of a partition; keep the activations, or only the inputs, or none."""
        call: CallTensors = step.state[self]
        i, j = task.microbatch, task.stage.index
        inputs = call.pop_inputs(Op.F, i, j)
        partition = call.runtime.partitions[j]
        form = partition.input_form(call.is_atomic.pop((i, j)), inputs)
        tensors = tuple(inputs.pop(slot) for slot in form.slots)
        with call.runtime.locks[j], call.settings(), recomputing(call.again is not None):
            partition.forms.inputs = form
            outputs = self._run_layers(call, i, j, tensors)
            output_form = partition.forms.outputs
        call.is_atomic[i, j + 1] = output_form.is_atomic
        if j in call.tracked:
            call.forms[i, j] = form, output_form
        call.put_result(task.id, output_form, outputs, inputs)

    def _run_layers(self, call: CallTensors, i: int, j: int, tensors: tuple[Tensor, ...]) -> Values:
        """Return the outputs of a partition's layers, then the skips that they stash."""
        stage, seed, key = call.runtime.stages[j], call.task_seed(i, j), call.key(i)
        buffers = None if call.again is None else call.again[j]
        if j not in call.tracked:
            return stage.evaluate(key, tensors, seed, buffers)
        if not call.recomputed[i]:
            return stage.forward(key, tensors, seed, False, again=buffers)
        before = default_state(stage.device) if len(call.recomputed) == 1 else None
        with checkpointing():
            outputs = stage.forward(key, tensors, seed, True, again=buffers)
        if before is not None and not torch.equal(before, default_state(stage.device)):
            call.random_states[i, j] = before
        return outputs

    def _recompute(self, step: Step, task: PlannedTask) -> None:
        """Run the layers again, keeping the activations for the backward."""
        call: CallTensors = step.state[self]
        i, j = task.microbatch, task.stage.index
        state = call.random_states.pop((i, j), None)
        seed = call.task_seed(i, j) if state is None else state
        with call.runtime.locks[j], call.settings(), recomputing():
            call.runtime.partitions[j].forms.inputs = call.forms[i, j][0]
            call.runtime.stages[j].recompute(call.key(i), seed)

    def _backward(self, step: Step, task: PlannedTask) -> None:
        """Accumulate gradients of a partition's parameters; keep those of its inputs."""
        call: CallTensors = step.state[self]
        i, j = task.microbatch, task.stage.index
        input_form, output_form = call.forms.pop((i, j))
        gradients = call.pop_inputs(Op.B, i, j)
        own = tuple(gradients.pop(slot, None) for slot in output_form.slots)
        collected = call.collected.get(j)
        with call.runtime.locks[j], collect_gradients(collected) if collected else NO_CONTEXT:
            input_gradients = call.runtime.stages[j].backward(call.key(i), own)
        call.put_result(task.id, input_form, input_gradients, gradients)

    def _send(self, step: Step, task: PlannedTask) -> None:
        call: CallTensors = step.state[self]
        nbytes = call.send(task)
        step.events.nbytes[task.id] = nbytes
        step.events.nbytes[call.plan.messages[task.id].recv.id] = nbytes

    def _receive(self, step: Step, task: PlannedTask) -> None:
        call: CallTensors = step.state[self]
        call.receive(task)


#: The part of every step of a `pipeexec.GPipe`.
PARTITIONS = Partitions()

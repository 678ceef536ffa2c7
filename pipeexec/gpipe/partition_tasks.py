"""What the tasks of a `pipeexec.GPipe`'s forward and backward do with tensors.

Tables hand them from task to task: a task takes what has arrived, and leaves what is to be sent; a
message takes some of that along. Streams call all of this, each piece behind those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeexec.devices import transfer
from pipeexec.devices.device import Device, Values
from pipeexec.devices.streams import Stream
from pipeexec.devices.thread_settings import thread_settings
from pipeexec.gpipe.checkpoint import checkpointing, recomputing
from pipeexec.gpipe.message_streams import Lane
from pipeexec.gpipe.partition import Form, Partition
from pipeexec.gpipe.routes import Ways
from pipeexec.gpipe.skip import Key
from pipeexec.stages.random_numbers import default_state, set_default_state, task_seed
from pipeexec.stages.stage import Stage
from pipesim.ops import Op
from pipesim.scheduling.schedule import Schedule

__all__ = ["Done", "Machine", "Tensors", "Work"]

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
    locks
        One a partition: two calls may run it in different threads.
    numbers
        Of calls.
    seed
        Of the order of the backward, where there are no dependencies; None for autograd's own.
    recompute_waits
        Whether a gradient is received before the R of its micro-batch.
    schedule
        The order of the backward, where there are no dependencies; None for autograd's own.
    """

    stages: Sequence[Stage]
    partitions: Sequence[Partition]
    devices: Sequence[Device]
    forward: Ways
    backward: Ways
    locks: Sequence[AbstractContextManager[Any]]
    numbers: Iterator[int]
    dependencies: bool = True
    copy_streams: bool = True
    seed: int | None = None
    recompute_waits: bool = False
    schedule: Schedule | None = None

    def draws(self, unknown: bool) -> bool:
        """Return whether a forward draws random numbers; ``unknown`` where nothing is known."""
        return any(stage.is_random.get(stage.module.training, unknown) for stage in self.stages)

    def random_states(self) -> list[Tensor]:
        """Return where the generators of the devices go on."""
        return [default_state(device) for device in dict.fromkeys(s.device for s in self.stages)]

    def take_back_draws(self, before: Sequence[Tensor]) -> bool:
        """Move generators back that have moved, and ask anew who draws; return whether they had."""
        devices = dict.fromkeys(stage.device for stage in self.stages)
        if all(map(torch.equal, before, self.random_states())):
            return False
        for device, state in zip(devices, before, strict=True):
            set_default_state(device, state)
        for stage in self.stages:
            stage.is_random.clear()
        return True


class Work:
    """What is computed and moved in one forward, and in its backward.

    Made in the thread of the caller, whose gradient mode, inference mode and autocast hold in all
    others.

    Parameters
    ----------
    machine
        What runs it.
    recomputed
        For each micro-batch, whether its activations are dropped and recomputed.
    seed
        Of the random numbers of all tasks; None to draw from the process's generator.
    tracked
        The partitions that have a backward: these and all behind them.
    again
        Whether the forward was run before: buffers stay as they are.

    Attributes
    ----------
    nbytes
        Of each message that was sent.
    skip_bytes
        Of each skip that was sent, in the largest micro-batch.
    """

    def __init__(
        self,
        machine: Machine,
        recomputed: Sequence[bool],
        seed: int | None,
        tracked: Sequence[int],
        again: bool = False,
    ) -> None:
        self.machine, self.recomputed, self.tracked = machine, list(recomputed), tracked
        self.nbytes: dict[Done, int] = {}
        self.skip_bytes: dict[Key, int] = {}
        self._first_key = next(machine.numbers) << 32  # and more micro-batches no call has
        self._seed, self._again = seed, again
        self._settings = thread_settings()
        # Of F and B, micro-batch and partition: what has arrived, what is to leave, and, by the
        # SEND, what is on its way.
        self._arrived: dict[tuple[Op, int, int], Tensors] = {}
        self._leaving: dict[tuple[Op, int, int], Tensors] = {}
        self._moving: dict[Done, tuple[Sequence[int | Key], Values]] = {}
        # Of micro-batch and partition: what inputs and outputs stand for, and where random numbers
        # began.
        self._is_atomic: dict[tuple[int, int], bool] = {}
        self._forms: dict[tuple[int, int], tuple[Form, Form]] = {}
        self._states: dict[tuple[int, int], Tensor] = {}

    # What comes in and goes out

    def enter(self, i: int, tensors: Sequence[Tensor], atomic: bool) -> None:
        """Take a micro-batch, which is one tensor if it is ``atomic``."""
        self._arrived[Op.F, i, 0] = dict(enumerate(tensors))
        self._is_atomic[i, 0] = atomic

    def take(self, op: Op, i: int, j: int) -> Tensors:
        """Return what a task has made, and nobody else takes."""
        return self._leaving.pop((op, i, j))

    def is_atomic(self, i: int) -> bool:
        """Return whether a micro-batch has become one tensor."""
        return self._is_atomic.pop((i, len(self.machine.stages)))

    def go_back(self, i: int, gradients: Iterable[Tensor | None], stream: Stream) -> None:
        """Take the gradients of a micro-batch's outputs."""
        there: Tensors = {k: x for k, x in enumerate(gradients) if x is not None}
        n = len(self.machine.stages)
        transfer.receive(tuple(there.values()), self.machine.devices[n - 1], stream)
        self._arrived[Op.B, i, n - 1] = there

    def drop(self) -> None:
        """Let go of tensors that nobody takes: gradients of inputs that need none."""
        self._leaving.clear()

    def forget(self) -> None:
        """Let go of what a backward would need."""
        for stage in self.machine.stages:
            for i in range(len(self.recomputed)):
                stage.forget(self._key(i))
        for table in (self._arrived, self._leaving, self._moving, self._forms, self._states):
            table.clear()

    def _key(self, i: int) -> int:
        return self._first_key + i

    # What streams run

    def part(self, i: int, lane: Lane, sent: Done) -> None:
        """Put what leaves on a lane into the memory of its target."""
        source, target, skips = lane.route
        leaving = self._leaving[lane.op, i, source]
        taken = {slot: leaving.pop(slot) for slot in list(leaving) if lane.route.carries(slot)}
        values = tuple(taken.values())
        self.nbytes[sent] = transfer.nbytes(values)
        for slot, value in taken.items() if lane.op == Op.F and skips is not None else ():
            assert not isinstance(slot, int)
            self.skip_bytes[slot] = max(self.skip_bytes.get(slot, 0), value.nbytes)
        devices = self.machine.devices
        moved = transfer.send(values, devices[source], lane.sends, devices[target])
        self._moving[sent] = tuple(taken), moved

    def land(self, i: int, lane: Lane, sent: Done) -> None:
        """Make what came safe to use where it is computed with."""
        target = lane.route.target
        slots, values = self._moving.pop(sent)
        transfer.receive(values, self.machine.devices[target], lane.computes)
        there = self._arrived.setdefault((lane.op, i, target), {})
        there.update({k: x for k, x in zip(slots, values, strict=True) if x is not None})

    def forward(self, i: int, j: int) -> None:
        """Run the layers of a partition; keep what the backward needs, or nothing."""
        partition = self.machine.partitions[j]
        held = self._arrived.pop((Op.F, i, j))
        skips = tuple(key for key in partition.entering if key in held)
        n = sum(isinstance(slot, int) for slot in held)
        given = Form(self._is_atomic.pop((i, j)), n, skips)
        tensors = tuple(held.pop(slot) for slot in given.slots)
        with self.machine.locks[j], self._settings(), recomputing(self._again):
            partition.forms.given = given
            made = self._made(i, j, tensors)
            form = partition.forms.made
        self._is_atomic[i, j + 1] = form.is_atomic
        if j in self.tracked:
            self._forms[i, j] = given, form
        held.update({k: x for k, x in zip(form.slots, made, strict=True) if x is not None})
        self._leaving[Op.F, i, j] = held  # with skips that pass

    def _made(self, i: int, j: int, tensors: tuple[Tensor, ...]) -> Values:
        """Return what layers make of tensors."""
        stage, seed = self.machine.stages[j], self._seed_of(i, j)
        if j not in self.tracked:
            return stage.evaluate(self._key(i), tensors, seed)
        if not self.recomputed[i]:
            return stage.forward(self._key(i), tensors, seed, False, again=self._again)
        before = default_state(stage.device) if len(self.recomputed) == 1 else None
        with checkpointing():
            made = stage.forward(self._key(i), tensors, seed, True, again=self._again)
        if before is not None and not torch.equal(before, default_state(stage.device)):
            self._states[i, j] = before
        return made

    def _seed_of(self, i: int, j: int) -> int | None:
        """Return the seed of a forward, if it may draw random numbers of its own."""
        stage = self.machine.stages[j]
        if self._seed is None or not stage.is_random.get(stage.module.training, True):
            return None
        return task_seed(self._seed, 0, j, i)

    def recompute(self, i: int, j: int) -> None:
        """Run the layers again, to keep what the backward needs."""
        state = self._states.pop((i, j), None)
        seed = self._seed_of(i, j) if state is None else state
        with self.machine.locks[j], self._settings(), recomputing():
            self.machine.partitions[j].forms.given = self._forms[i, j][0]
            self.machine.stages[j].recompute(self._key(i), seed)

    def backward(self, i: int, j: int) -> None:
        """Accumulate the gradients of a partition, and leave those of its inputs."""
        given, made = self._forms.pop((i, j))
        held = self._arrived.pop((Op.B, i, j), {})
        gradients = tuple(held.pop(slot, None) for slot in made.slots)
        with self.machine.locks[j]:
            found = self.machine.stages[j].backward(self._key(i), gradients)
        held.update({k: x for k, x in zip(given.slots, found, strict=True) if x is not None})
        self._leaving[Op.B, i, j] = held

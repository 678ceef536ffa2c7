"""Activations, gradients and buffers of a step, counted task by task, on any device.

Each task's bytes are put at the time at which it ran: what it took at its start, what it gave back
at its end, as in rule 10 of docs/time.md. Activations are counted by
`pipeexec.stages.activation_bytes`. A gradient counts until its storage is freed, whatever holds it.
Buffers are all else that a REDUCE_GRAD allocates, such as that of a message with several gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeexec.executor.gradient_sync import last_microbatch_in_group, reduced_parameters
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.stages.activation_bytes import ActivationMeter
from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.stage_like import StageLike
from pipesim.ops import Op
from pipesim.timeline.memory import in_order_of_time
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Bytes", "Counted", "StepMemory", "activation_meters"]

Floats = NDArray[np.float64]
#: Storages that were seen, and their bytes.
_Storages = dict[StorageWeakRef, int]


class Bytes(NamedTuple):
    """Bytes that each task takes at its start and gives back at its end; shape ``(n_tasks,)``."""

    taken: Floats
    given: Floats


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Bytes that each device held over one step, counted tensor by tensor.

    Attributes
    ----------
    timeline
        Of the step; its times are those of a host that counts.
    activations, gradients, buffers
        What each task took and gave back.
    one_gradient
        Bytes of one gradient a parameter, of each replica's stages; shape
        ``(n_replicas, n_stages)``.
    """

    timeline: Timeline
    activations: Bytes
    gradients: Bytes
    buffers: Bytes
    one_gradient: Floats

    def at(self, timeline: Timeline) -> StepMemory:
        """Return the same bytes at the times of another step of the same graph."""
        return replace(self, timeline=timeline)

    @property
    def peak_activations(self) -> Floats:
        """Most bytes of activations that each device held; shape ``(n_devices,)``."""
        return self._peaks("activations")

    @property
    def peak_gradients(self) -> Floats:
        """Most bytes of gradients that each device held; shape ``(n_devices,)``."""
        return self._peaks("gradients")

    @property
    def peak_buffers(self) -> Floats:
        """Most bytes of buffers that each device held within reductions; ``(n_devices,)``."""
        return self._peaks("buffers")

    @property
    def peak(self) -> Floats:
        """Most bytes of activations, and of gradients beyond one a parameter, of each device.

        What the simulator adds to the bytes that are held throughout. Shape ``(n_devices,)``.
        """
        return self._peaks("total")

    def _peaks(self, column: str) -> Floats:
        most = np.zeros(self.timeline.n_devices)
        frame = self.frame
        np.maximum.at(most, frame["device"].to_numpy(), frame[column].to_numpy())
        return most

    @property
    def frame(self) -> pd.DataFrame:
        """Bytes held after each start and end of a task that changed any.

        ``device``, ``time`` (s), ``activations``, ``gradients``, ``buffers``, and ``total``:
        activations, and gradients beyond one a parameter. By device, then in order of time.
        """
        import pandas as pd

        graph, kinds = self.timeline.graph, (self.activations, self.gradients, self.buffers)
        changed = np.any([x != 0 for kind in kinds for x in kind], axis=0)
        task, is_end = in_order_of_time(self.timeline, changed, changed)
        place = graph.replica * graph.n_stages + graph.stage
        held = np.zeros((3, graph.n_devices))
        gradients = np.zeros(self.one_gradient.size)
        one, homes = self.one_gradient.ravel(), graph.homes.ravel()
        rows = []
        for number, ends in zip(task.tolist(), is_end.tolist(), strict=True):
            device = int(graph.device[number])
            change = [-kind.given[number] if ends else kind.taken[number] for kind in kinds]
            held[:, device] += change
            gradients[place[number]] += change[1]
            beyond = np.maximum(0.0, gradients - one)[homes == device].sum()
            time = (self.timeline.end if ends else self.timeline.start)[number]
            rows.append((device, time, *held[:, device], held[0, device] + beyond))
        names = ["device", "time", "activations", "gradients", "buffers", "total"]
        return pd.DataFrame(rows, columns=names).astype({"device": "int64"})


class Counted:
    """Counts what each task takes and gives back, while a step runs.

    Parameters
    ----------
    n_tasks
        In the graph.
    meters
        Of the devices' activations; set in the stages.
    """

    def __init__(self, n_tasks: int, meters: Sequence[ActivationMeter]) -> None:
        self.meters = meters
        self.columns = np.zeros((6, n_tasks))
        self.activations, self.gradients, self.buffers = (
            Bytes(*pair) for pair in self.columns.reshape(3, 2, n_tasks)
        )

    def wrap(self, task: PlannedTask) -> PlannedTask:
        """Return a task that counts what it takes and gives back."""

        def handler(step: Step, planned: PlannedTask) -> None:
            op = Op(step.graph.op[planned.id])
            counts = _COUNTS.get(op)
            if counts is None:
                task.handler(step, planned)
            else:
                counts(self, step, planned, task.handler)

        return task._replace(handler=handler)

    def _compute(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        """Count a task on a compute stream, where a device's activations change."""
        meter = self.meters[int(step.graph.device[task.id])]
        before = meter.window_peak = meter.current
        with self._counting(step, task, [task.slot], [task.id]):
            handler(step, task)
        self.activations.taken[task.id] = meter.window_peak - before
        self.activations.given[task.id] = meter.window_peak - meter.current

    def _reduce(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        """Count the reduction of all local copies of a stage."""
        graph = step.graph
        members = graph.collectives[int(graph.group[task.id])].tolist()
        slot_of = {int(graph.replica[t]) * graph.n_stages + int(graph.stage[t]): t for t in members}
        ids = [slot_of[slot] for slot in task.copies]
        if not ids:
            handler(step, task)
            return
        with self._counting(step, task, task.copies, ids):
            allocated = _Allocated(x for slot in task.copies for x in _gradients(step, task, slot))
            with allocated:
                handler(step, task)
            # Not all that was allocated and is alive: gloo's thread may still hold the flat buffer.
            gradients = _storages(x for slot in task.copies for x in _gradients(step, task, slot))
            buffers = allocated.peak - max(allocated.before, _alive(gradients))
        self.buffers.taken[ids[0]] = self.buffers.given[ids[0]] = buffers

    @contextmanager
    def _counting(
        self, step: Step, task: PlannedTask, slots: Sequence[int], ids: Sequence[int]
    ) -> Iterator[None]:
        """Note by how much the gradients of local copies change in a block."""
        before = [_storages(_gradients(step, task, slot)) for slot in slots]
        nbytes = [sum(storages.values()) for storages in before]
        yield
        for number, slot, storages, were in zip(ids, slots, before, nbytes, strict=True):
            storages.update(_storages(_gradients(step, task, slot)))
            change = _alive(storages) - were
            self.gradients.taken[number] = max(0, change)
            self.gradients.given[number] = max(0, -change)


#: How the tasks of an operation are counted; others change nothing.
_COUNTS: dict[Op, Callable[..., None]] = {
    **dict.fromkeys((Op.F, Op.B, Op.I, Op.W, Op.R, Op.STEP), Counted._compute),
    Op.REDUCE_GRAD: Counted._reduce,
}


class _Allocated(TorchDispatchMode):
    """Counts storages in a block: those of some tensors, and what is allocated, until freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = _storages(tensors)
        self.before = self.peak = self.alive()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        found = func(*args, **(kwargs or {}))
        made = _storages(x for x in tree_leaves(found) if isinstance(x, Tensor))
        self._seen.update({ref: n for ref, n in made.items() if ref not in given})
        self.peak = max(self.peak, self.alive())
        return found

    def alive(self) -> int:
        """Return the bytes that have not been freed."""
        return _alive(self._seen)


def _gradients(step: Step, task: PlannedTask, slot: int) -> Iterator[Tensor]:
    """Yield the gradients of a local copy that a task may change, wherever they are held."""
    group = int(step.graph.reduction_groups[task.stage.index])
    if step.graph.op[task.id] == Op.REDUCE_GRAD:
        held = step.gradients.per_microbatch_grads.get((slot, task.microbatch), [])
        parameters = [] if group else reduced_parameters(step, slot, task)
    else:
        is_grouped = group and task.microbatch >= 0
        last = last_microbatch_in_group(task.microbatch, group) if is_grouped else -1
        held = step.gradients.per_microbatch_grads.get((slot, last), [])
        parameters = list(task.stage.module.parameters())
    held = [*held, *(p.grad for p in parameters)]
    if step.graph.op[task.id] in (Op.REDUCE_GRAD, Op.STEP):
        held += step.gradients.reduced.get(slot, [])
    return (x for x in held if x is not None)


def _storages(tensors: Iterable[Tensor]) -> _Storages:
    """Return the storages of tensors, each once; they may be freed nevertheless."""
    found: _Storages = {}
    for tensor in tensors:
        sparse = tensor.layout == torch.sparse_coo
        for part in (tensor._indices(), tensor._values()) if sparse else (tensor,):
            storage = part.untyped_storage()
            found[StorageWeakRef(storage)] = storage.nbytes()
    return found


def _alive(storages: _Storages) -> int:
    return sum(nbytes for ref, nbytes in storages.items() if not ref.expired())


def activation_meters(
    stages: Sequence[StageLike], inputs: Batch, targets: Any, n: int
) -> list[ActivationMeter]:
    """Return ``n`` meters that do not count weights and the batch, which a step does not make."""
    check_batch(inputs, targets)
    modules = [stage.module for stage in stages]
    weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    tuples = [x if isinstance(x, tuple) else (x,) for x in (inputs, targets)]
    batch = [x for values in tuples for x in values if isinstance(x, Tensor)]
    return [ActivationMeter(weights, batch) for _ in range(n)]

"""Bytes of activations, gradients, buffers and parameters that devices hold in a step, by task.

A task takes its bytes at its start and gives them back at its end, as in rule 10 of docs/time.md.
A gradient counts until its storage is freed, whatever holds it. Buffers are everything else that a
REDUCE_GRAD allocates, such as a message of several gradients.
`pipeexec.stages.activations` counts activations.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from pipeexec.data_parallel.stage_shards import StageShards
from pipeexec.executor.allocator_memory import Allocated, sample_tasks
from pipeexec.executor.gradient_sync import last_microbatch_in_group, reduced_parameters
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.sharding import Sharding
from pipeexec.executor.step import Step
from pipeexec.executor.step_result import StepResult
from pipeexec.executor.step_runner import StepRunner
from pipeexec.nesting import tensors_in
from pipeexec.stages.activations import ActivationMeter
from pipeexec.stages.batches import Batch, check_batch
from pipeexec.stages.stage import StageLike, attach_meters
from pipeexec.thread_modes import ThreadMode
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, Op
from pipesim.timeline.memory import in_order_of_time, order_of_time
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]


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
        Timeline of the step. Counting delays the host, so tasks start later than in other steps.
    activations, gradients, buffers
        Bytes that each task took and gave back.
    one_gradient
        Bytes of one gradient a parameter, for each stage of each replica; shape
        ``(n_replicas, n_stages)``. 0 for sharded parameters, of whose gradients a share is always
        held.
    parameters
        Bytes of sharded parameters that each task gathered and freed.
    peer_activations
        Bytes that each OFFLOAD took, and each RELOAD gave back, on the device that held them.
    """

    timeline: Timeline
    activations: Bytes
    gradients: Bytes
    buffers: Bytes
    one_gradient: Floats
    parameters: Bytes
    peer_activations: Bytes

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
        """Most bytes of activations, gathered parameters, and gradients beyond one a parameter.

        The simulator adds these to the bytes that are held throughout. Shape ``(n_devices,)``.
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

        ``device``, ``time`` (s), ``activations``, ``gradients``, ``buffers``, ``parameters``, and
        ``total``: activations, gathered parameters, gradients beyond one a parameter. By device,
        then in order of time. Activations are also those that a peer holds.
        """
        from pipesim.utils.packages import pandas as pd

        graph, timeline = self.timeline.graph, self.timeline
        own = np.array([self.activations, self.gradients, self.buffers, self.parameters])
        on_peer = np.zeros_like(own)
        on_peer[0] = self.peer_activations
        changes = []
        for nbytes, holder in ((own, graph.device), (on_peer, graph.offload_peers[graph.device])):
            changed = np.any(nbytes != 0, axis=(0, 1))
            task, is_end = in_order_of_time(timeline, changed, changed, holder)
            change = np.where(is_end, -nbytes[:, 1, task], nbytes[:, 0, task])
            changes.append((task, is_end, holder[task], change))
        task, is_end, device, change = (
            np.concatenate(x, axis=-1) for x in zip(*changes, strict=True)
        )
        place = graph.replica * graph.n_stages + graph.stage
        held = np.zeros((4, graph.n_devices))
        gradients = np.zeros(self.one_gradient.size)
        one, homes = self.one_gradient.ravel(), graph.homes.ravel()
        rows = []
        for k in order_of_time(timeline, task, is_end, device).tolist():
            number, owner = int(task[k]), int(device[k])
            held[:, owner] += change[:, k]
            gradients[place[number]] += change[1, k]
            more_gradients = np.maximum(0.0, gradients - one)[homes == owner].sum()
            time = (timeline.end if is_end[k] else timeline.start)[number]
            total = held[0, owner] + held[3, owner] + more_gradients
            rows.append((owner, time, *held[:, owner], total))
        names = ["device", "time", "activations", "gradients", "buffers", "parameters", "total"]
        return pd.DataFrame(rows, columns=names).astype({"device": "int64"})


#: Storages and their bytes.
_Storages = dict[StorageWeakRef, int]


class ByteCounter:
    """Counts the bytes that each task of a step takes and gives back.

    Parameters
    ----------
    n_tasks
        Number of tasks of the graph.
    meters
        Meters of activations, one a device; attached to the stages.
    shards
        Shares of the parameters of stages, by slot.

    Attributes
    ----------
    columns
        Bytes taken and given back of activations, gradients, buffers, gathered parameters, and
        activations on a peer; shape ``(10, n_tasks)``.
    """

    def __init__(
        self, n_tasks: int, meters: Sequence[ActivationMeter], shards: Mapping[int, StageShards]
    ) -> None:
        self.meters, self.shards = meters, shards
        self._locks = [threading.Lock() for _ in meters]  # of devices whose copies run beside
        self.columns = np.zeros((10, n_tasks))
        self.activations, self.gradients, self.buffers, self.parameters, self.peer_activations = (
            Bytes(*pair) for pair in self.columns.reshape(5, 2, n_tasks)
        )

    def wrap(self, task: PlannedTask) -> PlannedTask:
        """Return a task that counts the bytes that it takes and gives back."""

        def handler(step: Step, planned: PlannedTask) -> None:
            count = _COUNTERS.get(Op(step.graph.op[planned.id]))
            if count is None:
                task.handler(step, planned)
            else:
                count(self, step, planned, task.handler)

        return task._replace(handler=handler)

    def _compute(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        """Count a task on a compute stream, where a device's activations change."""
        device = int(step.graph.device[task.id])
        with (
            self._window(device, task.id, self.activations),
            self._counting(step, task, [task.slot], [task.id]),
        ):
            handler(step, task)

    def _copy(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        """Count a copy to or from other memory, which changes activations alone."""
        device = int(step.graph.device[task.id])
        peer = int(step.graph.offload_peers[device])
        held = {device: self.activations} | ({peer: self.peer_activations} if peer >= 0 else {})
        with ExitStack() as stack:
            for number in sorted(held):  # else two copies could wait for each other
                stack.enter_context(self._window(number, task.id, held[number]))
            handler(step, task)

    @contextmanager
    def _window(self, device: int, task: int, nbytes: Bytes) -> Iterator[None]:
        """Count the activations of a device, one task at a time."""
        meter = self.meters[device]
        with self._locks[device]:
            before = meter.window_peak = meter.current
            yield
            nbytes.taken[task] = meter.window_peak - before
            nbytes.given[task] = meter.window_peak - meter.current

    def _reduce(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        graph = step.graph
        members = graph.collectives[int(graph.group[task.id])].tolist()
        slot_of = {int(graph.replica[t]) * graph.n_stages + int(graph.stage[t]): t for t in members}
        ids = [slot_of[slot] for slot in task.copies]
        if not ids:
            handler(step, task)
            return
        with self._counting(step, task, task.copies, ids):
            watch = _AllocationWatch(
                x for slot in task.copies for x in _gradients(step, task, slot)
            )
            with watch:
                handler(step, task)
            # Only gradients are subtracted: gloo's thread may still hold the flat buffer.
            gradients = _storages(x for slot in task.copies for x in _gradients(step, task, slot))
            buffers = watch.peak - max(watch.n_bytes_before, _n_alive_bytes(gradients))
        self.buffers.taken[ids[0]] = self.buffers.given[ids[0]] = buffers

    def _gather(self, step: Step, task: PlannedTask, handler: Handler) -> None:
        shards = self.shards.get(task.slot)
        tensors = [] if shards is None else shards.whole_tensors
        before = sum(x.untyped_storage().nbytes() for x in tensors)
        handler(step, task)
        change = sum(x.untyped_storage().nbytes() for x in tensors) - before
        self.parameters.taken[task.id] = max(0, change)
        self.parameters.given[task.id] = max(0, -change)

    @contextmanager
    def _counting(
        self, step: Step, task: PlannedTask, slots: Sequence[int], ids: Sequence[int]
    ) -> Iterator[None]:
        """Count by how many bytes the gradients of local copies change in a block."""
        storages_before = [_storages(_gradients(step, task, slot)) for slot in slots]
        bytes_before = [sum(storages.values()) for storages in storages_before]
        yield
        for number, slot, storages, before in zip(
            ids, slots, storages_before, bytes_before, strict=True
        ):
            storages.update(_storages(_gradients(step, task, slot)))
            change = _n_alive_bytes(storages) - before
            self.gradients.taken[number] = max(0, change)
            self.gradients.given[number] = max(0, -change)


#: Counts a task, by operation; tasks of other operations change no bytes.
_COUNTERS: dict[Op, Callable[..., None]] = {
    **dict.fromkeys((Op.F, Op.B, Op.I, Op.W, Op.R, Op.STEP), ByteCounter._compute),
    Op.REDUCE_GRAD: ByteCounter._reduce,
    **dict.fromkeys(COPIES, ByteCounter._copy),
    **dict.fromkeys((Op.UNSHARD, Op.RESHARD), ByteCounter._gather),
}


class _AllocationWatch(ThreadMode):
    """Counts the storages of some tensors, and those allocated in a block, until they are freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = _storages(tensors)
        self.n_bytes_before = self.peak = _n_alive_bytes(self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _storages(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        result = func(*args, **(kwargs or {}))
        outputs = _storages(x for x in tree_leaves(result) if isinstance(x, Tensor))
        self._storages.update({ref: n for ref, n in outputs.items() if ref not in inputs})
        self.peak = max(self.peak, _n_alive_bytes(self._storages))
        return result


def _gradients(step: Step, task: PlannedTask, slot: int) -> Iterator[Tensor]:
    """Yield the gradients of a local copy that a task may change."""
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
    """Return the storages of tensors, without keeping them alive."""
    storages: _Storages = {}
    for tensor in tensors:
        sparse = tensor.layout == torch.sparse_coo
        for part in (tensor._indices(), tensor._values()) if sparse else (tensor,):
            storage = part.untyped_storage()
            storages[StorageWeakRef(storage)] = storage.nbytes()
    return storages


def _n_alive_bytes(storages: _Storages) -> int:
    return sum(nbytes for ref, nbytes in storages.items() if not ref.expired())


# Steps that count memory, and leave no trace in the model
#
# Each probe runs a step eagerly, since a replayed CUDA graph takes no memory. The caller holds the
# devices.


def count_task_bytes(
    runner: StepRunner, inputs: Batch, targets: Any
) -> tuple[ByteCounter, StepResult]:
    """Count the activations, gradients and buffers of a step, task by task."""
    meters = _activation_meters(runner, inputs, targets, runner.graph.n_devices)
    nbytes = ByteCounter(len(runner.graph), meters, runner.model.part(Sharding).shards)
    tasks = [nbytes.wrap(task) for task in runner.tasks]
    with runner.preserved(), attach_meters(runner.stages, *_by_device(runner.graph, meters)):
        step = runner.run(inputs, targets, partial(_walk_alone, tasks))
        return nbytes, runner.result(step)


def sample_allocator(runner: StepRunner, inputs: Batch, targets: Any) -> Allocated:
    """Sample torch's allocator after each task of a step."""
    tasks, samples = sample_tasks(runner.tasks, runner.model.devices)
    with runner.preserved():
        step = runner.run(inputs, targets, partial(_walk_alone, tasks))
    return samples.at_task_times(step.readings().timeline)


def _activation_meters(
    runner: StepRunner, inputs: Batch, targets: Any, n: int
) -> list[ActivationMeter]:
    """Return ``n`` meters; weights and the batch, which no step allocates, do not count."""
    check_batch(inputs, targets)
    modules = [stage.module for stage in runner.stages]
    weights = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    batch = tensors_in((inputs, targets))
    return [ActivationMeter(weights, batch) for _ in range(n)]


def _by_device(
    graph: TaskGraph, meters: Sequence[ActivationMeter]
) -> tuple[list[ActivationMeter], list[ActivationMeter | None]]:
    """Return the meters of the device of each stage, and of its peer; ``meters`` are of devices."""
    homes = graph.homes.ravel()
    peers = graph.offload_peers[homes].tolist()
    return [meters[d] for d in homes], [meters[d] if d >= 0 else None for d in peers]


def _walk_alone(tasks: Sequence[PlannedTask], step: Step, _: Sequence[PlannedTask]) -> None:
    """Issue ``tasks`` from this thread, in place of the planned tasks that host threads issue."""
    step.hosts = None
    step.walk(tasks)


class MemoryMethods(ABC):
    """Methods of a pipeline that count bytes; each runs a step that leaves no trace."""

    graph: TaskGraph
    stages: list[StageLike]
    _model: PlacedModel
    _runner: StepRunner

    @abstractmethod
    def _checked(self, inputs: Any) -> Any:
        """Return inputs whose tensors are in the order in which the first stage takes them."""

    @abstractmethod
    def gather(self, result: StepResult) -> StepResult:
        """Return the result of the whole pipeline."""

    @abstractmethod
    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of the processes' values, element by element."""

    def held_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes of activations that each stage holds in a step.

        They are counted in a step that leaves parameters, buffers, gradients and optimizers as they
        were. Weights do not count. In a first step, stages also hold a copy of their input. All
        processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each stage, replica after replica; length ``n_replicas * n_stages``.

        Examples
        --------
        Stage 0 holds the inputs of two micro-batches, of 32 bytes each. Stage 1 holds input, output
        and targets of one:

        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     pipeline.held_bytes(x, x)
        [64, 96]
        """
        meters = self._count_activations(inputs, targets)
        return list(map(int, self.total([meter.peak for meter in meters])))

    def left_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes that each stage holds for W at the end of an I.

        They are counted like those of `held_bytes`. All processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each stage, replica after replica; length ``n_replicas * n_stages``. 0 without
            split backwards.
        """
        meters = self._count_activations(inputs, targets)
        return list(map(int, self.total([meter.deferred_peak for meter in meters])))

    def device_bytes(self, inputs: Any, targets: Any) -> list[int]:
        """Return the most bytes of activations that each device holds in a step.

        They are counted like those of `held_bytes`, and also for a peer that holds offloaded ones.
        All processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        list of int
            Bytes of each device; length ``n_devices``.
        """
        meters = self._count_activations(inputs, targets, by_device=True)
        return list(map(int, self.total([meter.peak for meter in meters])))

    def _count_activations(
        self, inputs: Any, targets: Any, *, by_device: bool = False
    ) -> list[ActivationMeter]:
        """Count the activations of a step; return a meter for each stage, or each device."""
        runner = self._runner
        n = self.graph.n_devices if by_device else len(self.stages)
        with self._model.locked_open("held_bytes, left_bytes or device_bytes"):
            inputs = self._checked(inputs)
            meters = _activation_meters(runner, inputs, targets, n)
            attached = _by_device(self.graph, meters) if by_device else (meters,)
            with runner.preserved(), attach_meters(runner.stages, *attached):
                runner.run(inputs, targets, Step.walk)
        return meters

    def memory(self, inputs: Any, targets: Any) -> StepMemory:
        """Return the bytes of activations, gradients and gathered parameters over a step.

        They are counted task by task. The simulator's counterpart is ``timeline.memory()``.
        Counting delays the host, so this runs a step of its own, which leaves no trace. All
        processes must call this.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        StepMemory
            Bytes that each task took and gave back, and the most of each device.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     _ = pipeline.step(x, x)
        ...     memory = pipeline.memory(x, x)
        >>> memory.peak_activations.tolist(), memory.peak_gradients.tolist()
        ([64.0, 96.0], [80.0, 80.0])
        """
        with self._model.locked_open("memory"):
            nbytes, result = count_task_bytes(self._runner, self._checked(inputs), targets)
        one_gradient = [
            float(sum(p.nbytes for p in stage.module.parameters() if p.requires_grad))
            if self._model.part(Sharding).kinds[stage.index] != "parameters"
            else 0.0
            for stage in self.stages
        ]
        columns = np.array(self.total(nbytes.columns.ravel().tolist())).reshape(10, -1)
        return StepMemory(
            self.gather(result).timeline,
            Bytes(*columns[:2]),
            Bytes(*columns[2:4]),
            Bytes(*columns[4:6]),
            np.array(self.total(one_gradient)).reshape(self.graph.homes.shape),
            Bytes(*columns[6:8]),
            Bytes(*columns[8:]),
        )

    def allocated(self, inputs: Any, targets: Any) -> Allocated:
        """Return the bytes that torch's allocator holds on each GPU over a step, task by task.

        The simulator's counterpart is ``timeline.memory()``. Sampling delays the host, so this runs
        a step of its own, which leaves no trace. Freed blocks that other streams may still read
        count in ``most_active`` alone.

        Parameters
        ----------
        inputs, targets
            A batch as for `step`.

        Returns
        -------
        Allocated
            Bytes of each GPU over time, and the timeline of the step.
        """
        with self._model.locked_open("allocated"):
            return sample_allocator(self._runner, self._checked(inputs), targets)

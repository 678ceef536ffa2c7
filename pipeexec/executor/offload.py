"""Activations of a micro-batch are copied to the host or a peer (OFFLOAD), and back (RELOAD).

On a GPU, a compute task waits for an OFFLOAD, and takes the memory that it has copied.

The host issues a whole step before a GPU has run much of it. Memory that OFFLOAD freed when the
host issued it would wait for the copy, which torch's allocator looks at only while the host
allocates: within the step, no task would get it. So a step holds these tensors until a later
compute task of the device waits for the copy. Their memory then belongs to the compute stream::

    compute | F0 | F1       | F2 waits for OFFLOAD0 and may take its memory
    offload      | OFFLOAD0 | OFFLOAD1

In the first steps this is the second compute task after F. Then the measured durations are
simulated, and it is the first compute task that starts after the end of the OFFLOAD there: its wait
delays nothing, and memory is as predicted. In several processes the first choice stays, as each
knows the durations of its own tasks alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.device import Device, device_ranks
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.executor.step_part import StepPart
from pipeexec.nesting import tensors_in
from pipeexec.stages.activations import storages
from pipeexec.stages.stage import Stage, StageLike
from pipesim.costs.task_costs import CostTable, TaskCosts
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import LISTED, RECVS, Op
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.timeline import Timeline

#: Steps after which durations are simulated; the first one loads kernels and takes memory.
_N_FIRST_STEPS = 2


def outlasts_issue(task: PlannedTask) -> bool:
    """Return whether a copy runs beside compute tasks, after the host has issued it."""
    return isinstance(task.device, CudaDevice) and task.stream != task.device.stream("compute")


class Offload(StepPart):
    """Activations that are on the host, or on a peer, between forward and backward."""

    def __init__(self) -> None:
        self.waits: WeakKeyDictionary[TaskGraph, OffloadWaits] = WeakKeyDictionary()

    def check(self, graph: TaskGraph, model: PlacedModel) -> None:
        """Raise `ArgumentError` for offloads of sharded stages, or to another process."""
        ranks = np.array(device_ranks(model.devices, -1))
        offloads = np.flatnonzero(
            (graph.op == Op.OFFLOAD) & (graph.offload_peers[graph.device] >= 0)
        )
        devices, peers = graph.device[offloads], graph.offload_peers[graph.device[offloads]]
        for k in np.flatnonzero(ranks[devices] != ranks[peers])[:1]:
            raise ArgumentError(
                f"graph {graph.name!r} offloads activations of device {devices[k]} to device "
                f"{peers[k]} of another process, and copies to a peer stay within one process; "
                'lower with offload_to="host", or run both devices in one process'
            )
        for stage in np.intersect1d(graph.stage[graph.op == Op.OFFLOAD], graph.sharded)[:1]:
            raise ArgumentError(
                f"graph {graph.name!r} offloads activations of stage {stage}, which is sharded and "
                "keeps none; lower without offload for it"
            )

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of copies."""
        return {Op.OFFLOAD: _offload, Op.RELOAD: _reload}

    def prepare(
        self, graph: TaskGraph, stages: Sequence[StageLike], tasks: Sequence[PlannedTask]
    ) -> None:
        """Tell each stage which of its micro-batches have an OFFLOAD."""
        offloads = np.flatnonzero(graph.op == Op.OFFLOAD)
        slots = graph.replica[offloads] * graph.n_stages + graph.stage[offloads]
        for slot in np.unique(slots).tolist():
            stage = stages[slot]
            if isinstance(stage, Stage):
                stage.offloaded = frozenset(graph.microbatch[offloads[slots == slot]].tolist())
        if len(offloads):
            self.waits[graph] = OffloadWaits(graph, tasks)

    def before(self, step: Step) -> None:
        """Tell stages which tensors are of the batch, and let compute tasks wait for copies."""
        if step.graph not in self.waits:
            return
        step.frees = self.waits[step.graph].by_task
        loss = step.inputs.loss
        batch = storages(tensors_in((step.inputs.microbatches, loss.targets, loss.stage_targets)))
        for stage in step.gradients.stages:
            if isinstance(stage, Stage) and stage.offloaded:
                stage.batch_storages = batch

    def after(self, step: Step) -> None:
        """Choose the compute tasks anew once, after the first steps."""
        if step.graph in self.waits:
            self.waits[step.graph].note_step(step)


def _offload(step: Step, task: PlannedTask) -> None:
    """Copy activations away, and record their bytes; a copy that runs on needs them."""
    assert isinstance(task.stage, Stage)
    device, peer = task.device, _peer(step, task)

    def copy(data: Sequence[Tensor]) -> Sequence[Tensor]:
        return [device.to_host(x) for x in data] if peer is None else device.to_peer(data, peer)

    share = float(step.graph.offload_shares[task.stage.index])
    moved = task.stage.offload(task.microbatch, share, copy)
    step.events.nbytes[task.id] = sum(data.nbytes for data in moved)
    if outlasts_issue(task):
        step.results[task.id] = moved


def _reload(step: Step, task: PlannedTask) -> None:
    assert isinstance(task.stage, Stage)
    device, peer = task.device, _peer(step, task)

    def copy(data: Sequence[Tensor]) -> Sequence[Tensor]:
        return [device.from_host(x) for x in data] if peer is None else device.from_peer(data, peer)

    step.events.nbytes[task.id] = task.stage.reload(task.microbatch, copy)


def _peer(step: Step, task: PlannedTask) -> Device | None:
    """Return the device that holds the activations of a task's device; None for the host."""
    peer = int(step.graph.offload_peers[step.graph.device[task.id]])
    return None if peer < 0 else step.devices[peer]


class OffloadWaits:
    """Chooses the compute task that waits for each OFFLOAD of a GPU.

    Attributes
    ----------
    by_task
        OFFLOADs for which each compute task waits, and whose tensors it frees.
    """

    def __init__(self, graph: TaskGraph, tasks: Sequence[PlannedTask]) -> None:
        offloads = [t for t in tasks if graph.op[t.id] == Op.OFFLOAD and outlasts_issue(t)]
        computes = np.flatnonzero(graph.is_op(LISTED)) if offloads else np.empty(0, np.int64)
        by_device = {
            device: computes[graph.device[computes] == device]
            for device in {int(graph.device[t.id]) for t in offloads}
        }
        #: Compute tasks of the device after the F of each OFFLOAD, in their order.
        self._later: dict[int, list[int]] = {}
        for task in offloads:
            own = by_device[int(graph.device[task.id])]
            self._later[task.id] = own[own > task.id].tolist()
        self.by_task = self._grouped({t: later[1] for t, later in self._later.items()})
        self._n_steps = 0

    @staticmethod
    def _grouped(waiters: Mapping[int, int]) -> dict[int, list[int]]:
        by_task: dict[int, list[int]] = defaultdict(list)
        for offload, waiter in waiters.items():
            by_task[waiter].append(offload)
        return dict(by_task)

    def note_step(self, step: Step) -> None:
        """Note that a step has run; choose anew once, after the first steps."""
        self._n_steps += 1
        if not self._later or self._n_steps != _N_FIRST_STEPS:
            return
        timeline = step.readings().timeline
        if not timeline.complete:
            return
        free = predict_timeline(step.graph, _measured_costs(timeline))
        self.by_task = self._grouped({
            offload: next(t for t in later if free.start[t] >= free.end[offload])
            for offload, later in self._later.items()
        })  # fmt: skip  # the task that needs the RELOAD is one of them


def _measured_costs(timeline: Timeline) -> TaskCosts:
    """Return the measured durations of tasks and latencies of messages.

    In `pipesim.replay` a message lasts until its consumer starts. Here a consumer may have waited
    for an OFFLOAD, so that a message ends when it arrives.
    """
    graph, zeros = timeline.graph, np.zeros(len(timeline))
    is_recv, latency = graph.is_op(RECVS), np.zeros(len(timeline))
    recvs = np.flatnonzero(is_recv)
    sends = graph.pair[recvs]
    latency[recvs] = np.maximum(timeline.end[recvs] - timeline.end[sends], 0.0)
    latency[sends] = latency[recvs]
    duration = np.where(is_recv, 0.0, np.maximum(timeline.end - timeline.start, 0.0))
    links = np.arange(len(timeline))[:, None]
    return TaskCosts.of_tasks(CostTable(duration, latency, zeros, zeros, links))

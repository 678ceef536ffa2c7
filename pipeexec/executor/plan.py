"""Precompute, once per graph, everything needed to issue each local task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from pipeexec.devices.device import Device, RemoteDevice
from pipeexec.devices.gpu_slices import Slice
from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import add_to_group, mark_buckets
from pipeexec.executor.op_handlers import HANDLERS
from pipeexec.executor.planned_task import Handler, PlannedTask, ReplicaSync, Source
from pipeexec.executor.remote_messages import RemoteParts
from pipeexec.executor.step_part import StepPart
from pipeexec.stages.microbatches import BatchShares
from pipeexec.stages.stage import StageLike
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.rules import data_sources
from pipesim.graph.tasks import Task
from pipesim.ops import OF_DEVICES, RECVS, Op

#: Possible sources of the input of a task; of each row, the first one present counts.
_data_sources = cache(data_sources)


def plan(
    graph: TaskGraph,
    stages: Sequence[StageLike],
    devices: Sequence[Device],
    shares: BatchShares,
    parts: Sequence[StepPart],
    processes: Processes | None = None,
) -> list[PlannedTask]:
    """Return the planned tasks of this process, in order of ids.

    ``stages`` are the stages of the first replica, then those of the next.
    """
    handlers = dict(HANDLERS)
    for part in parts:
        handlers.update(part.handlers())
    _check_runnable(graph, handlers)
    _check_links(graph, devices)
    is_local = np.array([not isinstance(x, RemoteDevice) for x in devices])[graph.device]
    tasks = np.flatnonzero(is_local).tolist()
    remote_parts = (
        None if processes is None else RemoteParts(graph, tasks, devices, processes, parts)
    )
    sync_plan = _SyncPlan(graph, is_local)
    with_recompute = _stage_microbatches(graph, Op.R)
    with_weight_grad = _stage_microbatches(graph, Op.W)
    planned_tasks = []
    for index in tasks:
        task = graph.task(index)
        slot = task.replica * graph.n_stages + task.stage
        sync = sync_plan.part(index)
        special = (part.stage_handler(task, stages[slot]) for part in parts)
        handler = next((x for x in special if x is not None), None) or handlers[task.op]
        planned_task = PlannedTask(
            id=index,
            stage=stages[slot],
            microbatch=-1 if task.microbatch is None else task.microbatch,
            part=task.part,
            slot=slot,
            global_microbatch=shares.number(task.replica, max(task.microbatch or 0, 0)),
            is_recomputed=(task.stage, task.microbatch) in with_recompute,
            is_split=(task.stage, task.microbatch) in with_weight_grad,
            device=devices[task.device],
            stream=devices[task.device].stream(task.stream, blocks=bool(graph.group[index] >= 0)),
            waits=sync_plan.waits(index),
            sources=_sources(graph, index),
            handler=_gathering(handler, task, sync, int(sync_plan.groups[task.stage])),
            sync=sync,
        )
        if remote_parts is not None:
            planned_task = remote_parts.add_to(planned_task)
        planned_tasks.append(planned_task)
    return planned_tasks


def _check_runnable(graph: TaskGraph, handlers: Mapping[Op, Handler]) -> None:
    for index in np.flatnonzero(~graph.is_op(frozenset(handlers)))[:1].tolist():
        task = graph.task(index)
        raise ArgumentError(
            f"{task} cannot be run: {task.op} is simulated, not run; lower without it"
        )


def _check_links(graph: TaskGraph, devices: Sequence[Device]) -> None:
    for number, name in graph.streams:
        device = devices[number]
        if "/" in name and isinstance(device, Slice) and device.links is not None:
            raise ArgumentError(
                f"stream {name!r} of {device.name} carries one micro-batch, and the links of these "
                "slices are imposed: a GPU cannot order messages of several streams on one link; "
                'lower with streams="per_peer", or leave out link='
            )


def _stage_microbatches(graph: TaskGraph, op: Op) -> set[tuple[int, int]]:
    return {(int(graph.stage[t]), int(graph.microbatch[t])) for t in np.flatnonzero(graph.op == op)}


class _SyncPlan:
    """Find the part of each task in collectives, and the tasks that it waits for."""

    def __init__(self, graph: TaskGraph, is_local: NDArray[np.bool_]) -> None:
        self.graph, self.is_local = graph, is_local
        #: Backward during which each bucket's reduction may start; number of buckets by backward.
        self._backward = {
            t: int(graph.during[t]) for t in np.flatnonzero(graph.during >= 0).tolist()
        }
        self._n_buckets = {
            backward: int(graph.part[t]) + 1 for t, backward in self._backward.items()
        }  # ids ascend with the bucket, so each backward keeps the number of its last one
        #: Number of micro-batches whose gradients each stage reduces at once; 0 for all, or none.
        has_reduction = np.isin(np.arange(graph.n_stages), graph.stage[graph.op == Op.REDUCE_GRAD])
        self.groups = graph.reduction_groups * has_reduction

    def _members(self, index: int) -> list[int]:
        """Return the members of a task's collective that are tasks of this process."""
        group = int(self.graph.group[index])
        if group < 0:
            return []
        return [t for t in self.graph.collectives[group].tolist() if self.is_local[t]]

    def part(self, index: int) -> ReplicaSync | None:
        graph, members = self.graph, self._members(index)
        n_buckets_marked = self._n_buckets.get(index, 0)
        if not members and not n_buckets_marked:
            return None
        earlier = [t for t in members if t < index]
        return ReplicaSync(
            leader=earlier[0] if earlier else -1,
            copies=() if earlier else self._copies(members),
            n_buckets=self._n_buckets.get(self._backward.get(index, -1), 0),
            n_buckets_marked=n_buckets_marked,
            milestones=tuple(
                (self._backward[t], int(graph.part[index])) for t in members if t in self._backward
            ),
        )  # fmt: skip

    def _copies(self, members: list[int]) -> tuple[int, ...]:
        """Return the slots of this process whose gradients the members of a collective reduce.

        A member of a collective of devices stands for all stages of its device.
        """
        graph = self.graph
        if not members:
            return ()
        n, first = graph.n_stages, graph.task(members[0])
        if first.op not in OF_DEVICES:
            return tuple(int(graph.replica[t]) * n + int(graph.stage[t]) for t in members)
        slots = np.isin(graph.homes.ravel(), graph.device[members])
        return tuple(np.flatnonzero(slots).tolist())

    def waits(self, index: int) -> tuple[int, ...]:
        """Return the tasks on other streams of this process whose end a task waits for.

        These are its dependencies and the earlier members of its collective, as the first member
        does the work for all. Backwards are left out if their bucket-ready events are awaited.
        """
        graph, members = self.graph, self._members(index)
        needed = {
            t for t in graph.precedence[index].tolist()
            if self.is_local[t] and graph.stream[t] != graph.stream[index]
        }  # fmt: skip
        backwards = {self._backward[t] for t in members if t in self._backward}
        return tuple(needed.union(t for t in members if t < index).difference(backwards))


def _gathering(handler: Handler, task: Task, sync: ReplicaSync | None, group: int) -> Handler:
    """Return the handler of a task; of a backward, one that prepares its gradients' reduction."""
    if sync is not None and sync.n_buckets_marked:
        return partial(mark_buckets, handler)
    if group and task.op in (Op.B, Op.I, Op.W):
        return partial(add_to_group, handler, group)
    return handler


def _sources(graph: TaskGraph, index: int) -> tuple[Source, ...]:
    """Return the tasks whose results are the input of a task; empty if there are none.

    A task without any takes a micro-batch of the batch, or no input.
    """
    op, stage = Op(graph.op[index]), int(graph.stage[index])
    if op in RECVS:
        return (Source(int(graph.pair[index])),)
    needed = {
        (Op(graph.op[t]), int(graph.stage[t]) - stage, int(graph.peer_stage[t])): int(t)
        for t in graph.dependencies[index].tolist()
        if graph.microbatch[t] == graph.microbatch[index]
    }
    rows = _data_sources(op, int(graph.part[index]), stage if graph.edges else 0, graph.edges)
    tasks = (next((needed[x] for x in row if x in needed), -1) for row in rows)
    sources = tuple(_source(graph, index, task) for task in tasks if task >= 0)
    if op is not Op.F or stage or not graph.is_decode_step[graph.microbatch[index]]:
        return sources
    from_last = (Op.F, graph.n_stages - 1), (Op.RECV_F, 0)
    needed_tasks = graph.dependencies[index].tolist()
    return tuple(Source(t) for t in needed_tasks if (graph.op[t], graph.stage[t]) in from_last)


def _source(graph: TaskGraph, index: int, task: int) -> Source:
    """Return the part of a task's result that is an input of the task ``index``."""
    if not graph.edges or graph.op[task] not in (Op.F, Op.B, Op.I):
        return Source(task)
    stage = int(graph.stage[task])
    if graph.op[task] == Op.F:
        return Source(task, n_consumers=sum(source == stage for source, _ in graph.edges))
    before = [edge for edge in graph.edges if edge[1] == stage]
    taker = int(graph.pair[index]) if graph.op[index] == Op.SEND_B else index
    edge = (int(graph.stage[taker]), stage)
    if len(before) < 2 or edge not in before:
        return Source(task)
    slot = int(graph.replica[task]) * graph.n_stages + stage
    return Source(task, slot, before.index(edge), len(before))

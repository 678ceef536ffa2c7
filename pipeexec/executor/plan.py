"""What is known of each task of this process before any step: the plan that steps walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeexec.devices.device import Device
from pipeexec.devices.gpu_slices.slices import Slice
from pipeexec.devices.remote import RemoteDevice
from pipeexec.distributed.processes import Processes
from pipeexec.executor.gradient_sync import Work, handing_over, marking
from pipeexec.executor.op_handlers import WORK
from pipeexec.executor.remote_messages import connected
from pipeexec.executor.step import Planned
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.stage_like import StageLike
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import Task
from pipesim.ops import RECVS, Op

__all__ = ["plan"]

_OF_GRADIENT = ((Op.ALL_TO_ALL, 0), (Op.REORDER, 0), (Op.B, 1), (Op.I, 1), (Op.RECV_B, 0))
_OF_OUTPUT = ((Op.REORDER, -1), (Op.ALL_TO_ALL, -1), (Op.F, -1), (Op.RECV_F, 0))
#: Whose result a task of the key, an operation and for exchanges a part, takes, and how many stages
#: on that is: the first that it needs. A RECV takes its SEND's.
_SOURCES: Mapping[tuple[Op, int], Sequence[tuple[Op, int]]] = {
    (Op.F, -1): ((Op.ALL_TO_ALL, 0), *_OF_OUTPUT),
    (Op.B, -1): _OF_GRADIENT,
    (Op.I, -1): _OF_GRADIENT,
    (Op.SEND_F, -1): ((Op.REORDER, 0), (Op.ALL_TO_ALL, 0), (Op.F, 0)),
    (Op.SEND_B, -1): ((Op.B, 0), (Op.I, 0)),
    (Op.DISPATCH, -1): _OF_OUTPUT,
    (Op.ALL_TO_ALL, 0): ((Op.DISPATCH, 0), *_OF_OUTPUT),  # counts
    (Op.ALL_TO_ALL, 1): ((Op.ALL_TO_ALL, 0),),  # keys
    (Op.ALL_TO_ALL, 2): ((Op.F, 0),),  # vectors
    (Op.REORDER, 2): ((Op.ALL_TO_ALL, 0),),  # vectors
    (Op.REORDER, 3): _OF_GRADIENT[2:],  # gradients
    (Op.ALL_TO_ALL, 3): _OF_GRADIENT[1:],
}


def plan(
    graph: TaskGraph,
    stages: Sequence[StageLike],
    devices: Sequence[Device],
    shares: BatchShares,
    processes: Processes | None = None,
) -> list[Planned]:
    """Look up everything about each task of this process that does not change from step to step.

    ``stages`` are those of the first replica, then of the next.

    Raises
    ------
    ArgumentError
        For a graph with tasks that cannot be run, or with skip connections.
    """
    for index in np.flatnonzero(~graph.is_op(frozenset(WORK)))[:1].tolist():
        task = graph.task(index)
        raise ArgumentError(
            f"{task} cannot be run: a sharded optimizer is simulated, not run; lower without "
            "shard_optimizer"
        )
    if graph.skips:
        raise ArgumentError(
            f"graph {graph.name!r} has skip connections {list(graph.skips)}, which "
            "pipeexec.Pipeline does not run; pipeexec.GPipe does, or lower without skips"
        )
    _check_links(graph, devices)
    recomputed, split = (
        {(int(graph.stage[t]), int(graph.microbatch[t])) for t in np.flatnonzero(graph.op == op)}
        for op in (Op.R, Op.W)
    )
    here = np.array([not isinstance(x, RemoteDevice) for x in devices])[graph.device]
    during = {t: int(graph.during[t]) for t in np.flatnonzero(graph.during >= 0).tolist()}
    marks = {backward: int(graph.part[t]) + 1 for t, backward in during.items()}  # the last counts
    reduces = np.isin(np.arange(graph.n_stages), graph.stage[graph.op == Op.REDUCE_GRAD])
    groups = (graph.reduction_groups * reduces).tolist()
    planned = []
    for index in np.flatnonzero(here).tolist():
        task = graph.task(index)
        needed = {t for t in graph.precedence[index].tolist()
                  if here[t] and graph.stream[t] != graph.stream[index]}  # fmt: skip
        group = int(graph.group[index])
        members = [] if group < 0 else [t for t in graph.collectives[group].tolist() if here[t]]
        others = [t for t in members if t < index]  # the first one reduces for all
        partly = [during[t] for t in members if t in during]
        slot = task.replica * graph.n_stages + task.stage
        planned.append(
            Planned(
                id=index,
                work=_work(task, marks.get(index, 0), groups[task.stage]),
                stream=devices[task.device].stream(task.stream, blocks=group >= 0),
                device=devices[task.device],
                stage=stages[slot],
                microbatch=-1 if task.microbatch is None else task.microbatch,
                waits=tuple(needed.union(others).difference(partly)),
                source=_source(graph, index),
                recomputed=(task.stage, task.microbatch) in recomputed,
                split=(task.stage, task.microbatch) in split,
                slot=slot,
                sample=shares.number(task.replica, max(task.microbatch or 0, 0)),
                copies=() if others else tuple(
                    int(graph.replica[t]) * graph.n_stages + task.stage for t in members
                ),
                part=task.part,
                leader=others[0] if others else -1,
                marks=marks.get(index, 0),
                n_parts=marks.get(during.get(index, -1), 0),
                milestones=tuple((t, task.part) for t in partly),
            )
        )  # fmt: skip
    return planned if processes is None else connected(graph, planned, devices, processes)


def _check_links(graph: TaskGraph, devices: Sequence[Device]) -> None:
    """Raise if messages that share an imposed link of a GPU are on several streams."""
    for device, name in graph.streams:
        place = devices[device]
        if "/" in name and isinstance(place, Slice) and place.links is not None:
            raise ArgumentError(
                f"stream {name!r} of {place.name} is of one micro-batch, and the links of these "
                "slices are imposed: on a GPU nothing lets messages on several streams take turns "
                'on a link; lower with streams="per_peer", or leave out link='
            )


def _work(task: Task, marks: int, group: int) -> Work:
    """Return what a task does; a backward, also what the reduction of its gradients needs."""
    work = WORK[task.op]
    if marks:
        return marking(work)
    return handing_over(work, group) if group and task.op in (Op.B, Op.I, Op.W) else work


def _source(graph: TaskGraph, index: int) -> int:
    """Return the task whose result a task takes; -1 for none, as for what takes the batch."""
    op, stage = Op(graph.op[index]), int(graph.stage[index])
    if op in RECVS:
        return int(graph.pair[index])
    needs = {
        (Op(graph.op[needed]), int(graph.stage[needed]) - stage): int(needed)
        for needed in graph.dependencies[index].tolist()
        if graph.microbatch[needed] == graph.microbatch[index]
    }
    wanted = _SOURCES.get((op, int(graph.part[index])), ())
    return next((needs[source] for source in wanted if source in needs), -1)

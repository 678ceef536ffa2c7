"""Add recomputes and optimizer steps to the compute tasks of a schedule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.graph.verify import verify
from pipesim.lowering.recomputed_microbatches import Chosen, with_recomputes
from pipesim.ops import Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints

__all__ = ["clock_cycles", "with_recomputes_and_steps"]


def with_recomputes_and_steps(
    schedule: Schedule,
    recompute: Chosen,
    step: str,
    recompute_first: bool,
    sharded: tuple[int, ...],
) -> TaskGraph:
    """Return the compute tasks of a schedule as a graph, in the order of each device.

    An R comes before each backward if its forward kept no activations. A STEP comes after the last
    backward of a stage in each mini-batch. Options are those of `pipesim.lower`.
    """
    kinds, kind = compute_kinds(schedule)
    kinds, recomputes, of_microbatch, places = with_recomputes(
        schedule, kinds, kind, recompute, sharded, first=recompute_first
    )
    homes = np.asarray(schedule.placement.paths)
    path, stage = (
        x.ravel() if step == "flush" else np.empty(0, dtype=np.int64)
        for x in np.indices(homes.shape)
    )
    added = Kinds(
        op=np.full_like(stage, Op.STEP),
        device=homes[path, stage],
        stage=stage,
        replica=path,
        stream=np.full_like(stage, StreamKind.COMPUTE),
    )
    steps, step_microbatch, step_places = _steps(schedule, path, stage)
    position = np.concatenate([step_places, places])
    kind, microbatch = (
        np.insert(column, position, np.concatenate(new))
        for column, new in (
            (kind, [(len(kinds) + steps).astype(np.int32), recomputes]),
            (schedule.microbatch, [step_microbatch, of_microbatch]),
        )
    )
    options = LoweringOptions(n_batches=schedule.n_batches)
    return TaskGraph.of_kinds(kinds.joined(added), kind, microbatch, options=options)


def _steps(schedule: Schedule, path: Ints, stage: Ints) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Return kind, micro-batch and place of each STEP.

    The kind of a STEP is its index into ``path`` and ``stage``. Its place is its position in the
    schedule's columns: at the end of its device, or with several mini-batches, behind the last
    backward of its stage.
    """
    homes, n_batches = np.asarray(schedule.placement.paths), schedule.n_batches
    kind = np.arange(len(stage))
    if n_batches == 1:
        return kind, np.full(len(kind), -1, np.int32), schedule.ptr[homes[path, stage] + 1]
    size = schedule.n_microbatches // n_batches
    backward = np.flatnonzero((schedule.op == Op.B) | (schedule.op == Op.W))
    last = np.zeros((*homes.shape, n_batches), dtype=np.int64)
    cell = (schedule.path, schedule.stage, schedule.microbatch // size)
    np.maximum.at(last, tuple(column[backward] for column in cell), backward + 1)
    kind, batch = np.repeat(kind, n_batches), np.tile(np.arange(n_batches), len(kind))
    microbatch = ((batch + 1) * size - 1).astype(np.int32)
    return kind, microbatch, last[path[kind], stage[kind], batch]


def clock_cycles(schedule: Schedule, compute: TaskGraph) -> Ints:
    """Return the clock cycle of each compute task: its distance from the first, in tasks.

    On several paths, a STEP comes after the gradients of its stage on all paths.

    Raises
    ------
    DeadlockError
        If tasks wait for each other in a circle; the message names them.
    """
    cycles = compute.levels
    if cycles.min() < 0:
        verify(schedule)  # raises DeadlockError with the tasks
    if schedule.placement.n_paths == 1:
        return cycles
    cycles, stage = cycles.copy(), compute.stage
    gradients = np.flatnonzero(compute.is_op(frozenset({Op.B, Op.W})))
    done = np.zeros(compute.n_stages, dtype=cycles.dtype)
    np.maximum.at(done, stage[gradients], cycles[gradients])
    for step in np.flatnonzero(compute.is_op(frozenset({Op.STEP}))).tolist():
        before = cycles[compute.queue_predecessor[step]]
        cycles[step] = 1 + max(before, done[stage[step]])
    return cycles

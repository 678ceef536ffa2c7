"""Add recomputes and optimizer steps to the compute tasks of a schedule."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.graph.verify import verify
from pipesim.lowering.expert_segments import ExpertLayers, with_segments
from pipesim.lowering.recomputed_microbatches import Chosen, with_recomputes
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints


def with_recomputes_and_steps(
    schedule: Schedule,
    recompute: Chosen,
    step: str,
    recompute_first: bool,
    sharded: tuple[int, ...],
    expert_layers: ExpertLayers = (),
) -> TaskGraph:
    """Return the compute tasks of a schedule as a graph, in the order of each device.

    An R comes before each backward if its forward kept no activations. A STEP comes after the last
    backward of a stage in each mini-batch. F, B and I of stages with experts are in segments.
    Options are those of `pipesim.lower`.
    """
    kinds, kind = compute_kinds(schedule)
    kinds, recomputes, of_microbatch, places = with_recomputes(
        schedule, kinds, kind, recompute, sharded, first=recompute_first
    )
    if step == "flush":
        steps, step_microbatch, step_places = _steps(schedule)
        recomputes = np.concatenate([(len(kinds) + steps).astype(np.int32), recomputes])
        of_microbatch = np.concatenate([step_microbatch, of_microbatch])
        places = np.concatenate([step_places, places])
        kinds = _with_steps(kinds, schedule.placement)
    kind = np.insert(kind, places, recomputes)
    microbatch = np.insert(schedule.microbatch, places, of_microbatch)
    kinds, kind, microbatch = with_segments(expert_layers, kinds, kind, microbatch)
    options = LoweringOptions(n_batches=schedule.n_batches, n_slices=schedule.n_slices)
    return TaskGraph.of_kinds(kinds, kind, microbatch, options=options)


@lru_cache(maxsize=32)
def _with_steps(kinds: Kinds, placement: Placement) -> Kinds:
    """Add the kinds of STEP, those of all stages of a path after each other."""
    homes = np.asarray(placement.paths)
    path, stage = (x.ravel() for x in np.indices(homes.shape))
    op, stream = np.full_like(stage, Op.STEP), np.full_like(stage, StreamKind.COMPUTE)
    return kinds.joined(Kinds(op, homes.ravel(), stage, path, stream))


def _steps(schedule: Schedule) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Return kind, micro-batch and place of each STEP.

    The kind of a STEP is its number among those of `_with_steps`. Its place is its position in the
    schedule's columns: at the end of its device, or with several mini-batches, behind the last
    backward of its stage.
    """
    homes, n_batches = np.asarray(schedule.placement.paths), schedule.n_batches
    kind = np.arange(homes.size)
    if n_batches == 1:
        return kind, np.full(len(kind), -1, np.int32), schedule.ptr[homes.ravel() + 1]
    size = schedule.n_microbatches // n_batches
    backward = np.flatnonzero((schedule.op == Op.B) | (schedule.op == Op.W))
    last = np.zeros((*homes.shape, n_batches), dtype=np.int64)
    cell = (schedule.path, schedule.stage, schedule.microbatch // size)
    np.maximum.at(last, tuple(column[backward] for column in cell), backward + 1)
    kind, batch = np.repeat(kind, n_batches), np.tile(np.arange(n_batches), len(kind))
    microbatch = ((batch + 1) * size - 1).astype(np.int32)
    return kind, microbatch, last.reshape(homes.size, n_batches)[kind, batch]


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

"""Add recomputes and optimizer steps to the compute tasks of a schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError
from pipesim.graph.compute_tasks import compute_kinds
from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.graph.verify import verify
from pipesim.lowering.expert_segments import ExpertLayers, with_segments
from pipesim.ops import INPUT_GRADS, WEIGHT_GRADS, Op
from pipesim.scheduling.placement import Placement, is_first_on_device
from pipesim.scheduling.schedule import Schedule, kept_actions
from pipesim.utils.csr import Ints

#: Modes of recompute. `Chosen` adds ``"listed"``: the micro-batches that the schedule lists.
Recompute = Literal["never", "always", "except_last"]
Chosen = Recompute | Literal["listed"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


def with_chosen(schedule: Schedule, recompute: Chosen, sharded: tuple[int, ...]) -> Schedule:
    """Return the schedule without the listed R that a mode does not run.

    ``recompute`` is that of `pipesim.lower`; ``"listed"`` drops only the R of sharded stages.
    """
    listed = schedule.op == Op.R
    if not listed.any():
        return schedule
    is_run = _is_recomputed(schedule, recompute) & ~np.isin(schedule.stage, sharded)
    return kept_actions(schedule, ~listed | is_run)


def _is_recomputed(schedule: Schedule, recompute: Chosen) -> NDArray[np.bool_]:
    """Return whether a mode recomputes the micro-batch of each action."""
    if recompute == "except_last":
        early: NDArray[np.bool_] = schedule.microbatch != schedule.n_microbatches - 1
        return early
    return np.full(len(schedule), recompute != "never")


def recompute_label(schedule: Schedule, recompute: Chosen) -> str:
    """Return the label of a graph's recomputes: a mode, or ``"some"``.

    The schedule comes from `with_chosen`.
    """
    if recompute != "listed":
        return recompute
    forward, listed = schedule.op == Op.F, schedule.op == Op.R
    for mode in RECOMPUTE:
        wanted = _is_recomputed(schedule, mode)
        n_wanted = np.count_nonzero(forward & wanted)
        if n_wanted == np.count_nonzero(listed) and wanted[listed].all():
            return mode
    return "some"


def with_recomputes(
    schedule: Schedule,
    kinds: Kinds,
    kind: NDArray[np.int32],
    recompute: Chosen,
    sharded: tuple[int, ...],
    *,
    first: bool,
) -> tuple[Kinds, Ints, NDArray[np.int32], Ints]:
    """Return the R that a schedule does not list: all kinds, and kind, micro-batch, place of each.

    An R is inserted before the action at its place: its own backward, or with ``first`` the first
    backward of its stage.
    """
    recomputes = (schedule.op == Op.R).any()
    if first and recomputes:
        raise ArgumentError(
            f"recompute_first=True, but schedule {schedule.name!r} lists its recomputes; leave "
            "recompute_first out, or take a schedule that lists none"
        )
    none = np.empty(0, dtype=np.int64)
    if recompute in ("listed", "never"):
        return kinds, none, none.astype(np.int32), none
    backward = np.flatnonzero(kinds.is_op(INPUT_GRADS) & ~np.isin(kinds.stage, sharded))
    kinds, r_of = _recompute_kinds(kinds, backward)
    marked = np.zeros(len(kinds), dtype=bool)
    marked[backward] = True
    before = np.flatnonzero(marked[kind] & _is_recomputed(schedule, recompute))
    if recomputes:
        cell = schedule.stage * np.int64(schedule.n_microbatches) + schedule.microbatch
        before = before[~np.isin(cell[before], cell[schedule.op == Op.R])]
    turns = _first_backwards(schedule, kinds, kind, before) if first else before
    places: Ints = turns - kinds.overlapped[kind[turns]]  # not between the halves of one action
    return kinds, r_of[kind[before]], schedule.microbatch[before], places


def _recompute_kinds(kinds: Kinds, backward: Ints) -> tuple[Kinds, Ints]:
    """Add missing kinds of R for some kinds of backward; return the kind of R of each."""
    places = zip(kinds.stage.tolist(), kinds.replica.tolist(), kinds.op.tolist(), strict=True)
    kind_of_place = {(s, r): number for number, (s, r, op) in enumerate(places) if op == Op.R}
    r_of = np.full(len(kinds), -1, dtype=np.int32)
    added: list[int] = []
    for number in backward.tolist():
        place = int(kinds.stage[number]), int(kinds.replica[number])
        if place not in kind_of_place:
            kind_of_place[place] = len(kinds) + len(added)
            added.append(number)
        r_of[number] = kind_of_place[place]
    new = Kinds(
        op=np.full(len(added), Op.R),
        device=kinds.device[added],
        stage=kinds.stage[added],
        replica=kinds.replica[added],
        stream=np.full(len(added), StreamKind.COMPUTE),
    )
    return kinds.joined(new), r_of


def _first_backwards(
    schedule: Schedule, kinds: Kinds, kind: NDArray[np.int32], before: Ints
) -> Ints:
    """Return the first backward of the stage of each recomputed backward.

    ``before`` are the recomputed backwards. Their forwards must all come before the first backward.
    """
    place = (kinds.replica * schedule.n_stages + kinds.stage)[kind]
    first = np.full(int(place.max()) + 1, len(kind))
    backward = np.flatnonzero(kinds.is_op(INPUT_GRADS)[kind])
    np.minimum.at(first, place[backward], backward)
    cell = place * np.int64(schedule.n_microbatches) + schedule.microbatch
    forward = np.flatnonzero(kinds.op[kind] == Op.F)
    forward = forward[forward > first[place[forward]]]
    for late in forward[np.isin(cell[forward], cell[before])][:1].tolist():
        device, position = schedule.place(late)
        raise ArgumentError(
            f"recompute_first=True, but in schedule {schedule.name!r} device {device}, position "
            f"{position}: {schedule.orders[device][position]} comes after the first backward of "
            "its stage, so that not every R can come before that; leave recompute_first out, or "
            "take a schedule with all forwards first, such as 'gpipe'"
        )
    turns: Ints = first[place[before]]
    return turns


def with_recomputes_and_steps(
    schedule: Schedule,
    recompute: Chosen,
    step: str,
    recompute_first: bool,
    sharded: tuple[int, ...],
    expert_layers: ExpertLayers = (),
    **options: Any,
) -> TaskGraph:
    """Return the compute tasks of a schedule as a graph, in the order of each device.

    An R comes before each backward if its forward kept no activations. A STEP comes after the last
    backward of a stage in each mini-batch. F, B and I of stages with experts are in segments.
    Options are those of `pipesim.lower`, and fields of `LoweringOptions`.
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
    own = LoweringOptions.of_schedule(schedule, **options)
    return TaskGraph.of_kinds(kinds, kind, microbatch, options=own)


@lru_cache(maxsize=32)
def _with_steps(kinds: Kinds, placement: Placement) -> Kinds:
    """Add the kinds of STEP, those of all stages of a path after each other."""
    homes = np.asarray(placement.paths)
    path, stage = np.nonzero(kinds.holds)
    op, stream = np.full_like(stage, Op.STEP), np.full_like(stage, StreamKind.COMPUTE)
    return kinds.joined(Kinds(op, homes[path, stage], stage, path, stream))


def _steps(schedule: Schedule) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Return kind, micro-batch and place of each STEP.

    The kind of a STEP is its number among those of `_with_steps`. Its place is its position in the
    schedule's columns: at the end of its device, or with several mini-batches, behind the last
    backward of its stage.
    """
    homes, n_batches = np.asarray(schedule.placement.paths), schedule.n_batches
    if n_batches == 1:
        devices = homes[is_first_on_device(homes)]
        kind = np.arange(len(devices))
        return kind, np.full(len(kind), -1, np.int32), schedule.ptr[devices + 1]
    kind = np.arange(homes.size)  # of one path
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
    """
    cycles = compute.levels
    if cycles.min() < 0:
        verify(compute if compute.prompt_slices else schedule)  # raises DeadlockError with tasks
    if schedule.placement.n_paths == 1:
        return cycles
    cycles, stage = cycles.copy(), compute.stage
    gradients = np.flatnonzero(compute.is_op(WEIGHT_GRADS))
    done = np.zeros(compute.n_stages, dtype=cycles.dtype)
    np.maximum.at(done, stage[gradients], cycles[gradients])
    for step in np.flatnonzero(compute.is_op(frozenset({Op.STEP}))).tolist():
        before = cycles[compute.queue_predecessor[step]]
        cycles[step] = 1 + max(before, done[stage[step]])
    return cycles

"""Check the invariants of a schedule: each action once, on its device, in a valid order.

Each invariant is a function. `pipesim.verify` also finds orders that cannot run.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.ops import LISTED, SCHEDULED, Action, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

#: If a schedule lacks more than this number of actions for each that it lists, the missing actions
#: are not searched for.
_MOST_CELLS_PER_ACTION = 1000


def verify_listing(schedule: Schedule) -> None:
    """Check all invariants of a schedule except deadlocks.

    Raises
    ------
    ScheduleError
        For a wrong schedule; the message shows the grid with the wrong cell marked.
    """
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    if schedule.n_batches < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has n_batches={schedule.n_batches}; give at least 1, with "
            "schedule.with_updates"
        )
    _check_slices(schedule)
    if n_stages * n_microbatches > _MOST_CELLS_PER_ACTION * len(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {len(schedule)} actions, but {n_stages} stages and "
            f"n_microbatches={n_microbatches} need at least {2 * n_stages * n_microbatches}; give "
            "the number of micro-batches that it has"
        )
    _check_paths(schedule)
    listed = np.zeros((n_stages, n_microbatches), dtype=np.uint8)
    columns = schedule.op, schedule.stage, schedule.microbatch, schedule.ptr
    paths = schedule.placement.path_of(n_microbatches)
    if not _lists_all(*columns, np.asarray(schedule.placement.paths), paths, listed):
        _check_cells(schedule)
        _check_counts(schedule)
    _check_overlaps(schedule)
    _check_updates(schedule)


@kernel()
def _lists_all(
    op: Ints,
    stage: Ints,
    microbatch: Ints,
    ptr: Ints,
    home: Ints,
    path: Ints,
    listed: NDArray[np.uint8],
) -> bool:
    """Return whether each cell has one F, and one B or one I and one W, and at most one R.

    A cell is a stage and micro-batch, and its actions must be on its device. ``listed`` is
    zeros at first, and gets a bit for each operation of each cell.
    """
    n_stages, n_microbatches = listed.shape
    for device in range(len(ptr) - 1):
        for k in range(ptr[device], ptr[device + 1]):
            s, m = stage[k], microbatch[k]
            if not (0 <= op[k] <= 4 and 0 <= s < n_stages and 0 <= m < n_microbatches):
                return False
            bit = 1 << op[k]
            if home[path[m], s] != device or listed[s, m] & bit:
                return False
            listed[s, m] |= bit
    for s in range(n_stages):
        for m in range(n_microbatches):
            if listed[s, m] & 15 != 3 and listed[s, m] & 15 != 13:  # F and B; F, I and W; maybe R
                return False
    return True


def _refuse(schedule: Schedule, index: SupportsIndex, problem: str) -> None:
    """Raise for the action at ``index`` of the columns, with the grid."""
    device, position = schedule.place(int(index))
    action = schedule.orders[device][position]
    raise ScheduleError(
        f"schedule {schedule.name!r}: device {device}, position {position}: {action} {problem}\n"
        f"{schedule.grid(mark=(device, position))}"
    )


def _check_cells(schedule: Schedule) -> None:
    """Check each action: operation, range, device, and that it is listed once."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    for index in np.flatnonzero(~np.isin(schedule.op, sorted(LISTED))):
        _refuse(schedule, index, "is no operation that a schedule lists (F, B, I, W, R)")
    for index in np.flatnonzero((schedule.stage < 0) | (schedule.stage >= n_stages)):
        _refuse(schedule, index, f"names a stage outside 0..{n_stages - 1}")
    for index in np.flatnonzero(
        (schedule.microbatch < 0) | (schedule.microbatch >= n_microbatches)
    ):
        _refuse(schedule, index, f"names a micro-batch outside 0..{n_microbatches - 1}")
    home = np.asarray(schedule.placement.paths)[schedule.path, schedule.stage]
    for index in np.flatnonzero(home != schedule.device):
        of_path = f" for micro-batch {schedule.microbatch[index]}"
        _refuse(schedule, index, f"is misplaced: stage {schedule.stage[index]} lies on device "
                f"{home[index]}{of_path if schedule.placement.n_paths > 1 else ''}")  # fmt: skip
    _, first = np.unique(_keys(schedule), return_index=True)
    repeated = np.ones(len(schedule), dtype=bool)
    repeated[first] = False
    for index in np.flatnonzero(repeated):
        _refuse(schedule, index, "is a duplicate; it is listed before")


def _keys(schedule: Schedule) -> NDArray[np.int64]:
    """Number each (op, stage, micro-batch)."""
    cell = schedule.stage.astype(np.int64) * schedule.n_microbatches + schedule.microbatch
    return schedule.op * np.int64(schedule.n_stages * schedule.n_microbatches) + cell


def _check_counts(schedule: Schedule) -> None:
    """Check that each stage and micro-batch has F, and B or else both I and W."""
    shape = schedule.n_stages, schedule.n_microbatches
    present = {op: np.zeros(shape, dtype=bool) for op in SCHEDULED}
    for op, cells in present.items():
        of_op = schedule.op == op
        cells[schedule.stage[of_op], schedule.microbatch[of_op]] = True
    for half in (Op.I, Op.W):
        both = present[Op.B] & present[half]
        for stage, microbatch in np.argwhere(both):
            cell = (stage, half, microbatch)
            index = np.flatnonzero(
                (schedule.stage == cell[0])
                & (schedule.op == half)
                & (schedule.microbatch == microbatch)
            )[0]
            _refuse(schedule, index, f"is listed with {Action(int(stage), Op.B, int(microbatch))}, "
                                     "which is the whole backward")  # fmt: skip
    split = present[Op.I] | present[Op.W]
    missing = {
        Op.F: ~present[Op.F],
        Op.B: ~present[Op.B] & ~split,
        Op.I: split & ~present[Op.I],
        Op.W: split & ~present[Op.W],
    }
    for op, cells in missing.items():
        for stage, microbatch in np.argwhere(cells):
            path = schedule.placement.path_of(schedule.n_microbatches)[microbatch]
            device = schedule.placement.paths[path][stage]
            end = len(schedule.orders[device])
            raise ScheduleError(
                f"schedule {schedule.name!r}: device {device} lacks "
                f"{Action(int(stage), op, int(microbatch))} ({int(cells.sum())} {op.name} missing "
                f"in all); add it to the order\n{schedule.grid(mark=(device, end))}"
            )


def _check_paths(schedule: Schedule) -> None:
    """Check that each path has a micro-batch."""
    if schedule.n_microbatches < schedule.placement.n_paths:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_microbatches} micro-batches for the "
            f"{schedule.placement.n_paths} paths of its placement; give each path one at least"
        )


def _check_slices(schedule: Schedule) -> None:
    """Check that mini-batches and paths have whole sequences."""
    n_slices = schedule.n_slices
    if n_slices == 1:
        return
    size = schedule.n_microbatches // schedule.n_batches
    if n_slices < 1 or size % n_slices:
        raise ScheduleError(
            f"schedule {schedule.name!r} has n_slices={n_slices}, but {size} micro-batches a "
            "mini-batch, each one slice; give a divisor, with schedule.with_slices"
        )
    paths = schedule.placement.path_of(schedule.n_microbatches).reshape(-1, n_slices)
    for sequence in np.flatnonzero((paths != paths[:, :1]).any(axis=1))[:1]:
        raise ScheduleError(
            f"schedule {schedule.name!r}: slices of sequence {sequence} take several paths through "
            "the stages, but a stage keeps keys and values for the slices of its own path; give a "
            "number of micro-batches of which each path has whole sequences"
        )


def _check_overlaps(schedule: Schedule) -> None:
    """Check that each overlapped action is an F and the B after it."""
    if schedule.overlapped is None:
        return
    first = np.flatnonzero(schedule.overlapped)
    second_op = np.append(schedule.op, -1)[first + 1]
    is_last = np.isin(first + 1, schedule.ptr)
    for index in first[(schedule.op[first] != Op.F) | (second_op != Op.B) | is_last]:
        _refuse(schedule, index, "is overlapped with nothing: an F overlaps with the B "
                                 "listed right after it")  # fmt: skip


def _check_updates(schedule: Schedule) -> None:
    """Check mini-batches: their number, their order on each stage, and the weights of each F."""
    name, n_batches, versions = schedule.name, schedule.n_batches, schedule.weight_versions
    if n_batches == 1:
        return
    if versions == "one" or schedule.n_microbatches % n_batches:
        raise ScheduleError(
            f"schedule {name!r} has {n_batches} mini-batches of {schedule.n_microbatches} "
            f"micro-batches in all and weight_versions={versions!r}; mini-batches are of one size, "
            'and several in a step need "stashed" or "double_buffered" weights'
        )
    if schedule.placement.n_paths > 1:
        raise ScheduleError(
            f"schedule {name!r} has {n_batches} mini-batches, and a placement of several paths; "
            "a bidirectional pipeline takes one at a time"
        )
    batch = schedule.microbatch // (schedule.n_microbatches // n_batches)
    ends = np.flatnonzero(np.isin(schedule.op, (Op.B, Op.W)))
    place = np.lexsort((ends, schedule.stage[ends], schedule.path[ends]))
    ends = ends[place]
    same = (np.diff(schedule.stage[ends]) == 0) & (np.diff(schedule.path[ends]) == 0)
    for k in np.flatnonzero(same & (np.diff(batch[ends]) < 0)):
        _refuse(schedule, ends[k + 1], "belongs to an earlier mini-batch than the backward before "
                                       "it; a stage steps after each mini-batch")  # fmt: skip
    if versions == "double_buffered":
        _check_buffers(schedule, batch, ends)


def _check_buffers(schedule: Schedule, batch: Ints, ends: Ints) -> None:
    """Check that F of mini-batch t comes after the whole backward of t - 2 on its stage."""
    last = np.full((schedule.placement.n_paths, schedule.n_stages, schedule.n_batches), -1)
    last[schedule.path[ends], schedule.stage[ends], batch[ends]] = ends
    forward = np.flatnonzero((schedule.op == Op.F) & (batch >= 2))
    needed = last[schedule.path[forward], schedule.stage[forward], batch[forward] - 2]
    for index in forward[needed > forward]:
        _refuse(schedule, index, f"needs the weights that mini-batch {batch[index] - 2} leaves, "
                "whose backward comes later; give mini-batches more micro-batches")  # fmt: skip

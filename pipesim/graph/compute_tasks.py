"""Turn the compute actions of a schedule into kinds of task, and a graph without messages."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.options import LoweringOptions
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.ops import LISTED
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule


def compute_kinds(schedule: Schedule) -> tuple[Kinds, NDArray[np.int32]]:
    """Return the kinds of compute action of a schedule, and the kind of each action.

    Actions are in the order of the schedule's columns: device after device. The paths of a
    bidirectional placement are replicas. Halves of overlapped actions are kinds of their own.
    """
    shape = len(LISTED), schedule.n_stages, schedule.placement.n_paths, 2
    code = schedule.op * np.int32(schedule.n_stages) + schedule.stage
    if shape[2] > 1 or schedule.overlapped is not None:
        code = (code * np.int64(shape[2]) + schedule.path) * 2 + overlapped_halves(schedule)
    else:
        shape = (*shape[:2], 1, 1)
    is_kind = np.zeros(math.prod(shape), dtype=bool)
    is_kind[code] = True
    kinds, number = _table(is_kind.tobytes(), shape, schedule.placement)
    return kinds, number[code]


@lru_cache(maxsize=32)
def _table(
    is_kind: bytes, shape: tuple[int, ...], placement: Placement
) -> tuple[Kinds, NDArray[np.int32]]:
    """Return the kinds of some codes, and the number of the kind of each code.

    ``is_kind`` marks the codes: those of operation, stage, path and half, in an array of ``shape``.
    """
    marked = np.frombuffer(is_kind, dtype=bool)
    op, stage, path, half = np.unravel_index(np.flatnonzero(marked), shape)
    homes, stream = np.asarray(placement.paths), np.full_like(op, StreamKind.COMPUTE)
    kinds = Kinds(op, homes[path, stage], stage, path, stream, half)
    return kinds, (np.cumsum(marked) - 1).astype(np.int32)


def overlapped_halves(schedule: Schedule) -> NDArray[np.bool_]:
    """Return whether each action is a half of an overlapped action."""
    if schedule.overlapped is None:
        return np.zeros(len(schedule), dtype=bool)
    after = np.zeros_like(schedule.overlapped)
    after[1:] = schedule.overlapped[:-1]
    return schedule.overlapped | after


def compute_graph(schedule: Schedule) -> TaskGraph:
    """Return the compute actions of a schedule as a graph; ids are indices into its columns."""
    options = LoweringOptions.of_schedule(schedule)
    return TaskGraph.of_kinds(*compute_kinds(schedule), schedule.microbatch, options=options)

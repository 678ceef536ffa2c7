"""Positions of tasks in a timeline's figure: rows of devices, and the lanes in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Rows of a device with its transfers.
WITH_TRANSFERS = 1.9


@dataclass(frozen=True)
class TaskLanes:
    """Lane of each task, in rows: centre ``y`` and ``height``; ``y`` is NaN for tasks left out.

    ``bands`` holds centre and height of each device's compute lane, shape ``(n_devices, 2)``.
    """

    y: Floats
    height: Floats
    bands: Floats


def rows(graph: TaskGraph, *, transfers: bool) -> float:
    """Return the number of rows of all devices: more if transfers have their own lanes."""
    return graph.n_devices * (WITH_TRANSFERS if _has_copies(graph, transfers) else 1.0)


def lanes(
    graph: TaskGraph, *, transfers: bool, half: int = 0, streams: Flags | None = None
) -> TaskLanes:
    """Return the lanes of a timeline.

    Parameters
    ----------
    graph
        Graph of the timeline.
    transfers
        Whether copy streams have lanes, if any.
    half
        Part of a device's row: -1 is the upper half, 1 the lower half; 0 is the whole row.
    streams
        Whether a copy stream has a lane, shape ``(len(graph.streams),)``. None: all have.
    """
    if _has_copies(graph, transfers):
        return _with_copies(graph, 0.23 * half, 0.48 if half else 1.0, streams)
    return _one_lane(graph, 0.2 * half, 0.36 if half else 0.8)


def _has_copies(graph: TaskGraph, transfers: bool) -> bool:
    """Return whether tasks of other than compute streams are drawn."""
    return transfers and not graph.on_compute.all()


def _one_lane(graph: TaskGraph, offset: float, height: float) -> TaskLanes:
    """Put compute streams into one lane a device, ``offset`` rows below the middle of its row."""
    centres = np.arange(graph.n_devices) + offset
    return TaskLanes(
        y=np.where(graph.on_compute, centres[graph.device], np.nan),
        height=np.full(len(graph), height),
        bands=np.column_stack([centres, np.full_like(centres, height)]),
    )


def _with_copies(graph: TaskGraph, offset: float, room: float, streams: Flags | None) -> TaskLanes:
    """Put compute streams on top, and below them a thin lane for each of the ``streams``.

    All lanes of a device take ``room`` rows, ``offset`` rows below the middle of its row.
    """
    compute = _one_lane(graph, offset - 0.17 * room, 0.5 * room)
    copy_streams: list[list[int]] = [[] for _ in range(graph.n_devices)]
    for number, (device, name) in enumerate(graph.streams):
        if name != "compute" and (streams is None or streams[number]):
            copy_streams[device].append(number)
    lane_height = 0.3 * room / max(1, *map(len, copy_streams))
    y = np.full(len(graph.streams), np.nan)
    for device, numbers in enumerate(copy_streams):
        y[numbers] = device + offset + 0.11 * room + lane_height * (np.arange(len(numbers)) + 0.5)
    return TaskLanes(
        y=np.where(graph.on_compute, compute.y, y[graph.stream]),
        height=np.where(graph.on_compute, compute.height, lane_height * 0.86),
        bands=compute.bands,
    )

"""Where the tasks of a timeline are drawn: rows of devices, and the lanes in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph

__all__ = ["Lanes", "lanes", "rows"]

Floats = NDArray[np.float64]

#: Rows that a device takes with its transfers.
WITH_TRANSFERS = 1.9


@dataclass(frozen=True)
class Lanes:
    """Where each task is drawn, in rows: centre ``y`` and ``height``; NaN for those left out.

    ``bands`` holds the same of each device's compute lane, shape ``(n_devices, 2)``.
    """

    y: Floats
    height: Floats
    bands: Floats


def rows(graph: TaskGraph, *, transfers: bool) -> float:
    """Return how many rows the devices take: more where transfers have lanes of their own."""
    return graph.n_devices * (WITH_TRANSFERS if _has_copies(graph, transfers) else 1.0)


def lanes(graph: TaskGraph, *, transfers: bool, half: int = 0) -> Lanes:
    """Return the lanes of a timeline.

    Parameters
    ----------
    graph
        What is drawn.
    transfers
        Whether copy streams have lanes, if there are any.
    half
        Of the row of a device that two timelines share: -1 is the upper, 1 the lower; 0 is all.
    """
    if _has_copies(graph, transfers):
        return _with_copies(graph, 0.23 * half, 0.48 if half else 1.0)
    return _one_lane(graph, 0.2 * half, 0.36 if half else 0.8)


def _has_copies(graph: TaskGraph, transfers: bool) -> bool:
    """Return whether there is anything to draw beside what is on compute streams."""
    return transfers and not graph.on_compute.all()


def _one_lane(graph: TaskGraph, offset: float, height: float) -> Lanes:
    """Put what is on compute streams into one lane a device, ``offset`` rows below its middle."""
    centres = np.arange(graph.n_devices) + offset
    return Lanes(
        y=np.where(graph.on_compute, centres[graph.device], np.nan),
        height=np.full(len(graph), height),
        bands=np.column_stack([centres, np.full_like(centres, height)]),
    )


def _with_copies(graph: TaskGraph, offset: float, room: float) -> Lanes:
    """Put compute streams above, and under them a thin lane for each copy stream of the device.

    All of it takes ``room`` rows, ``offset`` rows below the middle of the device's.
    """
    lanes = _one_lane(graph, offset - 0.17 * room, 0.5 * room)
    of_device: list[list[int]] = [[] for _ in range(graph.n_devices)]
    for number, (device, name) in enumerate(graph.streams):
        if name != "compute":
            of_device[device].append(number)
    thin = 0.3 * room / max(1, *map(len, of_device))
    y = np.zeros(len(graph.streams))
    for device, numbers in enumerate(of_device):
        y[numbers] = device + offset + 0.11 * room + thin * (np.arange(len(numbers)) + 0.5)
    return Lanes(
        y=np.where(graph.on_compute, lanes.y, y[graph.stream]),
        height=np.where(graph.on_compute, lanes.height, thin * 0.86),
        bands=lanes.bands,
    )

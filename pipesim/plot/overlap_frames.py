"""Frames around an F and a B of a timeline that run as one action.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.graph.overlaps import overlapped_pairs
from pipesim.plot.style import INK
from pipesim.timeline.timeline import Timeline

Floats = NDArray[np.float64]

#: Width of a frame's line (points).
LINE = 0.9


def draw_frames(
    ax: Axes, timeline: Timeline, y: Floats, height: Floats, scale: float, gid: str
) -> None:
    """Frame each F and B of one action, from the F's start to the B's end, if both ended.

    Parameters
    ----------
    ax
        Axes whose limits are set.
    timeline
        Timeline of the tasks.
    y, height
        Centre and height of each task's box, in rows; NaN for tasks left out.
    scale
        Units of the time axis in a second.
    gid
        Identifier of the collection of frames. It is not added if nothing is overlapped.
    """
    graph, start, end = timeline.graph, timeline.start * scale, timeline.end * scale
    first, second = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    framed = np.isfinite(start[first] + end[first] + end[second] + y[first])
    first, second = first[framed], second[framed]
    if not len(first):
        return
    half = height[first] / 2
    left, right, top, bottom = start[first], end[second], y[first] - half, y[first] + half
    around = ((left, top), (right, top), (right, bottom), (left, bottom))
    corners: Any = np.stack([np.stack(corner, axis=-1) for corner in around], axis=1)
    frames = PolyCollection(corners, facecolors="none", edgecolors=INK, linewidths=LINE, zorder=2.2)
    frames.set_gid(gid)
    ax.add_collection(frames, autolim=False)


def frame_entry(graph: TaskGraph) -> dict[str, Patch]:
    """Return the legend's entry for frames, by its label; none if nothing is overlapped."""
    if not graph.kinds.overlapped.any():
        return {}
    return {"overlapped": Patch(fc="white", ec=INK, lw=LINE)}

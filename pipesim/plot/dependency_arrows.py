"""Arrows between the boxes of a timeline's figure: results that another device needs.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import SENDS
from pipesim.plot.lanes import TaskLanes
from pipesim.plot.style import INK
from pipesim.timeline.timeline import Timeline

Indices = NDArray[np.int64]


def draw_dependencies(ax: Axes, timeline: Timeline, lanes: TaskLanes, *, scale: float) -> None:
    """Draw an arrow from the end of each compute task to the start of its consumers elsewhere."""
    producer, consumer = _across_devices(timeline.graph)
    ran = timeline.ran[producer] & timeline.ran[consumer]
    producer, consumer = producer[ran], consumer[ran]
    if not len(producer):
        return
    x, y = timeline.end[producer] * scale, lanes.y[producer]
    dx, dy = timeline.start[consumer] * scale - x, lanes.y[consumer] - y
    # An arrow begins and ends inside the two boxes, so that the reader sees which two they are.
    inset = np.sign(dy) * 0.18 * lanes.height[producer]
    arrows = ax.quiver(
        x, y + inset, dx, dy - 2 * inset,
        angles="xy", scale_units="xy", scale=1.0, units="inches", width=0.6 / 72,
        headwidth=5.5, headlength=6.0, headaxislength=5.0, minlength=0.1, minshaft=1.0,
        color=INK, zorder=4,
    )  # fmt: skip
    arrows.set_gid("dependencies")


def _across_devices(graph: TaskGraph) -> tuple[Indices, Indices]:
    """Return producers and consumers on different devices: compute tasks, without messages."""
    consumer, needed = graph.dependencies.rows, graph.dependencies.values
    sends = graph.is_op(SENDS)
    # Of each SEND, the task whose result it sends.
    content = np.full(len(graph), -1, dtype=np.int64)
    content[consumer[sends[consumer]]] = needed[sends[consumer]]
    received = (graph.pair[needed] >= 0) & ~sends[consumer]
    producer = np.where(received, content[graph.pair[needed]], needed)
    across = graph.device[producer] != graph.device[consumer]
    kept = (producer >= 0) & (graph.pair[consumer] < 0) & across
    return producer[kept], consumer[kept]

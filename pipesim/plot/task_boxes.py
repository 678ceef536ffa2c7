"""Parts of a timeline's figure: boxes of tasks, bubbles, frames, arrows, and entries of the legend.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pipesim.graph.dependencies import overlapped_pairs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE, SENDS, Op, part_letter
from pipesim.plot.figure_style import current_style, shades, unfinished_colour, whiteness
from pipesim.plot.fitting_labels import MicrobatchNumbers, points_per_unit
from pipesim.plot.palette import (
    INK,
    chunks,
    n_chunks,
    outline,
    text_colours,
)
from pipesim.plot.timelines import TaskLanes
from pipesim.timeline.timeline import Timeline

# Boxes of tasks and bubbles

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

BUBBLE, GREY = "#EEEEEE", "#909090"
DASHES = (0, (3, 2))
#: Narrower boxes have no gaps between them, and no hatch (points).
MIN_WITH_GAP, MIN_WITH_HATCH = 1.5, 3.0


@dataclass(frozen=True)
class TaskBoxes:
    """The tasks of a timeline as rectangles, one entry a task; times in units of the axis.

    - ``start`` and ``end`` are NaN for tasks that never started. A task that never ended reaches
      beyond the axes.
    - ``lasting``, ``instant``, ``unfinished``: ids of tasks that took time, of transfers that took
      none, and of tasks that never ended.
    - ``colours``: red, green, blue (0..1).
    - ``points``: least width of nine in ten compute boxes (points).
    """

    graph: TaskGraph
    lanes: TaskLanes
    start: Floats
    end: Floats
    lasting: Indices
    instant: Indices
    unfinished: Indices
    colours: Floats
    points: float

    @classmethod
    def lay_out(
        cls, ax: Axes, timeline: Timeline, lanes: TaskLanes, scale: float, tint: float
    ) -> TaskBoxes:
        """Lay out a timeline on axes whose limits are set."""
        graph = timeline.graph
        start, end = timeline.start * scale, timeline.end * scale
        started = ~np.isnan(lanes.y) & ~np.isnan(start)
        lasting, unfinished = started & (end > start), started & np.isnan(end)
        computing = (end - start)[lasting & graph.is_op(COMPUTE)]
        narrow = float(np.quantile(computing, 0.1)) if len(computing) else 0.0
        return cls(
            graph,
            lanes,
            start,
            np.where(unfinished, ax.get_xlim()[1] * 1.02, end),
            np.flatnonzero(lasting),
            # A compute task that takes no time is not drawn.
            np.flatnonzero(started & (end == start) & ~graph.on_compute),
            np.flatnonzero(unfinished),
            shades(graph.op, chunks(graph.device, graph.stage), tint),
            narrow * points_per_unit(ax)[0],
        )

    def corners(self, members: Indices) -> Any:
        """Return the corners of the boxes of tasks ``members``, shape ``(len(members), 4, 2)``."""
        x0, x1 = self.start[members], self.end[members]
        return _corners(x0, x1, self.lanes.y[members], self.lanes.height[members])


def _corners(x0: Floats, x1: Floats, y: Floats, height: Floats) -> Any:
    """Return the corners of rectangles, shape ``(n, 4, 2)``."""
    y0, y1 = y - height / 2, y + height / 2
    corners = ((x0, y0), (x1, y0), (x1, y1), (x0, y1))
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def draw_bubbles(ax: Axes, lanes: TaskLanes, end: float) -> None:
    """Fill the compute lanes to ``end``, the makespan. Parts that no box covers are bubble."""
    y, height = lanes.bands.T
    corners = _corners(np.zeros_like(y), np.full_like(y, end), y, height)
    _add(ax, PolyCollection(corners, facecolors=BUBBLE, linewidths=0, zorder=1), "bubbles")


def draw_boxes(
    ax: Axes,
    timeline: Timeline,
    lanes: TaskLanes,
    *,
    scale: float,
    name: str = "cells",
    tint: float = 0.0,
    numbers: bool | float = True,
) -> dict[Op, str | None]:
    """Draw the tasks of a timeline; return the hatch of each operation that was drawn, or None.

    The limits of the axes are set. ``scale`` is the units of the time axis in a second. Each
    operation's collection has the gid ``name:op``, the numbers have ``name:numbers``. ``tint`` is
    the share of white to mix in, 0..1; above 0, boxes are outlined in the full colour. ``numbers``
    may be the smallest size of numbers (points).
    """
    boxes = TaskBoxes.lay_out(ax, timeline, lanes, scale, tint)
    drawn: dict[Op, str | None] = {}
    others = np.concatenate([boxes.instant, boxes.unfinished])
    for op in Op:
        lasting = boxes.lasting[boxes.graph.op[boxes.lasting] == op]
        if len(lasting) or (boxes.graph.op[others] == op).any():
            hatch = current_style().hatches.get(op) or None
            drawn[op] = hatch if boxes.points >= MIN_WITH_HATCH else None
        if len(lasting):
            _draw_op(ax, boxes, op, lasting, drawn[op], f"{name}:{op.name}", bool(tint))
    draw_frames(ax, timeline, lanes.y, lanes.height, scale, f"{name}:overlapped")
    _draw_instants(ax, boxes, f"{name}:instant")
    if len(boxes.unfinished):
        _draw_unfinished(ax, boxes, f"{name}:unfinished")
    if numbers is not False:
        artist = _numbers(boxes, [op for op, hatch in drawn.items() if hatch])
        artist.set_gid(f"{name}:numbers")
        if numbers is not True:
            artist.smallest = numbers
        ax.add_artist(artist)
    return drawn


def _draw_op(
    ax: Axes, boxes: TaskBoxes, op: Op, members: Indices, hatch: str | None, gid: str, pale: bool
) -> None:
    gaps = boxes.points >= MIN_WITH_GAP
    # matplotlib reads the hatch's width only when it creates a collection.
    with mpl.rc_context({"hatch.linewidth": 0.5}):
        collection = PolyCollection(
            boxes.corners(members),
            facecolors=boxes.colours[members],
            edgecolors=outline(current_style().palette[op]) if pale else "white",
            linewidths=min(0.5, 0.12 * boxes.points) if gaps else 0.0,
            antialiaseds=gaps,
            hatch=hatch,
            # The outline of a hatched box lies under its neighbours'.
            zorder=1.9 if hatch else 2.0,
        )
    _add(ax, collection, gid)


def _draw_instants(ax: Axes, boxes: TaskBoxes, gid: str) -> None:
    """Draw a tick for each message that takes no time."""
    members = boxes.instant
    x, y, half = boxes.start[members], boxes.lanes.y[members], boxes.lanes.height[members] / 2
    ends = np.column_stack([x, y - half]), np.column_stack([x, y + half])
    segments: Any = np.stack(ends, axis=1)
    _add(ax, LineCollection(segments, colors=boxes.colours[members], linewidths=1.0, zorder=2), gid)


def _draw_unfinished(ax: Axes, boxes: TaskBoxes, gid: str) -> None:
    """Draw tasks that began and never ended: pale, dashed, open to the edge of the axes."""
    collection = PolyCollection(
        boxes.corners(boxes.unfinished),
        facecolors=0.4 * boxes.colours[boxes.unfinished] + 0.6,
        edgecolors=unfinished_colour(),
        linestyles=[DASHES],
        linewidths=0.8,
        zorder=2.5,
    )
    _add(ax, collection, gid)


def _numbers(boxes: TaskBoxes, hatched: list[Op]) -> MicrobatchNumbers:
    """Return the number of its micro-batch for each box on a compute stream.

    The number of a skip's message is followed by the stage at its other end, as in ``3>2`` or
    ``3<0``; that of an exchange by the letter of the data, as in ``2k``; that of a bucket by the
    bucket, as in ``.1``.
    """
    graph = boxes.graph
    members = np.concatenate([boxes.lasting, boxes.unfinished])
    numbered = (graph.microbatch >= 0) | (graph.part >= 0)
    members = members[graph.on_compute[members] & numbered[members]]
    start, end = boxes.start[members], boxes.end[members]
    return MicrobatchNumbers(
        (start + end) / 2,
        boxes.lanes.y[members],
        end - start,
        boxes.lanes.height[members],
        _texts(graph, members),
        text_colours(boxes.colours[members]),
        microbatch=graph.microbatch[members],
        kinds=graph.op[members],
        fills=boxes.colours[members],
        hatched=np.isin(graph.op[members], hatched),
    )


def _texts(graph: TaskGraph, members: Indices) -> list[str]:
    shown = [str(number) for number in graph.microbatch[members].tolist()]
    for k in np.flatnonzero(graph.peer_stage[members] >= 0).tolist():
        task = graph.task(int(members[k]))
        shown[k] += f"{'>' if task.op in SENDS else '<'}{task.peer_stage}"
    for k in np.flatnonzero(graph.part[members] >= 0).tolist():
        task = graph.task(int(members[k]))
        number = "" if task.microbatch is None else str(task.microbatch)
        shown[k] = number + part_letter(task.op, task.part)
    return shown


def _add(ax: Axes, collection: PolyCollection | LineCollection, gid: str) -> None:
    """Add a collection without changing the limits of the axes."""
    collection.set_gid(gid)
    ax.add_collection(collection, autolim=False)


def legend_entries(
    graph: TaskGraph,
    drawn: Mapping[Op, str | None],
    *,
    compared: bool = False,
    unfinished: bool = False,
) -> tuple[list[Any], list[str]]:
    """Return a legend's handles and labels: timelines, operations, overlaps, chunks, unfinished."""
    entries: dict[str, Patch | Line2D] = {}
    if compared:
        entries["predicted"] = Patch(fc="#D3D3D3", ec=GREY, lw=0.7)
        entries["measured"] = Patch(fc=GREY, lw=0)
    style = current_style()
    for op in sorted(drawn):
        entries[style.operations[op]] = Patch(
            fc=style.palette[op], ec="white", lw=0, hatch=drawn[op]
        )
    entries |= frame_entry(graph)
    white = whiteness(np.arange(n_chunks(graph)))
    last = len(white) - 1
    if last and style.grey:  # the greys of chunks alone would be those of operations
        for op in [op for op in (Op.F, Op.B, Op.I, Op.W) if op in drawn]:
            entries[f"{style.operations[op]}, chunk {last}"] = Patch(
                fc=style.palette[op], ec="white", lw=0, hatch=drawn[op], alpha=1 - white[last]
            )
    for chunk in (0, last) if last and not style.grey else ():
        entries[f"chunk {chunk}"] = Patch(fc=GREY, alpha=1 - white[chunk], lw=0)
    if unfinished:
        entries["unfinished"] = Patch(fc="white", ec=unfinished_colour(), lw=0.8, ls=DASHES)
    for name, dashes in (("predicted", DASHES), ("measured", "-")) if compared else ():
        entries[f"{name} makespan"] = Line2D([], [], color=INK, ls=dashes, lw=0.8)
    return list(entries.values()), list(entries)


# Frames around an F and a B that run as one action


#: Width of a frame's line (points).
LINE = 0.9


def draw_frames(
    ax: Axes, timeline: Timeline, y: Floats, height: Floats, scale: float, gid: str
) -> None:
    """Frame each F and B of one action, from the F's start to the B's end, if both ended.

    ``y`` and ``height`` are centre and height of each task's box, in rows; NaN for tasks left out.
    """
    graph, start, end = timeline.graph, timeline.start * scale, timeline.end * scale
    first, second = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    framed = np.isfinite(start[first] + end[first] + end[second] + y[first])
    first, second = first[framed], second[framed]
    if not len(first):
        return
    corners = _corners(start[first], end[second], y[first], height[first])
    frames = PolyCollection(corners, facecolors="none", edgecolors=INK, linewidths=LINE, zorder=2.2)
    _add(ax, frames, gid)


def frame_entry(graph: TaskGraph) -> dict[str, Patch]:
    """Return the legend's entry for frames, by its label; none if nothing is overlapped."""
    if not graph.kinds.overlapped.any():
        return {}
    return {"overlapped": Patch(fc="white", ec=INK, lw=LINE)}


# Arrows between boxes: results that another device needs


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

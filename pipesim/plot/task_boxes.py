"""What a timeline is drawn with: cells, bubbles, arrows, and the entries of its legend.

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
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE, EXCHANGES, SENDS, Op
from pipesim.plot.box_labels import Numbers, points_per_unit
from pipesim.plot.lanes import Lanes
from pipesim.plot.overlap_frames import draw_pairs, pair_entry
from pipesim.plot.style import (
    HATCHED,
    INK,
    LABELS,
    OUTLINES,
    PALETTE,
    UNFINISHED,
    chunks,
    n_chunks,
    shades,
    text_colours,
    whiteness,
)
from pipesim.timeline.timeline import Timeline

__all__ = [
    "Cells",
    "draw_bubbles",
    "draw_cells",
    "draw_dependencies",
    "legend_entries",
]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

BUBBLE, GREY = "#EEEEEE", "#909090"
HATCH, DASHES = "//////", (0, (3, 2))
#: Points: narrower cells have no gaps between them, and no hatch.
GAPLESS, HATCHLESS = 1.5, 3.0


@dataclass(frozen=True)
class Cells:
    """The tasks of a timeline as rectangles, one entry a task; times in units of the axis.

    A task that never ended reaches beyond the axes. ``points`` is how wide nine in ten
    computing cells are at least.
    """

    graph: TaskGraph
    lanes: Lanes
    start: Floats
    end: Floats
    lasting: Indices
    instant: Indices
    unfinished: Indices
    colours: Floats
    points: float

    @classmethod
    def of(cls, ax: Axes, timeline: Timeline, lanes: Lanes, scale: float, tint: float) -> Cells:
        """Lay out a timeline on axes whose limits are set."""
        graph = timeline.graph
        start, end = timeline.start * scale, timeline.end * scale
        begun = ~np.isnan(lanes.y) & ~np.isnan(start)
        lasting, unfinished = begun & (end > start), begun & np.isnan(end)
        computing = (end - start)[lasting & graph.is_op(COMPUTE)]
        narrow = float(np.quantile(computing, 0.1)) if len(computing) else 0.0
        return cls(
            graph,
            lanes,
            start,
            np.where(unfinished, ax.get_xlim()[1] * 1.02, end),
            np.flatnonzero(lasting),
            # Computing that takes no time is not drawn.
            np.flatnonzero(begun & (end == start) & ~graph.on_compute),
            np.flatnonzero(unfinished),
            shades(graph.op, chunks(graph.device, graph.stage), tint),
            narrow * points_per_unit(ax)[0],
        )

    def corners(self, members: Indices) -> Any:
        """Return the corners of some of them, shape ``(len(members), 4, 2)``."""
        x0, x1 = self.start[members], self.end[members]
        return _corners(x0, x1, self.lanes.y[members], self.lanes.height[members])


def _corners(x0: Floats, x1: Floats, y: Floats, height: Floats) -> Any:
    """Return the corners of rectangles, shape ``(n, 4, 2)``."""
    y0, y1 = y - height / 2, y + height / 2
    around = ((x0, y0), (x1, y0), (x1, y1), (x0, y1))
    return np.stack([np.stack(corner, axis=-1) for corner in around], axis=1)


def draw_bubbles(ax: Axes, lanes: Lanes, until: float) -> None:
    """Fill the compute lanes to the makespan; what no cell covers is bubble."""
    y, height = lanes.bands.T
    corners = _corners(np.zeros_like(y), np.full_like(y, until), y, height)
    _add(ax, PolyCollection(corners, facecolors=BUBBLE, linewidths=0, zorder=1), "bubbles")


def draw_cells(
    ax: Axes,
    timeline: Timeline,
    lanes: Lanes,
    *,
    scale: float,
    name: str = "cells",
    tint: float = 0.0,
    numbers: bool = True,
) -> dict[Op, str | None]:
    """Draw the tasks of a timeline; the axes' limits are set before.

    Parameters
    ----------
    scale
        Units of the time axis in a second.
    name
        Each operation's collection has the gid ``name:op``, the numbers have ``name:numbers``.
    tint
        How much white to mix in, 0..1; cells are then outlined in the full colour.
    numbers
        Whether cells carry the number of their micro-batch.

    Returns
    -------
    dict
        The operations that were drawn, each with its hatch.
    """
    cells = Cells.of(ax, timeline, lanes, scale, tint)
    drawn: dict[Op, str | None] = {}
    others = np.concatenate([cells.instant, cells.unfinished])
    for op in Op:
        lasting = cells.lasting[cells.graph.op[cells.lasting] == op]
        if len(lasting) or (cells.graph.op[others] == op).any():
            drawn[op] = HATCH if op in HATCHED and cells.points >= HATCHLESS else None
        if len(lasting):
            _draw_op(ax, cells, op, lasting, drawn[op], f"{name}:{op.name}", bool(tint))
    draw_pairs(ax, timeline, lanes.y, lanes.height, scale, f"{name}:overlapped")
    _draw_instants(ax, cells, f"{name}:instant")
    if len(cells.unfinished):
        _draw_unfinished(ax, cells, f"{name}:unfinished")
    if numbers:
        _draw_numbers(ax, cells, f"{name}:numbers")
    return drawn


def _draw_op(
    ax: Axes, cells: Cells, op: Op, members: Indices, hatch: str | None, gid: str, pale: bool
) -> None:
    """Draw the cells of one operation."""
    gaps = cells.points >= GAPLESS
    # matplotlib reads the hatch's width once, when a collection is made.
    with mpl.rc_context({"hatch.linewidth": 0.5}):
        collection = PolyCollection(
            cells.corners(members),
            facecolors=cells.colours[members],
            edgecolors=OUTLINES[op] if pale else "white",
            linewidths=min(0.5, 0.12 * cells.points) if gaps else 0.0,
            antialiaseds=gaps,
            hatch=hatch,
            # The outline of a hatched cell lies under its neighbours'.
            zorder=1.9 if op in HATCHED else 2.0,
        )
    _add(ax, collection, gid)


def _draw_instants(ax: Axes, cells: Cells, gid: str) -> None:
    """Draw a tick for each message that takes no time."""
    members = cells.instant
    x, y, half = cells.start[members], cells.lanes.y[members], cells.lanes.height[members] / 2
    ends = np.column_stack([x, y - half]), np.column_stack([x, y + half])
    segments: Any = np.stack(ends, axis=1)
    _add(ax, LineCollection(segments, colors=cells.colours[members], linewidths=1.0, zorder=2), gid)


def _draw_unfinished(ax: Axes, cells: Cells, gid: str) -> None:
    """Draw tasks that began and never ended: pale, dashed, open to the edge of the axes."""
    collection = PolyCollection(
        cells.corners(cells.unfinished),
        facecolors=0.4 * cells.colours[cells.unfinished] + 0.6,
        edgecolors=UNFINISHED,
        linestyles=[DASHES],
        linewidths=0.8,
        zorder=2.5,
    )
    _add(ax, collection, gid)


def _draw_numbers(ax: Axes, cells: Cells, gid: str) -> None:
    """Put the number of its micro-batch into each cell on a compute stream.

    A message of skips has the stage at its other end beside it, as in ``3>2`` or ``3<0``, an
    exchange the letter of what it exchanges, as in ``2k``. Buckets say which they are: ``.1``.
    """
    graph = cells.graph
    members = np.concatenate([cells.lasting, cells.unfinished])
    numbered = (graph.microbatch >= 0) | (graph.part >= 0)
    members = members[graph.on_compute[members] & numbered[members]]
    start, end = cells.start[members], cells.end[members]
    artist = Numbers(
        (start + end) / 2,
        cells.lanes.y[members],
        end - start,
        cells.lanes.height[members],
        _numbers(graph, members),
        text_colours(cells.colours[members]),
        graph.op[members],
    )
    artist.set_gid(gid)
    ax.add_artist(artist)


def _numbers(graph: TaskGraph, members: Indices) -> list[str]:
    """Return what the cells of tasks say."""
    shown = [str(number) for number in graph.microbatch[members].tolist()]
    for k in np.flatnonzero(graph.peer_stage[members] >= 0).tolist():
        task = graph.task(int(members[k]))
        shown[k] += f"{'>' if task.op in SENDS else '<'}{task.peer_stage}"
    for k in np.flatnonzero(graph.part[members] >= 0).tolist():
        task = graph.task(int(members[k]))
        of = "" if task.microbatch is None else str(task.microbatch)
        shown[k] = of + (f".{task.part}" if task.op == Op.REDUCE_GRAD else EXCHANGES[task.part][0])
    return shown


def _add(ax: Axes, collection: PolyCollection | LineCollection, gid: str) -> None:
    """Add a collection without moving the limits of the axes."""
    collection.set_gid(gid)
    ax.add_collection(collection, autolim=False)


def draw_dependencies(ax: Axes, timeline: Timeline, lanes: Lanes, *, scale: float) -> None:
    """Draw an arrow from the end of a compute task to the start of each that needs it elsewhere."""
    before, after = _across_devices(timeline.graph)
    ran = timeline.ran[before] & timeline.ran[after]
    before, after = before[ran], after[ran]
    if not len(before):
        return
    x, y = timeline.end[before] * scale, lanes.y[before]
    dx, dy = timeline.start[after] * scale - x, lanes.y[after] - y
    # From inside one cell to inside the other, so that it is seen which two they are.
    inset = np.sign(dy) * 0.18 * lanes.height[before]
    arrows = ax.quiver(
        x, y + inset, dx, dy - 2 * inset,
        angles="xy", scale_units="xy", scale=1.0, units="inches", width=0.6 / 72,
        headwidth=5.5, headlength=6.0, headaxislength=5.0, minlength=0.1, minshaft=1.0,
        color=INK, zorder=4,
    )  # fmt: skip
    arrows.set_gid("dependencies")


def _across_devices(graph: TaskGraph) -> tuple[Indices, Indices]:
    """Return pairs of compute tasks on different devices, messages between them left out."""
    after, before = graph.dependencies.rows, graph.dependencies.values
    sends = graph.is_op(SENDS)
    producer = np.full(len(graph), -1, dtype=np.int64)
    producer[after[sends[after]]] = before[sends[after]]
    received = (graph.pair[before] >= 0) & ~sends[after]
    before = np.where(received, producer[graph.pair[before]], before)
    keep = (before >= 0) & (graph.pair[after] < 0) & (graph.device[before] != graph.device[after])
    return before[keep], after[keep]


def legend_entries(
    graph: TaskGraph,
    drawn: Mapping[Op, str | None],
    *,
    compared: bool = False,
    unfinished: bool = False,
) -> tuple[list[Any], list[str]]:
    """Return a legend's handles and labels: what is compared, operations, overlaps, chunks."""
    entries: dict[str, Patch] = {}
    if compared:
        entries["predicted"] = Patch(fc="#E6E6E6", ec=INK, lw=0.7, ls=DASHES)
        entries["measured"] = Patch(fc="#A8A8A8", ec=INK, lw=0.7)
    for op in sorted(drawn):
        entries[LABELS[op]] = Patch(fc=PALETTE[op], ec="white", lw=0, hatch=drawn[op])
    entries |= pair_entry(graph)
    white = whiteness(np.arange(n_chunks(graph)))
    for chunk in (0, len(white) - 1) if len(white) > 1 else ():
        entries[f"chunk {chunk}"] = Patch(fc=GREY, alpha=1 - white[chunk], lw=0)
    if unfinished:
        entries["unfinished"] = Patch(fc="white", ec=UNFINISHED, lw=0.8, ls=DASHES)
    return list(entries.values()), list(entries)

"""The artists of a timeline: cells, the numbers in them, bubbles, arrows; colours are `style`'s.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axes._base import _AxesBase
from matplotlib.backend_bases import RendererBase
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.text import Text
from numpy.typing import NDArray

from pipesim.graph import TaskGraph
from pipesim.ops import SENDS, Op
from pipesim.style import HATCHED, OUTLINES, chunks, shades, text_colours
from pipesim.timeline import Timeline

__all__ = [
    "Lanes",
    "Numbers",
    "draw_bubbles",
    "draw_cells",
    "draw_dependencies",
    "one_lane",
    "with_transfers",
]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

BUBBLE, ARROW, UNFINISHED = "#EEEEEE", "#3A3A3A", "#B22222"
HATCH = "//////"
#: Points: the least and the most that a number measures, and what a digit takes of it.
SMALLEST, LARGEST, DIGIT = 4.5, 8.0, 0.66
#: Points: narrower cells have no gaps between them, and no hatch.
GAPLESS, HATCHLESS = 1.5, 3.0
#: Share of an operation's numbers that must fit for any of them to be drawn, and the share that
#: the size of all is chosen for.
MOST, NEARLY_ALL = 0.85, 0.95


@dataclass(frozen=True)
class Lanes:
    """Where each task is drawn, in rows: centre ``y`` and ``height``; NaN for those left out.

    ``bands`` holds the same of each device's compute lane, shape ``(n_devices, 2)``.
    """

    y: Floats
    height: Floats
    bands: Floats


def one_lane(graph: TaskGraph, offset: float, height: float) -> Lanes:
    """Put what is on compute streams into one lane a device, ``offset`` rows below its middle."""
    centres = np.arange(graph.n_devices) + offset
    return Lanes(
        y=np.where(graph.on_compute, centres[graph.device], np.nan),
        height=np.full(len(graph), height),
        bands=np.column_stack([centres, np.full_like(centres, height)]),
    )


def with_transfers(graph: TaskGraph) -> Lanes:
    """Put compute streams above, and under them a thin lane for each copy stream of the device."""
    lanes = one_lane(graph, -0.17, 0.5)
    of_device: list[list[int]] = [[] for _ in range(graph.n_devices)]
    for number, (device, name) in enumerate(graph.streams):
        if name != "compute":
            of_device[device].append(number)
    thin = 0.3 / max(1, *map(len, of_device))
    y = np.zeros(len(graph.streams))
    for device, numbers in enumerate(of_device):
        y[numbers] = device + 0.11 + thin * (np.arange(len(numbers)) + 0.5)
    return Lanes(
        y=np.where(graph.on_compute, lanes.y, y[graph.stream]),
        height=np.where(graph.on_compute, lanes.height, thin * 0.86),
        bands=lanes.bands,
    )


def rectangles(x0: Floats, x1: Floats, y: Floats, height: Floats) -> Floats:
    """Return corners, shape ``(n, 4, 2)``."""
    y0, y1 = y - height / 2, y + height / 2
    return np.stack(
        [np.stack(corner, -1) for corner in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], axis=1
    )


def points_per_unit(ax: _AxesBase) -> tuple[float, float]:
    """Return how many points one unit of each axis measures now."""
    corners = np.asarray(ax.transData.transform([(0.0, 0.0), (1.0, 1.0)]))
    x, y = np.abs(corners[1] - corners[0]) * (72.0 / ax.figure.dpi)
    return float(x), float(y)


class Numbers(Artist):
    """Numbers in the middle of cells, each drawn only if it fits its cell at that moment.

    What fits is decided when drawing, so that numbers come and go as a figure is resized or
    zoomed. All have one size, between 4.5 and 8 points.

    Parameters
    ----------
    x, y, width, height
        Centre and size of each cell, in data coordinates.
    labels, colours
        Text and its colour.
    kinds
        Numbers of one kind are drawn all or none, apart from the few cells that are too narrow.
    """

    def __init__(
        self,
        x: Floats,
        y: Floats,
        width: Floats,
        height: Floats,
        labels: list[str],
        colours: list[str],
        kinds: NDArray[np.int8],
    ) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.set_zorder(3)
        self.centre, self.width, self.height = np.column_stack([x, y]), width, height
        self.labels, self.colours, self.kinds = labels, colours, kinds
        self.digits = np.array([len(label) for label in labels])

    def fitting(self) -> tuple[Indices, float]:
        """Return which numbers fit into their cells now, and their size in points."""
        axes = self.axes
        if axes is None or not len(self.labels):
            return np.empty(0, np.int64), SMALLEST
        x, y = points_per_unit(axes)
        room = np.minimum(
            (self.width * x - 1.0) / (DIGIT * self.digits), (self.height * y - 1.0) / 0.9
        )
        size, legible = LARGEST, []
        for kind in np.unique(self.kinds):
            of_kind = room[self.kinds == kind]
            if np.quantile(of_kind, 1 - MOST) >= SMALLEST:
                legible.append(kind)
                size = min(size, np.quantile(of_kind, 1 - NEARLY_ALL, method="lower"))
        size = max(size, SMALLEST)
        # Cells of equal length differ in the last digit of their times.
        return np.flatnonzero(np.isin(self.kinds, legible) & (room >= size * 0.999)), float(size)

    def draw(self, renderer: RendererBase) -> None:
        """Draw those that fit and lie within the axes."""
        axes = self.axes
        if axes is None or axes.figure is None or not self.get_visible():
            return
        fitting, size = self.fitting()
        pixels = axes.transData.transform(self.centre)
        inside = axes.bbox.containsx, axes.bbox.containsy
        # A digit is 0.73 of its size high: the middle of the digits is the middle of the cell.
        drop = 0.365 * renderer.points_to_pixels(size)
        text = Text(ha="center", va="baseline", fontsize=size, clip_on=True)
        text.set_figure(axes.figure)
        text.set_clip_box(axes.bbox)
        for index in fitting.tolist():
            x, y = pixels[index]
            if inside[0](x) and inside[1](y):
                text.set_text(self.labels[index])
                text.set_color(self.colours[index])
                text.set_position((x, y - drop))
                text.draw(renderer)
        self.stale = False


def draw_bubbles(ax: Axes, lanes: Lanes, until: float) -> None:
    """Fill the compute lanes to the makespan; what no cell covers is bubble."""
    y, height = lanes.bands.T
    corners = rectangles(np.zeros_like(y), np.full_like(y, until), y, height)
    collection = PolyCollection(corners, facecolors=BUBBLE, linewidths=0, zorder=1)  # type: ignore[arg-type]
    collection.set_gid("bubbles")
    ax.add_collection(collection, autolim=False)


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
        Each operation's collection has the gid ``name:op``, and the numbers ``name:numbers``.
    tint
        How much white to mix in, 0..1; cells are then outlined in the full colour.
    numbers
        Whether cells carry the number of their micro-batch.

    Returns
    -------
    dict
        The operations that were drawn, each with its hatch.
    """
    graph = timeline.graph
    start, end = timeline.start * scale, timeline.end * scale
    colours = shades(graph.op, chunks(graph.device, graph.stage), tint)
    begun = ~np.isnan(lanes.y) & ~np.isnan(start)
    lasting, instant = begun & (end > start), begun & (end == start) & ~graph.on_compute
    typical = np.quantile((end - start)[lasting], 0.1) if lasting.any() else 0.0
    points = float(typical) * points_per_unit(ax)[0]
    drawn: dict[Op, str | None] = {}
    for op in Op:
        members = np.flatnonzero(lasting & (graph.op == op))
        if len(members) or (instant & (graph.op == op)).any():
            drawn[op] = HATCH if op in HATCHED and points >= HATCHLESS else None
        if not len(members):
            continue
        # matplotlib reads the hatch's width once, when a collection is made.
        with mpl.rc_context({"hatch.linewidth": 0.5}):
            collection = PolyCollection(
                rectangles(start[members], end[members], lanes.y[members], lanes.height[members]),  # type: ignore[arg-type]
                facecolors=colours[members],
                edgecolors=OUTLINES[op] if tint else "white",
                linewidths=min(0.5, 0.12 * points) if points >= GAPLESS else 0.0,
                antialiaseds=points >= GAPLESS,
                hatch=drawn[op],
                # The outline of a hatched cell lies under its neighbours'.
                zorder=1.9 if op in HATCHED else 2.0,
            )
        collection.set_gid(f"{name}:{op.name}")
        ax.add_collection(collection, autolim=False)
    _draw_instants(ax, lanes, start, colours, np.flatnonzero(instant), f"{name}:instant")
    open_ended = begun & np.isnan(end)
    # Beyond the edge, so that no end is drawn.
    end = np.where(open_ended, ax.get_xlim()[1] * 1.02, end)
    _draw_unfinished(ax, lanes, start, end, colours, np.flatnonzero(open_ended), name)
    if numbers:
        members = np.flatnonzero(lasting & graph.on_compute & (graph.microbatch >= 0))
        _add_numbers(ax, timeline, lanes, start, end, colours, members, f"{name}:numbers")
    return drawn


def _draw_instants(
    ax: Axes, lanes: Lanes, start: Floats, colours: Floats, members: Indices, gid: str
) -> None:
    """Draw a tick for each message that takes no time; computing that takes none is not drawn."""
    x, y, half = start[members], lanes.y[members], lanes.height[members] / 2
    segments = np.stack([np.column_stack([x, y - half]), np.column_stack([x, y + half])], axis=1)
    lines = LineCollection(list(segments), colors=colours[members], linewidths=1.0, zorder=2)
    lines.set_gid(gid)
    ax.add_collection(lines, autolim=False)


def _draw_unfinished(
    ax: Axes,
    lanes: Lanes,
    start: Floats,
    end: Floats,
    colours: Floats,
    members: Indices,
    name: str,
) -> None:
    """Draw tasks that began and never ended as dashed cells, open to the edge of the axes."""
    collection = PolyCollection(
        rectangles(start[members], end[members], lanes.y[members], lanes.height[members]),  # type: ignore[arg-type]
        facecolors=0.4 * colours[members] + 0.6,
        edgecolors=UNFINISHED,
        linestyles="dashed",
        linewidths=0.8,
        zorder=2.5,
    )
    collection.set_gid(f"{name}:unfinished")
    ax.add_collection(collection, autolim=False)


def _add_numbers(
    ax: Axes,
    timeline: Timeline,
    lanes: Lanes,
    start: Floats,
    end: Floats,
    colours: Floats,
    members: Indices,
    gid: str,
) -> None:
    """Put the number of its micro-batch into each of the cells ``members``."""
    graph = timeline.graph
    artist = Numbers(
        (start[members] + end[members]) / 2,
        lanes.y[members],
        end[members] - start[members],
        lanes.height[members],
        [str(number) for number in graph.microbatch[members].tolist()],
        text_colours(colours[members]),
        graph.op[members],
    )
    artist.set_gid(gid)
    ax.add_artist(artist)


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
        color=ARROW, zorder=4,
    )  # fmt: skip
    arrows.set_gid("dependencies")


def _across_devices(graph: TaskGraph) -> tuple[Indices, Indices]:
    """Return pairs of compute tasks on different devices, messages between them left out."""
    after, before = graph.dependencies.rows, graph.dependencies.values
    sends = graph.is_op(SENDS)
    producer = np.full(len(graph), -1, dtype=np.int64)
    producer[after[sends[after]]] = before[sends[after]]
    received = graph.pair[before] >= 0
    received &= ~sends[after]
    before = np.where(received, producer[graph.pair[before]], before)
    keep = (before >= 0) & (graph.pair[after] < 0) & (graph.device[before] != graph.device[after])
    return before[keep], after[keep]

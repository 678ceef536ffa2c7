"""Draw the boxes and arrows of an autograd graph.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.path import Path

from pipesim.graph.autograd_graph import AutogradGraph
from pipesim.plot.autograd_layout import CUT, HEIGHT, WIDTH, AutogradLayout
from pipesim.plot.figure_style import device_colours, text_points, unfinished_colour
from pipesim.plot.fitting_labels import NodeTexts
from pipesim.plot.graph_figure import recompute_hatch
from pipesim.plot.palette import INK, text_colours
from pipesim.plot.paper_figure import LegendPlace, add_legend, set_title

#: Nodes of torchgpipe that compute nothing: they copy, wait, or order others.
PALE = frozenset({"Copy", "Wait", "Fork", "Join"})
#: Size of an arrow's head (points).
HEAD = 5.0


def edge_style(is_phony: bool) -> tuple[str, Any, float]:
    """Return colour, line style and width (points) of an edge."""
    return (unfinished_colour(), (0, (2.5, 1.5)), 0.9) if is_phony else ("#6A6A6A", "-", 0.7)


def draw(
    ax: Axes,
    graph: AutogradGraph,
    layout: AutogradLayout,
    legend: bool | LegendPlace,
    title: str | None,
) -> Axes:
    """Draw a graph into axes, whose limits are set."""
    edge = 0.9 if layout.is_folded else 0.5
    ax.set_xlim(-edge, layout.n_columns - 1 + edge)
    highest = min((y for arrow in layout.arrows for _, y in arrow.points), default=0.0)
    ax.set_ylim(layout.n_rows - 0.4, min(-0.6, highest - 0.3))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=text_points())
    ax.set_yticks(list(layout.lanes), list(layout.lanes.values()))
    ax.set_xticks(list(layout.blocks), list(layout.blocks.values()))
    _draw_arrows(ax, layout)
    handles = _draw_boxes(ax, graph, layout)
    above = add_legend(ax, list(handles.values()), list(handles), legend)
    numbers = "numbers: order of the engine" if graph.order else "no backward has run it yet"
    set_title(ax, title or "", f"{len(graph)} nodes; {numbers}", height=above)
    return ax


def _draw_arrows(ax: Axes, layout: AutogradLayout) -> None:
    for arrow in layout.arrows:
        colour, style, width = edge_style(arrow.is_phony)
        patch = FancyArrowPatch(
            path=Path(list(arrow.points)), arrowstyle="-|>" if arrow.has_head else "-",
            mutation_scale=HEAD, shrinkA=0, shrinkB=0, color=colour, linestyle=style,
            linewidth=width, zorder=1.5, joinstyle="round", capstyle="butt",
        )  # fmt: skip
        patch.set_gid("phony" if arrow.is_phony else "edge")
        patch.set_in_layout(False)
        ax.add_patch(patch)
        if arrow.label:
            x, y = arrow.points[0 if arrow.has_head else -1]
            ax.text(x, y, arrow.label, fontsize=0.86 * text_points(), color=colour, va="center",
                    ha="left" if arrow.has_head else "right")  # fmt: skip


def _draw_boxes(ax: Axes, graph: AutogradGraph, layout: AutogradLayout) -> dict[str, Any]:
    """Draw boxes, their texts and frames; return a legend's handles by their labels."""
    partitions = sorted({box.partition for box in layout.boxes if box.partition is not None})
    table = device_colours(max(partitions, default=-1) + 1)
    fills = []
    for left, top, right, bottom in layout.frames:
        ax.add_patch(Rectangle((left, top), right - left, bottom - top, fc="#F4F4F4", ec="#6A6A6A",
                               lw=0.5, zorder=1, gid="frame"))  # fmt: skip
    hatch, stripes = recompute_hatch()
    for box in layout.boxes:
        colour = np.full(3, 0.91) if box.partition is None else table[box.partition]
        is_pale = graph.nodes[box.node].name in PALE
        fill = np.ones(3) if is_pale else 1 - 0.6 * (1 - colour) if box.is_recompute else colour
        fills.append(fill)
        size: Any = (box.x - WIDTH / 2, box.y - box.height / 2), WIDTH, box.height
        if box.is_recompute:  # the colour of a hatch is that of the outline
            with mpl.rc_context({"hatch.linewidth": 0.4}):
                hatched = Rectangle(*size, fc=fill, ec=stripes, lw=0, hatch=hatch, zorder=2)
            ax.add_patch(hatched)
            fill = "none"
        ax.add_patch(Rectangle(*size, fc=fill, ec=colour if is_pale else INK, zorder=2.1,
                               lw=1.2 if is_pale else 0.5, gid=f"node:{box.node}"))  # fmt: skip
    line = HEIGHT / layout.n_lines
    rows = [
        (box.x, box.y + (k - (len(box.lines) - 1) / 2) * line, text, colour)
        for box, colour in zip(layout.boxes, text_colours(np.array(fills)), strict=True)
        for k, text in enumerate(box.lines)
        if text
    ]
    x, y, texts, colours = zip(*rows, strict=True)
    codes = [text if len(text) <= CUT else f"{text[: CUT - 1]}." for text in texts]
    artist = NodeTexts(np.array(x), np.array(y), np.full(len(x), WIDTH), np.full(len(x), line),
                       list(texts), list(colours), codes)  # fmt: skip
    artist.smallest = 5.0
    artist.set_gid("texts")
    ax.add_artist(artist)
    handles: dict[str, Any] = {
        f"partition {j}": Patch(fc=table[j], ec=INK, lw=0.5) for j in partitions
    }
    if hatch and any(box.is_recompute for box in layout.boxes):
        handles["recompute"] = Patch(fc="#DDDDDD", ec=stripes, hatch=hatch, lw=0)
    if any(arrow.is_phony for arrow in layout.arrows):
        colour, style, width = edge_style(True)
        handles["from fork to join"] = Line2D([], [], color=colour, ls=style, lw=width)
    return handles

"""The dependency graph of a small schedule as a figure, as papers draw it.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.path import Path
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE, EXCHANGES, TRANSFERS, Op
from pipesim.plot.figure import SMALL
from pipesim.plot.graph_layout import CODES, Arrow, Layout
from pipesim.plot.node_labels import NodeTexts
from pipesim.plot.style import INK, device_colours, text_colours

__all__ = ["draw_arrows", "draw_nodes", "entries"]

Floats = NDArray[np.float64]

#: Of each sort of arrow: colour, line style, width in points, and where it lies.
_STYLES: dict[str, tuple[str, Any, float, float]] = {
    "message": (INK, "-", 0.7, 1.5),
    "data": ("#7A7A7A", "-", 0.6, 1.2),
    "order": ("#7A7A7A", (0, (2.5, 1.8)), 0.7, 1.1),
}
#: Points of an arrow's head.
HEAD = 4.5
#: Rows from the middle of a node's row to the nearest and the farthest arrow along the row.
NEAR, FAR = 0.34, 0.47


def draw_nodes(ax: Axes, graph: TaskGraph, where: Layout) -> None:
    """Draw the nodes in the colours of their devices; recomputes are hatched."""
    colours = device_colours(graph.n_devices)[graph.device[where.tasks]]
    recompute = graph.op[where.tasks] == Op.R
    pale = ~where.is_main
    colours[pale] = 1 - 0.45 * (1 - colours[pale])
    colours[recompute] = 1 - 0.6 * (1 - colours[recompute])
    x, y, dx, dy = where.x, where.y, where.width / 2, where.height / 2
    around = ((x - dx, y - dy), (x + dx, y - dy), (x + dx, y + dy), (x - dx, y + dy))
    corners: Any = np.stack([np.stack(corner, axis=-1) for corner in around], axis=1)
    for name, mask, hatch in (("nodes", ~recompute, None), ("nodes:recompute", recompute, "////")):
        if not mask.any():
            continue
        with mpl.rc_context({"hatch.linewidth": 0.4}):
            boxes = PolyCollection(
                corners[mask], facecolors=colours[mask], edgecolors="white" if hatch else INK,
                linewidths=0.0 if hatch else 0.5, hatch=hatch, zorder=2,
            )  # fmt: skip
        boxes.set_gid(name)
        ax.add_collection(boxes, autolim=False)
        if hatch:  # whose colour is that of the outline, too
            frames = PolyCollection(corners[mask], facecolors="none", edgecolors=INK,
                                    linewidths=0.5, zorder=2.1)  # fmt: skip
            ax.add_collection(frames, autolim=False)
    for name, mask in (("texts", where.is_main), ("texts:beside", ~where.is_main)):
        nodes = np.flatnonzero(mask)
        labels = [where.texts[k] for k in nodes.tolist()]
        codes = labels if name == "texts" else [where.codes[k] for k in nodes.tolist()]
        texts = NodeTexts(x[nodes], y[nodes], where.width[nodes], where.height[nodes], labels,
                          text_colours(colours[nodes]), codes)  # fmt: skip
        texts.set_gid(name)
        ax.add_artist(texts)


def draw_arrows(ax: Axes, graph: TaskGraph, where: Layout, *, labels: bool) -> None:
    """Draw the arrows; with ``labels`` those between devices carry the number of a micro-batch."""
    place = np.full(len(graph), -1, dtype=np.int64)
    place[where.tasks] = np.arange(len(where.tasks))
    heights = _heights(graph, where, place)
    for arrow in where.arrows:
        colour, style, width, zorder = _STYLES[arrow.sort]
        ends = int(place[arrow.before]), int(place[arrow.after])
        points = _path(where, *ends, heights.get(arrow, NEAR))
        patch = FancyArrowPatch(
            path=Path(points),
            arrowstyle="-|>", mutation_scale=HEAD, shrinkA=0, shrinkB=0, color=colour,
            linestyle=style, linewidth=width, zorder=zorder, joinstyle="miter", capstyle="butt",
        )  # fmt: skip
        patch.set_gid(f"{arrow.sort}:{arrow.before}>{arrow.after}")
        patch.set_in_layout(False)
        ax.add_patch(patch)
        if labels and arrow.sort == "message":
            _label(ax, graph, arrow, points)


def _label(ax: Axes, graph: TaskGraph, arrow: Arrow, points: list[tuple[float, float]]) -> None:
    """Put the micro-batch of a message on the middle of its arrow's first line."""
    x, y = np.mean(points[:2], axis=0)
    text = ax.text(x, y, str(graph.microbatch[arrow.before]), fontsize=SMALL - 2, color=INK,
                   ha="center", va="center", zorder=1.6,
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # fmt: skip
    text.set_gid(f"label:{arrow.before}>{arrow.after}")
    text.set_in_layout(False)


def _heights(graph: TaskGraph, where: Layout, place: NDArray[np.int64]) -> dict[Arrow, float]:
    """Return how far from the middle of their row the arrows run that pass other nodes.

    Arrows that lie over each other run apart, the longer farther out.
    """
    rows: dict[int, list[tuple[float, float, Arrow]]] = {}
    for arrow in where.arrows:
        first, last = (float(where.x[place[task]]) for task in arrow[1:])
        if arrow.sort != "message" and last - first > 1:
            rows.setdefault(int(graph.device[arrow.after]), []).append((first, last, arrow))
    found = {}
    for spans in rows.values():
        spans.sort(key=lambda span: (span[1] - span[0], span[0]))
        levels: list[list[tuple[float, float]]] = []
        level_of = {}
        for first, last, arrow in spans:
            free = (k for k, level in enumerate(levels)
                    if all(last <= a or b <= first for a, b in level))  # fmt: skip
            level = next(free, len(levels))
            if level == len(levels):
                levels.append([])
            levels[level].append((first, last))
            level_of[arrow] = level
        for arrow, level in level_of.items():
            found[arrow] = NEAR + (FAR - NEAR) * level / max(1, len(levels) - 1)
    return found


def _path(where: Layout, first: int, last: int, height: float) -> list[tuple[float, float]]:
    """Return the points of an arrow from the border of a node to that of another.

    Past other rows it goes through the gap before its last column; past other nodes of its own row
    above them.
    """
    x0, x1, y0, y1 = (float(z) for z in (*where.x[[first, last]], *where.y[[first, last]]))
    out, into = float(where.width[first]) / 2, float(where.width[last]) / 2
    tall, high = float(where.height[first]) / 2, float(where.height[last]) / 2
    rows = round(y1) - round(y0)
    if rows:
        down = float(np.sign(rows))
        points = [(x0, y0 + down * tall), (x1, y1 - down * high)]
        if abs(rows) > 1:
            gap = np.floor(x1) - 0.5 if x1 == round(x1) else x1
            passed = [(gap, round(y0) + down - 0.36 * down), (gap, round(y1) - down + 0.36 * down)]
            points = [(x0 + 0.4 * out, points[0][1]), *passed, (x1 - 0.5 * into, points[1][1])]
        return points
    between = (where.y.round() == round(y0)) & (where.x > x0) & (where.x < x1) & where.is_main
    if not between.any():
        return [(x0 + out, y0), (x1 - into, y1)]
    start, end, top = x0 + 0.3 * out, x1 - 0.3 * into, y0 - height
    return [(start, y0 - tall), (start + 0.15, top), (end - 0.15, top), (end, y1 - high)]


def entries(graph: TaskGraph, where: Layout, labels: bool) -> dict[str, Any]:
    """Return a legend's handles by their labels."""
    found: dict[str, Any] = {}
    if (graph.op[where.tasks] == Op.R).any():
        found["recompute"] = Patch(fc="#DDDDDD", ec="white", hatch="////", lw=0)
    if (graph.is_op(TRANSFERS)[where.tasks]).any():
        found["> sends, < receives"] = Patch(fc="#F0F0F0", ec=INK, lw=0.5)
    shown = set(zip(graph.op[where.tasks].tolist(), graph.part[where.tasks].tolist(), strict=True))
    for (op, part), code in CODES.items():
        if op not in TRANSFERS and (op, part) in shown:
            name = op.name if part < 0 else f"{op.name}.{EXCHANGES[part]}"
            colour = "#DDDDDD" if op in COMPUTE else "#F0F0F0"
            found[f"{code} {name}"] = Patch(fc=colour, ec=INK, lw=0.5)
    if any(op == Op.REDUCE_GRAD and part >= 0 for op, part in shown):
        found["r REDUCE_GRAD of a bucket"] = Patch(fc="#F0F0F0", ec=INK, lw=0.5)
    names = {
        "message": "message, with its micro-batch" if labels else "message",
        "data": "data on one device",
        "order": "order of a stream",
    }
    for sort in {arrow.sort: None for arrow in where.arrows}:
        colour, style, width, _ = _STYLES[sort]
        found[names[sort]] = Line2D([], [], color=colour, linestyle=style, linewidth=width)
    return found

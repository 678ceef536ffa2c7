"""Draw the nodes and arrows of a small schedule's dependency graph, as papers do.

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
from pipesim.ops import COMPUTE, TRANSFERS, Op, part_name
from pipesim.plot.dependency_plot import CODES, NUMBERED_CODES, Arrow, GraphLayout
from pipesim.plot.figure_style import current_style, device_colours, text_points
from pipesim.plot.fitting_labels import NodeTexts
from pipesim.plot.palette import INK, text_colours

Floats = NDArray[np.float64]

#: Of each sort of arrow: colour, line style, width (points), and drawing order.
_STYLES: dict[str, tuple[str, Any, float, float]] = {
    "message": (INK, "-", 0.7, 1.5),
    "data": ("#7A7A7A", "-", 0.6, 1.2),
    "order": ("#7A7A7A", (0, (2.5, 1.8)), 0.7, 1.1),
}
#: What the numbers of operations whose nodes have one are, in the legend.
_NUMBERED = {Op.REDUCE_GRAD: "bucket", Op.REDUCE_TIED: "group"}
#: Size of an arrow's head (points).
HEAD = 4.5
#: Distance of the nearest and the farthest arrow along a row from its middle (rows).
NEAR, FAR = 0.34, 0.47


def draw_nodes(ax: Axes, graph: TaskGraph, layout: GraphLayout) -> None:
    """Draw the nodes in the colours of their devices; recomputes are hatched."""
    colours = device_colours(graph.n_devices)[graph.device[layout.tasks]]
    recompute = graph.op[layout.tasks] == Op.R
    pale = ~layout.is_main
    colours[pale] = 1 - 0.45 * (1 - colours[pale])
    colours[recompute] = 1 - 0.6 * (1 - colours[recompute])
    x, y, dx, dy = layout.x, layout.y, layout.width / 2, layout.height / 2
    box = ((x - dx, y - dy), (x + dx, y - dy), (x + dx, y + dy), (x - dx, y + dy))
    corners: Any = np.stack([np.stack(corner, axis=-1) for corner in box], axis=1)
    pattern, stripes = recompute_hatch()
    for name, mask, hatch in (("nodes", ~recompute, None), ("nodes:recompute", recompute, pattern)):
        if not mask.any():
            continue
        with mpl.rc_context({"hatch.linewidth": 0.4}):
            boxes = PolyCollection(
                corners[mask], facecolors=colours[mask], edgecolors=stripes if hatch else INK,
                linewidths=0.0 if hatch else 0.5, hatch=hatch, zorder=2,
            )  # fmt: skip
        boxes.set_gid(name)
        ax.add_collection(boxes, autolim=False)
        if hatch:  # its colour is that of the outline
            frames = PolyCollection(corners[mask], facecolors="none", edgecolors=INK,
                                    linewidths=0.5, zorder=2.1)  # fmt: skip
            ax.add_collection(frames, autolim=False)
    for name, mask in (("texts", layout.is_main), ("texts:beside", ~layout.is_main)):
        nodes = np.flatnonzero(mask)
        labels = [layout.texts[k] for k in nodes.tolist()]
        codes = labels if name == "texts" else [layout.codes[k] for k in nodes.tolist()]
        texts = NodeTexts(x[nodes], y[nodes], layout.width[nodes], layout.height[nodes], labels,
                          text_colours(colours[nodes]), codes)  # fmt: skip
        texts.set_gid(name)
        ax.add_artist(texts)


def recompute_hatch() -> tuple[str | None, str]:
    """Return the hatch of recomputes in graphs, if those of the style have one, and its colour."""
    style = current_style()
    return "////" if style.hatches.get(Op.R) else None, "#8A8A8A" if style.grey else "white"


def draw_arrows(ax: Axes, graph: TaskGraph, layout: GraphLayout, *, labels: bool) -> None:
    """Draw the arrows; with ``labels``, messages carry the number of their micro-batch."""
    node_of = np.full(len(graph), -1, dtype=np.int64)
    node_of[layout.tasks] = np.arange(len(layout.tasks))
    heights = _heights(layout, node_of)
    for arrow in layout.arrows:
        colour, style, width, zorder = _STYLES[arrow.sort]
        ends = int(node_of[arrow.source]), int(node_of[arrow.target])
        points = _path(layout, *ends, heights.get(arrow, NEAR))
        patch = FancyArrowPatch(
            path=Path(points),
            arrowstyle="-|>", mutation_scale=HEAD, shrinkA=0, shrinkB=0, color=colour,
            linestyle=style, linewidth=width, zorder=zorder, joinstyle="miter", capstyle="butt",
        )  # fmt: skip
        patch.set_gid(f"{arrow.sort}:{arrow.source}>{arrow.target}")
        patch.set_in_layout(False)
        ax.add_patch(patch)
        if labels and arrow.sort == "message":  # on the middle of the arrow's first segment
            x, y = np.mean(points[:2], axis=0)
            text = ax.text(
                x, y, str(graph.microbatch[arrow.source]), fontsize=0.86 * text_points(), color=INK,
                ha="center", va="center", zorder=1.6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            )  # fmt: skip
            text.set_gid(f"label:{arrow.source}>{arrow.target}")
            text.set_in_layout(False)


def _heights(layout: GraphLayout, node_of: NDArray[np.int64]) -> dict[Arrow, float]:
    """Return the distance from the middle of their row of arrows that pass other nodes (rows).

    Arrows that would overlap run apart, the longer ones farther out.
    """
    rows: dict[int, list[tuple[float, float, Arrow]]] = {}
    for arrow in layout.arrows:
        first, last = (float(layout.x[node_of[task]]) for task in arrow[1:])
        one, row = (round(layout.y[node_of[task]]) for task in arrow[1:])
        if one == row and last - first > 1:
            rows.setdefault(row, []).append((first, last, arrow))
    heights = {}
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
            heights[arrow] = NEAR + (FAR - NEAR) * level / max(1, len(levels) - 1)
    return heights


def _path(layout: GraphLayout, first: int, last: int, height: float) -> list[tuple[float, float]]:
    """Return the points of an arrow from the border of one node to that of another.

    It passes other rows through the gap before its last column, and other nodes of its own row
    above them.
    """
    x0, x1, y0, y1 = (float(z) for z in (*layout.x[[first, last]], *layout.y[[first, last]]))
    half0, half1 = float(layout.width[first]) / 2, float(layout.width[last]) / 2
    rise0, rise1 = float(layout.height[first]) / 2, float(layout.height[last]) / 2
    rows = round(y1) - round(y0)
    if rows or x0 == x1:
        direction = float(np.sign(y1 - y0))
        points = [(x0, y0 + direction * rise0), (x1, y1 - direction * rise1)]
        if abs(rows) > 1:
            gap = np.floor(x1) - 0.5 if x1 == round(x1) else x1
            bends = [
                (gap, round(y0) + direction - 0.36 * direction),
                (gap, round(y1) - direction + 0.36 * direction),
            ]
            points = [(x0 + 0.4 * half0, points[0][1]), *bends, (x1 - 0.5 * half1, points[1][1])]
        return points
    obstacles = (layout.y.round() == round(y0)) & (layout.x > x0) & (layout.x < x1) & layout.is_main
    if not obstacles.any():
        return [(x0 + half0, y0), (x1 - half1, y1)]
    start, end, top = x0 + 0.3 * half0, x1 - 0.3 * half1, round(y0) - height
    return [(start, y0 - rise0), (start + 0.15, top), (end - 0.15, top), (end, y1 - rise1)]


def legend_handles(graph: TaskGraph, layout: GraphLayout, labels: bool) -> dict[str, Any]:
    """Return a legend's handles by their labels."""
    handles: dict[str, Any] = {}
    ops, parts = graph.op[layout.tasks], graph.part[layout.tasks]
    labels_of_ops = current_style().operations
    hatch, stripes = recompute_hatch()
    if hatch and (ops == Op.R).any():
        handles[labels_of_ops[Op.R]] = Patch(fc="#DDDDDD", ec=stripes, hatch=hatch, lw=0)
    if (graph.is_op(TRANSFERS)[layout.tasks]).any():
        handles["> sends, < receives"] = Patch(fc="#F0F0F0", ec=INK, lw=0.5)
    shown = set(zip(ops.tolist(), parts.tolist(), strict=True))
    for (op, part), code in CODES.items():
        if op not in TRANSFERS and (op, part) in shown:
            name = labels_of_ops[op] + ("" if part < 0 else f": {part_name(op, part)}")
            colour = "#DDDDDD" if op in COMPUTE else "#F0F0F0"
            handles[f"{code} {name}"] = Patch(fc=colour, ec=INK, lw=0.5)
    for op, number in _NUMBERED.items():
        if any(own == op and part >= 0 for own, part in shown):
            name = f"{NUMBERED_CODES[op]} {labels_of_ops[op]} of a {number}"
            handles[name] = Patch(fc="#F0F0F0", ec=INK, lw=0.5)
    names = {
        "message": "message, with its micro-batch" if labels else "message",
        "data": "data on one device",
        "order": "order of a stream",
    }
    for sort in {arrow.sort: None for arrow in layout.arrows}:
        colour, style, width, _ = _STYLES[sort]
        handles[names[sort]] = Line2D([], [], color=colour, linestyle=style, linewidth=width)
    return handles

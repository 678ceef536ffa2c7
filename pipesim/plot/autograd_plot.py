"""Draw the graph that autograd built, and the position in which the engine ran each node."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pipesim.errors import ArgumentError, check_text, check_type
from pipesim.graph.autograd_graph import AutogradGraph
from pipesim.plot.autograd_layout import CUT, HEIGHT, WIDTH, AutogradLayout, lay_out
from pipesim.plot.figure_style import Inches
from pipesim.plot.html_tables import figure_html, note_html, table_html
from pipesim.plot.page.save import page_path
from pipesim.plot.paper_figure import LegendPlace, axes_or_new, figure_with_axes
from pipesim.utils.checks import checked
from pipesim.utils.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Most nodes of a graph that is drawn.
MOST_NODES = 300
#: Size of texts for which a new figure has room, the room of a letter and of a line relative to it,
#: and the space around the text of a box (points). Then the space around all boxes (inches).
TEXT, LETTER, LINE, PADDING = 6.0, 0.68, 0.9, 2.0
MARGINS = 1.0, 0.75


@checked
def autograd_graph(
    graph: AutogradGraph,
    *,
    ax: Axes | None = None,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    title: str | None = None,
) -> Axes:
    """Draw an autograd graph: a lane a micro-batch, partitions by colour.

    The forward goes from left to right. Arrows go as the engine goes, from right to left. Each box
    has the name of a node, and below it the position in which the engine ran it. Dashed arrows are
    edges through phony tensors, from fork to join. Boxes that copy, wait, fork or join are white;
    recomputes are hatched.

    Names that have no room are cut: ``Recom.``

    - A node of several micro-batches, such as the one that joins their outputs, spans their lanes.
    - A node that issues tasks of several micro-batches, as `pipeexec.GPipe` has with dependencies,
      is above the lanes, in a frame with its tasks.
    - A graph without micro-batches has a row for each chain of nodes, the longest first.
    - Wide graphs are folded into lines, the inputs in the first. Equal numbers at the margins tell
      which arrows continue in the next line.

    Parameters
    ----------
    graph
        A graph with at most 300 nodes, as `pipeexec.autograd_graph` returns.
    ax
        Axes to draw into; its limits are set. By default new ones, as large as their content needs.
    legend, height, title
        As for `pipesim.plot.timeline`.

    Warns
    -----
    LegibilityWarning
        When drawn, if nodes have no room for their texts.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.

    See Also
    --------
    pipesim.plot.dependencies : Draw the tasks of a graph instead.
    """
    from pipesim.plot.autograd_figure import draw

    if ax is not None:
        return draw(axes_or_new(ax, 1, height), graph, _laid_out(graph), legend, title)
    from pipesim.utils.packages import pyplot as plt

    return _draw_new(graph, plt.figure, legend, title, height)


def autograd_graph_html(graph: AutogradGraph) -> str:
    """Return an autograd graph as a picture, and a line of numbers.

    A graph with over 300 nodes has the line alone.

    Parameters
    ----------
    graph
        Graph to show.

    Returns
    -------
    str
        HTML for notebooks.
    """
    check_type("graph", graph, AutogradGraph)
    line = note_html(repr(graph)[1:-1])
    if len(graph) > MOST_NODES:
        return line
    from pipesim.utils.packages import Figure

    figure = _draw_new(graph, Figure, True, None).figure.figure
    return figure_html(figure, repr(graph)) + line


def autograd_graph_to_html(
    graph: AutogradGraph, path: Path | str, *, title: str | None = None
) -> None:
    """Write a page of an autograd graph: the drawing, and a table of all nodes.

    The file works without a network. The drawing stays sharp at any zoom, and a node under the
    pointer shows its attributes.

    Parameters
    ----------
    path
        File that ends in ``.html`` or ``.htm``.
    title
        Title of the page; by default the numbers of nodes and edges.
    """
    from pipesim.utils.packages import Figure
    from pipesim.utils.packages import matplotlib as mpl

    path = page_path("path", path)
    if title is not None:
        check_text("title", title)
    frame, svg = graph.frame.astype(object).fillna(""), io.StringIO()
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "pipesim"}):
        figure = _draw_new(graph, Figure, True, None).figure.figure
        figure.savefig(svg, format="svg", metadata={"Date": None})

    def titled(match: re.Match[str]) -> str:
        node = frame.loc[int(match[1])]
        text = ", ".join(f"{name} {value}" for name, value in node.items() if value != "")
        return f"<g><title>{escape(text)}</title>"

    drawing = re.sub(r'<g id="node:(\d+)">', titled, svg.getvalue().partition("<svg")[2])
    rows = [[str(k), *map(str, row)] for k, row in zip(frame.index, frame.values, strict=True)]
    name = escape(title or repr(graph)[1:-1])
    write_text(
        path,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\"><style>body{font-family:sans-serif;background:white;"
        "color:black}h1{font-size:1em}svg path{pointer-events:all}svg use{pointer-events:none}"
        "</style></head><body>"
        f"<h1>{name}</h1><svg{drawing}{table_html(['node', *frame.columns], rows)}</body></html>\n",
    )


def _draw_new(
    graph: AutogradGraph,
    make: Callable[..., Figure],
    legend: bool | LegendPlace,
    title: str | None,
    height: float | None = None,
) -> Axes:
    """Draw into axes of a figure that ``make`` makes, as large as the texts of the graph need."""
    from pipesim.plot.autograd_figure import draw

    layout = _laid_out(graph)
    longest = max(len(line) for box in layout.boxes for line in box.lines)
    if any(box.partition is not None for box in layout.boxes):  # of GPipe, whose names are few
        longest = min(longest, CUT)
    column = (LETTER * TEXT * longest + PADDING) / WIDTH / 72
    row = layout.n_lines * (LINE * TEXT + PADDING) / HEIGHT / 72
    width = MARGINS[0] + column * (layout.n_columns + 0.5 * layout.is_folded)
    height = height or MARGINS[1] + row * layout.n_rows
    _, ax = figure_with_axes(make, max(4.0, width), 1, height)
    return draw(ax, graph, layout, legend, title)


def _laid_out(graph: AutogradGraph) -> AutogradLayout:
    if not graph.nodes:
        raise ArgumentError("a figure of an autograd graph needs a node; this graph has none")
    if len(graph) > MOST_NODES:
        raise ArgumentError(
            f"a figure of an autograd graph has at most {MOST_NODES} nodes, this graph has "
            f"{len(graph)}; draw that of fewer micro-batches or layers; graph.frame has all nodes"
        )
    return lay_out(graph)

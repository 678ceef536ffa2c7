"""Timelines and comparisons in notebooks: the interactive page in a frame, and a picture."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any

from pipesim.analysis.compare import Comparison
from pipesim.plot.comparisons import ROWS_PER_DEVICE
from pipesim.plot.html_parts import figure_png
from pipesim.plot.page.html import page_html
from pipesim.plot.page.save import packed_page
from pipesim.plot.paper_figure import TWO_COLUMNS, figure_with_axes
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Tasks of a timeline up to which a notebook shows its page: larger pages are for files.
MAX_FRAMED = 20_000
#: Height of a frame around its rows, of a row, and the most of a frame (CSS pixels).
_AROUND, _ROW, _MOST = 150, 30, 620


def mimebundle(item: Timeline | Comparison) -> dict[str, Any]:
    """Return a timeline or comparison for notebooks: HTML with the page, a picture, and text.

    Frontends show the HTML. Those that cannot, and exports to PDF, take the picture.
    """
    return {
        "text/html": item._repr_html_(),
        "image/png": base64.b64encode(figure_png(picture(item))).decode("ascii"),
        "text/plain": repr(item),
    }


def frame_html(item: Timeline | Comparison) -> str:
    """Return the page of an item as a frame of HTML; a note if it has too many tasks.

    The page is in the attribute ``srcdoc``: frames of VS Code load no files. The frame has an
    origin of its own, so that its scripts reach nothing of the notebook.
    """
    shown = [item.predicted, item.measured] if isinstance(item, Comparison) else [item]
    if sum(map(len, shown)) > MAX_FRAMED:
        return (
            "<p>An interactive page of so many tasks is for a file: "
            "<code>.to_html(&quot;timeline.html&quot;)</code></p>"
        )
    title, data = packed_page(item)
    page = escape(page_html(title, data, embedded=True))
    height = min(_MOST, _AROUND + _ROW * sum(timeline.n_devices for timeline in shown))
    return (
        f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" '
        f'title="{escape(title)}" style="width:100%;height:{height}px;border:1px solid #8884">'
        "</iframe>"
    )


def picture(item: Timeline | Comparison) -> Figure:
    """Return the figure of a timeline or comparison, two columns wide."""
    from pipesim.utils.packages import Figure

    if isinstance(item, Comparison):
        figure, ax = figure_with_axes(
            Figure, TWO_COLUMNS, item.predicted.n_devices * ROWS_PER_DEVICE
        )
    else:
        figure, ax = figure_with_axes(Figure, TWO_COLUMNS, item.n_devices)
    item.plot(ax=ax)
    return figure

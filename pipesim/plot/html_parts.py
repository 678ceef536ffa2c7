"""Parts of HTML for notebooks: figures, tables, coloured cells and notes."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.plot.style import text_colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: CSS of tables, of their coloured cells, and of the first cell of a row.
TABLE = "border-collapse:separate;border-spacing:1px;font-size:11px;line-height:1.5"
CELL = "text-align:center;min-width:1.7em;padding:0 2px"
HEAD = "text-align:left;padding:0 8px 0 0;font-weight:normal"
_NOTE = "margin:2px 0 4px;font-size:12px"


def figure_png(figure: Figure) -> bytes:
    """Return a figure as a PNG of 128 colours, which has a third of the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    whole, small = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_figure(whole, format="png", dpi=200)
    with Image.open(whole) as image:
        image.convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def figure_html(figure: Figure, text: str) -> str:
    """Return a figure as an inline PNG, with ``text`` as its alternative text."""
    image = base64.b64encode(figure_png(figure)).decode("ascii")
    width = round(figure.get_figwidth() * 110)
    return (
        f'<img alt="{escape(text)}" src="data:image/png;base64,{image}" '
        f'style="width:{width}px;max-width:100%;background:white"/>'
    )


def note_html(text: str) -> str:
    """Return a line of text."""
    return f'<div style="{_NOTE}">{escape(text)}</div>'


def omitted_text(count: int, shown: int, noun: str) -> list[str]:
    """Return a text for omitted items, such as ``devices 32 to 63``; [] if all are shown."""
    return [f"{noun} {shown} to {count - 1}"] if count > shown else []


def omitted_html(omitted: list[str]) -> str:
    """Return a line that names omitted items; "" if there are none."""
    return note_html(f"Not shown: {', '.join(omitted)}.") if omitted else ""


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """Return a table with its first column aligned left, the others right."""

    def line(cells: list[str], tag: str) -> str:
        first = f'<th style="{HEAD}">{escape(cells[0])}</th>'
        style = "text-align:right;padding:0 8px;font-weight:normal"
        rest = (f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells[1:])
        return f"<tr>{first}{''.join(rest)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<table style="{TABLE}">{line(head, "th")}{body}</table>'


def cell_html(text: str, colour: NDArray[np.float64], title: str, tag: str = "td") -> str:
    """Return a cell with a background colour: red, green, blue (0..1)."""
    red, green, blue = (colour * 255).round().astype(int)
    ink = text_colours(colour[None])[0]
    return (
        f'<{tag} title="{title}" style="{CELL};background:rgb({red},{green},{blue});'
        f'color:{ink}">{text}</{tag}>'
    )

"""Projections as notebooks show them: HTML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipesim.plot.html_parts import note_html, table_html
from pipesim.utils.units import format_bytes, format_time

if TYPE_CHECKING:
    import pandas as pd


#: Most layers that are shown.
_MAX_LAYERS = 16
_SECONDS = ("forward", "backward", "optimizer_step")
_BYTES = ("parameter_bytes", "activation_bytes", "output_bytes")


def projection_html(title: str, table: pd.DataFrame) -> str:
    """Return a title, and a row a layer with units; of many layers the first ones.

    Parameters
    ----------
    title
        Text above the table.
    table
        `pipeexec.Projection.table`.
    """
    formats: dict[str, Callable[[float], str]] = dict.fromkeys(_SECONDS, format_time)
    formats |= dict.fromkeys(_BYTES, format_bytes)
    formats = {name: form for name, form in formats.items() if name in table}
    head = ["layer", "modules", *(name.replace("_", " ") for name in formats)]
    rows = [
        [str(k), f"{row['modules']:.60}", *(form(row[name]) for name, form in formats.items())]
        for k, row in table.head(_MAX_LAYERS).iterrows()
    ]
    omitted = len(table) - len(rows)
    more = note_html(f"{omitted} more layers: see .table") if omitted else ""
    return note_html(title) + table_html(head, rows) + more

"""Layouts of parallelism as notebooks show them: a table with a row a GPU."""

from __future__ import annotations

from pipesim.network.parallel_layout import Layout
from pipesim.plot.html_parts import note_html, omitted_html, omitted_text, table_html

#: Most GPUs that are shown.
MAX_GPUS = 64


def layout_html(layout: Layout) -> str:
    """Return a layout as a table of its GPUs, with their nodes, coordinates and devices."""
    table = layout.table
    shown = table.head(MAX_GPUS)
    rows = [[str(gpu), *map(str, values)] for gpu, *values in shown.itertuples()]
    title = (
        f"{layout.n_gpus} GPUs on {layout.n_nodes} node{'s' * (layout.n_nodes > 1)}, order "
        f"{layout.order}; etp, ep and edp are coordinates of experts"
    )
    return (
        note_html(title)
        + table_html(["GPU", *table.columns], rows)
        + omitted_html(omitted_text(len(table), len(shown), "GPUs"))
    )

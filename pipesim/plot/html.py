"""What notebooks show: a schedule in clock cycles, a graph in counts, and the parts of figures."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import PipeError
from pipesim.graph.compute_tasks import compute_graph
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import Op
from pipesim.plot.style import LABELS, chunks, shades, text_colours
from pipesim.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_html", "graph_html", "schedule_html"]

#: What is shown of large schedules and graphs.
MOST_DEVICES, MOST_CYCLES = 32, 64
_TABLE = "border-collapse:separate;border-spacing:1px;font-size:11px;line-height:1.5"
_CELL = "text-align:center;min-width:1.7em;padding:0 2px"
_HEAD = "text-align:left;padding:0 8px 0 0;font-weight:normal"
_NOTE = "margin:2px 0 4px;font-size:12px"


def figure_html(figure: Figure, text: str) -> str:
    """Return a figure as an inline PNG that reads as ``text`` where images do not show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=200)
    image = base64.b64encode(buffer.getvalue()).decode("ascii")
    width = round(figure.get_figwidth() * 110)
    return (
        f'<img alt="{escape(text)}" src="data:image/png;base64,{image}" '
        f'style="width:{width}px;max-width:100%;background:white"/>'
    )


def note_html(text: str) -> str:
    """Return a line of text."""
    return f'<div style="{_NOTE}">{escape(text)}</div>'


def schedule_html(schedule: Schedule) -> str:
    """Return the schedule as a table: a row a device, a column a clock cycle, as if all cost one.

    A schedule that cannot run is shown by position instead, and says why.
    """
    problem = ""
    columns = np.arange(len(schedule)) - schedule.ptr[schedule.device]
    try:
        verify(schedule)
        columns = compute_graph(schedule).levels
    except PipeError as error:
        problem = str(error).splitlines()[0]
    shown = min(int(columns.max(initial=-1)) + 1, MOST_CYCLES)
    colours = shades(schedule.op, chunks(schedule.device, schedule.stage))
    rows = []
    for device in range(min(schedule.n_devices, MOST_DEVICES)):
        cells = {
            int(columns[k]): _cell(
                str(schedule.microbatch[k]),
                colours[k],
                f"{schedule.stage[k]}{Op(schedule.op[k])}{schedule.microbatch[k]}",
            )
            for k in range(int(schedule.ptr[device]), int(schedule.ptr[device + 1]))
        }
        row = "".join(
            cells.get(k, f'<td style="{_CELL};background:#8881"></td>') for k in range(shown)
        )
        rows.append(f'<tr><th style="{_HEAD}">device {device}</th>{row}</tr>')
    present = [op for op in Op if (schedule.op == op).any()]
    key = "".join(
        _cell(LABELS[op], colour, op.name, tag="span")
        for op, colour in zip(
            present, shades(np.array(present, int), np.zeros(len(present), int)), strict=True
        )
    )
    cut = _left_out(schedule.n_devices, MOST_DEVICES, "devices") + _left_out(
        int(columns.max(initial=-1)) + 1, MOST_CYCLES, "cycles"
    )
    title = (
        f"{schedule.name}: {schedule.n_devices} devices, {schedule.n_stages} stages, "
        f"{schedule.n_microbatches} micro-batches; numbers are micro-batches, "
        + ("columns are positions" if problem else "columns are clock cycles")
    )
    return (
        note_html(title)
        + (note_html(f"It cannot run. {problem}") if problem else "")
        + f'<table style="{_TABLE}">{"".join(rows)}</table>'
        + f'<div style="{_TABLE}">{key}</div>'
        + (note_html(f"Not shown: {', '.join(cut)}.") if cut else "")
    )


def graph_html(graph: TaskGraph) -> str:
    """Return a table of how many tasks of each operation each device runs."""
    shown = min(graph.n_devices, MOST_DEVICES // 2)
    counts = np.zeros((len(Op), graph.n_devices), dtype=np.int64)
    np.add.at(counts, (graph.op, graph.device), 1)
    present = [op for op in Op if counts[op].any()]
    head = [*(f"device {device}" for device in range(shown)), "all"]
    lines = [[*map(str, counts[op][:shown]), str(counts[op].sum())] for op in present]
    total = counts.sum(axis=0)
    names = [*(f"{op.name} {LABELS[op]}" for op in present), "all"]
    lines.append([*map(str, total[:shown]), str(total.sum())])
    cut = _left_out(graph.n_devices, shown, "devices")
    what = f"recompute {graph.recompute}, transfers {'' if graph.overlap else 'not '}overlapped"
    return (
        note_html(
            f"{graph.name}: {len(graph)} tasks on {len(graph.streams)} streams, "
            f"{len(graph.dependencies.values)} dependencies; {graph.n_devices} devices, "
            f"{graph.n_stages} stages, {graph.n_microbatches} micro-batches; {what}"
        )
        + table_html(["tasks", *head], [[n, *row] for n, row in zip(names, lines, strict=True)])
        + (note_html(f"Not shown: {', '.join(cut)}.") if cut else "")
    )


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is to the left, the others to the right."""

    def line(cells: list[str], tag: str) -> str:
        first = f'<th style="{_HEAD}">{escape(cells[0])}</th>'
        style = "text-align:right;padding:0 8px;font-weight:normal"
        rest = (f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells[1:])
        return f"<tr>{first}{''.join(rest)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<table style="{_TABLE}">{line(head, "th")}{body}</table>'


def _cell(text: str, colour: NDArray[np.float64], title: str, tag: str = "td") -> str:
    """Return a coloured cell."""
    red, green, blue = (colour * 255).round().astype(int)
    ink = text_colours(colour[None])[0]
    return (
        f'<{tag} title="{title}" style="{_CELL};background:rgb({red},{green},{blue});'
        f'color:{ink}">{text}</{tag}>'
    )


def _left_out(count: int, shown: int, what: str) -> list[str]:
    """Say which of several there is no room for."""
    return [f"{what} {shown} to {count - 1}"] if count > shown else []

"""Schedules, graphs, timelines and comparisons as notebooks show them: HTML, page and picture."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.compare import Comparison, known_results
from pipesim.analysis.prediction_interval import ends_text
from pipesim.errors import PipeError, check_type
from pipesim.graph.compute_tasks import compute_graph
from pipesim.graph.graph import TaskGraph
from pipesim.graph.verify import verify
from pipesim.ops import Op
from pipesim.plot.figure_style import current_style, shades
from pipesim.plot.html_tables import (
    CELL,
    HEAD,
    TABLE,
    cell_html,
    figure_html,
    figure_png,
    note_html,
    omitted_html,
    omitted_text,
    table_html,
)
from pipesim.plot.page.save import packed_page, page_html
from pipesim.plot.palette import chunks, format_error
from pipesim.plot.paper_figure import figure_with_axes
from pipesim.plot.timelines import ROWS_PER_DEVICE
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline
from pipesim.utils.texts import format_bytes, format_numbers, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Most devices and clock cycles that are shown of large schedules and graphs.
MAX_DEVICES, MAX_CYCLES = 32, 64


def schedule_html(schedule: Schedule) -> str:
    """Return a schedule as a table: a row a device, a column a clock cycle.

    Each action takes one clock cycle. A schedule that cannot run has a column a position instead,
    and a note of the reason.

    Parameters
    ----------
    schedule
        Schedule to show.

    Returns
    -------
    str
        HTML for notebooks.
    """
    check_type("schedule", schedule, Schedule)
    columns, problem = _columns(schedule)
    shown = min(int(columns.max(initial=-1)) + 1, MAX_CYCLES)
    colours = shades(schedule.op, chunks(schedule.device, schedule.stage))
    rows = []
    for device in range(min(schedule.n_devices, MAX_DEVICES)):
        cells = {
            int(columns[k]): cell_html(
                str(schedule.microbatch[k]),
                colours[k],
                f"{schedule.stage[k]}{Op(schedule.op[k])}{schedule.microbatch[k]}",
            )
            for k in range(int(schedule.ptr[device]), int(schedule.ptr[device + 1]))
        }
        row = "".join(
            cells.get(k, f'<td style="{CELL};background:#8881"></td>') for k in range(shown)
        )
        rows.append(f'<tr><th style="{HEAD}">device {device}</th>{row}</tr>')
    present = [op for op in Op if (schedule.op == op).any()]
    key = "".join(
        cell_html(current_style().operations[op], colour, op.name, tag="span")
        for op, colour in zip(
            present, shades(np.array(present, int), np.zeros(len(present), int)), strict=True
        )
    )
    omitted = omitted_text(schedule.n_devices, MAX_DEVICES, "devices") + omitted_text(
        int(columns.max(initial=-1)) + 1, MAX_CYCLES, "cycles"
    )
    title = (
        f"{schedule.name}: {schedule.n_devices} devices, {schedule.n_stages} stages, "
        f"{schedule.n_microbatches} micro-batches; numbers are micro-batches, "
        + ("columns are positions" if problem else "columns are clock cycles")
    )
    return (
        note_html(title)
        + (note_html(f"It cannot run. {problem}") if problem else "")
        + f'<table style="{TABLE}">{"".join(rows)}</table>'
        + f'<div style="{TABLE}">{key}</div>'
        + omitted_html(omitted)
    )


def _columns(schedule: Schedule) -> tuple[NDArray[np.int64], str]:
    """Return the clock cycle of each action, and ""; or its position, and why none can run."""
    try:
        verify(schedule)
        return compute_graph(schedule).levels, ""
    except PipeError as error:
        positions = np.arange(len(schedule)) - schedule.ptr[schedule.device]
        return positions, str(error).splitlines()[0]


def graph_html(graph: TaskGraph) -> str:
    """Return a table of how many tasks of each operation each device runs.

    Parameters
    ----------
    graph
        Graph to show.

    Returns
    -------
    str
        HTML for notebooks.
    """
    check_type("graph", graph, TaskGraph)
    shown = min(graph.n_devices, MAX_DEVICES // 2)
    counts = np.zeros((len(Op), graph.n_devices), dtype=np.int64)
    np.add.at(counts, (graph.op, graph.device), 1)
    present = [op for op in Op if counts[op].any()]
    head = [*(f"device {device}" for device in range(shown)), "all"]
    lines = [[*map(str, counts[op][:shown]), str(counts[op].sum())] for op in present]
    total = counts.sum(axis=0)
    names = [*(f"{op.name} {current_style().operations[op]}" for op in present), "all"]
    lines.append([*map(str, total[:shown]), str(total.sum())])
    omitted = omitted_text(graph.n_devices, shown, "devices")
    options = f"recompute {graph.recompute}, transfers {'' if graph.overlap else 'not '}overlapped"
    return (
        note_html(
            f"{graph.name}: {len(graph)} tasks on {len(graph.streams)} streams, "
            f"{len(graph.dependencies.values)} dependencies; {graph.n_devices} devices, "
            f"{graph.n_stages} stages, {graph.n_microbatches} micro-batches; {options}"
        )
        + table_html(["tasks", *head], [[n, *row] for n, row in zip(names, lines, strict=True)])
        + omitted_html(omitted)
    )


def timeline_html(timeline: Timeline) -> str:
    """Return a timeline as its page in a frame, a picture, and a line of numbers.

    Parameters
    ----------
    timeline
        Timeline to show.

    Returns
    -------
    str
        HTML for notebooks.
    """
    check_type("timeline", timeline, Timeline)
    line = (
        f"{timeline.name}: makespan {format_time(timeline.makespan)}{ends_text(timeline)}, bubble "
        f"{timeline.bubble_fraction:.1%}, {timeline.throughput:.4g} micro-batches/s"
    )
    if timeline.costs is not None:
        line += f", peak memory {format_bytes(float(timeline.memory.peak.max()))}"
    line += _known_results_text(timeline)
    if not timeline.complete:
        line += f"; {int(timeline.ran.sum())} of {len(timeline)} tasks ran"
    return _with_picture(timeline, line) + note_html(line)


def _known_results_text(timeline: Timeline) -> str:
    """Return memory limit, tokens a second and MFU as text, as far as they are known."""
    results, text = known_results(timeline), ""
    if "fits" in results:
        fits = "fits in" if results["fits"] else "does not fit in"
        text += f", {fits} {format_bytes(results['memory_limit'])}"
    if "tokens_per_second" in results:
        text += f", {format_numbers([results['tokens_per_second']])[0]} tokens/s"
    return f"{text}, MFU {results['mfu']:.1%}" if "mfu" in results else text


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison as its page in a frame, a picture, and a table of its operations.

    Parameters
    ----------
    comparison
        Comparison to show.

    Returns
    -------
    str
        HTML for notebooks.
    """
    check_type("comparison", comparison, Comparison)
    rows = [
        [
            f"{op} {current_style().operations[Op[str(op)]]}",
            str(int(row["count"])),
            format_time(row["predicted"]),
            format_time(row["measured"]),
            format_error(row["error"]),
        ]
        for op, row in comparison.by_op.iterrows()
    ]
    head = ["mean of each operation", "tasks", "predicted", "measured", "error"]
    return _with_picture(comparison, repr(comparison)) + table_html(head, rows)


def _with_picture(item: Timeline | Comparison, text: str) -> str:
    """Return the page of an item in a frame, and below it the picture, which opens on demand.

    Viewers that remove frames, such as those of notebooks on the web, keep the picture.
    """
    shown = figure_html(picture(item), text)
    return f"{frame_html(item)}<details><summary>picture</summary>{shown}</details>"


# The interactive page in a frame, and a picture

#: Tasks of a timeline up to which a notebook shows its page: larger pages are for files.
MAX_FRAMED = 20_000
#: Height of a frame around its rows, of a row, and the most of a frame (CSS pixels).
_AROUND, _ROW, _MOST = 150, 30, 620


def mimebundle(item: Timeline | Comparison, **_: Any) -> dict[str, Any]:
    """Return a timeline or comparison for notebooks: HTML with the page, a picture, and text.

    Frontends show the HTML. Those that cannot, and exports to PDF, take the picture.
    """
    return {
        "text/html": comparison_html(item) if isinstance(item, Comparison) else timeline_html(item),
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
        figure, ax = figure_with_axes(Figure, None, item.predicted.n_devices * ROWS_PER_DEVICE)
    else:
        figure, ax = figure_with_axes(Figure, None, item.n_devices)
    item.plot(ax=ax)
    return figure

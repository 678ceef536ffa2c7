"""Figures around their content: sizes, axes, titles, legends, files.

matplotlib is imported when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipesim.errors import ArgumentError, number
from pipesim.plot.figure_style import current_style, text_points
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Height of a device's row, of the space around all rows, and the most that all rows get (inches).
ROW, MARGIN, MAX_ROWS = 0.25, 0.75, 5.0
#: Width of a letter relative to its size, and of a legend's entry without its letters (points).
LETTER, HANDLE = 0.56, 24.0
#: Colour of notes.
GREY = "#5A5A5A"
_T = TypeVar("_T")


def figure(
    columns: int | None = None, rows: float = 4, *, height: float | None = None
) -> tuple[Figure, Axes]:
    """Make a pyplot figure of a paper's width, and axes in it.

    Parameters
    ----------
    columns
        Width in columns, 1 or 2; by default that of the style (`style`), or else 2.
    rows
        Rows of devices; they set the height.
    height
        Height (inches) instead; by default that of the style, if it has one.

    Returns
    -------
    tuple
        The figure, and its axes.
    """
    from pipesim.utils.packages import pyplot as plt

    return figure_with_axes(plt.figure, current_style().width(columns), rows, height)


def check_height(height: float, name: str = "height") -> float:
    """Return a height that is a finite number above 0."""
    real = number(height)
    if real is None or not 0 < real < math.inf:
        raise ArgumentError(f"{name} must be a finite number > 0, got {height!r}")
    return real


def figure_with_axes(
    make: Callable[..., Figure], width: float | None, rows: float, height: float | None = None
) -> tuple[Figure, Axes]:
    """Return a figure that ``make`` makes, with room for ``rows``, and axes in it.

    Without a width (inches) it is that of the style, or two columns.
    """
    width = current_style().width(None) if width is None else width
    check_height(rows, "rows")
    if height is None:
        height = current_style().height
    if height is None:
        height = MARGIN + min(max(rows, 2) * ROW, MAX_ROWS)
    new = make(figsize=(width, check_height(height)), layout="constrained")
    return new, new.add_subplot()


def save(what: Figure | Axes, *paths: Path | str) -> None:
    """Write a figure to files, each whole or not at all.

    Text stays text in PDF and SVG. PNG has 300 dots an inch.

    Parameters
    ----------
    what
        A figure, or axes in it.
    *paths
        Files that end in ``.pdf``, ``.png`` or ``.svg``.
    """
    from pipesim.utils.packages import matplotlib as mpl

    whole = what.get_figure()
    if whole is None:
        raise ArgumentError("these axes are in no figure; draw into others")
    whole = whole.figure  # a subfigure is part of a figure
    # Publishers ask for fonts of type 42. Without a date, the same figure is the same file.
    settings: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none",
                                "svg.hashsalt": "pipesim"}  # fmt: skip
    undated: dict[str, dict[str, None]] = {
        "pdf": {"CreationDate": None},
        "svg": {"Date": None},
        "png": {},
    }
    for path in [check_path("path", path, "write") for path in paths]:
        kind = path.suffix.lower().lstrip(".")
        if kind not in undated:
            raise ArgumentError(f"cannot write a figure to {path}; use .pdf, .png or .svg")
        options: dict[str, Any] = {"format": kind, "dpi": 300, "metadata": undated[kind]}
        if whole.get_layout_engine() is None:
            options["bbox_inches"] = "tight"

        def write(file: Path, options: dict[str, Any] = options) -> None:
            whole.savefig(file, **options)

        with mpl.rc_context(settings):
            write_whole(path, write)


def check_drawable(value: object, kind: type[_T]) -> _T:
    """Return ``value`` if it is of the type that a function draws."""
    if isinstance(value, kind):
        return value
    raise ArgumentError(f"cannot draw {value!r}: it is no {kind.__name__}")


def end_of_axis(timeline: Timeline) -> float:
    """Return the end of a time axis (s): right after the last event, or 1 without events."""
    began = timeline.start[~np.isnan(timeline.start)]
    last = max(timeline.makespan, float(began.max(initial=0.0)))
    # Tasks that never ended need space to be visible.
    return last * (1.005 if timeline.complete else 1.05) or 1.0


def axes_or_new(ax: Axes | None, rows: float) -> Axes:
    """Return ``ax``, or new axes with room for ``rows``."""
    if ax is None:
        return figure(rows=rows)[1]
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise ArgumentError(f"ax must be a matplotlib Axes, got {type(ax).__name__}")
    return ax


def label(ax: Axes, x: str, y: str) -> None:
    """Label the axes and remove the top and right spines."""
    size = text_points("axes.labelsize")
    ax.set_xlabel(x, fontsize=size)
    ax.set_ylabel(y, fontsize=size)
    ax.tick_params(width=0.6, length=2.5)
    for axis in ("x", "y"):
        ax.tick_params(axis=axis, labelsize=text_points(f"{axis}tick.labelsize"))
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_linewidth(0.6)


def set_device_rows(ax: Axes, n_devices: int, end: float, unit: str) -> None:
    """Set both axes: time in ``unit`` from 0 to ``end``, a row a device, device 0 on top."""
    ax.set_xlim(0.0, end)
    ax.set_ylim(n_devices - 0.5, -0.5)
    from matplotlib.ticker import MaxNLocator

    from pipesim.plot.fitting_labels import DeviceTicks

    # Not 2.5, since most figures of schedules have whole seconds.
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_locator(DeviceTicks(ax, n_devices, text_points("ytick.labelsize") + 1.5))
    label(ax, f"Time ({unit})", "Device")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def axes_size(ax: Axes) -> tuple[float, float]:
    """Return width and height of the axes in points."""
    box = ax.bbox
    per_pixel = 72.0 / ax.figure.dpi
    return float(box.width * per_pixel), float(box.height * per_pixel)


def thinned_ticks(count: int, limit: int) -> list[int]:
    """Return at most ``limit`` ticks of the numbers below ``count``, a power of two apart."""
    step = 1
    while math.ceil(count / step) > limit:
        step *= 2
    return list(range(0, count, step))


def legend_options(labels: list[str], width: float) -> dict[str, Any]:
    """Return the options of a legend of ``labels``, at most ``width`` points wide."""
    size = text_points("legend.fontsize")
    widest = max(len(text) for text in labels) * size * LETTER + HANDLE
    total = sum(len(text) * size * LETTER + HANDLE for text in labels)
    columns = len(labels) if total <= width else max(1, int(width // widest))
    # Lines as even as their number allows.
    columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))
    return {"ncols": columns, "frameon": False, "fontsize": size, "handlelength": 1.2,
            "handleheight": 1.0, "handletextpad": 0.5, "columnspacing": 1.2, "borderpad": 0.1,
            "labelspacing": 0.3}  # fmt: skip


def add_legend(ax: Axes, handles: list[Any], labels: list[str]) -> float:
    """Put a legend above the axes, outside the boxes; return its height (points)."""
    whole = ax.figure.figure
    engine = whole.get_layout_engine()
    if engine is not None:
        engine.execute(whole)  # sets the axes' width
    options = legend_options(labels, axes_size(ax)[0])
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2,
              **options)  # fmt: skip
    lines = math.ceil(len(labels) / int(options["ncols"]))
    return lines * text_points("legend.fontsize") * 1.35 + 3.0


def set_title(ax: Axes, left: str, right: str = "", height: float = 0.0) -> None:
    """Put titles above a legend of ``height`` points."""
    pad = 3.0 + height
    size, note = text_points("axes.titlesize"), text_points()
    ax.set_title(left, loc="left", fontsize=size, pad=pad)
    ax.set_title(right, loc="right", fontsize=note, pad=pad, color=GREY)


def titles_fit(ax: Axes, *texts: str) -> bool:
    """Return whether titles fit side by side above the axes."""
    needed = sum(map(len, texts)) * text_points("axes.titlesize") * LETTER + 10.0
    return needed < axes_size(ax)[0]

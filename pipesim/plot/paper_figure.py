"""Figures around their content: sizes, axes, titles, legends, files.

matplotlib is imported when needed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pipesim.errors import ArgumentError, LegibilityWarning, number
from pipesim.plot.figure_style import current_style, shown_name, text_points
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Height of a device's row, of the space around all rows, and the most that all rows get (inches).
ROW, MARGIN, MAX_ROWS = 0.25, 0.75, 5.0
#: Lengths in a legend relative to its size: of a handle, from it to its text, between columns.
HANDLE, TO_TEXT, BETWEEN = 1.2, 0.5, 1.2
#: Colour of notes.
GREY = "#5A5A5A"
_T = TypeVar("_T")
#: Places of a legend beside the axes.
LegendPlace = Literal["top", "bottom", "right"]


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


def check_height(height: float, name: str = "height", most: float = 200.0) -> float:
    """Return a height that is a finite number above 0, and one that renderers take."""
    real = number(height)
    if real is None or not 0 < real < math.inf or real > most:
        limit = f" (at most {most:g})" * (most < math.inf)
        raise ArgumentError(f"{name} must be a finite number > 0{limit}, got {height!r}")
    return real


def figure_with_axes(
    make: Callable[..., Figure], width: float | None, rows: float, height: float | None = None
) -> tuple[Figure, Axes]:
    """Return a figure that ``make`` makes, with room for ``rows``, and axes in it.

    Without a width (inches) it is that of the style, or two columns.
    """
    width = current_style().width(None) if width is None else width
    check_height(rows, "rows", math.inf)
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


@contextmanager
def ignore_small_boxes() -> Iterator[None]:
    """Draw figures whose size no user chose, without warnings of missing numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegibilityWarning)
        yield


def axes_or_new(
    ax: Axes | None,
    rows: float = 4,
    height: float | None = None,
    *,
    usual_height: float | None = None,
    columns: int | None = None,
) -> Axes:
    """Return ``ax``, or new axes.

    Their figure has ``height``, or else ``usual_height``, or else room for ``rows``.
    """
    if ax is None:
        return figure(columns, rows, height=usual_height if height is None else height)[1]
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise ArgumentError(f"ax must be a matplotlib Axes, got {type(ax).__name__}")
    if height is not None:
        raise ArgumentError(
            f"height={height:g} is that of a new figure, and ax is in a figure already; give one "
            "of both"
        )
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


def farthest(ax: Axes, end: float, axis: Literal["x", "y"] = "x") -> float:
    """Return ``end``, or the farther end of axes that share this axis and have a drawing."""
    siblings = getattr(ax, f"get_shared_{axis}_axes")().get_siblings(ax)
    if any(other.has_data() for other in siblings if other is not ax):
        return float(max(end, *getattr(ax, f"get_{axis}lim")()))
    return end


def set_device_rows(ax: Axes, n_devices: int, end: float, unit: str) -> None:
    """Set both axes: time in ``unit`` from 0 to ``end``, a row a device, device 0 on top.

    Axes that share one with others are as long as the longest of them.
    """
    bottom = farthest(ax, n_devices - 0.5, "y")
    ax.set_xlim(0.0, farthest(ax, end))
    ax.set_ylim(bottom, -0.5)
    n_devices = round(bottom + 0.5)
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


def text_width(text: str, size: float) -> float:
    """Return the width of a text of a size in today's font (points)."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return max(
        float(text_to_path.get_text_width_height_descent(line, font, ismath=False)[0])
        for line in text.split("\n")
    )


def _legend_columns(labels: list[str], size: float, width: float, handle: float) -> int:
    """Return the columns of a legend of few lines, at most ``width`` wide (points).

    ``size`` is that of its texts, and ``handle`` the length of a handle relative to it.
    """
    widths = [text_width(text, size) + (handle + TO_TEXT + BETWEEN) * size for text in labels]
    for n_lines in range(1, len(labels)):
        columns = math.ceil(len(labels) / n_lines)
        # matplotlib fills columns in this way; its letters are a little wider on a raster.
        total = sum(part.max() for part in np.array_split(widths, columns))
        if 1.03 * (total - (BETWEEN - 0.6) * size) <= width:  # 0.6: the space around a legend
            return columns
    return 1


def add_legend(
    where: Axes | Figure,
    handles: list[Any],
    labels: list[str],
    place: bool | LegendPlace = True,
    **changes: Any,
) -> float:
    """Put a legend beside axes, or beside all axes of a figure; True is on top.

    Return its height above the axes (points). ``changes`` are options of matplotlib's legends.
    """
    if place is False or not labels:
        return 0.0
    place = "top" if place is True else place
    whole = where.figure.figure
    is_figure, size = where is whole, text_points("legend.fontsize")
    if not is_figure and (engine := whole.get_layout_engine()) is not None:
        engine.execute(whole)  # sets the axes' width
    width = whole.get_figwidth() * 72 if is_figure else axes_size(where)[0]  # type: ignore[arg-type]
    handle = changes.get("handlelength", HANDLE)
    columns = 1 if place == "right" else _legend_columns(labels, size, width, handle)
    options: dict[str, Any] = {
        "ncols": columns, "frameon": False, "fontsize": size, "handlelength": HANDLE,
        "handleheight": 1.0, "handletextpad": TO_TEXT, "columnspacing": BETWEEN, "borderpad": 0.1,
        "labelspacing": 0.3,
    }  # fmt: skip
    if is_figure:
        side = {"top": "upper center", "bottom": "lower center", "right": "right upper"}[place]
        options["loc"] = f"outside {side}"
    else:
        from matplotlib.transforms import ScaledTranslation

        # Below, the labels of the axis and of its ticks are in between.
        down = 2.5 * text_points() + 10.0 if place == "bottom" else 0.0
        options |= {
            "loc": "lower left" if place == "top" else "upper left",
            "bbox_to_anchor": {"top": (0.0, 1.0), "bottom": (0.0, 0.0), "right": (1.0, 1.0)}[place],
            "bbox_transform": where.transAxes  # type: ignore[union-attr]
            + ScaledTranslation(0.0, -down / 72.0, whole.dpi_scale_trans),
            "borderaxespad": 0.2,
        }
    where.legend(handles, labels, **options | changes)
    lines = math.ceil(len(labels) / columns) if place == "top" else 0
    return lines * size * 1.35 + 3.0 if lines else 0.0


def set_title(ax: Axes, left: str, right: str = "", height: float = 0.0) -> None:
    """Put titles above a legend of ``height`` points; schedules have their papers' names."""
    pad = 3.0 + height
    size, note = text_points("axes.titlesize"), text_points()
    ax.set_title(shown_name(left), loc="left", fontsize=size, pad=pad)
    ax.set_title(right, loc="right", fontsize=note, pad=pad, color=GREY)


def titles_fit(ax: Axes, left: str, right: str) -> bool:
    """Return whether titles fit side by side above the axes."""
    needed = text_width(shown_name(left), text_points("axes.titlesize"))
    return needed + text_width(right, text_points()) + 10.0 < axes_size(ax)[0]

"""Figures around their content, in a paper's style: sizes, fonts, axes, titles, legends, files.

Font sizes are a paper's: 8 points for labels, 7 for the rest. matplotlib is imported when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipesim.errors import ArgumentError, check_count, number
from pipesim.ops import Op
from pipesim.plot.style import PALETTE
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Widths of one and of two columns of an IEEE paper, inches.
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
#: Font sizes (points).
FONT, SMALL = 8.0, 7.0
#: Height of a device's row, of the space around all rows, and the most that all rows get (inches).
ROW, MARGIN, MAX_ROWS = 0.25, 0.75, 5.0
#: Width of a letter relative to its size, and of a legend's entry without its letters (points).
LETTER, HANDLE = 0.56, 24.0
#: Colour of notes.
GREY = "#5A5A5A"
_T = TypeVar("_T")


def figure(
    columns: int = 2, rows: float = 4, *, height: float | None = None
) -> tuple[Figure, Axes]:
    """Make a pyplot figure of a paper's width, and axes in it.

    Parameters
    ----------
    columns
        1 or 2: `ONE_COLUMN` or `TWO_COLUMNS` wide.
    rows
        Rows of devices; they set the height.
    height
        Height (inches) instead of ``rows``.

    Returns
    -------
    tuple
        The figure, and its axes.
    """
    from pipesim.utils.packages import pyplot as plt

    return figure_with_axes(plt.figure, width_of(columns), rows, height)


def width_of(columns: int) -> float:
    """Return the width of one or two columns (inches)."""
    if check_count("columns", columns) > 2:
        raise ArgumentError(f"columns must be 1 or 2, got {columns}")
    return ONE_COLUMN if columns == 1 else TWO_COLUMNS


def check_height(height: float, name: str = "height") -> float:
    """Return a height that is a finite number above 0."""
    real = number(height)
    if real is None or not 0 < real < math.inf:
        raise ArgumentError(f"{name} must be a finite number > 0, got {height!r}")
    return real


def figure_with_axes(
    make: Callable[..., Figure], width: float, rows: float, height: float | None = None
) -> tuple[Figure, Axes]:
    """Return a figure that ``make`` makes, with room for ``rows``, and axes in it."""
    check_height(rows, "rows")
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
    """Return ``ax``, or new axes two columns wide with room for ``rows``."""
    if ax is None:
        return figure(2, rows)[1]
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise ArgumentError(f"ax must be a matplotlib Axes, got {type(ax).__name__}")
    return ax


def label(ax: Axes, x: str, y: str) -> None:
    """Label the axes and remove the top and right spines."""
    ax.set_xlabel(x, fontsize=FONT)
    ax.set_ylabel(y, fontsize=FONT)
    ax.tick_params(labelsize=SMALL, width=0.6, length=2.5)
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
    ax.yaxis.set_major_locator(DeviceTicks(ax, n_devices, SMALL + 1.5))
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
    widest = max(len(text) for text in labels) * SMALL * LETTER + HANDLE
    total = sum(len(text) * SMALL * LETTER + HANDLE for text in labels)
    columns = len(labels) if total <= width else max(1, int(width // widest))
    # Lines as even as their number allows.
    columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))
    return {"ncols": columns, "frameon": False, "fontsize": SMALL, "handlelength": 1.2,
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
    return lines * SMALL * 1.35 + 3.0


def set_title(ax: Axes, left: str, right: str = "", height: float = 0.0) -> None:
    """Put titles above a legend of ``height`` points."""
    pad = 3.0 + height
    ax.set_title(left, loc="left", fontsize=FONT, pad=pad, fontweight="bold")
    ax.set_title(right, loc="right", fontsize=SMALL, pad=pad, color=GREY, fontweight="normal")


def titles_fit(ax: Axes, *texts: str) -> bool:
    """Return whether titles fit side by side above the axes."""
    needed = sum(map(len, texts)) * FONT * LETTER + 10.0
    return needed < axes_size(ax)[0]


# Settings of matplotlib for figures of a paper: size, fonts, lines that differ without colour

#: Colour, dashes and marker of successive lines. Each of them alone tells lines apart.
_LINES: tuple[tuple[str, Any, str], ...] = (
    (PALETTE[Op.REDUCE_GRAD], "-", "o"),
    (PALETTE[Op.SEND_F], "--", "s"),
    (PALETTE[Op.B], "-.", "^"),
    (PALETTE[Op.SEND_B], (0, (1.2, 1.2)), "D"),
    (PALETTE[Op.F], (0, (6, 1.5, 1, 1.5, 1, 1.5)), "v"),
    (PALETTE[Op.W], (0, (8, 2)), "P"),
    (PALETTE[Op.STEP], (0, (3, 1)), "X"),
)


def paper_style(columns: int = 1, height: float = 2.2) -> dict[str, Any]:
    """Return settings of matplotlib for figures as wide as columns of a paper.

    Figures that are made under these settings have a print size, text of 7 and 8 points, fonts
    that publishers take (type 42) in PDF files, and lines that differ in dashes and markers, too.

    Parameters
    ----------
    columns
        1 or 2: `ONE_COLUMN` or `TWO_COLUMNS` wide.
    height
        Height of new figures, inches.

    Returns
    -------
    dict
        Values of `matplotlib.rcParams` by name.

    Notes
    -----
    ``plt.rcParams.update(paper_style())`` sets them for all that follows, and
    ``with plt.rc_context(paper_style()):`` for a part.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> from pipesim import plot
    >>> with plt.rc_context(plot.paper_style(columns=1, height=2)):
    ...     fig, ax = plt.subplots()
    >>> fig.get_size_inches().tolist(), ax.xaxis.label.get_size()
    ([3.5, 2.0], 8.0)
    >>> plt.close(fig)
    """
    from cycler import cycler

    size = width_of(columns), check_height(height)
    colours, dashes, markers = zip(*_LINES, strict=True)
    sizes = {
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "figure.titlesize",
                         "figure.labelsize"), FONT),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize",
                         "legend.title_fontsize"), SMALL),
        **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width",
                         "grid.linewidth", "patch.linewidth"), 0.6),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
        **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 1.5),
        "lines.linewidth": 1.2,
        "lines.markersize": 4.0,
    }  # fmt: skip
    return {
        "figure.figsize": size,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 300.0,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.fonttype": "none",
        **sizes,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 3.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=colours, linestyle=dashes, marker=markers),
        "legend.frameon": False,
        "legend.handlelength": 2.8,
    }

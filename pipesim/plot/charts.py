"""Charts: memory, idle time, bars of schedules, measured over predicted, front of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle import CAUSES, idle_by_cause
from pipesim.analysis.idle_gaps import Cause
from pipesim.errors import ArgumentError, check_list, check_name, check_numbers, number
from pipesim.ops import Op
from pipesim.plot.figure_style import (
    Inches,
    current_style,
    line_colours,
    shown_name,
    text_points,
)
from pipesim.plot.palette import INK, rgb, text_colours
from pipesim.plot.paper_figure import (
    GREY,
    LegendPlace,
    add_legend,
    axes_or_new,
    axes_size,
    end_of_axis,
    farthest,
    label,
    set_device_rows,
    set_title,
    text_width,
    thinned_ticks,
    titles_fit,
)
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked
from pipesim.utils.texts import Bytes, byte_unit, format_bytes, format_time, in_bytes, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


# Memory over time, and bars that compare schedules

#: With more devices than this, lines are solid and thin, and the legend names only some.
FEW = 8
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))


@checked
def memory(
    timeline: Timeline,
    *,
    ax: Axes | None = None,
    legend: bool | LegendPlace = "right",
    height: Inches | None = None,
    unit: str | None = None,
) -> Axes:
    """Draw the bytes that each device holds over time; later devices are lighter.

    Where the costs give no bytes, the axes say so.

    Parameters
    ----------
    timeline
        A timeline with costs.
    ax, legend, height, unit
        As for `pipesim.plot.timeline`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    held = timeline.memory()
    sign, scale = time_unit(timeline.makespan, unit)
    size_sign, size = byte_unit(float(held["nbytes"].max()))
    ax = axes_or_new(ax, 6, height)
    n_devices = timeline.n_devices
    for device, colour in enumerate(line_colours(n_devices)):
        rows = held[held["device"] == device]
        (line,) = ax.step(
            np.append(rows["time"], timeline.makespan) * scale,
            np.append(rows["nbytes"], rows["nbytes"].iloc[-1]) / size,
            where="post",
            color=colour,
            linestyle=_DASHES[device % len(_DASHES)] if n_devices <= FEW else "-",
            marker="",
            linewidth=1.4 if n_devices <= FEW else 0.8,
            label=f"device {device}" if device in thinned_ticks(n_devices, FEW) else "_",
        )
        line.set_gid(f"memory:{device}")
    ax.set_xlim(0, farthest(ax, end_of_axis(timeline) * scale))
    ax.set_ylim(0, farthest(ax, 1.05 * float(ax.dataLim.y1) or 1.0, "y"))
    if not held["nbytes"].any():
        ax.text(0.5, 0.5, "no bytes in the costs", transform=ax.transAxes, ha="center",
                va="center", fontsize=text_points("axes.labelsize"))  # fmt: skip
    label(ax, f"Time ({sign})", f"Memory held ({size_sign})")
    add_legend(ax, *ax.get_legend_handles_labels(), legend, handlelength=2.4)
    return ax


#: Title of each column of `pipesim.compare`, and the function that formats its values.
_BAR_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "makespan": ("Makespan", format_time),
    "relative": ("Makespan, relative to the first", lambda value: f"{value:.2f}"),
    "bubble_fraction": ("Bubble", lambda value: f"{value:.1%}"),
    "throughput": ("Throughput (micro-batches/s)", lambda value: f"{value:.4g}"),
    "peak_memory": ("Peak memory of the fullest device", format_bytes),
    "gap": ("Gap to the lower bound", lambda value: f"{value:.1%}"),
}


@checked
def bars(
    table: pd.DataFrame,
    *,
    ax: Axes | None = None,
    column: str = "makespan",
    numbers: bool = True,
    height: Inches | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a column of the table of `pipesim.compare`: a bar a schedule, the first on top.

    Parameters
    ----------
    table
        Table that `pipesim.compare` returns. Its ``low`` and ``high`` are whiskers of makespans.
    ax
        Axes to draw into. New axes by default.
    column
        ``"makespan"``, ``"relative"``, ``"bubble_fraction"``, ``"throughput"`` or
        ``"peak_memory"``. An unknown value has no bar and is marked ``n/a``.
    numbers
        Whether to write its value beside each bar; if not, the axis has values.
    height
        As for `pipesim.plot.timeline`.
    title
        By default that of the column.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with the plot.
    """
    usual_title, format_value = _BAR_COLUMNS[check_name("column", column, _BAR_COLUMNS)]
    if column not in getattr(table, "columns", ()) or not len(table):
        raise ArgumentError(
            f"bars takes a table from pipesim.compare with a column {column!r} and at least one "
            f"row, got {type(table).__name__}"
        )
    ax = axes_or_new(ax, len(table), height)
    values = table[column].to_numpy(float)
    rows = np.arange(len(values))
    ax.barh(rows, np.nan_to_num(values), 0.7, color=current_style().palette[Op.F])
    longest = np.nan_to_num(values)
    has_ends = column == "makespan" and "high" in table
    if has_ends:
        ends = table[["low", "high"]].to_numpy(float, na_value=np.nan).T
        ax.plot(ends, np.stack([rows, rows]), color=INK, linestyle="-", linewidth=0.6, marker="|",
                gid="bars:interval")  # fmt: skip
        longest = np.fmax(longest, ends[1])
    for row, value in enumerate(values.tolist()):
        if numbers or np.isnan(value):
            ax.annotate(
                "n/a" if np.isnan(value) else format_value(value), (longest[row], row), (3, 0),
                textcoords="offset points", va="center", fontsize=text_points(),
            )  # fmt: skip
    most = float(longest.max()) if (values > 0).any() else 1.0
    ax.set_xlim(0, most * (1.2 if numbers else 1.02))
    ax.set_ylim(len(values) - 0.5, -0.5)
    sign, scale = _bar_unit(column, most)
    label(ax, "" if numbers else sign, "")
    ax.set_yticks(
        rows,
        [shown_name(str(name)) for name in table.index],
        fontsize=text_points("axes.labelsize"),
    )
    from matplotlib.ticker import MaxNLocator

    places = MaxNLocator(5).tick_values(0, most * scale)
    ticks = [tick for tick in places if tick <= 1.02 * most * scale and not numbers]
    ax.set_xticks([tick / scale for tick in ticks], [f"{tick:g}" for tick in ticks])
    ax.tick_params(axis="y", length=0)
    ax.spines["bottom"].set_visible(not numbers)
    if title is None:
        title = usual_title + ", and where 80 % of measured steps are" * has_ends
    set_title(ax, title)
    return ax


def _bar_unit(column: str, most: float) -> tuple[str, float]:
    """Return the unit of a column's axis, and how many of it a value of 1 is."""
    if column == "makespan":
        return time_unit(most)
    if column == "peak_memory":
        sign, size = byte_unit(most)
        return sign, 1 / size
    return ("%", 100.0) if column in ("bubble_fraction", "gap") else ("", 1.0)


# Idle time: a bar a device, stacked by the cause of the waiting

Floats = NDArray[np.float64]

#: Colour and hatch of each cause. The colour is that of the most related operation. Causes without
#: a hatch differ in lightness.
LOOKS: Mapping[Cause, tuple[Op, str]] = {
    Cause.WARM_UP: (Op.F, ""),
    Cause.COOL_DOWN: (Op.B, ""),
    Cause.IMBALANCE: (Op.I, "///"),
    Cause.LATENCY: (Op.RECV_F, "..."),
    Cause.BANDWIDTH: (Op.SEND_F, "---"),
    Cause.CONTENTION: (Op.SEND_B, "xxx"),
    Cause.HOST: (Op.STEP, "|||"),
    Cause.STRAGGLER: (Op.W, "\\\\\\"),
    Cause.SCHEDULE_ORDER: (Op.REDUCE_GRAD, ""),
}
#: Opacity of hatches and outlines, 0..1.
HATCH_INK = 0.55


@checked
def idle(
    timeline: Timeline,
    *,
    ax: Axes | None = None,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the idle time of each device as a bar, stacked by cause, device 0 on top.

    Parameters
    ----------
    timeline
        A complete timeline, simulated or measured. `pipesim.analysis.idle` defines the causes.
    ax, legend, height, unit, title
        As for `pipesim.plot.timeline`; the legend has the causes that occur.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    table = idle_by_cause(timeline)
    longest = float(timeline.idle.max(initial=0.0))
    sign, scale = time_unit(longest, unit)
    ax = axes_or_new(ax, timeline.n_devices, height)
    set_device_rows(ax, timeline.n_devices, 1.005 * longest * scale or 1.0, sign)
    ax.set_xlabel(f"Idle ({sign})")
    # Parts that are too small to see are left out of the legend too.
    shown = [cause for cause in Cause if table[CAUSES[cause]].max() > 1e-9 * longest]
    handles, left = [], np.zeros(timeline.n_devices)
    for cause in shown:
        seconds = table[CAUSES[cause]].to_numpy()
        handles.append(_draw_part(ax, cause, left * scale, seconds * scale))
        left += seconds
    above = add_legend(ax, handles, [str(cause) for cause in shown], legend)
    if title:
        set_title(ax, title, height=above)
    return ax


def _draw_part(ax: Axes, cause: Cause, left: Floats, width: Floats) -> BarContainer:
    """Draw one cause's part of every bar; ``left`` and ``width`` have one entry a device."""
    from pipesim.utils.packages import matplotlib as mpl

    op, hatch = LOOKS[cause]
    style = current_style()
    colour = style.palette[op]
    (ink,) = text_colours(rgb([colour]))
    with mpl.rc_context({"hatch.linewidth": 0.6}):  # read once, when a bar is made
        drawn = ax.barh(np.arange(len(left)), width, 0.7, left, color=colour,
                        edgecolor=(ink, HATCH_INK), linewidth=0.4,
                        hatch=hatch if style.patterns else None)  # fmt: skip
    for bar in drawn:
        bar.set_gid(f"idle:{CAUSES[cause]}")
    return drawn


# Measured over predicted seconds of many steps

#: Error of a prediction that the band shows, as a share.
BAND = 0.1
#: Space around the points, as a factor.
_SPACE = 1.25
#: Ratios of the largest to the smallest value from which ticks are 1, 2, 5, ..., and 1, 10, ...
_NARROW, _WIDE = 8.0, 300.0
#: Height of new axes with their labels (inches).
_ACCURACY_HEIGHT = 3.2


@checked
def accuracy(
    measured: Sequence[float],
    predicted: Sequence[float],
    *,
    ax: Axes | None = None,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a point a step, measured over predicted seconds, on logarithmic axes of equal length.

    A line marks equal values, and a band around it predictions that are at most 10 % off. The mean
    and the worst error (predicted over measured, minus 1) are to the right of the title.

    Parameters
    ----------
    measured, predicted
        Seconds of each step.
    ax
        Axes to draw into; its scales and limits are set. New axes, a column wide, by default.
    legend
        Whether to draw a legend; True is within the axes, other places are those of
        `pipesim.plot.timeline`.
    height, unit, title
        As for `pipesim.plot.timeline`; the unit is that of both axes.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with the plot.
    """
    true, guess = _positive_seconds("measured", measured), _positive_seconds("predicted", predicted)
    if len(true) != len(guess) or not len(true):
        raise ArgumentError(
            f"measured and predicted must have one value a step each, got {len(true)} and "
            f"{len(guess)}"
        )
    sign, scale = time_unit(float(np.median(true)), unit)
    ax = axes_or_new(ax, height=height, usual_height=_ACCURACY_HEIGHT, columns=1)
    ends = np.array([min(true.min(), guess.min()) / _SPACE, max(true.max(), guess.max()) * _SPACE])
    ends *= scale
    palette = current_style().palette
    band = ax.fill_between(
        ends, ends / (1 + BAND), ends / (1 - BAND), color=palette[Op.R], linewidth=0, zorder=1
    )
    band.set_gid("accuracy:band")
    (line,) = ax.plot(ends, ends, "-", color=INK, linewidth=0.6, marker="", zorder=2)
    line.set_gid("accuracy:equal")
    points = ax.scatter(
        guess * scale, true * scale, s=14, color=palette[Op.B], edgecolor=INK, linewidth=0.4,
        zorder=3,
    )  # fmt: skip
    points.set_gid("accuracy:steps")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    label(ax, f"Predicted ({sign})", f"Measured ({sign})")
    _set_ticks(ax, ends[1] / ends[0])
    ax.tick_params(which="minor", width=0.4, length=1.5)
    errors = np.abs(guess / true - 1)
    entries = [line, band], ["equal", f"within {BAND:.0%}"]
    place: dict[str, Any] = (
        {"loc": "upper left", "bbox_to_anchor": (0.0, 1.0)} if legend is True else {}
    )
    above = add_legend(ax, *entries, legend, **place) * (legend is not True)
    note = f"error: mean {errors.mean():.1%}, worst {errors.max():.1%}"
    if titles_fit(ax, title or "", note):
        set_title(ax, title or "", note, above)
    else:
        set_title(ax, title or "", height=above)
        ax.text(0.98, 0.03, note, transform=ax.transAxes, ha="right", fontsize=text_points())
    return ax


def _set_ticks(ax: Axes, ratio: float) -> None:
    """Set numbers without exponents as ticks: round ones for a narrow range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        if ratio < _NARROW:
            axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        else:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < _WIDE else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _positive_seconds(
    name: str, values: Sequence[float]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.array(check_numbers(name, values))
    wrong = array[~((array > 0) & np.isfinite(array))]
    if len(wrong):
        raise ArgumentError(f"{name} must be finite seconds above 0, got {wrong[0]}")
    return array


# Configurations of a plan: memory over time, with their front

#: Columns of the table that are drawn.
_PLAN_COLUMNS = ("step", "memory", "schedule")
#: Marker and colour (by operation) of each schedule, by its place in the legend.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
_COLOURS = (Op.F, Op.B, Op.SEND_F, Op.W, Op.I, Op.REDUCE_GRAD, Op.SEND_B, Op.ALL_TO_ALL, Op.STEP)
#: Points of the front that are labelled, and the height of new axes (inches).
_LABELS, _PLAN_HEIGHT = 6, 3.4


@checked
def plan_front(
    table: pd.DataFrame,
    front: Sequence[int],
    names: Mapping[int, str],
    *,
    memory_limit: Bytes | None = None,
    ax: Axes | None = None,
    legend: bool | LegendPlace = True,
    height: Inches | None = None,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a point a configuration, memory of the fullest device over the seconds of a step.

    Colour and marker show the schedule. A line joins the front: configurations of which none is
    better in time or memory and as good in the other; other points are pale. Up to six of the front
    are labelled. The best has a ring, and a whisker from ``low`` to ``high``, if known.

    Parameters
    ----------
    table
        Columns ``step`` (s), ``memory`` (bytes) and ``schedule``, perhaps ``low`` and ``high`` (s);
        a row a configuration, the best first, indexed by rank.
    front
        Ranks of the front, by ascending seconds.
    names
        Label of each rank to be labelled.
    memory_limit
        Bytes that a device may hold; None for no line.
    ax, legend, height, unit, title
        As for `pipesim.plot.timeline`.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with the plot.
    """
    if not set(_PLAN_COLUMNS) <= set(getattr(table, "columns", ())) or not len(table):
        raise ArgumentError(
            f"table must have columns {', '.join(_PLAN_COLUMNS)} and at least one row, got "
            f"{type(table).__name__}"
        )
    ranks = check_list("front", front, "ranks of the table")
    if not ranks or any(rank not in table.index for rank in ranks):
        raise ArgumentError(f"front must have ranks of the table, at least one, got {front!r:.60}")
    memory_limit = in_bytes("memory_limit", memory_limit)
    limit = None if memory_limit is None else number(memory_limit)
    if memory_limit is not None and not (limit or 0.0) > 0:
        raise ArgumentError(f"memory_limit must be bytes above 0, got {memory_limit!r:.60}")
    sign, scale = time_unit(float(table["step"].min()), unit)
    most = max(float(table["memory"].max()), limit or 0.0)
    size_sign, size = byte_unit(most)
    points = table.assign(x=table["step"] * scale, y=table["memory"] / size)
    ax = axes_or_new(ax, height=height, usual_height=_PLAN_HEIGHT)
    handles = _draw_points(ax, points, ranks)
    best = points.loc[ranks]
    (line,) = ax.plot(best["x"], best["y"], "-", color=INK, linewidth=0.8, marker="",
                      drawstyle="steps-post")  # fmt: skip
    line.set(gid="plan:front", zorder=2)
    ring = ax.scatter(best["x"][:1], best["y"][:1], s=70, facecolor="none", edgecolor=INK, zorder=5)
    ring.set(gid="plan:best", linewidth=1.0)
    ax.set_ylim(0, 1.1 * most / size)
    if limit is not None:
        _draw_limit(ax, limit / size, format_bytes(limit))
    label(ax, f"Step ({sign})", f"Memory of the fullest device ({size_sign})")
    handles["front"] = line
    if "high" in best and best["high"].notna().iloc[0]:
        ends = best[["low", "high"]].iloc[0].to_numpy(float) * scale
        (handles["80 % of measured steps of the best"],) = ax.plot(
            ends, np.full(2, best["y"].iloc[0]), "-", color=INK, linewidth=0.6, marker="|",
            zorder=4, gid="plan:interval",
        )  # fmt: skip
    above = add_legend(ax, list(handles.values()), list(handles), legend)
    _label_front(ax, best, names)
    if title:
        set_title(ax, title, height=above)
    return ax


def _draw_points(ax: Axes, points: pd.DataFrame, front: list[int]) -> dict[str, Any]:
    """Draw the points of each schedule, those off the front paler; return those with full colour.

    Schedules are in the order of their best configuration.
    """
    handles = {}
    for place, schedule in enumerate(points["schedule"].drop_duplicates().tolist()):
        look: dict[str, Any] = {
            "color": current_style().palette[_COLOURS[place % len(_COLOURS)]],
            "marker": _MARKERS[place % len(_MARKERS)],
            "edgecolor": INK,
        }
        rows = points[points["schedule"] == schedule]
        on_front = rows.index.isin(front)
        pale, full = rows[~on_front], rows[on_front]
        drawn = ax.scatter(pale["x"], pale["y"], s=11, linewidth=0.2, alpha=0.45, zorder=3, **look)
        drawn.set_gid(f"plan:{schedule}")
        drawn = ax.scatter(full["x"], full["y"], s=20, linewidth=0.5, zorder=4, **look)
        drawn.set_gid(f"plan:front:{schedule}")
        handles[shown_name(str(schedule))] = drawn
    return handles


def _draw_limit(ax: Axes, height: float, text: str) -> None:
    line = ax.axhline(height, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    line.set_gid("plan:limit")
    ax.annotate(
        f"limit {text}", (1.0, height), xycoords=("axes fraction", "data"), xytext=(0, 2),
        textcoords="offset points", ha="right", fontsize=text_points(), color=GREY,
    )  # fmt: skip


def _label_front(ax: Axes, best: pd.DataFrame, names: Mapping[int, str]) -> None:
    """Label points of the front below and to the left of each, where no configuration can be.

    The first is labelled, and then always the point whose label is farthest from all others in
    memory, as long as none overlap.
    """
    ranks = [int(rank) for rank in best.index if rank in names]
    if not ranks:
        return
    width, height = axes_size(ax)
    x, y = best["x"].to_dict(), best["y"].to_dict()
    right = ax.get_xlim()[1]
    size = text_points()
    texts = {rank: names[rank].replace(", ", ",\n") for rank in ranks}
    line = 1.25 * size / height * ax.get_ylim()[1]

    def clearance(rank: int, other: int) -> float:
        """Return the distance from the end of the upper label to the lower one."""
        upper = max(rank, other, key=lambda one: y[one])
        return float(abs(y[rank] - y[other]) - line * (1.2 + texts[upper].count("\n")))

    kept = [ranks[0]]
    while len(kept) < _LABELS:
        least = {rank: min(clearance(rank, other) for other in kept) for rank in ranks}
        freest = max(ranks, key=lambda rank: least[rank])
        if least[freest] < 0:
            break
        kept.append(freest)
    left = ax.get_xlim()[0]
    for rank in kept:  # room for each label on the left of its point
        share = min((text_width(texts[rank], size) + 1.5 * size) / width, 0.5)
        left = min(left, (x[rank] - share * right) / (1 - share))
    ax.set_xlim(left, right)
    for rank in kept:
        ax.annotate(
            texts[rank], (x[rank], y[rank]), xytext=(-5, -4), textcoords="offset points",
            ha="right", va="top", fontsize=text_points(), zorder=6,
        )  # fmt: skip

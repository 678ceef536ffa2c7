"""Draw configurations of a plan: memory over time, with their front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesim.errors import ArgumentError, check_list, number
from pipesim.ops import Op
from pipesim.plot.paper_figure import (
    SMALL,
    add_legend,
    axes_or_new,
    figure,
    label,
    set_title,
)
from pipesim.plot.style import INK, PALETTE
from pipesim.utils.units import Bytes, byte_unit, format_bytes, in_bytes, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


#: Columns of the table that are drawn.
_COLUMNS = ("step", "memory", "schedule")
#: Marker and colour of each schedule, by its place in the legend.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
_COLOURS = tuple(PALETTE[op] for op in (Op.F, Op.B, Op.SEND_F, Op.W, Op.I, Op.REDUCE_GRAD,
                                        Op.SEND_B, Op.ALL_TO_ALL, Op.STEP))  # fmt: skip
#: Width of a bold letter relative to its size.
BOLD_LETTER = 0.65
#: Points of the front that are labelled, and the height of new axes (inches).
_LABELS, _HEIGHT = 6, 3.4
_GREY = "#5A5A5A"


def plan_front(
    table: pd.DataFrame,
    front: Sequence[int],
    names: Mapping[int, str],
    *,
    memory_limit: Bytes | None = None,
    ax: Axes | None = None,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw a point a configuration, memory of the fullest device over the seconds of a step.

    Colour and marker show the schedule. A line joins the front: configurations of which none is
    better in time or memory and as good in the other; other points are pale. Up to six of the front
    are labelled. The best, in bold, has a ring.

    Parameters
    ----------
    table
        Columns ``step`` (s), ``memory`` (bytes) and ``schedule``; a row a configuration, the best
        first, indexed by rank.
    front
        Ranks of the front, by ascending seconds.
    names
        Label of each rank to be labelled.
    memory_limit
        Bytes that a device may hold; None for no line.
    ax
        Axes to draw into. New axes, two columns wide, by default.
    unit
        Unit of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default one that fits.
    title
        No title by default.
    """
    if not set(_COLUMNS) <= set(getattr(table, "columns", ())) or not len(table):
        raise ArgumentError(
            f"table must have columns {', '.join(_COLUMNS)} and at least one row, got "
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
    ax = figure(2, height=_HEIGHT)[1] if ax is None else axes_or_new(ax, 4)
    handles = _draw_points(ax, points, ranks)
    best = points.loc[ranks]
    (line,) = ax.plot(best["x"], best["y"], color=INK, linewidth=0.8, drawstyle="steps-post")
    line.set(gid="plan:front", zorder=2)
    ring = ax.scatter(best["x"][:1], best["y"][:1], s=70, facecolor="none", edgecolor=INK, zorder=5)
    ring.set(gid="plan:best", linewidth=1.0)
    ax.set_ylim(0, 1.1 * most / size)
    if limit is not None:
        _draw_limit(ax, limit / size, format_bytes(limit))
    label(ax, f"Step ({sign})", f"Memory of the fullest device ({size_sign})")
    height = add_legend(ax, [*handles.values(), line], [*handles, "front"])
    _label_front(ax, best, names)
    if title:
        set_title(ax, title, height=height)
    return ax


def _draw_points(ax: Axes, points: pd.DataFrame, front: list[int]) -> dict[str, Any]:
    """Draw the points of each schedule, those off the front paler; return those with full colour.

    Schedules are in the order of their best configuration.
    """
    handles = {}
    for place, schedule in enumerate(points["schedule"].drop_duplicates().tolist()):
        look: dict[str, Any] = {
            "color": _COLOURS[place % len(_COLOURS)],
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
        handles[str(schedule)] = drawn
    return handles


def _draw_limit(ax: Axes, height: float, text: str) -> None:
    """Draw the memory limit as a dashed line with its value."""
    line = ax.axhline(height, color=_GREY, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    line.set_gid("plan:limit")
    ax.annotate(
        f"limit {text}", (1.0, height), xycoords=("axes fraction", "data"), xytext=(0, 2),
        textcoords="offset points", ha="right", fontsize=SMALL, color=_GREY,
    )  # fmt: skip


def _label_front(ax: Axes, best: pd.DataFrame, names: Mapping[int, str]) -> None:
    """Label points of the front below and to the left of each, where no configuration can be.

    The first is labelled, and then always the point that is farthest from all labels in memory, as
    long as that is a line or more.
    """
    ranks = [int(rank) for rank in best.index if rank in names]
    if not ranks:
        return
    box = ax.bbox
    per_pixel = 72.0 / ax.figure.dpi
    x, y = best["x"].to_dict(), best["y"].to_dict()
    right = ax.get_xlim()[1]
    room = (len(names[ranks[0]]) * SMALL * BOLD_LETTER + 2 * SMALL) / (box.width * per_pixel)
    share = min(room, 0.5)
    ax.set_xlim((x[ranks[0]] - share * right) / (1 - share), right)
    line = 1.5 * SMALL / (box.height * per_pixel) * ax.get_ylim()[1]
    kept = [ranks[0]]
    while len(kept) < _LABELS:
        distance = {rank: min(abs(y[rank] - y[other]) for other in kept) for rank in ranks}
        farthest = max(ranks, key=lambda rank: distance[rank])
        if distance[farthest] < line:
            break
        kept.append(farthest)
    for rank in kept:
        ax.annotate(
            names[rank], (x[rank], y[rank]), xytext=(-5, -4), textcoords="offset points",
            ha="right", va="top", fontsize=SMALL, zorder=6,
            fontweight="bold" if rank == ranks[0] else "normal",
        )  # fmt: skip

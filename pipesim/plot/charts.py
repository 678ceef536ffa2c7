"""Charts: memory over time, and bars that compare schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.errors import ArgumentError, check_name
from pipesim.ops import Op
from pipesim.plot.paper_figure import (
    FONT,
    SMALL,
    axes_or_new,
    check_drawable,
    end_of_axis,
    label,
    set_title,
    thinned_ticks,
)
from pipesim.plot.style import PALETTE
from pipesim.timeline.timeline import Timeline
from pipesim.utils.units import byte_unit, format_bytes, format_time, time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


#: With more devices than this, lines are solid and thin, and the legend names only some.
FEW = 8
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.2)), (0, (1.5, 1)), (0, (5, 1, 1, 1)))


def memory(timeline: Timeline, *, ax: Axes | None = None, unit: str | None = None) -> Axes:
    """Draw the bytes that each device holds over time; later devices are lighter.

    Where the costs give no bytes, the axes say so.

    Parameters
    ----------
    timeline
        A timeline with costs.
    ax
        Axes to draw into; its limits are set. New axes by default.
    unit
        Unit of the time axis, as for `pipesim.plot.timeline`.

    Raises
    ------
    TimelineError
        If the timeline has no costs.
    """
    held = check_drawable(timeline, Timeline).memory()
    sign, scale = time_unit(timeline.makespan, unit)
    size_sign, size = byte_unit(float(held["nbytes"].max()))
    ax = axes_or_new(ax, 6)
    from pipesim.utils.packages import matplotlib as mpl

    n_devices = timeline.n_devices
    for device in range(n_devices):
        rows = held[held["device"] == device]
        (line,) = ax.step(
            np.append(rows["time"], timeline.makespan) * scale,
            np.append(rows["nbytes"], rows["nbytes"].iloc[-1]) / size,
            where="post",
            color=mpl.colormaps["viridis"](0.85 * device / max(1, n_devices - 1)),
            linestyle=_DASHES[device % len(_DASHES)] if n_devices <= FEW else "-",
            linewidth=1.4 if n_devices <= FEW else 0.8,
            label=f"device {device}" if device in thinned_ticks(n_devices, FEW) else "_",
        )
        line.set_gid(f"memory:{device}")
    ax.set_xlim(0, end_of_axis(timeline) * scale)
    ax.set_ylim(bottom=0)
    if not held["nbytes"].any():
        ax.text(0.5, 0.5, "no bytes in the costs", transform=ax.transAxes, ha="center",
                va="center", fontsize=FONT)  # fmt: skip
    label(ax, f"Time ({sign})", f"Memory held ({size_sign})")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL,
              handlelength=2.4, borderaxespad=0.3)  # fmt: skip
    return ax


#: Title of each column of `pipesim.compare`, and the function that formats its values.
_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "makespan": ("Makespan", format_time),
    "relative": ("Makespan, relative to the first", lambda value: f"{value:.2f}"),
    "bubble_fraction": ("Bubble", lambda value: f"{value:.1%}"),
    "throughput": ("Throughput (micro-batches/s)", lambda value: f"{value:.4g}"),
    "peak_memory": ("Peak memory of the fullest device", format_bytes),
    "gap": ("Gap to the lower bound", lambda value: f"{value:.1%}"),
}


def bars(table: pd.DataFrame, *, ax: Axes | None = None, column: str = "makespan") -> Axes:
    """Draw a column of the table of `pipesim.compare`: a bar a schedule, the first on top.

    Parameters
    ----------
    table
        Table that `pipesim.compare` returns.
    ax
        Axes to draw into. New axes by default.
    column
        ``"makespan"``, ``"relative"``, ``"bubble_fraction"``, ``"throughput"`` or
        ``"peak_memory"``. An unknown value has no bar and is marked ``n/a``.
    """
    title, format_value = _COLUMNS[check_name("column", column, _COLUMNS)]
    if column not in getattr(table, "columns", ()) or not len(table):
        raise ArgumentError(
            f"bars takes a table from pipesim.compare with a column {column!r} and at least one "
            f"row, got {type(table).__name__}"
        )
    ax = axes_or_new(ax, len(table))
    values = table[column].to_numpy(float)
    drawn = ax.barh(np.arange(len(values)), np.nan_to_num(values), 0.7, color=PALETTE[Op.F])
    texts = ["n/a" if np.isnan(value) else format_value(value) for value in values.tolist()]
    ax.bar_label(drawn, texts, padding=3, fontsize=SMALL)
    ax.set_xlim(0, 1.2 * (np.nanmax(values) if (values > 0).any() else 1.0))
    ax.set_ylim(len(values) - 0.5, -0.5)
    label(ax, "", "")
    ax.set_yticks(np.arange(len(values)), [str(name) for name in table.index], fontsize=FONT)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines["bottom"].set_visible(False)
    set_title(ax, title)
    return ax

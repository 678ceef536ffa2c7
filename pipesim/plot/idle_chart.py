"""Chart of idle time: a bar a device, stacked by the cause of the waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.idle import CAUSES, idle_by_cause
from pipesim.analysis.idle_gaps import Cause
from pipesim.ops import Op
from pipesim.plot.paper_figure import (
    add_legend,
    axes_or_new,
    check_drawable,
    set_device_rows,
    set_title,
)
from pipesim.plot.style import PALETTE, shades, text_colours
from pipesim.timeline.timeline import Timeline
from pipesim.utils.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


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


def idle(
    timeline: Timeline,
    *,
    ax: Axes | None = None,
    legend: bool = True,
    unit: str | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the idle time of each device as a bar, stacked by cause, device 0 on top.

    Parameters
    ----------
    timeline
        A complete timeline, simulated or measured. `pipesim.analysis.idle` defines the causes.
    ax
        Axes to draw into; its limits are set. New axes by default.
    legend
        Whether to draw a legend of the causes that occur.
    unit
        Unit of the time axis: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        No title by default.

    Raises
    ------
    TimelineError
        If tasks of the timeline did not run.
    """
    table = idle_by_cause(check_drawable(timeline, Timeline))
    longest = float(timeline.idle.max(initial=0.0))
    sign, scale = time_unit(longest, unit)
    ax = axes_or_new(ax, timeline.n_devices)
    set_device_rows(ax, timeline.n_devices, 1.005 * longest * scale or 1.0, sign)
    ax.set_xlabel(f"Idle ({sign})")
    # Parts that are too small to see are left out of the legend too.
    shown = [cause for cause in Cause if table[CAUSES[cause]].max() > 1e-9 * longest]
    handles, left = [], np.zeros(timeline.n_devices)
    for cause in shown:
        seconds = table[CAUSES[cause]].to_numpy()
        handles.append(_draw_part(ax, cause, left * scale, seconds * scale))
        left += seconds
    height = add_legend(ax, handles, [str(cause) for cause in shown]) if legend and shown else 0
    if title:
        set_title(ax, title, height=height)
    return ax


def _draw_part(ax: Axes, cause: Cause, left: Floats, width: Floats) -> BarContainer:
    """Draw one cause's part of every bar; ``left`` and ``width`` have one entry a device."""
    from pipesim.utils.packages import matplotlib as mpl

    op, hatch = LOOKS[cause]
    (ink,) = text_colours(shades(np.array([op]), np.array([0])))
    with mpl.rc_context({"hatch.linewidth": 0.6}):  # read once, when a bar is made
        drawn = ax.barh(np.arange(len(left)), width, 0.7, left, color=PALETTE[op],
                        edgecolor=(ink, HATCH_INK), linewidth=0.4, hatch=hatch)  # fmt: skip
    for bar in drawn:
        bar.set_gid(f"idle:{CAUSES[cause]}")
    return drawn

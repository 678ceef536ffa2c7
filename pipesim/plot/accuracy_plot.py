"""Draw measured over predicted seconds of many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipesim.errors import ArgumentError, check_numbers
from pipesim.ops import Op
from pipesim.plot.paper_figure import SMALL, axes_or_new, figure, label, set_title, titles_fit
from pipesim.plot.style import INK, PALETTE
from pipesim.utils.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Error of a prediction that the band shows, as a share.
BAND = 0.1
#: Space around the points, as a factor.
_SPACE = 1.25
#: Ratios of the largest to the smallest value from which ticks are 1, 2, 5, ..., and 1, 10, ...
_NARROW, _WIDE = 8.0, 300.0
#: Height of new axes with their labels (inches).
_HEIGHT = 3.2


def accuracy(
    measured: Sequence[float],
    predicted: Sequence[float],
    *,
    ax: Axes | None = None,
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
    unit
        Unit of both axes: ``"s"``, ``"ms"``, ``"us"``, ``"ns"``; by default the one that fits.
    title
        No title by default.
    """
    true, guess = _checked("measured", measured), _checked("predicted", predicted)
    if len(true) != len(guess) or not len(true):
        raise ArgumentError(
            f"measured and predicted must have one value a step each, got {len(true)} and "
            f"{len(guess)}"
        )
    sign, scale = time_unit(float(np.median(true)), unit)
    ax = figure(1, height=_HEIGHT)[1] if ax is None else axes_or_new(ax, 4)
    ends = np.array([min(true.min(), guess.min()) / _SPACE, max(true.max(), guess.max()) * _SPACE])
    ends *= scale
    band = ax.fill_between(
        ends, ends / (1 + BAND), ends / (1 - BAND), color=PALETTE[Op.R], linewidth=0, zorder=1
    )
    band.set_gid("accuracy:band")
    (line,) = ax.plot(ends, ends, color=INK, linewidth=0.6, zorder=2)
    line.set_gid("accuracy:equal")
    points = ax.scatter(
        guess * scale, true * scale, s=14, color=PALETTE[Op.B], edgecolor=INK, linewidth=0.4,
        zorder=3,
    )  # fmt: skip
    points.set_gid("accuracy:steps")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    label(ax, f"Predicted ({sign})", f"Measured ({sign})")
    _set_ticks(ax, ends[1] / ends[0])
    ax.tick_params(which="minor", width=0.4, length=1.5)
    errors = np.abs(guess / true - 1)
    ax.legend([line, band], ["equal", f"within {BAND:.0%}"], loc="upper left", frameon=False,
              fontsize=SMALL, handlelength=1.2, borderaxespad=0.2)  # fmt: skip
    note = f"error: mean {errors.mean():.1%}, worst {errors.max():.1%}"
    if titles_fit(ax, title or "", note):
        set_title(ax, title or "", note)
    else:
        set_title(ax, title or "")
        ax.text(0.98, 0.03, note, transform=ax.transAxes, ha="right", fontsize=SMALL)
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


def _checked(name: str, values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return values as an array, checked to be finite and above 0."""
    array = np.array(check_numbers(name, values))
    wrong = array[~((array > 0) & np.isfinite(array))]
    if len(wrong):
        raise ArgumentError(f"{name} must be finite seconds above 0, got {wrong[0]}")
    return array

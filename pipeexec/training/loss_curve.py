"""Draw the losses of a training over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.errors import ArgumentError, check_text
from pipesim.ops import Op
from pipesim.plot.paper_figure import add_legend, axes_or_new, figure, label, set_title
from pipesim.plot.style import INK, PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


#: Height of new axes (inches), and share of all steps that a point of the smooth line averages.
_HEIGHT, _SMOOTH = 2.6, 0.02


def loss_curve(
    log: pd.DataFrame,
    evaluations: pd.DataFrame,
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the loss of each step, its moving average, and the losses of evaluations.

    Parameters
    ----------
    log, evaluations
        Columns ``step`` and ``loss``; ``evaluations`` may be empty.
    ax
        Axes to draw into. New axes, two columns wide, by default.
    title
        No title by default.
    """
    if title is not None:
        check_text("title", title)
    if not len(log):
        raise ArgumentError("the training has no steps yet; train at least one, then plot")
    ax = figure(2, height=_HEIGHT)[1] if ax is None else axes_or_new(ax, 4)
    steps, losses = log["step"].to_numpy(), log["loss"].to_numpy(dtype=float)
    (pale,) = ax.plot(steps, losses, color=PALETTE[Op.F], linewidth=0.6, zorder=2)
    pale.set_gid("training:loss")
    handles, names = [pale], ["loss of a step"]
    window = int(len(losses) * _SMOOTH)
    if window > 1:
        mean = log["loss"].rolling(window, min_periods=1).mean().to_numpy(dtype=float)
        (line,) = ax.plot(steps, mean, color=INK, linewidth=1.0, zorder=3)
        line.set_gid("training:mean")
        handles.append(line)
        names.append(f"mean of {window} steps")
    if len(evaluations):
        (points,) = ax.plot(
            evaluations["step"], evaluations["loss"], color=PALETTE[Op.SEND_B], linewidth=0.8,
            marker="o", markersize=3.0, zorder=4,
        )  # fmt: skip
        points.set_gid("training:evaluation")
        handles.append(points)
        names.append("evaluation")
    ax.set_xlim(0, max(1, int(steps.max())) * 1.01)
    finite = losses[np.isfinite(losses)]
    if len(finite):
        ax.set_ylim(min(0.0, float(finite.min())), float(finite.max()) * 1.05)
    label(ax, "Step", "Loss")
    height = add_legend(ax, handles, names)
    if title:
        set_title(ax, title, height=height)
    return ax

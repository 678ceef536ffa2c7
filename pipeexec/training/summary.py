"""`summary`: a training in a few lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.utils.units import format_time, significant

if TYPE_CHECKING:
    import pandas as pd


def summary(log: pd.DataFrame, evaluations: pd.DataFrame, *, first_step: int = 0) -> str:
    """Return the losses of a training, and the measured and predicted times of its steps.

    Parameters
    ----------
    log, evaluations
        Tables of a `TrainingRun`.
    first_step
        Number of steps of earlier calls.
    """
    if not len(log):
        return "no steps"
    lines = [
        f"{len(log)} steps ({first_step} of them before): loss {log['loss'].iloc[0]:.4f} to "
        f"{log['loss'].iloc[-1]:.4f}"
        if first_step
        else f"{len(log)} steps: loss {log['loss'].iloc[0]:.4f} to {log['loss'].iloc[-1]:.4f}"
    ]
    if len(evaluations):
        lines.append(
            f"evaluation: loss {evaluations['loss'].iloc[-1]:.4f} after step "
            f"{evaluations['step'].iloc[-1]}, lowest {evaluations['loss'].min():.4f}"
        )
    for name in ("tokens_per_s", "samples_per_s"):
        if name in log:
            unit = name.removesuffix("_per_s")
            lines.append(f"{significant(float(log[name].median()))} {unit}/s (median)")
            break
    makespan, bubble = float(log["makespan"].median()), float(log["bubble"].median())
    lines.append(f"step: makespan {format_time(makespan)}, bubble {bubble:.1%} (medians)")
    if "predicted_makespan" in log and np.isfinite(log["predicted_makespan"].iloc[-1]):
        predicted = float(log["predicted_makespan"].iloc[-1])
        lines.append(
            f"predicted: makespan {format_time(predicted)} ({predicted / makespan - 1:+.1%}), "
            f"bubble {float(log['predicted_bubble'].iloc[-1]):.1%}"
        )
    return "\n".join(lines)

"""Warnings about measured durations that predictions cannot rely on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from pipesim.errors import AccuracyWarning

if TYPE_CHECKING:
    import pandas as pd


#: Predictions of shorter tasks (s) are poor on CPU: passing a task to its worker takes as long.
SHORTEST = 1e-3
#: Spread of the steps' mean durations, over their mean, above which the machine is too busy.
UNSTEADY = 0.2


def warn_of_poor_accuracy(table: pd.DataFrame) -> None:
    """Warn of the shortest task below 1 ms, and of the operation that varies most between steps.

    Parameters
    ----------
    table
        As in `Profile.table`.

    Warns
    -----
    AccuracyWarning
        On behalf of the caller of `measure`, which is three calls up.
    """
    tasks = table[(table["loaded"] > 0) & (table.index.get_level_values("op") != "STEP")]
    for name, row in tasks[tasks["loaded"] < SHORTEST].nsmallest(1, "loaded").iterrows():
        warnings.warn(
            f"{_label(name)} takes {row['loaded'] * 1e3:.3f} ms: below {SHORTEST * 1e3:g} ms a "
            "task the prediction will be poor (hand-over and interpreter take as long); use "
            "larger micro-batches or stages",
            AccuracyWarning,
            stacklevel=4,
        )
    for name, row in tasks[tasks["spread"] > UNSTEADY].nlargest(1, "spread").iterrows():
        warnings.warn(
            f"the mean of {_label(name)} moves by {row['spread']:.0%} from step to step: the "
            "machine is busy, and predictions are no better than that",
            AccuracyWarning,
            stacklevel=4,
        )


def _label(name: object) -> str:
    assert isinstance(name, tuple)
    return f"{name[0]} of stage {name[1]}"

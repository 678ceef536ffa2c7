"""Tables of the configurations of a plan: ranked, ruled out, and the front of time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.models.transformer import Transformer
from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.mixed_gpus import mean_peak
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.utils.units import format_numbers, format_time

if TYPE_CHECKING:
    import pandas as pd


#: Columns of the settings of a configuration.
SETTINGS = tuple(field.name for field in fields(PlanChoice))
_GIB = 2.0**30


def ranked_table(problem: PlanProblem, rows: Sequence[Evaluation], *, noisy: bool) -> pd.DataFrame:
    """Return one row a ranked configuration; see `Plans.table`."""
    from pipesim.utils.packages import pandas as pd

    steps = np.array([row.step for row in rows])
    bounds = np.array([row.bound for row in rows])
    columns: dict[str, Any] = {"step": steps}
    if noisy:
        columns["noisy_step"] = [row.noisy_step for row in rows]
    columns["tokens_per_second"] = _tokens(problem) / steps
    columns["mfu"] = [_mfu(problem, row) for row in rows]
    columns["bubble"] = [row.bubble for row in rows]
    columns["memory"] = [row.memory for row in rows]
    columns["gap"] = steps / bounds - 1
    columns |= _setting_columns(rows)
    columns["status"] = [row.status for row in rows]
    return pd.DataFrame(columns, index=pd.RangeIndex(len(rows), name="rank"))


def ruled_out_table(rows: Sequence[Evaluation]) -> pd.DataFrame:
    """Return one row a configuration that is not ranked; see `Plans.ruled_out`."""
    from pipesim.utils.packages import pandas as pd

    columns: dict[str, Any] = {
        "status": [row.status for row in rows],
        "reason": [row.reason for row in rows],
        "bound": [row.bound for row in rows],
        "memory": [row.memory for row in rows],
    }
    return pd.DataFrame(columns | _setting_columns(rows))


def _setting_columns(rows: Sequence[Evaluation]) -> dict[str, list[Any]]:
    """Return a column for each setting of the configurations."""
    return {name: [getattr(row.choice, name) for row in rows] for name in SETTINGS}


def _tokens(problem: PlanProblem) -> float:
    """Return the tokens of a step; NaN if the model's tokens are unknown."""
    if not isinstance(problem.model, Transformer):
        return math.nan
    return problem.global_batch * problem.model.sequence_length


def _mfu(problem: PlanProblem, row: Evaluation) -> float:
    """Return the model FLOPs utilization (0..1), as `Timeline.mfu`; NaN if it is unknown."""
    model = problem.model
    if not isinstance(model, Transformer):
        return math.nan
    flops = model.step_flops(problem.global_batch)
    return flops / (row.step * row.choice.n_gpus * (mean_peak(problem.cluster) or math.nan))


def front_ranks(seconds: Sequence[float], memory: Sequence[float]) -> list[int]:
    """Return the configurations of which none is better in time or memory and no worse in both.

    They are positions in the sequences, by ascending seconds. NaN is on no front.
    """
    order = np.lexsort((memory, seconds))
    front, least = [], math.inf
    for row in order.tolist():
        if memory[row] < least and not math.isnan(seconds[row]):
            front.append(row)
            least = memory[row]
    return front


def shown_columns(table: pd.DataFrame, names: Sequence[str]) -> dict[str, list[str]]:
    """Return rows of a ranked table as text, with ``names`` of their configurations."""

    def shares(column: str) -> list[str]:
        return ["-" if value != value else f"{value:.1%}" for value in table[column]]

    columns = {"rank": [str(rank) for rank in table.index]}
    columns["step"] = list(map(format_time, table["step"]))
    if "noisy_step" in table:
        columns["noisy step"] = list(map(format_time, table["noisy_step"]))
    return {
        **columns,
        "tokens/s": ["-" if x != x else f"{x:.0f}" for x in table["tokens_per_second"]],
        "MFU": shares("mfu"),
        "bubble": shares("bubble"),
        "memory (GiB)": format_numbers(table["memory"], _GIB),
        "gap": shares("gap"),
        "configuration": list(names),
    }

"""Mean seconds of each operation of each stage, under load and in isolation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.measured_costs import stage_seconds
from pipesim.costs.pricing import DURATION_OF
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


#: Field of `Costs` for each operation, and for its part if it has several.
_FIELDS: dict[tuple[Op, int | None], str] = {
    **{(op, None): DURATION_OF[op] for op in (Op.F, Op.B, Op.R, Op.STEP, Op.I, Op.W, Op.DISPATCH)},
    (Op.REORDER, EXCHANGES.index("vectors")): "reorder",
    (Op.REORDER, EXCHANGES.index("gradients")): "reorder_gradients",
}


def mean_task_seconds(
    loaded: Sequence[Timeline], isolated: Sequence[Timeline], *, with_split: bool
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the fields of `Costs`, with a value per stage, and `Profile.table`.

    Parameters
    ----------
    loaded, isolated
        Steps in which all stages run at the same time, and steps of a single micro-batch.
    with_split
        Whether I and W were measured.
    """
    from pipesim.utils.packages import pandas as pd

    fields: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for op, part, name in measured_fields(loaded[0].graph, with_split):
        steps = _seconds_by_step(loaded, op, part)
        seconds_of_shares = steps.mean(axis=0)
        # A STEP of a share lasts that part of the seconds of all parameters.
        shares = loaded[0].graph.optimizer_shares if op == Op.STEP else 1
        fields[name] = tuple((shares * seconds_of_shares).tolist())
        alone = _seconds_by_step(isolated, op, part).mean(axis=0).tolist()
        spread = steps.std(axis=0).tolist()
        label = op.name if part is None else f"{op}.{EXCHANGES[part]}"
        for stage, seconds in enumerate(seconds_of_shares.tolist()):
            rows.append(
                {
                    "op": label,
                    "stage": stage,
                    "loaded": seconds,
                    "spread": spread[stage] / seconds if seconds else 0.0,
                    "isolated": alone[stage] or math.nan,
                    "slow_down": seconds / alone[stage] if alone[stage] else math.nan,
                }
            )
    return fields, pd.DataFrame(rows).set_index(["op", "stage"])


def measured_fields(graph: TaskGraph, with_split: bool) -> Iterator[tuple[Op, int | None, str]]:
    """Yield the operations that a calibration runs, with their part and field of `Costs`."""
    for (op, part), name in _FIELDS.items():
        if op in (Op.I, Op.W) and not with_split:
            continue
        if op in (Op.R, Op.DISPATCH, Op.REORDER) and not (graph.op == op).any():
            continue
        yield op, part, name


def _seconds_by_step(
    timelines: Sequence[Timeline], op: Op, part: int | None
) -> NDArray[np.float64]:
    """Return mean seconds of an operation, shape ``(steps, stages)``; 0 without such a task."""
    return np.array(
        [np.nan_to_num(stage_seconds(timeline, op, part=part)) for timeline in timelines]
    )

"""How far predictions were from steps: by operation and stage, and what the error consists of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from pipeexec.profiling.host_times import HostTimed, launch_seconds
from pipeexec.validation.confidence import Interval, mean_interval
from pipesim.analysis.compare import Comparison
from pipesim.analysis.error_attribution import PARTS
from pipesim.analysis.measured_costs import stage_seconds
from pipesim.analysis.replay import message_times
from pipesim.ops import COMPUTE, EXCHANGES, REORDERED, Op
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MeasuredStep", "Repeat", "interval_over", "op_errors", "op_seconds", "parts_of_steps"]

Key = tuple[str, int]


class MeasuredStep(HostTimed, Protocol):
    """Results of a measured step that comparisons use; `pipeexec.StepResult` has them."""

    @property
    def loss(self) -> Tensor:
        """Loss of the whole batch."""
        ...


class Repeat(NamedTuple):
    """The prediction of a graph from one calibration, and the steps measured beside it."""

    predicted: Timeline
    results: Sequence[MeasuredStep]


def interval_over(errors: Sequence[Sequence[float]]) -> Interval:
    """Return the mean error and its 95 % interval, given the errors of each repeat's steps.

    Steps of one repeat share a calibration, so that their errors are not independent: what counts
    are the means of the repeats. Of a single repeat its steps count, and the interval says nothing
    of how another calibration would have come out.
    """
    if len(errors) > 1:
        return mean_interval(float(np.mean(each)) for each in errors)
    return mean_interval(errors[0])


def parts_of_steps(repeats: Sequence[Repeat]) -> pd.DataFrame:
    """Return the parts of every step's error, in seconds; see `pipesim.analysis.error_attribution`.

    One row a step, repeat after repeat: ``repeat``, ``measured`` makespan, and `PARTS`, whose sum
    is predicted less measured.
    """
    import pandas as pd

    rows = []
    for number, repeat in enumerate(repeats):
        for result in repeat.results:
            measured = result.timeline
            recorded = measured.issued is not None and not np.isnan(measured.issued).any()
            launch = None if recorded else launch_seconds([result])
            parts = Comparison(repeat.predicted, measured).error_parts(launch=launch)
            rows.append({"repeat": number, "measured": measured.makespan} | parts.to_dict())
    return pd.DataFrame(rows, columns=["repeat", "measured", *PARTS])


def op_errors(repeats: Sequence[Repeat]) -> pd.DataFrame:
    """Return how far the mean seconds of each operation in each stage were from the prediction.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``op`` and ``stage``; see `op_seconds`. ``predicted`` and ``measured`` (mean
        over the steps, s), ``error`` (predicted over measured, minus 1; its mean), and ``low`` and
        ``high``, the ends of its 95 % interval, as `interval_over` has it.
    """
    import pandas as pd

    said = [op_seconds(repeat.predicted) for repeat in repeats]
    seen = [[op_seconds(result.timeline) for result in repeat.results] for repeat in repeats]
    rows = []
    for key in said[0]:
        steps = [[step[key] for step in each if step.get(key)] for each in seen]
        if not all(steps) or not all(key in each for each in said):
            continue  # a message that nobody waited for
        # The errors of one repeat are steps', or the one of its mean.
        several = len(repeats) > 1
        errors = [
            [one[key] / float(np.mean(each)) - 1] if several else [one[key] / s - 1 for s in each]
            for one, each in zip(said, steps, strict=True)
        ]
        error = interval_over(errors)
        rows.append(
            {
                "op": key[0],
                "stage": key[1],
                "predicted": float(np.mean([each[key] for each in said])),
                "measured": float(np.mean([np.mean(each) for each in steps])),
                "error": error.mean,
                "low": error.low,
                "high": error.high,
            }
        )
    columns = ["op", "stage", "predicted", "measured", "error", "low", "high"]
    return pd.DataFrame(rows, columns=columns).set_index(["op", "stage"])


def op_seconds(timeline: Timeline) -> Mapping[Key, float]:
    """Return the mean seconds of each operation in each stage that has it.

    Messages are listed as the SEND of the stage that they leave, with the seconds from its start
    to a consumer that waited for them. Halves of overlapped actions are listed apart, as in
    ``"F overlapped"``, and so are the parts of REORDER, as in ``"REORDER.vectors"``.
    """
    graph = timeline.graph
    found: dict[Key, float] = {}
    for op in sorted(COMPUTE):
        parts = REORDERED if op == Op.REORDER else (None,)
        for overlapped, part in itertools.product((False, True), parts):
            number = None if part is None else EXCHANGES.index(part)
            seconds = stage_seconds(timeline, op, overlapped=overlapped, part=number)
            name = op.name if part is None else f"{op.name}.{part}"
            name = f"{name} overlapped" if overlapped else name
            found |= {(name, s): float(x) for s, x in enumerate(seconds) if not np.isnan(x)}
    waited = message_times(timeline, waited_only=True)
    recvs = np.flatnonzero(~np.isnan(waited))
    sends = graph.pair[recvs]
    for op in (Op.SEND_F, Op.SEND_B):
        for stage in np.unique(graph.stage[sends[graph.op[sends] == op]]).tolist():
            mine = (graph.op[sends] == op) & (graph.stage[sends] == stage)
            found[op.name, stage] = float(waited[recvs[mine]].mean())
    return found

"""Errors of predictions: by operation and stage, and in the parts that add up to the total."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from pipeexec.profiling.host_times import HostTimed, launch_seconds
from pipeexec.validation.confidence import Interval, mean_interval
from pipesim.analysis.compare import Comparison
from pipesim.analysis.error_attribution import PARTS
from pipesim.analysis.measured_costs import output_bytes, stage_seconds
from pipesim.analysis.replay import message_times
from pipesim.costs.costs import Costs
from pipesim.errors import AccuracyWarning
from pipesim.ops import COMPUTE, EXCHANGES, REORDERED, Op
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


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

    Steps of one repeat share a calibration, so their errors are not independent. With several
    repeats, the interval is over the means of the repeats. With one repeat, it is over the steps,
    and does not include how another calibration would change the error.
    """
    if len(errors) > 1:
        return mean_interval(float(np.mean(repeat_errors)) for repeat_errors in errors)
    return mean_interval(errors[0])


def parts_of_steps(repeats: Sequence[Repeat]) -> pd.DataFrame:
    """Return the parts of every step's error (s); see `pipesim.analysis.error_attribution`.

    One row a step, repeat after repeat: ``repeat``, ``measured`` makespan, and `PARTS`, whose sum
    is the predicted makespan minus the measured one.
    """
    from pipesim.utils.packages import pandas as pd

    rows = []
    for number, repeat in enumerate(repeats):
        for result in repeat.results:
            measured = result.timeline
            has_issue_times = measured.issued is not None and not np.isnan(measured.issued).any()
            launch = None if has_issue_times else launch_seconds([result])
            parts = Comparison(repeat.predicted, measured).error_parts(launch=launch)
            rows.append({"repeat": number, "measured": measured.makespan} | parts.to_dict())
    return pd.DataFrame(rows, columns=["repeat", "measured", *PARTS])


def op_errors(repeats: Sequence[Repeat]) -> pd.DataFrame:
    """Return the errors of the mean seconds of each operation in each stage.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``op`` and ``stage``; see `op_seconds`.

        - ``predicted``, ``measured``: mean over repeats and steps (s).
        - ``error``: mean of predicted over measured, minus 1.
        - ``low``, ``high``: ends of the 95 % interval of the error; see `interval_over`.
    """
    from pipesim.utils.packages import pandas as pd

    predicted = [op_seconds(repeat.predicted) for repeat in repeats]
    measured = [[op_seconds(result.timeline) for result in repeat.results] for repeat in repeats]
    rows = []
    for key in predicted[0]:
        # One list a repeat: the predicted seconds, and those of every step that has the operation.
        forecasts = [seconds[key] for seconds in predicted if key in seconds]
        steps = [[step[key] for step in repeat if step.get(key)] for repeat in measured]
        if not all(steps) or len(forecasts) < len(predicted):
            continue  # a message for which no task waited
        error = interval_over(_relative_errors(forecasts, steps))
        rows.append(
            {
                "op": key[0],
                "stage": key[1],
                "predicted": float(np.mean(forecasts)),
                "measured": float(np.mean([np.mean(seconds) for seconds in steps])),
                "error": error.mean,
                "low": error.low,
                "high": error.high,
            }
        )
    columns = ["op", "stage", "predicted", "measured", "error", "low", "high"]
    return pd.DataFrame(rows, columns=columns).set_index(["op", "stage"])


def _relative_errors(
    predicted: Sequence[float], measured: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Return the errors of each repeat: of its mean, or of every step if there is one repeat."""
    if len(predicted) == 1:
        return [[predicted[0] / seconds - 1 for seconds in measured[0]]]
    return [[p / float(np.mean(m)) - 1] for p, m in zip(predicted, measured, strict=True)]


def op_seconds(timeline: Timeline) -> Mapping[Key, float]:
    """Return the mean seconds of each operation in each stage that has it.

    A message is listed as the SEND of its source stage: seconds from the start of the SEND to that
    of a consumer that waited. Halves of overlapped actions have separate entries, such as
    ``"F overlapped"``, and so have the parts of REORDER, such as ``"REORDER.vectors"``.
    """
    graph = timeline.graph
    mean_seconds: dict[Key, float] = {}
    for op in sorted(COMPUTE):
        parts = REORDERED if op == Op.REORDER else (None,)
        for overlapped, part in itertools.product((False, True), parts):
            number = None if part is None else EXCHANGES.index(part)
            seconds = stage_seconds(timeline, op, overlapped=overlapped, part=number)
            name = op.name if part is None else f"{op.name}.{part}"
            name = f"{name} overlapped" if overlapped else name
            mean_seconds |= {(name, s): float(x) for s, x in enumerate(seconds) if not np.isnan(x)}
    waited = message_times(timeline, waited_only=True)
    recvs = np.flatnonzero(~np.isnan(waited))
    sends = graph.pair[recvs]
    for op in (Op.SEND_F, Op.SEND_B):
        for stage in np.unique(graph.stage[sends[graph.op[sends] == op]]).tolist():
            is_from_stage = (graph.op[sends] == op) & (graph.stage[sends] == stage)
            mean_seconds[op.name, stage] = float(waited[recvs[is_from_stage]].mean())
    return mean_seconds


def warn_of_other_sizes(costs: Costs, measured: Timeline) -> None:
    """Warn if the messages of a step are not as large as in the given costs.

    Warns
    -----
    AccuracyWarning
        If the bytes of a stage's messages differ by more than 1 %.
    """
    n_stages, n_different = measured.graph.n_stages, costs.n_microbatches or 1
    sizes = (costs.microbatch(k).per_stage("output_bytes", n_stages) for k in range(n_different))
    expected = np.max(list(sizes), axis=0)
    sent = output_bytes(measured)
    differs = (sent > 0) & (np.abs(expected - sent) > 0.01 * sent)
    for stage in np.flatnonzero(differs)[:1]:
        warnings.warn(
            f"the costs have {expected[stage]:.0f} output bytes a micro-batch for stage {stage}, "
            f"but a step sent {sent[stage]:.0f}: they are of another model or size of "
            "micro-batch; profile this one",
            AccuracyWarning,
            stacklevel=3,
        )

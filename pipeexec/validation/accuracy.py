"""Errors of predictions: of a graph's steps, by operation and stage, and in parts that add up.

`Row` is one graph of a validation, predicted and measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeexec.profiling.task_seconds import HostTimed, launch_seconds
from pipesim.analysis.compare import Comparison
from pipesim.analysis.error_attribution import PARTS
from pipesim.analysis.measured_costs import output_bytes, stage_seconds
from pipesim.analysis.replay import message_times
from pipesim.costs.costs import Costs
from pipesim.errors import AccuracyWarning
from pipesim.ops import COMPUTE, EXCHANGES, REORDERED, Op
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Row:
    """One graph, predicted once a repeat and measured in several steps.

    Attributes
    ----------
    predicted
        Prediction of the last repeat, from the costs of its calibration steps.
    measured
        The step with the median makespan.
    makespans, replayed
        Makespan of every step, measured, and replayed from the step's own durations (s); repeat
        after repeat.
    peak_memory
        Peak bytes that each device held: parameters, gradients, optimizer state and activations.
        A separate step counts, task by task, activations and gradients that wait for their
        reduction. Their changes are put at the times of ``measured``.
    losses
        Loss of every step.
    predictions
        Makespan predicted in each repeat (s); empty for one repeat.
    host_seconds
        Time in which the host issued each step, or launched it as one CUDA graph (s); the sum over
        processes. Empty for a `GPipe`, which does not measure it, and for older run directories.
    parts, ops
        Parts of each step's error, and the error of each operation in each stage: tables of
        `pipeexec.validation.accuracy`. None if a run directory lacks them, as older ones do.
    """

    predicted: Timeline
    measured: Timeline
    makespans: tuple[float, ...]
    replayed: tuple[float, ...]
    peak_memory: tuple[float, ...]
    losses: tuple[float, ...]
    predictions: tuple[float, ...] = ()
    host_seconds: tuple[float, ...] = ()
    parts: pd.DataFrame | None = None
    ops: pd.DataFrame | None = None

    @property
    def prediction(self) -> float:
        """Predicted makespan, mean over the repeats (s)."""
        return float(np.mean(self.predictions or [self.predicted.makespan]))

    @property
    def measurement(self) -> float:
        """Measured makespan, median over the steps (s)."""
        return float(np.median(self.makespans))

    @property
    def comparison(self) -> Comparison:
        """Comparison of the prediction with the median step."""
        return Comparison(self.predicted, self.measured)

    @property
    def errors(self) -> NDArray[np.float64]:
        """Predicted over measured makespan, minus 1, of every step."""
        predicted = np.array(self.predictions or [self.predicted.makespan])
        measured = np.array(self.makespans).reshape(len(predicted), -1)
        errors: NDArray[np.float64] = (predicted[:, None] / measured - 1.0).ravel()
        return errors

    @property
    def error(self) -> float:
        """Median of `errors`."""
        return float(np.median(self.errors))

    @property
    def worst_error(self) -> float:
        """The largest of `errors` by magnitude, with its sign."""
        return float(self.errors[np.abs(self.errors).argmax()])

    @property
    def error_interval(self) -> MeanInterval:
        """Mean of `errors` and its 95 % interval, by Student's t.

        With several repeats, it is over the means of the repeats. With one repeat, it is over the
        steps, and does not include how another calibration would change the error.
        """
        return _interval_over(self.errors.reshape(len(self.predictions) or 1, -1).tolist())

    @property
    def replay_errors(self) -> NDArray[np.float64]:
        """Replayed over measured makespan, minus 1, of every step."""
        return np.array([a / b - 1.0 for a, b in zip(self.replayed, self.makespans, strict=True)])


_Key = tuple[str, int]


class MeasuredStep(HostTimed, Protocol):
    """Results of a measured step that comparisons use; `pipeexec.executor.StepResult` has them."""

    @property
    def loss(self) -> Tensor:
        """Loss of the whole batch."""
        ...


class Repeat(NamedTuple):
    """The prediction of a graph from one calibration, and the steps measured beside it."""

    predicted: Timeline
    results: Sequence[MeasuredStep]


def _interval_over(errors: Sequence[Sequence[float]]) -> MeanInterval:
    """Return the mean error and its 95 % interval; see `Row.error_interval`.

    ``errors`` are those of each repeat's steps. Steps of one repeat share a calibration, so their
    errors are not independent.
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
        Indexed by ``op`` and ``stage``; see `_op_seconds`.

        - ``predicted``, ``measured``: mean over repeats and steps (s).
        - ``error``: mean of predicted over measured, minus 1.
        - ``low``, ``high``: ends of the 95 % interval of the error; see `_interval_over`.
    """
    from pipesim.utils.packages import pandas as pd

    predicted = [_op_seconds(repeat.predicted) for repeat in repeats]
    measured = [[_op_seconds(result.timeline) for result in repeat.results] for repeat in repeats]
    rows = []
    for key in predicted[0]:
        # One list a repeat: the predicted seconds, and those of every step that has the operation.
        forecasts = [seconds[key] for seconds in predicted if key in seconds]
        steps = [[step[key] for step in repeat if step.get(key)] for repeat in measured]
        if not all(steps) or len(forecasts) < len(predicted):
            continue  # a message for which no task waited
        error = _interval_over(_relative_errors(forecasts, steps))
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


def _op_seconds(timeline: Timeline) -> Mapping[_Key, float]:
    """Return the mean seconds of each operation in each stage that has it.

    A message is listed as the SEND of its source stage: seconds from the start of the SEND to that
    of a consumer that waited. Halves of overlapped actions have separate entries, such as
    ``"F overlapped"``, and so have the parts of REORDER, such as ``"REORDER.vectors"``.
    """
    graph = timeline.graph
    mean_seconds: dict[_Key, float] = {}
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
    """Warn if messages of a step differ from those of the given costs by more than 1 %."""
    n_stages, n_different = measured.graph.n_stages, costs.n_microbatches or 1
    sizes = (costs.microbatch(k).per_stage("output_bytes", n_stages) for k in range(n_different))
    expected = np.max(list(sizes), axis=0)
    sent = output_bytes(measured)
    differs = (sent > 0) & (np.abs(expected - sent) > 0.01 * sent)
    for stage in np.flatnonzero(differs)[:1]:
        warn_caller(
            f"the costs have {expected[stage]:.0f} output bytes a micro-batch for stage {stage}, "
            f"but a step sent {sent[stage]:.0f}: they are of another model or size of "
            "micro-batch; profile this one",
            AccuracyWarning,
        )


# Confidence intervals of means

#: 97.5 % quantile of Student's t for 1 to 30 degrees of freedom; NIST/SEMATECH e-Handbook of
#: Statistical Methods, 1.3.6.7.2.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
#: 97.5 % quantile of the normal distribution.
_NORMAL = 1.959964


class MeanInterval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Iterable[float]) -> MeanInterval:
    """Return the mean of independent values and its 95 % interval, by Student's t.

    The interval is NaN for fewer than two values, as their deviation is unknown. The mean is NaN
    for no values.
    """
    sample = np.array(list(values), dtype=np.float64)
    if not len(sample):
        return MeanInterval(math.nan, math.nan, math.nan)
    mean = float(sample.mean())
    if len(sample) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half = _student_quantile(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return MeanInterval(mean, mean - half, mean + half)


def _student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for ``freedom`` degrees of freedom."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL  # Abramowitz and Stegun, 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)

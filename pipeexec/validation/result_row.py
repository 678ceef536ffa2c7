"""`Row`: one graph of a validation, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeexec.validation.accuracy import interval_over
from pipeexec.validation.confidence import Interval
from pipesim.analysis.compare import Comparison
from pipesim.timeline.timeline import Timeline

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
    def error_interval(self) -> Interval:
        """Mean of `errors` and its 95 % interval, by Student's t.

        With several repeats, it is over the means of the repeats. With one repeat, it is over the
        steps, and does not include how another calibration would change the error.
        """
        return interval_over(self.errors.reshape(len(self.predictions) or 1, -1).tolist())

    @property
    def replay_errors(self) -> NDArray[np.float64]:
        """Replayed over measured makespan, minus 1, of every step."""
        return np.array([a / b - 1.0 for a, b in zip(self.replayed, self.makespans, strict=True)])

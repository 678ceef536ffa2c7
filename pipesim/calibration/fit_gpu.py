"""`fit_gpu`: constants of a GPU, and of its network, from measured steps.

A row is a measured step. Its columns, of which empty cells have the default:

``seconds``
    Measured time of the step. The median of several repetitions is better than their mean.
``model``, or sizes
    Name of a preset of `pipesim.Transformer`; or its attributes, ``hidden_size``, ``n_layers``,
    ``n_heads``, ``sequence_length``, ``vocabulary_size`` and others. With a name, attributes change
    those of the preset.
``microbatch_size``, and other arguments of `pipesim.Transformer.costs`
    ``tensor_parallel``, ``sequence_parallel``, ``flash_attention``, ``scatter_gather``,
    ``partition``, ``layers_per_stage``: numbers, a layout string, or a word. ``"even"`` (the
    default) gives each stage as many; ``"balanced"`` balances the devices of the row's schedule.
``n_microbatches``, or ``global_batch``
    Micro-batches of a replica, or sequences of a step of all replicas.
``schedule``, ``n_devices``
    1F1B on one device by default; ``n_devices`` are those of the pipeline, without replicas and
    tensor parallelism. Options of the schedule, such as ``n_chunks``, are columns too.
``n_replicas``, ``overlap``, ``grad_sync``, ``shard_optimizer``, and others of `pipesim.lower`
    ``recompute`` is either that of `pipesim.Transformer.costs` (none, selective, full) or that of
    `pipesim.lower` (never, always, except_last, listed).
``label``
    A name for readers.

Constants are fitted by robust least squares of log(predicted / measured), with a weak prior around
their start (`pipesim.calibration.least_squares`). Those that the rows do not determine keep the
value of the GPU (`pipesim.calibration.determined_fit`, which also leaves rows out).

Rows of one configuration, measured several times, count as one: together they have the weight of
one row, are left out together, and the fit needs as many configurations as constants.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.calibration.calibration import Calibration
from pipesim.calibration.calibration_warnings import (
    LARGEST,
    LEAST,
    calibration_warnings,
    steps_text,
)
from pipesim.calibration.constants import Constants, chosen_constants
from pipesim.calibration.determined_fit import WEAKLY_DETERMINED, Fit, fit
from pipesim.calibration.least_squares import Floats, Ints
from pipesim.calibration.measured_steps import MeasuredStep, measured_steps
from pipesim.calibration.step_predictions import (
    StepPrediction,
    configurations,
    predicted_seconds,
    step_predictions,
)
from pipesim.errors import ArgumentError, CalibrationWarning, CostsWarning, check_flag
from pipesim.models.gpu import GPU
from pipesim.network.network import Network

if TYPE_CHECKING:
    import pandas as pd


#: Words between the name of the GPU to start from, and the number of steps.
_FITTED = " fitted to "


def fit_gpu(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str,
    gpu: GPU | Mapping[str, Any] | Path | str,
    network: Network | str | None,
    constants: Iterable[str] | None,
    *,
    progress: bool,
) -> Calibration:
    """Return the constants that suit measured steps; see `pipesim.GPU.fit` for the arguments.

    Raises
    ------
    PipeError
        For settings of a row that are wrong, or do not suit each other, naming the row.

    Warns
    -----
    CalibrationWarning
        For each constant that the rows do not determine: the standard error of its logarithm is
        above 0.5, since it has hardly an effect on them, or one that other constants can have too.
        For each constant at a bound; if the median error of fitted rows is above 50 %; and if there
        are no more configurations than constants, so that none is left to check them.
    """
    check_flag("progress", progress)
    steps = measured_steps(rows)
    predictions = step_predictions(steps)
    blocking = any(step.blocks for step in predictions)
    chosen = chosen_constants(constants, gpu, network, blocking=blocking)
    number = configurations(predictions, chosen.gpu, chosen.start_network)
    count = 1 + int(number.max())
    if count < len(chosen.names):
        raise ArgumentError(
            f"rows has {steps_text('measured steps', len(steps), count)} for {len(chosen.names)} "
            "constants "
            f"({', '.join(chosen.names)}); measure more steps, or give fewer constants, such as "
            f"constants={chosen.names[:count]!r}"
        )
    result = _result(steps, predictions, number, chosen, progress)
    table, errors = _constants_table(chosen, result), _rows_table(steps, number, result)
    for text in calibration_warnings(table, errors):
        warnings.warn(text, CalibrationWarning, stacklevel=3)
    name = chosen.gpu.name.partition(_FITTED)[0]
    name = f"{name}{_FITTED}{steps_text('steps', len(steps), count)}".strip()
    return Calibration(
        chosen.fitted_gpu(result.x, name),
        *chosen.network_factors(result.x),
        table,
        errors,
        chosen,
    )


def _result(
    steps: Sequence[MeasuredStep],
    predictions: Sequence[StepPrediction],
    number: Ints,
    constants: Constants,
    progress: bool,
) -> Fit:
    """Return the fit; with ``progress``, a terminal shows the number of predicted steps.

    ``number`` is the configuration of each row.
    """
    from pipesim.utils.packages import tqdm

    shown = None if progress else True  # None is for a terminal alone
    with tqdm(desc="fit", unit=" predictions", leave=False, disable=shown) as bar:
        _, first = np.unique(number, return_index=True)
        predictor = _Predictor([predictions[k] for k in first], number, constants, bar.update)
        predictor(np.zeros(len(constants.names)), np.arange(len(steps)))  # mistakes, warnings: once
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CostsWarning)
            measured = np.log([step.seconds for step in steps])
            return fit(predictor, measured, *constants.bounds(), constants.undetermined, number)


class _Predictor:
    """Logarithms of predicted seconds, as `fit` calls for them; each is computed once.

    Predictions are those of configurations; ``number`` is the configuration of each row.
    """

    def __init__(
        self,
        predictions: Sequence[StepPrediction],
        number: Ints,
        constants: Constants,
        report: Callable[[], object],
    ) -> None:
        self.predictions = predictions
        self.number = number
        self.constants = constants
        self.report = report
        self._seconds: dict[tuple[bytes, int], float] = {}

    def __call__(self, x: Floats, rows: Ints) -> Floats:
        """Return log(seconds) of some rows for log(constant / start) = x."""
        key = x.tobytes()
        wanted = self.number[rows].tolist()
        missing = [k for k in dict.fromkeys(wanted) if (key, k) not in self._seconds]
        constants = self.constants
        seconds = predicted_seconds(
            self._reported(missing),
            constants.fitted_gpu(x),
            partial(constants.fitted_network, *constants.network_factors(x)),
        )
        for k, value in zip(missing, seconds, strict=True):
            self._seconds[key, k] = value
        return np.log([self._seconds[key, k] for k in wanted])

    def _reported(self, numbers: Sequence[int]) -> Iterator[StepPrediction]:
        """Yield each prediction, and report it when the next is asked for."""
        for k in numbers:
            yield self.predictions[k]
            self.report()


def _constants_table(constants: Constants, result: Fit) -> pd.DataFrame:
    """Return the table of constants of a `Calibration`."""
    from pipesim.utils.packages import pandas as pd

    return pd.DataFrame(
        {
            "value": constants.starts * np.exp(result.x),
            "start": constants.starts,
            "standard_error": result.standard_errors,
            "determined": [k not in result.together for k in range(len(constants.names))],
            "note": [_note(k, constants, result) for k in range(len(constants.names))],
        },
        index=pd.Index(constants.names, name="constant"),
    )


def _note(constant: int, constants: Constants, result: Fit) -> str:
    """Return the reason why a constant is not determined, or the bound that it is at, if any."""
    if constant in result.together:
        others = [constants.names[k] for k in result.together[constant]]
        return (
            f"other values of {' and '.join(others)} make up for it"
            if others
            else "it changes their predicted seconds too little"
        )
    least, most = constants.bounds()
    names = {least[constant]: LEAST, most[constant]: LARGEST}
    note = names.get(result.x[constant], "")
    error = float(result.standard_errors[constant])
    if note or error <= WEAKLY_DETERMINED:
        return note
    return f"weakly, 95 % within a factor of {math.exp(1.96 * error):.1f}"


def _rows_table(steps: Sequence[MeasuredStep], number: Ints, result: Fit) -> pd.DataFrame:
    """Return the table of rows of a `Calibration`."""
    from pipesim.utils.packages import pandas as pd

    table = pd.DataFrame([step.settings for step in steps])
    if "label" not in table:
        table.insert(0, "label", [step.label for step in steps])
    measured = np.array([step.seconds for step in steps])
    table["configuration"] = number
    table["measured"] = measured
    table["predicted"] = np.exp(result.predicted)
    table["error"] = table["predicted"] / measured - 1
    table["predicted_left_out"] = np.exp(result.left_out)
    table["error_left_out"] = table["predicted_left_out"] / measured - 1
    return table

"""`fit_gpu`: constants of a GPU, and of its network, from measured steps, in a `Calibration`.

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

Constants are fitted by robust least squares of log(predicted / measured), with a prior around their
start (`pipesim.calibration.robust_fit`): `PRIOR` says how far each is expected to be from it. Few
rows so move a good start little, and many rows override it. Constants that the rows do not
determine keep the value of the GPU.

Rows of one configuration, measured several times, count as one: together they have the weight of
one row, and are left out together.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.calibration.measured_steps import (
    MeasuredStep,
    StepPrediction,
    configurations,
    measured_steps,
    predicted_seconds,
    step_predictions,
)
from pipesim.calibration.robust_fit import WEAK, WEAKLY_DETERMINED, Fit, Floats, Ints, fit
from pipesim.errors import (
    ArgumentError,
    CalibrationWarning,
    CostsWarning,
    check_flag,
    check_list,
    check_name,
    check_type,
    find_name,
)
from pipesim.framework.framework import Framework, as_framework
from pipesim.models.gpu import FITTED, GPU, as_gpu, fitted_preset, gpu_table, has_gpu_table
from pipesim.network.network import Network
from pipesim.network.sources import MACHINES
from pipesim.plot.figure_style import Inches
from pipesim.plot.paper_figure import LegendPlace
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.files import check_path, write_text
from pipesim.utils.texts import CHECKSUM, checksum

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Calibration:
    """Constants fitted to measured steps; `pipesim.GPU.fit` makes it.

    Attributes
    ----------
    gpu
        GPU with the fitted constants. The others are those that it started from.
    network_efficiency
        Share of the network's bandwidths that messages reach, for the name of a machine of its
        nominal ones; if it was not fitted, that of the file of the GPU to start from, or that of
        `Network.preset`, and 1 for a network.
    network_latency
        Factor of the network's latencies; likewise.
    nic_efficiency
        Share of the bandwidth of NICs alone, if it was fitted or the file of the GPU to start from
        has one; None for ``network_efficiency``.
    constants
        One row a constant: ``value``, ``start``, ``prior`` and ``standard_error`` (of the
        logarithm, so 0.1 is about 10 %; before and after the fit), ``determined`` and ``note``. A
        constant that the rows do not determine has the value that the GPU had before, and a note
        that says why. Other notes name the bound that a value is at, such as ``flops`` at
        ``peak_flops``, or say that the rows determine it weakly: its standard error is above 0.35,
        a factor of 2 in either direction at 95 %.
    rows
        The measured steps, one row each: their settings, the number of their ``configuration``,
        ``measured`` and ``predicted`` (s), ``error`` (predicted over measured, minus 1),
        ``predicted_left_out`` and ``error_left_out``: the same by constants that are fitted
        without the rows of this configuration.
    """

    gpu: GPU
    network_efficiency: float
    network_latency: float
    nic_efficiency: float | None
    constants: pd.DataFrame
    rows: pd.DataFrame
    _start: Constants

    @property
    def errors(self) -> pd.DataFrame:
        """Sizes of the errors: ``mean``, ``median`` and ``worst``, of rows fitted and left out.

        Rows of one configuration count as one in the mean and in the median.
        """
        from pipesim.utils.packages import pandas as pd

        rows = self.rows[["error", "error_left_out"]].abs()
        sizes = rows.groupby(self.rows["configuration"]).mean()
        table = pd.DataFrame({"mean": sizes.mean(), "median": sizes.median(), "worst": rows.max()})
        return table.set_axis(["fitted", "left out"])

    def network(self, gpus_per_device: int = 1) -> Network | None:
        """Return the network with fitted bandwidths and latencies; None if there was none.

        Parameters
        ----------
        gpus_per_device
            GPUs that act as one device, such as a tensor-parallel group. A network that was given
            with groups of GPUs keeps them.

        Returns
        -------
        Network or None
            Network of devices of so many GPUs.
        """
        return self._start.fitted_network(
            self.network_efficiency, self.network_latency, self.nic_efficiency, gpus_per_device
        )

    def predict(
        self, rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str
    ) -> NDArray[np.float64]:
        """Return the seconds of other steps with the fitted constants.

        Parameters
        ----------
        rows
            Steps as for `pipesim.GPU.fit`; the column ``seconds`` may be missing.

        Returns
        -------
        numpy.ndarray
            Seconds, shape ``(n_rows,)``.
        """
        steps = step_predictions(measured_steps(rows, need_seconds=False))
        return np.array(predicted_seconds(steps, self.gpu, self.network))

    def plot(
        self,
        *,
        ax: Axes | None = None,
        left_out: bool = True,
        legend: bool | LegendPlace = True,
        height: Inches | None = None,
    ) -> Axes:
        """Draw measured over predicted seconds; see `pipesim.plot.accuracy`.

        The title names the GPU, and whether each step was left out of the fit that predicts it.

        Parameters
        ----------
        ax
            Axes to draw into. New axes by default.
        left_out
            Whether each prediction is of the fit without this step.
        legend, height
            As for `pipesim.plot.accuracy`.

        Returns
        -------
        matplotlib.axes.Axes
            Axes with the plot.
        """
        from pipesim.plot.charts import accuracy

        column = "predicted_left_out" if left_out else "predicted"
        title = f"{self.gpu.name or 'GPU'}, {'left-out' if left_out else 'fitted'} steps"
        measured, predicted = self.rows["measured"].tolist(), self.rows[column].tolist()
        return accuracy(measured, predicted, ax=ax, legend=legend, height=height, title=title)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: ``gpu``, factors of the network, ``constants``, ``errors``.

        ``GPU(**values["gpu"])`` is the fitted GPU. Arguments ``gpu`` take these values whole, too.

        Returns
        -------
        dict
            Values that JSON has.
        """
        return {
            "gpu": asdict(self.gpu),
            "network_efficiency": self.network_efficiency,
            "network_latency": self.network_latency,
            "nic_efficiency": self.nic_efficiency,
            "constants": self.constants.replace({np.nan: None}).to_dict("index"),
            "errors": self.errors.to_dict("index"),
        }

    def save(self, path: Path | str) -> None:
        """Write `to_dict` as JSON, whole or not at all, with a checksum of the values.

        Parameters
        ----------
        path
            File to write.
        """
        path, values = check_path("path", path, "write"), self.to_dict()
        write_text(path, json.dumps({CHECKSUM: checksum(values), **values}, indent=2) + "\n")

    def __repr__(self) -> str:
        mean = float(self.errors["mean"].iloc[1])
        count = self.rows["configuration"].nunique()
        rows = steps_text("rows", len(self.rows), count)
        return (
            f"<Calibration of {self.gpu.name or 'a GPU'}: {len(self.constants)} constants, "
            f"{rows}, mean error of left-out rows {mean:.1%}>"
        )


#: Notes of constants at a bound.
LEAST, LARGEST = "at its least value", "at its largest value"
#: Median error of fitted steps above which their seconds may have another unit.
_LARGE_ERROR = 0.5


def calibration_warnings(constants: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Yield the text of each warning of a `Calibration`, from its tables."""
    for name, constant in constants.iterrows():
        value, note = f"{constant['value']:.4g}", constant["note"]
        if not constant["determined"]:
            yield f"the rows do not determine {name}: {note}; it stays {value}"
        elif note in (LEAST, LARGEST):
            yield (
                f"{name} is {note}, {value}: the steps would suit one beyond it; check the unit of "
                "seconds, the GPU, and the settings of the rows"
            )
    median = float(rows["error"].abs().groupby(rows["configuration"]).mean().median())
    if median > _LARGE_ERROR:
        yield (
            f"the median error of the fitted steps is {median:.0%}: are these seconds? If the "
            "column has milliseconds, divide it by 1000; or check the GPU and the rows' settings"
        )
    n_determined = int(constants["determined"].sum())
    count = rows["configuration"].nunique()
    if 0 < count <= n_determined:
        yield (
            f"{steps_text('measured steps', len(rows), count)} for {n_determined} constants: none "
            "is left to check them, so errors of left-out rows are not those of a "
            "prediction; measure more steps"
        )


def steps_text(noun: str, n_rows: int, n_configurations: int) -> str:
    """Return such as ``6 steps of 3 configurations``, or ``6 steps`` if all differ."""
    text = f"{n_rows} {noun}"
    if n_configurations == n_rows:
        return text
    return f"{text} of {n_configurations} configuration{'s' * (n_configurations > 1)}"


def fit_gpu(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str,
    *,
    gpu: GPU | Mapping[str, Any] | Path | str,
    network: Network | str | None = None,
    constants: Iterable[str] | None = None,
    framework: Framework | Mapping[str, Any] | str | None = None,
    prior: bool = True,
    progress: bool = True,
) -> Calibration:
    """Return the constants of a GPU that suit measured steps, and the errors of predictions.

    `pipesim.calibration.fit_gpu` has the columns of ``rows`` and the method. It needs SciPy,
    the extra ``pipesim[fit]``.

    Parameters
    ----------
    rows
        Measured steps: the path of a CSV file with a line a step, a DataFrame, or a list of
        mappings. Columns are ``seconds``; ``model``, or a transformer's sizes; arguments of
        `Transformer.costs`, of which ``layers_per_stage`` may be ``"even"`` (the default: each
        stage has as many) or ``"balanced"`` (for the devices of the row's schedule);
        ``n_devices``, ``schedule`` and its options; ``n_microbatches``, of a replica, or
        ``global_batch``, of all; and arguments of `lower`.
    gpu
        GPU to start from, the name of a preset, or a mapping of a GPU's fields; or the path of
        a file ``.json`` that `Calibration.save` wrote, or the mapping in it.
    network
        Network of the steps, or the name of a machine; by default messages take no time. Give a
        network of single GPUs if rows have tensor parallelism of several sizes. A machine has
        the factors of a GPU's file, as start or, if they are not fitted, as they are.
    constants
        Names of the constants to fit: numbers of `GPU`, ``"network_efficiency"`` or
        ``"network_latency"``, factors of the network's bandwidths and latencies, or
        ``"nic_efficiency"``, that of the bandwidth of NICs alone. By default
        ``flops``, ``bandwidth``, ``launch``, ``synchronization`` if messages of any row block
        (``overlap`` is False), ``attention_ratio`` if any row has ``flash_attention`` and, with a
        network, its efficiency.
    framework
        What the training framework does, as in `Transformer.costs`, in rows that do not say it.
    prior
        Whether constants are expected near their start, each as near as data sheets and published
        steps say (`pipesim.calibration.fit_gpu.PRIOR`), so that few rows do not spoil a good start.
        False: within a factor of about 2.7 of it; the fit then needs as many configurations as
        constants.
    progress
        Whether to show on a terminal how many steps were predicted.

    Returns
    -------
    Calibration
        Its ``gpu`` has the fitted constants; its ``rows`` have predictions and errors.

    Raises
    ------
    PipeError
        For settings of a row that are wrong, or do not suit each other, naming the row.

    Warns
    -----
    CalibrationWarning
        For each constant that the rows do not determine: the standard error of its logarithm is
        above 0.5, or above 0.8 of its prior's, since it has hardly an effect on them, or one that
        other constants can have too.
        For each constant at a bound; if the median error of fitted rows is above 50 %; and if there
        are no more configurations than constants, so that none is left to check them.

    Examples
    --------
    >>> import pipesim as ps
    >>> rows = [{"model": "gpt2_xl", "microbatch_size": b, "n_microbatches": 4, "seconds": s}
    ...         for b, s in ((1, 0.43), (2, 0.74), (4, 1.37))]
    >>> fitted = ps.GPU.fit(rows, gpu="a100_80gb", constants=["flops"])
    >>> f"{fitted.gpu.flops:.2g}"
    '2.1e+14'
    """
    check_flag("prior", prior)
    check_flag("progress", progress)
    steps = measured_steps(rows)
    if framework is not None:
        default = {"framework": as_framework(framework)}
        steps = [replace(step, settings=default | dict(step.settings)) for step in steps]
    predictions = step_predictions(steps)
    effective = {
        "synchronization": any(step.blocks for step in predictions),
        "attention_ratio": any(step.options.get("flash_attention") for step in predictions),
    }
    chosen = chosen_constants(constants, gpu, network, effective, prior)
    start_network = partial(chosen.fitted_network, *chosen.factors)
    number = configurations(predictions, chosen.gpu, start_network)
    count = 1 + int(number.max())
    if count < len(chosen.names) and not prior:
        raise ArgumentError(
            f"rows has {steps_text('measured steps', len(steps), count)} for {len(chosen.names)} "
            "constants "
            f"({', '.join(chosen.names)}); measure more steps, fit with the prior, or give fewer "
            f"constants, such as constants={chosen.names[:count]!r}"
        )
    result = _result(steps, predictions, number, chosen, progress)
    table, errors = _constants_table(chosen, result), _rows_table(steps, number, result)
    for text in calibration_warnings(table, errors):
        warn_caller(text, CalibrationWarning)
    name = chosen.gpu.name.partition(FITTED)[0]
    name = f"{name}{FITTED}{steps_text('steps', len(steps), count)}".strip()
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
            return fit(
                predictor, measured, *constants.bounds(), constants.undetermined, number,
                constants.widths,
            )  # fmt: skip


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
    from pipesim.utils.packages import pandas as pd

    return pd.DataFrame(
        {
            "value": constants.starts * np.exp(result.x),
            "start": constants.starts,
            "prior": constants.widths,
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
            else "its effect is too small beside their errors"
        )
    least, most = constants.bounds()
    names = {least[constant]: LEAST, most[constant]: LARGEST}
    note = names.get(result.x[constant], "")
    error = float(result.standard_errors[constant])
    if note or error <= WEAKLY_DETERMINED:
        return note
    return f"weakly, 95 % within a factor of {math.exp(1.96 * error):.1f}"


def _rows_table(steps: Sequence[MeasuredStep], number: Ints, result: Fit) -> pd.DataFrame:
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


# Constants that can be fitted: those of a GPU, and factors of a network's rates.

#: Constants of the network: the share of its bandwidths that messages reach, the factor of its
#: latencies, and the share of the bandwidth of NICs.
EFFICIENCY, LATENCY, NICS = "network_efficiency", "network_latency", "nic_efficiency"
_NETWORK = (EFFICIENCY, LATENCY, NICS)
#: Constants that can be fitted. Those of a GPU are its fields that are always numbers.
CONSTANTS = (*(field.name for field in fields(GPU) if field.type == "float"), *_NETWORK)
#: Start value where the GPU has 0; 1e-5 (s) for other constants.
_TYPICAL = {"half_depth": 64.0, "synchronization": 3e-4}
#: Standard deviation of the logarithm of each constant around its start, before any row is known:
#:
#: - ``flops``: with the terms of their frameworks, five published sets suit 0.87 to 1.01 of
#:   presets.
#: - ``bandwidth``: element-wise kernels reach about the same share everywhere, but frameworks fuse
#:   more or fewer of them.
#: - ``attention_ratio``: kernels of one GPU differ by factors of 1.3 to 2.5 (arXiv 2307.08691,
#:   section 4.1).
#: - ``launch``: 5 us from C++ or a graph to 50 us from Python on a busy host.
#: - ``fp8_ratio``, ``mxfp8_ratio``, ``nvfp4_ratio``: FP8 was seen at 1.4 to 2.
#: - ``network_efficiency``, ``nic_efficiency``: 0.3 to 0.85 of nominal rates were measured.
#: - Others: nothing is known that would be better than a factor.
PRIOR: Mapping[str, float] = {
    "flops": 0.1, "bandwidth": 0.3, "launch": 1.0, "overhead": 0.5, "half_depth": 0.5,
    "synchronization": 1.0, "attention_ratio": 0.5, EFFICIENCY: 0.5, LATENCY: 1.0, NICS: 0.5,
    "fp8_ratio": 0.2, "mxfp8_ratio": 0.2, "nvfp4_ratio": 0.2,
}  # fmt: skip
#: Largest factor between a constant and its start.
_LARGEST_FACTOR = 100.0


@dataclass(frozen=True)
class Constants:
    """The constants to fit, of `CONSTANTS`, and the GPU and network that have the others.

    ``network`` is the name of a machine, a network, or None for messages that take no time. A
    network of single GPUs is grouped for rows with tensor parallelism. ``factors`` are the start of
    those of the network's bandwidths, of its latencies, and of the bandwidth of its NICs: None for
    that of all bandwidths. For the name of a machine, the first is its share of nominal bandwidths,
    and all may be from a GPU's file. Without ``prior``, each constant has a weak one.
    """

    names: tuple[str, ...]
    gpu: GPU
    network: Network | str | None
    factors: tuple[float, float, float | None] = (1.0, 1.0, None)
    prior: bool = True

    @property
    def widths(self) -> Floats:
        """Standard deviation of the prior of each log(constant / start)."""
        return np.array([PRIOR[name] if self.prior else WEAK for name in self.names])

    @property
    def starts(self) -> Floats:
        """Start value of each constant; a typical one where the GPU has 0."""
        return np.array([self._own(n) or _TYPICAL.get(n, 1e-5) for n in self.names])

    def _own(self, name: str) -> float:
        """Return the value of a constant before the fit."""
        if name in _NETWORK:
            return self.factors[_NETWORK.index(name)] or self.factors[0]
        return float(getattr(self.gpu, name))

    @property
    def undetermined(self) -> Floats:
        """log(constant / start) of constants that are given up: 0, or -inf where the GPU has 0."""
        own = np.array([self._own(name) for name in self.names])
        return np.where(own > 0, 0.0, -np.inf)

    def bounds(self) -> tuple[Floats, Floats]:
        """Return the least and the largest log(constant / start) of each constant."""
        least = np.full(len(self.names), -math.log(_LARGEST_FACTOR))
        most = -least
        if "flops" in self.names:
            peak = math.inf if self.gpu.peak_flops is None else self.gpu.peak_flops
            k = self.names.index("flops")
            most[k] = min(most[k], math.log(peak / self.gpu.flops))
        if isinstance(self.network, str):  # its shares of nominal bandwidths are at most 1
            for name in {EFFICIENCY, NICS}.intersection(self.names):
                most[self.names.index(name)] = max(0.0, -math.log(self._own(name)))
        return least, most

    def fitted_gpu(self, x: Floats, name: str | None = None) -> GPU:
        """Return the GPU with constants of log(constant / start) = x."""
        values = dict(zip(self.names, (self.starts * np.exp(x)).tolist(), strict=True))
        for factor in _NETWORK:
            values.pop(factor, None)
        peak = self.gpu.peak_flops
        if peak is not None and "flops" in values:
            values["flops"] = min(values["flops"], peak)  # the exponential may round upwards
        return replace(self.gpu, **values, name=self.gpu.name if name is None else name)

    def network_factors(self, x: Floats) -> tuple[float, float, float | None]:
        """Return the factors of bandwidths, of latencies and of the bandwidth of NICs."""
        changes = dict(zip(self.names, np.exp(x).tolist(), strict=True))
        efficiency, latency, of_nics = (self._own(n) * changes.get(n, 1.0) for n in _NETWORK)
        if isinstance(self.network, str):  # the exponential may round upwards
            efficiency, of_nics = min(efficiency, 1.0), min(of_nics, 1.0)
        has_own = NICS in self.names or self.factors[2] is not None
        return efficiency, latency, of_nics if has_own else None

    def fitted_network(
        self, efficiency: float, latency: float, of_nics: float | None, gpus_per_device: int
    ) -> Network | None:
        """Return the network of devices of so many GPUs, with its rates times the factors."""
        if self.network is None:
            return None
        network = self.network
        if isinstance(network, str):
            network = Network.preset(network, 1.0)
        network = network.scaled(latency=latency, bandwidth=efficiency, nic_bandwidth=of_nics)
        if network.nodes is None or network.nodes.gpus_per_device > 1:
            return network
        return network.grouped(gpus_per_device)


def chosen_constants(
    names: Iterable[str] | None,
    gpu: GPU | Mapping[str, Any] | Path | str,
    network: Network | str | None,
    effective: Mapping[str, bool],
    prior: bool,
) -> Constants:
    """Return the constants to fit, checked; arguments are those of `pipesim.GPU.fit`.

    ``effective``: whether other constants have an effect on any row, so that they are fitted by
    default.
    """
    start = as_gpu(gpu)
    if isinstance(network, str):
        find_name("network", network, MACHINES)
    elif network is not None:
        check_type("network", network, Network, "or give the name of a machine")
    if names is None:
        names = ["flops", "bandwidth", "launch"]
        names += [name for name, has_effect in effective.items() if has_effect]
        names += [EFFICIENCY] if network is not None else []
    free = check_list("constants", names, f"names of {', '.join(CONSTANTS)}")
    if not free:
        raise ArgumentError(f"constants is empty; give at least one of {', '.join(CONSTANTS)}")
    for name in free:
        check_name("constant", name, CONSTANTS)
        if free.count(name) > 1:
            raise ArgumentError(f"constants has {name!r} twice; give it once")
        if name in _NETWORK and network is None:
            raise ArgumentError(f"constants has {name}, but there is no network; give one")
        if name == NICS and isinstance(network, Network) and network.nodes is None:
            raise ArgumentError(f"constants has {name}, but the network has no nodes with NICs")
    factors: tuple[float, float, float | None] = (1.0, 1.0, None)
    if isinstance(network, str):
        latency = gpu_table(gpu).network_latency if has_gpu_table(gpu) else 1.0
        fitted = fitted_preset(network, gpu)
        factors = fitted.nominal_share or 1.0, latency, fitted.nominal_nic_share
    return Constants(tuple(free), start, network, factors, prior)

"""Measured steps: read from a file, a table or mappings; and predicted for a GPU and a network."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipesim.calibration.robust_fit import Ints
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    CostsWarning,
    NetworkError,
    PipeError,
    UnknownNameError,
    check_count,
    check_name,
    number,
    suggestion,
)
from pipesim.graph.graph import TaskGraph
from pipesim.graph.tasks import StreamKind
from pipesim.lowering.lower import lower
from pipesim.lowering.recomputes import RECOMPUTE as TASK_RECOMPUTE
from pipesim.models.gpu import GPU
from pipesim.models.parallel import RECOMPUTE
from pipesim.models.placed_split import is_word
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.ops import SENDS
from pipesim.scheduling.registry import options_of_schedules, schedule, schedule_info
from pipesim.simulation.simulate import predict_timeline
from pipesim.sweeps.settings import COST_OPTIONS, LOWERING, MODEL, device_size, make_model
from pipesim.utils.files import check_path, read_text
from pipesim.utils.texts import csv_rows, parse_float, parse_int

if TYPE_CHECKING:
    import pandas as pd


#: Columns that are counts of the run, besides the arguments of `pipesim.lower`.
_RUN = ("schedule", "n_devices", "n_microbatches", "global_batch")
#: Columns without an effect on the prediction: the measured time, and a name for readers.
_OTHERS = ("seconds", "label")
_TRUTHS = {"true": True, "false": False, "yes": True, "no": False}
#: Columns that are true or false, where 1 and 0 mean the same.
_FLAGS = frozenset(
    name
    for function in (Transformer, Transformer.costs, lower)
    for name, parameter in signature(function).parameters.items()
    if isinstance(parameter.default, bool)
)


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: its place in the source, for messages, its settings and its seconds.

    ``settings`` has the value of each column but ``seconds``, without empty cells.
    """

    where: str
    settings: dict[str, Any]
    seconds: float

    @property
    def label(self) -> str:
        """Name for readers: the column ``label``, or the row or line."""
        return str(self.settings.get("label", self.where.rpartition(", ")[2]))


def known_columns() -> tuple[str, ...]:
    """Return the columns that a table of measured steps may have."""
    options = {option for options in options_of_schedules().values() for option in options}
    columns = (*_OTHERS, *MODEL, "layers_per_stage", *COST_OPTIONS, *_RUN, *LOWERING.values(),
               *sorted(options))  # fmt: skip
    return tuple(dict.fromkeys(columns))


def measured_steps(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str, *, need_seconds: bool = True
) -> list[MeasuredStep]:
    """Return the steps of a table; see `pipesim.GPU.fit` for its columns.

    Without ``need_seconds``, steps without seconds have NaN.
    """
    from pipesim.utils.packages import pandas as pd

    if isinstance(rows, str | os.PathLike):
        tables = _read(check_path("rows", rows), need_seconds)
    elif isinstance(rows, pd.DataFrame):
        names = [str(name) for name in rows.columns]
        _check_columns("rows", names, need_seconds)
        records = rows.set_axis(names, axis=1).to_dict("records")
        tables = [(f"row {number}", record) for number, record in enumerate(records)]
    elif isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        tables = [(f"row {number}", row) for number, row in enumerate(rows)]
    else:
        raise ArgumentTypeError(
            "rows must be the path of a CSV file, a DataFrame or a list of mappings, got "
            f"{rows!r:.60} ({type(rows).__name__})"
        )
    if not tables:
        raise ArgumentError("rows has no measured step; give one a row")
    return [_step(where, table, need_seconds) for where, table in tables]


def _read(path: Path, need_seconds: bool) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the place and the values of each line of a CSV file below its header."""
    text = read_text(path, "rows from", ArgumentError)
    try:
        lines = [(line, row) for line, row in csv_rows(text) if any(map(str.strip, row))]
    except ValueError as error:
        raise ArgumentError(f"cannot read rows from {path}: {error}") from error
    if not lines:
        raise ArgumentError(f"{path} is empty; its first line must name columns, such as "
                            "model,microbatch_size,global_batch,n_devices,seconds")  # fmt: skip
    header = [name.strip() for name in lines[0][1]]
    _check_columns(str(path), header, need_seconds)
    tables: list[tuple[str, Mapping[Any, Any]]] = []
    for line, cells in lines[1:]:
        where = f"{path}, line {line}"
        if len(cells) != len(header):
            raise ArgumentError(
                f"{where}: {len(cells)} values for {len(header)} columns; give one value a "
                'column, and quote lists, as "8,8,7"'
            )
        tables.append((where, dict(zip(header, map(_parsed, cells), strict=True))))
    if not tables:
        raise ArgumentError(f"{path} has no measured step; give one a line")
    return tables


def _parsed(text: str) -> Any:
    """Return the number, truth value or list of them in a cell; None for an empty cell."""
    text = text.strip()
    if "," in text:
        return [_parsed(part) for part in text.split(",")]
    for parse in (parse_int, parse_float):
        if (value := parse(text)) is not None:
            return value
    return _TRUTHS.get(text.lower(), text) if text else None


def _check_columns(where: str, names: Sequence[str], need_seconds: bool) -> None:
    columns = known_columns()
    for name in names:
        if name not in columns:
            raise UnknownNameError(
                f"{where}: unknown column {name!r}{suggestion(name, columns)} "
                "(pipesim calibrate --help file lists all columns)"
            )
        if names.count(name) > 1:
            raise ArgumentError(f"{where}: column {name!r} occurs twice; give it once")
    if need_seconds and "seconds" not in names:
        raise ArgumentError(
            f"{where}: column 'seconds' is missing; give the measured seconds of each step "
            f"(columns: {', '.join(names)})"
        )


def _step(where: str, table: Mapping[Any, Any], need_seconds: bool) -> MeasuredStep:
    """Return the step of a row, without empty cells."""
    _check_columns(where, [str(name) for name in table], need_seconds)
    settings = {str(name): _plain(value) for name, value in table.items()}
    for name in _FLAGS & settings.keys():
        if settings[name] in (0, 1):
            settings[name] = bool(settings[name])
    value = settings.pop("seconds", None)
    seconds = math.nan if value is None and not need_seconds else number(value)
    if seconds is None or not (0 < seconds < math.inf or math.isnan(seconds)):
        raise ArgumentError(
            f"{where}: seconds must be a finite number above 0, got {table['seconds']!r}"
        )
    return MeasuredStep(where, {k: v for k, v in settings.items() if v is not None}, seconds)


def _plain(value: Any) -> Any:
    """Return a value as Python's types; None for NaN, and an int for a whole float.

    A column of pandas with an empty cell has floats.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


T = TypeVar("T")
#: Values of ``recompute`` for `pipesim.lower`; others are for `Transformer.costs`.
_AS_TASKS = ("listed", *TASK_RECOMPUTE)


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A step of a transformer: its task graph, and the arguments of its costs.

    ``where`` is the place of the row, for messages. ``run`` has the settings of the graph that are
    not the default, as text: equal for equal graphs.
    """

    where: str
    graph: TaskGraph
    model: Transformer
    layers_per_stage: Split
    options: dict[str, Any]
    run: str

    @property
    def gpus_per_device(self) -> int:
        """GPUs that act as one device of the pipeline."""
        return device_size(self.options)

    @property
    def blocks(self) -> bool:
        """Whether messages between stages block their stage."""
        kinds = self.graph.kinds
        return bool((kinds.is_op(SENDS) & (kinds.stream == StreamKind.COMPUTE)).any())

    def seconds(self, gpu: GPU, network: Network | None) -> float:
        """Return the predicted seconds."""
        return predict_timeline(self.graph, self._costs(gpu, network)).makespan

    def configuration(self, gpu: GPU, network: Network | None) -> str:
        """Return model, costs and run as text: equal for steps that differ in their label alone."""
        work = self._costs(gpu, network).work
        settings = None if work is None else work.settings
        return json.dumps([self.run, settings], sort_keys=True)

    def _costs(self, gpu: GPU, network: Network | None) -> Costs:
        return self.model.costs(self.layers_per_stage, gpu=gpu, network=network, **self.options)


def predicted_seconds(
    steps: Iterable[StepPrediction], gpu: GPU, network: Callable[[int], Network | None]
) -> list[float]:
    """Return the predicted seconds of each step; errors name the row.

    ``network`` returns the network of devices of so many GPUs.
    """
    return _of_each(steps, network, lambda step, links: step.seconds(gpu, links))


def configurations(
    steps: Iterable[StepPrediction], gpu: GPU, network: Callable[[int], Network | None]
) -> Ints:
    """Return the number of the configuration of each step, from 0 on, in order of their first row.

    Arguments and errors are those of `predicted_seconds`. Steps have one configuration if they
    differ in their label and seconds alone, however their settings are written.
    """
    numbers: dict[str, int] = {}
    with warnings.catch_warnings():  # predictions give the same warnings
        warnings.simplefilter("ignore", CostsWarning)
        texts = _of_each(steps, network, lambda step, links: step.configuration(gpu, links))
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts])


def _of_each(
    steps: Iterable[StepPrediction],
    network: Callable[[int], Network | None],
    function: Callable[[StepPrediction, Network | None], T],
) -> list[T]:
    """Return a function of each step and its network; errors name the row."""
    networks: dict[int, Network | None] = {}
    results = []
    for step in steps:
        try:
            size = step.gpus_per_device
            if size not in networks:
                try:
                    networks[size] = network(size)
                except NetworkError as error:
                    raise NetworkError(
                        f"tensor_parallel x context_parallel = {size} does not suit the network: "
                        f"{error}"
                    ) from error
            results.append(function(step, networks[size]))
        except PipeError as error:
            raise type(error)(f"{step.where}: {error}") from error
    return results


def step_predictions(steps: Sequence[MeasuredStep]) -> list[StepPrediction]:
    """Return the prediction of each step. Steps that are lowered alike share their graph."""
    graphs: dict[str, TaskGraph] = {}
    predictions = []
    for step in steps:
        try:
            predictions.append(_prediction(step, graphs))
        except PipeError as error:
            raise type(error)(f"{step.where}: {error}") from error
    return predictions


def _prediction(step: MeasuredStep, graphs: dict[str, TaskGraph]) -> StepPrediction:
    """Return the prediction of a step, with a graph of ``graphs`` if it has the right one."""
    settings = {"schedule": "1f1b", "n_devices": 1, **step.settings}
    settings.pop("label", None)
    model = make_model({name: settings.pop(name) for name in MODEL if name in settings})
    # `recompute` is none, selective or full within backwards; other values make tasks of it.
    recompute = check_name("recompute", settings.get("recompute", "none"), (*RECOMPUTE, *_AS_TASKS))
    as_tasks = recompute in _AS_TASKS
    options = {
        name: settings.pop(name)
        for name in COST_OPTIONS
        if name in settings and not (as_tasks and name == "recompute")
    }
    layers = settings.pop("layers_per_stage", None)
    settings["n_microbatches"] = _n_microbatches(settings, options)
    if "framework" in options:
        settings["framework"] = options["framework"]
    key = _run_text(settings)
    if key not in graphs:
        lowering = {name: settings[name] for name in LOWERING.values() if name in settings}
        options_of_order = {
            name: value
            for name, value in settings.items()
            if name != "schedule" and name not in lowering
        }
        graphs[key] = lower(schedule(settings["schedule"], **options_of_order), **lowering)
    if layers is None:
        layers = graphs[key].n_stages
        options = {"partition": "even", **options}
    elif is_word(layers):
        source = graphs[key].options.source
        assert source is not None  # `lower` made the graph
        options = {**options, "placement": source.schedule.placement}
    return StepPrediction(step.where, graphs[key], model, layers, options, key)


def _run_text(settings: Mapping[str, Any]) -> str:
    """Return the settings of a graph that are not the default of `lower` and of the schedule."""
    name = settings["schedule"]
    build = schedule_info(name).build
    parameters = {**signature(lower).parameters, **signature(build).parameters}
    return repr(sorted(
        (key, value)
        for key, value in settings.items()
        if key not in parameters or value != parameters[key].default
    ))  # fmt: skip


def _n_microbatches(settings: dict[str, Any], options: Mapping[str, Any]) -> int:
    """Return the number of micro-batches of a replica, from the global batch if it is given."""
    if "microbatch_size" not in options:
        raise ArgumentError("microbatch_size is missing; give the sequences of a micro-batch")
    batch = settings.pop("global_batch", None)
    if ("n_microbatches" in settings) == (batch is not None):
        raise ArgumentError(
            "give either n_microbatches, those of a replica, or global_batch, the sequences of a "
            f"step of all replicas; got {'both' if batch is not None else 'neither'}"
        )
    if batch is None:
        return check_count("n_microbatches", settings["n_microbatches"])
    size = check_count("microbatch_size", options["microbatch_size"])
    replicas = check_count("n_replicas", settings.get("n_replicas", 1))
    if check_count("global_batch", batch) % (size * replicas):
        raise ArgumentError(
            f"global_batch={batch} is no multiple of {size * replicas} = microbatch_size={size} x "
            f"n_replicas={replicas}"
        )
    return int(batch) // (size * replicas)

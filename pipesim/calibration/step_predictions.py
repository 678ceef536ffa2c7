"""`StepPrediction`: seconds of a measured step, predicted for a GPU and a network."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from pipesim.calibration.least_squares import Ints
from pipesim.calibration.measured_steps import MeasuredStep
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import Split
from pipesim.errors import (
    ArgumentError,
    CostsWarning,
    NetworkError,
    PipeError,
    check_count,
    check_name,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.lowering.recomputed_microbatches import RECOMPUTE as TASK_RECOMPUTE
from pipesim.models.gpu import GPU
from pipesim.models.splits.placed_split import is_word
from pipesim.models.transformer import RECOMPUTE, Transformer
from pipesim.network.network import Network
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import options_of_schedules, schedule, schedule_info
from pipesim.simulation.simulate import predict_timeline
from pipesim.sweeps.settings import LOWERING
from pipesim.sweeps.transformer_costs import COST_OPTIONS, MODEL, device_size, make_model

T = TypeVar("T")
#: Values of ``recompute`` for `pipesim.lower`; others are for `Transformer.costs`.
_AS_TASKS = ("listed", *TASK_RECOMPUTE)
#: Schedule and number of devices of a row that does not have them.
_DEFAULTS = {"schedule": "1f1b", "n_devices": 1}


@dataclass(frozen=True, eq=False)
class StepPrediction:
    """A step of a transformer: its task graph, and the arguments of its costs.

    Attributes
    ----------
    where
        Place of the row, for messages.
    graph
        Tasks of the step.
    model
        The transformer.
    layers_per_stage, options
        Arguments of `Transformer.costs`.
    run
        Settings of the graph that are not the default, as text: equal for equal graphs.
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
        return self.graph.n_devices > 1 and not self.graph.overlap

    def seconds(self, gpu: GPU, network: Network | None) -> float:
        """Return the predicted seconds.

        Raises
        ------
        PipeError
            For settings that do not suit each other.
        """
        return predict_timeline(self.graph, self._costs(gpu, network)).makespan

    def configuration(self, gpu: GPU, network: Network | None) -> str:
        """Return model, costs and run as text: equal for steps that differ in their label alone."""
        work = self._costs(gpu, network).work
        settings = None if work is None else work.settings
        return json.dumps([self.run, settings], sort_keys=True)

    def _costs(self, gpu: GPU, network: Network | None) -> Costs:
        """Return the costs of the stages."""
        return self.model.costs(self.layers_per_stage, gpu=gpu, network=network, **self.options)


def predicted_seconds(
    steps: Iterable[StepPrediction], gpu: GPU, network: Callable[[int], Network | None]
) -> list[float]:
    """Return the predicted seconds of each step.

    Parameters
    ----------
    steps
        The steps.
    gpu
        Their GPU.
    network
        Returns the network of devices of so many GPUs.

    Raises
    ------
    PipeError
        For settings that do not suit each other, naming the row.
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
                networks[size] = _network_of(size, network)
            results.append(function(step, networks[size]))
        except PipeError as error:
            raise type(error)(f"{step.where}: {error}") from error
    return results


def _network_of(size: int, network: Callable[[int], Network | None]) -> Network | None:
    """Return the network of devices of ``size`` GPUs; an error names what makes up the size."""
    try:
        return network(size)
    except NetworkError as error:
        raise NetworkError(
            f"tensor_parallel x context_parallel = {size} does not suit the network: {error}"
        ) from error


def step_predictions(steps: Sequence[MeasuredStep]) -> list[StepPrediction]:
    """Return the prediction of each step. Steps that are lowered alike share their graph.

    Raises
    ------
    PipeError
        For settings that are missing, unknown or wrong, naming the row.
    """
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
    settings = {**_DEFAULTS, **step.settings}
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
    key = _run_text(settings)
    if key not in graphs:
        graphs[key] = _graph(settings)
    if layers is None:
        layers = graphs[key].n_stages
        options = {"partition": "even", **options}
    elif is_word(layers):
        options = {**options, "placement": _placement(graphs[key])}
    return StepPrediction(step.where, graphs[key], model, layers, options, key)


def _run_text(settings: Mapping[str, Any]) -> str:
    """Return the settings of a graph that are not the default of `lower` and of the schedule."""
    name = settings["schedule"]
    build = schedule_info(check_name("schedule", name, options_of_schedules())).build
    parameters = {**signature(lower).parameters, **signature(build).parameters}
    return repr(sorted(
        (key, value)
        for key, value in settings.items()
        if key not in parameters or value != parameters[key].default
    ))  # fmt: skip


def _placement(graph: TaskGraph) -> Placement:
    """Return the placement of the schedule of a graph."""
    source = graph.options.source
    assert source is not None  # `lower` made the graph
    return source.schedule.placement


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


def _graph(settings: Mapping[str, Any]) -> TaskGraph:
    """Return the task graph of a row: arguments of `lower`, counts, and options of a schedule."""
    lowering = {name: settings[name] for name in LOWERING.values() if name in settings}
    others = {name: value for name, value in settings.items() if name not in lowering}
    order = schedule(
        others.pop("schedule"), others.pop("n_devices"), others.pop("n_microbatches"), **others
    )
    return lower(order, **lowering)

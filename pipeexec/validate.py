"""Predict steps, run them, and compare: the proof of a simulation.

Calibration steps and measured steps take turns, so that a machine whose speed drifts drifts for
both. Each row's prediction comes from the calibration steps alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeexec.devices import DeviceLike
from pipeexec.executor import Loss, Pipeline, StepResult
from pipeexec.profile import Calibration, Profile
from pipeexec.run import Batch
from pipeexec.run_directory import RECORD, command, read_record, write_directory
from pipesim.compare import Comparison
from pipesim.costs import Costs
from pipesim.errors import ArgumentError, RunDirectoryError, check_count
from pipesim.graph import TaskGraph
from pipesim.memory import static
from pipesim.simulate import replay, simulate
from pipesim.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Row", "Validation", "load_run", "validate"]


@dataclass(frozen=True, eq=False)
class Row:
    """One graph, predicted once and measured in several steps.

    Attributes
    ----------
    predicted
        From the costs of the calibration steps.
    measured
        The step whose makespan is the median.
    makespans, replayed
        Of every step, measured, and replayed from its own durations; seconds.
    peak_memory
        Bytes that each device really held at most: parameters, gradients and optimizer state, and
        activations, counted in a step of their own.
    losses
        Of every step.
    """

    predicted: Timeline
    measured: Timeline
    makespans: tuple[float, ...]
    replayed: tuple[float, ...]
    peak_memory: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def comparison(self) -> Comparison:
        """Prediction beside the median step."""
        return Comparison(self.predicted, self.measured)

    @property
    def errors(self) -> NDArray[np.float64]:
        """Predicted over measured makespan, minus 1, of every step."""
        return np.array([self.predicted.makespan / seconds - 1.0 for seconds in self.makespans])

    @property
    def replay_errors(self) -> NDArray[np.float64]:
        """Replayed over measured makespan, minus 1, of every step."""
        return np.array([a / b - 1.0 for a, b in zip(self.replayed, self.makespans, strict=True)])


@dataclass(frozen=True, eq=False)
class Validation:
    """Rows by name, and the profile that their predictions come from (None once loaded)."""

    rows: dict[str, Row]
    costs: Costs
    profile: Profile | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a graph.

        ``predicted``, ``measured`` (median) makespan in seconds; ``error`` (median over steps),
        ``worst`` (of any step), ``replay`` (median error of the steps replayed), signed and
        relative; ``bubble_predicted``, ``bubble_measured`` (0..1); ``memory_predicted``,
        ``memory_measured`` (bytes of the fullest device).
        """
        import pandas as pd

        rows = {
            name: {
                "predicted": row.predicted.makespan,
                "measured": float(np.median(row.makespans)),
                "error": float(np.median(row.errors)),
                "worst": float(row.errors[np.abs(row.errors).argmax()]),
                "replay": float(np.median(row.replay_errors)),
                "bubble_predicted": row.predicted.bubble_fraction,
                "bubble_measured": row.measured.bubble_fraction,
                "memory_predicted": float(row.predicted.peak_memory.max()),
                "memory_measured": float(max(row.peak_memory)),
            }
            for name, row in self.rows.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("graph")

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Every pair of rows, and whether the prediction told which is faster.

        ``predicted`` and ``measured`` difference (s), ``noise`` (median absolute deviation of the
        difference over the rounds, s), ``beyond_noise``, and ``right`` (same sign).
        """
        import pandas as pd

        rows = []
        for (a, first), (b, second) in itertools.combinations(self.rows.items(), 2):
            difference = np.array(first.makespans) - np.array(second.makespans)
            measured = float(np.median(difference))
            noise = float(np.median(np.abs(difference - measured)))
            predicted = first.predicted.makespan - second.predicted.makespan
            rows.append(
                {
                    "pair": f"{a} - {b}",
                    "predicted": predicted,
                    "measured": measured,
                    "noise": noise,
                    "beyond_noise": abs(measured) > noise,
                    "right": bool(np.sign(predicted) == np.sign(measured)),
                }
            )
        columns = ["pair", "predicted", "measured", "noise", "beyond_noise", "right"]
        return pd.DataFrame(rows, columns=columns).set_index("pair")

    def figure(self, **options: Any) -> Figure:
        """Draw every row's prediction over its median step; see `pipesim.plot.overlay`."""
        from pipesim.plot import overlay

        return overlay({name: row.comparison for name, row in self.rows.items()}, **options)

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a run directory, whole or not at all.

        ``run.json``, ``costs.json``, ``table.csv``, ``overlay.png`` and ``overlay.pdf``; for each
        row a folder with ``timeline.csv`` (the median step) and ``predicted.csv``.

        Raises
        ------
        RunDirectoryError
            If it cannot be written, or something else is there.
        """
        from pipesim.plot import save

        rows = {
            name: {
                "makespans": row.makespans,
                "replayed": row.replayed,
                "peak_memory": row.peak_memory,
                "losses": row.losses,
            }
            for name, row in self.rows.items()
        }
        path = Path(path)
        with write_directory(path, {"command": command(), **(record or {}), "rows": rows}) as to:
            self.costs.save(to / "costs.json")
            self.table.to_csv(to / "table.csv")
            if self.profile is not None:
                self.profile.table.to_csv(to / "profile.csv")
                self.profile.transfers.to_csv(to / "transfers.csv", index=False)
            figure = self.figure()
            for suffix in ("png", "pdf"):
                save(figure, to / f"overlay.{suffix}")
            for name, row in self.rows.items():
                (to / _folder(name)).mkdir()
                row.measured.save(to / _folder(name) / "timeline.csv")
                row.predicted.save(to / _folder(name) / "predicted.csv")


def _folder(name: str) -> str:
    return name.replace("/", "-").replace(" ", "-")


def load_run(path: Path | str) -> Validation:
    """Read a run directory.

    Raises
    ------
    RunDirectoryError
        If a file is missing, truncated or edited.
    """
    path = Path(path)
    record = read_record(path)
    if "rows" not in record:
        raise RunDirectoryError(f"{path} holds no validation: {RECORD} lists no rows")
    costs = Costs.load(path / "costs.json")
    rows = {}
    for name, kept in record["rows"].items():
        predicted, measured = (
            Timeline.load(path / _folder(name) / file, costs=costs, name=name)
            for file in ("predicted.csv", "timeline.csv")
        )
        rows[name] = Row(predicted, measured, **{key: tuple(value) for key, value in kept.items()})
    return Validation(rows, costs)


def validate(
    stages: Sequence[nn.Module],
    graphs: Mapping[str, TaskGraph],
    devices: Sequence[DeviceLike],
    loss_fn: Loss,
    batches: Iterable[tuple[Batch, Any]],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    n_steps: int = 9,
    warm_up: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Profile, simulate, execute and compare.

    Parameters
    ----------
    stages, devices, loss_fn, optimizer
        As for `Pipeline`. The stages are trained by the measured steps.
    graphs
        By name; all with the same placement and number of micro-batches.
    batches
        Yields ``(inputs, targets)``; a new batch for every round of steps.
    n_steps, warm_up
        Measured steps of each graph, and steps before them that do not count.
    progress
        Called with a line of text now and then.

    Raises
    ------
    ArgumentError
        If there are no graphs, graphs that differ in placement or number of micro-batches, or too
        few batches.

    Warns
    -----
    AccuracyWarning
        If tasks are too short or too unsteady to be predicted well.
    """
    n_steps = check_count("n_steps", n_steps)
    warm_up = check_count("warm_up", warm_up, 0)
    if not graphs:
        raise ArgumentError("validate needs at least one graph")
    say = progress or (lambda _: None)
    first = max(graphs.values(), key=lambda graph: graph.n_replicas)  # has the paths of all
    for name, graph in graphs.items():
        if graph.n_microbatches != first.n_microbatches:
            raise ArgumentError(
                f"graph {name!r} has {graph.n_microbatches} micro-batches, the first "
                f"{first.n_microbatches}: costs hold for one size of micro-batch; validate graphs "
                "of as many micro-batches"
            )
    source = _taken(batches, n_steps + 1)
    with Pipeline(stages, first, devices, loss_fn, optimizer) as pipeline:
        pipelines = [pipeline.with_graph(graph) for graph in graphs.values()]
        runs: list[list[StepResult]] = [[] for _ in pipelines]
        inputs, targets = next(source)
        calibration = Calibration(pipeline, inputs, targets, graphs.values())
        say(f"warming up: {warm_up} rounds")
        for _ in range(warm_up):
            calibration.warm_up(1)
            for each in pipelines:
                each.step(inputs, targets)
        for number in range(n_steps):
            inputs, targets = next(source)
            calibration.step()
            for each, results in zip(pipelines, runs, strict=True):
                results.append(each.step(inputs, targets))
            say(f"round {number + 1} of {n_steps}: loss {float(runs[-1][-1].loss):.4f}")
        profile = calibration.result()
        held = [each.device_bytes(inputs, targets) for each in pipelines]
    rows = {
        name: _row(name, graph, results, profile.costs, stage_bytes)
        for (name, graph), results, stage_bytes in zip(graphs.items(), runs, held, strict=True)
    }
    return Validation(rows, profile.costs, profile)


def _taken(batches: Iterable[tuple[Batch, Any]], n_batches: int) -> Iterator[tuple[Batch, Any]]:
    """Yield ``n_batches`` batches, or raise."""
    source = iter(batches)
    for number in range(n_batches):
        try:
            yield next(source)
        except StopIteration:
            raise ArgumentError(
                f"got {number} batches, but {n_batches} are needed: one to warm up with, and one "
                "a step"
            ) from None


def _row(
    name: str,
    graph: TaskGraph,
    results: Sequence[StepResult],
    costs: Costs,
    held_bytes: Sequence[int],
) -> Row:
    """Predict a graph and put its steps beside the prediction."""
    makespans = [result.timeline.makespan for result in results]
    middle = int(np.argsort(makespans)[len(makespans) // 2])
    return Row(
        predicted=simulate(graph, costs).with_name(name),
        measured=results[middle].timeline.with_name(name),
        makespans=tuple(makespans),
        replayed=tuple(replay(result.timeline).makespan for result in results),
        peak_memory=tuple((static(graph, costs) + np.array(held_bytes)).tolist()),
        losses=tuple(float(result.loss) for result in results),
    )

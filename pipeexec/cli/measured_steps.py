"""Measure training steps of one graph, in one process or in several, and keep their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.run_directory import command, write_directory
from pipeexec.stages.batches import Batch
from pipeexec.training.options import TrainingOptions
from pipeexec.training.train import run_loop
from pipeexec.training.training_run import TrainingRun
from pipesim.analysis.compare import Comparison
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_count
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Steps that were run."""

    steps: tuple[StepResult, ...]  # results of the whole pipeline, gathered from all processes
    predicted: Timeline | None  # simulated with the costs; None without costs
    # Offset and drift of each process's clock from rank 0's; see
    # `pipeexec.distributed.process_clock.Alignment`.
    clocks: tuple[dict[str, float], ...]
    notes: tuple[str, ...] = ()  # on measured times, such as imposed links

    @property
    def makespans(self) -> list[float]:
        """Makespan of each step, seconds."""
        return [step.timeline.makespan for step in self.steps]

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [float(step.loss) for step in self.steps]

    @property
    def measured(self) -> Timeline:
        """Timeline of the step with the median makespan."""
        middle = int(np.argsort(self.makespans)[len(self.steps) // 2])
        return self.steps[middle].timeline

    @property
    def figure(self) -> str:
        """Name of the file with the figure."""
        return "timeline.png" if self.predicted is None else "overlay.png"

    @property
    def errors(self) -> list[float]:
        """Predicted over measured makespan, minus 1, of every step; empty without a prediction."""
        if self.predicted is None:
            return []
        return [self.predicted.makespan / seconds - 1.0 for seconds in self.makespans]

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a run directory, whole or not at all.

        ``run.json``, ``timeline.csv`` (the median step), ``timeline.png`` and ``.pdf``; with a
        prediction ``predicted.csv``, ``costs.json``, ``overlay.png`` and ``.pdf``.
        """
        from pipesim.plot.paper_figure import figure_with_axes, ignore_small_boxes, save
        from pipesim.plot.timelines import overlay, rows
        from pipesim.utils.packages import Figure

        path = check_path("path", path, "write")
        measured = {
            "makespans": self.makespans,
            "losses": self.losses,
            "clocks": self.clocks,
            "notes": self.notes,
        }
        with write_directory(path, {"command": command(), **(record or {}), **measured}) as to:
            self.measured.save(to / "timeline.csv")
            height = rows(self.measured.graph, transfers=False)
            # Not a figure of pyplot, which would have to be closed.
            figure, ax = figure_with_axes(Figure, None, height)
            self.measured.plot(ax=ax)
            with ignore_small_boxes():
                save(figure, to / "timeline.png", to / "timeline.pdf")
            if self.predicted is None:
                return
            self.predicted.save(to / "predicted.csv")
            if self.predicted.costs is not None:
                self.predicted.costs.save(to / "costs.json")
            figure = overlay({self.measured.name: Comparison(self.predicted, self.measured)})
            with ignore_small_boxes():
                save(figure, to / "overlay.png", to / "overlay.pdf")


def measure_steps(
    pipeline: Pipeline,
    batches: Iterable[tuple[Batch, Any]],
    *,
    n_steps: int = 21,
    warm_up: int = 2,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
) -> MeasuredSteps:
    """Run training steps; every process of the pipeline calls this, and gets all results.

    ``warm_up`` steps come before the ``n_steps`` that are kept. ``batches`` has a new batch for
    every step, as for ``pipeline.step``. ``progress`` is called with a line of text after each.
    """
    n_steps, warm_up = check_count("n_steps", n_steps), check_count("warm_up", warm_up, 0)
    with guard_processes(pipeline.processes):
        check_results([pipeline.graph], n_steps=n_steps)
    steps: list[StepResult] = []

    def keep(run: TrainingRun, result: StepResult) -> None:
        if run.n_steps > warm_up:
            steps.append(result)
            if progress is not None:
                progress(
                    f"step {len(steps)} of {n_steps}: loss {float(result.loss):.4f}, "
                    f"{result.timeline.makespan * 1e3:.1f} ms"
                )

    total = warm_up + n_steps
    options = TrainingOptions(
        n_steps=total, costs=costs, timelines=range(1, total + 1), on_step=keep, progress=False
    )
    run = run_loop(pipeline, batches, options, takes_signals=False)
    if run.n_steps < total:
        raise ArgumentError(f"got {run.n_steps} batches, but {total} are needed: one a step")
    return MeasuredSteps(tuple(steps), run.predicted, pipeline.clocks(), pipeline.notes)

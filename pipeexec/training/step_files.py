"""Files of the timelines of chosen steps, and of their prediction."""

from __future__ import annotations

from pathlib import Path

from pipeexec.training.training_directory import PREDICTED, step_folder
from pipesim.analysis.compare import Comparison
from pipesim.timeline.timeline import Timeline


def save_prediction(predicted: Timeline, directory: Path) -> None:
    """Write ``predicted.csv``."""
    predicted.save(directory / PREDICTED)


def save_step(measured: Timeline, predicted: Timeline | None, directory: Path, step: int) -> None:
    """Write ``timeline.csv`` of a step, and its picture, over the prediction if there is one."""
    from pipesim.plot.comparisons import overlay
    from pipesim.plot.lanes import rows
    from pipesim.plot.paper_figure import TWO_COLUMNS, figure_with_axes, save
    from pipesim.utils.packages import Figure

    folder = step_folder(directory, step)
    measured.save(folder / "timeline.csv")
    if predicted is not None:
        save(overlay({measured.name: Comparison(predicted, measured)}), folder / "overlay.png")
        return
    # Not a figure of pyplot, which would have to be closed.
    figure, ax = figure_with_axes(Figure, TWO_COLUMNS, rows(measured.graph, transfers=False))
    measured.plot(ax=ax)
    save(figure, folder / "timeline.png")

"""`TrainingRun`: what a training has done so far, its log, and its tables and pictures."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from pipesim.errors import ArgumentError, RunDirectoryError
from pipesim.ops import Op
from pipesim.plot.figure_style import Inches
from pipesim.plot.paper_figure import LegendPlace
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked
from pipesim.utils.files import check_path, read_text, write_errors, write_text
from pipesim.utils.texts import csv_rows, format_time, parse_float, significant

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pipesim.costs.costs import Costs


#: Files of a training directory.
LOG, EVALUATIONS = "log.csv", "evaluation.csv"


def has_log(directory: Path) -> bool:
    """Return whether a directory is that of a training."""
    with suppress(OSError):  # such as a name that is too long
        return (directory / LOG).is_file()
    return False


class TrainingRun:
    """A training; `pipeexec.train` makes it, and `load` reads one from its directory.

    Parameters
    ----------
    directory
        Directory of the files; None without one.
    writes
        Whether to write rows to files in ``directory``.

    Attributes
    ----------
    n_steps, epoch
        Number of steps so far, those of earlier calls included, and number of the epoch, from 0.
    first_step
        Number of steps before this call: 0, or the step of the checkpoint that it continued.
    costs, predicted
        Costs of the prediction, and the step simulated with them; None without.
    timelines
        Measured timelines of the chosen steps of this call, by number of the step.
    checkpoint
        The latest checkpoint; None if there is none.
    end
        Why the training ended: ``"steps"`` or ``"batches"`` (all of them), ``"stopped"`` by
        `stop`, or ``"interrupted"`` by Ctrl-C or SIGTERM; empty while it runs.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
    ...     run = px.train(pipeline, [(x, x)] * 3)
    >>> run.table.columns[:3].tolist(), len(run.losses)
    (['step', 'epoch', 'loss'], 3)
    """

    def __init__(self, directory: Path | None = None, *, writes: bool = False) -> None:
        self.directory = directory
        folder = directory if writes else None
        self.log = RunLog(None if folder is None else folder / LOG)
        self.evaluation_log = RunLog(None if folder is None else folder / EVALUATIONS)
        self.n_steps = self.epoch = self.first_step = 0
        self.costs: Costs | None = None
        self.predicted: Timeline | None = None
        self.timelines: dict[int, Timeline] = {}
        self.checkpoint: Path | None = None
        self.end = ""
        self.stop_requested = False

    @classmethod
    def load(cls, directory: Path | str) -> TrainingRun:
        """Read the tables of a training directory, also while the training runs.

        Parameters
        ----------
        directory
            The directory that `pipeexec.train` was given.

        Returns
        -------
        TrainingRun
            Tables, number of steps and epoch, as far as they are written.

        Raises
        ------
        RunDirectoryError
            If there is no log, or a file was edited.
        """
        path = check_path("directory", directory)
        if not has_log(path):
            raise RunDirectoryError(f"{path} is no directory of a training: it has no {LOG}")
        run = cls(path)
        for log, name in ((run.log, LOG), (run.evaluation_log, EVALUATIONS)):
            log.columns = read_log(path / name)
        for name in ("step", "epoch"):
            if name not in run.log.columns:
                raise RunDirectoryError(f"cannot read {path / LOG}: it has no column {name!r}")
        if len(run.log):
            run.n_steps, run.epoch = (int(run.log.columns[x][-1]) for x in ("step", "epoch"))
        return run

    @property
    def table(self) -> pd.DataFrame:
        """A row a step: loss, metrics, learning rate, rates, makespan and bubble (s)."""
        return self.log.table

    @property
    def evaluations(self) -> pd.DataFrame:
        """A row an evaluation: step, epoch, mean loss, mean metrics, samples, seconds."""
        return self.evaluation_log.table

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return list(self.log.columns.get("loss", ()))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended the training."""
        return self.end == "interrupted"

    def stop(self) -> None:
        """End the training after the step that runs, or has just run; for hooks.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     run = px.train(pipeline, [(x, x)] * 9, on_step=lambda run, result: run.stop())
        >>> run.n_steps, run.end
        (1, 'stopped')
        """
        self.stop_requested = True

    @checked
    def plot(
        self,
        *,
        ax: Axes | None = None,
        legend: bool | LegendPlace = True,
        height: Inches | None = None,
        title: str | None = None,
    ) -> Axes:
        """Draw the losses of steps and evaluations.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.
        legend, height
            As for `pipesim.plot.timeline`.
        title
            Title of the axes; none by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes: loss of each step, its moving average, and losses of evaluations.
        """
        from pipesim.plot.figure_style import current_style
        from pipesim.plot.palette import INK
        from pipesim.plot.paper_figure import add_legend, axes_or_new, label, set_title

        log, evaluations = self.table, self.evaluations
        if not len(log):
            raise ArgumentError("the training has no steps yet; train at least one, then plot")
        ax = axes_or_new(ax, height=height, usual_height=2.6)
        palette = current_style().palette
        steps, losses = log["step"].to_numpy(), log["loss"].to_numpy(dtype=float)
        (pale,) = ax.plot(steps, losses, "-", color=palette[Op.F], linewidth=0.6, marker="",
                          zorder=2)  # fmt: skip
        pale.set_gid("training:loss")
        handles, names = [pale], ["loss of a step"]
        window = len(losses) // 50
        if window > 1:
            mean = log["loss"].rolling(window, min_periods=1).mean().to_numpy(dtype=float)
            (line,) = ax.plot(steps, mean, "-", color=INK, linewidth=1.0, marker="", zorder=3)
            line.set_gid("training:mean")
            handles.append(line)
            names.append(f"mean of {window} steps")
        if len(evaluations):
            (points,) = ax.plot(
                evaluations["step"], evaluations["loss"], "-", color=palette[Op.SEND_B],
                linewidth=0.8, marker="o", markersize=3.0, zorder=4,
            )  # fmt: skip
            points.set_gid("training:evaluation")
            handles.append(points)
            names.append("evaluation")
        ax.set_xlim(0, max(1, int(steps.max())) * 1.01)
        finite = losses[np.isfinite(losses)]
        if len(finite):
            low, high = float(finite.min()), float(finite.max())
            margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
            ax.set_ylim(low - margin, high + margin)
        label(ax, "Step", "Loss")
        above = add_legend(ax, handles, names, legend)
        if title:
            set_title(ax, title, height=above)
        return ax

    def summary(self) -> str:
        """Return the steps, the first and last loss, and the makespan with its error, as text.

        Returns
        -------
        str
            A few lines of text.

        Examples
        --------
        >>> import torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     run = px.train(pipeline, [(x, x)] * 3)
        >>> print(run.summary())
        3 steps: loss ... to ...
        ... samples/s (median)
        step: makespan ..., bubble ...% (medians)
        """
        log, evaluations, first_step = self.table, self.evaluations, self.first_step
        if not len(log):
            return "no steps"
        lines = [
            f"{len(log)} steps ({first_step} of them before): loss {log['loss'].iloc[0]:.4f} to "
            f"{log['loss'].iloc[-1]:.4f}"
            if first_step
            else f"{len(log)} steps: loss {log['loss'].iloc[0]:.4f} to {log['loss'].iloc[-1]:.4f}"
        ]
        if len(evaluations):
            lines.append(
                f"evaluation: loss {evaluations['loss'].iloc[-1]:.4f} after step "
                f"{evaluations['step'].iloc[-1]}, lowest {evaluations['loss'].min():.4f}"
            )
        for name in ("tokens_per_s", "samples_per_s"):
            if name in log:
                unit = name.removesuffix("_per_s")
                lines.append(f"{significant(float(log[name].median()))} {unit}/s (median)")
                break
        makespan, bubble = float(log["makespan"].median()), float(log["bubble"].median())
        lines.append(f"step: makespan {format_time(makespan)}, bubble {bubble:.1%} (medians)")
        if "predicted_makespan" in log and np.isfinite(log["predicted_makespan"].iloc[-1]):
            predicted = float(log["predicted_makespan"].iloc[-1])
            lines.append(
                f"predicted: makespan {format_time(predicted)} ({predicted / makespan - 1:+.1%}), "
                f"bubble {float(log['predicted_bubble'].iloc[-1]):.1%}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        where = "" if self.directory is None else f", in {self.directory}"
        return f"<TrainingRun: {self.n_steps} steps{loss}{where}>"


#: Columns of whole numbers.
_WHOLE = ("step", "epoch", "skipped", "samples", "batches")


class RunLog:
    """A table of numbers that grows by a row a step, in memory and as a CSV file.

    A row is written to the file as soon as it is added. A kill at any moment loses at most the last
    line, which `read_log` leaves out. Without a path, the log is in memory alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.columns: dict[str, array[float]] = {}  # NaN where a row has no value
        self._file: IO[str] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row, whose columns may be new."""
        n = len(self)
        new = [name for name in row if name not in self.columns]
        self.columns |= {name: array("d", [math.nan]) * n for name in new}
        for name, column in self.columns.items():
            column.append(row.get(name, math.nan))
        if self.path is None:
            return
        if new:
            self.rewrite()
            return
        with write_errors(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
            self._file.write(self._line(n))
            self._file.flush()

    def replace(self, columns: Mapping[str, Sequence[float]], n_steps: int) -> None:
        """Take the rows of another log up to a step, in place of all rows."""
        n = sum(step <= n_steps for step in columns.get("step", ()))
        self.columns = {name: array("d", values[:n]) for name, values in columns.items()}
        if self.path is not None and self.columns:
            self.rewrite()

    def rewrite(self) -> None:
        """Write the file with all rows, whole or not at all."""
        assert self.path is not None
        self.close()
        lines = [",".join(self.columns) + "\n", *map(self._line, range(len(self)))]
        write_text(self.path, "".join(lines))

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        if self.path is not None and self.path.exists():
            with write_errors(self.path), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _line(self, k: int) -> str:
        cells = (
            repr(int(column[k])) if name in _WHOLE and math.isfinite(column[k]) else repr(column[k])
            for name, column in self.columns.items()
        )
        return ",".join(cells) + "\n"

    @property
    def table(self) -> pd.DataFrame:
        """The rows, as a DataFrame."""
        from pipesim.utils.packages import pandas as pd

        if not self.columns:
            return pd.DataFrame(columns=["step", "epoch", "loss"], dtype=float)
        values = {name: np.array(column) for name, column in self.columns.items()}
        whole = {
            name: "int64" for name in _WHOLE if name in values and np.isfinite(values[name]).all()
        }
        return pd.DataFrame(values).astype(whole)


def read_log(path: Path) -> dict[str, array[float]]:
    """Return the columns of a log; empty if there is no file. The last line may be torn."""
    if not path.exists():
        return {}
    text = read_text(path, "the log", RunDirectoryError)
    whole = text[: text.rfind("\n") + 1]
    try:
        rows = list(csv_rows(whole))
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    names = rows[0][1] if rows else []
    columns = {name: array("d") for name in names}
    if len(columns) < len(names):
        raise _unreadable(path, "a column is there twice")
    for line, cells in rows[1:]:
        values = [parse_float(cell) for cell in cells]
        if len(values) != len(names) or None in values:
            raise _unreadable(path, f"line {line} is no row of {len(names)} numbers")
        for name, value in zip(names, values, strict=True):
            columns[name].append(math.nan if value is None else value)
    return columns


def _unreadable(path: Path, reason: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot read {path}: {reason}; it was edited: restore it, or train in another directory"
    )

"""`TrainingRun`: what a training has done so far, and its tables and pictures."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeexec.training.run_log import RunLog, read_log
from pipeexec.training.summary import summary
from pipesim.errors import RunDirectoryError
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path

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
    directory
        Directory of the files; None without one.
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

    See Also
    --------
    pipeexec.train : Train a pipeline.
    pipeexec.load_checkpoint : Load the state of a training.

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

        Examples
        --------
        >>> import tempfile, torch
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...         _ = px.train(pipeline, [(x, x)] * 3, directory=folder)
        ...     len(px.TrainingRun.load(folder).table)
        3
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

    def plot(self, *, ax: Axes | None = None, title: str | None = None) -> Axes:
        """Draw the losses of steps and evaluations.

        Parameters
        ----------
        ax
            Axes to draw into; new ones, two columns wide, by default.
        title
            Title of the axes; none by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes: loss of each step, its moving average, and losses of evaluations.

        Examples
        --------
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> from torch.nn.functional import mse_loss
        >>> import pipeexec as px, pipesim as ps
        >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
        >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
        >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
        ...     run = px.train(pipeline, [(x, x)] * 3)
        >>> run.plot(ax=Figure().subplots()).get_ylabel()
        'Loss'
        """
        from pipeexec.training.loss_curve import loss_curve

        return loss_curve(self.table, self.evaluations, ax=ax, title=title)

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
        return summary(self.table, self.evaluations, first_step=self.first_step)

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        where = "" if self.directory is None else f", in {self.directory}"
        return f"<TrainingRun: {self.n_steps} steps{loss}{where}>"

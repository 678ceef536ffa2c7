"""`Recorder`: everything that a training keeps: log, evaluations, checkpoints, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.results.step_result import StepResult
from pipeexec.profiling.measure import profile
from pipeexec.training.batch_source import BatchSource
from pipeexec.training.checkpoint import load_training, save_training
from pipeexec.training.evaluate import evaluate
from pipeexec.training.first_batch import check_first_batch
from pipeexec.training.log_row import batch_counts, log_row, predicted_columns
from pipeexec.training.options import MEASURE, TrainingOptions
from pipeexec.training.progress_bar import ProgressBar
from pipeexec.training.random_states import preserved_random_states
from pipeexec.training.run_log import read_log
from pipeexec.training.step_files import save_prediction, save_step
from pipeexec.training.training_directory import (
    COSTS,
    checkpoint_path,
    latest,
    open_directory,
)
from pipeexec.training.training_run import EVALUATIONS, LOG, TrainingRun
from pipesim.costs.costs import Costs
from pipesim.errors import ExecutionError, PipeError, RunDirectoryError
from pipesim.simulation.simulate import simulate

#: In several processes, steps after which their clocks are aligned again.
_ALIGN_EVERY = 100


class Recorder:
    """Keeps what a training does, in its `TrainingRun` and in its directory, and calls the hooks.

    As a context manager, it locks the directory, and continues from the last checkpoint in it.

    Attributes
    ----------
    run
        The training so far.
    bar
        The progress bar.
    hooks_called
        Whether a hook was called since `before_batch`; alike in all processes.
    """

    bar: ProgressBar

    def __init__(self, pipeline: Pipeline, source: BatchSource, options: TrainingOptions) -> None:
        self._pipeline, self._source, self._options = pipeline, source, options
        self._directory, self._costs = options.path, options.costs
        self._identity, self._timelines = options.identity(), options.chosen_steps()
        self._is_writer = pipeline.processes is None or pipeline.processes.rank == 0
        self._began, self.hooks_called = 0.0, False
        self._counts: dict[str, float] = {}
        self._predicted: dict[str, float] = {}
        self._evaluated = self._saved = -1  # steps
        self._stack = ExitStack()
        self.run = TrainingRun(self._directory, writes=self._is_writer)

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            self._stack = stack
            if self._directory is not None:
                self._open(self._directory)
            run = self.run
            if isinstance(self._costs, Costs):
                self._predict(self._costs)
            show = self._options.progress if self._is_writer else False
            self.bar = ProgressBar(self._options.n_steps, run.n_steps, show)
            stack.callback(self.bar.close)
            stack.callback(run.log.close)
            stack.callback(run.evaluation_log.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _open(self, directory: Path) -> None:
        """Lock the directory, and continue from its last checkpoint, alike in all processes."""
        processes, run = self._pipeline.processes, self.run
        state: dict[str, Any] = {}
        if self._is_writer:
            self._stack.enter_context(
                open_directory(directory, self._identity, resume=self._options.resume)
            )
            checkpoint = latest(directory)
            state = {
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "logs": [read_log(directory / name) for name in (LOG, EVALUATIONS)],
            }
        if processes is not None:
            packed = [{k: list(v) for k, v in log.items()} for log in state.get("logs", ())]
            state = processes.share({**state, "logs": packed})[0]
        if state["checkpoint"] is not None:
            run.checkpoint = Path(state["checkpoint"])
            run.n_steps = load_training(
                self._pipeline, self._source, self._options.stateful(self._pipeline), run.checkpoint
            )
            run.epoch = self._source.epoch
        self._continue_logs(state["logs"])
        run.first_step = self._saved = run.n_steps
        self._evaluated = int(max(run.evaluation_log.columns.get("step", ()), default=-1))

    def _continue_logs(self, columns: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Take the rows of the steps up to the checkpoint.

        Raises
        ------
        RunDirectoryError
            If the log lacks steps of the checkpoint.
        """
        run = self.run
        for log, rows in zip((run.log, run.evaluation_log), columns, strict=True):
            log.replace(rows, run.n_steps)
        if len(run.log) != run.n_steps:
            raise RunDirectoryError(
                f"{self._directory} has {len(run.log)} rows in {LOG}, and its checkpoint is of "
                f"step {run.n_steps}: a row a step is missing; restore {LOG}, or train in another "
                "directory"
            )

    def _predict(self, costs: Costs) -> None:
        """Simulate a step with costs, and save both."""
        run = self.run
        run.costs, run.predicted = costs, simulate(self._pipeline.graph, costs)
        self._predicted = predicted_columns(run.predicted)
        if self._directory is not None and self._is_writer:
            costs.save(self._directory / COSTS)
            save_prediction(run.predicted, self._directory)

    def before_batch(self) -> None:
        """Begin to count the seconds of the next step, with those of loading its batch."""
        self._began, self.hooks_called = perf_counter(), False

    def before_step(self, inputs: Any, targets: Any) -> None:
        """Count the samples of the next step; before the first one, check stages, measure costs."""
        pipeline, step = self._pipeline, self.run.n_steps + 1
        if self._options.check and self.run.n_steps == self.run.first_step:
            seconds = perf_counter()
            check_first_batch(pipeline, inputs)
            self._began += perf_counter() - seconds
        if self._costs == MEASURE and self.run.costs is None:
            seconds = perf_counter()
            with preserved_random_states():
                self._predict(profile(pipeline, inputs, targets))
            self._began += perf_counter() - seconds
        self._counts = batch_counts(pipeline, inputs, targets)
        if pipeline.processes is not None and (step in self._timelines or not step % _ALIGN_EVERY):
            pipeline.align()

    def add_step(self, result: StepResult) -> None:
        """Add a step to the log; keep its timeline if it is chosen."""
        run, seconds = self.run, perf_counter() - self._began
        run.n_steps, run.epoch = run.n_steps + 1, self._source.epoch
        row = log_row(
            self._pipeline, result, self._counts, step=run.n_steps, epoch=run.epoch,
            seconds=seconds, predicted=self._predicted,
        )  # fmt: skip
        run.log.append(row)
        self.bar.update(row)
        if run.n_steps in self._timelines:
            run.timelines[run.n_steps] = result.timeline
            if self._directory is not None and self._is_writer:
                save_step(result.timeline, run.predicted, self._directory, run.n_steps)
        self._call("on_step", result)

    def evaluate(self) -> None:
        """Evaluate, and add the row to the table of evaluations."""
        evaluation = self._options.evaluation
        assert evaluation is not None
        run, began = self.run, perf_counter()
        row: dict[str, float] = {"step": run.n_steps, "epoch": run.epoch}
        row |= evaluate(self._pipeline, evaluation)
        row["seconds"] = perf_counter() - began
        run.evaluation_log.append(row)
        self._evaluated = run.n_steps
        self.bar.write_line(f"step {run.n_steps}: evaluation loss {row['loss']:.4f}")
        self._call("on_evaluation", row)

    def save_checkpoint(self) -> None:
        """Save a checkpoint, then delete those that are too old."""
        assert self._directory is not None
        run = self.run
        for log in (run.log, run.evaluation_log):
            log.sync()  # a log that lacks steps of the checkpoint could not be continued
        path = checkpoint_path(self._directory, run.n_steps)
        save_training(
            run.n_steps, self._pipeline, self._source, self._options.stateful(self._pipeline), path,
            self._options.keep,
        )  # fmt: skip
        run.checkpoint, self._saved = path, run.n_steps
        self._call("on_checkpoint", path)

    def _call(self, name: str, argument: Any) -> None:
        """Call a hook, if there is one.

        Raises
        ------
        ExecutionError
            If it raises another error than one of this package.
        """
        hook = getattr(self._options, name)
        if hook is None:
            return
        self.hooks_called = True
        try:
            hook(self.run, argument)
        except PipeError:
            raise
        except Exception as error:  # of the user's code
            raise ExecutionError(
                f"{name} raised {type(error).__name__} after step {self.run.n_steps}: "
                f"{error!s:.300}"
            ) from error

    @property
    def must_evaluate(self) -> bool:
        """Whether the end of the training lacks an evaluation."""
        return self._options.evaluation is not None and self._evaluated != self.run.n_steps

    @property
    def must_save(self) -> bool:
        """Whether the end of the training lacks a checkpoint."""
        return self._directory is not None and self._saved != self.run.n_steps

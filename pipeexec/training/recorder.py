"""`Recorder`: everything that a training keeps: log, evaluations, checkpoints, timelines."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.nesting import with_tensors
from pipeexec.profiling.calibration import profile
from pipeexec.splitting.split_facts import split_facts
from pipeexec.splitting.split_stage import SplitStage
from pipeexec.stages.batches import split_batches
from pipeexec.stages.microbatches import Microbatches
from pipeexec.training.batch_source import Batches, BatchSource, preserved_random_states
from pipeexec.training.options import TrainingOptions
from pipeexec.training.training_directory import (
    COSTS,
    PREDICTED,
    checkpoint_path,
    latest,
    load_training,
    open_directory,
    save_training,
    step_folder,
)
from pipeexec.training.training_run import EVALUATIONS, LOG, TrainingRun, read_log
from pipesim.analysis.compare import Comparison
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, ExecutionError, PipeError, RunDirectoryError
from pipesim.simulation.simulate import simulate
from pipesim.timeline.timeline import Timeline
from pipesim.utils.progress import in_notebook, tqdm
from pipesim.utils.texts import significant

#: In several processes, steps after which their clocks are aligned again.
_ALIGN_EVERY = 100


class Recorder:
    """Keeps what a training does, in its `TrainingRun` and in its directory, and calls the hooks.

    As a context manager, it locks the directory, and continues from the last checkpoint in it.
    ``hooks_called`` is whether a hook was called since `before_batch`, alike in all processes.
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
        for log, rows in zip((run.log, run.evaluation_log), state["logs"], strict=True):
            log.replace(rows, run.n_steps)
        if len(run.log) != run.n_steps:
            raise RunDirectoryError(
                f"{self._directory} has {len(run.log)} rows in {LOG}, and its checkpoint is of "
                f"step {run.n_steps}: a row a step is missing; restore {LOG}, or train in another "
                "directory"
            )
        run.first_step = self._saved = run.n_steps
        self._evaluated = int(max(run.evaluation_log.columns.get("step", ()), default=-1))

    def _predict(self, costs: Costs) -> None:
        """Simulate a step with costs, and save both."""
        run = self.run
        run.costs, run.predicted = costs, simulate(self._pipeline.graph, costs)
        self._predicted = {  # columns of the log, the same in all rows
            "predicted_makespan": run.predicted.makespan,
            "predicted_bubble": run.predicted.bubble_fraction,
        }
        if self._directory is not None and self._is_writer:
            costs.save(self._directory / COSTS)
            run.predicted.save(self._directory / PREDICTED)

    def before_batch(self) -> None:
        """Begin to count the seconds of the next step, with those of loading its batch."""
        self._began, self.hooks_called = perf_counter(), False

    def before_step(self, inputs: Any, targets: Any) -> None:
        """Count the samples of the next step; before the first one, check stages, measure costs."""
        pipeline, step = self._pipeline, self.run.n_steps + 1
        now = perf_counter()
        if self._options.check and self.run.n_steps == self.run.first_step:
            check_first_batch(pipeline, inputs)
        if self._costs == "measure" and self.run.costs is None:
            with preserved_random_states():
                self._predict(profile(pipeline, inputs, targets))
        self._began += perf_counter() - now
        self._counts = batch_counts(pipeline, inputs, targets)
        if pipeline.processes is not None and (step in self._timelines or not step % _ALIGN_EVERY):
            pipeline.align()

    def add_step(self, result: StepResult) -> None:
        """Add a step to the log; keep its timeline if it is chosen."""
        run, seconds = self.run, perf_counter() - self._began
        run.n_steps, run.epoch = run.n_steps + 1, self._source.epoch
        row = {"step": run.n_steps, "epoch": run.epoch, "loss": float(result.loss)}
        optimizers = (x for x in self._pipeline.optimizers if x is not None)  # of this process
        rates = (float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers)
        row |= {**result.metrics, "lr": next(rates, math.nan), "skipped": int(result.skipped)}
        if result.grad_norm is not None:
            row["grad_norm"] = float(result.grad_norm)
        row["seconds"] = seconds
        row |= {f"{name}_per_s": count / seconds for name, count in self._counts.items()}
        timeline = result.timeline
        row |= {"makespan": timeline.makespan, "bubble": timeline.bubble_fraction}
        row |= self._predicted
        run.log.append(row)
        self.bar.update(row)
        if run.n_steps in self._timelines:
            run.timelines[run.n_steps] = timeline
            if self._directory is not None and self._is_writer:
                save_step(timeline, run.predicted, self._directory, run.n_steps)
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
        """Call a hook, if there is one."""
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


# Samples of a step, and evaluations.


def batch_counts(pipeline: Pipeline, inputs: Any, targets: Any) -> dict[str, float]:
    """Return the numbers of samples and tokens of a step, of all processes.

    Samples are the length of the first tensor of the batch. Tokens are the elements of the first
    tensor of the inputs, if it has whole numbers and two dimensions: the ids of a language model.
    Each process has the samples of its replicas. Those of `Microbatches` are added up.
    """
    batch = inputs if isinstance(inputs, Microbatches) else targets
    if isinstance(batch, Microbatches):
        rows = [batch_counts(pipeline, x, None) for x in batch]
        return {name: sum(row.get(name, 0) for row in rows) for name in rows[0]}
    leaves = [x for x in pytree.tree_leaves((inputs, targets)) if isinstance(x, Tensor) and x.dim()]
    if not leaves:
        return {}
    first, shares = leaves[0], pipeline.shares
    times = shares.n_shares / max(1, len(shares.local))
    counts = {"samples": len(first) * times}
    if first.dim() == 2 and first.dtype in (torch.int64, torch.int32):
        counts["tokens"] = first.numel() * times
    return counts


def evaluate(pipeline: Pipeline, batches: Batches) -> dict[str, float]:
    """Return means over batches, weighted by their samples, and the numbers of both.

    With ``loss_reduction="sum"``, they are means over batches of equal weight.

    Random states stay as they are, so that a training does not depend on its evaluations.
    """
    sums: dict[str, float] = {}
    n_samples = total = n_batches = 0.0
    with preserved_random_states(batches):
        source = BatchSource(batches, 1, "evaluation")
        while (batch := source.next()) is not None:
            inputs, targets = batch
            result = pipeline.gather(pipeline.evaluate(inputs, targets))
            counts = batch_counts(pipeline, inputs, targets)
            # Losses that are sums over samples are those of batches, as in the log.
            weight = 1.0 if pipeline.loss_reduction == "sum" else counts.get("samples", 1.0)
            values: dict[str, Any] = {"loss": result.loss, **result.metrics}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + weight * float(value)
            total, n_batches = total + weight, n_batches + 1
            n_samples += counts.get("samples", 0.0)
    means = {name: value / total for name, value in sums.items()}
    return {**means, "samples": n_samples, "batches": n_batches}


def check_first_batch(pipeline: Pipeline, inputs: Any) -> None:
    """Compare outputs, gradients and buffers of stages and model, for the first micro-batch.

    Nothing is compared without `pipeexec.split`, with stages in other processes, on GPUs or
    compiled, and where two forwards of the model differ.
    """
    graph, shares = pipeline.graph, pipeline.shares
    stages = [x for x in pipeline.modules[: graph.n_stages] if isinstance(x, SplitStage)]
    if pipeline.processes is not None or not len(stages) == graph.n_stages > 1:
        return
    facts = split_facts(stages)
    if facts is None:
        return
    devices = {p.device.type for stage in stages for p in stage.parameters()}
    if devices != {"cpu"} or any(stage.compile_options is not None for stage in stages):
        return
    if isinstance(inputs, Microbatches):
        batch = inputs[0]
    else:
        parts, _, _ = split_batches(
            inputs, None, shares.n_microbatches, shares.n_shares, pipeline.batch_dims
        )
        batch = with_tensors(inputs, parts[0])
    with suppress(ArgumentError):  # they cannot be compared
        facts.check(stages, batch, training=True)


def save_step(measured: Timeline, predicted: Timeline | None, directory: Path, step: int) -> None:
    """Write ``timeline.csv`` of a step, and its picture, over the prediction if there is one."""
    from pipesim.plot.paper_figure import figure_with_axes, ignore_small_boxes, save
    from pipesim.plot.timelines import overlay, rows
    from pipesim.utils.packages import Figure

    folder = step_folder(directory, step)
    measured.save(folder / "timeline.csv")
    if predicted is not None:
        with ignore_small_boxes():
            save(overlay({measured.name: Comparison(predicted, measured)}), folder / "overlay.png")
        return
    # Not a figure of pyplot, which would have to be closed.
    figure, ax = figure_with_axes(Figure, None, rows(measured.graph, transfers=False))
    measured.plot(ax=ax)
    with ignore_small_boxes():
        save(figure, folder / "timeline.png")


class ProgressBar:
    """A line that is drawn again: loss, rates and bubble of a training.

    ``total`` is the number of steps, None if unknown, of which ``initial`` ones ran before.

    It is shown by default if standard error is a terminal, or in a notebook.
    """

    def __init__(self, total: int | None, initial: int, show: bool | None) -> None:
        hidden = show is False or (show is None and not (sys.stderr.isatty() or in_notebook()))
        self._bar = tqdm(
            total=total, initial=initial, disable=hidden, unit="step", desc="train",
            dynamic_ncols=True,
        )  # fmt: skip

    def update(self, row: Mapping[str, float]) -> None:
        """Show a row of the log, after its step."""
        if not self._bar.disable:
            self._bar.set_postfix_str(_bar_text(row), refresh=False)
        self._bar.update()

    def write_line(self, line: str) -> None:
        """Write a line above the bar, if it is shown."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _bar_text(row: Mapping[str, float]) -> str:
    """Return the values that matter while one waits."""
    parts = [f"loss {row['loss']:.4f}"]
    for name, label in (("lr", "lr"), ("grad_norm", "norm")):
        if name in row and not math.isnan(row[name]):
            parts.append(f"{label} {row[name]:.3g}")
    unit = "tokens" if "tokens_per_s" in row else "samples"
    if f"{unit}_per_s" in row:
        parts.append(f"{significant(row[f'{unit}_per_s'])} {unit}/s")
    bubble = f"bubble {row['bubble']:.0%}"
    if "predicted_bubble" in row:
        bubble += f" (predicted {row['predicted_bubble']:.0%})"
    return ", ".join([*parts, bubble])

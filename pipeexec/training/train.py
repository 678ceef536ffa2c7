"""`train`: train a pipeline for many steps; its loop and its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.training.batch_source import Batches, BatchSource
from pipeexec.training.options import CheckpointHook, EvaluationHook, StepHook, TrainingOptions
from pipeexec.training.recorder import Recorder
from pipeexec.training.training_run import TrainingRun
from pipesim.costs.costs import Costs
from pipesim.errors import check_type
from pipesim.utils.checks import checked_names


@checked_names
def train(
    pipeline: Pipeline,
    batches: Batches,
    *,
    n_steps: int | None = None,
    epochs: int | None = None,
    scheduler: Any = None,
    evaluation: Batches | None = None,
    evaluate_every: int | None = None,
    directory: Path | str | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = True,
    objects: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
    costs: Costs | Literal["measure"] | None = None,
    timelines: Iterable[int] = (),
    on_step: StepHook | None = None,
    on_evaluation: EvaluationHook | None = None,
    on_checkpoint: CheckpointHook | None = None,
    progress: bool | None = None,
    check: bool = True,
) -> TrainingRun:
    """Train for many steps: log, evaluate, save checkpoints, and continue where a run ended.

    In several processes, all of them call this with the same arguments. Each gives the batches of
    its replicas, as to `Pipeline.step`, and saves its part of a checkpoint. Rank 0 writes the other
    files and shows the progress.

    Parameters
    ----------
    pipeline
        The pipeline; it stays open.
    batches
        A DataLoader or another iterable, which is iterated once an epoch, or a function from the
        number of an epoch, from 0, to an iterable. An iterator has one epoch. Each batch is a tuple
        or list ``(inputs, targets)``, or a mapping with ``"labels"``, which are the targets.
    n_steps, epochs
        Steps and epochs after which the training ends, with those of the runs that it continues. By
        default one epoch, or as many as ``n_steps`` needs.
    scheduler
        Learning-rate scheduler, such as `LRSchedulers`: ``step()`` is called after each step that
        a gradient scaler has not skipped.
    evaluation
        Batches for evaluations, as ``batches``, but with an end.
    evaluate_every
        Steps between evaluations. There is always one at the end, unless it is interrupted.
    directory
        Directory of all files; see the notes. None for none.
    checkpoint_every, keep
        Steps between checkpoints, and how many of the last are kept. There is always one at the
        end.
    resume
        Whether to continue from the last checkpoint in ``directory``. Otherwise the training begins
        anew, and the files of an earlier one there are deleted.
    objects
        Further objects of checkpoints, by name, beside model, optimizers, ``scheduler`` and the
        pipeline's gradient scaler. They have ``state_dict`` and ``load_state_dict``, such as
        ``{"average": averaged_model}``. Their states are equal in all processes.
    record
        Values that identify this training, such as its configuration, which JSON can hold. They may
        not change when it is continued.
    costs
        Costs for a prediction, or ``"measure"``: they are measured before the first step of each
        call, in nine steps that leave no trace.
    timelines
        Numbers of steps, from 1, whose measured timelines are kept and saved.
    on_step, on_evaluation, on_checkpoint
        Called as ``on_step(run, result)``, ``on_evaluation(run, row)`` and
        ``on_checkpoint(run, path)``, in all processes. Their results are ignored. To end the
        training after this step, they call ``run.stop()``, in one process at least. If one raises,
        the training ends with an `ExecutionError`, and without a checkpoint.
    progress
        Whether to show a progress bar; by default in terminals and notebooks.
    check
        Whether to compare stages of `pipeexec.split` with their model for the first micro-batch, in
        training mode: outputs, gradients of the sum of their squares, and buffers. It takes two
        forwards and backwards. Stages in other processes, on GPUs or compiled are not compared.

    Returns
    -------
    TrainingRun
        Tables of all steps and evaluations, and why the training ended.

    Raises
    ------
    RunDirectoryError
        If ``directory`` is in use, of another training, or damaged.
    StageError, StallError, PeerError, ExecutionError
        As ``pipeline.step``. The files of the steps before stay.

    Warns
    -----
    ResumeWarning
        If the batches of a continued training are not those of the run before.

    See Also
    --------
    pipeexec.save_checkpoint : Save a checkpoint in a loop of your own.

    Notes
    -----
    Ctrl-C and SIGTERM end the training after the step that runs, with a checkpoint; ``run.end`` is
    then ``"interrupted"``. A second one, two seconds later or more, ends it at once.

    A continued training has the same losses to the last bit as one without an interruption, if

    - its batches are the same. The states of the random-number generators of torch, `random`,
      NumPy and the DataLoader at the beginning of the epoch are restored, and the batches that were
      taken from it are skipped. A loader with ``state_dict`` continues from its own state. The last
      batch is compared with the one before;
    - it runs the same stages and schedule, on the same number of threads. Another number of stages
      may continue it, but rounds otherwise.

    Files: ``log.csv`` has a row a step, ``evaluation.csv`` a row an evaluation, ``training.json``
    the ``record``, command and versions. ``checkpoints/`` has the last checkpoints, ``steps/`` the
    chosen timelines. With costs, there are ``costs.json`` and ``predicted.csv``.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4))
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss, torch.optim.SGD) as pipeline:
    ...     run = px.train(pipeline, [(x, x)] * 3, epochs=2)
    >>> run.n_steps, run.end, run.losses[-1] < run.losses[0]
    (6, 'batches', True)
    """
    check_type("pipeline", pipeline, Pipeline)
    with guard_processes(pipeline.processes):
        options = TrainingOptions(
            n_steps, epochs, scheduler, evaluation, evaluate_every, directory, checkpoint_every,
            keep, resume, objects, record, costs, timelines, on_step, on_evaluation, on_checkpoint,
            progress, check,
        )  # fmt: skip
        return run_loop(pipeline, batches, options)


def run_loop(
    pipeline: Pipeline, batches: Batches, options: TrainingOptions, *, takes_signals: bool = True
) -> TrainingRun:
    """Train as `pipeexec.train` does; ``takes_signals`` ends it gently after Ctrl-C and SIGTERM."""
    has_end = options.n_steps is not None or options.epochs is not None
    source = BatchSource(batches, options.epochs if has_end else 1)
    with (
        Recorder(pipeline, source, options) as recorder,
        Interrupts(recorder.bar.write_line, enabled=takes_signals) as interrupts,
    ):
        run = recorder.run
        ending = Ending(pipeline, run, interrupts)
        while not run.end:
            if options.n_steps is not None and run.n_steps >= options.n_steps:
                run.end = "steps"
                break
            recorder.before_batch()
            batch = source.next()
            if batch is None:
                run.end = "batches"
                break
            recorder.before_step(*batch)
            result = ending.gather(pipeline.step(*batch))
            if options.scheduler is not None and not result.skipped:
                options.scheduler.step()
            recorder.add_step(result)
            if options.evaluate_every and run.n_steps % options.evaluate_every == 0:
                recorder.evaluate()
            if options.checkpoint_every and run.n_steps % options.checkpoint_every == 0:
                recorder.save_checkpoint()
            run.end = ending.reason(hooks_called=recorder.hooks_called)
        if run.end != "interrupted" and recorder.must_evaluate:
            recorder.evaluate()
        if recorder.must_save:
            recorder.save_checkpoint()
    return run


class Ending:
    """Decides after each step whether the training ends, alike in all processes.

    A signal may reach one process alone. Its vote travels with the measurements of the step, which
    all processes exchange anyway. Requests of hooks need another message, so they are exchanged
    only after steps with hooks.
    """

    def __init__(self, pipeline: Pipeline, run: TrainingRun, interrupts: Interrupts) -> None:
        self._pipeline, self._run, self._interrupts = pipeline, run, interrupts
        self._interrupted = False

    def gather(self, result: StepResult) -> StepResult:
        """Return the result of the whole pipeline, as `Pipeline.gather`, and count votes."""
        vote = int(self._interrupts.signal is not None)
        if result.part is None:
            self._interrupted = bool(vote)
            return result
        gathered = self._pipeline.gather(replace(result, part=replace(result.part, votes=vote)))
        assert gathered.part is not None
        self._interrupted = gathered.part.votes > 0
        return gathered

    def reason(self, *, hooks_called: bool) -> str:
        """Return why the training ends after this step; empty if it goes on.

        ``hooks_called`` is the same in all processes.
        """
        stop = self._run.stop_requested
        if hooks_called:
            stop = self._pipeline.total([float(stop)])[0] > 0
        if self._pipeline.processes is None:  # of signals during hooks, and evaluations
            self._interrupted |= self._interrupts.signal is not None
        return "interrupted" if self._interrupted else "stopped" if stop else ""


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds in which further signals are copies of the first: torchrun passes Ctrl-C on to processes
#: that have it from the terminal already.
_COPY_SECONDS = 2.0


class Interrupts:
    """Takes SIGINT (Ctrl-C) and SIGTERM in a block.

    The first signal is only noted. A later one, after two seconds, has its usual effect: Ctrl-C
    raises `KeyboardInterrupt`, SIGTERM ends the process. In another thread than the main one,
    signals keep their usual effect. ``notice`` is called with a line of text after the first one.
    """

    def __init__(self, notice: Callable[[str], None], *, enabled: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._notice, self._enabled, self._time = notice, enabled, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if self._enabled and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A process in the background of a shell ignores Ctrl-C, and goes on to.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._time = signal.Signals(number), time.monotonic()
            self._notice(
                f"{self.signal.name}: the training ends after this step; a second one ends it now"
            )
        elif time.monotonic() > self._time + _COPY_SECONDS:
            self.__exit__()
            signal.raise_signal(number)

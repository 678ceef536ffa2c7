"""`run_loop`: the loop over the steps of a training."""

from __future__ import annotations

from pipeexec.executor.pipeline import Pipeline
from pipeexec.training.batch_source import Batches, BatchSource
from pipeexec.training.ending import Ending
from pipeexec.training.interrupts import Interrupts
from pipeexec.training.options import TrainingOptions
from pipeexec.training.recorder import Recorder
from pipeexec.training.training_run import TrainingRun


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
        ending = Ending(pipeline, recorder.run, interrupts)
        _run_steps(pipeline, source, options, recorder, ending)
    return recorder.run


def _run_steps(
    pipeline: Pipeline,
    source: BatchSource,
    options: TrainingOptions,
    recorder: Recorder,
    ending: Ending,
) -> None:
    """Run the steps; evaluate and save after every so many of them, and at the end."""
    run = recorder.run
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

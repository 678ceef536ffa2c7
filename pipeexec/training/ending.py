"""`Ending`: all processes of a training end it after the same step."""

from __future__ import annotations

from dataclasses import replace

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.results.step_result import StepResult
from pipeexec.training.interrupts import Interrupts
from pipeexec.training.training_run import TrainingRun


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

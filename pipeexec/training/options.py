"""`TrainingOptions`: the checked arguments of `pipeexec.train`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.training.batch_source import Batches, BatchSource
from pipeexec.training.read_config import TrainingSection
from pipeexec.training.training_run import TrainingRun
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, ArgumentTypeError, check_count, check_list
from pipesim.utils.checks import Count, checked
from pipesim.utils.files import check_path

StepHook = Callable[[TrainingRun, StepResult], object]
EvaluationHook = Callable[[TrainingRun, Mapping[str, float]], object]
CheckpointHook = Callable[[TrainingRun, Path], object]


#: Names of objects in a checkpoint.
_SCHEDULER, _SCALER = "scheduler", "grad_scaler"
_RESERVED = ("processes", "pipeline", "path", "keep", _SCHEDULER, _SCALER)


@checked
@dataclass(frozen=True)
class TrainingOptions:
    """Arguments of `pipeexec.train`, except the pipeline and its batches; checked here."""

    n_steps: Count | None = None
    epochs: Count | None = None
    scheduler: Any = None
    evaluation: Batches | None = None
    evaluate_every: Count | None = None
    directory: Path | str | None = None
    checkpoint_every: Count | None = None
    keep: Count = TrainingSection.keep
    resume: bool = True
    objects: Annotated[Mapping[str, Any], "{'average': averaged_model}"] | None = None
    record: Mapping[str, Any] | None = None
    costs: Costs | Literal["measure"] | None = None
    timelines: Iterable[int] = ()
    on_step: Annotated[StepHook, "on_step(run, result)"] | None = None
    on_evaluation: Annotated[EvaluationHook, "on_evaluation(run, row)"] | None = None
    on_checkpoint: Annotated[CheckpointHook, "on_checkpoint(run, path)"] | None = None
    progress: bool | None = None
    check: bool = True

    def __post_init__(self) -> None:
        self._check_objects()
        for name, other, what in (
            ("evaluate_every", "evaluation", "batches to evaluate on"),
            ("checkpoint_every", "directory", "a folder to save them in"),
            ("record", "directory", "a folder to write it in"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ArgumentError(f"{name} needs {other}=, {what}")
        if isinstance(self.evaluation, Iterator):
            raise ArgumentError(
                f"evaluation is an iterator ({type(self.evaluation).__name__}), which has batches "
                "for one evaluation; give a DataLoader, a list, or a function that returns them"
            )
        if self.evaluation is not None:
            BatchSource(self.evaluation, 1, "evaluation")

    def _check_objects(self) -> None:
        """Raise unless the scheduler and all objects can be saved and loaded."""
        methods = ("state_dict", "load_state_dict")
        _check_methods("scheduler", self.scheduler, "step", *methods)
        for name, value in (self.objects or {}).items():
            if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
                raise ArgumentError(
                    f"objects: {name!r:.60} is no name for an object in a checkpoint; give a word "
                    f"other than {', '.join(_RESERVED)}"
                )
            if value is None:
                raise ArgumentError(f"objects: {name!r} is None; leave it out")
            _check_methods(f"objects: {name!r}", value, *methods)

    def stateful(self, pipeline: Pipeline) -> dict[str, Any]:
        """Return the scheduler, the gradient scaler and all objects of checkpoints, by name."""
        own = {_SCHEDULER: self.scheduler, _SCALER: pipeline.grad_scaler}
        return {k: x for k, x in own.items() if x is not None} | dict(self.objects or {})

    @property
    def path(self) -> Path | None:
        """The directory, as an absolute path."""
        if self.directory is None:
            return None
        return Path(os.path.abspath(check_path("directory", self.directory, "write")))

    def identity(self) -> dict[str, Any]:
        """Return the record, as JSON holds it."""
        try:
            values = json.loads(json.dumps({} if self.record is None else dict(self.record)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"record must be a mapping of names to values that JSON can hold: {error}"
            ) from error
        return dict(values)

    def chosen_steps(self) -> Collection[int]:
        """Return the numbers of the steps whose timelines are kept."""
        if isinstance(self.timelines, range):
            return self.timelines
        steps = check_list("timelines", self.timelines, "numbers of steps, such as [1, 100]")
        return frozenset(check_count("a step of timelines", step) for step in steps)


def _check_methods(name: str, value: Any, *methods: str) -> None:
    """Raise `ArgumentTypeError` unless a value is None or has methods."""
    if isinstance(value, type):
        raise ArgumentTypeError(
            f"{name} is the class {value.__name__}; give an object of it, such as "
            "pipeexec.LRSchedulers(pipeline, factory)"
        )
    missing = [x for x in methods if not callable(getattr(value, x, None))]
    if value is not None and missing:
        raise ArgumentTypeError(
            f"{name} has no {missing[0]}(), got {value!r:.60} ({type(value).__name__}); give an "
            "object with this method, such as pipeexec.LRSchedulers(pipeline, factory)"
        )

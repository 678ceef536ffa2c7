"""Run the repeats of a validation, and compare their predictions with their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipeexec.profiling.profile import Profile
from pipeexec.run_options import RunOptions
from pipeexec.stages.batches import Batch
from pipeexec.validation.accuracy import MeasuredStep, Repeat, Row, op_errors, parts_of_steps
from pipeexec.validation.steppable import StepCalibration, Steppable
from pipesim.analysis.replay import replay
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError
from pipesim.simulation.simulate import predict_timeline

Batches = Iterator[tuple[Batch, Any]]


def take_batches(batches: Iterable[tuple[Batch, Any]], options: RunOptions) -> Batches:
    """Return the batches ``(inputs, targets)`` of all rounds; it raises if there are fewer."""
    if not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches must yield (inputs, targets), got {batches!r:.60} "
            f"({type(batches).__name__}); give a generator or a list of batches"
        )
    return _first_batches(iter(batches), options.repeat * (options.n_steps + 1))


def _first_batches(source: Batches, n_batches: int) -> Batches:
    for number in range(n_batches):
        try:
            yield next(source)
        except StopIteration:
            raise ArgumentError(
                f"got {number} batches, but {n_batches} are needed: one to warm up with, and one "
                "a step"
            ) from None


class MeasuredRepeat(NamedTuple):
    """One repeat: its costs and profile, the measured steps of each subject, and the last batch."""

    costs: Costs
    profile: Profile | None
    results: list[list[MeasuredStep]]
    batch: tuple[Batch, Any]


def run_repeats(
    subjects: Sequence[Steppable],
    make_calibration: Callable[[tuple[Batch, Any]], StepCalibration],
    batches: Batches,
    options: RunOptions,
) -> list[MeasuredRepeat]:
    """Run all repeats; without given costs, calibration steps alternate with measured steps.

    ``make_calibration`` returns a new calibration, given the first batch of a repeat.
    """
    n = options.repeat
    return [
        _run_repeat(
            subjects,
            make_calibration,
            batches,
            options,
            f"repeat {number} of {n}, " if n > 1 else "",
        )
        for number in range(1, n + 1)
    ]


def _run_repeat(
    subjects: Sequence[Steppable],
    make_calibration: Callable[[tuple[Batch, Any]], StepCalibration],
    batches: Batches,
    options: RunOptions,
    prefix: str,
) -> MeasuredRepeat:
    """Run the warm-up rounds and the measured rounds of one repeat; lines begin with a prefix."""

    def report(line: str) -> None:
        if options.progress is not None:
            options.progress(prefix + line)

    batch = next(batches)
    calibration = make_calibration(batch) if options.costs is None else None
    report(f"warming up: {options.warm_up} rounds")
    for _ in range(options.warm_up):
        if calibration is not None:
            calibration.warm_up()
        for subject in subjects:
            subject.step(*batch)
    results: list[list[MeasuredStep]] = [[] for _ in subjects]
    for turn in range(options.n_steps):
        batch = next(batches)
        if calibration is not None:
            calibration.calibrate(*batch)
        for subject, steps in zip(subjects, results, strict=True):
            steps.append(subject.measure(*batch))
        report(f"round {turn + 1} of {options.n_steps}: loss {float(results[-1][-1].loss):.4f}")
    profile: Profile | None = None
    costs = options.costs
    if calibration is not None:
        costs, profile = calibration.result(*batch)
    assert costs is not None
    return MeasuredRepeat(costs, profile, results, batch)


def measure_memory(
    subjects: Sequence[Steppable], repeats: Sequence[MeasuredRepeat], measured_bytes: Costs
) -> list[tuple[float, ...]]:
    """Return the peak memory of each device (bytes), for each subject.

    ``measured_bytes`` are costs with the bytes of the stages.
    """
    return [
        tuple(
            subject.held_bytes(
                measured_bytes, *repeats[-1].batch, _median_step(repeats, index).timeline
            ).tolist()
        )
        for index, subject in enumerate(subjects)
    ]


def make_rows(
    names: Iterable[str],
    repeats: Sequence[MeasuredRepeat],
    peak_memory: Sequence[tuple[float, ...]],
) -> dict[str, Row]:
    """Return the row of each subject; simulates and replays, and needs no devices."""
    return {
        name: _make_row(name, index, repeats, peak)
        for index, (name, peak) in enumerate(zip(names, peak_memory, strict=True))
    }


def _median_step(repeats: Sequence[MeasuredRepeat], index: int) -> MeasuredStep:
    """Return the step of a subject with the median makespan."""
    results = [result for repeat in repeats for result in repeat.results[index]]
    return sorted(results, key=lambda result: result.timeline.makespan)[len(results) // 2]


def _make_row(
    name: str, index: int, measured: Sequence[MeasuredRepeat], peak_memory: tuple[float, ...]
) -> Row:
    graph = measured[-1].results[index][-1].timeline.graph
    repeats = [Repeat(predict_timeline(graph, x.costs), x.results[index]) for x in measured]
    results = [result for repeat in repeats for result in repeat.results]
    predictions = tuple(repeat.predicted.makespan for repeat in repeats)
    return Row(
        predicted=repeats[-1].predicted.with_name(name),
        measured=_median_step(measured, index).timeline.with_name(name),
        makespans=tuple(result.timeline.makespan for result in results),
        replayed=tuple(replay(result.timeline).makespan for result in results),
        peak_memory=peak_memory,
        losses=tuple(float(result.loss) for result in results),
        predictions=predictions if len(predictions) > 1 else (),
        host_seconds=tuple(filter(None, (result.host_seconds for result in results))),
        parts=parts_of_steps(repeats),
        ops=op_errors(repeats),
    )

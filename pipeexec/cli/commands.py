"""The commands ``train``, ``validate``, ``run``, ``profile`` and ``show``.

Each takes parsed arguments. Modules that load torch are imported when a command runs, behind
checks of its files, so that ``--help`` and errors are quick. Where several processes run the same
command, one of them prints.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.cli.arguments import workload
from pipesim.errors import ArgumentError

if TYPE_CHECKING:
    from pipeexec.cli.arguments import Workload
    from pipeexec.distributed.processes import Processes
    from pipeexec.executor.pipeline import Pipeline
    from pipeexec.training.training_run import TrainingRun
    from pipesim.costs.costs import Costs
    from pipesim.graph.graph import TaskGraph
    from pipesim.timeline.timeline import Timeline


# Lines to the user.


def is_printer() -> bool:
    """Return whether this process prints: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def print_error(text: str, kind: str = "error: ") -> None:
    """Print a line to stderr, if this process prints."""
    if is_printer():
        print_error_here(text, kind)


def print_error_here(text: str, kind: str = "error: ") -> None:
    """Print a line to stderr, whichever process this is."""
    print(f"pipeexec: {kind}{text}", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a line; in place of `warnings.showwarning`."""
    print_error(str(message), kind="warning: ")


def print_progress(line: str) -> None:
    """Print an indented line to stderr, if this process prints."""
    if is_printer():
        print(f"  {line}", file=sys.stderr, flush=True)


def print_result(text: str) -> None:
    """Print text to stdout, if this process prints."""
    if is_printer():
        print(text, flush=True)


# Commands.

#: Takes parsed arguments, and the processes of torchrun if any; returns the exit status.
Command = Callable[..., int]


def save_partial_timeline(arguments: argparse.Namespace, timeline: Timeline, text: str) -> Path:
    """Save the tasks that ran before an error; return the directory.

    The directory has the name of the run directory, with a suffix.
    """
    from pipeexec.run_directory import command, write_directory
    from pipeexec.run_lock import PARTIAL

    path: Path = arguments.results / f"{arguments.name}{PARTIAL}"
    with write_directory(path, {"command": command(), "error": text}) as folder:
        timeline.save(folder / "timeline.csv")
    return path


def _with_run_lock(command: Command) -> Command:
    """Return the command, run while its run directory is locked.

    Before it starts, the name and the directory are checked. Only the process that writes the
    directory locks it.
    """

    def locked(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
        from pipeexec.run_directory import check_writable
        from pipeexec.run_lock import check_run_name, run_lock

        path: Path = arguments.results / check_run_name(arguments.name)
        if not is_printer():
            return command(arguments, processes)
        check_writable(path)
        with run_lock(path):
            return command(arguments, processes)

    return locked


def _run_path(arguments: argparse.Namespace) -> Path:
    """Return the run directory."""
    path: Path = arguments.results / arguments.name
    return path


def _pipeline(
    arguments: argparse.Namespace, run: Workload, graph: TaskGraph, processes: Processes | None
) -> Pipeline:
    """Return the pipeline of a workload, with one of its graphs."""
    from pipeexec.executor.pipeline import Pipeline

    return Pipeline(
        run.stages,
        graph,
        run.devices,
        run.loss,
        run.optimizer,
        timeout=arguments.timeout,
        processes=processes,
        cuda_graph=arguments.cuda_graph,
    )


def _run(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    path, costs = _run_path(arguments), _costs(arguments.costs)
    from pipeexec.cli.measured_steps import measure_steps
    from pipeexec.cli.report import steps_report

    run = workload(arguments, processes)
    if len(run.graphs) > 1:
        raise ArgumentError(
            "run takes one schedule, one recompute mode and one --grad-sync, got "
            f"{', '.join(run.graphs)}; validate compares several"
        )
    (graph,) = run.graphs.values()
    with _pipeline(arguments, run, graph, processes) as pipeline:
        steps = measure_steps(
            pipeline,
            run.batches,
            n_steps=arguments.steps,
            warm_up=arguments.warm_up,
            costs=costs,
            progress=print_progress,
        )
    if is_printer():
        steps.save(path, record=run.record)
    print_result(steps_report(steps))
    print_result(f"\nwrote {path}: the figure is {path / steps.figure}")
    return 0


def _train(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    from pipeexec.training.read_config import read_config

    config = read_config(arguments.config)
    from pipeexec.training.train_config import train_config  # which loads torch

    directory = Path(config.training.directory)
    arguments.results, arguments.name = directory.parent, directory.name  # for partial timelines
    run = train_config(
        config,
        processes,
        n_steps=arguments.steps,
        resume=not arguments.fresh,
        progress=False if arguments.no_progress else None,
        on_evaluation=None if sys.stderr.isatty() else _print_evaluation,
        timeout=arguments.timeout,
    )
    print_result(run.summary())
    if run.interrupted:
        print_progress(f"interrupted after step {run.n_steps}: the same command continues")
        return 130
    return 0


def _print_evaluation(run: TrainingRun, row: Mapping[str, float]) -> None:
    """Print a line in place of a progress bar, which only terminals show."""
    print_progress(
        f"step {run.n_steps}: loss {run.losses[-1]:.4f}, evaluation loss {row['loss']:.4f}"
    )


def _validate(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    path, costs = _run_path(arguments), _costs(arguments.costs)
    from pipeexec.cli.report import report
    from pipeexec.validation.validate import validate

    run = workload(arguments, processes)
    validation = validate(
        run.stages,
        run.graphs,
        run.devices,
        run.loss,
        run.batches,
        run.optimizer,
        n_steps=arguments.steps,
        warm_up=arguments.warm_up,
        repeat=arguments.repeat,
        costs=costs,
        progress=print_progress,
        timeout=arguments.timeout,
        processes=processes,
        cuda_graph=arguments.cuda_graph,
    )
    source = None if costs is None else str(arguments.costs)
    record = {**run.record, "repeat": arguments.repeat, "costs": source}
    if is_printer():
        validation.save(path, record=record)
    print_result(report(validation, details=arguments.details))
    print_result(f"\nwrote {path}: the figure is {path / 'overlay.png'}")
    return 0


def _costs(path: Path | None) -> Costs | None:
    """Load costs from a file or from a run directory; None without a path."""
    from pipesim.costs.costs import Costs

    if path is None:
        return None
    return Costs.load(path / "costs.json" if os.path.isdir(path) else path)


def _profile(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    from pipeexec.cli.report import profile_report
    from pipeexec.profiling.calibration import measure

    path = _run_path(arguments)
    run = workload(arguments, processes)
    graphs = list(run.graphs.values())
    widest = max(graphs, key=lambda graph: graph.n_replicas)
    with _pipeline(arguments, run, widest, processes) as pipeline:
        print_progress(f"measuring: {arguments.warm_up} steps to warm up, then {arguments.steps}")
        result = measure(
            pipeline,
            *next(run.batches),
            n_steps=arguments.steps,
            warm_up=arguments.warm_up,
            graphs=graphs,
        )
    if is_printer():
        result.save(path, record=run.record)
    print_result(profile_report(result))
    figure = f": the figure is {path / 'transfers.png'}" if len(result.transfers) else ""
    print_result(f"\nwrote {path}{figure}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the tables of a run directory, or the summary of a training."""
    from pipeexec.run_directory import read_record
    from pipeexec.training.training_run import TrainingRun, has_log

    folder = arguments.directory
    if has_log(folder):
        print(TrainingRun.load(folder).summary())
        return 0
    record = read_record(folder)
    from pipeexec.cli.report import profile_report, report
    from pipeexec.profiling.profile import TABLE, Profile
    from pipeexec.validation.result import load_run

    if "rows" not in record and TABLE in record["files"]:
        print(profile_report(Profile.load(folder)))
    else:
        print(report(load_run(folder), details=arguments.details))
    return 0


#: Commands that torchrun can start too.
COMMANDS: dict[str, Command] = {
    "train": _train,
    "run": _with_run_lock(_run),
    "validate": _with_run_lock(_validate),
    "profile": _with_run_lock(_profile),
}

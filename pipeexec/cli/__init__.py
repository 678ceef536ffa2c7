"""The command line: ``pipeexec validate``, ``run``, ``profile`` and ``show``.

Under torchrun every process runs the same command; the first one speaks and writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeexec.cli.workload import add_workload, integer, workload
from pipesim.errors import ArgumentError, PipeError, PipeWarning

if TYPE_CHECKING:
    from pipeexec.cli.workload import Workload
    from pipeexec.distributed.processes import Processes
    from pipeexec.executor.pipeline import Pipeline
    from pipesim.costs.costs import Costs
    from pipesim.graph.graph import TaskGraph
    from pipesim.timeline.timeline import Timeline

__all__ = ["main"]

_EPILOG = """examples:
  pipeexec validate                                  GPipe and 1F1B, two stages on two cores
  pipeexec validate --model convnet --recompute never,always,except_last
  pipeexec validate --schedules zb_h1,zb_2p --recompute never
  pipeexec validate --stages 4 --devices cuda:0,cuda:1,cuda:2,cuda:3 --batch 64
  pipeexec validate --repeat 5                       with a confidence interval of the error
  pipeexec profile --name costs                      measure costs, and nothing else
  pipeexec validate --costs results/costs/costs.json predict from them
  torchrun --nproc-per-node 2 -m pipeexec run        two processes, gloo; NCCL with --devices cuda
  torchrun --nproc-per-node 4 -m pipeexec validate --replicas 2 --grad-sync every,last,bucketed
  pipeexec run --devices cuda:0 --slices 4           one GPU as four devices
  pipeexec show results/demo                         the tables of a run directory
"""


class _Parser(argparse.ArgumentParser):
    """Raises on wrong arguments, so that every mistake ends the same way."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipeexec",
        description="Run pipeline schedules on real devices, beside their prediction.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("validate", help="profile, simulate, execute, compare, plot")
    add_workload(run, steps=21, what="measured steps of each row", name="validate")
    run.add_argument("--repeat", type=integer, default=1, help="calibrate and measure so often, to "
                     "say how sure the error is (default: 1)")  # fmt: skip
    run.add_argument("--costs", type=Path, help="predict from this costs.json, or the run "
                     "directory that has it, without calibration")  # fmt: skip
    steps = commands.add_parser("run", help="run training steps of one schedule, and measure them")
    add_workload(
        steps, steps=21, what="measured steps", name="run", schedules=["1f1b"], recompute=["never"]
    )
    steps.add_argument("--costs", type=Path, help="predict the steps from this costs.json, or the "
                       "run directory that has it")  # fmt: skip
    measure = commands.add_parser("profile", help="measure costs of stages and messages, and plot")
    add_workload(measure, steps=7, what="calibration steps", name="profile")
    show = commands.add_parser("show", help="print the tables of a run directory")
    show.add_argument("directory", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PipeWarning)
        warnings.showwarning = _show_warning
        try:
            arguments = _parser().parse_args(argv)
            command = _COMMANDS.get(arguments.command)
            if command is None:
                return _show(arguments)
            return _together(arguments, command) if _is_one_of_several() else command(arguments)
        except PipeError as error:
            _complain(str(error).splitlines()[0])
            return 2
        except KeyboardInterrupt:
            _complain("interrupted", kind="")
            return 130


def _is_one_of_several() -> bool:
    """Return whether torchrun started this process, and others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def _together(arguments: argparse.Namespace, command: _Command) -> int:
    """Run a command in one of several processes, of which one speaks."""
    # What torch has to say of lost connections is said by us.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pipeexec.cli.launch import run_together

    return run_together(
        partial(command, arguments), _complain_of_any, partial(_leave, arguments), arguments.timeout
    )


def _leave(arguments: argparse.Namespace, timeline: Timeline, text: str) -> Path:
    """Write what was measured before an error beside where the results would have been."""
    from pipeexec.run_directory import command, write_directory
    from pipeexec.run_lock import PARTIAL

    path: Path = arguments.results / f"{arguments.name}{PARTIAL}"
    with write_directory(path, {"command": command(), "error": text}) as folder:
        timeline.save(folder / "timeline.csv")
    return path


def _speaks() -> bool:
    """Return whether this process says what all would."""
    return os.environ.get("RANK", "0") == "0"


def _complain(text: str, kind: str = "error: ") -> None:
    if _speaks():
        _complain_of_any(text, kind)


def _complain_of_any(text: str, kind: str = "error: ") -> None:
    print(f"pipeexec: {kind}{text}", file=sys.stderr, flush=True)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _complain(str(message), kind="warning: ")


def _tell(line: str) -> None:
    if _speaks():
        print(f"  {line}", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    if _speaks():
        print(text, flush=True)


def _alone(command: _Command) -> _Command:
    """Return a command that begins once its run directory can be written, and is its own.

    One process writes it.
    """

    def locked(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
        from pipeexec.run_directory import check_writable
        from pipeexec.run_lock import check_run_name, run_lock

        path: Path = arguments.results / check_run_name(arguments.name)
        if not _speaks():
            return command(arguments, processes)
        check_writable(path)
        with run_lock(path):
            return command(arguments, processes)

    return locked


def _path(arguments: argparse.Namespace) -> Path:
    """Return the run directory."""
    path: Path = arguments.results / arguments.name
    return path


def _pipeline(
    arguments: argparse.Namespace, asked: Workload, graph: TaskGraph, processes: Processes | None
) -> Pipeline:
    """Return the pipeline that was asked for, with a graph of its."""
    from pipeexec.executor.pipeline import Pipeline

    return Pipeline(
        asked.stages,
        graph,
        asked.devices,
        asked.loss,
        asked.optimizer,
        timeout=arguments.timeout,
        processes=processes,
        cuda_graph=arguments.cuda_graph,
    )


def _run(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    from pipeexec.cli.report import training_report
    from pipeexec.cli.train import train

    path, costs = _path(arguments), _costs(arguments.costs)
    asked = workload(arguments, processes)
    if len(asked.graphs) > 1:
        raise ArgumentError(
            "run takes one schedule, one recompute mode and one --grad-sync, got "
            f"{', '.join(asked.graphs)}; validate compares several"
        )
    (graph,) = asked.graphs.values()
    with _pipeline(arguments, asked, graph, processes) as pipeline:
        training = train(
            pipeline,
            asked.batches,
            n_steps=arguments.steps,
            warm_up=arguments.warm_up,
            costs=costs,
            progress=_tell,
        )
    if _speaks():
        training.save(path, record=asked.record)
    _say(training_report(training))
    _say(f"\nwrote {path}: the figure is {path / training.figure}")
    return 0


def _validate(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    from pipeexec.cli.report import report
    from pipeexec.validation.validate import validate

    path, costs = _path(arguments), _costs(arguments.costs)
    asked = workload(arguments, processes)
    validation = validate(
        asked.stages,
        asked.graphs,
        asked.devices,
        asked.loss,
        asked.batches,
        asked.optimizer,
        n_steps=arguments.steps,
        warm_up=arguments.warm_up,
        repeat=arguments.repeat,
        costs=costs,
        progress=_tell,
        timeout=arguments.timeout,
        processes=processes,
        cuda_graph=arguments.cuda_graph,
    )
    source = None if costs is None else str(arguments.costs)
    record = {**asked.record, "repeat": arguments.repeat, "costs": source}
    if _speaks():
        validation.save(path, record=record)
    _say(report(validation))
    _say(f"\nwrote {path}: the figure is {path / 'overlay.png'}")
    return 0


def _costs(path: Path | None) -> Costs | None:
    """Return the costs of a file, or of the run directory that has it; None for none."""
    from pipesim.costs.costs import Costs

    if path is None:
        return None
    return Costs.load(path / "costs.json" if os.path.isdir(path) else path)  # whatever its length


def _profile(arguments: argparse.Namespace, processes: Processes | None = None) -> int:
    from pipeexec.cli.report import profile_report
    from pipeexec.profiling.profile import measure

    path = _path(arguments)
    asked = workload(arguments, processes)
    graphs = list(asked.graphs.values())
    widest = max(graphs, key=lambda graph: graph.n_replicas)
    with _pipeline(arguments, asked, widest, processes) as pipeline:
        _tell(f"measuring: {arguments.warm_up} steps to warm up, then {arguments.steps}")
        found = measure(
            pipeline,
            *next(asked.batches),
            n_steps=arguments.steps,
            warm_up=arguments.warm_up,
            graphs=graphs,
        )
    if _speaks():
        found.save(path, record=asked.record)
    _say(profile_report(found))
    figure = f": the figure is {path / 'transfers.png'}" if len(found.transfers) else ""
    _say(f"\nwrote {path}{figure}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from pipeexec.cli.report import profile_report, report
    from pipeexec.profiling.files import TABLE
    from pipeexec.profiling.profile import Profile
    from pipeexec.run_directory import read_record
    from pipeexec.validation.result import load_run

    folder = arguments.directory
    if "rows" not in read_record(folder) and (folder / TABLE).is_file():
        print(profile_report(Profile.load(folder)))
    else:
        print(report(load_run(folder)))
    return 0


_Command = Callable[..., int]
#: What torchrun can start too.
_COMMANDS: dict[str, _Command] = {
    "run": _alone(_run),
    "validate": _alone(_validate),
    "profile": _alone(_profile),
}

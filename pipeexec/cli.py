"""The command line: ``pipeexec validate``, ``pipeexec profile`` and ``pipeexec show``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeexec.workload import add_workload, workload
from pipesim.errors import ArgumentError, PipeError, PipeWarning

if TYPE_CHECKING:
    from pipesim.costs import Costs

__all__ = ["main"]

_EPILOG = """examples:
  pipeexec validate                                  GPipe and 1F1B, two stages on two cores
  pipeexec validate --model convnet --recompute never,always,except_last
  pipeexec validate --schedules zb_h1,zb_2p --recompute never
  pipeexec validate --stages 4 --devices cuda:0,cuda:1,cuda:2,cuda:3 --batch 64
  pipeexec validate --repeat 5                       with a confidence interval of the error
  pipeexec profile --name costs                      measure costs, and nothing else
  pipeexec validate --costs results/costs/costs.json predict from them
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
    run.add_argument("--repeat", type=int, default=1, help="calibrate and measure so often, to say "
                     "how sure the error is (default: 1)")  # fmt: skip
    run.add_argument("--costs", type=Path, help="predict from this costs.json, or the run "
                     "directory that has it, without calibration")  # fmt: skip
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
            return _COMMANDS[arguments.command](arguments)
        except PipeError as error:
            print(f"pipeexec: error: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("pipeexec: interrupted", file=sys.stderr)
            return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"pipeexec: warning: {message}", file=sys.stderr)


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr)


def _validate(arguments: argparse.Namespace) -> int:
    from pipeexec.report import report
    from pipeexec.run_directory import check_writable
    from pipeexec.validate import validate

    path = arguments.results / arguments.name
    check_writable(path)
    costs = _costs(arguments.costs)
    asked = workload(arguments)
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
    )
    source = None if costs is None else str(arguments.costs)
    record = {**asked.record, "repeat": arguments.repeat, "costs": source}
    validation.save(path, record=record)
    print(report(validation))
    print(f"\nwrote {path}: the figure is {path / 'overlay.png'}")
    return 0


def _costs(path: Path | None) -> Costs | None:
    """Return the costs of a file, or of the run directory that has it; None for none."""
    from pipesim.costs import Costs

    if path is None:
        return None
    return Costs.load(path / "costs.json" if path.is_dir() else path)


def _profile(arguments: argparse.Namespace) -> int:
    from pipeexec.executor import Pipeline
    from pipeexec.profile import measure
    from pipeexec.report import profile_report
    from pipeexec.run_directory import check_writable

    path = arguments.results / arguments.name
    check_writable(path)
    asked = workload(arguments)
    graphs = list(asked.graphs.values())
    widest = max(graphs, key=lambda graph: graph.n_replicas)
    with Pipeline(asked.stages, widest, asked.devices, asked.loss, asked.optimizer) as pipeline:
        _tell(f"measuring: {arguments.warm_up} steps to warm up, then {arguments.steps}")
        found = measure(
            pipeline,
            *next(asked.batches),
            n_steps=arguments.steps,
            warm_up=arguments.warm_up,
            graphs=graphs,
        )
    found.save(path, record=asked.record)
    print(profile_report(found))
    figure = f": the figure is {path / 'transfers.png'}" if len(found.transfers) else ""
    print(f"\nwrote {path}{figure}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from pipeexec.profile import Profile
    from pipeexec.profile_files import TABLE
    from pipeexec.report import profile_report, report
    from pipeexec.run_directory import read_record
    from pipeexec.validation import load_run

    folder = arguments.directory
    if "rows" not in read_record(folder) and (folder / TABLE).is_file():
        print(profile_report(Profile.load(folder)))
    else:
        print(report(load_run(folder)))
    return 0


_COMMANDS = {"validate": _validate, "profile": _profile, "show": _show}

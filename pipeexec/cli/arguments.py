"""The arguments of the command ``pipeexec``."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeexec.cli.workload_options import add_workload, integer, real
from pipesim.utils.argument_parser import RaisingParser, add_version

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
  pipeexec train config.toml                         train, or continue after Ctrl-C or a crash
  torchrun --nproc-per-node 2 -m pipeexec train config.toml
  pipeexec show results/demo                         the tables of a run directory
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = RaisingParser(
        prog="pipeexec",
        description="Run pipeline schedules on real devices, beside their prediction.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("validate", help="profile, simulate, execute, compare, plot")
    add_workload(run, steps=21, what="measured steps of each row", name="validate")
    run.add_argument("--repeat", type=integer, default=1, help="number of calibrations and "
                     "measurements; more than 1 gives a confidence interval of the error "
                     "(default: 1)")  # fmt: skip
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
    _add_train(commands.add_parser("train", help="train from a TOML file, with checkpoints"))
    show = commands.add_parser("show", help="print the tables of a run directory")
    show.add_argument("directory", type=Path)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    add = parser.add_argument
    add("config", type=Path, help="TOML file; a factory that it names is imported and called")
    add("--steps", type=integer, help="steps in all, in place of the file's")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the last checkpoint, "
                       "if there is one (the default)")  # fmt: skip
    start.add_argument("--fresh", action="store_true", help="begin anew, and delete what is in the "
                       "directory of the training")  # fmt: skip
    add("--no-progress", action="store_true", help="show no progress bar")
    add("--timeout", type=real, default=60.0, help="seconds without any progress after which a "
        "step is given up (default: 60)")  # fmt: skip
    parser.set_defaults(results=Path("results"), name="train")

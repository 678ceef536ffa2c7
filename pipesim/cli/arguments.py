"""Arguments of the command ``pipesim``: the parser, and the settings in its result."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipesim.calibration.measured_steps import known_columns
from pipesim.cli.argument_values import (
    FIGURES,
    figure_path,
    parse_option,
    parse_value,
    writable_path,
)
from pipesim.cli.help_texts import CALIBRATE_EPILOG, EPILOG, SWEEP_EPILOG
from pipesim.cli.plan_arguments import add_plan_arguments
from pipesim.cli.view_arguments import add_demo_page_arguments, add_view_arguments
from pipesim.costs.costs import VALUE_FIELDS
from pipesim.errors import suggestion
from pipesim.sweeps.settings import FLAT, SECONDS, SETTINGS, Settings, check_layer, set_value
from pipesim.utils.argument_parser import RaisingParser, add_version

#: A command takes the parsed arguments, and prints its result.
Command = Callable[[argparse.Namespace], None]

#: Flag, metavar and help of each setting of the same name. Costs have other arguments.
_FLAGS = (
    ("--devices", "N", "number of devices"),
    ("--microbatches", "N", "number of micro-batches of a step"),
    ("--replicas", "N", "data-parallel replicas of the pipeline"),
    ("--layout", "ORDER", "replica_major or stage_major: whose devices are numbered in a row"),
    (
        "--grad-sync",
        "MODE",
        "replicas reduce gradients last, after every micro-batch or every so "
        "many, or bucketed; every/2/last: one a stage",
    ),
    ("--n-buckets", "N", "buckets of a stage's gradients"),
    (
        "--shard-parameters",
        "WHEN",
        "replicas share parameters, which are freed after every use, once a step, or but for those "
        "of the K stages that a device uses next: every, step, K",
    ),
    ("--expert-layers", "COUNTS", "layers with experts of each stage: one number, or 0,2,2,1"),
    ("--expert-replicas", "N", "replicas that together have all experts"),
    ("--sharded", "STAGES", "embeddings that are spread over the replicas, such as 0"),
    ("--exchange-work", "STREAM", "collective or compute: stream of the work around exchanges"),
    (
        "--sparse-grad-sync",
        "MODE",
        "sharded stages exchange gradients of every micro-batch, or of all after the last",
    ),
    ("--recompute", "MODE", "listed (by the schedule), never, always or except_last"),
    (
        "--tied",
        "GROUPS",
        "stages that share a parameter, such as 0-7: its gradients are summed",
    ),
    ("--skips", "PAIRS", "skip connections between stages, such as 0-3,1-2"),
    ("--streams", "KIND", "copy streams per_peer, per_microbatch, or a single one a device"),
    ("--hosts", "KIND", "one host that issues for all devices, one per_device, or 0,0,1,1"),
    ("--issue-order", "ORDER", "hosts issue by clock_cycle, microbatch_major or stage_major"),
    ("--step", "MODE", "flush: end with an optimizer step; none: with the gradients"),
    (
        "--offload",
        "VALUE",
        "activations in host memory: none, all, a share such as 0.5, or longest:0.5 for the half "
        "that lives longest; all/0.5/none: one a stage",
    ),
    ("--prefetch", "N", "compute tasks that a RELOAD or UNSHARD may run beside before its use"),
    ("--engine", "NAME", "engine that simulates"),
    (
        "--memory-limit",
        "BYTES",
        "bytes that a device may hold, such as 80e9 or 80GiB, or one number a device; by default "
        "the memory of the costs' GPU",
    ),
    (
        "--per",
        "stage|device|layers",
        "what costs are of: a stage, all stages of a device together, or as many parts of the "
        "model as devices, in order of its layers",
    ),
)
#: Flag and help of settings that are true or false.
_SWITCHES = (
    ("--prefetch-keys", "stage 0, sharded, exchanges keys before the F of the micro-batch before"),
    ("--overlap", "transfers run beside compute"),
    ("--rendezvous", "a SEND waits until its RECV is reached"),
    ("--host-threads", "hosts are threads of one process, which wait for each other"),
    ("--portals", "a skip goes straight to its target, not from stage to stage"),
    ("--shard-optimizer", "each replica steps its share of the parameters, as in ZeRO-1"),
    ("--grad-norm", "the norm of all gradients is computed before the optimizer steps"),
    ("--recompute-first", "every recompute of a stage comes before its first backward"),
    ("--recompute-waits", "without overlap, a gradient is received before its recompute"),
    ("--forward-only", "only the forwards of the schedule, as in an evaluation"),
)


def make_parser(
    commands: Mapping[str, tuple[Command, str]], names: Container[str]
) -> argparse.ArgumentParser:
    """Return the parser of all commands; those among ``names`` have their arguments.

    Adding arguments takes milliseconds a command.
    """
    parser = RaisingParser(
        prog="pipesim", description="Predict when each task of a pipeline-parallel step runs."
    )
    add_version(parser)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, summary) in commands.items():
        command = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command, verbose=False)
        command.add_argument("--verbose", action="store_true", help="show all lines of an error")
        if name in names:
            _ADD_ARGUMENTS[name](command)
    return parser


def parse_arguments(
    argv: Sequence[str] | None, commands: Mapping[str, tuple[Command, str]]
) -> argparse.Namespace:
    """Return the arguments of the command line; ``run`` is the command to run.

    Parameters
    ----------
    argv
        By default the arguments of the process.
    commands
        Function and summary of each command, by name.

    Raises
    ------
    SystemExit
        After ``--help`` or ``--version``.
    """
    parser = make_parser(commands, sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = suggestion(unknown[0], re.findall(r"--[\w-]+", args.parser.format_usage()))
        args.parser.error(f"unrecognized argument {unknown[0]}{near}")
    return args


def _add_settings(command: argparse.ArgumentParser, *, sweeps: bool = False) -> None:
    """Add the arguments of simulate and compare, or of sweep.

    Settings are stored as ``settings.`` and their path.
    """
    command.epilog = f"{SWEEP_EPILOG}{', '.join(FLAT)}, options." if sweeps else EPILOG
    add = command.add_argument
    add("names", nargs="*", metavar="SCHEDULE", default=[],
        help="pipesim schedules lists them; or a file of your own, .csv or .txt")  # fmt: skip
    add("--config", type=Path, metavar="FILE.toml", help="settings; see below")
    if sweeps:
        add("--grid", action="append", type=parse_option, metavar="KEY=A,B,...", default=[],
            help="values of a setting; overrides the file's")  # fmt: skip
        add("--jobs", type=parse_value, metavar="N", default=-1, help="processes; -1: one a core")
        add("--out", type=writable_path, metavar="FILE.jsonl", default=None,
            help="append each row when it is ready; a second run continues the file")  # fmt: skip
    else:
        add("--plot", type=figure_path, metavar="FILE", default=None, help=", ".join(FIGURES))
        add("--idle", action="store_true", default=False, help="show the causes of idle time")
    add("--csv", type=writable_path, metavar="FILE", default=None,
        help="write the shown table, in s and bytes")  # fmt: skip
    _add_flags(command, _FLAGS)
    for flag, text in _SWITCHES:
        action = argparse.BooleanOptionalAction
        add(flag, dest=f"settings.{flag[2:].replace('-', '_')}", action=action, help=text)
    _add_option(command)
    _add_costs(command)


def _add_counts(command: argparse.ArgumentParser) -> None:
    """Add the arguments of schedules."""
    _add_flags(command, _FLAGS[:2])
    _add_option(command)


def _add_calibration(command: argparse.ArgumentParser) -> None:
    """Add the arguments of calibrate."""
    command.epilog = CALIBRATE_EPILOG + textwrap.fill(", ".join(known_columns()), 90)
    add = command.add_argument
    add("rows", metavar="STEPS.csv", help="measured steps, one a line; see below")
    add("--gpu", required=True, metavar="NAME",
        help="GPU to start from, such as a100_80gb; or a file that --json wrote, with its factors "
             "of the network")  # fmt: skip
    add("--network", default=None, metavar="NAME",
        help="machine, such as dgx_a100; without one, messages take no time")  # fmt: skip
    add("--constants", default=None, type=lambda text: text.split(","), metavar="A,B,...",
        help="constants to fit, such as flops,bandwidth,launch")  # fmt: skip
    add(
        "--plot",
        type=figure_path,
        metavar="FILE",
        default=None,
        help=f"measured over predicted, by constants without the row; {', '.join(FIGURES)}",
    )
    add("--csv", type=writable_path, metavar="FILE", default=None,
        help="write the steps with predictions and errors")  # fmt: skip
    add("--json", type=writable_path, metavar="FILE", default=None,
        help="write the fitted GPU, its constants and errors")  # fmt: skip


def _add_costs(command: argparse.ArgumentParser) -> None:
    """Add an argument for each field of `pipesim.Costs`, and the file to start from."""
    costs = command.add_argument_group("costs", "one value, or one a stage between commas")
    costs.add_argument("--costs", dest="settings.costs.file", metavar="FILE.json",
                       help="costs to start from; the other arguments override it")  # fmt: skip
    for name in VALUE_FIELDS:
        flag = "--" + SECONDS.get(name, name).replace("_", "-")
        unit = "BYTES" if name.endswith("bytes") else "SECONDS"
        costs.add_argument(flag, dest=f"settings.costs.{name}", type=parse_value, metavar=unit)
    costs.add_argument("--skip-bytes", dest="settings.costs.skip_bytes", type=parse_value,
                       metavar="BYTES", help="of each skip; the file has one for each")  # fmt: skip
    costs.add_argument("--tied-bytes", dest="settings.costs.tied_bytes", type=parse_value,
                       metavar="BYTES", help="of gradients of a group of tied stages")  # fmt: skip
    costs.add_argument("--all-reduce", dest="settings.costs.all_reduce", metavar="ALGORITHM",
                       help="of gradients: ring, tree or fastest")  # fmt: skip
    costs.add_argument("--memory-reserve", dest="settings.costs.memory_reserve", type=parse_value,
                       metavar="SHARE", help="of the allocated bytes, held besides")  # fmt: skip
    for name, unit in (("latency", "SECONDS"), ("bandwidth", "BYTES_A_SECOND")):
        dest = f"settings.costs.network.{name}"
        costs.add_argument(f"--{name}", dest=dest, type=parse_value, metavar=unit)
        costs.add_argument(f"--host-{name}", dest=f"settings.costs.network.host.{name}",
                           type=parse_value, metavar=unit,
                           help="of copies to and from host memory")  # fmt: skip


def _add_flags(command: argparse.ArgumentParser, flags: Iterable[tuple[str, str, str]]) -> None:
    """Add an argument for each setting: flag, metavar and help."""
    for flag, metavar, text in flags:
        dest = f"settings.{flag[2:].replace('-', '_')}"
        command.add_argument(flag, dest=dest, type=parse_value, metavar=metavar, help=text)


def _add_option(command: argparse.ArgumentParser) -> None:
    """Add the argument for options of schedules."""
    command.add_argument(
        "--option",
        dest="settings.options",
        action="append",
        type=parse_option,
        metavar="KEY=VALUE",
        help="of the schedule itself, such as n_chunks=2",
    )


#: Adds the arguments of each command.
_ADD_ARGUMENTS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "simulate": _add_settings,
    "compare": _add_settings,
    "sweep": partial(_add_settings, sweeps=True),
    "calibrate": _add_calibration,
    "plan": add_plan_arguments,
    "schedules": _add_counts,
    "view": add_view_arguments,
    "demo-page": add_demo_page_arguments,
}


def argument_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the command line, as nested tables."""
    layer: Settings = {}
    for path, value in vars(args).items():
        layer = set_value(layer, path.split("."), value)
    settings: Settings = layer.get("settings", {})
    if "options" in settings:
        settings["options"] = dict(settings["options"])
    return check_layer("arguments", settings, SETTINGS, Path())

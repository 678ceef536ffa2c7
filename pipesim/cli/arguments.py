"""Arguments of the command ``pipesim``: values, the parser, and the settings in its result.

Options of library functions have the name, the text and the default of the parameter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from pipesim.cli.help_texts import EXAMPLES, PAGES
from pipesim.costs.costs import Costs
from pipesim.costs.rows import STAGE_ROWS
from pipesim.errors import ArgumentError, check_name, suggestion
from pipesim.framework.framework import frameworks
from pipesim.lowering.lower import lower
from pipesim.models.data_sheets import gpus
from pipesim.models.gpu import GPU
from pipesim.models.parallel import FixedSettings, Parallel
from pipesim.models.published_models import transformers
from pipesim.network.links import HostLink
from pipesim.network.network import Network
from pipesim.network.sources import machines
from pipesim.planning.cluster import Cluster
from pipesim.planning.plan import plan
from pipesim.plot.page.document import LAYOUTS
from pipesim.plot.page.save import to_html
from pipesim.scheduling.registry import options_of_schedules, schedule
from pipesim.simulation.simulate import simulate
from pipesim.sweeps.settings import FLAT, SECONDS, SETTINGS, Settings, check_layer, set_value
from pipesim.sweeps.sweep import sweep
from pipesim.timeline.timeline import Timeline
from pipesim.utils.command_line import (
    CommandParser,
    RaisingParser,
    add_completion,
    add_options,
    add_version,
    descriptions,
)
from pipesim.utils.files import check_path, check_target, read_toml, write_errors
from pipesim.utils.texts import parse_float, parse_int, parse_json

# Values: numbers, lists, options, and files to write

#: Endings of files of figures, and of pages.
FIGURES = (".pdf", ".png", ".svg")
_PAGES = (".html", ".htm")


def parse_value(text: str) -> Any:
    """Parse a number, true or false, or several of them between commas; other texts stay text.

    The code that uses a value checks it. Python also reads ``1_0`` and digits of other scripts as
    numbers; those stay text here.
    """
    if "," in text:
        return [parse_value(part) for part in text.split(",")]
    for parse in (parse_int, parse_float):
        if (value := parse(text)) is not None:
            return value
    return {"true": True, "false": False}.get(text, text)


def parse_option(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE``."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, parse_value(value)


def json_object(text: str) -> dict[str, Any]:
    """Parse an object of JSON, such as ``{"pid": 0}``."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no object of JSON, such as {{"pid": 0}}')
    return value


def writable_path(text: str) -> Path:
    """Return a path, if a file can be written there. The check is before the work, not after it."""
    try:
        path = check_path("path", text, "write")
        with write_errors(path):
            tempfile.TemporaryFile(dir=check_target(path).parent).close()
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def figure_path(text: str) -> Path:
    """Return the path of a figure, if its ending is known and it can be written."""
    if not text.lower().endswith(FIGURES):
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(FIGURES)}")
    return writable_path(text)


def page_path(text: str) -> Path:
    """Return the path of an interactive page, if its ending is known and it can be written."""
    if not text.lower().endswith(_PAGES):
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PAGES)}")
    return writable_path(text)


# Options that several commands have

#: A command takes the parsed arguments, and prints its result.
Command = Callable[[argparse.Namespace], None]
#: Options whose name is not that of the parameter.
_FLAGS = {
    "n_devices": "--devices",
    "n_microbatches": "--microbatches",
    "n_replicas": "--replicas",
    "n_jobs": "--jobs",
    "machine": "--cluster",
    "n_gpus": "--gpus",
    "n_ranks": "--ranks",
}
_COUNTS = {"n_devices": "number of devices", "n_microbatches": "number of micro-batches of a step"}

add_parameters = partial(add_options, flags=_FLAGS, parse=parse_value)


def _add_file(
    group: argparse._ActionsContainer, flag: str, parse: Callable[[str], Path], text: str
) -> None:
    """Add an option with a file to write."""
    metavar = "PAGE.html" if parse is page_path else "FILE"
    text += f" ({', '.join(FIGURES)})" if parse is figure_path else ""
    group.add_argument(flag, type=parse, metavar=metavar, default=None, help=text)


def _add_switch(group: argparse._ActionsContainer, flag: str, text: str) -> None:
    """Add an option without a value."""
    group.add_argument(flag, action="store_true", default=False, help=text)


def _add_config(command: argparse.ArgumentParser) -> None:
    text = "settings; --help file shows one"
    command.add_argument("--config", type=Path, metavar="FILE.toml", help=text)


# Commands that simulate


def _add_settings(command: argparse.ArgumentParser, *, sweeps: bool = False) -> None:
    """Add the arguments of simulate and compare, or of sweep: settings, by their flat names."""
    text = "names, as pipesim schedules lists them; or files, .csv or .txt"
    argument = command.add_argument("names", nargs="*", metavar="SCHEDULE", default=[], help=text)
    argument.words = (*options_of_schedules(),)  # type: ignore[attr-defined]
    _add_config(command)
    _add_counts(command)
    group = command.add_argument_group("output")
    if sweeps:
        group.add_argument(
            "--grid", action="append", type=parse_option, metavar="KEY=A,B,...", default=[],
            help="values of a setting; overrides the file's",
        )  # fmt: skip
        add_parameters(group, sweep, ["n_jobs"], with_defaults=True)
        _add_file(group, "--out", writable_path, "append each row; a second run continues the file")
    else:
        _add_file(group, "--plot", figure_path, "draw the timelines")
        _add_switch(group, "--idle", "show the causes of idle time")
    _add_file(group, "--csv", writable_path, "write the shown table, in s and bytes")
    group = command.add_argument_group("simulation")
    add_parameters(group, simulate, ["engine", "memory_limit"], prefix="settings.")
    group.add_argument(
        "--per", dest="settings.per", type=parse_value, metavar="stage|device|layers",
        help="what costs are of: a stage, all stages of a device together, or as many parts of the "
        "model as devices, in order of its layers",
    )  # fmt: skip
    group = command.add_argument_group("lowering", "how a schedule becomes tasks")
    add_parameters(group, lower, prefix="settings.")
    text = "one value, or one a stage between commas"
    group = command.add_argument_group("costs", text)
    group.add_argument(
        "--costs", dest="settings.costs", type=lambda text: {"file": text}, metavar="FILE.json",
        help="costs to start from; other options override them",
    )  # fmt: skip
    names = [name for name, row in STAGE_ROWS.items() if not row.is_rare]
    names += ["skip_bytes", "tied_bytes", "all_reduce", "memory_reserve", "overlap_cost"]
    flags = {name: f"--{flag.replace('_', '-')}" for name, flag in SECONDS.items()}
    add_parameters(group, Costs, names, prefix="settings.costs.", flags=flags)
    group = command.add_argument_group("network", "links between devices, and to host memory")
    units = {"latency": "SECONDS", "bandwidth": "BYTES/S"}
    add_parameters(group, Network, units, prefix="settings.costs.network.", metavars=units)
    flags = {name: f"--host-{name}" for name in units}
    prefix = "settings.costs.network.host."
    add_parameters(group, HostLink, units, prefix=prefix, metavars=units, flags=flags)


def _add_counts(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("schedule")
    add_parameters(group, schedule, _COUNTS, prefix="settings.", helps=_COUNTS)
    group.add_argument(
        "--option", dest="settings.options", action="append", type=parse_option,
        metavar="KEY=VALUE", help="of the schedule itself, such as n_chunks=2",
    )  # fmt: skip


def argument_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the command line, as nested tables."""
    layer: Settings = {}
    for key, value in vars(args).items():
        table, *path = key.split(".")
        if table == "settings":
            layer = set_value(layer, FLAT.get(path[0], path) if len(path) == 1 else path, value)
    if "options" in layer:
        layer["options"] = dict(layer["options"])
    return check_layer("arguments", layer, SETTINGS, Path())


# ``pipesim plan``

#: Annotation of each setting of plan; other parameters are arguments, functions, or of the output.
_OF_PLAN = {
    name: str(parameter.annotation)
    for name, parameter in signature(plan).parameters.items()
    if name not in ("model", "cluster", "lengths", "where", "n_best", "backend", "progress")
}
_OF_CLUSTER = ("machine", "n_gpus", "gpu", "usable_memory", "network_efficiency", "nic_efficiency")
_PLAN_TEXTS = {
    "noise": "standard deviation of the seconds of each task, relative to their mean",
    "percentile": "percentile of noisy steps by which the best are ranked (default: 90)",
    "n_jobs": "processes; -1: one a core (default: 1)",
    "flash_attention": "the attention core is one fused kernel (default: true)",
    "framework": "what the training framework does, by name (default: the best case)",
    "precision": "number format of linear products of layers (default: bf16)",
}


def _add_plan(command: argparse.ArgumentParser) -> None:
    """Add the arguments of plan; settings are stored as ``plan.`` or ``cluster.`` and their key."""
    text = "a published model, or a file of measured layers, .csv"
    command.add_argument("model", nargs="?", metavar="MODEL", help=text)
    _add_config(command)
    command.add_argument(
        "--size", dest="sizes", action="append", type=parse_option, metavar="KEY=VALUE", default=[],
        help="of the model, such as sequence_length=4096",
    )  # fmt: skip
    shares = dict.fromkeys((*_OF_CLUSTER[3:], "memory_reserve"), "SHARE")
    group = command.add_argument_group("cluster")
    units = {**shares, "gpu": "NAME"}
    add_parameters(group, Cluster, _OF_CLUSTER, prefix="cluster.", metavars=units)
    fixed = [name for name in FixedSettings.__annotations__ if name != "routing"]  # a table
    choices = [name for name, annotation in _OF_PLAN.items() if "Sequence" in annotation]
    group = command.add_argument_group("choices", "one value, or several between commas")
    add_parameters(group, plan, choices, prefix="plan.")
    group = command.add_argument_group("search")
    units = {**shares, "memory_limit": "BYTES", "noise": "SHARE"}
    others = [name for name in _OF_PLAN if name not in (*FixedSettings.__annotations__, *choices)]
    add_parameters(group, plan, others, prefix="plan.", metavars=units, helps=_PLAN_TEXTS)
    group.set_defaults(**{"plan.n_jobs": 1})
    group = command.add_argument_group("model", "how each GPU computes its part")
    units = {"framework": "NAME"}
    add_parameters(group, Parallel, fixed, prefix="plan.", metavars=units, helps=_PLAN_TEXTS)
    group = command.add_argument_group("output")
    text = "configurations to find for certain, and to print (default: 10)"
    group.add_argument("--best", type=parse_value, metavar="N", default=10, help=text)
    text = "print why the best takes less time than the one of this rank"
    group.add_argument("--explain", type=parse_value, metavar="RANK", default=None, help=text)
    _add_file(group, "--plot", figure_path, "memory over time of all configurations")
    _add_file(group, "--csv", writable_path, "write all configurations, in s and bytes")
    _add_switch(group, "--megatron", "print the flags of Megatron-LM for the best")
    text = "write the order of the best as torch's CSV; --torchtitan names it"
    _add_file(group, "--order", writable_path, text)
    _add_switch(group, "--torchtitan", "print the settings of torchtitan for the best")
    tables = {"model": transformers, "cluster.machine": machines, "cluster.gpu": gpus}
    tables["plan.framework"] = frameworks
    for action in command._actions:
        action.words = tables.get(action.dest, getattr(action, "words", ()))  # type: ignore[attr-defined]


def plan_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the file, overridden by those of the arguments.

    ``model`` and ``cluster`` are tables: of sizes, with the ``model`` that they change, and of the
    parameters of `pipesim.Cluster`. A model that is a file of layers is a text.
    """
    settings = {} if "config" not in args else _read(args.config)
    model = dict(settings.pop("model", {}))
    if "model" in args:
        model = {"model": args.model}
    model |= dict(args.sizes)
    cluster = dict(settings.pop("cluster", {}))
    for path, value in vars(args).items():
        table, _, key = path.partition(".")
        if key:
            (cluster if table == "cluster" else settings)[key] = value
    return {**settings, "model": model, "cluster": cluster}


def _read(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file, with tables of the model and the cluster."""
    settings = read_toml(path, "settings from")
    for key in settings:
        check_name(f"{path}: key", key, ("model", "cluster", "lengths", *_OF_PLAN))
    for key, name in (("model", "model"), ("cluster", "machine")):
        value = settings.get(key, {})
        if isinstance(value, str):
            settings[key] = {name: value}
        elif not isinstance(value, dict):
            raise ArgumentError(f"{path}: {key} must be a name or a table, got {value!r:.60}")
    gpu = settings.get("cluster", {}).get("gpu")
    if str(gpu).endswith(".json"):  # relative to this file, as are files of costs
        settings["cluster"] = {**settings["cluster"], "gpu": str(path.parent / str(gpu))}
    return settings


# Other commands


def _add_calibration(command: argparse.ArgumentParser) -> None:
    text = "measured steps, one a line; --help file lists its columns"
    command.add_argument("rows", metavar="STEPS.csv", help=text)
    group = command.add_argument_group("fit")
    text = descriptions(GPU.fit)["gpu"]
    group.add_argument("--gpu", required=True, metavar="NAME", help=text)
    names = ["network", "framework"]
    add_options(group, GPU.fit, names, metavars=dict.fromkeys(names, "NAME"), with_defaults=True)
    add_options(group, GPU.fit, ["prior"], with_defaults=True)
    add_options(
        group, GPU.fit, ["constants"], metavars={"constants": "A,B,..."}, with_defaults=True,
        parse=lambda text: text.split(","),
    )  # fmt: skip
    group = command.add_argument_group("output")
    text = "measured over predicted, by constants without the row"
    _add_file(group, "--plot", figure_path, text)
    _add_file(group, "--csv", writable_path, "write the steps with predictions and errors")
    _add_file(group, "--json", writable_path, "write the fitted GPU, its constants and errors")


#: Parameters of `Timeline.from_chrome` that are options of view: their flags.
TRACE_FLAGS = {
    name: _FLAGS.get(name, f"--{name}")
    for name in ("pattern", "fields", "ops", "only", "step", "n_ranks")
}


def _add_view(command: argparse.ArgumentParser) -> None:
    text = "files or folders; --help file lists their kinds"
    command.add_argument("files", nargs="+", metavar="FILE", help=text)
    group = command.add_argument_group("page")
    _add_file(group, "--out", page_path, "page to write; by default of the first FILE's name, here")
    text = "costs of the timelines, for memory; schedules are simulated with them"
    group.add_argument("--costs", metavar="FILE.json", default=None, help=text)
    add_options(group, to_html, ["title"], metavars={"title": "TEXT"}, with_defaults=True)
    text = "several timelines: below each other, or one at a time"
    group.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help=text)
    _add_switch(group, "--no-open", "do not open the page in a browser")
    group = command.add_argument_group("traces")
    traces = Timeline.from_chrome
    add_options(group, traces, ["pattern"], metavars={"pattern": "REGEX"})
    objects = dict.fromkeys(("fields", "ops", "only"), "JSON")
    add_options(group, traces, objects, metavars=objects, parse=json_object)
    add_parameters(group, traces, ["step", "n_ranks"])


def _add_demo_page(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("page")
    _add_file(group, "--out", page_path, "page to write; by default gallery.html in this folder")
    for short, name, count in (("-p", "n_devices", 4), ("-m", "n_microbatches", 8)):
        text = f"{_COUNTS[name]} (default: {count})"
        flags = (short, _FLAGS[name])
        group.add_argument(*flags, type=parse_value, metavar="N", default=count, help=text)


# The parser

#: Adds the arguments of each command.
_ADD_ARGUMENTS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "simulate": _add_settings,
    "compare": _add_settings,
    "sweep": partial(_add_settings, sweeps=True),
    "calibrate": _add_calibration,
    "plan": _add_plan,
    "schedules": _add_counts,
    "view": _add_view,
    "demo-page": _add_demo_page,
}


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
    add_completion(parser)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, (run, summary) in commands.items():
        command = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=EXAMPLES.get(name),
            pages=PAGES.get(name),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        command.set_defaults(run=run, parser=command, verbose=False)
        command.add_argument("--verbose", action="store_true", help="show all lines of an error")
        if name in names or "--completion" in names:
            _ADD_ARGUMENTS[name](command)
    return parser


def parse_arguments(
    argv: Sequence[str] | None, commands: Mapping[str, tuple[Command, str]]
) -> argparse.Namespace:
    """Return the arguments of the command line, by default those of the process."""
    parser = make_parser(commands, sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = suggestion(unknown[0], args.parser._option_string_actions)
        args.parser.error(f"unrecognized argument {unknown[0]}{near}")
    return args

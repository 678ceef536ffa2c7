"""Arguments of the command ``pipesim``: values, the parser, and the settings in its result."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipesim.calibration.measured_steps import known_columns
from pipesim.cli.help_texts import (
    CALIBRATE_EPILOG,
    DEMO_PAGE_EPILOG,
    EPILOG,
    PLAN_EPILOG,
    SWEEP_EPILOG,
    VIEW_EPILOG,
)
from pipesim.costs.costs import VALUE_FIELDS
from pipesim.errors import ArgumentError, check_name, suggestion
from pipesim.plot.page.document import LAYOUTS
from pipesim.sweeps.settings import FLAT, SECONDS, SETTINGS, Settings, check_layer, set_value
from pipesim.utils.files import check_path, check_target, read_text, write_errors
from pipesim.utils.texts import RaisingParser, add_version, parse_float, parse_int, parse_json

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


# ``pipesim plan``

#: Parameters of a configuration, each one value or a list: metavar and help.
CHOICES: Mapping[str, tuple[str, str]] = {
    "tensor_parallel": ("N", "GPUs that share each layer"),
    "pipeline_parallel": ("N", "devices of the pipeline"),
    "data_parallel": ("N", "replicas of the pipeline"),
    "microbatch_size": ("N", "sequences of a micro-batch"),
    "schedules": ("NAME", "schedules to try; pipesim schedules lists them"),
    "n_chunks": ("N", "stages of each device"),
    "recompute": ("MODE", "recompute of layers: none, selective, full"),
    "shard_optimizer": ("BOOL", "true, false or true,false: a distributed optimizer, as in ZeRO-1"),
    "sequence_parallel": ("BOOL", "likewise: split the sequence where tensor parallelism does not"),
    "context_parallel": ("N", "GPUs that share each sequence; 1 by default"),
    "expert_parallel": ("N", "GPUs among which the experts of a layer are divided"),
    "shard_parameters": ("MODE", "replicas share parameters, and gather them: none (the default), "
                         "every, step, or the number of stages that a device keeps"),
    "offload": ("SHARE", "activations in host memory: none (the default), all, a share (0.5), "
                "or longest:0.5"),
    "n_slices": ("N", "slices of each sequence, for seq1f1b and slimpipe; 1 by default"),
}  # fmt: skip
#: Settings of the model that are true or false, and their help.
SWITCHES: Mapping[str, str] = {
    "flash_attention": "the attention core is one fused kernel",
    "scatter_gather": "each GPU of a group sends a part of a stage's output",
    "fused_loss": "the loss is fused, and keeps no logits in 32 bits",
}
_SETTINGS: Mapping[str, tuple[str, str]] = {
    "global_batch": ("N", "sequences of a step, of all replicas"),
    "memory_limit": ("BYTES", "bytes that a device may hold, such as 75e9 or 75GiB; by default the "
                     "memory of its GPU"),
    "memory_reserve": ("SHARE", "of the allocated bytes, held besides by the allocator"),
    "split": ("MODE", "layers of stages: refined (the best few moved further), balanced or even"),
    "layout": ("ORDER", "stage_major or replica_major: whose devices are numbered in a row"),
    "noise": ("SHARE", "standard deviation of the seconds of each task, relative to their mean"),
    "percentile": ("N", "of noisy steps, by which the best are ranked; 90 by default"),
}  # fmt: skip
_CLUSTER: Mapping[str, tuple[str, str, str]] = {
    "machine": ("--cluster", "NAME", "machine of the nodes, such as dgx_h100"),
    "n_gpus": ("--gpus", "N", "GPUs of the cluster"),
    "gpu": ("--gpu", "NAME", "GPU of the nodes, or a file that pipesim calibrate --json wrote; by "
            "default that of the machine"),
    "usable_memory": ("--usable-memory", "SHARE", "of each GPU's memory that tensors may take"),
    "network_efficiency": ("--network-efficiency", "SHARE", "of nominal bandwidths that messages "
                           "reach"),
}  # fmt: skip


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of plan; settings are stored as ``plan.`` or ``cluster.`` and their key."""
    command.epilog = PLAN_EPILOG
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL",
        help="a published model, such as llama3_70b, or measured layers, .csv")  # fmt: skip
    add("--config", type=Path, metavar="FILE.toml", help="settings; see below")
    add("--size", dest="sizes", action="append", type=parse_option, metavar="KEY=VALUE", default=[],
        help="of the model, such as sequence_length=4096")  # fmt: skip
    for key, (flag, metavar, text) in _CLUSTER.items():
        add(flag, dest=f"cluster.{key}", type=parse_value, metavar=metavar, help=text)
    for key, (metavar, text) in _SETTINGS.items():
        add(_flag(key), dest=f"plan.{key}", type=parse_value, metavar=metavar, help=text)
    choices = command.add_argument_group("choices", "one value, or several between commas")
    for key, (metavar, text) in CHOICES.items():
        choices.add_argument(
            _flag(key), dest=f"plan.{key}", type=parse_value, metavar=metavar, help=text
        )
    for key, text in SWITCHES.items():
        action = argparse.BooleanOptionalAction
        add(_flag(key), dest=f"plan.{key}", action=action, help=text)
    add("--jobs", dest="plan.n_jobs", type=parse_value, metavar="N", default=1,
        help="processes; -1: one a core; by default 1")  # fmt: skip
    add(
        "--best",
        type=parse_value,
        metavar="N",
        default=10,
        help="configurations to find for certain, and to print",
    )
    add("--explain", type=parse_value, metavar="RANK", default=None,
        help="print why the best takes less time than the one of this rank")  # fmt: skip
    add("--plot", type=figure_path, metavar="FILE", default=None,
        help=f"memory over time of all configurations; {', '.join(FIGURES)}")  # fmt: skip
    add("--csv", type=writable_path, metavar="FILE", default=None,
        help="write all configurations, in s and bytes")  # fmt: skip
    add("--megatron", action="store_true", default=False,
        help="print the flags of Megatron-LM for the best")  # fmt: skip
    add("--order", type=writable_path, metavar="FILE.csv", default=None,
        help="write the order of the best as torch's CSV; --torchtitan names it")  # fmt: skip
    add("--torchtitan", action="store_true", default=False,
        help="print the settings of torchtitan for the best")  # fmt: skip


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


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
    try:
        settings = tomllib.loads(read_text(path, "settings from", ArgumentError))
    except (RecursionError, ValueError) as error:
        raise ArgumentError(f"cannot read settings from {path}: {error}") from error
    for key in settings:
        check_name(f"{path}: key", key, ("model", "cluster", *_SETTINGS, *CHOICES, *SWITCHES))
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


# ``pipesim view`` and ``pipesim demo-page``


def add_view_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of view."""
    command.epilog = VIEW_EPILOG
    add = command.add_argument
    add("files", nargs="+", metavar="FILE",
        help="timeline, schedule, trace, run directory or folder of traces; see below")  # fmt: skip
    add("--out", type=page_path, metavar="PAGE.html", default=None,
        help="page to write; by default of the name of the first FILE, in this folder")  # fmt: skip
    add("--costs", metavar="FILE.json", default=None,
        help="costs of the timelines, for memory; schedules are simulated with them")  # fmt: skip
    add("--title", metavar="TEXT", default=None, help="title of the page")
    add("--layout", choices=LAYOUTS, default=LAYOUTS[0],
        help="several timelines: below each other, or one at a time")  # fmt: skip
    add("--pattern", metavar="REGEX", default=None,
        help="names of ranges in traces, with groups op, microbatch and stage")  # fmt: skip
    add("--fields", type=json_object, metavar="JSON", default=None,
        help="places of op, microbatch, stage and rank in events of traces")  # fmt: skip
    add("--ops", type=json_object, metavar="JSON", default=None,
        help="operations by the words of traces; null leaves events out")  # fmt: skip
    add("--only", type=json_object, metavar="JSON", default=None,
        help="values that events of traces must have at places")  # fmt: skip
    add("--step", type=parse_value, metavar="N", default=None,
        help="step of traces, from 0; by default -1, the last one")  # fmt: skip
    add("--ranks", type=parse_value, metavar="N", default=None,
        help="traces of the pipeline, where the run had more ranks")  # fmt: skip
    add("--no-open", action="store_true", default=False, help="do not open the page in a browser")


def add_demo_page_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of demo-page."""
    command.epilog = DEMO_PAGE_EPILOG
    add = command.add_argument
    add("--out", type=page_path, metavar="PAGE.html", default=None,
        help="page to write; by default gallery.html in this folder")  # fmt: skip
    add("-p", "--devices", type=parse_value, metavar="N", default=4, help="number of devices")
    add("-m", "--microbatches", type=parse_value, metavar="N", default=8,
        help="number of micro-batches of a step")  # fmt: skip


# The parser, and the commands that simulate

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
    """Return the arguments of the command line, by default those of the process."""
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
    _add_flags(command, _FLAGS[:2])
    _add_option(command)


def _add_calibration(command: argparse.ArgumentParser) -> None:
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
    for flag, metavar, text in flags:
        dest = f"settings.{flag[2:].replace('-', '_')}"
        command.add_argument(flag, dest=dest, type=parse_value, metavar=metavar, help=text)


def _add_option(command: argparse.ArgumentParser) -> None:
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

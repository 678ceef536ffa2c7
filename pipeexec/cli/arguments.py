"""The arguments of the command ``pipeexec``, and the workload that they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.run_options import RunOptions
from pipesim.errors import ArgumentError, check_count, check_name, number
from pipesim.lowering.lower import lower
from pipesim.utils.command_line import (
    CommandParser,
    RaisingParser,
    add_completion,
    add_options,
    add_version,
    descriptions,
)
from pipesim.utils.texts import parse_float, parse_int

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pipeexec.demo_models.registry import DemoModel
    from pipeexec.devices.device import DeviceLike
    from pipeexec.distributed.processes import Processes
    from pipeexec.stages.loss_function import Loss
    from pipesim.graph.graph import TaskGraph
    from pipesim.scheduling.registry import ScheduleInfo


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


# Values of options


def words(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _some_words(text: str) -> list[str]:
    """Return the words between commas, at least one; for argparse."""
    if parts := words(text):
        return parts
    raise argparse.ArgumentTypeError(f"names nothing: {text!r}")


def integer(text: str) -> int:
    """Read a whole number in the digits 0 to 9; for argparse."""
    number = parse_int(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return number


def real(text: str) -> float:
    """Read a number; for argparse."""
    number = parse_float(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}")
    return number


def _counts(text: str) -> list[int]:
    counts = [parse_int(word) for word in _some_words(text)]
    if None in counts:
        raise argparse.ArgumentTypeError(f"not whole numbers: {text!r}")
    return [count for count in counts if count is not None]


# Commands


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = RaisingParser(
        prog="pipeexec",
        description="Run pipeline schedules on real devices, beside their prediction.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    add_completion(parser)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, (add_arguments, summary) in _COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        add_arguments(commands.add_parser(name, help=summary, description=description))
    return parser


def _add_validate(command: argparse.ArgumentParser) -> None:
    group = _add_workload(command, "validate", "measured steps of each row", 21, _BOTH, _MODES)
    add_options(group, RunOptions, ["repeat"], parse=integer, with_defaults=True)
    text = "predict from this costs.json, or the run directory that has it, without calibration"
    group.add_argument("--costs", type=Path, metavar="FILE", help=text)
    _add_details(command)


def _add_run(command: argparse.ArgumentParser) -> None:
    group = _add_workload(command, "run", "measured steps", 21, ["1f1b"], ["never"])
    text = "predict the steps from this costs.json, or the run directory that has it"
    group.add_argument("--costs", type=Path, metavar="FILE", help=text)


def _add_profile(command: argparse.ArgumentParser) -> None:
    _add_workload(command, "profile", "calibration steps", 7, _BOTH, _MODES)


def _add_train(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    text = "TOML file; a factory that it names is imported and called"
    add("config", type=Path, metavar="FILE.toml", help=text)
    add("--steps", type=integer, metavar="N", help="steps in all, in place of the file's")
    start = command.add_mutually_exclusive_group()
    text = "continue from the last checkpoint, if there is one (the default)"
    start.add_argument("--resume", action="store_true", help=text)
    text = "begin anew, and delete what is in the directory of the training"
    start.add_argument("--fresh", action="store_true", help=text)
    add("--no-progress", action="store_true", help="show no progress bar")
    add("--timeout", type=real, metavar="SECONDS", default=60.0, help=_TIMEOUT)
    command.set_defaults(results=Path("results"), name="train")


def _add_show(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="run directory, or that of a training")
    _add_details(command)


def _add_details(command: argparse.ArgumentParser) -> None:
    text = "print intervals of the errors of a validation too, their parts, and those of operations"
    command.add_argument("--details", action="store_true", help=text)


#: Adds the arguments of each command, and its summary.
_COMMANDS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "validate": (_add_validate, "profile, simulate, execute, compare, plot"),
    "run": (_add_run, "run training steps of one schedule, and measure them"),
    "profile": (_add_profile, "measure costs of stages and messages, and plot"),
    "train": (_add_train, "train from a TOML file, with checkpoints"),
    "show": (_add_show, "print the tables of a run directory"),
}
_BOTH, _MODES = ["gpipe", "1f1b"], ["never", "always"]
_TIMEOUT = "seconds without any progress after which a step is given up (default: 60)"
_SIZES = ("layers", "width", "heads", "sequence", "image_size", "classes", "dropout", "text")


def _add_workload(
    command: argparse.ArgumentParser,
    name: str,
    steps: str,
    n_steps: int,
    schedules: list[str],
    recompute: list[str],
) -> argparse._ActionsContainer:
    """Add the options of a run; return the group of its steps, which are ``steps``."""

    def add(group: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
        if options.get("default") is not None:
            shown = options["default"]
            text += f" (default: {','.join(shown) if isinstance(shown, list) else shown})"
        if "metavar" not in options and "action" not in options:
            kind = options.get("type")
            options["metavar"] = "N" if kind is integer else "NUMBER" if kind is real else "NAME"
        group.add_argument(flag, help=text, **options)

    group = command.add_argument_group("model")
    add(group, "--model", "gpt or convnet", default="gpt")
    for size in _SIZES[:6]:
        add(group, f"--{size.replace('_', '-')}", "size of the model", type=integer)
    add(group, "--dropout", "share of activations that are dropped", type=real)
    text = "train on this file, not on Python's library"
    add(group, "--text", text, type=Path, metavar="FILE")
    group = command.add_argument_group("schedule")
    text = "names or files, all with the same stages on the same devices"
    add(group, "--schedules", text, type=words, default=schedules)
    add(group, "--recompute", "of never,always,except_last", type=words, default=recompute)
    text = "of a step (default: 8, or as a file has)"
    add(group, "--microbatches", text, type=integer)
    text = "samples of a step of each replica (default: depends on the model)"
    add(group, "--batch", text, type=integer)
    add(group, "--stages",
        "number of devices of a replica, each of which has one stage, or the chunks of a looped or "
        "V-shaped schedule (default: 2, or as --balance or a file has)", type=integer)  # fmt: skip
    text = "layers of each stage, such as 4,6 (default: even work)"
    add(group, "--balance", text, type=_counts, metavar="N,N,...")
    flags, usual = {"n_replicas": "--replicas"}, {"n_buckets": 4, "grad_sync": "last"}
    helps = {name: f"{descriptions(lower)[name]} (default: {x})" for name, x in usual.items()}
    add_options(group, lower, ["n_replicas", "n_buckets"], flags=flags, parse=integer,
                helps=helps, with_defaults=True)  # fmt: skip
    add_options(group, lower, ["grad_sync"], parse=words, helps=helps, with_defaults=True)
    group.set_defaults(**usual)
    text = (
        "transfers on the compute stream; over processes only for orders that survive rendezvous, "
        "such as GPipe's"
    )
    add(group, "--no-overlap", text, action="store_true")
    group = command.add_argument_group("devices")
    text = (
        "devices to run on, one name each; under torchrun, those of each process, where cuda is "
        "its own GPU (default: cpu for each)"
    )
    add(group, "--devices", text, type=_some_words)
    text = "cut the GPU that --devices names into so many devices"
    add(group, "--slices", text, type=integer)
    add(group, "--cuda-graph", "capture each step once, and replay it", action="store_true")
    group.add_argument("--timeout", type=real, metavar="SECONDS", default=60.0, help=_TIMEOUT)
    group = command.add_argument_group("output")
    add(group, "--name", "of the run directory", default=name)
    text = "its parent folder"
    add(group, "--results", text, type=Path, metavar="FOLDER", default=Path("results"))
    group = command.add_argument_group("steps")
    add(group, "--steps", steps, type=integer, default=n_steps)
    add_options(group, RunOptions, ["warm_up"], parse=integer, with_defaults=True)
    add(group, "--learning-rate", "of AdamW", type=real, default=3e-4)
    add(group, "--seed", "of weights and data", type=integer, default=0)
    return group


# The workload: stages, graphs, devices, batches.


@dataclass(frozen=True)
class Workload:
    """Arguments of `pipeexec.validate` and `pipeexec.Pipeline`, and their entry in ``run.json``."""

    stages: Sequence[nn.Module]
    graphs: dict[str, TaskGraph]
    devices: Sequence[DeviceLike]
    loss: Loss
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    record: dict[str, Any]


def workload(arguments: argparse.Namespace, processes: Processes | None = None) -> Workload:
    """Return the workload of parsed options, for one process; `_add_workload` has the options."""
    import torch

    from pipeexec.demo_models.data import replica_batches, replicas_of
    from pipeexec.demo_models.registry import split

    rate = number(arguments.learning_rate)
    if rate is None or not 0 <= rate < math.inf:
        raise ArgumentError(
            f"the learning rate must be a finite number >= 0, got {arguments.learning_rate}"
        )
    # Torch takes 64 bits; a longer seed wraps, as the seed of the weights does.
    torch.manual_seed(check_count("seed", arguments.seed, 0) % (1 << 63))
    torch.set_num_threads(1)
    model = _model(arguments)
    graphs = _graphs(arguments, processes)
    n_stages, n_devices, n_microbatches = _shape(graphs, arguments.balance)
    stages = split(model.layers, n_stages, balance=arguments.balance or None)
    batch = arguments.batch
    if batch is None:
        n_slices = next(iter(graphs.values())).n_slices  # `validate` refuses unlike graphs
        batch = _BATCH[arguments.model] * n_microbatches // n_slices
    rank, n_ranks = (0, 1) if processes is None else (processes.rank, processes.n_ranks)
    replicas = replicas_of(rank, n_ranks, arguments.n_replicas)
    record = {
        "model": arguments.model,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in model.options.items()},
        "layers_of_stages": [len(stage) for stage in stages],
        "batch": batch,
        "replicas": arguments.n_replicas,
        "seed": arguments.seed,
        "steps": arguments.steps,
    }
    return Workload(
        stages,
        graphs,
        _devices(arguments, n_devices, processes),
        model.loss,
        replica_batches(model.make_batch, batch, arguments.seed, replicas),
        lambda parameters: torch.optim.AdamW(parameters, lr=rate, capturable=arguments.cuda_graph),
        record,
    )


def _model(arguments: argparse.Namespace) -> DemoModel:
    """Return the model that the options name, with the sizes among them."""
    from pipeexec.demo_models.registry import MODELS, build_model

    spec = MODELS[check_name("model", arguments.model, MODELS)]
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    for name in sizes:
        check_name(f"option of model {arguments.model!r}:", name, spec.options)
    return build_model(arguments.model, seed=arguments.seed, **sizes)


#: Samples of a micro-batch, with which tasks take 5 ms or more on one core.
_BATCH = {"gpt": 4, "convnet": 4}


def _devices(
    arguments: argparse.Namespace, n_devices: int, processes: Processes | None
) -> Sequence[DeviceLike]:
    """Return the devices of this process."""
    if arguments.slices is None:
        n_ranks = 1 if processes is None else processes.n_ranks
        names: list[str] = arguments.devices or ["cpu"] * max(1, n_devices // n_ranks)
        return names
    from pipeexec.devices.gpu_slices import slices

    if not arguments.devices or len(arguments.devices) != 1 or processes is not None:
        raise ArgumentError(
            "--slices cuts one GPU in one process: give its name as --devices cuda:0, without "
            "torchrun"
        )
    return slices(arguments.devices[0], arguments.slices)


def _graphs(arguments: argparse.Namespace, processes: Processes | None) -> dict[str, TaskGraph]:
    """Return the graph of each row, by name: schedule, recompute mode and reduction."""
    import pipesim
    from pipesim.graph.options import GRAD_SYNC, grad_sync_by_stage, parse_values
    from pipesim.sweeps.settings import source_info

    if not arguments.schedules or not arguments.recompute or not arguments.grad_sync:
        raise ArgumentError("name at least one schedule, one recompute mode and one --grad-sync")
    infos = {info.name: info for info in map(source_info, arguments.schedules)}
    n_given = 0 if processes is None else processes.n_ranks * len(arguments.devices or ["cpu"])
    if arguments.slices is not None:
        n_given = int(arguments.slices)
    n_replicas = check_count("n_replicas", arguments.n_replicas)
    if n_given % n_replicas:
        raise ArgumentError(
            f"{n_given} devices cannot be shared by {n_replicas} replicas; give a multiple of "
            f"{n_replicas}"
        )
    for text in arguments.grad_sync:
        for value in grad_sync_by_stage(parse_values(text), 1):
            if isinstance(value, str):
                check_name("grad_sync", value, GRAD_SYNC)
    syncs = arguments.grad_sync if n_replicas > 1 else arguments.grad_sync[:1]
    n_devices = _count(
        arguments, "stages", "devices", lambda: n_given // n_replicas or _balanced(arguments, infos)
    )
    n_microbatches = _count(arguments, "microbatches", "micro-batches", lambda: 8)
    return {
        " ".join([name, recompute, *[sync] * (n_replicas > 1)]): pipesim.lower(
            info.make(n_devices, n_microbatches),
            recompute=recompute,
            n_replicas=n_replicas,
            grad_sync=sync,
            n_buckets=arguments.n_buckets,
            overlap=not arguments.no_overlap,
            hosts="one" if processes is None else "per_device",
            # Without overlap a message between processes holds its stream until it is received.
            rendezvous=arguments.no_overlap and processes is not None,
        )
        for name, info in infos.items()
        for recompute in arguments.recompute
        for sync in syncs
    }


def _count(arguments: argparse.Namespace, flag: str, what: str, default: Callable[[], int]) -> int:
    """Return a count from a flag or from files of schedules; else the default."""
    from pipesim.sweeps.settings import file_counts

    key = f"n_{what.replace('-', '')}"  # n_devices, n_microbatches
    sources = {name: file_counts(name).get(key) for name in arguments.schedules}
    if getattr(arguments, flag) is not None:
        sources[f"--{flag}"] = check_count(f"n_{flag}", getattr(arguments, flag))
    counts = {where: count for where, count in sources.items() if count is not None}
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{count} in {where}" for where, count in counts.items())
        raise ArgumentError(
            f"schedules of one validation have the same number of {what}; got {listing}: leave "
            f"--{flag} out where a file has it, and validate unlike files apart"
        )
    return next(iter(counts.values())) if counts else default()


def _balanced(arguments: argparse.Namespace, infos: Mapping[str, ScheduleInfo]) -> int:
    """Return the number of devices of the stages of --balance; 2 without it."""
    if not arguments.balance:
        return 2
    name, info = next(iter(infos.items()))
    probe = info.make(2, 8)  # every registered schedule takes these; a file has its own counts
    n_chunks = probe.n_stages // probe.n_devices
    if len(arguments.balance) % n_chunks:
        raise ArgumentError(
            f"--balance needs a multiple of {n_chunks} layer counts for {name}, one for each of a "
            f"device's stages; got {len(arguments.balance)}"
        )
    return len(arguments.balance) // n_chunks


def _shape(graphs: Mapping[str, TaskGraph], balance: Sequence[int] | None) -> tuple[int, int, int]:
    """Return the number of stages, devices and micro-batches of all graphs.

    A graph with fewer paths has the first paths of the graph with the most.
    """
    homes = {name: graph.homes.tolist() for name, graph in graphs.items()}
    widest = max(homes, key=lambda name: len(homes[name]))
    for name, paths in homes.items():
        if paths != homes[widest][: len(paths)]:
            places = (f"{x}: {' and '.join(map(str, homes[x]))}" for x in (widest, name))
            raise ArgumentError(
                "schedules of one validation run the same stages on the same devices; got the "
                f"devices of the stages {', '.join(places)}: validate them apart"
            )
    graph = graphs[widest]
    if balance and len(balance) != graph.n_stages:
        raise ArgumentError(
            f"--balance has {len(balance)} layer counts, but the schedules have {graph.n_stages} "
            f"stages on {graph.n_devices} devices; give one a stage (--stages may be left out)"
        )
    return graph.n_stages, graph.n_devices, graph.n_microbatches

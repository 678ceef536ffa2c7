"""The command line: ``pipeexec validate`` and ``pipeexec show``."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipesim.errors import ArgumentError, PipeError, PipeWarning

if TYPE_CHECKING:
    import pandas as pd

    from pipeexec.validate import Validation
    from pipesim.graph import TaskGraph
    from pipesim.registry import ScheduleInfo

__all__ = ["main"]

_EPILOG = """examples:
  pipeexec validate                                  GPipe and 1F1B, two stages on two cores
  pipeexec validate --model convnet --recompute never,always,except_last
  pipeexec validate --schedules zb_h1,zb_2p --recompute never
  pipeexec validate --stages 4 --devices cuda:0,cuda:1,cuda:2,cuda:3 --batch 64
  pipeexec show results/demo                         the table of a run directory
"""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"not whole numbers: {text!r}") from None


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
    add = run.add_argument
    add("--model", default="gpt", help="gpt or convnet (default: gpt)")
    add("--stages", type=int, help="number of devices, each of which has one stage, or the chunks "
        "of a looped or V-shaped schedule (default: 2, or as --balance or a file has)")  # fmt: skip
    add("--balance", type=_counts, help="layers of each stage, such as 4,6 (default: even work)")
    add("--microbatches", type=int, help="of a step (default: 8, or as a file has)")
    add("--batch", type=int, help="samples of a step (default: what suits the model)")
    add("--schedules", type=_words, default=["gpipe", "1f1b"], help="names or files, all with "
        "the same stages on the same devices (default: gpipe,1f1b)")  # fmt: skip
    add("--recompute", type=_words, default=["never", "always"], help="modes (default: "
        "never,always; also except_last)")  # fmt: skip
    add("--devices", type=_words, help="where to run, one name a device (default: cpu for each)")
    add("--no-overlap", action="store_true", help="transfers on the compute stream")
    add("--steps", type=int, default=21, help="measured steps of each row (default: 21)")
    add("--warm-up", type=int, default=2, help="steps before them (default: 2)")
    add("--learning-rate", type=float, default=3e-4, help="of AdamW (default: 3e-4)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--name", default="validate", help="of the run directory (default: validate)")
    add("--results", type=Path, default=Path("results"), help="its parent (default: results)")
    model = run.add_argument_group("sizes of the model")
    for option in ("layers", "width", "heads", "sequence", "image-size", "classes"):
        model.add_argument(f"--{option}", type=int)
    model.add_argument("--dropout", type=float)
    model.add_argument("--text", type=Path, help="train on this file, not on Python's library")
    show = commands.add_parser("show", help="print the table of a run directory")
    show.add_argument("directory", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PipeWarning)
        warnings.showwarning = _show_warning
        try:
            arguments = _parser().parse_args(argv)
            return {"validate": _validate, "show": _show}[arguments.command](arguments)
        except PipeError as error:
            print(f"pipeexec: error: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("pipeexec: interrupted", file=sys.stderr)
            return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"pipeexec: warning: {message}", file=sys.stderr)


def _validate(arguments: argparse.Namespace) -> int:
    import torch

    from pipeexec.models import MODELS, batches, build_model, split
    from pipeexec.run_directory import check_writable
    from pipeexec.validate import validate
    from pipesim.errors import check_count, check_name, number

    rate = number(arguments.learning_rate)
    if rate is None or not 0 <= rate < math.inf:
        raise ArgumentError(
            f"the learning rate must be a finite number >= 0, got {arguments.learning_rate}"
        )
    path = arguments.results / arguments.name
    check_writable(path)
    # Torch takes 64 bits; a longer seed wraps, as that of the weights does.
    torch.manual_seed(check_count("seed", arguments.seed, 0) % (1 << 63))
    torch.set_num_threads(1)
    spec = MODELS[check_name("model", arguments.model, MODELS)]
    sizes = {
        name: getattr(arguments, name)
        for name in ("layers", "width", "heads", "sequence", "image_size", "classes", "dropout",
                     "text")
    }  # fmt: skip
    sizes = {name: value for name, value in sizes.items() if value is not None}
    for name in sizes:
        check_name(f"option of model {arguments.model!r}:", name, spec.options)
    workload = build_model(arguments.model, seed=arguments.seed, **sizes)
    graphs = _graphs(arguments)
    n_stages, n_devices, n_microbatches = _shape(graphs, arguments.balance)
    stages = split(workload.layers, n_stages, balance=arguments.balance or None)
    batch = arguments.batch
    if batch is None:
        batch = _BATCH[arguments.model] * n_microbatches
    settings = {
        "model": arguments.model,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in workload.options.items()},
        "layers_of_stages": [len(stage) for stage in stages],
        "batch": batch,
        "seed": arguments.seed,
        "steps": arguments.steps,
    }
    validation = validate(
        stages,
        graphs,
        arguments.devices or ["cpu"] * n_devices,
        workload.loss,
        batches(workload.make_batch, batch, arguments.seed),
        lambda parameters: torch.optim.AdamW(parameters, lr=arguments.learning_rate),
        n_steps=arguments.steps,
        warm_up=arguments.warm_up,
        progress=lambda line: print(f"  {line}", file=sys.stderr),
    )
    validation.save(path, record=settings)
    print(_report(validation))
    print(f"\nwrote {path}: the figure is {path / 'overlay.png'}")
    return 0


#: Samples of a micro-batch that make tasks of 5 ms and more on one core.
_BATCH = {"gpt": 4, "convnet": 4}


def _graphs(arguments: argparse.Namespace) -> dict[str, TaskGraph]:
    """Return the rows: every schedule under every recompute mode."""
    import pipesim
    from pipesim.schedule_names import info_of

    if not arguments.schedules or not arguments.recompute:
        raise ArgumentError("name at least one schedule and one recompute mode")
    infos = {name: info_of(name) for name in arguments.schedules}
    n_devices = _count(arguments, "stages", "devices", lambda: _balanced(arguments, infos))
    n_microbatches = _count(arguments, "microbatches", "micro-batches", lambda: 8)
    return {
        f"{name} {recompute}": pipesim.lower(
            info.make(n_devices, n_microbatches),
            recompute=recompute,
            overlap=not arguments.no_overlap,
        )
        for name, info in infos.items()
        for recompute in arguments.recompute
    }


def _count(arguments: argparse.Namespace, flag: str, what: str, default: Callable[[], int]) -> int:
    """Return a count that a flag or the files of schedules give, or else the default."""
    from pipesim.errors import check_count
    from pipesim.schedule_names import counts_of_file

    key = f"n_{what.replace('-', '')}"  # n_devices, n_microbatches
    found = {name: counts_of_file(name).get(key) for name in arguments.schedules}
    if getattr(arguments, flag) is not None:
        found[f"--{flag}"] = check_count(f"n_{flag}", getattr(arguments, flag))
    counts = {where: count for where, count in found.items() if count is not None}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} in {where}" for where, count in counts.items())
        raise ArgumentError(
            f"schedules of one validation have the same number of {what}; got {each}: leave "
            f"--{flag} out where a file says it, and validate unlike files apart"
        )
    return next(iter(counts.values())) if counts else default()


def _balanced(arguments: argparse.Namespace, infos: Mapping[str, ScheduleInfo]) -> int:
    """Return how many devices the stages of --balance take; 2 without it."""
    if not arguments.balance:
        return 2
    name, info = next(iter(infos.items()))
    probe = info.make(2, 8)  # which every registered schedule takes; a file has its own counts
    n_chunks = probe.n_stages // probe.n_devices
    if len(arguments.balance) % n_chunks:
        raise ArgumentError(
            f"--balance needs a multiple of {n_chunks} layer counts for {name}, one for each of a "
            f"device's stages; got {len(arguments.balance)}"
        )
    return len(arguments.balance) // n_chunks


def _shape(graphs: Mapping[str, TaskGraph], balance: Sequence[int] | None) -> tuple[int, int, int]:
    """Return how many stages, devices and micro-batches all of the graphs have.

    Graphs of fewer paths have the first ones of the graph that has the most.
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


def _show(arguments: argparse.Namespace) -> int:
    from pipeexec.validate import load_run

    print(_report(load_run(arguments.directory)))
    return 0


def _report(validation: Validation) -> str:
    """Return the tables as text."""
    parts = [_table_text(validation.table)]
    differences = validation.differences
    clear = differences[differences["beyond_noise"]]
    if len(clear):
        parts.append(
            f"order of rows: {int(clear['right'].sum())} of {len(clear)} differences beyond noise "
            "predicted with the right sign"
        )
    parts.append(
        "error: predicted over measured makespan, minus 1 (median of the steps; worst of any "
        "step)\nreplay: the same for each step simulated from its own durations"
    )
    if validation.profile is not None:
        table = validation.profile.table
        lines = table.assign(**{c: table[c] * 1e3 for c in ("loaded", "isolated")})
        parts.append(
            "costs (ms; loaded: all stages running, isolated: one at a time)\n"
            + lines.round(3).to_string()
        )
    return "\n\n".join(parts)


def _table_text(table: pd.DataFrame) -> str:
    """Return the table of a validation with units that people read."""
    import pandas as pd

    mib = 1 << 20
    columns = {
        "predicted ms": table["predicted"].map(lambda s: f"{s * 1e3:.1f}"),
        "measured ms": table["measured"].map(lambda s: f"{s * 1e3:.1f}"),
        "error": table["error"].map("{:+.1%}".format),
        "worst": table["worst"].map("{:+.1%}".format),
        "replay": table["replay"].map("{:+.1%}".format),
        "bubble pred.": table["bubble_predicted"].map("{:.1%}".format),
        "bubble meas.": table["bubble_measured"].map("{:.1%}".format),
        "memory pred. MiB": table["memory_predicted"].map(lambda b: f"{b / mib:.1f}"),
        "memory meas. MiB": table["memory_measured"].map(lambda b: f"{b / mib:.1f}"),
    }
    return str(pd.DataFrame(columns).rename_axis(None).to_string())

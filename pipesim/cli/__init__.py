"""The command ``pipesim``: simulate one schedule, compare several, sweep over settings, list.

Settings come from arguments, from a TOML file, or from both; see `pipesim.sweeps.settings`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipesim.analysis.compare import table_of
from pipesim.analysis.critical_path import device_table
from pipesim.analysis.idle import CAUSES, Cause, idle_shares
from pipesim.costs.costs import VALUE_FIELDS
from pipesim.errors import ArgumentError, PipeError, suggestion
from pipesim.scheduling.registry import schedules
from pipesim.sweeps.grid import grid_rows, version
from pipesim.sweeps.settings import (
    COUNTS,
    FLAT,
    SETTINGS,
    Settings,
    cases,
    checked,
    place,
    read_grid,
    run,
)
from pipesim.sweeps.sweep import RESULTS, run_rows
from pipesim.timeline.timeline import Timeline
from pipesim.utils.atomic_write import check_path, check_target, write_whole, writing
from pipesim.utils.texts import real, whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["main"]

EPILOG = """\
A TOML file (--config) holds the same settings; arguments override it:

  devices = 4
  microbatches = 8
  recompute = "always"      # likewise overlap, streams, rendezvous, hosts, step, engine,
                            # replicas, layout, grad_sync, n_buckets, shard_optimizer, sharded,
                            # exchange_work, prefetch_keys, sparse_grad_sync
  per = "device"            # costs are of all that a device holds, however many stages

  [costs]                   # the fields of pipesim.Costs: one value, or one a stage
  file = "costs.json"       # optional, beside this file; the keys below override it
  forward = 1e-3
  backward = [2e-3, 2e-3, 2e-3, 3e-3]
  output_bytes = 4194304
  network = { latency = 20e-6, bandwidth = 25e9 }    # or nodes, links, or a machine:
  # network = { preset = "dgx_h100", gpus_per_device = 8, efficiency = 0.8 }

  [[schedule]]              # a table a schedule; it may override any setting above
  name = "gpipe"
  options = { backward_order = "forward" }

  [[schedule]]
  name = "1f1b"
  label = "1f1b, all kept"  # what tables and plots call it
  recompute = "never"

Where no schedule needs settings of its own, schedule = ["gpipe", "1f1b"] is enough.
Names on the command line pick tables by label or name, or else name further schedules.
A name may be a file, as orders.csv: a row a device, cells such as 0F0 and 0B0; or a grid
as text. It says how many devices and micro-batches there are. In a TOML file it is
beside that file.
"""
SWEEP_EPILOG = """\
A TOML file (--config) holds settings as for pipesim compare, and the values to combine:

  devices = 4
  costs = { forward = 1e-3, backward = 2e-3 }

  [grid]                    # every combination; the last key varies fastest
  schedule = ["gpipe", "1f1b"]
  microbatches = [4, 8, 16]
  recompute = ["never", "always"]

Keys of a grid: """

#: Flag, metavar and help of what is a setting of the same name; costs are added to them.
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
    ("--sharded", "STAGES", "embeddings that are spread over the replicas, such as 0"),
    ("--exchange-work", "STREAM", "collective or compute: stream of the work around exchanges"),
    (
        "--sparse-grad-sync",
        "MODE",
        "sharded stages exchange gradients of every micro-batch, or of all after the last",
    ),
    ("--recompute", "MODE", "listed (by the schedule), never, always or except_last"),
    ("--skips", "PAIRS", "skip connections between stages, such as 0-3,1-2"),
    ("--streams", "KIND", "copy streams per_peer, per_microbatch, or a single one a device"),
    ("--hosts", "KIND", "one host that issues for all devices, one per_device, or 0,0,1,1"),
    ("--issue-order", "ORDER", "hosts issue by clock_cycle, microbatch_major or stage_major"),
    ("--step", "MODE", "flush: end with an optimizer step; none: with the gradients"),
    ("--engine", "NAME", "engine that simulates"),
    ("--per", "stage|device", "what costs are of: a stage, or all stages of a device together"),
)
_SWITCHES = (
    ("--prefetch-keys", "stage 0, sharded, exchanges keys before the F of the micro-batch before"),
    ("--overlap", "transfers run beside compute"),
    ("--rendezvous", "a SEND waits until its RECV is reached"),
    ("--host-threads", "hosts are threads of one process, which wait for each other"),
    ("--portals", "a skip goes straight to its target, not from stage to stage"),
    ("--shard-optimizer", "each replica steps its share of the parameters, as in ZeRO-1"),
    ("--recompute-first", "every recompute of a stage comes before its first backward"),
    ("--recompute-waits", "without overlap, a gradient is received before its recompute"),
)
_CLOSED_FORMS = ("bubble", "activations", "parameters")
_FIGURES = (".pdf", ".png", ".svg")
_MS, _GIB = 1e-3, 2.0**30
_WIDTH, _ROW = 7.16, 0.25  # inches of a figure, and of a device's row or a bar in it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the arguments of the process.

    Returns
    -------
    int
        Exit status: 0; 2 after a mistake, told in one line on stderr; 130 if interrupted; 141 if
        nobody reads the output any longer.
    """
    verbose = False
    try:
        try:
            args = _parse(argv)
            verbose = args.verbose
            args.run(args)
        finally:
            sys.stdout.flush()
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:
        # Or else the interpreter may flush once more when it ends, and complain; see "Note on
        # SIGPIPE" in the documentation of Python's signal module.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (PipeError, OSError, MemoryError, OverflowError) as error:
        first, *more = str(error).splitlines() or [type(error).__name__]
        if more and not verbose:
            first, more = f"{first} (--verbose shows all)", []
        print(f"pipesim: error: {first}", *more, sep="\n", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """Raises on wrong arguments, so that every mistake ends the same way."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """Looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        print(f"pipesim {version()}")
        parser.exit()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="pipesim", description="Predict when each task of a pipeline-parallel step runs."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for work, summary in (
        (_simulate, "simulate a schedule; print its times and memory"),
        (_compare, "simulate several schedules; print a row for each"),
        (_sweep, "simulate every combination of values; print a row for each"),
        (_schedules, "list the named schedules with their closed forms"),
    ):
        command = commands.add_parser(
            work.__name__[1:],
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=work, parser=command, verbose=False)
        command.add_argument("--verbose", action="store_true", help="show all lines of an error")
        if work is _schedules:
            _add_flags(command, _FLAGS[:2])
            _add_option(command)
        else:
            _add_settings(command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = suggestion(unknown[0], re.findall(r"--[\w-]+", args.parser.format_usage()))
        args.parser.error(f"unrecognized argument {unknown[0]}{near}")
    return args


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add what simulate and compare take; settings go to ``settings.<their path>``."""
    sweeps = command.get_default("run") is _sweep
    command.epilog = f"{SWEEP_EPILOG}{', '.join(FLAT)}, options." if sweeps else EPILOG
    add = command.add_argument
    add("names", nargs="*", metavar="SCHEDULE", default=[],
        help="pipesim schedules lists them; or a file of your own, .csv or .txt")  # fmt: skip
    add("--config", type=Path, metavar="FILE.toml", help="settings; see below")
    if sweeps:
        add("--grid", action="append", type=_option, metavar="KEY=A,B,...", default=[],
            help="values of a setting; overrides the file's")  # fmt: skip
        add("--jobs", type=_value, metavar="N", default=-1, help="processes; -1: one a core")
        add("--out", type=_writable, metavar="FILE.jsonl", default=None,
            help="append rows as they come; run again, it goes on where it stopped")  # fmt: skip
    else:
        add("--plot", type=_figure, metavar="FILE", default=None, help=", ".join(_FIGURES))
        add("--idle", action="store_true", default=False, help="show what idle time waited for")
    add("--csv", type=_writable, metavar="FILE", default=None, help="what is shown, in s and bytes")
    _add_flags(command, _FLAGS)
    for flag, text in _SWITCHES:
        action = argparse.BooleanOptionalAction
        add(flag, dest=f"settings.{flag[2:].replace('-', '_')}", action=action, help=text)
    _add_option(command)
    costs = command.add_argument_group("costs", "one value, or one a stage between commas")
    costs.add_argument("--costs", dest="settings.costs.file", metavar="FILE.json",
                       help="costs to start from; the other arguments override it")  # fmt: skip
    for name in VALUE_FIELDS:
        flag = "--recompute-time" if name == "recompute" else "--" + name.replace("_", "-")
        unit = "BYTES" if name.endswith("bytes") else "SECONDS"
        costs.add_argument(flag, dest=f"settings.costs.{name}", type=_value, metavar=unit)
    costs.add_argument("--skip-bytes", dest="settings.costs.skip_bytes", type=_value,
                       metavar="BYTES", help="of each skip; the file has one for each")  # fmt: skip
    costs.add_argument("--all-reduce", dest="settings.costs.all_reduce", metavar="ALGORITHM",
                       help="of gradients, ring or tree")  # fmt: skip
    for name, unit in (("latency", "SECONDS"), ("bandwidth", "BYTES_A_SECOND")):
        dest = f"settings.costs.network.{name}"
        costs.add_argument(f"--{name}", dest=dest, type=_value, metavar=unit)


def _add_flags(command: argparse.ArgumentParser, flags: Iterable[tuple[str, str, str]]) -> None:
    for flag, metavar, text in flags:
        dest = f"settings.{flag[2:].replace('-', '_')}"
        command.add_argument(flag, dest=dest, type=_value, metavar=metavar, help=text)


def _add_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--option", dest="settings.options", action="append", type=_option, metavar="KEY=VALUE",
        help="of the schedule itself, such as n_chunks=2")  # fmt: skip


def _value(text: str) -> Any:
    """Read a number, true, false, or several of them between commas; the rest stays text.

    Whether the value is a good one is decided where it is used, wherever it comes from. Python
    also reads ``1_0`` and digits of other scripts as numbers; those stay text here.
    """
    if "," in text:
        return [_value(part) for part in text.split(",")]
    for read in (whole, real):
        if (found := read(text)) is not None:
            return found
    return {"true": True, "false": False}.get(text, text)


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, _value(value)


def _writable(text: str) -> Path:
    """Return the path if a file can be written there: found before the work, not after."""
    try:
        path = check_path("path", text, "write")
        with writing(path):
            tempfile.TemporaryFile(dir=check_target(path).parent).close()
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _figure(text: str) -> Path:
    if not text.lower().endswith(_FIGURES):
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_FIGURES)}")
    return _writable(text)


def _arguments(args: argparse.Namespace) -> Settings:
    """Return the settings that were given as arguments."""
    layer: Settings = {}
    for path, value in vars(args).items():
        layer = place(layer, path.split("."), value)
    given: Settings = layer.get("settings", {})
    if "options" in given:
        given["options"] = dict(given["options"])
    return checked("arguments", given, SETTINGS, Path())


def _cases(args: argparse.Namespace) -> list[Settings]:
    return cases(args.names, vars(args).get("config"), _arguments(args))


def _simulate(args: argparse.Namespace) -> None:
    cases = _cases(args)
    if len(cases) > 1:
        names = ", ".join(str(case["label"]) for case in cases)
        raise ArgumentError(f"simulate takes one schedule, got {names}; name one, or use compare")
    timeline = run(cases[0])
    _write_plot(args.plot, [timeline], idle=args.idle)
    if args.csv:
        timeline.save(args.csv)
    graph, devices = timeline.graph, device_table(timeline)
    print(
        f"{timeline.name}: {graph.n_devices} devices, {graph.n_stages} stages, "
        f"{graph.n_microbatches} micro-batches, recompute {graph.recompute}\n\n"
        f"makespan     {_numbers([timeline.makespan], _MS)[0]} ms\n"
        f"bubble       {timeline.bubble_fraction:.1%}\n"
        f"throughput   {_numbers([timeline.throughput])[0]} micro-batches/s\n"
        f"peak memory  {_numbers([timeline.peak_memory.max()], _GIB)[0]} GiB "
        f"(device {timeline.peak_memory.argmax()})\n"
    )
    columns = {
        "device": [str(device) for device in devices.index],
        "busy (ms)": _numbers(devices["busy"], _MS),
        "idle (ms)": _numbers(devices["idle"], _MS),
        "utilization": [f"{share:.1%}" for share in devices["utilization"]],
        "peak memory (GiB)": _numbers(devices["peak_memory"], _GIB),
    }
    print(_aligned(columns))
    if args.idle:
        causes = timeline.idle_by_cause()
        heading = {"idle (ms)": [str(device) for device in causes.index]}
        print("\n" + _aligned(heading | _causes(causes, lambda each: _numbers(each, _MS))))


def _compare(args: argparse.Namespace) -> None:
    timelines: dict[str, Timeline] = {}
    found = _cases(args)
    for case in found:
        label = str(case["label"])
        if label in timelines:
            raise ArgumentError(f"two schedules are called {label!r}; give each a label of its own")
        try:
            timelines[label] = run(case)
        except PipeError as error:
            raise type(error)(f"{label}: {error}") from error
    table = table_of(timelines)
    _write_plot(args.plot, list(timelines.values()), table, idle=args.idle)
    if args.csv:
        write_whole(args.csv, table.to_csv)
    columns = {
        "schedule": list(timelines),
        "makespan (ms)": _numbers(table["makespan"], _MS),
        "relative": [f"{ratio:.3f}" for ratio in table["relative"]],
        "bubble": [f"{share:.1%}" for share in table["bubble_fraction"]],
        "micro-batches/s": _numbers(table["throughput"]),
        "peak memory (GiB)": _numbers(table["peak_memory"], _GIB),
    }
    print(_aligned(columns))
    stages = sorted({timeline.graph.n_stages for timeline in timelines.values()})
    if len(stages) > 1 and not any("per" in case for case in found):
        counts = " and ".join(map(str, stages))
        print(f"\nnote: schedules of {counts} stages, each stage at the same costs; with --per "
              "device they are those of a device, shared by its stages")  # fmt: skip
    if args.idle:
        shares = idle_shares(timelines)
        shown = _causes(shares, lambda each: [f"{share:.1%}" for share in each])
        print("\n" + _aligned({"share of all devices' time": list(timelines)} | shown))


def _causes(
    table: pd.DataFrame, write: Callable[[pd.Series[float]], list[str]]
) -> dict[str, list[str]]:
    """Return the columns of causes that there are, as text."""
    return {
        str(cause): write(table[name])
        for cause, name in zip(Cause, CAUSES, strict=True)
        if (table[name] != 0).any()
    }


def _sweep(args: argparse.Namespace) -> None:
    config = vars(args).get("config")
    grid = read_grid(config) if config else {}
    grid |= {key: values if isinstance(values, list) else [values] for key, values in args.grid}
    listed = grid.pop("schedule", [])
    names = args.names or ([listed] if isinstance(listed, str) else listed)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"grid: schedule must be a list of names, got {listed!r}")
    found = cases(names, config, _arguments(args), more=("grid",))
    show = sys.stderr.isatty()
    rows = grid_rows(found, grid)
    table = run_rows(rows, path=args.out, n_jobs=args.jobs, backend=None, progress=show)
    if args.csv:
        write_whole(args.csv, lambda file: table.to_csv(file, index=False))
    given = table.drop(columns=[*RESULTS])
    columns = {
        **{str(key): ["-" if v != v or v is None else str(v) for v in given[key]] for key in given},
        "makespan (ms)": _numbers(table["makespan"], _MS),
        "bubble": [f"{share:.1%}" if share == share else "-" for share in table["bubble_fraction"]],
        "micro-batches/s": _numbers(table["throughput"]),
        "peak memory (GiB)": _numbers(table["peak_memory"], _GIB),
    }
    print(_aligned(columns))
    for row, error in table["error"].dropna().items():
        print(f"row {row}: {error}")


def _schedules(args: argparse.Namespace) -> None:
    given = _arguments(args)
    counts = {"n_devices": 4, "n_microbatches": 8}
    counts |= {COUNTS[key]: count for key, count in given.items() if key in COUNTS}
    table = schedules(**counts, **given.get("options", {}))
    print("p = {n_devices} devices, m = {n_microbatches} micro-batches; stages of equal cost, "
          "F = I = W, B = I + W, free transfers\n".format(**counts))  # fmt: skip
    columns = {
        "schedule": list(table.index),
        "bubble": [f"{share:.1%}" for share in table["bubble"]],
        "activations": [f"{count:.4g}" for count in table["activations"]],
        "parameters": [f"{count:.4g}" for count in table["parameters"]],
        "options": [options or "-" for options in table["options"]],
        "summary": list(table["summary"]),
    }
    columns = {k: ["-" if cell.startswith("nan") else cell for cell in v]
               for k, v in columns.items()}  # fmt: skip
    print(_aligned(columns, "<") + "\n")
    for name, row in table.iterrows():
        notes = [f"{form} {text}" for form in _CLOSED_FORMS if (text := row[f"{form}_formula"])]
        notes += [f"assuming {row['assumes']}"] if row["assumes"] else []
        notes += [f"takes {row['counts']}"] if row["counts"] != "any" else []
        print(f"{name}: {'; '.join([*notes, row['source']] if row['source'] else notes)}")


def _numbers(values: Iterable[float], unit: float = 1.0) -> list[str]:
    """Return values in ``unit``, all with the decimals that show five digits of the largest."""
    scaled = [float(value) / unit for value in values]
    largest = max((value for value in scaled if not math.isnan(value)), default=0.0)
    digits = math.floor(math.log10(largest)) if 0 < largest < math.inf else 4
    decimals = min(max(4 - digits, 0), 9)
    return ["-" if math.isnan(value) else f"{value:.{decimals}f}" for value in scaled]


def _aligned(columns: dict[str, list[str]], align: str = ">") -> str:
    """Return a table as text, its first column to the left."""
    widths = [max(map(len, [head, *cells])) for head, cells in columns.items()]
    aligns = ["<", *align * (len(widths) - 1)]
    return "\n".join(
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths, strict=True)).rstrip()
        for row in [tuple(columns), *zip(*columns.values(), strict=True)]
    )


def _write_plot(
    path: Path | None,
    timelines: Sequence[Timeline],
    table: pd.DataFrame | None = None,
    *,
    idle: bool = False,
) -> None:
    """Draw timelines below each other on one scale of time; of a table, bars above them.

    With ``idle``, what each of them waited for is below them, on a scale of its own.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    from pipesim.plot.charts import bars
    from pipesim.plot.idle_chart import idle as draw_idle
    from pipesim.plot.paper_figure import save
    from pipesim.plot.timelines import timeline as draw_timeline

    heights = [0.9 + _ROW * min(timeline.n_devices, 24) for timeline in timelines]
    n_rows = len(heights)
    heights += heights if idle else []
    heights[:0] = [] if table is None else [0.4 + _ROW * len(table)]
    first = 0 if table is None else 1
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if table is not None:
        for place, column in enumerate(("makespan", "peak_memory")):
            bars(table, ax=figure.add_subplot(grid[0, place]), column=column)
    drawn = []
    for row, timeline in enumerate(timelines, first):
        ax = figure.add_subplot(grid[row, :])
        drawn.append(draw_timeline(timeline, ax=ax, unit="ms", title=timeline.name))
    _share_scale(drawn)
    drawn = []
    for row, timeline in enumerate(timelines if idle else (), first + n_rows):
        ax = figure.add_subplot(grid[row, :])
        drawn.append(draw_idle(timeline, ax=ax, unit="ms", title=f"{timeline.name}, idle"))
    _share_scale(drawn)
    save(figure, path)


def _share_scale(axes: Sequence[Axes]) -> None:
    """Let axes of time that begin at 0 all end where the last of them does."""
    last = max((ax.get_xlim()[1] for ax in axes), default=0.0)
    for ax in axes:
        ax.set_xlim(0, last)

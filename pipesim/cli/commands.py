"""The commands: simulate one schedule, compare several, sweep over settings, list the schedules."""

from __future__ import annotations

import argparse
import sys

from pipesim.analysis.compare import KNOWN_RESULTS, table_of, with_gaps
from pipesim.analysis.critical_path import device_table
from pipesim.analysis.idle import idle_shares
from pipesim.cli.arguments import argument_settings
from pipesim.cli.figures import write_figure
from pipesim.cli.memory_texts import graph_line, memory_changes_text, result_lines
from pipesim.cli.tables import GIB, cause_columns, known_result_columns
from pipesim.errors import ArgumentError, PipeError
from pipesim.ops import COPIES
from pipesim.scheduling.registry import schedules
from pipesim.sweeps.grid import grid_rows
from pipesim.sweeps.settings import COUNTS, Settings, cases, read_grid, run
from pipesim.sweeps.sweep import RESULTS, run_rows
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import write_whole
from pipesim.utils.text_tables import align_columns
from pipesim.utils.units import format_numbers

_CLOSED_FORMS = ("bubble", "activations", "parameters")
_MS = 1e-3


def _cases(args: argparse.Namespace) -> list[Settings]:
    """Return the settings of each schedule to simulate."""
    return cases(args.names, vars(args).get("config"), argument_settings(args))


def simulate(args: argparse.Namespace) -> None:
    """Simulate a schedule; print its times and memory."""
    cases = _cases(args)
    if len(cases) > 1:
        names = ", ".join(str(case["label"]) for case in cases)
        raise ArgumentError(f"simulate takes one schedule, got {names}; name one, or use compare")
    timeline = run(cases[0])
    write_figure(args.plot, [timeline], idle=args.idle)
    if args.csv:
        timeline.save(args.csv)
    devices = device_table(timeline)
    print(
        f"{graph_line(timeline)}\n\n"
        f"makespan     {format_numbers([timeline.makespan], _MS)[0]} ms\n"
        f"bubble       {timeline.bubble_fraction:.1%}\n"
        f"throughput   {format_numbers([timeline.throughput])[0]} micro-batches/s\n"
        f"peak memory  {format_numbers([timeline.peak_memory.max()], GIB)[0]} GiB "
        f"(device {timeline.peak_memory.argmax()})\n{_host_line(timeline)}{result_lines(timeline)}"
    )
    columns = {
        "device": [str(device) for device in devices.index],
        "busy (ms)": format_numbers(devices["busy"], _MS),
        "idle (ms)": format_numbers(devices["idle"], _MS),
        "utilization": [f"{share:.1%}" for share in devices["utilization"]],
        "peak memory (GiB)": format_numbers(devices["peak_memory"], GIB),
    }
    print(align_columns(columns))
    if timeline.fits is False:
        print("\n" + memory_changes_text(timeline))
    if args.idle:
        causes = timeline.idle_by_cause()
        heading = {"idle (ms)": [str(device) for device in causes.index]}
        print(
            "\n"
            + align_columns(
                heading | cause_columns(causes, lambda seconds: format_numbers(seconds, _MS))
            )
        )


def _host_line(timeline: Timeline) -> str:
    """Return a line with the most memory that a host holds; empty if nothing is offloaded."""
    if not timeline.graph.is_op(COPIES).any():
        return ""
    held = timeline.peak_host_memory
    return f"host memory  {format_numbers([held.max()], GIB)[0]} GiB (host {held.argmax()})\n"


def compare(args: argparse.Namespace) -> None:
    """Simulate several schedules; print a row for each."""
    timelines: dict[str, Timeline] = {}
    settings = _cases(args)
    for case in settings:
        label = str(case["label"])
        if label in timelines:
            raise ArgumentError(f"two schedules are called {label!r}; give each a label of its own")
        try:
            timelines[label] = run(case)
        except PipeError as error:
            raise type(error)(f"{label}: {error}") from error
    table = with_gaps(table_of(timelines), timelines)
    write_figure(args.plot, list(timelines.values()), table, idle=args.idle)
    if args.csv:
        write_whole(args.csv, table.to_csv)
    columns = {
        "schedule": list(timelines),
        "makespan (ms)": format_numbers(table["makespan"], _MS),
        "relative": [f"{ratio:.3f}" for ratio in table["relative"]],
        "bubble": [f"{share:.1%}" for share in table["bubble_fraction"]],
        "micro-batches/s": format_numbers(table["throughput"]),
        "peak memory (GiB)": format_numbers(table["peak_memory"], GIB),
        **known_result_columns(table),
    }
    print(align_columns(columns))
    stages = sorted({timeline.graph.n_stages for timeline in timelines.values()})
    if len(stages) > 1 and not any(
        "per" in case or "transformer" in case.get("costs", {}) for case in settings
    ):
        counts = " and ".join(map(str, stages))
        print(f"\nnote: schedules of {counts} stages, each stage at the same costs; with --per "
              "device they are those of a device, shared by its stages")  # fmt: skip
    if args.idle:
        shares = idle_shares(timelines)
        shown = cause_columns(shares, lambda column: [f"{share:.1%}" for share in column])
        print("\n" + align_columns({"share of all devices' time": list(timelines)} | shown))


def sweep(args: argparse.Namespace) -> None:
    """Simulate every combination of values; print a row for each."""
    config = vars(args).get("config")
    grid = read_grid(config) if config else {}
    grid |= {key: values if isinstance(values, list) else [values] for key, values in args.grid}
    listed = grid.pop("schedule", [])
    names = args.names or ([listed] if isinstance(listed, str) else listed)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ArgumentError(f"grid: schedule must be a list of names, got {listed!r}")
    settings = cases(names, config, argument_settings(args), other_tables=("grid",))
    show = sys.stderr.isatty()
    rows = grid_rows(settings, grid)
    table = run_rows(rows, path=args.out, n_jobs=args.jobs, backend=None, progress=show)
    if args.csv:
        write_whole(args.csv, lambda file: table.to_csv(file, index=False))
    own = {key for row in rows for key in row.shown}
    further = [name for name in KNOWN_RESULTS if name in table and name not in own]
    shown = table.drop(columns=[*RESULTS, *further])
    columns = {
        **{str(key): ["-" if v != v or v is None else str(v) for v in shown[key]] for key in shown},
        "makespan (ms)": format_numbers(table["makespan"], _MS),
        "bubble": [f"{share:.1%}" if share == share else "-" for share in table["bubble_fraction"]],
        "micro-batches/s": format_numbers(table["throughput"]),
        "peak memory (GiB)": format_numbers(table["peak_memory"], GIB),
        **known_result_columns(table, own),
    }
    print(align_columns(columns))
    for row, error in table["error"].dropna().items():
        print(f"row {row}: {error}")


def list_schedules(args: argparse.Namespace) -> None:
    """List the named schedules with their closed forms."""
    settings = argument_settings(args)
    counts = {"n_devices": 4, "n_microbatches": 8}
    counts |= {COUNTS[key]: count for key, count in settings.items() if key in COUNTS}
    table = schedules(**counts, **settings.get("options", {}))
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
    print(align_columns(columns, "<") + "\n")
    for name, row in table.iterrows():
        notes = [f"{form} {text}" for form in _CLOSED_FORMS if (text := row[f"{form}_formula"])]
        notes += [f"assuming {row['assumes']}"] if row["assumes"] else []
        notes += [f"takes {row['counts']}"] if row["counts"] != "any" else []
        print(f"{name}: {'; '.join([*notes, row['source']] if row['source'] else notes)}")

"""Commands: simulate a schedule, compare several, sweep, list the schedules, calibrate, plan."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.analysis.compare import KNOWN_RESULTS, known_results, table_of, with_gaps
from pipesim.analysis.critical_path import device_table
from pipesim.analysis.idle import CAUSES, idle_shares
from pipesim.analysis.idle_gaps import Cause
from pipesim.analysis.prediction_interval import steps_like
from pipesim.calibration.fit_gpu import Calibration, steps_text
from pipesim.cli.arguments import argument_settings, plan_settings
from pipesim.costs.cost_fields import Workload
from pipesim.errors import ArgumentError, PipeError, check_count, suggestion
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers, as_layers
from pipesim.models.transformer import Transformer
from pipesim.ops import COPIES
from pipesim.planning.cluster import Cluster
from pipesim.planning.plan import plan as find_plans
from pipesim.scheduling.registry import schedules
from pipesim.simulation.distributions import LogNormal
from pipesim.simulation.noise import Noise
from pipesim.sweeps.settings import COUNTS, MODEL, Settings, cases, make_model, read_grid, run
from pipesim.sweeps.sweep import RESULTS, grid_rows, run_rows
from pipesim.timeline.memory_limit import excess_text, excesses
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import write_whole
from pipesim.utils.texts import align_columns, format_numbers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pipesim.planning.plans import Plans


# Tables, lines and figures of results

GIB, _MS = 2.0**30, 1e-3


def known_result_columns(table: pd.DataFrame, own: Collection[str] = ()) -> dict[str, list[str]]:
    """Return intervals, limits, fits, tokens, MFU and gaps as text, where a table has them.

    ``own`` names columns of the table that are settings, and so are shown already.
    """
    forms: dict[str, tuple[str, Callable[[pd.Series[Any]], list[str]]]] = {
        "low": ("80 % from (ms)", lambda column: format_numbers(column, _MS)),
        "high": ("to (ms)", lambda column: format_numbers(column, _MS)),
        "memory_limit": ("limit (GiB)", lambda column: format_numbers(column, GIB)),
        "fits": ("fits", lambda column: [{True: "yes", False: "no"}.get(x, "-") for x in column]),
        "tokens_per_second": ("tokens/s", format_numbers),
        "mfu": ("MFU", lambda column: ["-" if x != x else f"{x:.1%}" for x in column]),
        "gap": ("gap", lambda column: ["-" if x != x else f"{x:.1%}" for x in column]),
    }
    return {
        head: form(table[name].astype(object).fillna(math.nan))
        for name, (head, form) in forms.items()
        if name in table and name not in own
    }


def cause_columns(
    table: pd.DataFrame, format_column: Callable[[pd.Series[float]], list[str]]
) -> dict[str, list[str]]:
    """Return the columns of a table of idle time as text, for each cause that occurs."""
    return {
        str(cause): format_column(table[name])
        for cause, name in zip(Cause, CAUSES, strict=True)
        if (table[name] != 0).any()
    }


#: Width of a figure, and height of a device's row or a bar in it (inches).
_WIDTH, _ROW = 7.16, 0.25
#: Height of a figure of points, and width of one of measured over predicted seconds (inches).
_HEIGHT = 3.5


def write_scatter(path: Path | None, plot: Callable[..., object], width: float) -> None:
    """Write a figure of what ``plot(ax=...)`` draws; nothing without a path."""
    if path is None:
        return
    from pipesim.plot.paper_figure import save
    from pipesim.utils.packages import Figure

    figure = Figure(figsize=(width, _HEIGHT), layout="constrained")
    plot(ax=figure.add_subplot())
    save(figure, path)


def write_figure(
    path: Path | None,
    timelines: Sequence[Timeline],
    table: pd.DataFrame | None = None,
    *,
    idle: bool = False,
) -> None:
    """Write a figure of timelines below each other, on one time scale; nothing without a path.

    Makespans and peak memories in ``table`` of `pipesim.compare` are bars above the timelines. With
    ``idle`` the causes of idle time are below the timelines, on their own time scale.
    """
    if path is None:
        return
    from pipesim.plot.charts import bars
    from pipesim.plot.charts import idle as draw_idle
    from pipesim.plot.paper_figure import save
    from pipesim.plot.timelines import timeline as draw_timeline
    from pipesim.utils.packages import Figure

    heights = [0.9 + _ROW * min(timeline.n_devices, 24) for timeline in timelines]
    n_rows = len(heights)
    heights += heights if idle else []
    heights[:0] = [] if table is None else [0.4 + _ROW * len(table)]
    first = 0 if table is None else 1
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    if table is not None:
        for position, column in enumerate(("makespan", "peak_memory")):
            bars(table, ax=figure.add_subplot(grid[0, position]), column=column)
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
    """Set the end of all time axes, which begin at 0, to that of the longest."""
    last = max((ax.get_xlim()[1] for ax in axes), default=0.0)
    for ax in axes:
        ax.set_xlim(0, last)


_FITS = {True: "fits", False: "does not fit", None: "unknown whether it fits: costs have no bytes"}


def graph_line(timeline: Timeline) -> str:
    """Return a line with the schedule's name, the numbers of devices and others, and recompute."""
    graph = timeline.graph
    work = None if timeline.costs is None else timeline.costs.workload
    devices, recompute = f"{graph.n_devices} devices", f"recompute {graph.recompute}"
    if isinstance(work, Workload) and work.gpus_per_device > 1:
        n_gpus = graph.n_devices * work.gpus_per_device
        devices += f" of {work.gpus_per_device} GPUs ({n_gpus} GPUs)"
    settings = work.settings if isinstance(work, Workload) else None
    if settings and (layers := settings.get("recompute", "none")) != "none":
        recompute = f"recompute {layers} in backwards, {graph.recompute} as tasks"
    return (
        f"{timeline.name}: {devices}, {graph.n_stages} stages, {graph.n_microbatches} "
        f"micro-batches, {recompute}"
    )


def result_lines(timeline: Timeline) -> str:
    """Return a line for each of limit, tokens a second and MFU that is known; "" for none."""
    results = known_results(timeline)
    lines = []
    if "memory_limit" in results:
        limit = format_numbers([results["memory_limit"]], GIB)[0]
        lines.append(f"limit        {limit} GiB, {_FITS[timeline.memory.fits]}")
    if "tokens_per_second" in results:
        lines.append(f"tokens       {format_numbers([results['tokens_per_second']])[0]} tokens/s")
    if "mfu" in results:
        lines.append(f"MFU          {results['mfu']:.1%}")
    return "".join(f"{line}\n" for line in lines)


def memory_changes_text(timeline: Timeline) -> str:
    """Return the devices that need too much, a line each, and a table of changes that fit."""
    lines = [excess_text(excess) for excess in excesses(timeline)]
    table = timeline.memory.changes_that_fit()
    if table.empty:
        if table.attrs["advice"]:
            lines.append(table.attrs["advice"])
        return "\n".join(
            [*lines, "none of the changes that were tried fits, alone or with another"]
        )
    columns = {
        "change that fits": [str(change) for change in table["change"]],
        "makespan (ms)": format_numbers(table["makespan"], _MS),
        "relative": [f"{ratio:.3f}" for ratio in table["relative"]],
        "peak memory (GiB)": format_numbers(table["peak_memory"], GIB),
    }
    slow = table[table["note"] != ""]
    notes = [f"{change}: {note}" for change, note in zip(slow["change"], slow["note"], strict=True)]
    return "\n".join([*lines, "", align_columns(columns), *notes])


# Simulate one schedule, compare several, sweep over settings, list the schedules


def _cases(args: argparse.Namespace) -> list[Settings]:
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
        f"makespan     {format_numbers([timeline.makespan], _MS)[0]} ms\n{_interval_line(timeline)}"
        f"bubble       {timeline.bubble_fraction:.1%}\n"
        f"throughput   {format_numbers([timeline.throughput])[0]} micro-batches/s\n"
        f"peak memory  {_peak_text(timeline)}\n{_host_line(timeline)}{result_lines(timeline)}"
    )
    columns = {
        "device": [str(device) for device in devices.index],
        "busy (ms)": format_numbers(devices["busy"], _MS),
        "idle (ms)": format_numbers(devices["idle"], _MS),
        "utilization": [f"{share:.1%}" for share in devices["utilization"]],
        "peak memory (GiB)": format_numbers(devices["peak_memory"].replace(0.0, math.nan), GIB),
    }
    print(align_columns(columns))
    if timeline.memory.fits is False:
        print("\n" + memory_changes_text(timeline))
    if args.idle:
        causes = timeline.why.idle_by_cause()
        heading = {"idle (ms)": [str(device) for device in causes.index]}
        print(
            "\n"
            + align_columns(
                heading | cause_columns(causes, lambda seconds: format_numbers(seconds, _MS))
            )
        )


def _peak_text(timeline: Timeline) -> str:
    """Return the peak of the fullest device, or that it is not known."""
    peak = timeline.memory.peak
    if not peak.any():
        return "-: no bytes are given, such as --activation-bytes and --parameter-bytes"
    return f"{format_numbers([peak.max()], GIB)[0]} GiB (device {peak.argmax()})"


def _interval_line(timeline: Timeline) -> str:
    """Return a line of where measured steps are; empty without a GPU's data sheet."""
    steps = steps_like(timeline)
    if steps is None:
        return ""
    interval = timeline.interval()
    low, high = format_numbers([interval.low, interval.high], _MS)
    return f"measured     {low} to {high} ms: {interval.basis}\n"


def _host_line(timeline: Timeline) -> str:
    """Return a line with the most memory that a host holds; empty if nothing is offloaded."""
    if timeline.graph.offload_to == "peer" or not timeline.graph.is_op(COPIES).any():
        return ""
    held = timeline.memory.peak_host
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
    table = run_rows(rows, path=args.out, n_jobs=args.n_jobs, backend=None, progress=show)
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
        forms = ("bubble", "activations", "parameters")
        notes = [f"{form} {text}" for form in forms if (text := row[f"{form}_formula"])]
        notes += [f"assuming {row['assumes']}"] if row["assumes"] else []
        notes += [f"takes {row['counts']}"] if row["counts"] != "any" else []
        print(f"{name}: {'; '.join([*notes, row['source']] if row['source'] else notes)}")


# Fit constants of a GPU to measured steps

#: Rows with the largest errors that are printed.
_WORST = 5


def calibrate(args: argparse.Namespace) -> None:
    """Fit constants of a GPU to measured steps; print them, and the errors of predictions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fitted = GPU.fit(
            args.rows, gpu=args.gpu, network=args.network, constants=args.constants,
            framework=args.framework, prior=args.prior,
        )  # fmt: skip
    write_scatter(args.plot, fitted.plot, _HEIGHT)
    if args.csv:
        write_whole(args.csv, lambda file: fitted.rows.to_csv(file, index=False))
    if args.json:
        fitted.save(args.json)
    place = f" in {args.network}" if args.network else ""
    steps = steps_text("steps", len(fitted.rows), fitted.rows["configuration"].nunique())
    columns = {"error of steps": [str(kind) for kind in fitted.errors.index]}
    for name, errors in fitted.errors.items():
        columns[str(name)] = [f"{error:.1%}" for error in errors]
    print(
        f"{len(fitted.constants)} constants fitted to {steps}, from {args.gpu}{place}\n\n"
        f"{_constants(fitted.constants)}\n\n{align_columns(columns)}\n\n{_worst(fitted.rows)}"
    )
    texts = dict.fromkeys(str(warning.message) for warning in caught)
    print("".join(f"\nwarning: {text}" for text in texts), end="\n" if texts else "")
    print(f"\n{_statement(fitted, args.network)}")


def _constants(table: pd.DataFrame) -> str:
    determined = [
        "no: kept" if not yes else note if "weakly" in note else f"yes, {note}".rstrip(", ")
        for yes, note in zip(table["determined"], table["note"], strict=True)
    ]
    return align_columns(
        {
            "constant": [str(name) for name in table.index],
            "value": [f"{value:.4g}" for value in table["value"]],
            "start": [f"{value:.4g}" for value in table["start"]],
            "prior": [f"{width:.0%}" for width in table["prior"]],
            "standard error": [f"{error:.1%}" for error in table["standard_error"]],
            "determined": determined,
        }
    )


def _worst(rows: pd.DataFrame) -> str:
    """Return the rows with the largest errors when left out."""
    order = rows["error_left_out"].abs().sort_values(ascending=False, kind="stable").index
    worst = rows.loc[order[:_WORST]]
    return align_columns(
        {
            "worst steps": [str(label) for label in worst["label"]],
            "measured (ms)": format_numbers(worst["measured"], _MS),
            "predicted (ms)": format_numbers(worst["predicted"], _MS),
            "error": [f"{error:+.1%}" for error in worst["error"]],
            "left out": [f"{error:+.1%}" for error in worst["error_left_out"]],
        }
    )


def _statement(fitted: Calibration, network: str | None) -> str:
    """Return Python that makes the fitted GPU and network, and costs of them."""
    gpu = fitted.gpu
    values = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    texts = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in values.items()
    ]
    lines = [f"gpu = ps.GPU({', '.join(texts)})"]
    if network:
        share = f"efficiency={fitted.network_efficiency:.4g}"
        if fitted.nic_efficiency is not None:
            share += f", nic_efficiency={fitted.nic_efficiency:.4g}"
        scaled = f".scaled(latency={fitted.network_latency:.4g})"
        scaled = scaled if fitted.network_latency != 1 else ""
        lines.append(
            f"network = ps.Network.preset({network!r}, {share}, gpus_per_device=1){scaled}"
        )
    argument = ", network=network" if network else ""
    lines.append(f"costs = model.costs(n_stages, microbatch_size=1, gpu=gpu{argument})")
    return "\n".join(lines)


# Plan a training run: its best configurations on a cluster


def plan(args: argparse.Namespace) -> None:
    """Find the best configurations; print them, and what else was asked for."""
    n_best = check_count("--best", args.best)
    if args.explain is not None:
        check_count("--explain", args.explain, minimum=0)
    settings = plan_settings(args)
    if "global_batch" not in settings:
        raise ArgumentError("global_batch is missing; give --global-batch, or global_batch in TOML")
    if "noise" in settings:
        settings["noise"] = Noise(seed=0, task=LogNormal(settings["noise"]))
    model, cluster = _model(settings.pop("model")), settings.pop("cluster")
    if "machine" not in cluster and "network" not in cluster:
        raise ArgumentError("--cluster is missing; give such as --cluster dgx_h100 --gpus 64")
    cluster = Cluster.from_dict(cluster)
    plans = find_plans(model, cluster, n_best=n_best, **settings, progress=sys.stderr.isatty())
    if not plans.complete and not len(plans):
        raise KeyboardInterrupt(" before the first configuration was simulated: there is no plan")
    write_scatter(args.plot, plans.plot, _WIDTH)
    if args.csv:
        plans.to_csv(args.csv)
    print(plans.summary(n_best))
    for text in _further(args, plans):  # which may be refused, after the plan is printed
        print(f"\n{text}")
    if not plans.complete:
        raise KeyboardInterrupt


def _further(args: argparse.Namespace, plans: Plans) -> Iterator[str]:
    if args.explain is not None:
        yield str(plans.explain(0, args.explain))
    if args.megatron:
        yield plans.to_megatron()
    if args.torchtitan:
        yield plans.to_torchtitan(args.order).rstrip()
    elif args.order:
        plans.best.schedule.save(args.order)


def _model(values: Mapping[str, Any]) -> Transformer | Layers:
    name = values.get("model")
    if isinstance(name, str) and name.lower().endswith(".csv"):
        if len(values) > 1:
            raise ArgumentError(f"{name} has measured layers, whose sizes cannot be changed")
        return as_layers(name)
    for key in values:
        if key not in MODEL:
            near = suggestion(key, MODEL[1:])
            raise ArgumentError(
                f"unknown size {key!r} of a model{near}; known: {', '.join(MODEL[1:])}"
            )
    if not values:
        raise ArgumentError("MODEL is missing; name one, such as llama3_70b, or give its sizes")
    return make_model(values)

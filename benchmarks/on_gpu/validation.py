"""Steps ``validation-N``: gradients on N slices, then predictions and measured steps.

The step ``bfloat16`` validates in another type of numbers, with tasks a fraction as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from on_gpu.bench import (
    GROUPS,
    Bench,
    counted_replays,
    lowered,
    messages_timed_once,
    noted_warnings,
    sgd,
)
from on_gpu.gradients import GRADIENTS, gradient_error
from on_gpu.prediction import predicted, sheet_of, slice_rate
from on_gpu.report import Report
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.validation.result import Validation
from pipeexec.validation.validate import validate

#: Largest error of the makespan, with CUDA graphs and without.
TARGETS = {True: 0.03, False: 0.05}
Names = Sequence[tuple[str, dict[str, Any]]]
#: Predicted makespans (s) by the data sheet, by schedule and overlap.
Sheet = dict[tuple[str, bool], float]
_TITLE = (
    f"{'schedule':>18} {'graph':>5} {'overlap':>7} {'sheet ms':>9} {'predicted':>9} "
    f"{'measured':>9} {'error':>7} {'worst':>7} {'replay':>7} {'launch us':>9} {'host':>5}"
)


def validation(bench: Bench, report: Report, n: int) -> None:
    """Compare gradients, then validate schedules on ``n`` slices; each line at once."""
    m, samples = 2 * n, bench.samples(n)
    report.add(f"{n} slices; {2 * n} blocks of width {bench.width}, {m} micro-batches of {samples} "
               f"x {bench.sequence} tokens; float32")  # fmt: skip
    kinds = bench.kinds
    _gradients(bench, report, n, kinds[:1] if n == 8 or (bench.brief and n > 2) else kinds)
    named_sheet = sheet_of(bench)
    sheet: Sheet = {}
    if named_sheet is not None:
        table = predicted(bench, named_sheet[1], [n])
        sheet = {(row.schedule, row.overlap): row.makespan for row in table.itertuples()}
    _record_work(bench, report, n)
    _title(report)
    measured: dict[tuple[bool, str], dict[str, Any]] = {}
    with messages_timed_once(bench):
        for cuda_graph in kinds:
            for number, group in enumerate(GROUPS):
                rows = _validated(
                    bench, report, n, group, sheet, cuda_graph=cuda_graph, overlap=True
                )
                measured |= {(cuda_graph, name): row for name, row in rows.items()}
                if number == 0 and not (bench.dry or bench.brief) and (cuda_graph or n < 8):
                    _validated(bench, report, n, group, sheet, cuda_graph=cuda_graph, overlap=False)
        if n == 2:
            _noise_floor(bench, report, n, kinds[0], measured[kinds[0], "1f1b"])


def in_bfloat16(bench: Bench, report: Report, n: int) -> None:
    """Validate schedules of one placement on ``n`` slices, with bfloat16 on tensor cores."""
    bench.dtype = torch.bfloat16
    report.add(f"{n} slices; as validation-{n}, all in bfloat16; no gradients are compared")
    _record_work(bench, report, n)
    _title(report)
    with messages_timed_once(bench):
        for cuda_graph in bench.kinds:
            _validated(bench, report, n, GROUPS[0], {}, cuda_graph=cuda_graph, overlap=True)


def _record_work(bench: Bench, report: Report, n: int) -> None:
    """Record the operations of a step, and those a second of a slice by the data sheet."""
    layers, named_sheet = bench.layer_costs(n).layers, sheet_of(bench)
    report.record(
        "work", slices=n, dtype=str(bench.dtype).removeprefix("torch."),
        flops=2 * n * sum(x.flops for layer in layers for x in (*layer.forward, *layer.backward)),
        slice_rate=None if named_sheet is None else slice_rate(named_sheet[1], n, bench.dtype),
    )  # fmt: skip


def _noise_floor(
    bench: Bench, report: Report, n: int, cuda_graph: bool, first: dict[str, Any]
) -> None:
    """Validate 1F1B again, with another calibration: less than this difference means nothing."""
    again = _validated(
        bench, report, n, (("1f1b", {}),), {}, cuda_graph=cuda_graph, overlap=True, name="again"
    )["1f1b"]
    difference, ratio = again["error"] - first["error"], again["measured"] / first["measured"] - 1
    report.record(
        "noise", slices=n, schedule="1f1b", cuda_graph=cuda_graph, first_error=first["error"],
        second_error=again["error"], error_difference=difference, measured_ratio=ratio,
    )  # fmt: skip
    report.add(
        f"{'':<6} noise floor, 1f1b again: error by {difference:+.1%}, measured by {ratio:+.1%}"
    )


def _title(report: Report) -> None:
    report.add("\nsheet: makespan predicted from the data sheet alone; predicted: from calibration "
               "steps")  # fmt: skip
    report.add("error: predicted over measured makespan - 1, median of the steps; worst: of any; "
               "replay: from the step's own durations")  # fmt: skip
    report.add("host: seconds in which the host issued a step, or launched its graph, over its "
               "makespan; full queues of the GPU block the host, too")  # fmt: skip
    report.add("one clock for all slices of a GPU, so no clock error\n")
    report.add(f"{'':<6} {_TITLE}")


def _gradients(bench: Bench, report: Report, n: int, kinds: Sequence[bool]) -> None:
    report.add("\ngradients against the unsplit model's, relative to the largest of a parameter")
    for name, options in (item for group in GROUPS for item in group):
        for cuda_graph in kinds:
            error = gradient_error(bench, name, n, cuda_graph, **options)
            report.record("gradients", slices=n, schedule=name, cuda_graph=cuda_graph, error=error)
            what = f"{name}{' as a CUDA graph' * bench.captures(cuda_graph)}: {error:.1e}"
            report.check(error <= GRADIENTS, f"{what} (limit {GRADIENTS:g})")


def _validated(
    bench: Bench, report: Report, n: int, group: Names, sheet: Sheet, *, cuda_graph: bool,
    overlap: bool, name: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Validate graphs that share costs, and say a line each; return their rows."""
    m, n_steps = 2 * n, bench.pick(3 if n == 8 else 5, 2, brief=3)
    report.begin()
    devices = bench.devices(n)
    note = next((str(device.note) for device in devices if getattr(device, "note", "")), "")
    graphs = {name: lowered(name, n, m, overlap, **options) for name, options in group}
    n_stages = next(iter(graphs.values())).n_stages
    batches = (bench.batch(m * bench.samples(n), seed) for seed in range(10_000))
    with noted_warnings(report.add), counted_replays() as replays:
        result = validate(
            bench.stages(n_stages, 2 * n), graphs, devices, cross_entropy, batches, sgd,
            n_steps=n_steps, warm_up=bench.pick(3, 1),
            cuda_graph=bench.captures(cuda_graph),
        )  # fmt: skip
        count = replays()
    allocated = bench.release()
    kind = "graph" if cuda_graph else "eager"
    title = name or f"{kind}-{'on' if overlap else 'off'}-{group[0][0]}"
    bench.keep(result, title, slices=n, overlap=overlap, cuda_graph=cuda_graph)
    if name:
        return {key: result.table.loc[key] for key in result.rows}
    for key in result.rows:
        _row(bench, report, n, key, result, sheet.get((key, overlap)), cuda_graph=cuda_graph,
             overlap=overlap, allocated=allocated, note=note)  # fmt: skip
    if bench.captures(cuda_graph):
        # Calibration's two pipelines, and each row's, in every measured round.
        least = n_steps * (2 + len(graphs))
        report.check(count >= least, f"{count} steps ran as CUDA graphs, at least {least} wanted")
    return {key: result.table.loc[key] for key in result.rows}


def _row(
    bench: Bench, report: Report, n: int, name: str, result: Validation, sheet: float | None, *,
    cuda_graph: bool, overlap: bool, allocated: int, note: str,
) -> None:  # fmt: skip
    """Say and record one row."""
    row = result.table.loc[name]
    launch = float(np.mean(result.costs.launch))
    steps = result.rows[name]
    host = median(np.array(steps.host_seconds) / np.array(steps.makespans))
    report.record(
        "errors", slices=n, schedule=name, cuda_graph=cuda_graph, overlap=overlap,
        dtype=str(bench.dtype).removeprefix("torch."),
        data_sheet=sheet, predicted=row["predicted"], measured=row["measured"],
        error=row["error"], error_mean=row["error_mean"], error_low=row["error_low"],
        error_high=row["error_high"], worst=row["worst"], replay=row["replay"],
        n_steps=len(steps.makespans), launch=launch, host_share=host,
        bubble_predicted=row["bubble_predicted"], bubble_measured=row["bubble_measured"],
        bytes_left=allocated, note=note,
    )  # fmt: skip
    milliseconds = "-" if sheet is None else f"{sheet * 1e3:.2f}"
    report.time(
        abs(row["error"]) <= TARGETS[cuda_graph],
        f"{name:>18} {cuda_graph!s:>5} {overlap!s:>7} {milliseconds:>9} "
        f"{row['predicted'] * 1e3:>9.2f} {row['measured'] * 1e3:>9.2f} {row['error']:>+7.1%} "
        f"{row['worst']:>+7.1%} {row['replay']:>+7.1%} {launch * 1e6:>9.1f} {host:>5.2f}",
    )

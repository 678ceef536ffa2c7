"""Steps ``validation-N`` of ``benchmarks/gpu.py``: predictions beside steps on N slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
from on_gpu.report import Report
from pipeexec.models import cross_entropy
from pipeexec.validate import validate
from pipeexec.validation import Validation

#: Largest error of the makespan, with CUDA graphs and without.
TARGETS = {True: 0.03, False: 0.05}
Names = Sequence[tuple[str, dict[str, Any]]]
_TITLE = (
    f"{'schedule':>18} {'graph':>5} {'overlap':>7} {'predicted ms':>12} {'measured ms':>11} "
    f"{'error':>7} {'worst':>7} {'replay':>7} {'host us/task':>12} {'replays':>7}"
)


def validation(bench: Bench, report: Report, n: int) -> None:
    """Validate schedules on ``n`` slices, then compare gradients; a line each, at once."""
    m, samples = 2 * n, bench.samples(n)
    report.say(f"{n} slices; {2 * n} blocks of width {bench.width}, {m} micro-batches of {samples} "
               f"x {bench.sequence} tokens; float32")  # fmt: skip
    report.say("error: predicted over measured makespan - 1, median of the steps; worst: of any; "
               "replay: from the step's own durations")  # fmt: skip
    report.say("one clock for all slices of a GPU, so no clock error\n")
    report.say(_TITLE)
    kinds = (True,) if bench.dry else (True, False)
    with messages_timed_once(bench):
        for cuda_graph in kinds:
            for number, group in enumerate(GROUPS):
                _validated(bench, report, n, group, cuda_graph=cuda_graph, overlap=True)
                if number == 0 and not bench.dry and (cuda_graph or n < 8):
                    _validated(bench, report, n, group, cuda_graph=cuda_graph, overlap=False)
    report.say("\ngradients against the unsplit model's, relative to the largest of a parameter")
    for name, options in (item for group in GROUPS for item in group):
        for cuda_graph in kinds[: 1 if n == 8 else 2]:
            error = gradient_error(bench, name, n, cuda_graph, **options)
            what = f"{name}{' as a CUDA graph' if cuda_graph else ''}: {error:.1e}"
            report.check(error <= GRADIENTS, f"{what} (limit {GRADIENTS:g})")


def _validated(
    bench: Bench, report: Report, n: int, group: Names, *, cuda_graph: bool, overlap: bool
) -> None:
    """Validate graphs that share costs, and say a line each."""
    m = 2 * n
    graphs = {name: lowered(name, n, m, overlap, **options) for name, options in group}
    n_stages = next(iter(graphs.values())).n_stages
    stages = bench.stages(n_stages, 2 * n)
    batches = (bench.batch(m * bench.samples(n), seed) for seed in range(10_000))
    with noted_warnings(report.say), counted_replays() as replays:
        found = validate(
            stages, graphs, bench.devices(n), cross_entropy, batches, sgd,
            n_steps=bench.pick(5, 2), warm_up=bench.pick(3, 1),
            cuda_graph=bench.captures(cuda_graph),
        )  # fmt: skip
        count = replays()
    launch = float(np.mean(found.costs.launch))
    for name, row in found.table.iterrows():
        said = (
            f"{name:>18} {cuda_graph!s:>5} {overlap!s:>7} {row['predicted'] * 1e3:>12.2f} "
            f"{row['measured'] * 1e3:>11.2f} {row['error']:>+7.1%} {row['worst']:>+7.1%} "
            f"{row['replay']:>+7.1%} {launch * 1e6:>12.1f} {count:>7}"
        )
        report.check(bench.dry or abs(row["error"]) <= TARGETS[cuda_graph], said)
    if bench.captures(cuda_graph):
        # Calibration's two pipelines, and each row's, in every measured round.
        least = 5 * (2 + len(graphs))
        report.check(count >= least, f"{count} steps ran as CUDA graphs, at least {least} wanted")
    _keep(bench, found, n, group, cuda_graph, overlap)


def _keep(
    bench: Bench, found: Validation, n: int, group: Names, cuda_graph: bool, overlap: bool
) -> None:
    """Write the run directory of what deserves a figure: drawing takes seconds."""
    first = group is GROUPS[0]
    wanted = {4: first or cuda_graph, 8: first}.get(n, bench.dry and first)
    if not (overlap and wanted):
        return
    kind = "graph" if cuda_graph else "eager"
    record = {"slices": n, "overlap": overlap, "cuda_graph": cuda_graph}
    found.save(bench.out / f"{n}-slices-{kind}-{group[0][0]}", record=record)

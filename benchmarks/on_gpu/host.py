"""Step ``host``: the host's time a task, with stages that do nothing."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from on_gpu.bench import Bench
from on_gpu.report import Report

#: Largest host time a task (us), without CUDA graphs.
MICROSECONDS = 25.0


def host(bench: Bench, report: Report) -> None:
    """Time the host a task, with stages that do nothing, and say where the time goes."""
    n = bench.pick(4, 2)
    m = 8 * n
    report.add(f"{n} slices, {m} micro-batches, empty stages; microseconds a task, medians")
    for name in ("gpipe", "1f1b"):
        graph = ps.lower(ps.schedule(name, n, m), step="none")
        batch = torch.zeros(m, 1), torch.zeros(m, 1)
        for cuda_graph in bench.kinds:
            with px.Pipeline(
                [nn.Identity() for _ in range(n)], graph, bench.devices(n), lambda y, t: y.sum(),
                cuda_graph=bench.captures(cuda_graph),
            ) as subject:  # fmt: skip
                steps = [subject.step(*batch) for _ in range(bench.pick(33, 4))][3:]
                issue, step = (
                    statistics.median(values) / len(graph) * 1e6
                    for values in ([x.host_seconds for x in steps],
                                   [x.timeline.makespan for x in steps])
                )  # fmt: skip
                kind = "one graph" if cuda_graph else "eager"
                report.record(
                    "host", schedule=name, cuda_graph=cuda_graph, n_tasks=len(graph),
                    host_us_per_task=issue, step_us_per_task=step,
                )  # fmt: skip
                report.time(
                    issue <= MICROSECONDS,
                    f"{name}, {kind}: host {issue:.2f}, step {step:.2f}, {len(graph)} tasks",
                )
                if name == "1f1b" and not cuda_graph:
                    report.add(_hottest(lambda: [subject.step(*batch) for _ in range(5)]))  # noqa: B023


def _hottest(call: Callable[[], Any]) -> str:
    """Return the functions in which a call spends most; the profiler slows all down."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(call)
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(16)
    return text.getvalue().strip()

"""Hosts and issue orders: what each costs where launches take time, simulated and measured.

Four CPU workers, whose stages sleep 10 ms in F and 20 ms in B, so that two cores are enough.
Messages are handed over. Launches are imposed (`pipeexec.workers`): the host takes so long to issue
each task, messages included, from nothing to a third of F. Columns are

- F: milliseconds from the beginning of a GPipe step to the end of its last F. Every F is issued
  before any B, so that this is a step that is forward only.
- GPipe, 1F1B: milliseconds of a whole step, forward and backward.

The first of each three columns is simulated: with the mean seconds of F and B in steps of 1F1B
without launches, and the launch that is imposed; nothing is fitted. ``run`` is the median of the
steps that were run, the first one of each pipeline left out. Hosts are one, two with two devices
each, or one a device, all of them threads of one process. ``processes`` are one a device that do
not wait for each other, as in separate processes: simulated only.

``python benchmarks/hosts.py`` prints the tables and writes them to results/benchmarks/hosts.txt.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _machine import ROOT, header, publish, table
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeWarning
from pipesim.lowering.issue_order import ISSUE_ORDERS
from pipesim.ops import Op

OUT = ROOT / "results" / "benchmarks" / "hosts.txt"
N, M = 4, 8  # devices, micro-batches
F, B = 10e-3, 20e-3
PARTS = {"0": 0.0, "F/6": F / 6, "F/3": F / 3}
HOSTS: dict[str, Any] = {"one": "one", "two": [0, 0, 1, 1], "one a device": "per_device"}
SCHEDULES = ("gpipe", "1f1b")
FORWARD = "forward"


class HostsCase(NamedTuple):
    """Hosts, by the name that the table has for them, an issue order, and a launch."""

    hosts: str
    order: Any
    launch: str


class _SleepingPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(F)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(B)
        return gradient


class Nap(nn.Module):
    """Passes its input on; sleeps in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``scale * x``, some time later."""
        napped: Tensor = _SleepingPass.apply(x * self.scale)
        return napped


def cases() -> Iterator[HostsCase]:
    """Yield the rows of the table."""
    for hosts in (*HOSTS, "processes"):
        for order in ISSUE_ORDERS:
            for launch in PARTS:
                yield HostsCase(hosts, order, launch)


def lowered(schedule: str, case: HostsCase) -> ps.TaskGraph:
    """Return the graph of a case."""
    return ps.lower(
        ps.schedule(schedule, N, M),
        hosts=HOSTS.get(case.hosts, "per_device"),
        host_threads=case.hosts in HOSTS,
        issue_order=case.order,
        step="none",
    )


def seconds(timeline: ps.Timeline) -> dict[str, float]:
    """Return the columns that a timeline is for."""
    graph = timeline.graph
    times = {graph.name: timeline.makespan}
    if graph.name == "gpipe":
        times[FORWARD] = float(timeline.end[graph.op == Op.F].max())
    return times


def napped(n_steps: int) -> ps.Costs:
    """Return what F and B take, with the time that a thread needs to wake up."""
    graph, timelines = run("1f1b", HostsCase("one", "clock_cycle", "0"), n_steps)
    medians = [
        float(np.mean([timeline.duration[graph.op == op] for timeline in timelines]))
        for op in (Op.F, Op.B)
    ]
    return ps.Costs(forward=medians[0], backward=medians[1])


def simulated(case: HostsCase, costs: ps.Costs) -> dict[str, float]:
    """Return the seconds that are predicted."""
    costs = replace(costs, launch=PARTS[case.launch])
    timelines = (ps.simulate(lowered(name, case), costs) for name in SCHEDULES)
    return {key: x for timeline in timelines for key, x in seconds(timeline).items()}


def run(schedule: str, case: HostsCase, n_steps: int) -> tuple[ps.TaskGraph, list[ps.Timeline]]:
    """Run some steps behind a first one."""
    graph, stages, batch = lowered(schedule, case), [Nap() for _ in range(N)], torch.zeros(M, 1)
    devices = px.workers(N, launch=PARTS[case.launch])
    with px.Pipeline(stages, graph, devices, lambda y, t: y.sum(), loss_reduction="sum") as it:
        it.step(batch, batch)
        return graph, [it.step(batch, batch).timeline for _ in range(n_steps)]


def measured(case: HostsCase, n_steps: int) -> dict[str, float]:
    """Return the median seconds of some steps; nothing for hosts that are processes."""
    medians: dict[str, float] = {}
    for name in SCHEDULES if case.hosts in HOSTS else ():
        steps = [seconds(timeline) for timeline in run(name, case, n_steps)[1]]
        medians |= {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    return medians


def row(case: HostsCase, sim: dict[str, float], ran: dict[str, float]) -> list[str]:
    """Return a row of the table, in milliseconds, and errors of what is simulated."""
    cells = [case.hosts, case.order, case.launch]
    for key in (FORWARD, *SCHEDULES):
        cells.append(f"{sim[key] * 1e3:.1f}")
        cells.append(f"{ran[key] * 1e3:.1f}" if ran else "-")
        cells.append(f"{sim[key] / ran[key] - 1:+.1%}" if ran else "-")
    return cells


def benefits(times: dict[HostsCase, tuple[dict[str, float], dict[str, float]]]) -> list[list[str]]:
    """Return by how much other orders take longer than the clock cycle, where F is 3 launches."""
    rows = []
    for hosts in HOSTS:
        for order in ISSUE_ORDERS[1:]:
            cells = [hosts, order]
            clock = times[HostsCase(hosts, "clock_cycle", "F/3")]
            other = times[HostsCase(hosts, order, "F/3")]
            for key in (FORWARD, *SCHEDULES):
                cells += [f"{o[key] / c[key]:.3f}" for o, c in zip(other, clock, strict=True)]
            rows.append(cells)
    return rows


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each pipeline")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    warnings.simplefilter("ignore", PipeWarning)
    torch.set_num_threads(1)
    costs = napped(options.steps)
    f, b = (float(np.mean(x)) * 1e3 for x in (costs.forward, costs.backward))
    times = {case: (simulated(case, costs), measured(case, options.steps)) for case in cases()}
    pairs = [(sim[key], ran[key]) for sim, ran in times.values() for key in ran]
    errors = sorted(abs(sim / ran - 1) for sim, ran in pairs)
    ends = ["sim", "run", "error"]
    columns = ["hosts", "issue order", "launch", "F", *ends[1:], "GPipe", *ends[1:], "1F1B",
               *ends[1:]]  # fmt: skip
    lines = [
        *header(["torch"]),
        f"{N} devices, {M} micro-batches; F {F * 1e3:g} ms, B {B * 1e3:g} ms asleep, "
        f"{f:.2f} and {b:.2f} ms as measured",
        "milliseconds; the first column of each three is simulated",
        f"errors of {len(errors)} makespans: median {statistics.median(errors):.1%}, largest "
        f"{errors[-1]:.1%}",
        "",
        *table(columns, [row(case, *both) for case, both in times.items()], 3),
        "",
        "over the clock cycle's time, where a launch takes F/3: simulated, run",
    ]
    columns = ["hosts", "issue order", "F", "run", "GPipe", "run", "1F1B", "run"]
    publish([*lines, *table(columns, benefits(times), 2)], options.out)


if __name__ == "__main__":
    main()

"""The order that `ps.optimize` finds for a measured model, against named schedules, both executed.

The model has four stages of unlike times (1, 3, 9 and 7 linear layers, each with a tanh) on two
CPU workers, and few micro-batches, so that named schedules leave bubbles. Its stages are profiled
(F, B, and B in its parts I and W). Then every named schedule of two devices runs that the registry
has for one of three placements of the same layers: looped and V-shaped with four stages, and linear
with the two stages of the best split. `ps.optimize` gets the profiled costs and these placements,
with B whole or in parts; the order with the least predicted makespan runs.

A first series of rounds chooses the named schedules with the least median step. They and the order
are measured in a second series. In a round each runs one step, in a new random order, so that a
machine that slows down slows all. The time of a step is that of ``pipeline.step``, on the wall.
"ratio" is the time of the order over that of a schedule in the same round: its median over rounds,
and an interval that holds the median with 95 % confidence. Below 1 the order is faster.

With ``--sleep 0.003`` layers sleep in place of computing, which other work on the machine hardly
delays: a control of whether the executor runs the order as predicted.

``python benchmarks/optimal_order_run.py`` writes results/benchmarks/optimal_order_run.txt. It needs
two cores that nothing else uses, for some five minutes. ``--first 2 --steps 5 --seconds 2 --out -``
shows that it works.
"""

from __future__ import annotations

import argparse
import copy
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import _machine as machine
import numpy as np
import torch
from _interval import interval
from numpy.typing import NDArray
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import PipeError, PipeWarning
from pipesim.scheduling.registry import options_of_schedules

#: Layers of the stages.
LAYERS = (1, 3, 9, 7)
N_DEVICES, N_MICROBATCHES = 2, 4
#: Schedules that step before the end of the batch, or place stages twice.
OTHERS = {"pipedream", "pipedream_2bw", "dualpipe", "dualpipev", "chimera"}
WARM_UP = 3


class Candidate(NamedTuple):
    """A schedule, where its stages run, and the makespan that the simulator predicts (s)."""

    name: str
    placement: str
    schedule: ps.Schedule
    predicted: float


class _Sleep(torch.autograd.Function):
    """Add a number, and sleep: the backward twice as long as the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x + shift

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sleep(2 * ctx.seconds)
        return gradient, gradient.sum(), None


class Sleeping(nn.Module):
    """A stage that sleeps so many seconds in a forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.shift, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x: torch.Tensor) -> Any:
        """Sleep, and return the input plus the parameter."""
        return _Sleep.apply(x, self.shift, self.seconds)


def make_stages(width: int, seconds: float) -> list[nn.Module]:
    """Return the four stages; layers sleep if ``seconds`` is not 0."""
    if seconds:
        return [Sleeping(seconds * n) for n in LAYERS]
    torch.manual_seed(0)
    return [
        nn.Sequential(*(x for _ in range(n) for x in (nn.Linear(width, width), nn.Tanh())))
        for n in LAYERS
    ]


def measured_costs(stages: list[nn.Module], batch: torch.Tensor) -> ps.Costs:
    """Return the profiled costs of the four stages, with B and with I and W."""
    graphs = [
        ps.lower(ps.schedule(name, N_DEVICES, N_MICROBATCHES, n_chunks=2))
        for name in ("interleaved_1f1b", "interleaved_zb")
    ]
    with px.Pipeline(stages, graphs[0], ["cpu"] * N_DEVICES, loss_fn) as pipeline:
        return px.measure(pipeline, batch, batch, n_steps=15, graphs=graphs).costs


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean square error."""
    return nn.functional.mse_loss(output, target)


def merged(costs: ps.Costs, sizes: tuple[int, ...]) -> ps.Costs:
    """Return costs of stages that hold these many of the four stages each."""
    names = ("forward", "backward", "input_grad", "weight_grad")
    borders = np.cumsum([0, *sizes[:-1]])
    values = {name: np.add.reduceat(costs.per_stage(name, len(LAYERS)), borders).tolist()
              for name in names}  # fmt: skip
    return ps.Costs(**values, output_bytes=max(costs.per_stage("output_bytes", len(LAYERS))),
                    network=costs.network)  # fmt: skip


def makespan(schedule: ps.Schedule, costs: ps.Costs) -> float:
    """Return the predicted makespan of a step without optimizer."""
    return float(ps.simulate(ps.lower(schedule, step="none"), costs).makespan)


def named(placements: dict[str, tuple[ps.Placement, ps.Costs]]) -> list[Candidate]:
    """Return all named schedules for the placements."""
    candidates = []
    for name, options in options_of_schedules().items():
        if name in OTHERS:
            continue
        for label, (placement, costs) in placements.items():
            values: dict[str, Any] = {"costs": costs} if "costs" in options else {}
            values |= {"n_chunks": 2} if "n_chunks" in options else {}
            try:
                schedule = ps.schedule(name, N_DEVICES, N_MICROBATCHES, **values)
            except PipeError:
                continue
            if schedule.placement == placement:
                candidates.append(Candidate(name, label, schedule, makespan(schedule, costs)))
    return candidates


def optimized(
    placements: dict[str, tuple[ps.Placement, ps.Costs]], seconds: float
) -> tuple[Candidate, float]:
    """Return the order with the least predicted makespan of all placements, and its gap."""
    best, gap = None, 0.0
    for label, (placement, costs) in placements.items():
        for split_backward in (False, True):
            order = ps.optimize(placement, N_MICROBATCHES, costs, seconds=seconds,
                                split_backward=split_backward, progress=False)  # fmt: skip
            candidate = Candidate("optimized", label, order, makespan(order, costs))
            if best is None or candidate.predicted < best.predicted:
                best, gap = candidate, order.gap
    assert best is not None
    return best, gap


def run(
    candidates: list[Candidate],
    modules: dict[str, list[nn.Module]],
    batch: torch.Tensor,
    n_steps: int,
) -> NDArray[np.float64]:
    """Return the seconds of steps in turn; shape ``(n_steps, len(candidates))``."""
    random, times = np.random.default_rng(0), np.zeros((WARM_UP + n_steps, len(candidates)))
    with ExitStack() as stack:
        pipelines = [
            stack.enter_context(
                px.Pipeline(
                    copy.deepcopy(modules[x.placement]), ps.lower(x.schedule, step="none"),
                    ["cpu"] * N_DEVICES, loss_fn,
                )
            )
            for x in candidates
        ]  # fmt: skip
        for row in times:
            for place in random.permutation(len(candidates)):
                for module in pipelines[place].modules:
                    module.zero_grad()
                start = perf_counter()
                pipelines[place].step(batch, batch)
                row[place] = perf_counter() - start
    return times[WARM_UP:]


def table(candidates: list[Candidate], times: NDArray[np.float64]) -> list[str]:
    """Return one row a schedule, the fastest first; the order is the first candidate."""
    medians = np.median(times, axis=0)
    low, high = interval(len(times))
    rows = []
    for place in np.argsort(medians):
        x, ratios = candidates[place], np.sort(times[:, 0] / times[:, place])
        rows.append([
            x.name, x.placement, f"{1e3 * x.predicted:.1f}", f"{1e3 * medians[place]:.1f}",
            f"{np.median(ratios):.3f}", f"{ratios[low]:.3f} to {ratios[high]:.3f}",
        ])  # fmt: skip
    columns = ["schedule", "placement", "predicted ms", "measured ms", "ratio", "95 % interval"]
    return machine.table(columns, rows, 2)


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="rounds of the second series")
    parser.add_argument("--first", type=int, default=30, help="rounds of the first series")
    parser.add_argument("--kept", type=int, default=4, help="named schedules in the second series")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each search")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a layer's forward")
    out = machine.ROOT / "results" / "benchmarks" / "optimal_order_run.txt"
    parser.add_argument("--out", default=str(out), help="file, or - for none")
    options = parser.parse_args()
    warnings.simplefilter("ignore", PipeWarning)
    stages = make_stages(options.width, options.sleep)
    batch = torch.randn(N_MICROBATCHES * options.samples, options.width)
    costs = measured_costs(stages, batch)
    whole = costs.per_stage("forward", 4) + costs.per_stage("backward", 4)
    sizes = ps.balanced_split(whole, N_DEVICES)
    placements = {
        "looped": (ps.Placement.looped(N_DEVICES, 2), costs),
        "V": (ps.Placement.v_shaped(N_DEVICES), costs),
        "linear": (ps.Placement.linear(N_DEVICES), merged(costs, sizes)),
    }
    pairs = [stages[: sizes[0]], stages[sizes[0] :]]
    modules = {"looped": stages, "V": stages, "linear": [nn.Sequential(*x) for x in pairs]}
    order, gap = optimized(placements, options.seconds)
    candidates = [order, *named(placements)]
    first = run(candidates, modules, batch, options.first)
    ranked = 1 + np.median(first[:, 1:], axis=0).argsort()
    kept = [order, *(candidates[place] for place in ranked[: options.kept])]
    times = run(kept, modules, batch, options.steps)
    names = ("forward", "backward", "input_grad", "weight_grad")
    profile = [
        f"{name:<12}" + "".join(f"{1e3 * x:8.2f}" for x in costs.per_stage(name, 4))
        for name in names
    ]
    best = min(range(1, len(kept)), key=lambda place: float(np.median(times[:, place])))
    ratios = np.sort(times[:, 0] / times[:, best])
    low, high = interval(len(times))
    lines = [
        *machine.header(["torch", "ortools"]),
        f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}",
        "",
        f"stages of {', '.join(map(str, LAYERS))} layers, {N_MICROBATCHES} micro-batches of "
        f"{options.samples} samples, "
        + (f"layers that sleep {options.sleep:g} s" if options.sleep else f"width {options.width}")
        + "; profiled ms a micro-batch:",
        *profile,
        "",
        f"the order is within {gap:.2%} of the lower bound of its placement",
        "",
        f"first series, {options.first} rounds",
        *table(candidates, first),
        "",
        f"second series, {options.steps} rounds",
        *table(kept, times),
        "",
        f"best named schedule: {kept[best].name}, {kept[best].placement}; time of the order over "
        f"its time: {np.median(ratios):.3f} ({ratios[low]:.3f} to {ratios[high]:.3f}), predicted "
        f"{order.predicted / kept[best].predicted:.3f}",
    ]
    machine.publish(lines, None if options.out == "-" else Path(options.out))


if __name__ == "__main__":
    main()

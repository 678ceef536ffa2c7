"""Loss of a small GPT with and without updates that are one step late: 1F1B and PipeDream-2BW.

Each schedule trains the byte-level GPT of `pipeexec.demo_models` with AdamW and with Muon. Muon has
the matrices of the blocks; embedding, head and vectors have AdamW with a rate of its own. Rates
rise over the first tenth of the steps, and then fall to 0. Each pair of optimizer and schedule has
the rates that are best in a sweep, with a seed of its own. A seed sets weights and samples.

- A call of `Pipeline.step` is a mini-batch of 1F1B, and all mini-batches of 2BW: a call ends with a
  flush, after which the first mini-batch has no delay.
- Losses of the tables are of the weights after the last step, on the same samples for all runs.
- Seconds are of another model, simulated: a step of Llama 3 70B on 16 stages of 8 H100. Those of
  2BW are what one more mini-batch adds, once the pipeline is full.
- 1F1B with fewer steps, and all of its schedule of rates in them, has the time of all steps of 2BW.
  Other schedules with flushes have the same gradients as 1F1B.

``python benchmarks/delayed_updates.py`` takes some minutes on a free core. It writes
results/benchmarks/delayed_updates.txt and .png.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import _machine as machine
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model, split
from pipesim.errors import PipeWarning
from pipesim.plot.paper_figure import save

OUT = machine.ROOT / "results" / "benchmarks" / "delayed_updates.txt"
BLOCKS, SAMPLES, STEPS = 2, 16, 150
DEVICES, MICROBATCHES = 2, 2  # of a mini-batch
SEEDS, SWEEP_SEED = (0, 1, 2), 3
SCHEDULES = {"1f1b": "1F1B", "pipedream_2bw": "2BW"}
#: Rates of the matrices of the blocks, and of other parameters. With Muon, 0.032 was better than
#: 0.016 for both schedules, with 0.002 and with 0.006 for the other parameters.
RATES = {
    "AdamW": [(rate, rate) for rate in (2e-3, 4e-3, 8e-3, 16e-3)],
    "Muon": [(32e-3, rate) for rate in (4e-3, 8e-3, 16e-3, 32e-3)],
}
STAGES, MICROBATCHES_70B = 16, (16, 64)
NamedParameters = Iterable[tuple[str, nn.Parameter]]
Rates = tuple[float, float]
Floats = NDArray[np.float64]


class MuonAndAdamW(Optimizer):
    """Muon for some matrices, AdamW for other parameters: one optimizer with two groups."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], rates: Rates
    ) -> None:
        # With this adjustment, rates of Muon are like those of AdamW (arXiv 2502.16982, 2.2).
        self.muon = Muon([{"params": matrices}], lr=rates[0], adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW([{"params": others}], lr=rates[1], betas=(0.9, 0.95), weight_decay=0.1)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: None = None) -> None:
        """Step both, with the groups and the state of this one: loading a state replaces them."""
        self.muon.param_groups, self.adamw.param_groups = ([group] for group in self.param_groups)
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


@dataclass(frozen=True)
class Run:
    """Loss of each mini-batch in training, shape ``(n_steps,)``, and after it on other samples."""

    losses: Floats
    final: float


def train(kind: str, schedule: str, rates: Rates, seed: int, n_steps: int) -> Run:
    """Train a new model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PipeWarning)
    model = build_model("gpt", layers=BLOCKS, width=48, heads=4, sequence=32, seed=seed)
    batches = [model.make_batch(SAMPLES, 10_000 * seed + step) for step in range(n_steps)]

    def optimizer(named_parameters: NamedParameters) -> Optimizer:
        matrices, others = [], []
        for name, parameter in named_parameters:
            layer = int(name.partition(".")[0])  # 0 is the embedding, the last one the head
            is_matrix = parameter.ndim == 2 and 1 <= layer <= BLOCKS
            (matrices if is_matrix and kind == "Muon" else others).append(parameter)
        own = (
            MuonAndAdamW(matrices, others, rates)
            if kind == "Muon"
            else AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.1)
        )
        scheduler = LambdaLR(own, lambda k: min(10 * (k + 1) / n_steps, 1) * (1 - k / n_steps))
        # Not after Pipeline.step, which makes many optimizer steps of 2BW.
        own.register_step_post_hook(lambda *_: scheduler.step())
        return own

    n_batches = n_steps if schedule == "pipedream_2bw" else 1
    options = {"n_batches": n_batches} if schedule == "pipedream_2bw" else {}
    orders = ps.schedule(schedule, DEVICES, n_batches * MICROBATCHES, **options)
    stages, devices = split(model.layers, DEVICES), ["cpu"] * DEVICES
    losses: list[Tensor] = []
    with px.Pipeline(stages, ps.lower(orders), devices, model.loss, optimizer) as pipeline:
        for first in range(0, n_steps, n_batches):
            inputs, targets = zip(*batches[first : first + n_batches], strict=True)
            losses += pipeline.step(torch.cat(inputs), torch.cat(targets)).losses
    inputs, targets = model.make_batch(256, 2**31 - 1)
    with torch.no_grad():
        final = model.loss(model.layers(inputs), targets).item()
    return Run(torch.stack(losses).view(n_steps, -1).sum(1).double().numpy(), final)


def simulated(name: str, m: int, costs: ps.Costs) -> tuple[float, float]:
    """Return seconds of one more step of ``m`` micro-batches, and most bytes of a device."""
    if name != "pipedream_2bw":
        timeline = ps.simulate(ps.lower(ps.schedule(name, STAGES, m)), costs)
        return timeline.makespan, float(timeline.memory.peak.max())
    four, eight = (
        ps.simulate(ps.lower(ps.schedule(name, STAGES, n * m, n_batches=n)), costs) for n in (4, 8)
    )
    return (eight.makespan - four.makespan) / 4, float(eight.memory.peak.max())


def interval(values: Sequence[float]) -> str:
    """Return mean, least and most."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(
    runs: dict[tuple[str, str, int], list[Run]], seconds: dict[str, float], n_fewer: int, out: Path
) -> None:
    """Draw losses of equally many steps, and of as much time by simulated seconds."""
    figure = Figure(figsize=(7.16, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    width = 10  # mean of so many steps
    for (kind, schedule, count), own in runs.items():
        x = np.arange(width, count + 1)
        curves = np.array([np.convolve(run.losses, np.ones(width) / width, "valid") for run in own])
        is_late = schedule == "pipedream_2bw"
        for axes, unit, is_shown in (
            (left, 1.0, count == STEPS),
            (right, seconds[schedule], is_late or count == n_fewer),
        ):
            if is_shown:
                colour = {"AdamW": "#0072B2", "Muon": "#D55E00"}[kind]
                axes.plot(x * unit, curves.mean(axis=0), "--" if is_late else "-", color=colour,
                          label=f"{kind}, {SCHEDULES[schedule]}")  # fmt: skip
                axes.fill_between(x * unit, curves.min(axis=0), curves.max(axis=0), color=colour,
                                  alpha=0.15, linewidth=0)  # fmt: skip
    left.set(xlabel="optimizer steps", ylabel="training loss (nats a byte)", ylim=(None, 4))
    left.set_title("Equal steps", fontsize=9)
    right.set_xlabel("simulated seconds")
    right.set_title(f"Equal time, {STAGES} stages, {MICROBATCHES_70B[0]} micro-batches", fontsize=9)
    left.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, out)


Job = tuple[str, str, Rates, int, int]


def trained(jobs: Sequence[Job], n_processes: int) -> Iterator[Run]:
    """Yield the runs of `train` with these arguments."""
    with ProcessPoolExecutor(n_processes, get_context("spawn")) as pool:
        for job, run in zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True):
            print(*job, f"{run.final:.3f}", flush=True)
            yield run


def main() -> None:
    """Print the tables, and write them and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    lines = machine.header(["torch"])

    costs = ps.Transformer.preset("llama3_70b").costs(
        STAGES, partition="balanced", gpu="h100_sxm", microbatch_size=1, tensor_parallel=8,
        sequence_parallel=True, flash_attention=True,
        network=ps.Network.preset("dgx_h100", gpus_per_device=8),
    )  # fmt: skip
    seconds: dict[tuple[str, int], float] = {}
    n_steps: dict[tuple[str, int], int] = {}  # in as many seconds as STEPS of 2BW
    rows = []
    for m in MICROBATCHES_70B:
        late, _ = simulated("pipedream_2bw", m, costs)
        for name in ("1f1b", "zb_h1", "pipedream_2bw"):
            seconds[name, m], peak = simulated(name, m, costs)
            n_steps[name, m] = round(STEPS * late / seconds[name, m])
            cells = (f"{seconds[name, m]:.3f}", f"{peak / 2**30:.1f}", str(n_steps[name, m]))
            rows.append([name, str(m), *cells])
    head = ["schedule", "micro-batches", "seconds a step", "GiB", f"steps in {STEPS} of 2BW"]
    lines += ["", f"Llama 3 70B on {STAGES} stages of 8 H100, simulated"]
    lines += machine.table(head, rows, 1)

    cases = [(kind, schedule) for kind in RATES for schedule in SCHEDULES]
    jobs: list[Job] = [
        (*case, rates, SWEEP_SEED, STEPS) for case in cases for rates in RATES[case[0]]
    ]
    finals = {
        job[:3]: run.final for job, run in zip(jobs, trained(jobs, options.processes), strict=True)
    }
    best = {case: min(RATES[case[0]], key=lambda rates: finals[*case, rates]) for case in cases}
    for kind, grid in RATES.items():
        head = [kind, *("/".join(f"{rate:g}" for rate in dict.fromkeys(rates)) for rates in grid)]
        rows = []
        for schedule, label in SCHEDULES.items():
            marks = ("*" if rates == best[kind, schedule] else " " for rates in grid)
            losses = (f"{finals[kind, schedule, rates]:.3f}" for rates in grid)
            rows.append([label, *map("".join, zip(losses, marks, strict=True))])
        lines += ["", f"loss after {STEPS} steps, by rate, seed {SWEEP_SEED} (* least)"]
        lines += machine.table(head, rows, 1)

    counts = [STEPS, *(n_steps[name, MICROBATCHES_70B[0]] for name in ("zb_h1", "1f1b"))]
    jobs = [
        (*case, best[case], seed, count)
        for case in cases
        for count in (counts if case[1] == "1f1b" else [STEPS])
        for seed in SEEDS
    ]
    runs: dict[tuple[str, str, int], list[Run]] = {}
    for (kind, schedule, _, _, count), run in zip(
        jobs, trained(jobs, options.processes), strict=True
    ):
        runs.setdefault((kind, schedule, count), []).append(run)
    rows = []
    for (kind, schedule, count), own in runs.items():
        more = [
            x.final - y.final for x, y in zip(runs[kind, "pipedream_2bw", STEPS], own, strict=True)
        ]
        losses = interval([run.final for run in own])
        rows.append(
            [kind, SCHEDULES[schedule], str(count), losses, interval(more) if any(more) else ""]
        )
    head = ["optimizer", "schedule", "steps", "loss", "2BW's is higher by"]
    lines += ["", "mean over three seeds (least to most)", *machine.table(head, rows, 2)]
    machine.publish(lines, options.out)
    scale = {name: seconds[name, MICROBATCHES_70B[0]] for name in SCHEDULES}
    draw(runs, scale, n_steps["1f1b", MICROBATCHES_70B[0]], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

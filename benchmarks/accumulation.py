"""Memory of accumulation: activations against K, and gradients that wait for their reduction.

A batch of 32 samples in K micro-batches, on one device. The order of accumulation, F0 B0 F1 B1
(``ps.schedule("1f1b", 1, K)``), holds the activations of one micro-batch; GPipe's order holds all.
Predicted from the activations of one sample, which are counted once; measured by
`pipeexec.Pipeline.memory`, tensor by tensor; and counted in a loop of plain torch.

Then two replicas of 8 micro-batches, in one process and in two: the most gradients that are alive
at once, in gradients of one replica. Counted storage by storage; by rule 10 of docs/time.md at the
times of that very step; and simulated, with reductions that take no time and that take very long.
How many wait in a step depends on its times, so that the counted ones differ from run to run.

``python benchmarks/accumulation.py`` writes results/benchmarks/accumulation.txt. It times nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.registry import build_model
from pipeexec.distributed import Processes
from pipeexec.stages.activations import ActivationMeter
from pipesim.errors import PipeWarning

SAMPLES, MICROBATCHES = 32, (1, 2, 4, 8, 16, 32)
K, N_REPLICAS = 8, 2
MODES: tuple[Any, ...] = ("last", "bucketed", "every", 2, 4)
MIB = 2**20
SGD = partial(torch.optim.SGD, lr=1e-3)
Model = tuple[nn.Sequential, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]


def model() -> Model:
    """Return a small GPT, its loss, and a batch."""
    built = build_model("gpt", layers=2, width=64, heads=4, sequence=32)
    inputs, targets = built.make_batch(SAMPLES, 0)
    return built.layers, built.loss, inputs, targets


def held(name: str, k: int, built: Model, n_samples: int = SAMPLES) -> float:
    """Return the most bytes of activations in a step of a pipeline."""
    layers, loss, inputs, targets = built
    graph = ps.lower(ps.schedule(name, 1, k))
    with px.Pipeline([layers], graph, ["cpu"], loss, SGD) as pipeline:
        pipeline.step(inputs[:n_samples], targets[:n_samples])  # finds out what is random
        memory = pipeline.memory(inputs[:n_samples], targets[:n_samples])
    return float(memory.peak_activations.max())


def held_by_torch(k: int, built: Model) -> float:
    """Return the same for a loop of K forwards and backwards."""
    layers, loss, inputs, targets = built
    meter = ActivationMeter([*layers.parameters(), *layers.buffers()], [inputs, targets])
    for x, y in zip(inputs.chunk(k), targets.chunk(k), strict=True):
        with meter.saved_tensors():
            result = loss(layers(x), y) / k
        result.backward()
        del result
    return meter.peak


def activations() -> list[str]:
    """Return the table of activations against K."""
    built = model()
    one = held("1f1b", 1, built, 1)
    head = ("K", "samples", "F0 B0 F1 B1", "measured", "torch loop", "GPipe's order", "measured")
    rows = [f"{head[0]:>3}{head[1]:>9}" + "".join(f"{x:>15}" for x in head[2:])]
    for k in MICROBATCHES:
        costs = ps.Costs(1, 2, activation_bytes=one * SAMPLES / k)
        values = [
            *(_predicted("1f1b", k, costs), held("1f1b", k, built), held_by_torch(k, built)),
            *(_predicted("gpipe", k, costs), held("gpipe", k, built)),
        ]
        rows.append(f"{k:3}{SAMPLES // k:9}" + "".join(f"{x / MIB:11.2f} MiB" for x in values))
    return rows


def _predicted(name: str, k: int, costs: ps.Costs) -> float:
    return float(ps.simulate(ps.lower(ps.schedule(name, 1, k)), costs).memory.peak.max())


def gradients(processes: Processes | None) -> list[str]:
    """Return the table of gradients, of replicas in this process or in several."""
    layers, loss, inputs, targets = model()
    size = float(sum(p.nbytes for p in layers.parameters()))
    costs = ps.Costs(1, 2, gradient_bytes=size)
    head = ("counted", "by rule", "at once", "very long", "buffers")
    rows = [f"{'grad_sync':>10}{'overlap':>9}" + "".join(f"{x:>11}" for x in head)]
    for mode in MODES:
        for overlap in (True, False):
            graph = ps.lower(
                ps.schedule("1f1b", 1, K),
                n_replicas=N_REPLICAS,
                grad_sync=mode,
                overlap=overlap,
                hosts="one" if processes is None else "per_device",
            )
            devices = ["cpu"] * (N_REPLICAS if processes is None else 1)
            with px.Pipeline([layers], graph, devices, loss, SGD, processes=processes) as pipeline:
                memory = pipeline.memory(inputs, targets)
            values = [
                memory.peak_gradients.max(),
                replace(memory.timeline, costs=costs).memory.peak.max(),
                *(
                    ps.simulate(graph, replace(costs, reduce_grad=seconds)).memory.peak.max()
                    for seconds in (0, 1e3)
                ),
                memory.peak_buffers.max(),
            ]
            cells = "".join(f"{value / size:11.2f}" for value in values)
            rows.append(f"{mode!s:>10}{'yes' if overlap else 'no':>9}{cells}")
    return rows


def run(folder: str) -> None:
    """Be one of two processes; rank 0 leaves the table in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", PipeWarning)
    with px.join(120) as processes:
        rows = gradients(processes)
        if processes.rank == 0:
            (Path(folder) / "rows").write_text("\n".join(rows))


def publish(lines: Sequence[str], out: Path) -> None:
    """Print the lines, and write them."""
    print("\n".join(lines))
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = machine.ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "accumulation.txt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", PipeWarning)
    lines = [
        *machine.header(["torch"]),
        "",
        f"activations of {SAMPLES} samples in K micro-batches, predicted and measured",
        *activations(),
        "",
        f"most gradients alive, K = {K}, two replicas in one process",
        *gradients(None),
    ]
    with tempfile.TemporaryDirectory() as temporary:
        _ranks.spawn(run, N_REPLICAS, temporary)
        rows = (Path(temporary) / "rows").read_text().splitlines()
    lines += ["", "the same in two processes, over gloo", *rows]
    publish(lines, options.out)


if __name__ == "__main__":
    main()

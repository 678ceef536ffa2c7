"""A stage with experts on two processes: predicted and measured seconds of a step, and memory.

A small GPT whose MLPs are `pipeexec.Experts`, over gloo, each process with one thread.

- alone: one stage of two replicas, one a process, which have half of the experts each; F and B of
  micro-batches follow each other (1F1B of a stage with two micro-batches in flight).
- paired: the same order, but each B is paired with the F behind it, so that exchanges of tokens of
  one run behind the compute of the other.
- dualpipev, 1f1b: two devices of one replica, with the experts of each stage in its process, so
  that exchanges are local.

``px.profile`` measures the costs, the simulator predicts the step from them, and steps are timed:
the median of ``--steps``. The error is (predicted - measured) / measured. Other work on the machine
makes steps differ from profiled ones: own error is the median over the steps of the error of a
simulation with the seconds that the step itself shows, each micro-batch and replica its own.

Memory is the most bytes of activations of a device: predicted from the bytes that each stage holds
for one micro-batch (`Pipeline.held_bytes`), measured by `Pipeline.memory`, storage by storage.
Batches of memory have equal micro-batches, with which numbers of tokens are known. Of a pair, the
prediction counts all activations of its F from the first segment on, and those of its B until the
last: it is a bound.

``python benchmarks/experts.py`` prints the table and writes it to results/benchmarks/experts.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import _machine as machine
import _ranks
import numpy as np
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.data import text_batch
from pipeexec.demo_models.gpt import moe_gpt
from pipeexec.demo_models.registry import cross_entropy
from pipeexec.distributed import Processes
from pipesim.ops import Action, Op, Overlapped

N_RANKS, K, LAYERS, SEQUENCE, SAMPLES = 2, 4, 4, 64, 8
OUT = machine.ROOT / "results" / "benchmarks" / "experts.txt"
COLUMNS = (
    *("case", "replicas", "predicted ms", "measured ms", "error", "own error", "exchanges ms"),
    *("memory predicted KiB", "measured KiB"),
)
CASES = ("alone", "paired", "1f1b", "dualpipev")


def schedule(case: str) -> ps.Schedule:
    """Return the schedule of a case."""
    if case not in ("alone", "paired"):
        return ps.schedule(case, 2, K)
    order: list[Any] = ["0F0"]
    for k in range(K - 1):
        both = Action(0, Op.F, k + 1), Action(0, Op.B, k)
        order += [Overlapped(*both)] if case == "paired" else list(both)
    return ps.Schedule.from_orders([[*order, f"0B{K - 1}"]], name=case)


def graph_of(case: str) -> ps.TaskGraph:
    """Return the graph of a case."""
    plan = schedule(case)
    return ps.lower(
        plan,
        n_replicas=N_RANKS // plan.n_devices,
        expert_layers=LAYERS // plan.n_stages,
        hosts="per_device",
    )


def stages_of(graph: ps.TaskGraph, rank: int) -> list[nn.Module | None]:
    """Return the stages of a rank; with a replica a process, these have half of the experts."""
    share = (rank, N_RANKS) if graph.n_replicas == N_RANKS else (0, 1)
    model = moe_gpt(n_layers=LAYERS, d_model=128, sequence=SEQUENCE, share=share)
    ends = [1 + LAYERS * (k + 1) // graph.n_stages for k in range(graph.n_stages - 1)]
    starts = [0, *ends]
    stages = [model[a:b] for a, b in zip(starts, [*ends, len(model)], strict=True)]
    own = {s for devices in graph.homes.tolist() for s, d in enumerate(devices) if d == rank}
    return [stage if k in own else None for k, stage in enumerate(stages)]


def batch(graph: ps.TaskGraph, rank: int, *, equal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank's replica; ``equal`` micro-batches have the same samples."""
    replica = rank if graph.n_replicas == N_RANKS else 0
    x, y = text_batch(SAMPLES * (1 if equal else K), SEQUENCE, seed=replica)
    return (x.repeat(K, 1), y.repeat(K, 1)) if equal else (x, y)


def measure(case: str, n_steps: int, processes: Processes) -> dict[str, Any]:
    """Return the row of a case; every rank calls this."""
    graph, rank = graph_of(case), processes.rank
    with px.Pipeline(
        stages_of(graph, rank), graph, ["cpu"], cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, 1e-3), processes=processes,
    ) as pipeline:  # fmt: skip
        inputs = batch(graph, rank)
        costs = px.profile(pipeline, *inputs, n_steps=4)
        timelines = []
        for _ in range(n_steps):
            pipeline.align()
            timelines.append(pipeline.gather(pipeline.step(*inputs)).timeline)
        predicted, measured = memory(pipeline, costs, batch(graph, rank, equal=True))
    exchanges = [np.mean(seconds) for seconds in (costs.exchange_dispatch, costs.exchange_combine)
                 if seconds is not None]  # fmt: skip
    return {
        "case": case,
        "replicas": graph.n_replicas,
        "predicted": ps.simulate(graph, costs).makespan,
        "measured": statistics.median(timeline.makespan for timeline in timelines),
        "own error": statistics.median(map(own_error, timelines)),
        "exchanges": float(np.mean(exchanges)),
        "memory": [predicted, measured],
    }


def own_error(timeline: ps.Timeline) -> float:
    """Return the error of a simulation with the seconds that a step itself shows."""
    costs = ps.Costs.from_timeline(timeline, per_microbatch=True)
    return ps.simulate(timeline.graph, costs).makespan / timeline.makespan - 1


def memory(
    pipeline: px.Pipeline, costs: ps.Costs, inputs: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """Return the predicted and the measured activations of the device that holds the most."""
    graph = pipeline.graph
    one = ps.lower(
        ps.Schedule.from_orders(
            [[*(f"{s}F0" for s in own), *(f"{s}B0" for s in reversed(own))]
             for d in range(graph.n_devices // graph.n_replicas)
             for own in [np.flatnonzero(graph.homes[0] == d).tolist()]]
        ),
        n_replicas=graph.n_replicas, expert_layers=LAYERS // graph.n_stages, hosts="per_device",
    )  # fmt: skip
    measured = pipeline.memory(*inputs)
    alone = pipeline.with_graph(one)
    held = np.array(alone.held_bytes(*(part[:SAMPLES] for part in inputs)), dtype=float)
    held = held.reshape(graph.n_replicas, graph.n_stages)
    bytes_of_stages = np.repeat(held.T, K, axis=1).tolist()
    costs = replace(
        costs, activation_bytes=bytes_of_stages, parameter_bytes=0.0, optimizer_bytes=0.0
    )
    timeline = ps.simulate(graph, costs)
    return float(timeline.memory.peak.max()), float(measured.peak_activations.max())


def work(cases: list[str], n_steps: int, folder: str) -> None:
    """Measure the cases in a rank; rank 0 writes the rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with px.join(timeout=60) as processes:
        rows = [measure(case, n_steps, processes) for case in cases]
        if processes.rank == 0:
            (Path(folder) / "rows.json").write_text(json.dumps(rows))


def text_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    predicted, measured = row["predicted"], row["measured"]
    return [
        row["case"], str(row["replicas"]), f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}",
        f"{predicted / measured - 1:+.1%}", f"{row['own error']:+.1%}",
        f"{row['exchanges'] * 1e3:.2f}",
        *(f"{nbytes / 1024:.2f}" for nbytes in row["memory"]),
    ]  # fmt: skip


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each case")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _ranks.spawn(work, N_RANKS, list(options.cases), options.steps, folder)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    lines = [
        f"{N_RANKS} processes over gloo, {LAYERS} blocks with 8 experts, {K} micro-batches of "
        f"{SAMPLES} x {SEQUENCE} tokens; exchanges: mean of one; "
        f"load average {os.getloadavg()[0]:.1f} at the end.",
        "",
        *machine.table(COLUMNS, [*map(text_of, rows)], 1),
    ]
    machine.publish([*machine.header(["torch"]), *lines], options.out)


if __name__ == "__main__":
    main()

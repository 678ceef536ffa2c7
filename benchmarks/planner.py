"""Plans of published training runs, regret on measured steps, and speed of the planner.

- **Published runs**: Llama 3 405B on 16,384 H100 (Llama Team, arXiv 2407.21783, table 4), and
  Llama 3 70B on 64 H100 in bfloat16 (NVIDIA, Megatron Bridge, recipe
  ``llama3_70b_pretrain_64gpu_h100_bf16_config``, https://github.com/NVIDIA-NeMo/Megatron-Bridge).
  Each is planned with all schedules, and with the schedules of Megatron-LM alone. The published
  configuration is simulated beside them. Nothing is fitted: GPU and network are presets.
- **Regret**: how much longer the step takes that `pipesim.plan` ranks first among the measured
  configurations of one model, batch and number of GPUs, relative to the fastest that was measured;
  groups of at least four rows of vTrain's node of 8 A100 (arXiv 2312.12391).
- **Speed**: configurations a second on one core, at 8 devices and 32 micro-batches, and where the
  time goes; the growth of a whole plan with the size of the cluster.

``python benchmarks/planner.py`` prints the tables and writes them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
from _machine import ROOT, header, publish, table
from _published_steps import PublishedSteps, fifths, fit_set, published_steps

import pipesim as ps
from pipesim.costs.pricing import cost_table
from pipesim.errors import CalibrationWarning
from pipesim.graph.compute_tasks import _table
from pipesim.lowering.communication import add_partners
from pipesim.lowering.recomputes import _with_steps
from pipesim.planning.choice import Evaluation, PlanChoice, order_facts_of
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.plan_search import evaluate
from pipesim.planning.plans import Plans
from pipesim.planning.problem import PlanProblem
from pipesim.simulation.equal_replicas import _with_gathers

#: Schedules of Megatron-LM.
MEGATRON = ("1f1b", "interleaved_1f1b")
#: Published runs: model, GPUs, sequences of a step, and the published configuration.
RUNS: dict[str, dict[str, Any]] = {
    "405B, 16,384 H100": {
        "model": "llama3_405b", "n_gpus": 16384, "global_batch": 2048,
        "published": {"tensor_parallel": 8, "pipeline_parallel": 16, "microbatch_size": 1},
        "text": "Meta: tp8 pp16 dp128, 400 TFLOP/s a GPU",
        "smaller": ("gradients", 128, "Replicas share them in the published run"),
        "tflops": 400.0,
    },
    "70B, 64 H100": {
        "model": "llama3_70b", "n_gpus": 64, "global_batch": 128,
        "published": {"tensor_parallel": 4, "pipeline_parallel": 4, "microbatch_size": 1,
                      "n_chunks": 5},
        "text": "NVIDIA: tp4 pp4 cp2 dp2, 5 chunks; here dp4 for cp2 dp2",
        "smaller": ("activations", 2, "Context parallelism divides them in the published run"),
        "tflops": None,
    },
}  # fmt: skip
#: Least rows of a group that counts for the regret, and rows of the smaller fits.
_LEAST, _FEW = 4, 24


def transformer(name: str) -> ps.Transformer:
    """Return a model of Llama 3 as it was trained: 8,192 tokens, gradients in 32 bits."""
    return ps.Transformer.preset(name, sequence_length=8192, bytes_per_gradient=4)


def run_lines() -> list[str]:
    """Return the tables of the published runs."""
    lines = []
    for name, run in RUNS.items():
        model, cluster = transformer(run["model"]), ps.Cluster("dgx_h100", run["n_gpus"])
        options: dict[str, Any] = {"global_batch": run["global_batch"], "fused_loss": True,
                                   "progress": False}  # fmt: skip
        began = process_time()
        plans = ps.plan(model, cluster, **options)
        seconds = process_time() - began
        of_megatron = ps.plan(model, cluster, schedules=MEGATRON, **options)
        published = ps.plan(
            model, cluster, schedules="interleaved_1f1b", memory_limit=1e15, recompute="none",
            shard_optimizer=True, sequence_parallel=True, split="balanced", **run["published"],
            **options,
        )  # fmt: skip
        rows = [
            row_of("all schedules", plans, plans.ranked[0]),
            row_of("Megatron's schedules", of_megatron, of_megatron.ranked[0]),
            row_of("published, simulated", published, published.ranked[0]),
        ]
        if run["tflops"]:
            step = model.step_flops(run["global_batch"]) / run["n_gpus"] / run["tflops"] / 1e12
            rows.append(["published, measured", f"{step:.2f}", f"{run['tflops'] / 989.4:.1%}", "",
                         "", run["text"]])  # fmt: skip
        counts = counts_text(plans, seconds)
        head = ["configuration", "step (s)", "MFU", "GB", "bubble", "choice"]
        lines += [
            f"{name}, {run['global_batch']} sequences of 8,192 tokens. {run['text']}.",
            counts,
            *table(head, rows, 1),
            memory_text(published, *run["smaller"]),
            "",
        ]
    return lines


def row_of(name: str, plans: Plans, best: Evaluation) -> list[str]:
    """Return the row of one configuration."""
    mfu = plans.plan(plans.ranked.index(best)).timeline.mfu()
    sizes = best.choice.layers_per_stage
    return [
        name, f"{best.step:.2f}", f"{mfu:.1%}", f"{best.memory / 1e9:.1f}", f"{best.bubble:.1%}",
        f"{best.choice}; {min(sizes)} to {max(sizes)} layers a stage",
    ]  # fmt: skip


def memory_text(published: Plans, kind: str, ways: int, why: str) -> str:
    """Return the bytes of a published configuration, and of one with fewer of some kind."""
    parts = published.plan(0).timeline.memory.breakdown() / 1e9
    fullest = parts.loc[parts["total"].idxmax()]
    fewer = (parts["total"] - parts[kind] * (1 - 1 / ways)).max()
    kinds = ", ".join(f"{x} {size:.1f}" for x, size in fullest.items() if size and x != "total")
    return (
        f"The published one, simulated, needs {fullest['total']:.1f} GB: {kinds}. {why}, but "
        f"not here: with {kind} divided by {ways} it needs {fewer:.1f} GB."
    )


def counts_text(plans: Plans, seconds: float) -> str:
    """Return how many configurations there were, and what became of them."""
    counts = plans.counts
    total = sum(counts.values())
    pruned = counts.get("cannot win", 0)
    return (
        f"{total:,} configurations in {seconds:.1f} s of one core: "
        f"{counts.get('simulated', 0):,} simulated, "
        f"{pruned:,} ({pruned / total:.0%}) ruled out by bounds, "
        f"{counts.get('does not fit', 0):,} do not fit, {counts.get('invalid', 0):,} invalid"
    )


def regret_lines() -> list[str]:
    """Return the regret of plans by presets, and by constants fitted to a fifth or a tenth."""
    steps = published_steps()[0]
    body = [["presets", *regret(steps, ps.GPU.preset(steps.gpu), steps.network)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # a fifth may not determine a constant
        order = np.random.default_rng(0).permutation(len(steps.rows)).tolist()
        samples = [order[k * _FEW : (k + 1) * _FEW] for k in range(3)]
        for rows in (*fifths(len(steps.rows)), *samples):
            fitted = fit_set(steps.some(rows))
            body.append(
                [f"fitted to {len(rows)} rows", *regret(steps, fitted.gpu, fitted.network())]
            )
    groups = [rows for rows in groups_of_rows(steps) if len(rows) >= _LEAST]
    at_random = [np.mean([row["seconds"] for row in rows]) / least_seconds(rows) for rows in groups]
    head = ["constants", "mean", "worst", "best found"]
    return [
        f"Regret on {steps.name}, {len(groups)} groups of at least {_LEAST} rows; a random choice "
        f"{np.mean(at_random) - 1:.0%}. Fitted rows are among those to choose from:",
        *table(head, body, 1),
        "",
    ]


def regret(steps: PublishedSteps, gpu: ps.GPU, network: ps.Network | None) -> list[str]:
    """Return the mean and the worst regret of plans, and the share of groups with the best."""
    chosen = []
    for rows in groups_of_rows(steps):
        if len(rows) >= _LEAST:
            measured = {shape_of_row(row): row["seconds"] for row in rows}
            plans = measured_plans(cluster_of(rows[0], gpu, network), rows[0], measured)
            chosen.append(measured[shape_of(plans.ranked[0].choice)] / least_seconds(rows) - 1)
    best = np.mean(np.array(chosen) == 0)
    return [f"{np.mean(chosen):.1%}", f"{np.max(chosen):.1%}", f"{best:.0%}"]


def groups_of_rows(steps: PublishedSteps) -> list[list[dict[str, Any]]]:
    """Return the rows of each group of a set."""
    groups = defaultdict(list)
    for row, group in zip(steps.rows, steps.groups, strict=True):
        groups[group].append(row)
    return list(groups.values())


def least_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Return the shortest measured step."""
    return float(min(row["seconds"] for row in rows))


def cluster_of(row: dict[str, Any], gpu: ps.GPU, network: ps.Network | None) -> ps.Cluster:
    """Return the GPUs of a measured row."""
    n_gpus = row["tensor_parallel"] * row["n_replicas"] * row["n_devices"]
    return ps.Cluster(n_gpus=n_gpus, gpu=gpu, network=network)


def measured_plans(cluster: ps.Cluster, row: dict[str, Any], measured: dict[Any, float]) -> Plans:
    """Return a plan that chooses among the measured configurations of one group."""
    sizes = ("hidden_size", "n_heads", "n_layers", "sequence_length", "vocabulary_size")
    return ps.plan(
        ps.Transformer(**{name: row[name] for name in sizes}),
        cluster,
        global_batch=row["global_batch"],
        microbatch_size=sorted({shape[-1] for shape in measured}),
        schedules="1f1b", recompute="full", shard_optimizer=False, sequence_parallel=False,
        flash_attention=False, scatter_gather=True, split="even", memory_limit=1e15,
        where=lambda choice: shape_of(choice) in measured, n_best=1000, progress=False,
    )  # fmt: skip


def shape_of(choice: PlanChoice) -> tuple[int, ...]:
    """Return what tells measured configurations of one group apart."""
    return (choice.tensor_parallel, choice.data_parallel, choice.pipeline_parallel,
            choice.microbatch_size)  # fmt: skip


def shape_of_row(row: dict[str, Any]) -> tuple[int, ...]:
    """Return the same of a measured row."""
    return (row["tensor_parallel"], row["n_replicas"], row["n_devices"], row["microbatch_size"])


def variants(evaluator: Evaluator, n: int) -> Iterator[PlanChoice]:
    """Yield n configurations of 8 devices and 32 micro-batches that differ in costs only."""
    base = PlanChoice(4, 8, 8, 1, 32, "1f1b", 1, "none", True, True, ())
    draw = random.Random(0)
    modes = itertools.cycle(itertools.product(("none", "selective", "full"), (True, False)))
    for _ in range(n):
        recompute, sequence = next(modes)
        choice = evaluator.with_split(
            replace(base, recompute=recompute, sequence_parallel=sequence)
        )
        assert choice is not None
        sizes = list(choice.layers_per_stage)
        for _ in range(4):
            source, target = draw.sample(range(8), 2)
            sizes[source] -= 1
            sizes[target] += 1
        yield replace(choice, layers_per_stage=tuple(sizes))


def seconds_each(function: Callable[[Any], object], values: Sequence[Any]) -> float:
    """Return the processor's seconds of a call, the least of three rounds over all values."""
    rounds = []
    for _ in range(3):
        began = process_time()
        for value in values:
            function(value)
        rounds.append((process_time() - began) / len(values))
    return min(rounds)


def evaluate_anew(evaluator: Evaluator, choice: PlanChoice) -> None:
    """Evaluate a configuration, its bounds included."""
    evaluate(evaluator, choice, evaluator.bounds(choice))


def seconds_of_evaluations(
    problem: PlanProblem,
    choices: Sequence[PlanChoice],
    function: Callable[[Evaluator, PlanChoice], object] = evaluate_anew,
) -> float:
    """Return the processor's seconds of an evaluation of configurations, the least of 15 rounds.

    Graphs are built before; costs, bounds and memory of each configuration are not. ``function``
    may be a part of an evaluation.
    """
    rounds = []
    for _ in range(15):
        evaluator = Evaluator(problem)
        evaluate_anew(evaluator, choices[0])
        began = process_time()
        for choice in choices[1:]:
            function(evaluator, choice)
        rounds.append((process_time() - began) / (len(choices) - 1))
    return min(rounds)


def seconds_of_schedules(problem: PlanProblem, base: PlanChoice) -> float:
    """Return the processor's seconds of an evaluation of another schedule, the least of 25 rounds.

    Each round builds schedules, tables of kinds of tasks, graphs and costs anew. Loops are compiled
    before, as in any plan of many configurations.
    """
    ps.schedule("v_half", 8, 4096)  # large enough to compile list scheduling
    orders = ("1f1b", "gpipe", "eager_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "interleaved_1f1b")
    two = ("zbv", "v_half", "interleaved_1f1b")
    rounds = []
    for _ in range(25):
        for cached in (order_facts_of, _table, add_partners, _with_steps, _with_gathers):
            cached.cache_clear()
        evaluator = Evaluator(problem)
        began = process_time()
        for name in orders:
            choice = evaluator.with_split(
                replace(base, schedule=name, n_chunks=2 if name in two else 1)
            )
            assert choice is not None
            evaluate(evaluator, choice, evaluator.bounds(choice))
        rounds.append((process_time() - began) / len(orders))
    return min(rounds)


def speed_lines() -> list[str]:
    """Return configurations a second on one core, and where the time goes."""
    problem = PlanProblem(transformer("llama3_70b"), ps.Cluster("dgx_h100", 256), 256,
                          memory_limit=1e15)  # fmt: skip
    evaluator = Evaluator(problem)
    choices = list(dict.fromkeys(variants(evaluator, 300)))
    evaluation = seconds_of_evaluations(problem, choices)
    costs = [evaluator.costs(choice) for choice in choices]
    pairs = [(evaluator.replica(x), y) for x, y in zip(choices, costs, strict=True)]
    tables = seconds_each(lambda row: cost_table(row[1], row[0].routes, with_links=False), pairs)
    parts = {
        "costs of stages": seconds_of_evaluations(problem, choices, Evaluator.costs),
        "seconds of kinds of tasks": tables,
        "simulation": seconds_each(lambda row: row[0].run(row[1]), pairs) - tables,
    }
    parts["bounds, memory, choice"] = evaluation - sum(parts.values())
    rate = 1 / seconds_of_schedules(problem, choices[0])
    return [
        f"8 devices, 32 micro-batches, 8 replicas, {len(choices)} configurations that differ in "
        f"costs alone: {1 / evaluation:,.0f} a second on one core, of which",
        *(f"  {name}: {seconds * 1e6:,.0f} us" for name, seconds in parts.items()),
        f"The schedule differs each time: {rate:,.0f} a second (schedules, tables "
        "of kinds and graphs are built and priced anew)",
        "",
    ]


def growth_lines() -> list[str]:
    """Return seconds of whole plans by the size of the cluster."""
    rows = []
    for n_gpus in (64, 512, 4096):
        model, cluster = transformer("llama3_70b"), ps.Cluster("dgx_h100", n_gpus)
        began = process_time()
        plans = ps.plan(model, cluster, global_batch=max(128, n_gpus // 8), fused_loss=True,
                        progress=False)  # fmt: skip
        seconds = process_time() - began
        counts = plans.counts
        total = sum(counts.values())
        rows.append([f"{n_gpus:,}", f"{total:,}", f"{counts['simulated']:,}", f"{seconds:.1f}",
                     f"{total / seconds:,.0f}"])  # fmt: skip
    head = ["GPUs", "configurations", "simulated", "seconds", "configurations/s"]
    return ["Llama 3 70B, by the size of the cluster, one core:", *table(head, rows, 0)]


def main() -> None:
    """Print the tables and write them to ``results/benchmarks/planner.txt``."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    lines = [*run_lines(), *regret_lines(), *speed_lines(), *growth_lines()]
    path = ROOT / "results" / "benchmarks" / "planner.txt"
    publish([*header(["pipesim", "numpy", "numba"]), "", *lines], path)


if __name__ == "__main__":
    main()

"""Plans of a small model on one node, with evaluations made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pipesim as ps
from pipesim.planning.choice import Evaluation, PlanChoice
from pipesim.planning.cluster import Cluster
from pipesim.planning.plans import Plans
from pipesim.planning.problem import PlanProblem

CHOICE = PlanChoice(
    tensor_parallel=2,
    pipeline_parallel=2,
    data_parallel=2,
    microbatch_size=1,
    n_microbatches=8,
    schedule="1f1b",
    n_chunks=1,
    recompute="none",
    shard_optimizer=True,
    sequence_parallel=True,
    layers_per_stage=(4, 4),
)
GPIPE = replace(CHOICE, schedule="gpipe", recompute="full", shard_optimizer=False)
SPLIT = replace(
    CHOICE, tensor_parallel=1, pipeline_parallel=4, sequence_parallel=False,
    layers_per_stage=(3, 2, 2, 1),
)  # fmt: skip


@cache
def problem() -> PlanProblem:
    """Return a model of 8 layers and a batch of 16 sequences on 8 GPUs."""
    model = ps.Transformer(
        hidden_size=4096, n_layers=8, n_heads=32, sequence_length=2048, vocabulary_size=4096
    )
    return PlanProblem(model, Cluster("dgx_h100", n_gpus=8), 16, memory_limit=80e9)


def choice_of(number: int) -> PlanChoice:
    """Return a configuration that differs from others in the number of its micro-batches."""
    return replace(CHOICE, n_microbatches=number + 1)


def evaluation(choice: PlanChoice, step: float, memory: float, bound: float = 0.0) -> Evaluation:
    """Return the evaluation of a simulated configuration; its bound is by default half its step."""
    return Evaluation(choice, step, bound or step / 2, memory, 0.25, "simulated")


def plans() -> Plans:
    """Return three ranked configurations and one of each kind that is ruled out."""
    nan = float("nan")
    return Plans(
        problem(),
        (
            evaluation(CHOICE, 1.0, 6e9, bound=0.8),
            evaluation(GPIPE, 1.5, 7e9),
            evaluation(SPLIT, 2.0, 3e9),
            Evaluation(choice_of(10), nan, 2.5, 1e9, nan, "cannot win", "its bound is 2.5 s"),
            Evaluation(choice_of(11), nan, 0.5, 9e9, nan, "does not fit", "needs 9 GB of 8 GB"),
            Evaluation(choice_of(12), nan, nan, nan, nan, "invalid", "8 layers, 3 stages"),
        ),
        seconds=0.5,
    )

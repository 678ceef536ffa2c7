"""Plans of clusters whose GPUs differ: memory of the smallest, seconds of the slowest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pipesim as ps
from pipesim.errors import PipeError
from pipesim.planning.choice import PlanChoice
from pipesim.planning.problem import PlanProblem

MODEL = ps.Transformer(
    hidden_size=1024, n_layers=4, n_heads=16, sequence_length=512, vocabulary_size=8192
)
A100 = ps.GPU.preset("a100_80gb")


def choice_of(pp: int, layers: tuple[int, ...]) -> PlanChoice:
    """Return 16 GPUs: stages of 8 GPUs, in one replica or in two."""
    return PlanChoice(8, pp, 2 // pp, 1, 8 * pp, "1f1b", 1, "none", False, False, layers)


def cluster_of(*gpus: ps.GPU) -> ps.Cluster:
    """Return a node of each GPU."""
    return ps.Cluster([("dgx_a100", 8, gpu) for gpu in gpus])


@pytest.mark.parametrize("flops", [0.5, 1.0])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("layout", ["stage_major", "replica_major"])
def test_limits_are_those_of_the_smallest_gpu(flops: float, first: bool, layout: Any) -> None:
    """A stage has the least memory of its GPUs, at any speed and in any order of nodes."""
    small = replace(A100, memory=40e9, flops=flops * A100.flops, name="small")
    gpus = (small, A100) if first else (A100, small)
    problem = PlanProblem(MODEL, cluster_of(*gpus), 16, layout=layout)
    assert problem.device_limits(choice_of(1, (4,))) == [40e9]
    assert problem.limits(choice_of(1, (4,))) == [40e9] * 2
    assert problem.device_limits(choice_of(2, (2, 2))) == [gpu.memory for gpu in gpus]


@pytest.mark.parametrize("first", [False, True])
def test_what_one_gpu_cannot_hold_is_not_ranked(first: bool) -> None:
    """Replicas need the same bytes, so that the smaller GPU rules them out."""
    gpus = [replace(A100, memory=1e8, name="tiny"), A100]
    with pytest.raises(PipeError, match=r"none of 1 configurations fits.*of 95\.4 MiB"):
        ps.plan(
            MODEL, cluster_of(*gpus[:: 1 if first else -1]), global_batch=16, schedules="1f1b",
            recompute="none", tensor_parallel=8, pipeline_parallel=1, microbatch_size=1,
            shard_optimizer=False, sequence_parallel=False, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("first", [False, True])
def test_seconds_are_those_of_the_slowest_gpu(first: bool) -> None:
    """A GPU with more FLOP/s and a tenth of the bandwidth takes longer, and counts as slower."""
    narrow = replace(
        A100, flops=1.01 * A100.flops, bandwidth=A100.bandwidth / 10, name="narrow"
    )  # fmt: skip
    gpus = (narrow, A100) if first else (A100, narrow)
    choice = choice_of(1, (4,))
    costs = {
        name: PlanProblem(MODEL, cluster, 16).costs(choice)
        for name, cluster in (
            ("mixed", cluster_of(*gpus)), ("wide", cluster_of(A100, A100)),
            ("narrow", cluster_of(narrow, narrow)),
        )
    }  # fmt: skip
    assert costs["mixed"].forward == costs["narrow"].forward
    assert costs["mixed"].backward == costs["narrow"].backward
    assert costs["wide"].per_stage("forward", 1)[0] < costs["narrow"].per_stage("forward", 1)[0]

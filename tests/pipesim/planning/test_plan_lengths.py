"""Plans of sequences of several lengths: steps by hand, bounds, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError

MODEL = ps.Transformer(
    hidden_size=1024, n_layers=8, n_heads=16, sequence_length=1024, vocabulary_size=8192
)
CLUSTER = ps.Cluster("dgx_h100", n_gpus=4)
PADDED = [128, 1024, 512, 1024, 256, 256, 1024, 768]
PACKED = [[128] * 8, [1024], [512, 512], [256] * 3, [1024], [64] * 4, [768, 128], [1024]]
QUICK: dict[str, Any] = {
    "global_batch": 8, "schedules": ["1f1b", "zb_h1"], "recompute": "none", "progress": False,
    "sequence_parallel": False,
}  # fmt: skip


@pytest.mark.parametrize("lengths", [PADDED, PACKED], ids=["padded", "packed"])
def test_steps_are_those_of_public_functions_and_bounds_hold(lengths: Any) -> None:
    """All configurations; each replica has its part of the list."""
    plans = ps.plan(MODEL, CLUSTER, lengths=lengths, split="balanced", **QUICK)
    assert set(plans.table["microbatch_size"]) == {1}
    for row in plans.evaluations[::3]:
        choice = row.choice
        costs = MODEL.costs(
            choice.layers_per_stage, gpu=CLUSTER.gpu, microbatch_size=1, lengths=lengths,
            tensor_parallel=choice.tensor_parallel, flash_attention=True,
            network=CLUSTER.network(choice.tensor_parallel),
        )  # fmt: skip
        p, dp = choice.pipeline_parallel, choice.data_parallel
        graph = ps.lower(
            ps.schedule(choice.schedule, p, 8 // dp), n_replicas=dp, layout="stage_major",
            shard_optimizer=choice.shard_optimizer,
        )  # fmt: skip
        timeline = ps.simulate(graph, costs)
        assert timeline.makespan >= row.bound
        assert timeline.memory.peak.max() >= row.memory * (1 - 1e-9)
        if row.status == "simulated":
            assert (row.step, row.memory) == (timeline.makespan, timeline.memory.peak.max())
    tokens = sum(np.sum(x) for x in lengths)
    assert plans.table["tokens_per_second"][0] == pytest.approx(tokens / plans.best.step)
    assert plans.table["mfu"][0] == pytest.approx(plans.best.timeline.mfu())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": PADDED[:7]}, "7 entries, and global_batch=8"),
        ({"lengths": PADDED, "microbatch_size": 2}, "each of lengths is a micro-batch"),
        ({"lengths": PADDED, "n_slices": 2, "schedules": "seq1f1b"}, "n_slices=2: each of lengths"),
        ({"lengths": "all"}, "lengths must be"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    """Each message names the entry or the setting."""
    with pytest.raises(ArgumentError, match=message):
        ps.plan(MODEL, CLUSTER, **{**QUICK, **options})


def test_lengths_are_of_a_transformer() -> None:
    """Layers were measured with one length."""
    layers = ps.Layers({"forward": [1, 1], "backward": [2, 2]})
    with pytest.raises(ArgumentError, match="leave lengths out"):
        ps.plan(layers, CLUSTER, global_batch=8, lengths=PADDED)


def test_settings_of_trainers_have_no_lengths() -> None:
    """They would be those of equal sequences."""
    plans = ps.plan(MODEL, CLUSTER, lengths=PADDED, tensor_parallel=1, **QUICK)
    for export in (plans.to_megatron, plans.to_torchtitan):
        with pytest.raises(ArgumentError, match="for a plan with lengths take the numbers"):
            export()

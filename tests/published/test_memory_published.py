"""Measured peaks of GPU memory (SimuMax's release for 8 B200), predicted with nothing fitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps

ROWS = json.loads((Path(__file__).parent / "simumax_b200_subset.json").read_text())["expected"]
GIB = 2**30
#: Tensor-parallel size and stages; rows with experts or context parallelism are not modelled.
DENSE = {"tp1pp2": (1, 2), "tp2pp1": (2, 1), "tp4pp1": (4, 1), "tp8pp1": (8, 1)}
CASES = [row for row in ROWS if row["parallel"] in DENSE]


def peaks(row: dict[str, Any], **settings: Any) -> list[float]:
    """Return the predicted peak of each stage, in GiB, as Megatron-LM runs it."""
    t, p = DENSE[row["parallel"]]
    name, sizes = row["model"].replace("-", "_"), {"n_layers": row["layer_num"]}
    if name == "llama3_405b":
        sizes["n_kv_heads"] = 16  # as in SimuMax's configuration of the model
    model = ps.Transformer.preset(name, sequence_length=4096, bytes_per_gradient=4, **sizes)
    costs = model.costs(
        p, microbatch_size=1, flops_per_second=1e15, tensor_parallel=t, sequence_parallel=t > 1,
        flash_attention=True, partition="even", **settings,
    )  # fmt: skip
    schedule = ps.schedule("1f1b", p, row["mbc"])
    graph = ps.lower(schedule, n_replicas=8 // (t * p), shard_optimizer=True)
    return [float(peak) / GIB for peak in ps.simulate(graph, costs).memory.peak[:p]]


def test_there_are_rows() -> None:
    """Six of ten rows are dense and without context parallelism."""
    assert len(CASES) == 6


@pytest.mark.parametrize("fused_loss", [True, False])
@pytest.mark.parametrize("row", CASES, ids=lambda row: row["case"])
def test_measured_peak(row: dict[str, Any], fused_loss: bool) -> None:
    """The fullest GPU, within 0.3 %, and not above: some bytes of libraries are not counted.

    Here the LM head's backward has more bytes than the loss, fused as it was measured, or not.
    """
    peak = max(peaks(row, fused_loss=fused_loss))
    assert peak == pytest.approx(row["real_alloc_gib"], rel=0.003)
    assert peak < row["real_alloc_gib"]


@pytest.mark.parametrize("row", CASES, ids=lambda row: row["case"])
def test_peak_of_each_stage(row: dict[str, Any]) -> None:
    """SimuMax, whose error is 0.4 %, has the same peaks by stage."""
    predicted = peaks(row, fused_loss=True)
    published = list(row["peak_alloc_by_stage_gib"].values())
    assert predicted == pytest.approx(published, rel=0.003)

"""Steps of NVIDIA's H100 in FP8 over those in BF16, predicted with nothing fitted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps

TABLE = json.loads((Path(__file__).parent / "dgxc_h100_subset.json").read_text())
RUNS = [
    {**run, "seconds": seconds}
    for run, seconds in zip(TABLE["inputs"]["rows"], TABLE["expected"], strict=True)
]
PAIRS = [pair for pair in pairwise(RUNS) if pair[0]["model"] == pair[1]["model"]]


def step(run: dict[str, Any]) -> float:
    """Return the predicted seconds, as NeMo runs the step."""
    layout = ps.Layout(
        tensor_parallel=run["tp"], context_parallel=run["cp"], pipeline_parallel=run["pp"],
        data_parallel=run["n_gpus"] // (run["tp"] * run["cp"] * run["pp"]),
        available_gpus=run["n_gpus"],
    )  # fmt: skip
    model = ps.Transformer.preset(
        run["preset"], sequence_length=run["sequence_length"], bytes_per_gradient=4
    )
    costs = model.costs(
        run["pp"] * run["vp"], microbatch_size=run["mbs"], gpu=run["gpu"], partition="balanced",
        sequence_parallel=True, flash_attention=True, precision=run["precision"],
        framework=ps.Framework.preset("megatron_core_2024", exchange_element_bytes=2),
        network=layout.network("dgx_h100"), **layout.sharding,
    )  # fmt: skip
    n = run["gbs"] // run["mbs"] // layout.data_parallel
    order = ps.schedule("interleaved_1f1b", run["pp"], n, n_chunks=run["vp"])
    return ps.simulate(ps.lower(order, shard_optimizer=True, **layout.lowering), costs).makespan


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0]["model"])
def test_step_in_fp8_over_step_in_bf16(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Within 2 %: 0.687 for 0.677 (GPT-3 175B), and 0.687 for 0.675 (Llama 3.1 70B)."""
    usual, low = pair
    assert (usual["precision"], low["precision"]) == ("bf16", "fp8")
    ratio, measured = step(low) / step(usual), low["seconds"] / usual["seconds"]
    print(f"{usual['model']}: FP8 over BF16 {ratio:.3f}, measured {measured:.3f}")  # noqa: T201 - see -s
    assert ratio == pytest.approx(measured, rel=0.02)


def test_there_are_pairs() -> None:
    assert len(PAIRS) == 2

"""Steps of NVIDIA in 8 bits, predicted with nothing fitted: alone, and over other formats."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps

FRAMEWORK = ps.Framework.preset("megatron_core_2024", exchange_element_bytes=2)
MACHINES = {"h100_sxm": "dgx_h100", "b200": "dgx_b200"}


def table(name: str) -> list[dict[str, Any]]:
    """Return the rows of a published table, with what was measured."""
    content = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    rows = zip(content["inputs"]["rows"], content["expected"], strict=True)
    return [{**row, "measured": measured} for row, measured in rows]


NEMO, BRIDGE = table("dgxc_h100_subset"), table("megatron_bridge_25_subset")


@cache
def step(settings: str) -> float:
    """Return the predicted seconds of a row, whose settings are JSON, as Megatron-Core runs it.

    Layers of stages are not in the tables. They are taken to be balanced, as in
    ``benchmarks/_published_runs.py``.
    """
    run = json.loads(settings)
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
        sequence_parallel=run["tp"] > 1, flash_attention=True, precision=run["precision"],
        framework=FRAMEWORK, network=layout.network(MACHINES[run["gpu"]]), **layout.sharding,
    )  # fmt: skip
    n = run["gbs"] // run["mbs"] // layout.data_parallel
    order = ps.schedule("1f1b", run["pp"], n)
    if run["vp"] > 1:
        order = ps.schedule("interleaved_1f1b", run["pp"], n, n_chunks=run["vp"])
    graph = ps.lower(order, shard_optimizer=True, framework=FRAMEWORK, **layout.lowering)
    return ps.simulate(graph, costs).makespan


def ratio(rows: list[dict[str, Any]], model: str, gpu: str, *precisions: str) -> list[float]:
    """Return the seconds of a model in the first format over the second: predicted, measured."""
    runs = {x["precision"]: x for x in rows if (x["model"], x["gpu"]) == (model, gpu)}
    low, other = (runs[precision] for precision in precisions)
    return [step(json.dumps(low)) / step(json.dumps(other)), low["measured"] / other["measured"]]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GPT-3 175B", "Llama 3.1 70B"])
def test_step_in_fp8_over_step_in_bf16(model: str) -> None:
    """On H100 within 2 %; with 4 layers in each stage, 4.5 % too long for Llama."""
    predicted, measured = ratio(NEMO, model, "h100_sxm", "fp8", "bf16")
    print(f"{model}: FP8 over BF16 {predicted:.3f}, measured {measured:.3f}")  # noqa: T201 - see -s
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama 3 8B", "Llama 3.1 405B"])
def test_step_in_mxfp8_over_step_in_fp8(model: str) -> None:
    """On B200 within 2.5 %: steps are 20 % longer than NVIDIA's, their ratios are not."""
    predicted, speeds = ratio(BRIDGE, model, "b200", "mxfp8", "fp8")
    print(f"{model}: MXFP8 over FP8 {predicted:.3f}, measured {1 / speeds:.3f}")  # noqa: T201 - see -s
    assert predicted == pytest.approx(1 / speeds, rel=0.025)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [x for x in BRIDGE if x["gpu"] == "h100_sxm" and "ep" not in x],
    ids=lambda x: x["model"],
)
def test_tokens_a_second_in_fp8(run: dict[str, Any]) -> None:
    """On 64 and 1,024 H100 within 6 %; the table has tokens a second and GPU."""
    tokens = run["gbs"] * run["sequence_length"] / step(json.dumps(run)) / run["n_gpus"]
    print(f"{run['model']}: {tokens:.0f} tokens/s/GPU, measured {run['measured']}")  # noqa: T201
    assert tokens == pytest.approx(run["measured"], rel=0.06)

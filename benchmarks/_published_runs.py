"""Published training steps whose framework is known, as sets of `_published_steps`.

=================  ==============================================================================
set                ran on
=================  ==============================================================================
Aleph              Aleph Alpha's Scaling library of 2023, A100, fused norms
Aleph, torch norms the same, norms of single operations in 32 bits
BLOOM              Megatron-DeepSpeed of 2022, 384 A100
MPT                llm-foundry of 2023 (FSDP): H100, A100 of 80 GB, A100 of 40 GB
Megatron README    Megatron-Core of 2024, H100; micro-batch and chunks are not published, and taken
                   to be the fastest of `_MICROBATCHES` and of all that divide the layers
NeMo               NeMo of 2025, H100 (dgxc-benchmarking)
Bridge             Megatron-Bridge of 2025, FP8 and MXFP8: H100, B200, GB200, GB300
Experts            the same, models with experts, BF16 and MXFP8; and rows of 2026 in BF16
=================  ==============================================================================

Sources are in ``tests/published``: ``published_runs_subset.json``, ``dgxc_h100_subset.json`` and
``megatron_bridge_25_subset.json``. No term was fitted to these rows, but terms were chosen with
them at hand. Settings of Bridge are in its ``scripts/performance/configs`` (tag v0.2.0) and
``perf_recipes``: gradients are summed in 16 bits (``grad_reduce_in_fp32``), the loss is Transformer
Engine's, and experts get tokens at random (``moe_router_force_load_balancing``). Modules that they
recompute are element-wise, or the map from latent vectors, and are left out. Its racks have jobs of
64 of their 72 GPUs.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from _published_steps import EFFICIENCY, PUBLISHED, PublishedSteps, published_steps

import pipesim as ps
from pipesim.calibration.measured_steps import measured_steps, step_predictions
from pipesim.simulation.simulate import predict_timeline


class _Source(NamedTuple):
    """Name of a set in tables, its framework, and the share of the nominal rate of its NICs."""

    name: str
    framework: ps.Framework
    nic_efficiency: float = EFFICIENCY


_ALEPH = ps.Framework.preset("aleph_scaling_2023")
_FOUNDRY = ps.Framework.preset("llm_foundry_2023")
_BRIDGE = ps.Framework.preset("megatron_bridge_2025")
_SOURCES = {
    "aleph-rms": _Source("Aleph", _ALEPH),
    "aleph-unfused-norm": _Source(
        "Aleph, torch norms",
        ps.Framework.preset("aleph_scaling_2023", fused_norm=False, norm_bytes=4),
    ),
    # All-reduces of its own network: 5.06 GB/s over 4 nodes, of NICs of 12.5 GB/s (BigScience,
    # experiments/bandwidth/all_reduce_bench-a100-n4.txt).
    "bloom": _Source("BLOOM", ps.Framework.preset("megatron_deepspeed_2022"), 0.405),
    "foundry-h100_80gb": _Source("MPT, H100", _FOUNDRY),
    "foundry-a100_80gb": _Source("MPT, A100 80 GB", _FOUNDRY),
    "foundry-a100_40gb": _Source("MPT, A100 40 GB", _FOUNDRY),
    "megatron-readme": _Source("Megatron README", ps.Framework.preset("megatron_core_2024")),
    "dgxc": _Source("NeMo", ps.Framework.preset("nemo_2025")),
    **{
        f"{kind}, {gpu}": _Source(f"{kind}, {gpu.partition('_')[0].upper()}", _BRIDGE)
        for kind in ("Bridge", "Experts")
        for gpu in ("h100_sxm", "b200", "gb200", "gb300")
    },
}
_OF_MEGATRON = ("vTrain, one node", "vTrain, 512 GPUs", "Selene")
_MACHINES = {"a100": "dgx_a100", "h100": "dgx_h100", "b200": "dgx_b200", "gb200": "gb200_nvl72",
             "gb300": "gb300_nvl72"}  # fmt: skip
#: Sizes of micro-batches that are tried where none is published.
_MICROBATCHES = (1, 2, 4)


def published_runs() -> list[PublishedSteps]:
    """Return all sets, with their frameworks in the rows.

    Sets of `published_steps` that ran on Megatron-LM of 2021 come first.
    """
    megatron = ps.Framework.preset("megatron_2021")
    early = [
        replace(steps, rows=[{**row, "framework": megatron} for row in steps.rows])
        for steps in published_steps()
        if steps.name in _OF_MEGATRON
    ]
    runs = defaultdict[str, list[tuple[Mapping[str, Any], float]]](list)
    for name in ("published_runs_subset.json", "dgxc_h100_subset.json"):
        table = json.loads((PUBLISHED / name).read_text())
        for run, seconds in zip(table["inputs"]["rows"], table["expected"], strict=True):
            if run.get("precision", "bf16") == "bf16":
                runs[run.get("set", "dgxc")].append((run, seconds))
    for run, seconds in runs["moe"]:
        if run["label"].startswith("GPT OSS"):  # others are of AutoModel, or in the next table
            own = {"model": run["label"], "preset": "gpt_oss_120b", "sequence_length": 4096}
            bridge = {**run, **own, "precision": "bf16", "fused_loss": True}
            runs[f"Experts, {run['gpu']}"].append((bridge, seconds))
    table = json.loads((PUBLISHED / "megatron_bridge_25_subset.json").read_text())
    for run, speed in zip(table["inputs"]["rows"], table["expected"], strict=True):
        kind = "Experts" if "ep" in run else "Bridge"
        seconds = run["gbs"] * run["sequence_length"] / (speed * run["n_gpus"])
        runs[f"{kind}, {run['gpu']}"].append(({**run, "fused_loss": True}, seconds))
    return early + [_steps(source, runs[name]) for name, source in _SOURCES.items()]


def with_framework(steps: PublishedSteps, **changes: Any) -> PublishedSteps:
    """Return a set whose frameworks have other attributes."""
    rows = [{**row, "framework": replace(row["framework"], **changes)} for row in steps.rows]
    return replace(steps, rows=rows)


def best_case(steps: PublishedSteps) -> PublishedSteps:
    """Return a set whose rows have no framework."""
    rows = [{k: v for k, v in row.items() if k != "framework"} for row in steps.rows]
    return replace(steps, rows=rows)


def _steps(source: _Source, runs: Iterable[tuple[Mapping[str, Any], float]]) -> PublishedSteps:
    rows, groups = [], []
    for run, seconds in runs:
        network = _network(run, source.nic_efficiency)
        framework = replace(source.framework, **run.get("framework", {}))
        row = {**_row(run), "framework": framework, "seconds": seconds}
        rows.append(row if run["mbs"] else _fastest(row, run, network))
        groups.append(run.get("group", len(groups)))  # runs of other sizes of model or sequence
    return PublishedSteps(source.name, run["gpu"], network, rows, groups, ("flops",), "-")


def _fastest(row: Mapping[str, Any], run: Mapping[str, Any], network: ps.Network) -> dict[str, Any]:
    """Return a row with micro-batch and chunks of the fastest step that fits, of one replica."""
    gpu, per_stage = ps.GPU.preset(run["gpu"]), run["model"]["n_layers"] // run["pp"]
    chunks = [v for v in range(1, per_stage + 1) if per_stage % v == 0] if run["pp"] > 1 else [1]
    batch, tensor = run["gbs"] // row["n_replicas"], row["tensor_parallel"]
    alone = {"n_replicas": 1, "shard_optimizer": False, "global_batch": batch}
    steps = []
    for size, v in itertools.product(_MICROBATCHES, chunks):
        if batch % size or (v > 1 and batch // size % run["pp"]):
            continue
        order = {"schedule": "interleaved_1f1b", "n_chunks": v} if v > 1 else {}
        own = {**row, **order, "microbatch_size": size}
        (step,) = step_predictions(measured_steps([{**own, **alone}]))
        costs = step.model.costs(
            step.layers_per_stage, gpu=gpu, network=network.grouped(tensor), **step.options
        )
        timeline = predict_timeline(step.graph, costs)
        # Replicas share the optimizer's state.
        shared = costs.per_stage("optimizer_bytes", step.graph.n_stages).sum() / run["pp"]
        held = timeline.memory.peak.max() - shared * (1 - 1 / row["n_replicas"])
        if held < gpu.memory:
            steps.append((timeline.makespan, len(steps), own))
    return min(steps)[-1]


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    tensor, context, depth = run["tp"], run.get("cp", 1), run["pp"]
    is_nemo = "precision" in run
    sizes = run["model"]
    if is_nemo:
        sizes = {"model": run["preset"], "sequence_length": run["sequence_length"],
                 "bytes_per_gradient": 2}  # fmt: skip
    return {
        "label": run["model"] if is_nemo else run["label"],
        **sizes,
        "global_batch": run["gbs"],
        "microbatch_size": run["mbs"],
        "tensor_parallel": tensor,
        "context_parallel": context,
        "sequence_parallel": run.get("sp", is_nemo),
        "recompute": run.get("recompute", "none"),
        "flash_attention": run.get("flash", is_nemo),
        "fused_loss": run.get("fused_loss", False),
        "precision": run.get("precision", "bf16"),
        "expert_parallel": run.get("ep", 1),
        "mtp_layers": run.get("mtp", 0),
        "n_devices": depth,
        "n_replicas": run["n_gpus"] // (tensor * context * depth),
        **dict(_order(run)),
    }


def _order(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the order and of its lowering."""
    chunks = run.get("vp", 1)
    if "fsdp" in run:  # layer by layer, embedding and head alone
        layers = [0, *[1] * run["model"]["n_layers"], 0]
        yield from (("schedule", "naive"), ("n_chunks", len(layers)), ("layers_per_stage", layers))
        yield from (("shard_parameters", run["fsdp"]), ("grad_sync", "every"))
        return
    yield "shard_optimizer", run["n_gpus"] > run["tp"] * run["pp"] * run.get("cp", 1)
    if chunks > 1:
        yield from (("schedule", "interleaved_1f1b"), ("n_chunks", chunks))
    if run["pp"] > 1:
        layout = run.get("layout", "balanced")
        if "layout" in run and "m" not in layout:  # prediction of further tokens is on the last
            layout = layout.replace("L", "m" * run.get("mtp", 0) + "L")
        yield "layers_per_stage", run.get("layers", layout)


def _network(run: Mapping[str, Any], nic_efficiency: float) -> ps.Network:
    """Return the network of a machine at `EFFICIENCY`, with its own NICs if they are known."""
    network = ps.Network.preset(_MACHINES[run["gpu"].partition("_")[0]], EFFICIENCY)
    assert network.nodes is not None
    changes: dict[str, Any] = {}
    if network.nodes.gpus_per_node > 64:
        changes = {"devices_per_node": 64, "n_nics": 64}
    if "nic" in run:
        changes["nic_bandwidth"] = nic_efficiency * run["nic"]
    if "nics" in run:
        changes["n_nics"] = run["nics"]
    return replace(network, nodes=replace(network.nodes, **changes))

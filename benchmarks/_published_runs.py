"""Published training steps by the framework that ran them, as rows of `pipesim.GPU.fit`.

Sources are in ``tests/published/published_runs_subset.json`` and ``dgxc_h100_subset.json``. The
terms were not fitted to these rows, but were built with them at hand.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from _machine import ROOT
from _published_steps import EFFICIENCY
from numpy.typing import NDArray

import pipesim as ps
from pipesim.calibration.measured_steps import (
    StepPrediction,
    measured_steps,
    predicted_seconds,
    step_predictions,
)

Floats = NDArray[np.float64]
PUBLISHED = ROOT / "tests" / "published"
#: Framework of each set.
FRAMEWORKS: Mapping[str, ps.Framework] = {
    "aleph-rms": ps.Framework.preset("aleph_scaling_2023"),
    "aleph-unfused-norm": ps.Framework.preset("aleph_scaling_2023", fused_norm=False, norm_bytes=4),
    "bloom": ps.Framework.preset("megatron_deepspeed_2022"),
    "megatron-readme": ps.Framework.preset("megatron_core_2024"),
    "dgxc": ps.Framework.preset("megatron_core_2024", exchange_element_bytes=2),
    "foundry-h100_80gb": ps.Framework.preset("llm_foundry_2023"),
    "foundry-a100_80gb": ps.Framework.preset("llm_foundry_2023"),
    "foundry-a100_40gb": ps.Framework.preset("llm_foundry_2023"),
    "moe": ps.Framework(),
}
_MACHINES = {"a100": "dgx_a100", "h100": "dgx_h100", "b200": "dgx_b200", "gb200": "gb200_nvl72"}


@dataclass(frozen=True)
class PublishedRun:
    """A published step: its row for `pipesim.GPU.fit`, its GPU, and the network of single GPUs."""

    row: dict[str, Any]
    gpu: str
    network: ps.Network
    group: str


@dataclass(frozen=True)
class PublishedRuns:
    """Runs of one source and framework."""

    name: str
    runs: Sequence[PublishedRun]

    @property
    def seconds(self) -> Floats:
        """Measured seconds; shape ``(n_runs,)``."""
        return np.array([run.row["seconds"] for run in self.runs])

    @cached_property
    def steps(self) -> list[StepPrediction]:
        """The prediction of each run."""
        return step_predictions(measured_steps([run.row for run in self.runs]))

    def predicted(self, framework: ps.Framework) -> Floats:
        """Return the predicted seconds of each run; shape ``(n_runs,)``."""
        seconds = []
        for run, step in zip(self.runs, self.steps, strict=True):
            step.options["framework"] = framework
            gpu = ps.GPU.preset(run.gpu)
            seconds += predicted_seconds([step], gpu, run.network.grouped)
        return np.array(seconds)


def published_runs() -> list[PublishedRuns]:
    """Return all sets."""
    sets: dict[str, list[PublishedRun]] = defaultdict(list)
    for name in ("published_runs_subset.json", "dgxc_h100_subset.json"):
        table = json.loads((PUBLISHED / name).read_text())
        for run, seconds in zip(table["inputs"]["rows"], table["expected"], strict=True):
            if run.get("precision", "bf16") != "bf16" or run["gpu"] == "gb200":
                continue
            sets[run.get("set", "dgxc")].append(_run(run, seconds))
    return [PublishedRuns(name, runs) for name, runs in sets.items()]


def _run(run: Mapping[str, Any], seconds: float) -> PublishedRun:
    tensor, context, depth = run["tp"], run.get("cp", 1), run["pp"]
    data = run["n_gpus"] // (tensor * context * depth)
    model = dict(run["model"]) if isinstance(run["model"], Mapping) else {"preset": run["preset"]}
    if "preset" in model:
        model["model"] = model.pop("preset")
    if "sequence_length" in run:
        model |= {"sequence_length": run["sequence_length"], "bytes_per_gradient": 4}
    row = {
        "label": run.get("label", run["model"]),
        **model,
        "global_batch": run["gbs"],
        "microbatch_size": run["mbs"] or 1,
        "tensor_parallel": tensor,
        "context_parallel": context,
        "expert_parallel": run.get("ep", 1),
        "sequence_parallel": run.get("sp", tensor > 1 and "precision" in run),
        "recompute": run.get("recompute", "none"),
        "flash_attention": run.get("flash", "precision" in run),
        "n_devices": depth,
        "n_replicas": data,
        "seconds": seconds,
        **dict(_order(run, data)),
    }
    return PublishedRun(row, run["gpu"], _network(run), run.get("group", ""))


def _order(run: Mapping[str, Any], data: int) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the order and of its lowering."""
    chunks = run.get("vp", 1)
    if "fsdp" in run:  # a stage a layer, each of which gathers its parameters
        chunks = run["model"]["n_layers"]
        yield "shard_parameters", run["fsdp"]
    else:
        yield "shard_optimizer", data > 1
    if chunks > 1:
        yield from (("schedule", "interleaved_1f1b"), ("n_chunks", chunks))
    if run["pp"] > 1:
        yield "layers_per_stage", run.get("layers", "balanced")


def _network(run: Mapping[str, Any]) -> ps.Network:
    """Return the network of a machine at `EFFICIENCY`, with its own NICs if they are known."""
    machine = _MACHINES[run["gpu"].partition("_")[0]]
    network = ps.Network.preset(machine, EFFICIENCY)
    assert network.nodes is not None
    changes: dict[str, Any] = {}
    if "nic" in run:
        changes["nic_bandwidth"] = EFFICIENCY * run["nic"]
    if "nics" in run:
        changes["n_nics"] = run["nics"]
    return replace(network, nodes=replace(network.nodes, **changes))

"""Published times of training steps, as rows of `pipesim.GPU.fit`.

Every set ran on Megatron-LM or a relative: blocking messages, ranks of a pipeline stage on
consecutive GPUs, and scatter-gather of messages between tensor-parallel groups.

================  ==================================================================================
set               source
================  ==================================================================================
vTrain, one node  Bang et al., arXiv 2312.12391: 240 of 1,440 steps on up to 8 A100, full recompute
vTrain, 512 GPUs  the same: steps on 64 to 512 A100, nodes of 800 Gb/s, full recompute
Selene            Korthikanti et al., arXiv 2205.05198, table 5: full recompute; and selective
                  recompute with sequence parallelism
B200              MooreThreads, SimuMax, docs/b200: Llama 3 on 8 GPUs; dense models without context
                  parallelism. Its configuration of 405B has 16 heads of keys and values.
                  Megatron-LM 23e00ed scales, checks and clips gradients in passes of their own
zero bubble       Qi et al., arXiv 2401.10241, table 4: 8 to 32 A100, no recompute
================  ==================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from _machine import ROOT
from numpy.typing import NDArray

import pipesim as ps
from pipesim.calibration import Calibration
from pipesim.calibration.measured_steps import (
    StepPrediction,
    measured_steps,
    predicted_seconds,
    step_predictions,
)

Floats = NDArray[np.float64]
PUBLISHED = ROOT / "tests" / "published"
#: Share of the nominal bandwidths of networks that messages of tens of MB reach; assumed.
EFFICIENCY = 0.7
_MEGATRON = {"overlap": False, "layout": "stage_major", "scatter_gather": True}


@dataclass(frozen=True)
class PublishedSteps:
    """Measured steps of one source.

    Attributes
    ----------
    name
        Name in tables.
    gpu
        Name of the preset of their GPU.
    network
        Network of single GPUs, at `EFFICIENCY`.
    rows
        Settings and seconds of each step, as `pipesim.GPU.fit` takes them.
    groups
        Of each row, rows of which a user would choose the fastest: one model, batch and number of
        GPUs.
    constants
        Constants to fit.
    published
        Mean error of the source's simulator, or of another, and on which rows.
    """

    name: str
    gpu: str
    network: ps.Network
    rows: Sequence[dict[str, Any]]
    groups: Sequence[Any]
    constants: tuple[str, ...]
    published: str

    @property
    def seconds(self) -> Floats:
        """Measured seconds; shape ``(n_rows,)``."""
        return np.array([row["seconds"] for row in self.rows])

    @cached_property
    def steps(self) -> list[StepPrediction]:
        """The prediction of each row."""
        return step_predictions(measured_steps(self.rows))

    def predicted(self, gpu: ps.GPU, network: ps.Network) -> Floats:
        """Return the predicted seconds of each row; shape ``(n_rows,)``."""
        return np.array(predicted_seconds(self.steps, gpu, network.grouped))

    def predicted_with(self, fitted: Calibration) -> Floats:
        """Return the predicted seconds of each row with fitted constants."""
        return np.array(predicted_seconds(self.steps, fitted.gpu, fitted.network))

    def some(self, numbers: Iterable[int]) -> PublishedSteps:
        """Return the set of some of the rows."""
        chosen = list(numbers)
        rows, groups = [self.rows[k] for k in chosen], [self.groups[k] for k in chosen]
        return replace(self, rows=rows, groups=groups)


def published_steps() -> list[PublishedSteps]:
    """Return all sets."""
    return [_vtrain_node(), _vtrain_cluster(), _selene(), _b200(), _zero_bubble()]


def fit_set(steps: PublishedSteps, **fit: Any) -> Calibration:
    """Return the constants of a set, of as few as it has rows."""
    arguments: dict[str, Any] = {
        "gpu": steps.gpu, "network": steps.network,
        "constants": steps.constants[: len(steps.rows)], **fit,
    }  # fmt: skip
    return ps.GPU.fit(steps.rows, **arguments)


def fifths(n_rows: int) -> list[list[int]]:
    """Return five disjoint parts of the rows, drawn with seed 0."""
    order = np.random.default_rng(0).permutation(n_rows)
    return [part.tolist() for part in np.array_split(order, 5)]


def _load(name: str) -> Any:
    return json.loads((PUBLISHED / name).read_text())


def _gpt(hidden: int, heads: int, layers: int, sequence: int, vocabulary: int) -> dict[str, int]:
    """Return the sizes of a model of GPT-3's shape."""
    return {
        "hidden_size": hidden,
        "n_heads": heads,
        "n_layers": layers,
        "sequence_length": sequence,
        "vocabulary_size": vocabulary,
    }


def _network(machine: str, **changes: float) -> ps.Network:
    """Return a machine's network at `EFFICIENCY`, with changed fields of its nodes."""
    network = ps.Network.preset(machine, EFFICIENCY)
    assert network.nodes is not None
    return replace(network, nodes=replace(network.nodes, **changes))


def _vtrain_row(values: Sequence[float], vocabulary: int) -> dict[str, Any]:
    """Return a row of vTrain's tables, from the column of GPUs on."""
    _, batch, microbatch, hidden, heads, layers, sequence, tensor, data, pipeline = map(
        int, values[:-1]
    )
    return {
        **_gpt(hidden, heads, layers, sequence, vocabulary),
        **_MEGATRON,
        "global_batch": batch,
        "microbatch_size": microbatch,
        "tensor_parallel": tensor,
        "n_replicas": data,
        "n_devices": pipeline,
        "recompute": "full",
        "seconds": values[-1] / 1e3,
    }


def _vtrain_node() -> PublishedSteps:
    listed = _load("vtrain_single_a100_node.json")["expected"]
    rows = [_vtrain_row(values, 50304) for values in listed]
    groups = [(n, batch, hidden, layers) for n, batch, _, hidden, _, layers, *_ in listed]
    constants = (
        *("flops", "bandwidth", "launch", "synchronization", "network_latency"),
        *("overhead", "half_depth", "network_efficiency"),
    )
    network = _network("dgx_a100")
    return PublishedSteps(
        "vTrain, one node",
        "a100_80gb",
        network,
        rows,
        groups,
        constants,
        "vTrain 8.4 % of 1,440 rows",
    )


def _vtrain_cluster() -> PublishedSteps:
    listed = [
        values
        for _, *values in _load("vtrain_multi_a100.json")["expected"]
        if values[1] % (values[2] * values[8]) == 0  # some batches are no multiple
    ]
    rows = [_vtrain_row(values, 51200) for values in listed]
    groups = [(n, batch, hidden, layers) for n, batch, _, hidden, _, layers, *_ in listed]
    network = _network("dgx_a100", nic_bandwidth=EFFICIENCY * 12.5e9)  # 800 Gb/s for 8 GPUs
    constants = ("flops", "bandwidth")
    return PublishedSteps(
        "vTrain, 512 GPUs",
        "a100_80gb",
        network,
        rows,
        groups,
        constants,
        "vTrain 14.7 % of 109 rows",
    )


def _selene() -> PublishedSteps:
    table = _load("korthikanti_table3_4_5.json")
    rows, groups = [], []
    for name, sizes in table["inputs"]["models"].items():
        chunks = table["inputs"]["interleave"].get(name, 1)
        order = {"schedule": "interleaved_1f1b", "n_chunks": chunks} if chunks > 1 else {}
        for kind in ("full_recompute", "present"):
            is_full = kind == "full_recompute"
            rows.append({
                **_gpt(sizes["hidden"], sizes["heads"], sizes["layers"], 2048, 51200),
                **_MEGATRON,
                **order,
                "label": f"{name}, {kind}",
                "global_batch": sizes["gbs"],
                "microbatch_size": sizes["mbs"],
                "tensor_parallel": sizes["tp"],
                "n_devices": sizes["pp"],
                "sequence_parallel": not is_full,
                "recompute": "full" if is_full else "selective",
                "seconds": table["expected"]["iteration_s"][name][kind],
            })  # fmt: skip
            groups.append(name)
    return PublishedSteps(
        "Selene", "a100_80gb", _network("dgx_a100"), rows, groups,
        ("flops", "network_efficiency"), "Calculon 3.65 % of these",
    )  # fmt: skip


def _b200() -> PublishedSteps:
    rows, groups, errors = [], [], []
    for case in _load("simumax_b200_subset.json")["expected"]:
        sizes = re.fullmatch(r"tp(\d+)pp(\d+)", case["parallel"])
        if sizes is None or not case["model"].startswith("llama3"):
            continue
        tensor, pipeline = map(int, sizes.groups())
        is_largest = case["model"] == "llama3-405b"
        rows.append({
            "label": case["case"],
            "model": "llama3_405b" if is_largest else "llama3_70b",
            **({"n_kv_heads": 16} if is_largest else {}),
            "n_layers": case["layer_num"],
            "sequence_length": 4096,
            "bytes_per_gradient": 4,
            "microbatch_size": 1,
            "n_microbatches": case["mbc"],
            "tensor_parallel": tensor,
            "sequence_parallel": tensor > 1,
            "flash_attention": True,
            "fused_loss": True,
            "gradient_passes": True,
            "n_devices": pipeline,
            "n_replicas": 8 // (tensor * pipeline),
            "shard_optimizer": True,
            "overlap": False,
            "layout": "stage_major",
            "seconds": case["real_ms"] / 1e3,
        })  # fmt: skip
        groups.append(case["model"])
        errors.append(abs(case["perf_ms"] / case["real_ms"] - 1))
    constants = ("flops", "network_efficiency")
    return PublishedSteps(
        "B200", "b200", _network("dgx_b200"), rows, groups, constants,
        f"SimuMax {np.mean(errors):.1%} of these",
    )  # fmt: skip


def _zero_bubble() -> PublishedSteps:
    table = _load("zb_table4_throughput.json")
    models = _load("zb_table5_bubble_rates.json")["inputs"]["models"]
    chunks = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}  # so that a chunk has one layer
    schedules = {"1F1B": "1f1b", "1F1B-I": "interleaved_1f1b", "ZB-1p": "zb_1p", "ZB-2p": "zb_2p"}
    rows, groups = [], []
    for number, run in enumerate(table["inputs"]["rows"]):
        name, p, m, b = run["model"], run["p"], run["m"], run["microbatch"]
        model = models[name]
        for kind, rates in table["expected"]["samples_per_gpu_per_s"].items():
            n_stages = p * chunks[name] if kind == "1F1B-I" else p
            # Embedding and head take the place of a layer.
            most = (model["layers"] + 2) // n_stages
            layers = [most - 1] + [most] * (n_stages - 2) + [most - 1]
            options = {"n_chunks": chunks[name]} if kind == "1F1B-I" else {}
            rows.append({
                **_gpt(model["hidden"], model["heads"], model["layers"], 1024, 50304),
                **options,
                "label": f"{name}, {m} micro-batches, {kind}",
                "schedule": schedules[kind],
                "n_devices": p,
                "n_microbatches": m,
                "microbatch_size": b,
                "layers_per_stage": layers,
                "overlap": False,
                "seconds": m * b / (rates[number] * p),
            })  # fmt: skip
            groups.append((name, m))
    return PublishedSteps(
        "zero bubble", "a100_80gb", _network("dgx_a100"), rows, groups, ("flops", "bandwidth"),
        "authors' own rates 9.2 % of these",
    )  # fmt: skip

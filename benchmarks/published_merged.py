"""Published gains of F and B merged over exchanges of experts, predicted from models' sizes.

- Published (NVIDIA-NeMo/Megatron-Bridge, page ``nemo-mbridge-perf-expert-parallel-overlap``): steps
  of Qwen3 30B-A3B on 16 H100, with experts on 16 GPUs and no other parallelism, 1,024 sequences,
  BF16, all-to-all, no fused permutation and no CUDA graphs: 41.25 s, 31.31 s with
  ``overlap_moe_expert_parallel_comm`` (1.317 times as fast), and 31.20 s with
  ``delay_wgrad_compute`` too. Sequences of 4,096 tokens, and micro-batches of one, are those of
  another table of the page.
- Published (flagos-ai/FlagScale, pull request 644): DualPipeV makes training of "DeepSeek models of
  varying scales" 4 to 11 % faster. Neither the models nor the schedule before are named: rows here
  are DeepSeek-V2 and V3 on 64 H100, 8 devices of 8 replicas that share experts, 32 micro-batches.
- Constants are those of presets. Nothing is fitted.
- Not modelled: imbalance of experts; the W of a layer within its merged pair, where Megatron-LM
  runs all but the last. Here the W of a stage follows the pair, and hides no exchange.

``python benchmarks/published_merged.py`` prints the tables and writes them, in half a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from _machine import ROOT, publish, table

import pipesim as ps

#: Seconds of a step of Qwen3 30B-A3B, by ``merged``.
QWEN: dict[Any, float] = {False: 41.25, True: 31.31, "delayed_w": 31.20}
#: Schedule and options of each row of DeepSeek's models.
ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", {}),
    "interleaved_1f1b": ("interleaved_1f1b", {}),
    "interleaved_1f1b, merged": ("interleaved_1f1b", {"merged": True}),
    "dualpipev": ("dualpipev", {}),
}


def step(model: str, schedule: ps.Schedule, experts: int, framework: ps.Framework) -> float:
    """Return the seconds of a step of ``experts`` replicas that share the experts."""
    n_gpus = schedule.n_devices * experts
    costs = ps.Transformer.preset(model).costs(
        schedule.n_stages, gpu="h100_sxm", microbatch_size=1, expert_parallel=experts,
        framework=framework, flash_attention=True, partition="balanced",
        network=ps.Cluster("dgx_h100", n_gpus=n_gpus).network(),
    )  # fmt: skip
    graph = ps.lower(
        schedule, n_replicas=experts, shard_optimizer=True, expert_layers=costs.expert_layers,
        expert_replicas=costs.expert_replicas, framework=framework,
    )  # fmt: skip
    return ps.simulate(graph, replace(costs, workload=None)).makespan  # no limit of memory


def qwen(name: str) -> list[list[str]]:
    """Return the rows of Qwen3 30B-A3B with a framework's preset."""
    framework = replace(ps.Framework.preset(name), fused_permute=False)
    seconds = {
        merged: step("qwen3_30b_a3b", ps.schedule("1f1b", 1, 64, merged=merged), 16, framework)
        for merged in QWEN
    }
    return [
        [
            name, str(merged), f"{QWEN[merged]:.2f}", f"{own:.2f}",
            f"{100 * (own / QWEN[merged] - 1):+.1f}%",
            f"{QWEN[False] / QWEN[merged]:.3f}", f"{seconds[False] / own:.3f}",
        ]
        for merged, own in seconds.items()
    ]  # fmt: skip


def deepseek(model: str) -> list[list[str]]:
    """Return the rows of a model of DeepSeek, and by how much DualPipeV is faster than each."""
    framework = replace(ps.Framework.preset("megatron_core_2024"), schedules=None)
    seconds = {
        name: step(model, ps.schedule(order, 8, 32, **options), 8, framework)
        for name, (order, options) in ORDERS.items()
    }
    last = seconds["dualpipev"]
    return [
        [model, name, f"{own:.2f}", f"{100 * (own / last - 1):+.1f}%"]
        for name, own in seconds.items()
    ]


def lines() -> list[str]:
    """Return both tables."""
    frameworks = [row for x in ("megatron_core_2024", "megatron_bridge_2025") for row in qwen(x)]
    head = ["framework", "merged", "published", "predicted", "error", "gain", "predicted gain"]
    models = [row for x in ("deepseek_v2", "deepseek_v3") for row in deepseek(x)]
    return [
        "Seconds of a step of Qwen3 30B-A3B on 16 H100, and how many times as fast as without:",
        *table(head, frameworks, 2),
        "",
        "Seconds of a step of 64 H100, and how much faster DualPipeV is (published: 4 to 11 %):",
        *table(["model", "schedule", "predicted", "DualPipeV is faster by"], models, 2),
    ]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "published_merged.txt")
    options = parser.parse_args()
    publish(["# python benchmarks/published_merged.py", "", *lines()], options.out)


if __name__ == "__main__":
    main()

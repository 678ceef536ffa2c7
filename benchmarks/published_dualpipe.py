"""DeepSeek-V3's training step: the share of expert exchanges that DualPipe hides, and GPU hours.

- Published (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437): 16 pipeline stages, 64
  expert-parallel GPUs on 8 nodes, 2,048 H800, no tensor parallelism (section 3.2); a batch of
  15,360 sequences of 4,096 tokens (section 4.2); NVLink of 160 GB/s and InfiniBand of 50 GB/s
  (section 3.2.2); compute to communication of about 1 to 1 without overlap (section 3.2.1); 180,000
  GPU hours for 10^12 tokens (section 1); bubbles (table 2, ``tests/published/dualpipe.json``).
- Assumed, since the report does not say: one sequence a micro-batch, and the layers of each stage.
- Constants are those of the preset ``h800`` and of the report. Nothing is fitted.
- Not modelled: products in FP8, which have twice the rate, so that predictions should be too long;
  the 20 of 132 multiprocessors that move tokens; recompute of norms and of projections; the module
  that predicts a second token; imbalance of experts. The batch is cut over 128 replicas, of which
  one is simulated, with the seconds of its exchanges: the reduction of gradients and STEP are left
  out, and so is memory, which needs the sharded optimizer of all replicas.

``python benchmarks/published_dualpipe.py`` prints the tables and writes them, in a few seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _machine import ROOT, publish, table

import pipesim as ps
from pipesim.ops import Op

N_GPUS, N_STAGES, EXPERT_PARALLEL, GPUS_PER_NODE = 2048, 16, 64, 8
BATCH, TOKENS = 15_360, 4096
N_MICROBATCHES = BATCH * N_STAGES // N_GPUS
PUBLISHED_HOURS = 180e3
#: Bytes a second of NVLink and of InfiniBand; latencies as in `pipesim.Network.preset`.
NVLINK, INFINIBAND, PORT_LATENCY, NIC_LATENCY = 160e9, 50e9, 3.4e-6, 14e-6
#: 61 layers; the first 3 have no experts, and the last stage has the LM head.
LAYERS = (4, 3, 3, *(4,) * 12, 3)
#: A scale of 4 bytes for each 128 elements in FP8 (section 3.3.2).
FP8 = 1 + 4 / 128
EXCHANGES: dict[str, dict[str, Any]] = {
    "each expert, BF16": {},
    "each node once, BF16": {"expert_exchange": "hierarchical"},
    "each node once, FP8 to experts": {
        "expert_exchange": "hierarchical", "dispatch_element_bytes": FP8,
    },
}  # fmt: skip


def stage_costs(exchange: dict[str, Any]) -> ps.Costs:
    """Return the costs of the 16 stages, with the seconds of an exchange between 8 nodes.

    Neighbours of the pipeline are on different nodes.
    """
    nodes = ps.Nodes(
        GPUS_PER_NODE, PORT_LATENCY, NVLINK, NIC_LATENCY, INFINIBAND, n_nics=GPUS_PER_NODE
    )
    costs = ps.Transformer.preset("deepseek_v3", bytes_per_gradient=4).costs(
        LAYERS, gpu="h800", microbatch_size=1, expert_parallel=EXPERT_PARALLEL,
        flash_attention=True, fused_loss=True, network=ps.Network(nodes=nodes), **exchange,
    )  # fmt: skip
    pairs = ps.Nodes(1, nic_latency=NIC_LATENCY, nic_bandwidth=INFINIBAND)
    return replace(costs, network=ps.Network(nodes=pairs))


def without_exchanges(costs: ps.Costs) -> ps.Costs:
    """Return costs whose exchanges take no time."""
    return replace(costs, exchange_dispatch=0.0, exchange_combine=0.0)


def step(costs: ps.Costs, *, as_tasks: bool) -> ps.Timeline:
    """Return the step of a replica, with exchanges as tasks or as a part of F and B."""
    schedule = ps.schedule("dualpipe", N_STAGES, N_MICROBATCHES)
    options: dict[str, Any] = {"expert_layers": costs.expert_layers} if as_tasks else {}
    graph = ps.lower(schedule, step="none", **options)
    return ps.simulate(graph, costs, memory_limit=1e15)


def gpu_hours(seconds: float) -> float:
    """Return the GPU hours of 10^12 tokens by the seconds of a step."""
    return seconds / 3600 * N_GPUS * 1e12 / (BATCH * TOKENS)


def ratios(costs: ps.Costs) -> tuple[float, float]:
    """Return the seconds of compute over those of exchanges, of F and of B, of all stages."""
    layers = np.sum(costs.per_stage("expert_layers", N_STAGES))
    both = sum(
        costs.per_stage(f"exchange_{name}", N_STAGES)[-1] for name in ("dispatch", "combine")
    )
    forward, backward = (
        float(np.sum(costs.per_stage(name, N_STAGES)) / (layers * both))
        for name in ("forward", "backward")
    )
    return forward, backward


def step_rows() -> list[list[str]]:
    """Return a row of the table for each way to exchange tokens."""
    rows = []
    for name, exchange in EXCHANGES.items():
        costs = stage_costs(exchange)
        exposed = step(costs, as_tasks=False).makespan
        hidden = step(costs, as_tasks=True).makespan
        free = step(without_exchanges(costs), as_tasks=False).makespan
        ends = [costs.per_stage(f"exchange_{x}", N_STAGES)[-1] for x in ("dispatch", "combine")]
        rows.append([
            name, *(f"{1e3 * x:.2f}" for x in ends), *(f"{x:.1f}" for x in ratios(costs)),
            *(f"{x:.1f}" for x in (exposed, hidden, free)),
            f"{(exposed - hidden) / (exposed - free):.0%}",
            f"{gpu_hours(hidden) / 1e3:.0f}", f"{gpu_hours(hidden) / PUBLISHED_HOURS - 1:+.0%}",
        ])  # fmt: skip
    return rows


def bubble_rows() -> list[list[str]]:
    """Return bubbles of even stages without messages, and by the formulas of table 2."""
    costs = without_exchanges(stage_costs({}))
    f, b, w = (
        float(np.mean(costs.per_stage(name, N_STAGES)))
        for name in ("forward", "backward", "weight_grad")
    )
    even = ps.Costs(f, backward=b, input_grad=b - w, weight_grad=w)
    formulas = {
        "1f1b": (N_STAGES - 1) * (f + b),
        "zb_h1": (N_STAGES - 1) * (f + b - 2 * w),
        "dualpipe": (N_STAGES / 2 - 1) * ((f + b) + b - 3 * w),
    }
    rows = []
    for name, formula in formulas.items():
        graph = ps.lower(ps.schedule(name, N_STAGES, N_MICROBATCHES), step="none")
        timeline = ps.simulate(graph, even)
        compute = np.isin(graph.op, (Op.F, Op.B, Op.I, Op.W))
        busy = np.bincount(graph.device[compute], timeline.duration[compute]).max()
        rows.append([name, f"{formula:.2f}", f"{timeline.makespan - busy:.2f}"])
    return rows


def lines() -> list[str]:
    """Return the tables."""
    head = [
        "a token is sent to", "dispatch (ms)", "combine (ms)", "F", "B", "exposed (s)",
        "DualPipe (s)", "free (s)", "hidden", "10^3 GPU hours", "error",
    ]  # fmt: skip
    return [
        f"DualPipe, {N_STAGES} stages, {N_MICROBATCHES} micro-batches, {EXPERT_PARALLEL} GPUs with "
        f"all experts; published: {PUBLISHED_HOURS / 1e3:.0f} thousand GPU hours for 10^12 tokens.",
        "F and B: compute over exchanges without overlap; published is about 1, with products in "
        "FP8.",
        "exposed, free: exchanges inside F and B, and exchanges that take no time.",
        "",
        *table(head, step_rows(), 1),
        "",
        "Bubble (s) of even stages without messages and exchanges, by the formulas of table 2, if "
        "F and B of a pair take as long as one after the other:",
        *table(["schedule", "table 2", "simulated"], bubble_rows(), 1),
    ]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = ROOT / "results" / "benchmarks"
    parser.add_argument("--out", type=Path, default=folder / "published_dualpipe.txt")
    options = parser.parse_args()
    publish(["# python benchmarks/published_dualpipe.py", "", *lines()], options.out)


if __name__ == "__main__":
    main()

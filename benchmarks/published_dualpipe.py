"""DeepSeek-V3's training step: exchanges of experts that DualPipe hides, a pair, and GPU hours.

- Published (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437): 16 pipeline stages, 64
  expert-parallel GPUs on 8 nodes, 2,048 H800, no tensor parallelism (section 3.2); a batch of
  15,360 sequences of 4,096 tokens (section 4.2); NVLink of 160 GB/s and InfiniBand of 50 GB/s, 20
  of 132 multiprocessors that move tokens (section 3.2.2); compute to communication of about 1 to 1
  without overlap (section 3.2.1); 180,000 GPU hours for 10^12 tokens (section 1); bubbles (table 2,
  ``tests/published/dualpipe.json``).
- Published (deepseek-ai/profile-data, ``train.json``): the kernels of a pair of F and B of 4 layers
  with experts, on one of 64 such GPUs, for one sequence of 4,096 tokens, with even experts and
  without messages of the pipeline. The pair takes 129.0 ms. Streams of compute are busy for 124.3
  ms, that of exchanges for 114.5 ms, of which 96 % are beside compute: 80.5 ms of dispatch and
  combine, and waits for counts. Names of kernels are those of FlashAttention-3.
- Published (deepseek-ai/DeepEP, ``docs/legacy.md``): with these sizes, a dispatch in FP8 reaches 51
  GB/s and a combine 50 GB/s, where a token counts for each of its nodes, its own included.
- Assumed, since the report does not say: one sequence a micro-batch, and the layers of each stage.
- Constants are those of the preset ``h800`` and of these sources. Nothing is fitted. A share of
  20/132 of its speed is lost by compute beside exchanges, in the last row of each table.
- Errors of parts: on streams of compute, F of a layer takes 9.0 ms in the trace and B 20.6 ms;
  without exchanges beside them they are predicted at 10.2 and 19.8 ms.
- Not modelled: recompute of norms and projections, which makes B longer, and the module that
  predicts a second token; casts of blocks of 128, where ``precision="fp8"`` has casts of whole
  tensors; imbalance of experts. Exchanges lose nothing beside compute: in the trace, the one
  dispatch without compute beside it takes 2.2 ms, and others like it 3.1 to 3.6 ms. The batch is
  cut over 128 replicas, of which one is simulated, with the seconds of its exchanges: the reduction
  of gradients and STEP are left out, and so is memory, which needs the sharded optimizer of all
  replicas.

``python benchmarks/published_dualpipe.py`` prints the tables and writes them, in a few seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _machine import ROOT, publish, table

import pipesim as ps
from pipesim.models.routing import reached
from pipesim.ops import Op

N_GPUS, N_STAGES, EXPERT_PARALLEL, GPUS_PER_NODE = 2048, 16, 64, 8
BATCH, TOKENS = 15_360, 4096
N_MICROBATCHES = BATCH * N_STAGES // N_GPUS
PUBLISHED_HOURS = 180e3
#: Milliseconds of a pair, of its compute, and of its dispatches and combines; share beside compute.
PUBLISHED_PAIR = (129.0, 124.3, 80.5, 0.96)
#: Bytes a second of NVLink and of InfiniBand; latencies as in `pipesim.Network.preset`.
NVLINK, INFINIBAND, PORT_LATENCY, NIC_LATENCY = 160e9, 50e9, 3.4e-6, 14e-6
#: Bytes a second that DeepEP reaches, and the share of multiprocessors that it takes.
DISPATCH, COMBINE, LOST = 51e9, 50e9, 20 / 132
#: 61 layers; the first 3 have no experts, and the last stage has the LM head. A stage of 4 experts.
LAYERS = (4, 3, 3, *(4,) * 12, 3)
MIDDLE = 5
#: A scale of 4 bytes for each 128 elements in FP8 (section 3.3.2).
FP8 = 1 + 4 / 128
MODEL = ps.Transformer.preset("deepseek_v3", bytes_per_gradient=4)


class Way(NamedTuple):
    """Settings of costs; and whether exchanges are those of DeepEP, which slow compute."""

    settings: dict[str, Any]
    has_deepep: bool = False


_EXCHANGE = {"expert_exchange": "hierarchical", "dispatch_element_bytes": FP8}
_FP8 = {**_EXCHANGE, "precision": "fp8", "framework": ps.Framework(attention_kernel="fa3")}
WAYS = {
    "each expert, BF16": Way({}),
    "each node once, BF16": Way({"expert_exchange": "hierarchical"}),
    "each node once, FP8 to experts": Way(_EXCHANGE),
    "the same; products in FP8, FlashAttention-3": Way(_FP8),
    "the same; DeepEP on 20 multiprocessors": Way(_FP8, has_deepep=True),
}


def stage_costs(way: Way) -> ps.Costs:
    """Return the costs of the 16 stages, with the seconds of an exchange between 8 nodes.

    Neighbours of the pipeline are on different nodes.
    """
    nodes = ps.Nodes(
        GPUS_PER_NODE, PORT_LATENCY, NVLINK, NIC_LATENCY, INFINIBAND, n_nics=GPUS_PER_NODE
    )
    costs = MODEL.costs(
        LAYERS, gpu="h800", microbatch_size=1, expert_parallel=EXPERT_PARALLEL,
        flash_attention=True, fused_loss=True, network=ps.Network(nodes=nodes), **way.settings,
    )  # fmt: skip
    pairs = ps.Nodes(1, nic_latency=NIC_LATENCY, nic_bandwidth=INFINIBAND)
    costs = replace(costs, network=ps.Network(nodes=pairs), workload=None)  # no limit of memory
    if not way.has_deepep:
        return costs
    n_nodes = EXPERT_PARALLEL // GPUS_PER_NODE
    copies = n_nodes * reached(MODEL, MODEL.n_experts // n_nodes) * TOKENS * MODEL.hidden_size
    return replace(
        costs, exchange_dispatch=FP8 * copies / DISPATCH, exchange_combine=2 * copies / COMBINE
    )


def without_exchanges(costs: ps.Costs) -> ps.Costs:
    """Return costs whose exchanges take no time."""
    return replace(costs, exchange_dispatch=0.0, exchange_combine=0.0)


def simulated(schedule: ps.Schedule, costs: ps.Costs, way: Way) -> ps.Timeline:
    """Return the timeline with exchanges as tasks, beside which compute may lose its share."""
    graph = ps.lower(schedule, step="none", expert_layers=costs.expert_layers)
    tasks = costs.of(graph)
    lost = np.where(graph.kinds.op == Op.ALL_TO_ALL, LOST * way.has_deepep, 0.0)
    tasks = replace(tasks, table=tasks.table._replace(overlap_cost=lost))
    return ps.simulate(graph, tasks)


def pair(costs: ps.Costs, way: Way) -> tuple[float, float, float, float]:
    """Return the values of `PUBLISHED_PAIR` of a pair among many on one device."""
    fields = ("forward", "backward", "expert_layers", "exchange_dispatch", "exchange_combine")
    own = {name: float(costs.per_stage(name, N_STAGES)[MIDDLE]) for name in fields}
    assert costs.segments is not None
    stage = ps.Costs(**own, segments=[costs.segments[MIDDLE]])
    forwards, backwards = ([ps.Action(0, op, k) for k in range(4)] for op in (ps.Op.F, ps.Op.B))
    pairs = [ps.scheduling.Overlapped(*x) for x in zip(forwards[1:], backwards, strict=False)]
    schedule = ps.Schedule.from_orders([[forwards[0], *pairs, backwards[-1]]])
    timeline = simulated(schedule, stage, way)
    graph = timeline.graph
    begins = [timeline.start[(graph.op == Op.F) & (graph.microbatch == k)].min() for k in (2, 3)]
    start, end = (np.clip(times, *begins) for times in (timeline.start, timeline.end))
    moves = graph.op == Op.ALL_TO_ALL
    moments = np.unique([start, end])
    middle, lasts = (moments[1:] + moments[:-1]) / 2, np.diff(moments)
    busy, moving = (
        ((start[rows, None] < middle) & (middle < end[rows, None])).any(axis=0)
        for rows in (~moves, moves)
    )
    hidden = lasts[busy & moving].sum() / lasts[moving].sum()
    compute, exchange = (1e3 * float(lasts[x].sum()) for x in (busy, moving))
    return 1e3 * float(begins[1] - begins[0]), compute, exchange, float(hidden)


def step(costs: ps.Costs, way: Way, *, as_tasks: bool) -> float:
    """Return the seconds of a replica's step, with exchanges as tasks or as a part of F and B."""
    schedule = ps.schedule("dualpipe", N_STAGES, N_MICROBATCHES)
    if as_tasks:
        return simulated(schedule, costs, way).makespan
    return ps.simulate(ps.lower(schedule, step="none"), costs).makespan


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
    for name, way in WAYS.items():
        costs = stage_costs(way)
        exposed, hidden = (step(costs, way, as_tasks=as_tasks) for as_tasks in (False, True))
        free = step(without_exchanges(costs), way, as_tasks=False)
        ends = [costs.per_stage(f"exchange_{x}", N_STAGES)[-1] for x in ("dispatch", "combine")]
        rows.append([
            name, *(f"{1e3 * x:.2f}" for x in ends), *(f"{x:.1f}" for x in ratios(costs)),
            *(f"{x:.1f}" for x in (exposed, hidden, free)),
            f"{(exposed - hidden) / (exposed - free):.0%}",
            f"{gpu_hours(hidden) / 1e3:.0f}", f"{gpu_hours(hidden) / PUBLISHED_HOURS - 1:+.0%}",
        ])  # fmt: skip
    return rows


def pair_rows() -> list[list[str]]:
    """Return the row of the trace, and a row for each way to exchange tokens."""
    rows = []
    pairs = {name: pair(stage_costs(way), way) for name, way in WAYS.items()}
    for name, (seconds, *others, hidden) in {"measured": PUBLISHED_PAIR, **pairs}.items():
        error = f"{seconds / PUBLISHED_PAIR[0] - 1:+.1%}" if name in pairs else ""
        rows.append([name, *(f"{x:.1f}" for x in (seconds, *others)), f"{hidden:.0%}", error])
    return rows


def bubble_rows() -> list[list[str]]:
    """Return bubbles of even stages without messages, and by the formulas of table 2."""
    costs = without_exchanges(stage_costs(Way({})))
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
    of_pair = [
        "a token is sent to", "pair (ms)", "compute (ms)", "exchanges (ms)", "beside compute",
        "error",
    ]  # fmt: skip
    return [
        "A pair of F and B of 4 layers with experts on one of 64 H800, one sequence of 4,096 "
        "tokens;",
        "exchanges: seconds of dispatch and combine, without waits for counts (measured: 34.0 ms).",
        "",
        *table(of_pair, pair_rows(), 1),
        "",
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

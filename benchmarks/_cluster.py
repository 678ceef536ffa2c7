"""Llama 3 405B on 16,384 GPUs for ``benchmarks/cluster_step.py``: model, network, and one step.

Sizes are those of "The Llama 3 Herd of Models", arXiv 2407.21783: table 3 (the model), table 4
(how it is spread), section 3.3.2 (one layer less on the first and on the last stage).

Units. A device of the simulation is a tensor-parallel group of 8 GPUs, which is one DGX node.
Bytes of ``ps.Transformer.costs`` are those of one GPU of the group, so bandwidth must be that of
one GPU's NIC, 50 GB/s: all 8 GPUs send and reduce their shares at the same time, each through its
own NIC. Bytes and bandwidth of the whole node, 8 times each, give the same seconds; mixing the two
would be wrong by a factor of 8. ``Network.preset("dgx_h100", 1.0, 8)`` is like that.

All-reduce of a stage of 8 layers, by hand: a layer has ``h(2h + 2k) + 3hf + 2h`` = 3.188e9
parameters (h = 16384, k = 1024, f = 53248), so a GPU brings 8 layers / 8 GPUs * 2 bytes =
6.375e9 bytes, and a ring of 128 takes ``2 * 127/128 * 6.375e9 / 50e9 + 2 * 127 * 14e-6`` =
0.2530 + 0.0036 = 0.2566 s.

How far that is from the paper's run. Rings need no more than there is: 16 stages * 8 GPUs = 128
rings of 50 GB/s leave a pod of 3,072 GPUs, 6.4 TB/s, where its share of the oversubscribed layer
(1:7, section 3.3.1) is 3072 * 50e9 / 7 = 21.9 TB/s, if each ring leaves a pod once. Bytes are too
few: the paper reduces and scatters gradients in 32 bits and gathers weights in 16, 4 + 2 bytes
where an all-reduce in 16 bits moves 2 + 2. And it overlaps them with the backward; here a stage's
all-reduce follows its last backward, in one piece.
"""

from __future__ import annotations

import importlib
import json
import sys
from time import perf_counter
from typing import Any

import _machine as machine

TENSOR_PARALLEL, N_STAGES, N_REPLICAS, BATCH = 8, 16, 128, 2048
N_LAYERS, SEQUENCE = 126, 8192
#: One layer less on the first stage and on the last.
LAYERS = (7, *[8] * (N_STAGES - 2), 7)
#: FLOP/s that a GPU is assumed to reach inside a forward or a backward: the input.
RATE = 400e12
#: Of an H100 SXM in bfloat16, without sparsity: half of the 1,979e12 of NVIDIA's data sheet.
PEAK = 989.5e12
STEP_PARTS = ("imports", "costs", "schedule", "lower", "simulate", "metrics")


def llama(ps: Any) -> Any:
    """Return the model of table 3."""
    return ps.Transformer(
        hidden_size=16384,
        n_layers=N_LAYERS,
        n_heads=128,
        n_kv_heads=8,
        ffn_size=53248,
        sequence_length=SEQUENCE,
        vocabulary_size=128256,
        gated_mlp=True,
        biases=False,
        learned_positions=False,
        dropout=False,
        tied_embeddings=False,
    )


def network(ps: Any, kind: str) -> Any:
    """Return what is between nodes of one device each.

    ``"nics"``: one NIC each way a device, which its messages in both directions of the pipeline
    share. ``"links"``: the same speed, one link for each pair, so that none is ever shared.
    """
    preset = ps.Network.preset("dgx_h100", 1.0, gpus_per_device=TENSOR_PARALLEL)
    if kind == "links":
        return ps.Network(latency=preset.nodes.nic_latency, bandwidth=preset.nodes.nic_bandwidth)
    return preset


def costs(ps: Any, kind: str) -> Any:
    """Return seconds of the model's FLOPs at `RATE`; micro-batches of one sequence.

    Seconds without recompute, as in the paper; FlashAttention keeps no softmax.
    """
    model = llama(ps)
    options = {
        "microbatch_size": 1,
        "flops_per_second": RATE,
        "tensor_parallel": TENSOR_PARALLEL,
        "sequence_parallel": True,
        "network": network(ps, kind),
    }
    return model.costs(LAYERS, flash_attention=True, **options)


def graph(ps: Any, n_replicas: int = N_REPLICAS, batch: int = BATCH) -> Any:
    """Return the tasks of one step of 1F1B."""
    return ps.lower(ps.schedule("1f1b", N_STAGES, batch // n_replicas), n_replicas=n_replicas)


def one_step(kind: str) -> dict[str, float]:
    """Be a fresh process on one core: return seconds of each phase, and what came out."""
    machine.pin(1)
    seconds, last = {}, perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = perf_counter()
        seconds[name], last = now - last, now

    ps: Any = importlib.import_module("pipesim")
    lap("imports")
    price = costs(ps, kind)
    lap("costs")
    schedule = ps.schedule("1f1b", N_STAGES, BATCH // N_REPLICAS)
    lap("schedule")
    tasks = ps.lower(schedule, n_replicas=N_REPLICAS)
    lap("lower")
    timeline = ps.simulate(tasks, price)
    lap("simulate")
    values = {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        "memory": float(timeline.memory.peak.max()),
    }
    lap("metrics")
    return {**seconds, **values, "tasks": len(tasks), "devices": tasks.n_devices}


def size_lines(ps: Any, result: dict[str, float]) -> list[str]:
    """Return how large the step is, and its all-reduce by hand."""
    price = costs(ps, "nics")
    gpus = int(result["devices"]) * TENSOR_PARALLEL
    nbytes, n = price.per_stage("parameter_bytes", N_STAGES)[1], N_REPLICAS
    members = range(1, N_STAGES * n, N_STAGES)
    nic = ps.Network.preset("dgx_h100", 1.0).nodes
    by_hand = 2 * (n - 1) / n * nbytes / nic.nic_bandwidth + 2 * (n - 1) * nic.nic_latency
    n_parameters = llama(ps).n_parameters
    return [
        f"{int(result['tasks']):,} tasks on {int(result['devices']):,} devices of 8 GPUs: {gpus:,} "
        f"GPUs; {n_parameters:.4g} parameters",
        f"Layers of each stage: {' '.join(map(str, LAYERS))}",
        f"All-reduce of a stage of 8 layers: {nbytes:.4g} bytes a GPU over {n} replicas, "
        f"{price.network.all_reduce(nbytes, members):.6f} s; by hand {by_hand:.6f} s",
        f"Most memory of a GPU: {result['memory'] / 1e9:.1f} GB, with gradients and optimizer "
        "state whole; the paper shards them",
    ]


if __name__ == "__main__":
    print(json.dumps(one_step(sys.argv[1])))

"""
Sensitivity to the bandwidth between nodes
==========================================

Seconds of a step of GPT-3 175B on two replicas of eight DGX A100, over the bandwidth of their
network adapters. The machine has 25 GB/s a GPU. Tensor parallelism stays within a node.
Interleaved 1F1B and ZB-V have two stages a device, and send more messages (Megatron-LM, Narayanan
et al., SC 2021, `arXiv 2104.04473 <https://arxiv.org/abs/2104.04473>`_, section 2.2). Look at the
left end: these two are the slowest there, and not at the right end.
"""

from dataclasses import replace

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.3))
fig, ax = plt.subplots()
model = ps.Transformer.preset("gpt3_175b")
dgx = ps.Network.preset("dgx_a100", gpus_per_device=8)
bandwidths = [0.8, 1.6, 3.1, 6.3, 12.5, 25, 50]  # GB/s
names = {"1F1B": "1f1b", "Interleaved": "interleaved_1f1b", "ZB-H1": "zb_h1", "ZB-V": "zbv"}
for label, name in names.items():
    schedule, seconds = ps.schedule(name, n_devices=8, n_microbatches=32), []
    graph = ps.lower(schedule, n_replicas=2, shard_optimizer=True, layout="stage_major")
    for bandwidth in bandwidths:
        network = replace(dgx, nodes=replace(dgx.nodes, nic_bandwidth=1e9 * bandwidth))
        costs = model.costs(
            schedule.n_stages, gpu="a100_80gb", microbatch_size=1, tensor_parallel=8,
            sequence_parallel=True, flash_attention=True, network=network, partition="balanced",
        )  # fmt: skip
        seconds.append(ps.simulate(graph, costs).makespan)
    ax.plot(bandwidths, seconds, label=label)
ax.set(xscale="log", xlabel="Bandwidth of an adapter (GB/s)", ylabel="Step (s)", ylim=0)
ax.set_xticks([1, 3, 10, 25, 50], ["1", "3", "10", "25", "50"])
ax.set_xticks([], minor=True)
ax.legend()

"""
Scaling to 16,384 GPUs
======================

MFU of Llama 3 405B on H100s over their number, with 2,048 sequences in every step. A pipeline has
16 stages of 8 GPUs, and the rest are replicas. Crosses are published (Llama Team, `arXiv
2407.21783 <https://arxiv.org/abs/2407.21783>`_, table 4). Costs are those of the data sheet, with
networks at 80 % of their rates. Interleaved stages have one layer each. Memory is not checked.
Look at 1F1B: with more replicas each has fewer micro-batches, and the bubble grows.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.2))
fig, ax = plt.subplots()
model = ps.Transformer.preset("llama3_405b", bytes_per_gradient=4)
network = ps.Network.preset("dgx_h100", gpus_per_device=8, efficiency=0.8)
n_replicas = [8, 16, 32, 64, 128]
kinds = {"1F1B": ("1f1b", [7, *[8] * 14, 7], {}),
         "Interleaved": ("interleaved_1f1b", [0, *[1] * 126, 0], {"n_chunks": 8})}  # fmt: skip
for label, (name, layers, options) in kinds.items():
    costs = model.costs(layers, gpu="h100_sxm", microbatch_size=1, tensor_parallel=8,
                        sequence_parallel=True, flash_attention=True, network=network)  # fmt: skip
    mfu = []
    for n in n_replicas:
        schedule = ps.schedule(name, 16, 2048 // n, **options)
        graph = ps.lower(schedule, n_replicas=n, shard_optimizer=True, layout="stage_major")
        mfu.append(100 * ps.simulate(graph, costs, memory_limit=1e12).mfu())
    ax.plot([128 * n for n in n_replicas], mfu, label=label)
ax.plot([8192, 16384], [43, 41], "x", color="black", markersize=5, label="Published", linestyle="")
ax.set(xscale="log", xlabel="GPUs", ylabel="MFU (%)", ylim=(0, 52))
ax.set_xticks([128 * n for n in n_replicas], ["1,024", "2,048", "4,096", "8,192", "16,384"])
ax.set_xticks([], minor=True)
ax.legend()

"""
Peak memory by its parts
========================

Peak memory of a GPU of each stage of Llama 3 70B, in 1F1B on 64 H100. There are four stages of
eight GPUs (tensor parallelism), and two replicas that share the optimizer. Bytes are those of
Megatron-LM's tensors (Korthikanti et al., MLSys 2023, `arXiv 2205.05198
<https://arxiv.org/abs/2205.05198>`_). Look at the activations (dotted): the first stage has the
most micro-batches in flight.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.3))
fig, ax = plt.subplots()
model = ps.Transformer.preset("llama3_70b", bytes_per_gradient=4)
costs = model.costs(
    4, gpu="h100_sxm", microbatch_size=1, tensor_parallel=8, sequence_parallel=True,
    flash_attention=True, network=ps.Network.preset("dgx_h100", gpus_per_device=8),
)  # fmt: skip
graph = ps.lower(ps.schedule("1f1b", 4, 16), n_replicas=2, shard_optimizer=True)
parts = ps.simulate(graph, costs).memory.breakdown().iloc[:4] / 2**30
bottom = 0 * parts["total"]
looks = {
    "parameters": ("#74B9E7", ""), "gradients": ("#CC79A7", "///"), "optimizer": ("#5C3D00", ""),
    "activations": ("#2A9D78", "..."), "workspace": ("#F0D949", ""),
}  # fmt: skip
for part, (colour, hatch) in looks.items():
    ax.bar(parts.index, parts[part], 0.7, bottom, color=colour, hatch=hatch, ec="0.2", label=part)
    bottom += parts[part]
ax.axhline(80e9 / 2**30, color="black", linestyle="--", linewidth=0.8)
ax.text(3.4, 77, "memory of an H100", ha="right", fontsize=7)
ax.set(xlabel="Stage", ylabel="Memory of a GPU (GiB)", xticks=range(4), ylim=(0, 82))
ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.4)

"""
Offload: memory of a GPU and of the host
========================================

Activations of device 0 over a step of interleaved 1F1B with four devices, with and without
offload of those that live longest (PipeOffload, Wan et al., ICML 2025, `arXiv 2503.01328
<https://arxiv.org/abs/2503.01328>`_). A copy takes as long as half a forward. Look at the peaks:
activations that leave the GPU are on the host, and the step takes no longer.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.2))
fig, ax = plt.subplots()
network = ps.Network(host=ps.HostLink(bandwidth=2e3))
costs = ps.Costs(forward=1e-3, backward=2e-3, activation_bytes=1, network=network)
schedule = ps.schedule("interleaved_1f1b", n_devices=4, n_microbatches=8)
for offload in ("none", "longest:0.5"):
    graph = ps.lower(schedule, offload=offload, step="none", hosts="per_device")
    timeline = ps.simulate(graph, costs)
    held = timeline.memory().query("device == 0")
    ax.step(1e3 * held["time"], held["nbytes"], where="post", marker="", label=f"GPU, {offload}")
held = timeline.memory.host().query("host == 0")
ax.step(1e3 * held["time"], held["nbytes"], where="post", marker="", label="host, longest:0.5")
ax.set(xlabel="Time (ms)", ylabel="Chunks of micro-batches", xlim=0, ylim=0)
ax.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))

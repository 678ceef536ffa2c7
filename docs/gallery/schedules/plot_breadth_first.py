"""
Breadth-first: reductions hide behind backwards
===============================================

Two replicas of four devices with two chunks each; rows are those of the first replica. Schedules
are those of Breadth-First Pipeline Parallelism (Lamy-Poirier, MLSys 2023, `arXiv 2211.05953
<https://arxiv.org/abs/2211.05953>`_), with reductions of gradients in thin lanes. Breadth-first
runs all micro-batches of a chunk before the next chunk, and so the gradients of the last chunk
are complete early. Look at the reduction of chunk 1: all backwards of chunk 0 run beside it, and
in interleaved 1F1B (depth-first) only half of them.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.4))
fig, axes = plt.subplots(2, 1, sharex=True)
network = ps.Network(bandwidth=1.0)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.5, parameter_bytes=12, network=network)
names = {"Breadth-first": "looped_bfs", "Depth-first (interleaved 1F1B)": "interleaved_1f1b"}
for ax, (title, name) in zip(axes, names.items(), strict=True):
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8, n_chunks=2)
    timeline = ps.simulate(ps.lower(schedule, n_replicas=2), costs)
    title = f"{title}: {timeline.makespan:g} s"
    timeline.plot(ax=ax, transfers=True, title=title, legend=ax is axes[0])
    ax.set_ylim(3.6, -0.5)
axes[0].set_xlabel("")

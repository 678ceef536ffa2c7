"""
Data parallel: when gradients are reduced
=========================================

A step of two replicas, each a pipeline of three devices; rows are those of one replica. Gradients
are reduced once at the end, once in buckets that begin during the last backward (PyTorch
Distributed, Li et al., VLDB 2020, `arXiv 2006.15704 <https://arxiv.org/abs/2006.15704>`_, section
3.2), or after every micro-batch. Look at device 0: only buckets hide a part of the last
reduction. Reductions of every micro-batch move four times the bytes, and the step is no shorter.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=4.2))
fig, axes = plt.subplots(3, 1, sharex=True)
schedule = ps.schedule("1f1b", n_devices=3, n_microbatches=4)
network = ps.Network(bandwidth=1.0)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.4, parameter_bytes=1.6, network=network)
ways = {"last": "once", "bucketed": "in four buckets", "every": "after every micro-batch"}
for ax, (grad_sync, way) in zip(axes, ways.items(), strict=True):
    graph = ps.lower(schedule, n_replicas=2, grad_sync=grad_sync, n_buckets=4)
    timeline = ps.simulate(graph, costs)
    title = f"Gradients reduced {way}: {timeline.makespan:.1f} s"
    timeline.plot(ax=ax, transfers=True, title=title, legend=ax is axes[0])
    ax.set_ylim(2.6, -0.5)
    ax.set_xlabel("" if ax is not axes[-1] else ax.get_xlabel())

"""
Sharded parameters: gathers and reductions
==========================================

Two replicas of two devices share their parameters, as in FSDP and ZeRO-3 (Rajbhandari et al., SC
2020, `arXiv 1910.02054 <https://arxiv.org/abs/1910.02054>`_); rows are those of one replica.
UNSHARD gathers the parameters of a stage on a stream of its own. With "every" they are freed
after each use, and with "step" they stay until the end of the step. Titles have the peak memory
of a device, in parameters of a stage and with activations of a fifth of that. Look at the lanes:
freed parameters are gathered again beside the compute of another micro-batch.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.2))
fig, axes = plt.subplots(2, 1, sharex=True)
schedule = ps.schedule("interleaved_1f1b", n_devices=2, n_microbatches=4, n_chunks=2)
network = ps.Network(bandwidth=1.0)
sizes = {"parameter_bytes": 1, "optimizer_bytes": 2, "activation_bytes": 0.2}
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.3, **sizes, network=network)
for ax, kept in zip(axes, ("every", "step"), strict=True):
    graph = ps.lower(schedule, n_replicas=2, shard_parameters=kept)
    timeline = ps.simulate(graph, costs)
    peak = timeline.peak_memory.max()
    title = f'shard_parameters="{kept}": {timeline.makespan:.1f} s, peak {peak:.1f}'
    timeline.plot(ax=ax, transfers=True, title=title, legend=ax is axes[0])
    ax.set_ylim(1.6, -0.5)
axes[0].set_xlabel("")

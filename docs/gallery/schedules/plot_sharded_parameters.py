"""
Sharded parameters: gathers and reductions
==========================================

Two replicas of two devices share their parameters, as in FSDP and ZeRO-3 (Rajbhandari et al., SC
2020, `arXiv 1910.02054 <https://arxiv.org/abs/1910.02054>`_); rows are those of one replica.
Parameters of a stage are gathered in the thin lane, on a separate stream. They stay until the end
of the step, or are freed after each use. Look at the gaps of device 0: freed parameters must be
gathered again, and a prefetch of one task hides only a part of that.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.0))
fig, axes = plt.subplots(2, 1, sharex=True)
schedule = ps.schedule("interleaved_1f1b", n_devices=2, n_microbatches=4, n_chunks=2)
network = ps.Network(bandwidth=1.0)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.5, parameter_bytes=1, network=network)
steps = {}
for kept in ("step", "every"):
    graph = ps.lower(schedule, n_replicas=2, shard_parameters=kept)
    steps[kept] = ps.simulate(graph, costs)
for ax, (kept, step) in zip(axes, steps.items(), strict=True):
    n_gathers = (step.frame.query("device == 0")["op"] == "UNSHARD").sum()
    way = {"step": "kept for the step", "every": "freed after each use"}[kept]
    title = f"Parameters {way}: {step.makespan:.1f} s, {n_gathers} gathers a device"
    step.plot(ax=ax, transfers=True, title=title, legend=ax is axes[0])
    ax.set_ylim(1.6, -0.5)
axes[0].set_xlabel("")

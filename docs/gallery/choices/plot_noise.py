"""
Noise: distribution of the step
===============================

Cumulative shares of 200 simulated steps by their slowdown, for 1, 4 and 16 replicas of a 1F1B
pipeline with 8 devices and 16 micro-batches. Devices differ by 1 % (standard deviation), and
tasks by 3 %. All replicas wait for the slowest in the reduction of gradients. Look at the
medians: more replicas move them to the right, and make the curves steeper.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot
from pipesim.simulation import LogNormal, Normal

plt.rcParams.update(plot.paper_style(columns=1, height=2.1))
fig, ax = plt.subplots()
schedule = ps.schedule("1f1b", n_devices=8, n_microbatches=16)
costs = ps.Costs(forward=1e-2, backward=2e-2)
noise = ps.Noise(device=Normal(0.01), task=LogNormal(0.03), seed=0)
for n_replicas in (1, 4, 16):
    graph = ps.lower(schedule, n_replicas=n_replicas)
    many = ps.simulate_many(graph, costs, noise, 200, progress=False)
    slowdown = 100 * (np.sort(many.makespan) / many.quiet_makespan - 1)
    share = 100 * (np.arange(200) + 0.5) / 200
    ax.plot(slowdown, share, marker="", label=f"{n_replicas} replica{'s' * (n_replicas > 1)}")
ax.set(xlabel="Slowdown of the step (%)", ylabel="Steps (%)", ylim=(0, 100))
ax.legend()

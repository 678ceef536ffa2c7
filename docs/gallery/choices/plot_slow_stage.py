"""
A slow device, by its place
===========================

Slowdown of a step if one of eight devices is 10 % slower, over the device that is slow. There are
32 micro-batches. 1F1B loses least, and least of all at its first device, which waits for
gradients anyway. Look at ZB-H1 and ZB-V: they idle less, so that less of the delay is hidden.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.1))
fig, ax = plt.subplots()
costs = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1)
for label, name in {"GPipe": "gpipe", "1F1B": "1f1b", "ZB-H1": "zb_h1", "ZB-V": "zbv"}.items():
    graph = ps.lower(ps.schedule(name, n_devices=8, n_microbatches=32), step="none")
    quiet = ps.simulate(graph, costs).makespan
    slower = []
    for device in range(8):
        noise = ps.Noise(slow_devices={device: 1.1}, seed=0)
        slower.append(100 * (ps.simulate(graph, costs, noise=noise).makespan / quiet - 1))
    ax.plot(slower, label=label)
ax.set(xlabel="Slow device", ylabel="Slowdown of the step (%)", ylim=(0, 12), xticks=range(8))
ax.legend(ncols=2)

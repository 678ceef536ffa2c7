"""
Bubble against the number of micro-batches
==========================================

Idle share of eight devices over the number of micro-batches, for five schedules. Markers are
simulations, and lines are the closed forms that the registry of schedules holds. For 1F1B that is
``(p - 1)/(m + p - 1)``; Megatron-LM (Narayanan et al., SC 2021, `arXiv 2104.04473
<https://arxiv.org/abs/2104.04473>`_, section 2.2) has ``(p - 1)/m``, of the time without bubble.
F, I and W take equally long. Look at the markers: they lie on their lines.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.5))
fig, ax = plt.subplots()
costs = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1)
names = {"1F1B": "1f1b", "Chimera": "chimera", "Interleaved": "interleaved_1f1b", "ZB-H1": "zb_h1",
         "ZB-V": "zbv"}  # fmt: skip
counts = [8, 16, 32, 64, 128]
forms = {m: ps.schedules(n_devices=8, n_microbatches=m)["bubble"] for m in counts}
for label, name in names.items():
    graphs = [ps.lower(ps.schedule(name, 8, m), step="none") for m in counts]
    simulated = [100 * ps.simulate(graph, costs).bubble_fraction for graph in graphs]
    (points,) = ax.plot(counts, simulated, linestyle="", label=label)
    lines = [100 * forms[m][name] for m in counts]
    ax.plot(counts, lines, color=points.get_color(), linestyle="-", marker="", zorder=1)
    ax.set_prop_cycle(plt.rcParams["axes.prop_cycle"][len(ax.lines) // 2 :])
ax.set(xscale="log", yscale="log", xlabel="Micro-batches", ylabel="Bubble (%)")
ax.set_xticks(counts, counts, minor=False)
ax.set_xticks([], minor=True)
ticks = [1, 2, 5, 10, 20, 50]
ax.set_yticks(ticks, ticks)
ax.set_yticks([], minor=True)
ax.legend(handlelength=1)

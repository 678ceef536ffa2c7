"""
Activations of each device
==========================

Peak activations of each of eight devices, in micro-batches through an eighth of the model, for 16
micro-batches. 1F1B fills the first device and leaves the last one nearly empty. Schedules in a V
are even, or nearly so (Qi et al., NeurIPS 2024, `arXiv 2405.15362
<https://arxiv.org/abs/2405.15362>`_), and so is DualPipe, which has two directions. Look at the
largest value of each curve: it decides whether a step fits.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.2))
fig, ax = plt.subplots()
costs = ps.Costs(forward=1, input_grad=1, weight_grad=1, activation_bytes=1, weight_grad_bytes=1)
names = {"1F1B": "1f1b", "Interleaved": "interleaved_1f1b", "ZB-V": "zbv", "DualPipe": "dualpipe",
         "V-Half": "v_half", "V-Min": "v_min"}  # fmt: skip
for label, name in names.items():
    schedule = ps.schedule(name, n_devices=8, n_microbatches=16)
    graph = ps.lower(schedule, step="none")
    share = 8 / schedule.n_stages
    ax.plot(ps.simulate(graph, costs).memory.peak * share, label=label)
ax.set(xlabel="Device", ylabel="Activations (micro-batches)", ylim=(0, 12.5), xticks=range(8))
ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1.0)

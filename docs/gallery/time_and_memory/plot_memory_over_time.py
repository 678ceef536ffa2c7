"""
Memory over time of five schedules
==================================

Activations that the first device holds, for four devices and eight micro-batches of one model.
Forward, input gradient and weight gradient take equally long, and activations are counted in
micro-batches through a quarter of the model. GPipe holds all micro-batches, and 1F1B and ZB-H1 as
many as there are devices; V-Half and V-Min hold less (Qi et al., NeurIPS 2024, `arXiv 2405.15362
<https://arxiv.org/abs/2405.15362>`_). Look at where each curve ends.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.2))
fig, ax = plt.subplots()
costs = ps.Costs(
    forward=2, backward=4, input_grad=2, weight_grad=2, activation_bytes=1, weight_grad_bytes=1
)
names = {"GPipe": "gpipe", "1F1B": "1f1b", "ZB-H1": "zb_h1", "V-Half": "v_half", "V-Min": "v_min"}
for label, name in names.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    graph = ps.lower(schedule, step="none")
    held = ps.simulate(graph, costs.in_chunks(schedule.placement)).memory().query("device == 0")
    ax.step(held["time"], held["nbytes"], where="post", marker="", label=label)
ax.set(xlabel="Time (s)", ylabel="Activations (micro-batches)", xlim=0, ylim=(0, 8.5))
ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))

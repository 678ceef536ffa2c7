"""
Controllable memory: V-Min, V-Half, V-ZB
========================================

Eight micro-batches on four devices of two stages each, placed in a V. This is figure 4 of
Pipeline Parallelism with Controllable Memory (Qi et al., NeurIPS 2024, `arXiv 2405.15362
<https://arxiv.org/abs/2405.15362>`_). Titles have the activations of the fullest device, as a
share of those of 1F1B. Look at the distance of a forward and its backward on device 0: it grows
from V-Min to V-ZB, and so does memory.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(
    forward=1, input_grad=1, weight_grad=1, activation_bytes=1 / 2, weight_grad_bytes=1 / 2
)
panels = {}
for title, name in {"V-Min": "v_min", "V-Half": "v_half", "V-ZB": "zbv"}.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    share = timeline.memory.peak.max() / 4  # 1F1B holds four micro-batches
    panels[f"{title}: {share:.0%} of the memory of 1F1B, {timeline.makespan:g} s"] = timeline
fig = plot.panels(panels)

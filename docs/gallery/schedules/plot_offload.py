"""
PipeOffload: copies to host memory
==================================

Interleaved 1F1B on two devices. Activations that live longest go to host memory and come back in
time, as in PipeOffload (Wan et al., ICML 2025, `arXiv 2503.01328
<https://arxiv.org/abs/2503.01328>`_). Copies run on streams of their own, one for each direction,
in thin lanes. Titles have the activations of the fullest device, in micro-batches of a stage.
Look at the reloads: each starts one task before the backward that needs it.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
schedule = ps.schedule("interleaved_1f1b", n_devices=2, n_microbatches=6, n_chunks=2)
network = ps.Network(host=ps.HostLink(bandwidth=1.0))
costs = ps.Costs(forward=1, backward=2, activation_bytes=1, network=network)
panels = {}
for offload in ("none", "longest:0.5"):
    graph = ps.lower(schedule, offload=offload, step="none")
    timeline = ps.simulate(graph, costs)
    peak = timeline.memory.peak.max()
    panels[f'offload="{offload}": {timeline.makespan:g} s, peak {peak:g}'] = timeline
fig = plot.panels(panels, transfers=True)

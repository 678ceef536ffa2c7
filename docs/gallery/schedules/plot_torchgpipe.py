"""
torchgpipe: recompute, and streams for copies
=============================================

GPipe on three devices with recompute of all but the last micro-batch, and messages that take
time. The mechanisms are those of torchgpipe (Kim et al., `arXiv 2004.09910
<https://arxiv.org/abs/2004.09910>`_, sections 2 and 3), with made-up costs. Above, messages are
on the streams that compute. Below, copy streams carry them, in thin lanes under each device. Look
at the recomputes (hatched) below: they run while the gradient is still on its way.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
schedule = ps.schedule("gpipe", n_devices=3, n_microbatches=4)
network = ps.Network(latency=0.1, bandwidth=2)
costs = ps.Costs(forward=1, backward=2, output_bytes=1, network=network)
variants = {
    "One stream": {"overlap": False, "recompute_waits": True},
    "Copy streams": {"streams": "per_peer"},
}
panels = {}
for title, options in variants.items():
    graph = ps.lower(schedule, recompute="except_last", step="none", **options)
    timeline = ps.simulate(graph, costs)
    panels[f"{title}: {timeline.makespan:.1f} s"] = timeline
fig = plot.panels(panels, transfers=True)

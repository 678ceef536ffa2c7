"""
torchgpipe: four panels of its ablation
=======================================

GPipe on four devices, with recompute of all but the last micro-batch and a skip from the first
device to the last one. The mechanisms are those of torchgpipe (Kim et al., `arXiv 2004.09910
<https://arxiv.org/abs/2004.09910>`_, section 3), with made-up costs. From top to bottom:

- Autograd alone chooses the order of the backward: here, that of a CPU.
- The order of clock cycles, by fork and join. Messages are still on the streams that compute: both
  ends of a message wait for each other.
- Copy streams, in thin lanes under each device, carry messages beside compute. Recomputes (hatched)
  run while a gradient is on its way.
- Portals send the skip straight to the last device: a third of the messages is gone.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
network = ps.Network(latency=0.05, bandwidth=2)
costs = ps.Costs(forward=1, backward=2, output_bytes=1, skip_bytes=1, network=network)
by_autograd = ps.schedule("gpipe", 4, 6, backward_order="autograd")
in_order = ps.schedule("gpipe", 4, 6)
default_streams = {"overlap": False, "rendezvous": True, "recompute_waits": True}
rows = {
    "Baseline": (by_autograd, {**default_streams, "portals": False}),
    "+ order": (in_order, {**default_streams, "portals": False}),
    "+ copy streams": (in_order, {"portals": False}),
    "+ portals": (in_order, {}),
}
panels = {}
for title, (schedule, options) in rows.items():
    graph = ps.lower(schedule, recompute="except_last", step="none", skips=[(0, 3)], **options)
    timeline = ps.simulate(graph, costs)
    panels[f"{title}: {timeline.makespan:.1f} s"] = timeline
fig = plot.panels(panels, transfers=True, numbers=False)

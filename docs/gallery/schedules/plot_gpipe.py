"""
GPipe: a mini-batch whole, and in micro-batches
===============================================

One mini-batch on four devices: as a whole, and in four micro-batches. This is figure 2 (b, c) of
GPipe (Huang et al., NeurIPS 2019, `arXiv 1811.06965 <https://arxiv.org/abs/1811.06965>`_). Here a
backward takes twice as long as a forward, and the titles have the share of idle time. Look at the
backwards: the last micro-batch is the first, since its activations are newest.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
panels = {}
for title, name, n_microbatches in (("One batch", "naive", 1), ("Micro-batches", "gpipe", 4)):
    graph = ps.lower(ps.schedule(name, n_devices=4, n_microbatches=n_microbatches))
    share = 4 / n_microbatches  # of the mini-batch in a micro-batch, in quarters
    costs = ps.Costs(forward=share, backward=2 * share, optimizer_step=1)
    timeline = ps.simulate(graph, costs)
    panels[f"{title}: {timeline.bubble_fraction:.0%} idle"] = timeline
fig = plot.panels(panels)

"""
Chimera: two pipelines in opposite directions
=============================================

Four micro-batches on four devices: 0 and 1 go down, 2 and 3 go up. This is figure 3 of Chimera
(Li and Hoefler, SC 2021, `arXiv 2107.06925 <https://arxiv.org/abs/2107.06925>`_), with a backward
twice as long as a forward, above 1F1B. Each device has a stage of both directions, so that each
stage has two copies of its weights. Look at the middle: one direction runs where 1F1B waits for
the other.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(forward=1, backward=2)
panels = {}
for title, name in {"Chimera": "chimera", "1F1B": "1f1b"}.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=4)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    panels[f"{title}: {timeline.makespan:g} s, {timeline.bubble_fraction:.1%} idle"] = timeline
fig = plot.panels(panels, columns=1)

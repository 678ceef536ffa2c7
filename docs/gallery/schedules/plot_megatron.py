"""
Megatron-LM: GPipe, 1F1B, interleaved 1F1B
==========================================

Eight micro-batches on four devices. These are figures 3 and 4 of Megatron-LM (Narayanan et al.,
SC 2021, `arXiv 2104.04473 <https://arxiv.org/abs/2104.04473>`_), on one time axis. The model is
the same in all: a chunk of interleaved 1F1B takes half as long as a stage. GPipe and 1F1B take
equally long. Look at the warm-up of interleaved 1F1B: its bubble is half as long.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
names = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved 1F1B": "interleaved_1f1b"}
panels = {}
for title, name in names.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    costs = ps.Costs(forward=2, backward=4).in_chunks(schedule.placement)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    panels[f"{title}: {timeline.bubble_fraction:.1%} idle"] = timeline
fig = plot.panels(panels)

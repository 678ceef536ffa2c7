"""
Slices of sequences: Seq1F1B and SlimPipe
=========================================

Four sequences on four devices. They are whole in 1F1B, and in two slices in Seq1F1B (Sun et al.,
NAACL 2025, `arXiv 2406.03488 <https://arxiv.org/abs/2406.03488>`_, figure 1). SlimPipe (`arXiv
2504.14519 <https://arxiv.org/abs/2504.14519>`_) has four slices, and two chunks a device. Numbers
are those of slices, and all slices cost the same here. Titles have the activations of device 0.
Look at the backwards: of a sequence, the last slice is the first.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
variants = {
    "1F1B": ("1f1b", 1, {}),
    "Seq1F1B": ("seq1f1b", 2, {"n_slices": 2}),
    "SlimPipe": ("slimpipe", 4, {"n_slices": 4}),
}
panels = {}
for title, (name, n_slices, options) in variants.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=4 * n_slices, **options)
    costs = ps.Costs(forward=4 / n_slices, backward=8 / n_slices, activation_bytes=1 / n_slices)
    costs = costs.in_chunks(schedule.placement)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    held = f"{timeline.memory.peak[0]:.3g} sequences held"
    panels[f"{title}: {timeline.bubble_fraction:.1%} idle, {held}"] = timeline
fig = plot.panels(panels)

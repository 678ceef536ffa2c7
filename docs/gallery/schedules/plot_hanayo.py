"""
Hanayo: one wave and two waves
==============================

Four micro-batches on four devices, which they pass down and up in waves. The schedules are those
of Hanayo (Liu et al., SC 2023, `arXiv 2308.15762 <https://arxiv.org/abs/2308.15762>`_); the order
of ready tasks is this library's. A device has two stages for each wave, of a half or a quarter of
its layers. Look at the time axis: more waves shorten warm-up and cool-down, and need more
messages, which take no time here.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
panels = {}
for n_waves in (1, 2):
    schedule = ps.schedule("hanayo", n_devices=4, n_microbatches=4, n_waves=n_waves)
    costs = ps.Costs(forward=2, backward=4).in_chunks(schedule.placement)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    waves = f"{n_waves} wave{'s' * (n_waves > 1)}"
    panels[f"{waves}: {timeline.makespan:g} s, {timeline.bubble_fraction:.1%} idle"] = timeline
fig = plot.panels(panels)

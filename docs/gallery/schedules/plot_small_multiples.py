"""
Nine schedules on one time axis
===============================

Small multiples for a slide: the same four devices, eight micro-batches and layers, in nine
schedules. A backward takes twice as long as a forward, and input and weight gradient as long as a
forward each. The layers of a device are split over its chunks. Titles have the makespan, in
forwards of a device, and the idle share. Look at the right edges.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.6))
names = ("GPipe", "1F1B", "Interleaved 1F1B", "Hanayo", "Chimera", "DualPipeV", "ZB-H1", "ZBV",
         "ZB-H2")  # fmt: skip
fig, axes = plt.subplots(3, 3, sharex=True, sharey=True)
for ax, name in zip(axes.flat, names, strict=True):
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    costs = ps.Costs(1, 2, 1, 1).in_chunks(schedule.placement)
    step = ps.simulate(ps.lower(schedule, step="none"), costs)
    title = f"{name}: {step.makespan:g}, {step.bubble_fraction:.0%} idle"
    step.plot(ax=ax, title=title, legend=False, numbers=False)
for ax in axes[:-1].flat:
    ax.set_xlabel("")
for ax in axes[:, 1:].flat:
    ax.set_ylabel("")

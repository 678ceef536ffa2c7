"""
An order that is proved optimal
===============================

Four stages of unequal length, and memory for four micro-batches on each device: 1F1B, ZB-H1, and
the order that ``ps.optimize`` finds for these costs. The red line is a lower bound: no order of
these tasks takes less. Look at the end of the last panel: it meets the line, which proves the
order optimal.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(
    forward=(2, 3, 3, 5), input_grad=(3, 2, 3, 2), weight_grad=(1, 2, 2, 2), activation_bytes=1
)
order = ps.optimize(ps.Placement.linear(4), 8, costs, memory_limit=4, seconds=5, progress=False)
names = {"1F1B": ps.schedule("1f1b", 4, 8), "ZB-H1": ps.schedule("zb_h1", 4, 8), "Optimized": order}
panels = {}
for title, schedule in names.items():
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs, memory_limit=4)
    panels[f"{title}: {timeline.makespan:g} s"] = timeline
fig = plot.panels(panels)
for ax in fig.axes:
    ax.axvline(order.lower_bound, color="#B22222", linestyle="--", linewidth=1.0, marker="")

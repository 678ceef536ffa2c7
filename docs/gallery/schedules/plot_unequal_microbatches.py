"""
Micro-batches of different length
=================================

1F1B on three devices with six micro-batches, of 5, 1, 4, 2, 6 and 3 units: in this order, and
short ones first. The third panel is a list schedule that takes the longest ready micro-batch.
Titles have the activations of the fullest device, in units. Papers draw equal micro-batches, and
sequences are not equal. Look at the gaps of the first panel: a long micro-batch behind a short
one delays all devices after it.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
lengths = np.array([[5, 1, 4, 2, 6, 3]])
costs = ps.Costs(forward=lengths, backward=2 * lengths, activation_bytes=lengths)
schedule = ps.schedule("1f1b", n_devices=3, n_microbatches=6)
orders = {
    "As they come": schedule,
    "Short ones first": schedule.with_microbatch_order(np.argsort(lengths[0])),
    "Longest ready one": ps.order_by(
        ps.Placement.linear(3), 6, costs, priority="longest_first", split_backward=False
    ),
}
panels = {}
for title, order in orders.items():
    timeline = ps.simulate(ps.lower(order, step="none"), costs)
    held = timeline.memory.peak.max()
    panels[f"{title}: {timeline.makespan:g} s, {held:g} units held"] = timeline
fig = plot.panels(panels)

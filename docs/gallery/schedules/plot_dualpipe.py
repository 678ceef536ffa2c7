"""
DualPipe: two directions
========================

Twenty micro-batches on eight devices, half of them in each direction. This is figure 5 of the
DeepSeek-V3 report (DeepSeek-AI, `arXiv 2412.19437 <https://arxiv.org/abs/2412.19437>`_). A frame
is a forward and a backward that run as one action. It takes as long as both here; in the report
it hides messages. Each device has two stages, and so two copies of its weights exist. Look at the
corners: both ends start at once.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1, overlapped=3)
schedule = ps.schedule("dualpipe", n_devices=8, n_microbatches=20)
timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
ax = timeline.plot(title=f"{timeline.makespan:g} s, {timeline.bubble_fraction:.1%} idle")

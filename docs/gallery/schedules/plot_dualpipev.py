"""
DualPipeV: the same in a V
==========================

Ten micro-batches on four devices, whose two stages lie in a V. This is the figure of DualPipeV in
the `repository of DualPipe <https://github.com/deepseek-ai/DualPipe>`_, with ZB-V (`arXiv
2405.15362 <https://arxiv.org/abs/2405.15362>`_) below it. Both have one copy of the weights.
Pairs of F and B share a frame: they can hide messages of one behind compute of the other. ZB-V
idles less, and pairs nothing. Look at the second half of DualPipeV, where W fills what pairs
leave.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1, overlapped=3)
panels = {}
for title, name in {"DualPipeV": "dualpipev", "ZB-V": "zbv"}.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=10)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    panels[f"{title}: {timeline.makespan:g} s"] = timeline
fig = plot.panels(panels)

"""
Experts: exchanges behind the other micro-batch
===============================================

DualPipeV on two devices, whose stages have one layer with experts each. Tokens go to the experts
and back in exchanges (all-to-all), in the thin lane under each device. The idea is that of figure
4 of the DeepSeek-V3 report (DeepSeek-AI, `arXiv 2412.19437 <https://arxiv.org/abs/2412.19437>`_);
times are made up, and the warm-up is left out. Above, exchanges are parts of F and B. Below, F
and B are cut where tokens leave, and their segments take turns. Look at a frame: the exchange of
one micro-batch runs while the other one computes.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
schedule = ps.schedule("dualpipev", n_devices=2, n_microbatches=4)
costs = ps.Costs(
    forward=3, input_grad=3, weight_grad=2, expert_layers=1, exchange_dispatch=1, exchange_combine=1
)
panels = {}
for title, layers in {"Exchanges exposed": 0, "Exchanges hidden": 1}.items():
    graph = ps.lower(schedule, expert_layers=layers, step="none")
    timeline = ps.simulate(graph, costs)
    panels[f"{title}: {timeline.makespan:g} s"] = timeline
fig = plot.panels(panels, transfers=True)
fig.axes[0].set_xlim(28, 93)  # the panels share their axis

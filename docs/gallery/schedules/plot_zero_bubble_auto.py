"""
Zero Bubble, ordered for measured costs
=======================================

ZB-1p and ZB-2p order tasks for given costs, within the memory of 1F1B and twice that: section 3
of Zero Bubble (Qi et al., ICLR 2024, `arXiv 2401.10241 <https://arxiv.org/abs/2401.10241>`_).
Costs are those that the paper measured for its 1.5B model (table 9), here on four of the eight
devices. Look at W of ZB-2p: it waits in the cool-down, where 1F1B idles.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(
    forward=18.522e-3,
    input_grad=18.086e-3,
    weight_grad=9.337e-3,
    activation_bytes=34 * 2304 + 5 * 24 * 1024,
    weight_grad_bytes=32 * 2304,
    network=ps.Network(latency=0.601e-3),
)
panels = {}
for title, name in {"1F1B": "1f1b", "ZB-1p": "zb_1p", "ZB-2p": "zb_2p"}.items():
    options = {} if name == "1f1b" else {"costs": costs}
    schedule = ps.schedule(name, n_devices=4, n_microbatches=12, **options)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    panels[f"{title}: {1e3 * timeline.makespan:.0f} ms"] = timeline
fig = plot.panels(panels, unit="ms")

"""
Zero Bubble: 1F1B, ZB-H1, ZB-H2
===============================

Eight micro-batches on four devices. These are figures 2 and 3 of Zero Bubble (Qi et al., ICLR
2024, `arXiv 2401.10241 <https://arxiv.org/abs/2401.10241>`_), with F, I and W of one second each;
the optimizer is left out. The backward is split: the weight gradient W, which no other device
needs, fills bubbles. ZB-H1 holds as many activations as 1F1B. ZB-H2 has seven forwards in flight,
and no device idles within its work. One step alone takes ZB-H2 no less time than ZB-H1. Where no
optimizer step waits for all devices (section 4), its next step begins earlier: as soon as the
device that is busy longest has ended, which the titles give.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1)
panels = {}
for title, name in {"1F1B": "1f1b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    work = timeline.frame.groupby("device").agg({"start": "min", "end": "max"})
    longest = (work["end"] - work["start"]).max()
    text = f"{timeline.bubble_fraction:.1%} idle; next step after {longest:g} s at the earliest"
    panels[f"{title}: {timeline.makespan:g} s, {text}"] = timeline
fig = plot.panels(panels)

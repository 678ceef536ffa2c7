"""
Eager 1F1B: more warm-up against latency
========================================

Eight micro-batches on four devices, with messages of half a forward's time. Eager 1F1B (Zhuang et
al., MLSys 2023, `arXiv 2211.05322 <https://arxiv.org/abs/2211.05322>`_) runs twice as many
forwards first as 1F1B. Arrows are outputs and gradients that another device needs. Look at the
steady state: 1F1B waits for a gradient before each backward, and eager 1F1B has forwards to run
meanwhile.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style())
costs = ps.Costs(forward=1, backward=2, network=ps.Network(latency=0.5))
panels = {}
for title, name in {"1F1B": "1f1b", "Eager 1F1B": "eager_1f1b"}.items():
    schedule = ps.schedule(name, n_devices=4, n_microbatches=8)
    timeline = ps.simulate(ps.lower(schedule, step="none"), costs)
    panels[f"{title}: {timeline.makespan:g} s"] = timeline
fig = plot.panels(panels, dependencies=True)

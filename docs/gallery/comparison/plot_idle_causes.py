"""
Idle time by its cause
======================

Every idle second of four devices has one cause, found by following what the device waited for.
Stage 2 is 30 % slower than the others, and messages have a latency. Titles have the idle share.
Papers mostly give one number, the bubble; this splits it. Look at imbalance: split backwards
shorten warm-up and cool-down, and it remains.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.0))
fig, axes = plt.subplots(1, 2, sharex=True, sharey=True)
seconds = (1.0, 1.0, 1.3, 1.0)
costs = ps.Costs(
    forward=seconds, backward=[2 * s for s in seconds], input_grad=seconds, weight_grad=seconds,
    network=ps.Network(latency=0.1),
)  # fmt: skip
steps = {}
for title, name in {"1F1B": "1f1b", "ZB-H1": "zb_h1"}.items():
    graph = ps.lower(ps.schedule(name, n_devices=4, n_microbatches=8), step="none")
    steps[title] = ps.simulate(graph, costs)
for ax, (title, step) in zip(axes, steps.items(), strict=True):
    step.plot.idle(ax=ax, title=f"{title}: {step.bubble_fraction:.1%} idle")
axes[0].set_xlim(0, 1.03 * max(step.idle.max() for step in steps.values()))
axes[1].set_ylabel("")

"""
Published and simulated bubble rates
====================================

Bubble rates of four schedules on eight devices, as published in table 5 of Zero Bubble (Qi et
al., ICLR 2024, `arXiv 2401.10241 <https://arxiv.org/abs/2401.10241>`_), and as simulated from its
measured costs (table 9). A rate is the idle share of the device that takes longest from its first
task to its last. Look at the diagonal: all points lie on it. Those of ZB-2p, whose order is
searched for, are within 0.2 percentage points.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

PROFILES = (  # hidden size, heads, m; us of F, I, W, message; published rates (%), in order
    (2304, 24, 24, (18522, 18086, 9337, 601), (15.85, 10.83, 15.85, 4.33)),
    (4096, 32, 32, (29802, 29428, 19530, 577), (10.45, 5.59, 10.45, 0.22)),
)
plt.rcParams.update(plot.paper_style(columns=1, height=2.4))
fig, ax = plt.subplots()
ax.axline((0, 0), slope=1, color="0.6", linewidth=0.8, linestyle="-", marker="", label="_")
for place, name in enumerate(("ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")):
    published, simulated = [], []
    for hidden, heads, m, microseconds, rates in PROFILES:
        f, i, w, message = (1e-6 * x for x in microseconds)
        held = 34 * hidden + 5 * heads * 1024, 32 * hidden
        costs = ps.Costs(f, None, i, w, activation_bytes=held[0], weight_grad_bytes=held[1],
                         network=ps.Network(latency=message))  # fmt: skip
        options = {"costs": costs} if place > 1 else {}
        order = ps.schedule(name.lower().replace("-", "_"), 8, m, **options)
        step = ps.simulate(ps.lower(order, step="none"), costs)
        spans = step.frame.query("stream == 'compute'").groupby("device")
        span = (spans["end"].max() - spans["start"].min()).max()
        published.append(rates[place])
        simulated.append(100 * (1 - step.busy.max() / span))
    ax.plot(published, simulated, linestyle="", markersize=7 - place, label=name)
ax.set(xlabel="Published bubble (%)", ylabel="Simulated bubble (%)", xticks=range(0, 17, 4))
ax.legend()

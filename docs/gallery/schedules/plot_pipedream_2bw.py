"""
PipeDream-2BW: two weight versions
==================================

Three mini-batches of four micro-batches on four devices, without a flush between them. It shows
the scheme of figure 2 of PipeDream-2BW (Narayanan et al., ICML 2021, `arXiv 2006.09503
<https://arxiv.org/abs/2006.09503>`_), below 1F1B with flushes. Steps of 1F1B follow each other on
one time axis. Look at the borders between mini-batches: with two versions of the weights,
forwards of the next one need not wait for the step of the one before.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=3.0))
fig, (top, bottom) = plt.subplots(2, 1, sharex=True)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.5)
step = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 4)), costs)
double = ps.simulate(ps.lower(ps.schedule("pipedream_2bw", 4, 12, n_batches=3)), costs)
double.plot(ax=bottom, title=f"PipeDream-2BW: three mini-batches in {double.makespan:g} s")
step.plot(ax=top, legend=False, title=f"1F1B: one mini-batch in {step.makespan:g} s, of three")
top.set(xlim=(0, 3 * step.makespan), xlabel="")
for n in (1, 2):
    top.axvspan(n * step.makespan, (n + 1) * step.makespan, ymin=0.02, color="0.93", zorder=0)
    middle = (n + 0.5) * step.makespan
    top.text(middle, 1.5, f"the same for mini-batch {n}", ha="center", va="center")

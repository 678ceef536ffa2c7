"""
PipeDream-2BW: two weight versions
==================================

Three mini-batches of three micro-batches on three devices, with flushes and without. The scheme
below is that of figure 2 of PipeDream-2BW (Narayanan et al., ICML 2021, `arXiv 2006.09503
<https://arxiv.org/abs/2006.09503>`_). It keeps two versions of the weights, so that forwards of
the next mini-batch need not wait for the step of the one before. Look at the optimizer steps
(brown): below, no device idles around them.
"""

from dataclasses import replace

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=2.8))
fig, (top, bottom) = plt.subplots(2, 1, sharex=True)
costs = ps.Costs(forward=1, backward=2, optimizer_step=0.5)
double = ps.simulate(ps.lower(ps.schedule("pipedream_2bw", 3, 9, n_batches=3)), costs)
double.plot(ax=bottom, legend=False, title=f"PipeDream-2BW: {double.makespan:g} s")
step = ps.simulate(ps.lower(ps.schedule("1f1b", 3, 3)), costs)
for n in range(3):  # steps of 1F1B one after the other
    begin = n * step.makespan
    later = replace(step, start=step.start + begin, end=step.end + begin)
    later.plot(ax=top, legend=n == 2, title=f"1F1B with flushes: {later.makespan:g} s")
top.set_xlabel("")

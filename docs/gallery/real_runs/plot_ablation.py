"""
An ablation: measured and predicted
===================================

torchgpipe's ablation on a U-Net (Kim et al., `arXiv 2004.09910
<https://arxiv.org/abs/2004.09910>`_). The baseline runs all recomputes first: this order is
imposed, as that of the paper is not known. The next rows add the order of clock cycles, copy
streams, and portals for skip connections. Four CPU workers on two cores of an AMD EPYC have imposed
times and links, in the proportions of the published model; this project measured them by
``benchmarks/ablation.py``, and the timelines are in ``results/ablation``. The paper's own speeds
are not in the figure. Look at the pairs of bars: gains are predicted with the right size.
"""

import matplotlib.pyplot as plt
import numpy as np

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=1, height=2.0))
fig, ax = plt.subplots()
rows = ["baseline-imposed", "+-dependency", "+-copy-streams", "+-portals"]
for place, (kind, hatch) in enumerate({"predicted": "", "timeline": "///"}.items()):
    steps = [ps.Timeline.load(f"../../../results/ablation/{row}/{kind}.csv") for row in rows]
    milliseconds = [1e3 * step.makespan for step in steps]
    name = "predicted" if kind == "predicted" else "measured"
    bars = ax.bar(np.arange(4) + 0.4 * place, milliseconds, 0.4, hatch=hatch, ec="0.2", label=name)
    ax.bar_label(bars, fmt="%.0f", fontsize=6.5)
labels = ["baseline", "+ order", "+ copy\nstreams", "+ portals"]
ax.set_xticks(np.arange(4) + 0.2, labels)
ax.set(ylabel="Step (ms)", ylim=(0, 690))
ax.legend()

"""
Dependencies of GPipe with recompute
====================================

The task graph of GPipe on three devices, as torchgpipe draws it (Kim et al., `arXiv 2004.09910
<https://arxiv.org/abs/2004.09910>`_, section 2): without recompute with a row a micro-batch
(figure 2 of the paper), then with recompute by clock cycle, a row a device. Solid arrows are data
that a task needs; dashed ones are the order of a device's compute stream. Look at R: it depends on
no gradient, and so may run early. The last micro-batch has none.
"""

import matplotlib.pyplot as plt

import pipesim as ps
from pipesim import plot

plt.rcParams.update(plot.paper_style(columns=2, height=4.8))
fig, (above, below) = plt.subplots(2)
schedule = ps.schedule("gpipe", n_devices=3, n_microbatches=4)
plot.dependencies(ps.lower(schedule, step="none"), ax=above, rows="microbatch")
schedule = ps.schedule("gpipe", n_devices=3, n_microbatches=3)
graph = ps.lower(schedule, recompute="except_last", step="none")
plot.dependencies(graph, ax=below, messages="labels")
